"""Fake kernels and derivatives of the family ``sparse_segment``, and its operators as public functions call them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._vmap import columns
from .autograd import differentiable

__all__ = ["gradient", "gradient_v2", "reduce_segments"]


# ---- Fake kernels ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("torchsparse_rec::sparse_segment_reduce")
def _(data: Tensor, indices: Tensor, segment_ids: Tensor, num_segments: int | None, reduction: int) -> Tensor:
    rows = torch.library.get_ctx().new_dynamic_size() if num_segments is None else num_segments
    return data.new_empty(rows, *data.shape[1:])


@torch.library.register_fake("torchsparse_rec::sparse_segment_reduce_grad")
def _(grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, reduction: int) -> Tensor:
    return grad.new_empty(output_dim0, *grad.shape[1:])


@torch.library.register_fake("torchsparse_rec::sparse_segment_reduce_grad_out")
def _(grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, reduction: int, out: Tensor) -> None:
    out.resize_(output_dim0, *grad.shape[1:])


@torch.library.register_fake("torchsparse_rec::sparse_segment_reduce_grad_v2")
def _(grad: Tensor, indices: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size()
    return grad.new_empty(rows, *grad.shape[1:]), indices.new_empty(rows)


@torch.library.register_fake("torchsparse_rec::sparse_segment_reduce_grad_v2_out")
def _(grad: Tensor, indices: Tensor, *rest: Any) -> None:
    *_, values, rows = rest
    size = torch.library.get_ctx().new_dynamic_size()
    # set_, where the kernel resizes: torch cannot compare a size known only at run time with the present one.
    values.set_(grad.new_empty(size, *grad.shape[1:]))  # type: ignore[call-overload]
    rows.set_(indices.new_empty(size))  # type: ignore[call-overload]


# ---- Autograd -------------------------------------------------------------------------------------------------------


def _reduce_setup_context(ctx, inputs, output) -> None:
    data, indices, segment_ids, _, reduction = inputs
    ctx.save_for_backward(indices, segment_ids)
    ctx.output_dim0 = data.shape[0]
    ctx.reduction = reduction


def _reduce_backward(ctx, grad):
    indices, segment_ids = ctx.saved_tensors
    result = gradient(grad, indices, segment_ids, ctx.output_dim0, ctx.reduction)
    return result, None, None, None, None


def _transposed(values: Tensor, positions: Tensor, segment_ids: Tensor, num_segments: int, reduction: int) -> Tensor:
    """Differentiate a gradient operator: its transpose is the forward reduction of entries sorted by segment."""
    order = torch.argsort(segment_ids, stable=True)
    return reduce_segments(values, positions[order], segment_ids[order], num_segments, reduction)


def _grad_setup_context(ctx, inputs, output) -> None:
    grad, indices, segment_ids, _, reduction = inputs
    ctx.save_for_backward(indices, segment_ids)
    ctx.num_segments = grad.shape[0]
    ctx.reduction = reduction


def _grad_backward(ctx, grad):
    indices, segment_ids = ctx.saved_tensors
    return _transposed(grad, indices, segment_ids, ctx.num_segments, ctx.reduction), None, None, None, None


def _grad_v2_setup_context(ctx, inputs, output) -> None:
    grad, indices, segment_ids, _, reduction = inputs
    rows = output[1]
    ctx.save_for_backward(indices, segment_ids, rows)
    ctx.mark_non_differentiable(rows)
    ctx.num_segments = grad.shape[0]
    ctx.reduction = reduction


def _grad_v2_backward(ctx, grad_values, _grad_rows):
    indices, segment_ids, rows = ctx.saved_tensors
    positions = torch.searchsorted(rows, indices)
    result = _transposed(grad_values, positions, segment_ids, ctx.num_segments, ctx.reduction)
    return result, None, None, None, None


reduce_segments = differentiable("sparse_segment_reduce", _reduce_backward, _reduce_setup_context)
gradient = differentiable("sparse_segment_reduce_grad", _grad_backward, _grad_setup_context)
gradient_v2 = differentiable("sparse_segment_reduce_grad_v2", _grad_v2_backward, _grad_v2_setup_context)

columns("sparse_segment_reduce")
columns("sparse_segment_reduce_grad")
columns("sparse_segment_reduce_grad_v2", results=(True, False))
