"""A lookup table whose gradient's layout can be chosen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from .._reduction import SUM
from .._torch import as_stored
from ..tables.stale import StaleParameter
from ..typing import GradMode
from ._lookup import ID_DTYPES, bad_id, checked_ids, look_up, nested_like, rows_like
from ._refusals import lookup_untraced
from ._route import PLAIN, Way, bare_table, kept_way
from .grad_mode import GradModeMixin
from .plan import Ids

__all__ = ["Embedding"]


def check_padding_idx(module: str, padding_idx: int | None, num_embeddings: int) -> None:
    """Raise ``ValueError`` unless ``padding_idx`` is None or a row, counted from the end if it is negative."""
    if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
        raise ValueError(
            f"{module}: padding_idx must be None or in [{-num_embeddings}, {num_embeddings}), got {padding_idx}"
        )


class Embedding(GradModeMixin, torch.nn.Embedding):  # type: ignore[override]
    """
    :class:`torch.nn.Embedding` with a choice of gradient layout, faster and deterministic in all of them.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: elements of a row, at least 1.
        padding_idx: a row that starts as zeros and gets no gradient, counted from the end if negative. Default: none.
        max_norm: the largest norm of a row: longer ones that are looked up are first scaled down to it, in place.
            Default: no limit.
        norm_type: the p of that norm. Default 2.
        scale_grad_by_freq: whether to divide each row's gradient by its number of occurrences in the lookup. Default
            False.
        sparse: the layout of the gradient when ``grad_mode`` is None. Default False: dense.
        _weight: the table, ``[num_embeddings, embedding_dim]``, instead of a random one. Without gradient it may hold
            integers, whose lookups wait for a CUDA device once, to check the ids.
        _freeze: whether to make a table without gradient. Default False.
        device: the device of a random table.
        dtype: the dtype of a random table: float16, bfloat16, float32 or float64.
        grad_mode: the layout of the table's gradient. All modes give the same parameters after a step, to rounding.

            * ``None`` (default): by ``sparse``;
            * ``"dense"``: strided, ``[num_embeddings, embedding_dim]``;
            * ``"sparse"``: COO with unique, sorted rows, marked coalesced where one lookup contributed (on CUDA: and an
              optimizer of :mod:`torchsparse_rec.optim` holds the table);
            * ``"fused"``: no gradient: ``backward()`` updates the rows that occur, with the optimizer of
              :mod:`torchsparse_rec.optim` that holds the table, made with ``in_backward=True``. It takes the least
              time and memory, but gradients cannot be accumulated over backwards, clipped or scaled, which raises
              (only torch's own clipping may skip the table silently);
            * ``"auto"``: the mode that a cost model finds cheapest among the ones that the optimizer takes exactly.
              These are dense and sparse for ours, and fused if it was made with ``in_backward=True``; dense and sparse
              for one of torch's announced with :meth:`use_optimizer`; else dense. :meth:`explain` returns the choice
              and its reason.

            A sparse lookup cannot be traced by ``torch.compile``: it breaks the graph, and is an error with
            ``fullgraph=True``.

    Shape:
        ``input``: integers of any shape; the result has ``embedding_dim`` appended. A jagged nested tensor gives
        a jagged nested tensor.

    Raises:
        IndexError: an id outside ``[0, num_embeddings)``, named with its position (on CUDA: by a later call).
        ValueError: wrong dtypes, padding_idx or grad_mode.
        RuntimeError: in ``"fused"``: no optimizer with ``in_backward=True`` holds the table; it has a ``.grad`` or a
            hook, or is in a DistributedDataParallel. Also for a second backward() before the optimizer's ``step()``,
            and for a hyperparameter that changed between backward() and ``step()``.

    Source: ``torch.nn.Embedding``, ``tf.keras.layers.Embedding``.

    Example:
        >>> table = Embedding(10, 3, grad_mode="sparse")
        >>> table(torch.tensor([[1, 2], [4, 1]])).sum().backward()
        >>> table.weight.grad.indices()
        tensor([[1, 2, 4]])
    """

    _operator = "embedding"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device=None,
        dtype=None,
        *,
        grad_mode: GradMode | None = None,
    ) -> None:
        check_padding_idx("Embedding", padding_idx, num_embeddings)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            _freeze,
            device,
            dtype,
        )
        self._init_grad_mode(grad_mode)

    def forward(self, input: Tensor) -> Tensor:
        """Look up ``input``; see the class."""
        weight = bare_table(self)
        if weight is not None and type(input) is Tensor and input.dtype in ID_DTYPES:
            return look_up(weight, input, self.padding_idx, self.scale_grad_by_freq, self._gives_coo())
        way = kept_way(self, input)
        if way is None:
            input = checked_ids("Embedding", input)
            if input.is_nested:
                return nested_like(input, self(input.values()))
            if torch.compiler.is_compiling():
                weight = self.stored_weight()
                if self._is_outside(weight, input.numel()):
                    return lookup_untraced(self.forward, input)  # type: ignore[no-any-return]
                with as_stored():
                    return self._look_up(weight, input)
        try:
            if way is not None:
                return self._look_up_again(way, input)
            weight = self.stored_weight()
            if type(weight) is StaleParameter:
                with as_stored():
                    return self._look_up(weight, input)
            return self._look_up(weight, input)
        except IndexError:
            raise (self._bad_id(input) or sys.exc_info()[1]) from None  # type: ignore[misc]

    if TYPE_CHECKING:  # a call of torch's modules gives Any

        def __call__(self, input: Tensor) -> Tensor: ...

    def _look_up_again(self, way: Way, input: Tensor) -> Tensor:
        # A view that changes nothing takes a tenth of a small lookup, in the forward and again in the backward.
        flat = input if input.dim() == 1 else input.reshape(-1)
        rows = way.look_up(flat, None, None, (flat.shape[0],), True, self.training)
        return rows if flat is input else rows.view(*input.shape, rows.shape[1])

    def _bad_id(self, input: Tensor) -> IndexError | None:
        return bad_id("Embedding", input.values() if input.is_nested else input, self._num_rows())

    def inputs_of(self, input: Tensor) -> tuple[Tensor, list[int], Ids]:
        """Return a call's input, the place of its only feature, and the ids, for a lookup in tables over ranks."""
        input = checked_ids("Embedding", input)
        ids = input.values() if input.is_nested else input
        return input, [0], Ids(ids.reshape(-1), None, None, (ids.numel(),), False)

    output_of = staticmethod(rows_like)

    def _look_up(self, weight: Parameter, input: Tensor) -> Tensor:
        kind, way = self._begin(weight, input)
        if way == PLAIN:
            return look_up(weight, input, self.padding_idx, self.scale_grad_by_freq, kind == "sparse")
        count = input.numel()
        ids = Ids(input if input.dim() == 1 else input.reshape(-1), None, None, (count,), True)
        rows = self._look_up_otherwise(way, kind, weight, SUM, self.padding_idx, ids)
        return rows if input.dim() == 1 else rows.view(*input.shape, weight.shape[1])

    def extra_repr(self) -> str:
        """Return torch's text, with the gradient mode and the bytes unless the mode is None."""
        return self._torchs_repr(torch.nn.Embedding)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        grad_mode: GradMode | None = None,
    ) -> Embedding:
        """
        Make a module around an existing table.

        Args:
            embeddings: ``[num_embeddings, embedding_dim]``; shared, not copied.
            freeze: whether to leave the table without gradient. Default True.
            padding_idx: the argument of the class, as are all that follow.
            max_norm: the argument of the class.
            norm_type: the argument of the class.
            scale_grad_by_freq: the argument of the class.
            sparse: the argument of the class.
            grad_mode: the argument of the class.

        Returns:
            The module.

        Example:
            >>> table = Embedding.from_pretrained(torch.tensor([[1.0, 2.5], [4.0, 5.5]]))
            >>> table(torch.tensor(1))
            tensor([4.0000, 5.5000])
        """
        module = cast(
            Embedding,
            super().from_pretrained(embeddings, freeze, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse),
        )
        module._init_grad_mode(grad_mode)
        return module
