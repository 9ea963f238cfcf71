"""
Family ``embedding``: table lookups, one per id or pooled per bag, and their gradients.

Contract and order of summation: csrc/embedding.h. Kernels: csrc/cpu/embedding.cpp, csrc/cuda/embedding.cu.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _library as _library  # loads the schemas
from .. import _reduction
from ._autograd import differentiable

__all__ = ["embedding", "embedding_bag"]

_MODES = {"sum": _reduction.SUM, "mean": _reduction.MEAN, "sqrtn": _reduction.SQRTN, "max": _reduction.MAX}
_NO_PADDING = -1


def _padding(padding_idx: int | None) -> int:
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
        indices: any shape, int32 or int64, in ``[0, V)``.
        padding_idx: a row that receives no gradient.
        scale_grad_by_freq: divide each row's gradient by the number of its occurrences in ``indices``.
        sparse: give ``weight`` a sparse COO gradient whose rows are unique and sorted (coalesced), instead of a dense
            one. The sums are the same, bit for bit.

    Returns:
        ``[*indices.shape, D]``. Differentiable in ``weight``.

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
    return _embedding(weight, indices, _padding(padding_idx), scale_grad_by_freq, sparse)


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    *,
    per_sample_weights: Tensor | None = None,
    mode: str = "sum",
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """
    Look up rows of a table and pool them per bag, in one pass: bag ``b`` is ``indices[offsets[b] : offsets[b + 1]]``.

    With ``x_i = weight[indices[i]]`` and ``w_i = per_sample_weights[i]`` (1 without weights), a bag's result is
    ``sum(w x)`` (sum), ``sum(w x) / sum(w)`` (mean), ``sum(w x) / sqrt(sum(w^2))`` (sqrtn) or the elementwise maximum
    (max, without weights). An empty bag and a zero denominator give zeros.

    Args:
        weight: ``[V, D]``, float16, bfloat16 (summed in float32, rounded once), float32 or float64.
        indices: ``[N]``, int32 or int64, in ``[0, V)``.
        offsets: ``[B + 1]``, int32 or int64, not decreasing, from 0 to ``N``.
        per_sample_weights: ``[N]``, with the dtype of ``weight``.
        mode: ``"sum"``, ``"mean"``, ``"sqrtn"`` or ``"max"``.
        padding_idx: a row whose entries are left out of the bags and receive no gradient; or ``V``, which is no row:
            then the index ``V`` marks entries to leave out.
        scale_grad_by_freq: divide each row's gradient by the number of its occurrences in ``indices``.
        sparse: as in :func:`embedding`.

    Returns:
        ``[B, D]``. Differentiable in ``weight`` and ``per_sample_weights``.

    Raises:
        IndexError: an index outside ``[0, V)``, named with its position.
        ValueError: bad offsets, NaN weights, weights in mode max; wrong shapes, dtypes or devices.

    On CUDA nothing waits for the device, and CUDA graphs can capture it (the gradient too if it is not sparse).

    Source: ``torch.nn.functional.embedding_bag``, ``tf.nn.embedding_lookup_sparse``.

    Example:
        >>> weight = torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]])
        >>> embedding_bag(weight, torch.tensor([2, 0, 1]), torch.tensor([0, 2, 2, 3]), mode="mean")
        tensor([[1.0000, 1.5000],
                [0.0000, 0.0000],
                [1.0000, 1.5000]])
    """
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, _MODES))}, got {mode!r}")
    output, _ = _embedding_bag(
        weight,
        indices,
        offsets,
        per_sample_weights,
        _MODES[mode],
        _padding(padding_idx),
        scale_grad_by_freq,
        sparse,
    )
    return output


# ---- Fake kernels ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("torchsparse_rec::embedding")
def _(weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool, sparse: bool) -> Tensor:
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
) -> tuple[Tensor, Tensor]:
    shape = (offsets.shape[0] - 1, weight.shape[1])
    argmax_shape = shape if mode == _reduction.MAX else (0,)
    return weight.new_empty(shape), indices.new_empty(argmax_shape, dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::embedding_dense_backward")
def _(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    num_embeddings: int,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    return grad.new_empty(num_embeddings, grad.shape[1])


@torch.library.register_fake("torchsparse_rec::embedding_sparse_backward")
def _(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    num_embeddings: int,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return grad.new_empty(rows, grad.shape[1]), indices.new_empty(rows, dtype=torch.int64)


@torch.library.register_fake("torchsparse_rec::embedding_weights_backward")
def _(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor,
    output: Tensor,
    mode: int,
    padding_idx: int,
) -> Tensor:
    return per_sample_weights.new_empty(per_sample_weights.shape)


# ---- Autograd: the lookups ------------------------------------------------------------------------------------------


def _weight_grad(sparse: bool, grad: Tensor, *arguments) -> Tensor:
    """Return a table's gradient, sparse or dense; ``arguments`` are those of the backward operators."""
    num_embeddings = arguments[4]
    if not sparse:
        return _dense_backward(grad, *arguments)
    values, rows = _sparse_backward(grad, *arguments)
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, (num_embeddings, grad.shape[1]), is_coalesced=True, check_invariants=False
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
    )
    return result, None, None, None, None


def _embedding_bag_setup_context(ctx, inputs, output) -> None:
    weight, indices, offsets, per_sample_weights, ctx.mode, ctx.padding_idx, ctx.scale_grad_by_freq, ctx.sparse = inputs
    pooled, argmax = output
    ctx.mark_non_differentiable(argmax)
    ctx.set_materialize_grads(False)
    weights_need_grad = ctx.needs_input_grad[3]
    ctx.num_embeddings = weight.shape[0]
    ctx.save_for_backward(
        indices,
        offsets,
        per_sample_weights,
        argmax if ctx.mode == _reduction.MAX else None,
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
        )
    if grad is not None and ctx.needs_input_grad[3]:
        weights_grad = _weights_backward(
            grad, weight, indices, offsets, per_sample_weights, pooled, ctx.mode, ctx.padding_idx
        )
    return weight_grad, None, None, weights_grad, None, None, None, None


# ---- Autograd: the gradients of gradients ---------------------------------------------------------------------------


def _transposed(
    table: Tensor,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    mode: int,
    padding_idx: int,
    weights_need_grad: bool,
) -> tuple[Tensor, Tensor | None]:
    """
    Differentiate ``<table, backward(grad, weights)>`` with respect to ``grad`` and ``per_sample_weights``.

    The backward of a pooled lookup is linear in ``grad``, and its transpose is the lookup itself, in ``table``.
    """
    if offsets is None:
        picked = _embedding(table, indices, padding_idx, False, False)
        return picked.masked_fill((indices == padding_idx).unsqueeze(1), 0.0), None
    if argmax is not None:
        if indices.numel() == 0 or table.shape[0] == 0:
            return torch.zeros_like(grad), None
        winners = indices[argmax.clamp_min(0)].long().masked_fill(argmax < 0, 0)
        picked = table.gather(0, winners)
        return picked.masked_fill(argmax < 0, 0.0), None
    pooled, _ = _embedding_bag(table, indices, offsets, per_sample_weights, mode, padding_idx, False, False)
    if not weights_need_grad:
        return pooled, None
    weights_grad = _weights_backward(grad, table, indices, offsets, per_sample_weights, pooled, mode, padding_idx)
    return pooled, weights_grad


def _occurrences(indices: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """
    Count how often each of ``size`` rows occurs, at least 1: the divisor of ``scale_grad_by_freq``.

    Padding may be the row after the last.
    """
    return torch.bincount(indices, minlength=size)[:size].clamp_min(1).to(dtype).unsqueeze(1)


def _backward_setup_context(ctx, inputs, output) -> None:
    grad, indices, offsets, per_sample_weights, argmax, _, ctx.mode, ctx.padding_idx, ctx.scale_grad_by_freq = inputs
    rows = output[1] if isinstance(output, tuple) else None
    if rows is not None:
        ctx.mark_non_differentiable(rows)
    ctx.save_for_backward(grad, indices, offsets, per_sample_weights, argmax, rows)


def _dense_backward_backward(ctx, table):
    grad, indices, offsets, per_sample_weights, argmax, _ = ctx.saved_tensors
    if ctx.scale_grad_by_freq:
        table = table / _occurrences(indices, table.shape[0], table.dtype)
    grad_grad, weights_grad = _transposed(
        table,
        grad,
        indices,
        offsets,
        per_sample_weights,
        argmax,
        ctx.mode,
        ctx.padding_idx,
        ctx.needs_input_grad[3],
    )
    return grad_grad, None, None, weights_grad, None, None, None, None, None


def _sparse_backward_backward(ctx, values_grad, _rows_grad):
    grad, indices, offsets, per_sample_weights, argmax, rows = ctx.saved_tensors
    # The table of the transposed lookup has only the rows that occur, and one more for the padding ids.
    positions = torch.searchsorted(rows, indices)
    padding = rows.shape[0]
    positions = positions.masked_fill(indices == ctx.padding_idx, padding)
    if ctx.scale_grad_by_freq:
        values_grad = values_grad / _occurrences(positions, padding + 1, values_grad.dtype)[:padding]
    table = torch.cat([values_grad, values_grad.new_zeros(1, values_grad.shape[1])])
    grad_grad, weights_grad = _transposed(
        table,
        grad,
        positions,
        offsets,
        per_sample_weights,
        argmax,
        ctx.mode,
        padding,
        ctx.needs_input_grad[3],
    )
    return grad_grad, None, None, weights_grad, None, None, None, None, None


def picked_rows(weight: Tensor, indices: Tensor, padding_idx: int) -> Tensor:
    """Return ``weight[indices]``, where ``padding_idx`` may be no row."""
    if padding_idx == weight.shape[0]:
        weight = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
    return weight[indices]


def weights_backward_composite(
    grad: Tensor,
    picked: Tensor,
    per_sample_weights: Tensor,
    output: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: int,
    padding_idx: int,
) -> Tensor:
    """
    Compute ``embedding_weights_backward`` in torch's own differentiable operations.

    ``picked`` are the rows looked up: an [N, D] temporary.
    """
    bags = torch.repeat_interleave(
        torch.arange(offsets.shape[0] - 1, device=offsets.device), offsets.diff(), output_size=indices.shape[0]
    )
    kept = indices != padding_idx
    weights = per_sample_weights * kept
    dots = (grad[bags] * picked).sum(1)
    if mode == _reduction.SUM:
        return dots * kept
    own = (grad * output).sum(1)[bags]
    zeros = grad.new_zeros(offsets.shape[0] - 1)
    if mode == _reduction.MEAN:
        total = zeros.index_add(0, bags, weights)[bags]
        safe = torch.where(total == 0, torch.ones_like(total), total)
        return torch.where((total != 0) & kept, (dots - own) / safe, torch.zeros_like(dots))
    squares = zeros.index_add(0, bags, weights * weights)[bags]
    root = torch.where(squares == 0, torch.ones_like(squares), squares).sqrt()
    return torch.where((squares != 0) & kept, (dots - own * weights / root) / root, torch.zeros_like(dots))


def partial_derivatives(
    result: Tensor, inputs: list[Tensor], needed: list[bool], result_grad: Tensor, create_graph: bool
) -> list[Tensor | None]:
    """
    Differentiate ``result`` with respect to the inputs that need a gradient; None for the others.

    The inputs are aliases: only the part of a gradient that goes through ``result`` counts.
    """
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    grads: tuple[Tensor | None, ...] = ()
    if wanted:
        grads = torch.autograd.grad(result, wanted, result_grad, allow_unused=True, create_graph=create_graph)
    by_input = iter(grads)
    return [next(by_input) if need else None for need in needed]


def _weights_backward_setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.mode, ctx.padding_idx = inputs
    ctx.save_for_backward(*tensors)


def _weights_backward_backward(ctx, grad_result):
    grad, weight, indices, offsets, per_sample_weights, output = ctx.saved_tensors
    needed = [ctx.needs_input_grad[i] for i in (0, 1, 4, 5)]
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [x.view_as(x) for x in (grad, weight, per_sample_weights, output)]
        picked = picked_rows(aliases[1], indices, ctx.padding_idx)
        result = weights_backward_composite(
            aliases[0], picked, aliases[2], aliases[3], indices, offsets, ctx.mode, ctx.padding_idx
        )
        grads = partial_derivatives(result, aliases, needed, grad_result, create_graph)
    return grads[0], grads[1], None, None, grads[2], grads[3], None, None


_embedding = differentiable("embedding", _embedding_backward, _embedding_setup_context)
_embedding_bag = differentiable("embedding_bag", _embedding_bag_backward, _embedding_bag_setup_context)
_dense_backward = differentiable("embedding_dense_backward", _dense_backward_backward, _backward_setup_context)
_sparse_backward = differentiable("embedding_sparse_backward", _sparse_backward_backward, _backward_setup_context)
_weights_backward = differentiable(
    "embedding_weights_backward", _weights_backward_backward, _weights_backward_setup_context
)
