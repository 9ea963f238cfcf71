"""Many tables looked up in one pass: pooled per bag, or one row per id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .._reduction import POOLING, SUM
from .._torch import is_seen
from ..jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from ..jagged.checks import check_contents
from ..jagged.inputs import as_keyed_jagged_tensor
from ..jagged.keyed_tensor import unchecked
from ..typing import GradMode
from .collection import Collection
from .configs import EmbeddingBagConfig, EmbeddingConfig, as_pooling, check_kinds
from .plan import Ids

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]


class EmbeddingBagCollection(Collection):
    """
    Tables with pooled lookups: one operator call looks up all of them, and another makes their gradients.

    A collection gives the bits that :class:`EmbeddingBag` gives table by table.

    Args:
        tables: an :class:`EmbeddingBagConfig` for each table, or TorchRec's. Dims, poolings and dtypes may differ;
            several tables may share a feature, and several features a table.
        is_weighted: whether the features come with weights, one for each id. Default False: weights are ignored.
        device: the device on which the tables are made. Default: torch's default device.
        grad_mode: the layout of the tables' gradients. Default: ``"auto"``, and on CUDA ``None``.

            * ``None`` and ``"dense"``: strided;
            * ``"sparse"``: COO with unique, sorted rows;
            * ``"fused"``: no gradient. ``backward()`` updates the rows that occur, with an optimizer of
              :mod:`torchsparse_rec.optim` made with ``in_backward=True``, see :class:`Embedding`;
            * ``"auto"``: for each table the cheapest mode that its optimizer takes exactly, see :meth:`explain`.

    Shape:
        ``features``: a :class:`KeyedJaggedTensor` (ours or TorchRec's), or a mapping from names to features in any
        form, see :func:`torchsparse_rec.jagged`; features of other names are ignored. The result is a
        :class:`KeyedTensor` with ``[B, sum of dims]`` values (``.values()`` is the plain tensor): for each table, for
        each of its features, the pooled rows. Its keys are the features, or ``feature@table`` where tables share one.

    Raises:
        IndexError: an id outside its table, named with its position (on CUDA: by a later call).
        ValueError: tables without names or with equal ones; features that are missing; batch sizes that differ without
            ``inverse_indices`` (see :meth:`lookup`).

    Each table is a separate parameter, ``embedding_bags.<name>.weight``, TorchRec's key.

    Source: ``torchrec.modules.embedding_modules.EmbeddingBagCollection``.

    Example:
        >>> tables = [
        ...     EmbeddingBagConfig(num_embeddings=10, embedding_dim=2, name="users", feature_names=["user"]),
        ...     EmbeddingBagConfig(num_embeddings=5, embedding_dim=3, name="items", feature_names=["item", "seen"]),
        ... ]
        >>> bags = EmbeddingBagCollection(tables, grad_mode="sparse")
        >>> seen = torch.tensor([[1, 2], [0, 3]])
        >>> features = {"user": torch.tensor([3, 1]), "item": torch.tensor([4, 4]), "seen": seen}
        >>> pooled = bags(features)
        >>> pooled.keys(), pooled.values().shape
        (['user', 'item', 'seen'], torch.Size([2, 8]))
        >>> bool((pooled["seen"][0] == bags.embedding_bags["items"].weight[1:3].sum(0)).all())
        True
    """

    _children = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        grad_mode: GradMode | Literal["default"] | None = "default",
    ) -> None:
        check_kinds("EmbeddingBagCollection", tables, pooled=True)
        modes = [POOLING[as_pooling(config.pooling).value.lower()] for config in tables]
        super().__init__(tables, modes, device, grad_mode)
        self._is_weighted = is_weighted
        # The fields of a KeyedTensor besides its values, for results: they need no check.
        self._form = tuple(self._names), tuple(self._widths), 1
        self._width = sum(self._widths)

    def is_weighted(self) -> bool:
        """Say whether the features come with weights."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return list(self._configs)

    def forward(self, features: Any) -> KeyedTensor:
        """Look up and pool ``features``; see the class."""
        return self.output_of(*self._looked_up(features))

    if TYPE_CHECKING:  # a call of torch's modules gives Any

        def __call__(self, features: Any) -> KeyedTensor: ...

    def lookup(self, features: Any) -> dict[str, Tensor]:
        """
        Look up and pool features, which may have different batch sizes; return plain tensors.

        Args:
            features: the argument of the module.

        Returns:
            A dict from names to tensors ``[B, dim]``, with the feature's own batch size B.
        """
        x, ids, result = self._looked_up(features, apart=True)
        return dict(zip(self._names, self._split(x, ids, result), strict=True))

    def inputs_of(self, features: Any, apart: bool = False) -> tuple[KeyedJaggedTensor, list[int], Ids]:
        """See :class:`Collection`. With ``apart`` results lie end to end, and batch sizes may differ."""
        self._refuse_tracing()
        x = as_keyed_jagged_tensor(features, self._wanted(features), type(self).__name__)
        bags, places = x.stride_per_key(), self._places(x)
        first = bags[places[0]]
        side_by_side = not apart and (bags.count(first) == len(bags) or all(bags[place] == first for place in places))
        if not (side_by_side or apart) and x.inverse_indices_or_none() is None:
            raise ValueError(
                f"{type(self).__name__}: features must have one batch size, or inverse_indices, got batch sizes "
                f"{repr(dict(zip(x.keys(), bags, strict=True))):.300}; lookup() takes features of different batch sizes"
            )
        weights = x.weights_or_none() if self._is_weighted else None
        if self._is_weighted and weights is None:
            raise ValueError(f"{type(self).__name__}: features must have weights, as is_weighted is True, got none")
        return x, places, Ids(x.values(), x.offsets(), weights, bags, side_by_side)

    def output_of(self, x: KeyedJaggedTensor, ids: Ids, result: Tensor) -> KeyedTensor:
        """Return the module's output, made of what ``_looked_up`` returns."""
        if ids.side_by_side:
            if result.shape[1] != self._width:
                raise RuntimeError(
                    f"{type(self).__name__}: the tables must have the embedding_dims of their configs, {self._width} "
                    f"together, got {result.shape[1]}"
                )
            return unchecked(result, self._form)
        inverse = x.inverse_indices()
        rows = {key: inverse[1][k] for k, key in enumerate(inverse[0])}
        pooled = zip(self._split(x, ids, result), self._lookup_features, strict=True)
        whole = [part.index_select(0, rows[key]) for part, key in pooled]
        return KeyedTensor(self._names, self._widths, torch.cat(whole, 1))

    def _split(self, x: KeyedJaggedTensor, ids: Ids, result: Tensor) -> list[Tensor]:
        place = x.index_per_key()
        counts = [ids.bags[place[feature]] for feature in self._lookup_features]
        parts = result.split([count * width for count, width in zip(counts, self._widths, strict=True)])
        return [part.reshape(count, width) for part, count, width in zip(parts, counts, self._widths, strict=True)]


class EmbeddingCollection(Collection):
    """
    Tables looked up without pooling, one row per id, for sequences.

    Args:
        tables: an :class:`EmbeddingConfig` for each table, or TorchRec's; as for :class:`EmbeddingBagCollection`.
        device: the device on which the tables are made. Default: torch's default device.
        need_indices: whether the results carry the ids as their weights. Default False.
        grad_mode: the argument of :class:`EmbeddingBagCollection`.

    Shape:
        ``features`` as for :class:`EmbeddingBagCollection`. The result is a dict from names to
        :class:`JaggedTensor`, whose values are ``[N, dim]``: the rows of the feature's N ids, with its lengths.

    On CUDA, a KeyedJaggedTensor of several features waits once for the device to read back how many ids each feature
    has, unless it knows the numbers (see :meth:`KeyedJaggedTensor.sync`).

    Each table is a separate parameter, ``embeddings.<name>.weight``.

    Source: ``torchrec.modules.embedding_modules.EmbeddingCollection``.

    Example:
        >>> config = EmbeddingConfig(num_embeddings=10, embedding_dim=2, name="t", feature_names=["clicks"])
        >>> rows = EmbeddingCollection([config])({"clicks": torch.tensor([[3, 1], [4, 1]])})
        >>> rows["clicks"].values().shape, rows["clicks"].lengths()
        (torch.Size([4, 2]), tensor([2, 2]))
    """

    _children = "embeddings"

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        grad_mode: GradMode | Literal["default"] | None = "default",
    ) -> None:
        check_kinds("EmbeddingCollection", tables, pooled=False)
        super().__init__(tables, [SUM] * len(tables), device, grad_mode)
        self._need_indices = need_indices

    def need_indices(self) -> bool:
        """Say whether the results carry the ids as their weights."""
        return self._need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configs of the tables."""
        return list(self._configs)

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Look up ``features``; see the class."""
        return self.output_of(*self._looked_up(features))

    if TYPE_CHECKING:  # a call of torch's modules gives Any

        def __call__(self, features: Any) -> dict[str, JaggedTensor]: ...

    def inputs_of(self, features: Any) -> tuple[KeyedJaggedTensor, list[int], Ids]:
        """See :class:`Collection`."""
        self._refuse_tracing()
        x = as_keyed_jagged_tensor(features, self._wanted(features), type(self).__name__)
        counts = x.length_per_key()
        # The operator sees no lengths: some may be negative where their sums are right.
        if x.values().is_cpu and not is_seen() and x.lengths().numel() and int(x.lengths().min()) < 0:
            check_contents(type(self).__name__, features if isinstance(features, KeyedJaggedTensor) else x)
        return x, self._places(x), Ids(x.values(), None, None, counts, False)

    def output_of(self, x: KeyedJaggedTensor, ids: Ids, result: Tensor) -> dict[str, JaggedTensor]:
        """Return the module's output, made of what ``_looked_up`` returns."""
        place, by_feature = x.index_per_key(), x.to_dict()
        sizes = [
            ids.bags[place[feature]] * width for feature, width in zip(self._lookup_features, self._widths, strict=True)
        ]
        rows = {}
        for name, feature, width, part in zip(
            self._names, self._lookup_features, self._widths, result.split(sizes), strict=True
        ):
            its = by_feature[feature]
            rows[name] = JaggedTensor(
                part.reshape(-1, width), its.values() if self._need_indices else None, lengths=its.lengths()
            )
        return rows
