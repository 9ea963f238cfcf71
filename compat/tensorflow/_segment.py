"""Behind :mod:`.math` and :mod:`.raw_ops`: TensorFlow's segment reductions, checks and odd cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import ops
from .arguments import as_size, as_tensor, holds_integers

# Our operators have TensorFlow's names.
_SORTED: dict[str, Callable[..., Tensor]] = {
    reduction: getattr(ops, f"segment_{reduction}") for reduction in ("sum", "mean", "max", "min", "prod")
}
_UNSORTED: dict[str, Callable[..., Tensor]] = {
    reduction: getattr(ops, f"unsorted_segment_{reduction}") for reduction in (*_SORTED, "sqrt_n")
}
_NARROW = (torch.int8, torch.uint8, torch.int16, torch.uint16)


def segment_reduce(reduction: str, data: Any, segment_ids: Any) -> Tensor:
    """Reduce rows by sorted segment ids; the result has the last id + 1 rows."""
    data = as_tensor("data", data)
    segment_ids = as_tensor("segment_ids", segment_ids, device=data.device)
    if data.dim() == 0:  # before torch.view_as_real gives it a rank
        raise ValueError("segment_reduce: data must have rank >= 1, got a scalar")
    if data.is_complex() and reduction in ("sum", "mean"):
        return torch.view_as_complex(_SORTED[reduction](torch.view_as_real(data), segment_ids))
    if data.is_complex() and reduction == "prod":
        ones = ops.segment_prod(torch.ones_like(data.real), segment_ids)
        return _complex_products(data, segment_ids, ones)
    return _SORTED[reduction](data, segment_ids)


def unsorted_segment_reduce(reduction: str, data: Any, segment_ids: Any, num_segments: Any) -> Tensor:
    """Reduce rows by segment ids in any order; rows whose id is negative are left out."""
    data = as_tensor("data", data)
    segment_ids = as_tensor("segment_ids", segment_ids, device=data.device)
    num_segments = as_size("num_segments", num_segments)
    if segment_ids.dtype == torch.int16 and reduction in ("sum", "mean", "sqrt_n"):
        segment_ids = segment_ids.int()
    if data.numel() == 0 and reduction not in ("mean", "sqrt_n") and segment_ids.dtype in (torch.int32, torch.int64):
        segment_ids = torch.full_like(segment_ids, -1)  # no row depends on the ids then
    if data.is_complex() and reduction == "sum" and data.dim() >= segment_ids.dim():
        parts = ops.unsorted_segment_sum(torch.view_as_real(data), segment_ids, num_segments)
        return torch.view_as_complex(parts)
    if data.is_complex() and reduction == "prod":
        ones = ops.unsorted_segment_prod(torch.ones_like(data.real), segment_ids, num_segments)
        rows = data.reshape(segment_ids.numel(), *data.shape[segment_ids.dim() :])
        return _complex_products(rows, segment_ids.reshape(-1), ones)
    if reduction == "mean" and holds_integers(data):
        return _mean_of_integers(data, segment_ids, num_segments)
    result = _UNSORTED[reduction](data, segment_ids, num_segments)
    if reduction in ("max", "min") and result.is_floating_point():
        # TensorFlow starts from the lowest or highest finite number: an infinity beyond it does not win either.
        limit = torch.finfo(result.dtype)
        return result.clamp_min(limit.min) if reduction == "max" else result.clamp_max(limit.max)
    return result


def _complex_products(data: Tensor, segment_ids: Tensor, ones: Tensor) -> Tensor:
    """
    Multiply complex rows within segments by torch's operations: neighbours in pairs, until a segment has one row.

    ``ones`` is the reduction of ones: it has the shape of the result, and the ids have been checked for it.
    """
    kept = (segment_ids >= 0) & (segment_ids < ones.shape[0])  # on CUDA bad ids are recorded, not refused
    ids, order = segment_ids[kept].long().sort(stable=True)
    rows = data[kept][order]
    while True:
        numbers = torch.arange(ids.shape[0], device=ids.device)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[1:] = ids[1:] != ids[:-1]
        if bool(begins.all()):
            return ones.to(data.dtype).index_copy(0, ids, rows)
        second = (numbers - torch.where(begins, numbers, 0).cummax(0).values) % 2 == 1
        pairs = second.nonzero().squeeze(1)
        first = (~second).cumsum(0)[pairs] - 1
        ids, merged = ids[~second], rows[~second]
        rows = merged.index_copy(0, first, merged[first] * rows[pairs])


def _mean_of_integers(data: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Return a mean of integers as a float: sum and count wrap in the dtype of the data; a count below 1 is 1."""
    sums = ops.unsorted_segment_sum(data, segment_ids, num_segments)
    ones = torch.ones(segment_ids.shape, dtype=data.dtype, device=data.device)
    counts = ops.unsorted_segment_sum(ones, segment_ids, num_segments)
    wide = torch.float32 if data.dtype in _NARROW else torch.float64
    return sums.to(wide) / counts.to(wide).clamp_min(1).reshape(-1, *[1] * (sums.dim() - 1))
