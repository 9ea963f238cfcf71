"""Behind :mod:`.sparse` and :mod:`.raw_ops`: segment reductions of integers, and gradients as sparse tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ... import ops
from ..._torch_modules import mark_coalesced
from ...ops.unique import take_slices
from .arguments import as_size, as_tensor, holds_integers

# Our operators have TensorFlow's names.
_REDUCTIONS = ("sum", "mean", "sqrt_n")
_FORWARD: dict[str, Callable[..., Tensor]] = {x: getattr(ops, f"sparse_segment_{x}") for x in _REDUCTIONS}
_GRAD: dict[str, Callable[..., Tensor]] = {x: getattr(ops, f"sparse_segment_{x}_grad") for x in _REDUCTIONS}
_GRAD_V2: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    x: getattr(ops, f"sparse_segment_{x}_grad_v2") for x in _REDUCTIONS
}


def sparse_segment_reduce(
    reduction: str, data: Any, indices: Any, segment_ids: Any, num_segments: Any, sparse_gradient: bool
) -> Tensor:
    """Reduce (sum, mean or sqrt_n) the rows ``data[indices]`` within each segment."""
    data, indices, segment_ids = _tensors("data", data, indices, segment_ids)
    if num_segments is not None:
        num_segments = as_size("num_segments", num_segments)
    if reduction == "sum" and holds_integers(data):
        return _integer_sum(data, indices, segment_ids, num_segments)
    if not (sparse_gradient and torch.is_grad_enabled() and data.requires_grad):
        return _FORWARD[reduction](data, indices, segment_ids, num_segments)
    if data.is_leaf:
        keep_coalesced(data)
    return _SparseGradient.apply(data, indices, segment_ids, num_segments, reduction)


def segment_grad(reduction: str, grad: Any, indices: Any, segment_ids: Any, argument: str, size: Any) -> Tensor:
    """Return the dense gradient of :func:`sparse_segment_reduce` for ``data``; its rows are the number ``argument``."""
    return _GRAD[reduction](*_tensors("grad", grad, indices, segment_ids), as_size(argument, size, (torch.int32,)))


def segment_grad_v2(
    reduction: str, grad: Any, indices: Any, segment_ids: Any, argument: str, size: Any
) -> tuple[Tensor, Tensor]:
    """Return the rows of :func:`segment_grad` that have entries, and their sorted ids in the dtype of ``indices``."""
    return _GRAD_V2[reduction](*_tensors("grad", grad, indices, segment_ids), as_size(argument, size, (torch.int32,)))


def _tensors(argument: str, rows: Any, indices: Any, segment_ids: Any) -> tuple[Tensor, Tensor, Tensor]:
    """
    Convert the common arguments of these operators: rows, called ``argument``, and on their device the two kinds of
    ids.
    """
    rows = as_tensor(argument, rows)
    indices = as_tensor("indices", indices, empty=torch.int32, device=rows.device)
    return rows, indices, as_tensor("segment_ids", segment_ids, empty=torch.int32, device=rows.device)


def _integer_sum(data: Tensor, indices: Tensor, segment_ids: Tensor, num_segments: int | None) -> Tensor:
    """Sum integers within segments; sums wrap."""
    if data.dim() == 0:
        raise ValueError("data must have rank >= 1, got a scalar")
    # The operator checks the arguments (on CUDA it records bad ids) and sizes the result, on a column of zeros.
    column = torch.zeros(data.shape[0], 1, device=data.device)
    rows = ops.sparse_segment_sum(column, indices, segment_ids, num_segments).shape[0]
    if data.shape[0] == 0:
        return data.new_zeros(rows, *data.shape[1:])
    if data.is_cuda:  # a bad id, recorded above, must not reach torch's gather
        indices = indices.clamp(0, data.shape[0] - 1)
    return ops.unsorted_segment_sum(take_slices(data, 0, indices), segment_ids, rows)


class _SparseGradient(torch.autograd.Function):
    """A segment reduction whose gradient is a sparse COO tensor with sorted, unique rows."""

    @staticmethod
    def forward(
        ctx: Any, data: Tensor, indices: Tensor, segment_ids: Tensor, num_segments: int | None, reduction: str
    ) -> Tensor:
        ctx.save_for_backward(indices, segment_ids)
        ctx.shape = data.shape
        ctx.reduction = reduction
        return _FORWARD[reduction](data, indices, segment_ids, num_segments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        indices, segment_ids = ctx.saved_tensors
        values, rows = _GRAD_V2[ctx.reduction](grad, indices, segment_ids, ctx.shape[0])
        gradient = torch.sparse_coo_tensor(
            rows.long().unsqueeze(0), values, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return gradient, None, None, None, None


_HOOKED = WeakIdKeyDictionary()


def keep_coalesced(data: Tensor) -> None:
    """
    Mark ``data.grad`` as coalesced whenever its rows are sorted and unique.

    torch drops that mark when it stores a gradient in a leaf, and joins the entries of several contributions, which may
    then repeat rows. Therefore the rows are examined, which on CUDA waits for the device.
    """
    if data in _HOOKED:
        return
    _HOOKED[data] = data.register_post_accumulate_grad_hook(_mark_coalesced)


def _mark_coalesced(data: Tensor) -> None:
    gradient = data.grad
    if gradient is None or not gradient.is_sparse or gradient.is_coalesced():
        return
    rows = gradient._indices()[0]
    if bool((rows[1:] > rows[:-1]).all()):
        mark_coalesced(gradient, True)
