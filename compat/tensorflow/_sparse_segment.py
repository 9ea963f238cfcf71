"""Behind :mod:`.sparse` and :mod:`.raw_ops`: segment reductions of integers, and gradients as sparse tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ... import ops
from ..._torch import mark_coalesced
from ._arguments import as_size, as_tensor

_FORWARD: dict[str, Callable[..., Tensor]] = {
    "sum": ops.sparse_segment_sum,
    "mean": ops.sparse_segment_mean,
    "sqrt_n": ops.sparse_segment_sqrt_n,
}
_GRAD: dict[str, Callable[..., Tensor]] = {
    "sum": ops.sparse_segment_sum_grad,
    "mean": ops.sparse_segment_mean_grad,
    "sqrt_n": ops.sparse_segment_sqrt_n_grad,
}
_GRAD_V2: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "sum": ops.sparse_segment_sum_grad_v2,
    "mean": ops.sparse_segment_mean_grad_v2,
    "sqrt_n": ops.sparse_segment_sqrt_n_grad_v2,
}
# Sums of unsigned integers wrap like those of the signed dtype of their width, for which torch has more operations.
_SIGNED = {
    torch.int8: torch.int8,
    torch.uint8: torch.int8,
    torch.int16: torch.int16,
    torch.uint16: torch.int16,
    torch.int32: torch.int32,
    torch.uint32: torch.int32,
    torch.int64: torch.int64,
    torch.uint64: torch.int64,
}


def segment_reduce(
    reduction: str, data: Any, indices: Any, segment_ids: Any, num_segments: Any, sparse_gradient: bool
) -> Tensor:
    """Reduce (sum, mean or sqrt_n) the rows ``data[indices]`` within each segment."""
    data = as_tensor("data", data)
    indices = as_tensor("indices", indices, empty=torch.int32, device=data.device)
    segment_ids = as_tensor("segment_ids", segment_ids, empty=torch.int32, device=data.device)
    if num_segments is not None:
        num_segments = as_size("num_segments", num_segments)
    if reduction == "sum" and data.dtype in _SIGNED:
        return _integer_sum(data, indices, segment_ids, num_segments)
    if not (sparse_gradient and torch.is_grad_enabled() and data.requires_grad):
        return _FORWARD[reduction](data, indices, segment_ids, num_segments)
    if data.is_leaf:
        keep_coalesced(data)
    return _SparseGradient.apply(data, indices, segment_ids, num_segments, reduction)


def segment_grad(reduction: str, grad: Any, indices: Any, segment_ids: Any, output_dim0: Any) -> Tensor:
    """Return the gradient of :func:`segment_reduce` with respect to ``data``, dense."""
    grad = as_tensor("grad", grad)
    indices = as_tensor("indices", indices, empty=torch.int32, device=grad.device)
    segment_ids = as_tensor("segment_ids", segment_ids, empty=torch.int32, device=grad.device)
    return _GRAD[reduction](grad, indices, segment_ids, as_size("output_dim0", output_dim0, (torch.int32,)))


def segment_grad_v2(
    reduction: str, grad: Any, indices: Any, segment_ids: Any, dense_output_dim0: Any
) -> tuple[Tensor, Tensor]:
    """Return the rows of :func:`segment_grad` that have entries, and their sorted ids in the dtype of ``indices``."""
    grad = as_tensor("grad", grad)
    indices = as_tensor("indices", indices, empty=torch.int32, device=grad.device)
    segment_ids = as_tensor("segment_ids", segment_ids, empty=torch.int32, device=grad.device)
    size = as_size("dense_output_dim0", dense_output_dim0, (torch.int32,))
    return _GRAD_V2[reduction](grad, indices, segment_ids, size)


def _integer_sum(data: Tensor, indices: Tensor, segment_ids: Tensor, num_segments: int | None) -> Tensor:
    """
    Sum integers within segments, wrapping as TensorFlow: differences of one running sum, modulo 2 ** bits.

    Two int64 tensors of the size of ``data[indices]`` are made.
    """
    if data.dim() == 0:
        raise ValueError("data must have rank >= 1, got a scalar")
    # The operator checks the arguments (on CUDA it records bad ids) and sizes the result, on a column of zeros.
    column = torch.zeros(data.shape[0], 1, device=data.device)
    rows = ops.sparse_segment_sum(column, indices, segment_ids, num_segments).shape[0]
    if data.shape[0] == 0:
        return data.new_zeros(rows, *data.shape[1:])
    signed = _SIGNED[data.dtype]
    if data.is_cuda:  # a bad id, recorded above, must not reach torch's gather
        indices = indices.clamp(0, data.shape[0] - 1)
    running = data.view(signed).index_select(0, indices).cumsum(0, dtype=torch.int64)
    running = torch.cat([running.new_zeros(1, *data.shape[1:]), running])
    bounds = torch.arange(rows + 1, device=data.device, dtype=segment_ids.dtype)
    offsets = torch.searchsorted(segment_ids.contiguous(), bounds)
    return (running[offsets[1:]] - running[offsets[:-1]]).to(signed).view(data.dtype)


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

    torch drops that mark when it stores a gradient in a leaf, and joins the entries of several contributions, which
    may then repeat rows; therefore the rows are examined, which on CUDA waits for the device.
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
        mark_coalesced(gradient)
