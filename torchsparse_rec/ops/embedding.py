"""
Family ``embedding``: table lookups, one per id or pooled per bag, and their gradients.

Contract and order of summation: csrc/embedding.h. Kernels: csrc/cpu/embedding.cpp, csrc/cuda/embedding.cu.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _reduction
from .._torch import backward_number, bare_apply, below_autograd, is_seen
from ..typing import Pooling
from ._offsets import check_not_empty as check_not_empty
from .autograd import differentiable, is_bare, no_second_derivative, only_once, register

__all__ = ["embedding", "embedding_bag"]

_NO_PADDING = -1
_ops = torch.ops.torchsparse_rec
_ROWS, _BAGS = _ops.embedding.default, _ops.embedding_bag.default
_DENSE, _COO = _ops.embedding_dense_backward.default, _ops.embedding_coo_backward.default


def padding_number(padding_idx: int | None) -> int:
    """Return ``padding_idx`` as operators take it: -1 for None."""
    if padding_idx is None:
        return _NO_PADDING
    if padding_idx < 0:
        raise ValueError(f"padding_idx must be None or >= 0, got {padding_idx}")
    return padding_idx


def embedding(
    weight: Tensor,
    indices: Tensor,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """
    Look up rows of a table: ``out[i] = weight[indices[i]]``.

    Args:
        weight: ``[V, D]``, float16, bfloat16, float32 or float64.
        indices: ids of any shape, int32 or int64, in ``[0, V)``.
        padding_idx: a row that receives no gradient.
        scale_grad_by_freq: whether to divide each row's gradient by the number of its occurrences in ``indices``.
        sparse: whether to give ``weight`` a sparse COO gradient whose rows are unique and sorted (coalesced), instead
            of a dense one. The sums are the same, bit for bit.

    Returns:
        ``[*indices.shape, D]``. Differentiable in ``weight``, twice.

    Raises:
        IndexError: an index outside ``[0, V)``, named with its position.
        ValueError: wrong shapes, dtypes or devices.

    On CUDA nothing waits for the device, and CUDA graphs can capture it (the gradient too if it is not sparse).

    Source: ``torch.nn.functional.embedding``, ``tf.nn.embedding_lookup``.

    Example:
        >>> weight = torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]])
        >>> embedding(weight, torch.tensor([2, 0]))
        tensor([[2.0000, 2.5000],
                [0.0000, 0.5000]])
    """
    return lookup_rows(weight, indices, padding_number(padding_idx), scale_grad_by_freq, sparse)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    *,
    per_sample_weights: Tensor | None = None,
    mode: Pooling = "sum",
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """
    Look up rows of a table and pool them per bag, in one pass: bag ``b`` is ``indices[offsets[b] : offsets[b + 1]]``.

    A bag's result is that of :class:`torchsparse_rec.nn.EmbeddingBag` in its mode: a sum, perhaps divided, or an
    elementwise extreme of the bag's rows. An empty bag and a zero denominator give zeros.

    Args:
        weight: ``[V, D]``, float16, bfloat16 (summed in float32, rounded once), float32 or float64.
        indices: ``[N]``, int32 or int64, in ``[0, V)``.
        offsets: ``[B + 1]``, int32 or int64, not decreasing, from 0 to ``N``.
        per_sample_weights: ``[N]``, with the dtype of ``weight``.
        mode: a mode of :class:`torchsparse_rec.nn.EmbeddingBag`. Default ``"sum"``.
        padding_idx: a row whose entries are left out of the bags and receive no gradient. ``V``, which is no row, is
            allowed too: then the index ``V`` marks entries to leave out.
        scale_grad_by_freq: whether to divide each row's gradient by the number of its occurrences in ``indices``.
        sparse: the argument of :func:`embedding`.

    Returns:
        ``[B, D]``. Differentiable in ``weight`` and ``per_sample_weights``: once with weights or of an extreme, else
        twice.

    Raises:
        IndexError: an index outside ``[0, V)``, named with its position.
        ValueError: bad offsets, NaN weights, weights with an extreme; wrong shapes, dtypes or devices.

    On CUDA nothing waits for the device, and CUDA graphs can capture it (the gradient too if it is not sparse).

    Source: ``torch.nn.functional.embedding_bag``, ``tf.nn.embedding_lookup_sparse``.

    Example:
        >>> weight = torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]])
        >>> embedding_bag(weight, torch.tensor([2, 0, 1]), torch.tensor([0, 2, 2, 3]), mode="mean")
        tensor([[1.0000, 1.5000],
                [0.0000, 0.0000],
                [1.0000, 1.5000]])
    """
    if mode not in _reduction.POOLING:
        raise ValueError(f"mode must be one of {', '.join(map(repr, _reduction.POOLING))}, got {mode!r}")
    check_not_empty("embedding_bag", offsets, indices)
    rest = (_reduction.POOLING[mode], padding_number(padding_idx), scale_grad_by_freq, sparse)
    return lookup_bags(weight, indices, offsets, per_sample_weights, *rest)


class Mark(Protocol):
    """A table's record of the sparse gradients that arrive: one with unique and sorted rows can stay marked so."""

    def arrives(self, grad: Tensor, backward: object) -> None:
        """Take note of a gradient with unique and sorted rows, in the backward of this number."""

    def watch(self, weight: Tensor) -> None:
        """Look at each gradient that arrives: no lookup will report it."""


def lookup_rows(
    weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool, sparse: bool, mark: Mark | None = None
) -> Tensor:
    """Look up rows as :func:`embedding` does; ``padding_idx`` is -1 for none."""
    if is_bare(weight):
        rest = (None, None, _reduction.SUM, padding_idx, scale_grad_by_freq, sparse, True)
        return look_up_bare(mark, weight, indices, *rest)  # type: ignore[no-any-return]
    if mark is not None:
        mark.watch(weight)
    return _embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)  # type: ignore[no-any-return]


def lookup_bags(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    include_last_offset: bool = True,
    mark: Mark | None = None,
) -> Tensor:
    """Pool rows as :func:`embedding_bag` does; without ``include_last_offset`` the end of the last bag is left out."""
    rest = (per_sample_weights, mode, padding_idx, scale_grad_by_freq, sparse, include_last_offset)
    if is_bare(weight, per_sample_weights):
        return look_up_bare(mark, weight, indices, offsets, *rest)  # type: ignore[no-any-return]
    if mark is not None:
        mark.watch(weight)
    return embedding_bag_operator(weight, indices, offsets, *rest)[0]  # type: ignore[no-any-return]


def with_last_offset(offsets: Tensor, count: int, is_included: bool) -> Tensor:
    """Return the offsets of bags with the end of the last one, the number of indices, which may be there already."""
    return offsets if is_included else torch.cat([offsets, offsets.new_full((1,), count)])


# ---- Fake kernels ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("torchsparse_rec::embedding")
def _(weight: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    return weight.new_empty(*indices.shape, weight.shape[1])


@torch.library.register_fake("torchsparse_rec::embedding_bag")
def _(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    include_last_offset: bool = True,
) -> tuple[Tensor, Tensor]:
    # An int, as torch 2.11 cannot take True from a size that is a symbol.
    shape = (offsets.shape[0] - int(include_last_offset), weight.shape[1])
    argmax_shape = shape if _reduction.is_extreme(mode) else (0,)
    return weight.new_empty(shape), indices.new_empty(argmax_shape, dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::embedding_dense_backward")
def _(
    grad: Tensor, indices: Tensor, offsets: Tensor | None, weights: Any, argmax: Any, num_embeddings: int, *rest: Any
) -> Tensor:
    return grad.new_empty(num_embeddings, grad.shape[1])


@torch.library.register_fake("torchsparse_rec::embedding_sparse_backward")
def _(grad: Tensor, indices: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return grad.new_empty(rows, grad.shape[1]), indices.new_empty(rows, dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::embedding_coo_backward")
def _(
    grad: Tensor, indices: Tensor, offsets: Tensor | None, weights: Any, argmax: Any, num_embeddings: int, *rest: Any
) -> Tensor:
    rows = torch.library.get_ctx().new_dynamic_size()
    values = grad.new_empty(rows, grad.shape[1])
    return coo_tensor(values, indices.new_empty(rows, dtype=torch.int64), num_embeddings)


@torch.library.register_fake("torchsparse_rec::embedding_weights_backward")
def _(grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor, *rest: Any) -> Tensor:
    return per_sample_weights.new_empty(per_sample_weights.shape)


# ---- Autograd: the lookups ------------------------------------------------------------------------------------------


def _weight_grad(sparse: bool, grad: Tensor, *arguments) -> Tensor:
    """Return a table's gradient, sparse or dense; ``arguments`` are for the backward operators."""
    num_embeddings = arguments[4]
    if not sparse:
        return _dense_backward(grad, *arguments)
    values, rows = _sparse_backward(grad, *arguments)
    return coo_tensor(values, rows, num_embeddings)


def coo_tensor(values: Tensor, rows: Tensor, num_embeddings: int) -> Tensor:
    """Return a gradient of unique and sorted rows as a COO tensor."""
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, (num_embeddings, values.shape[1]), is_coalesced=True, check_invariants=False
    )


def _embedding_setup_context(ctx, inputs, output) -> None:
    weight, indices, ctx.padding_idx, ctx.scale_grad_by_freq, ctx.sparse = inputs
    ctx.save_for_backward(indices)
    ctx.num_embeddings = weight.shape[0]


def _embedding_backward(ctx, grad):
    (indices,) = ctx.saved_tensors
    result = _weight_grad(
        ctx.sparse,
        grad.reshape(indices.numel(), grad.shape[-1]),  # -1 would not do where there are no columns
        indices.reshape(-1),
        None,
        None,
        None,
        ctx.num_embeddings,
        _reduction.SUM,
        ctx.padding_idx,
        ctx.scale_grad_by_freq,
        True,
    )
    return result, None, None, None, None


def _embedding_bag_setup_context(ctx, inputs, output) -> None:
    weight, indices, offsets, per_sample_weights, ctx.mode, ctx.padding_idx, *rest = inputs
    ctx.scale_grad_by_freq, ctx.sparse, ctx.include_last_offset = rest
    pooled, argmax = output
    ctx.mark_non_differentiable(argmax)
    ctx.set_materialize_grads(False)
    weights_need_grad = ctx.needs_input_grad[3]
    ctx.num_embeddings = weight.shape[0]
    ctx.save_for_backward(
        indices,
        offsets,
        per_sample_weights,
        argmax if _reduction.is_extreme(ctx.mode) else None,
        weight if weights_need_grad else None,
        pooled if weights_need_grad else None,
    )


def _embedding_bag_backward(ctx, grad, _grad_argmax):
    indices, offsets, per_sample_weights, argmax, weight, pooled = ctx.saved_tensors
    weight_grad = weights_grad = None
    if grad is not None and ctx.needs_input_grad[0]:
        weight_grad = _weight_grad(
            ctx.sparse,
            grad,
            indices,
            offsets,
            per_sample_weights,
            argmax,
            ctx.num_embeddings,
            ctx.mode,
            ctx.padding_idx,
            ctx.scale_grad_by_freq,
            ctx.include_last_offset,
        )
    if grad is not None and ctx.needs_input_grad[3]:
        offsets = with_last_offset(offsets, indices.shape[0], ctx.include_last_offset)
        weights_grad = _weights_backward(
            grad, weight, indices, offsets, per_sample_weights, pooled, ctx.mode, ctx.padding_idx
        )
    return weight_grad, None, None, weights_grad, None, None, None, None, None


# ---- Autograd: the short way ----------------------------------------------------------------------------------------


class _EagerLookup(torch.autograd.Function):
    """
    A lookup where only the table has a gradient: most of a small lookup's time is the Python around operators.

    It does what ``embedding_bag_operator`` and ``_embedding`` do, bit for bit. Second derivatives take their way.
    """

    @staticmethod
    def forward(ctx, mark, weight, indices, offsets, weights, mode, padding_idx, scaled, sparse, include_last):
        """Look up rows, or pool them where there are offsets."""
        with below_autograd():
            if offsets is None:
                output, argmax = _ROWS(weight, indices, padding_idx, scaled, sparse), None
            else:
                bags = (offsets, weights, mode, padding_idx, scaled, sparse, include_last)
                output, argmax = _BAGS(weight, indices, *bags)
                ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices, offsets, weights, argmax if _reduction.is_extreme(mode) else None)
        ctx.mark, ctx.sparse, ctx.rest = mark, sparse, (weight.shape[0], mode, padding_idx, scaled, include_last)
        return output

    @staticmethod
    def backward(ctx, grad):
        """Return the table's gradient."""
        if grad is None:
            return (None,) * 10
        indices, *bags = ctx.saved_tensors
        if indices.dim() != 1:
            grad = grad.reshape(indices.numel(), grad.shape[-1])  # -1 would not do where there are no columns
            indices = indices.reshape(-1)
        if torch.is_grad_enabled() or is_seen():
            return None, _weight_grad(ctx.sparse, grad, indices, *bags, *ctx.rest), *(None,) * 8
        with below_autograd():
            result = (_COO if ctx.sparse else _DENSE)(grad, indices, *bags, *ctx.rest)
        if ctx.mark is not None:
            ctx.mark.arrives(result, backward_number())
        return None, result, *(None,) * 8


look_up_bare = bare_apply(_EagerLookup)


# ---- Autograd: the gradients of gradients ---------------------------------------------------------------------------


def _transposed(ctx, table: Tensor, indices: Tensor, padding_idx: int) -> Tensor:
    """
    Differentiate ``<table, backward(grad)>`` with respect to ``grad``.

    Without weights and extremes the backward is linear in ``grad``; its transpose is the lookup itself, in ``table``.
    """
    if ctx.scale_grad_by_freq:
        # Padding may be the row after the last.
        counts = torch.bincount(indices, minlength=table.shape[0])[: table.shape[0]].clamp_min(1)
        table = table / counts.to(table.dtype).unsqueeze(1)
    offsets = ctx.saved_tensors[1]
    if offsets is not None:
        rest = (None, ctx.mode, padding_idx, False, False, ctx.include_last_offset)
        return embedding_bag_operator(table, indices, offsets, *rest)[0]
    picked = _embedding(table, indices, padding_idx, False, False)
    return picked.masked_fill((indices == padding_idx).unsqueeze(1), 0.0)


def _backward_setup_context(ctx, inputs, output) -> None:
    _, indices, offsets, per_sample_weights, argmax, _, ctx.mode, ctx.padding_idx, *rest = inputs
    ctx.scale_grad_by_freq, ctx.include_last_offset = rest
    ctx.is_linear = per_sample_weights is None and argmax is None
    rows = output[1] if isinstance(output, tuple) else None
    if rows is not None:
        ctx.mark_non_differentiable(rows)
    ctx.save_for_backward(indices, offsets, rows)


def _dense_backward_backward(ctx, table):
    if not ctx.is_linear:
        raise no_second_derivative("embedding_dense_backward")
    indices = ctx.saved_tensors[0]
    return _transposed(ctx, table, indices, ctx.padding_idx), *(None,) * 9


def _sparse_backward_backward(ctx, values_grad, _rows_grad):
    if not ctx.is_linear:
        raise no_second_derivative("embedding_sparse_backward")
    indices, _, rows = ctx.saved_tensors
    # The table of the transposed lookup has only the rows that occur, and one more for the padding ids.
    padding = rows.shape[0]
    positions = torch.searchsorted(rows, indices).masked_fill(indices == ctx.padding_idx, padding)
    table = torch.cat([values_grad, values_grad.new_zeros(1, values_grad.shape[1])])
    return _transposed(ctx, table, positions, padding), *(None,) * 9


_embedding = differentiable("embedding", _embedding_backward, _embedding_setup_context)
embedding_bag_operator = differentiable("embedding_bag", _embedding_bag_backward, _embedding_bag_setup_context)
_dense_backward = differentiable("embedding_dense_backward", _dense_backward_backward, _backward_setup_context)
_sparse_backward = differentiable("embedding_sparse_backward", _sparse_backward_backward, _backward_setup_context)
_weights_backward = differentiable("embedding_weights_backward", *only_once("embedding_weights_backward"))
register("embedding_coo_backward", *only_once("embedding_coo_backward"))
