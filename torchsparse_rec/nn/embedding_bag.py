"""A lookup table pooled per bag, whose gradient's layout can be chosen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from .._reduction import POOLING
from .._torch import as_stored
from ..jagged.checks import check_tensor
from ..ops.embedding import check_not_empty, look_up_bare, padding_number, with_last_offset
from ..ops.jagged import nested_to_jagged
from ..tables.stale import StaleParameter
from ..typing import GradMode, Pooling
from ._lookup import ID_DTYPES, bad_id, checked_ids, pool
from ._refusals import lookup_untraced
from ._route import PLAIN, bare_table, kept_way
from .embedding import check_padding_idx
from .grad_mode import GradModeMixin
from .gradients import coalesced_mark
from .plan import Ids

__all__ = ["EmbeddingBag"]


def check_shapes(input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None) -> None:
    """Raise ``ValueError`` unless the arguments of a lookup fit each other."""
    for argument, x in (("offsets", offsets), ("per_sample_weights", per_sample_weights)):
        if x is not None:
            check_tensor("EmbeddingBag", argument, x)
    if input.dim() not in (1, 2):
        raise ValueError(f"EmbeddingBag: input must have rank 1 or 2, got shape {tuple(input.shape)}")
    if input.dim() == 2 and offsets is not None:
        raise ValueError("EmbeddingBag: offsets must be None when input has rank 2 (one bag per row), got a tensor")
    if input.dim() == 1:
        if offsets is None:
            raise ValueError("EmbeddingBag: offsets must be given when input has rank 1, got None")
        if offsets.dim() != 1:
            raise ValueError(f"EmbeddingBag: offsets must have rank 1, got shape {tuple(offsets.shape)}")
        check_not_empty("EmbeddingBag", offsets, input)
    if per_sample_weights is None:
        return
    if input.is_nested != per_sample_weights.is_nested:
        raise ValueError("EmbeddingBag: per_sample_weights must be nested exactly when input is")
    if input.is_nested:
        _check_same_bags(input, per_sample_weights)
    elif per_sample_weights.shape != input.shape:
        raise ValueError(
            f"EmbeddingBag: per_sample_weights must have the shape of input, {tuple(input.shape)}, "
            f"got {tuple(per_sample_weights.shape)}"
        )


def _check_same_bags(input: Any, weights: Any) -> None:
    """Raise ``ValueError`` unless nested tensors have the same bags; compared, where they do not share them."""
    both = [(input.offsets(), weights.offsets()), (input.lengths(), weights.lengths())]
    if all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in both):
        return
    raise ValueError(
        "EmbeddingBag: per_sample_weights must have the bags of input, whose offsets are "
        f"{input.offsets().tolist()[:8]}, got {weights.offsets().tolist()[:8]}, or other lengths"
    )


class EmbeddingBag(GradModeMixin, torch.nn.EmbeddingBag):  # type: ignore[override]
    """
    :class:`torch.nn.EmbeddingBag` with TensorFlow's combiners and a choice of gradient layout.

    Beyond torch: modes; ``per_sample_weights`` in all but those of extremes, with TensorFlow's meaning and a gradient;
    sparse gradients in mode max; checked offsets.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: elements of a row, at least 1.
        max_norm: the largest norm of a row: longer ones that are looked up are first scaled down to it, in place.
            Default: no limit.
        norm_type: the p of that norm. Default 2.
        scale_grad_by_freq: whether to divide each row's gradient by its number of occurrences in the lookup. Default
            False.
        mode: the pooling of a bag's rows ``x`` with weights ``w`` (1 if none are given). Zero denominators give 0.

            * ``"sum"``: ``sum(w x)``;
            * ``"mean"`` (default): ``sum(w x) / sum(w)``;
            * ``"sqrtn"``: ``sum(w x) / sqrt(sum(w^2))``, which torch lacks;
            * ``"max"``: the elementwise maximum, without weights. A NaN wins; in torch only the first of a bag does.
            * ``"min"``: the elementwise minimum, without weights, which torch lacks. A NaN wins.
        sparse: the layout of the gradient when ``grad_mode`` is None. Default False: dense.
        _weight: the table, ``[num_embeddings, embedding_dim]``, instead of a random one.
        include_last_offset: whether ``offsets`` has one element more than there are bags: the end of the last bag,
            which is the length of the input. (torch allows ids after it, and counts some of them in backward only.)
            Default False.
        padding_idx: a row that starts as zeros, is left out of the bags and gets no gradient. Default: none.
        device: the device of a random table.
        dtype: the dtype of a random table: float16, bfloat16 (summed in float32, rounded once), float32 or float64.
        grad_mode: the argument of :class:`Embedding`.

    Shape:
        ``input``: integers, ``[B, L]`` (B bags of L ids), or ``[N]`` with ``offsets`` ``[B]`` (where each bag
        starts), or a jagged nested tensor. ``per_sample_weights``: as ``input``, with the table's dtype. Result:
        ``[B, embedding_dim]``, zeros for empty bags.

    Raises:
        IndexError: an id outside ``[0, num_embeddings)``, named with its position (on CUDA: by a later call).
        ValueError: bad offsets, NaN weights, weights with an extreme; wrong shapes, dtypes, modes.

    Source: ``torch.nn.EmbeddingBag``, ``tf.nn.embedding_lookup_sparse``.

    Example:
        >>> bags = EmbeddingBag.from_pretrained(torch.tensor([[1.0], [2.0], [4.0]]), mode="mean")
        >>> bags(torch.tensor([0, 2, 1]), torch.tensor([0, 2]), torch.tensor([1.0, 3.0, 5.0]))
        tensor([[3.2500],
                [2.0000]])
    """

    _operator = "embedding_bag"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Pooling = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device=None,
        dtype=None,
        *,
        grad_mode: GradMode | None = None,
    ) -> None:
        if mode not in POOLING:
            raise ValueError(f"EmbeddingBag: mode must be one of {', '.join(map(repr, POOLING))}, got {mode!r}")
        check_padding_idx("EmbeddingBag", padding_idx, num_embeddings)
        super().__init__(
            num_embeddings,
            embedding_dim,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            _weight,
            include_last_offset,
            padding_idx,
            device,
            dtype,
        )
        self._init_grad_mode(grad_mode)

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool the bags of ``input``; see the class."""
        weight = bare_table(self)
        if weight is not None and per_sample_weights is None and type(input) is type(offsets) is Tensor:
            if input.dim() == offsets.dim() == 1 and input.dtype in ID_DTYPES:
                return self._look_up_bare(weight, input, offsets)
        bags = self._bags(input, offsets, per_sample_weights)
        way = kept_way(self, bags[0], bags[2])
        weight = self.stored_weight()
        if way is None and torch.compiler.is_compiling():
            if self._is_outside(weight, bags[0].shape[0]):
                return lookup_untraced(self.forward, input, offsets, per_sample_weights)  # type: ignore[no-any-return]
            with as_stored():
                return self._look_up(weight, *bags)
        try:
            if way is not None:
                ids, offsets, weights, include_last = bags
                ends = with_last_offset(offsets, ids.shape[0], include_last)
                return way.look_up(ids, ends, weights, (ends.shape[0] - 1,), True, self.training)
            if type(weight) is StaleParameter:
                with as_stored():
                    return self._look_up(weight, *bags)
            return self._look_up(weight, *bags)
        except IndexError:
            raise (self._bad_id(input) or sys.exc_info()[1]) from None  # type: ignore[misc]

    def _bad_id(self, input: Tensor) -> IndexError | None:
        return bad_id("EmbeddingBag", input.values() if input.is_nested else input, self._num_rows())

    def inputs_of(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> tuple[Tensor, list[int], Ids]:
        """Return a call's input, the place of its only feature, and the ids, for a lookup in tables over ranks."""
        ids, starts, weights, include_last = self._bags(input, offsets, per_sample_weights)
        ends = with_last_offset(starts, ids.shape[0], include_last)
        return input, [0], Ids(ids, ends, weights, (ends.shape[0] - 1,), True)

    if TYPE_CHECKING:  # a call of torch's modules gives Any

        def __call__(
            self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
        ) -> Tensor: ...

    def _look_up_bare(self, weight: Parameter, ids: Tensor, offsets: Tensor) -> Tensor:
        sparse = self._gives_coo()
        mark = coalesced_mark(weight) if sparse else None
        rest = (POOLING[self.mode], padding_number(self.padding_idx), self.scale_grad_by_freq, sparse)
        try:
            return look_up_bare(mark, weight, ids, offsets, None, *rest, self.include_last_offset)  # type: ignore[no-any-return]
        except ValueError:
            check_not_empty("EmbeddingBag", offsets, ids)
            raise
        except IndexError:
            raise (bad_id("EmbeddingBag", ids, weight.shape[0]) or sys.exc_info()[1]) from None  # type: ignore[misc]

    def _look_up(
        self, weight: Parameter, ids: Tensor, offsets: Tensor, weights: Tensor | None, include_last: bool
    ) -> Tensor:
        kind, way = self._begin(weight, ids)
        if way == PLAIN:
            options = (self.mode, self.padding_idx, self.scale_grad_by_freq, kind == "sparse", include_last)
            return pool(weight, ids, offsets, weights, *options)
        ends = with_last_offset(offsets, ids.shape[0], include_last)
        its = Ids(ids, ends, weights, (ends.shape[0] - 1,), True)
        return self._look_up_otherwise(way, kind, weight, POOLING[self.mode], self.padding_idx, its)

    def _bags(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """Return the ids in one row, where their bags start, their weights, and whether the end is among the starts."""
        input = checked_ids("EmbeddingBag", input)
        check_shapes(input, offsets, per_sample_weights)
        if offsets is not None:
            return input, offsets, per_sample_weights, self.include_last_offset
        if input.is_nested:
            weights = None if per_sample_weights is None else nested_to_jagged(per_sample_weights)[0]
            return *nested_to_jagged(input), weights, True
        bags, length = input.shape
        if length == 0:
            offsets = input.new_zeros(bags + 1)
        else:
            offsets = torch.arange(0, bags * length + 1, length, device=input.device)
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        return input.reshape(-1), offsets, weights, True

    def extra_repr(self) -> str:
        """Return torch's text, with the gradient mode and the bytes unless the mode is None."""
        return self._torchs_repr(torch.nn.EmbeddingBag)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: Pooling = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        grad_mode: GradMode | None = None,
    ) -> EmbeddingBag:
        """
        Make a module around an existing table.

        Args:
            embeddings: ``[num_embeddings, embedding_dim]``; shared, not copied.
            freeze: whether to leave the table without gradient. Default True.
            max_norm: the argument of the class, as are all that follow.
            norm_type: the argument of the class.
            scale_grad_by_freq: the argument of the class.
            mode: the argument of the class.
            sparse: the argument of the class.
            include_last_offset: the argument of the class.
            padding_idx: the argument of the class.
            grad_mode: the argument of the class.

        Returns:
            The module.
        """
        module = cast(
            EmbeddingBag,
            super().from_pretrained(
                embeddings,
                freeze,
                max_norm,
                norm_type,
                scale_grad_by_freq,
                mode,
                sparse,
                include_last_offset,
                padding_idx,
            ),
        )
        module._init_grad_mode(grad_mode)
        return module
