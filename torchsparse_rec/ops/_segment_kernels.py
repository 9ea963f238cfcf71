"""Fake kernels and derivatives of the family ``segment``, and its operators as the public functions call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _library as _library  # loads the schemas
from .. import _reduction
from .autograd import differentiable

__all__ = ["reduce_sorted", "reduce_unsorted"]

_NEEDS_DATA = (_reduction.MAX, _reduction.MIN, _reduction.PROD)


# ---- Fake kernels ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("torchsparse_rec::segment_reduce")
def _(
    data: Tensor, segment_ids: Tensor | None, offsets: Tensor | None, num_segments: int | None, reduction: int
) -> Tensor:
    size = num_segments if offsets is None else offsets.shape[0] - 1
    return data.new_empty(torch.library.get_ctx().new_dynamic_size() if size is None else size, *data.shape[1:])


@torch.library.register_fake("torchsparse_rec::segment_reduce_backward")
def _(grad: Tensor, data: Any, segment_ids: Any, offsets: Any, rows: int, reduction: int) -> Tensor:
    return grad.new_empty(rows, *grad.shape[1:])


@torch.library.register_fake("torchsparse_rec::unsorted_segment_reduce")
def _(data: Tensor, segment_ids: Tensor, num_segments: int, reduction: int) -> Tensor:
    return data.new_empty(num_segments, *data.shape[segment_ids.dim() :])


@torch.library.register_fake("torchsparse_rec::unsorted_segment_reduce_backward")
def _(grad: Tensor, data: Tensor | None, segment_ids: Tensor, reduction: int) -> Tensor:
    return grad.new_empty((*segment_ids.shape, *grad.shape[1:]))


# ---- Autograd -------------------------------------------------------------------------------------------------------


def _reduce_setup_context(ctx, inputs, output) -> None:
    data, segment_ids, offsets, _, reduction = inputs
    ctx.save_for_backward(data if reduction in _NEEDS_DATA else None, segment_ids, offsets)
    ctx.rows = data.shape[0]
    ctx.reduction = reduction


def _reduce_backward(ctx, grad):
    data, segment_ids, offsets = ctx.saved_tensors
    result = reduce_sorted_backward(grad, data, segment_ids, offsets, ctx.rows, ctx.reduction)
    return result, None, None, None, None


def _unsorted_setup_context(ctx, inputs, output) -> None:
    data, segment_ids, _, reduction = inputs
    ctx.save_for_backward(data if reduction in _NEEDS_DATA else None, segment_ids)
    ctx.reduction = reduction


def _unsorted_backward(ctx, grad):
    data, segment_ids = ctx.saved_tensors
    return reduce_unsorted_backward(grad, data, segment_ids, ctx.reduction), None, None, None


# A gradient's own gradients, sorted and unsorted alike. reduce(values, reduction) is the forward operator over the same
# segments, share(rows, data, reduction) its gradient, and upstream the gradient with respect to the gradient's result.
_Reduce = Callable[[Tensor, int], Tensor]
_Share = Callable[[Tensor, Tensor | None, int], Tensor]


def _gradients(
    upstream: Tensor, grad: Tensor, data: Tensor | None, reduction: int, reduce: _Reduce, share: _Share
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of a gradient operator with respect to its ``grad`` and ``data``."""
    if data is None or reduction not in _NEEDS_DATA:
        return reduce(upstream, reduction), None
    weights = share(torch.ones_like(grad), data, reduction)  # the gradient is grad times these
    to_grad = reduce(upstream * weights, _reduction.SUM)
    if reduction == _reduction.PROD:
        return to_grad, _product_of_all_but_two(upstream, grad, data, reduce, share)
    return to_grad, None


def _product_of_all_but_two(upstream: Tensor, grad: Tensor, data: Tensor, reduce: _Reduce, share: _Share) -> Tensor:
    """Return ``grad[s] * sum(upstream[i] * (product of rows but i and k) for i != k)`` for each row k, zeros or not."""

    def sums(values: Tensor) -> Tensor:
        return share(reduce(values, _reduction.SUM), None, _reduction.SUM)

    is_zero = data == 0
    numbers = torch.where(is_zero, 1, data)
    ratios = torch.where(is_zero, 0, upstream / numbers)
    at_zeros = torch.where(is_zero, upstream, 0)
    zeros, all_ratios, all_at_zeros = sums(is_zero.to(data.dtype)), sums(ratios), sums(at_zeros)
    # Both left-out rows are numbers; one of them is the only zero; they are the only two zeros.
    without_zero = (all_ratios - ratios) / numbers
    one_zero = torch.where(is_zero, all_ratios, all_at_zeros / numbers)
    two_zeros = torch.where(is_zero, all_at_zeros - at_zeros, 0)
    others = torch.where(
        zeros == 0, without_zero, torch.where(zeros == 1, one_zero, torch.where(zeros == 2, two_zeros, 0))
    )
    return others * share(grad * reduce(numbers, _reduction.PROD), None, _reduction.SUM)


def _backward_setup_context(ctx, inputs, output) -> None:
    grad, data, segment_ids, offsets, _, reduction = inputs
    needed = reduction in _NEEDS_DATA
    ctx.save_for_backward(grad if needed else None, data if needed else None, segment_ids, offsets)
    ctx.segments = None if segment_ids is None else grad.shape[0]
    ctx.reduction = reduction


def _backward_backward(ctx, upstream):
    grad, data, segment_ids, offsets = ctx.saved_tensors

    def reduce(values: Tensor, reduction: int) -> Tensor:
        return reduce_sorted(values, segment_ids, offsets, ctx.segments, reduction)

    def share(rows: Tensor, data: Tensor | None, reduction: int) -> Tensor:
        return reduce_sorted_backward(rows, data, segment_ids, offsets, upstream.shape[0], reduction)

    return *_gradients(upstream, grad, data, ctx.reduction, reduce, share), None, None, None, None


def _unsorted_backward_setup_context(ctx, inputs, output) -> None:
    grad, data, segment_ids, reduction = inputs
    needed = reduction in _NEEDS_DATA
    ctx.save_for_backward(grad if needed else None, data if needed else None, segment_ids)
    ctx.segments = grad.shape[0]
    ctx.reduction = reduction


def _unsorted_backward_backward(ctx, upstream):
    grad, data, segment_ids = ctx.saved_tensors

    def reduce(values: Tensor, reduction: int) -> Tensor:
        return reduce_unsorted(values, segment_ids, ctx.segments, reduction)

    def share(rows: Tensor, data: Tensor | None, reduction: int) -> Tensor:
        return reduce_unsorted_backward(rows, data, segment_ids, reduction)

    return *_gradients(upstream, grad, data, ctx.reduction, reduce, share), None, None


reduce_sorted = differentiable("segment_reduce", _reduce_backward, _reduce_setup_context)
reduce_sorted_backward = differentiable("segment_reduce_backward", _backward_backward, _backward_setup_context)
reduce_unsorted = differentiable("unsorted_segment_reduce", _unsorted_backward, _unsorted_setup_context)
reduce_unsorted_backward = differentiable(
    "unsorted_segment_reduce_backward", _unsorted_backward_backward, _unsorted_backward_setup_context
)
