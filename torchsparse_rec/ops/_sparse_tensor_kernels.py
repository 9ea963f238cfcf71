"""Fake kernels and derivatives of the family ``sparse_tensor``, and its operators as the public functions call them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .autograd import differentiable, not_differentiable

__all__ = ["fill", "fill_grad", "to_dense"]

_ops = torch.ops.torchsparse_rec


# ---- Fake kernels ---------------------------------------------------------------------------------------------------


@torch.library.register_fake("torchsparse_rec::sparse_reshape")
def _(indices: Tensor, shape: list[int], new_shape: list[int]) -> Tensor:
    return indices.new_empty(indices.shape[0], len(new_shape))


@torch.library.register_fake("torchsparse_rec::sparse_fill_empty_rows")
def _(indices: Tensor, values: Tensor, num_rows: int, default_value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    filled = torch.library.get_ctx().new_dynamic_size()
    return (
        values.new_empty(filled),
        indices.new_empty(filled, indices.shape[1]),
        indices.new_empty(num_rows, dtype=torch.bool),
        indices.new_empty(indices.shape[0]),
    )


@torch.library.register_fake("torchsparse_rec::sparse_fill_empty_rows_grad")
def _(reverse_index_map: Tensor, grad_values: Tensor) -> tuple[Tensor, Tensor]:
    return grad_values.new_empty(reverse_index_map.shape), grad_values.new_empty(())


@torch.library.register_fake("torchsparse_rec::sparse_reorder")
def _(indices: Tensor) -> tuple[Tensor, Tensor]:
    return indices.new_empty(indices.shape), indices.new_empty(indices.shape[0])


@torch.library.register_fake("torchsparse_rec::sparse_to_dense")
def _(indices: Tensor, shape: list[int], values: Tensor, default_value: Tensor, validate: bool) -> Tensor:
    return values.new_empty(shape)


# ---- Autograd -------------------------------------------------------------------------------------------------------


def _fill_setup_context(ctx, inputs, output) -> None:
    _, indices, is_empty, reverse_index_map = output
    ctx.mark_non_differentiable(indices, is_empty, reverse_index_map)
    ctx.save_for_backward(reverse_index_map)


def _fill_backward(ctx, grad, _indices, _is_empty, _map):
    (reverse_index_map,) = ctx.saved_tensors
    if grad.is_complex():
        parts = [fill_grad(reverse_index_map, x) for x in (grad.real, grad.imag)]
        d_values, d_default = (torch.complex(*pair) for pair in zip(*parts, strict=True))
    else:
        d_values, d_default = fill_grad(reverse_index_map, grad)
    return None, d_values, None, d_default


def _fill_grad_setup_context(ctx, inputs, output) -> None:
    reverse_index_map, grad_values = inputs
    ctx.save_for_backward(reverse_index_map)
    ctx.filled = grad_values.shape[0]


def _fill_grad_backward(ctx, grad_values, grad_default):
    (reverse_index_map,) = ctx.saved_tensors
    if ctx.filled == 0:
        return None, grad_values.new_empty(0)
    # Positions that were refused (on CUDA they are recorded) must not reach torch's kernels.
    positions = reverse_index_map.clamp(0, ctx.filled - 1)
    result = grad_default.expand(ctx.filled).index_fill(0, positions, 0)
    return None, result.index_add(0, positions, grad_values)


def _elements(indices: Tensor, shape: Sequence[int]) -> Tensor:
    """Return each entry's position in row-major order; an index outside the shape counts as the nearest inside."""
    elements = indices.new_zeros(indices.shape[0])
    for d, size in enumerate(shape):
        elements = elements * size + indices[:, d].clamp(0, size - 1)
    return elements


def _dense_setup_context(ctx, inputs, output) -> None:
    indices, ctx.shape, _, _, ctx.validate = inputs
    ctx.save_for_backward(indices)


def _dense_backward(ctx, grad):
    (indices,) = ctx.saved_tensors
    flat = grad.reshape(-1)
    if flat.shape[0] == 0:
        return None, None, grad.new_zeros(indices.shape[0]), grad.new_zeros(()), None
    elements = _elements(indices, ctx.shape)
    d_values = flat.index_select(0, elements)
    if ctx.validate and not ctx.needs_input_grad[3]:
        return None, None, d_values, None, None
    # Each element's entry, counted from 1, or 0: an entry that another has replaced gets no gradient.
    numbers = torch.arange(1, indices.shape[0] + 1, device=indices.device)
    owners = _ops.sparse_to_dense.default(indices, ctx.shape, numbers, numbers.new_zeros(()), ctx.validate).reshape(-1)
    d_values = torch.where(owners.index_select(0, elements) == numbers, d_values, 0)
    return None, None, d_values, torch.where(owners == 0, flat, 0).sum(), None


fill = differentiable("sparse_fill_empty_rows", _fill_backward, _fill_setup_context)
fill_grad = differentiable("sparse_fill_empty_rows_grad", _fill_grad_backward, _fill_grad_setup_context)
to_dense = differentiable("sparse_to_dense", _dense_backward, _dense_setup_context)

not_differentiable("sparse_reshape", "sparse_reorder")
