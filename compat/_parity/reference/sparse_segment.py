"""The slow, obvious meaning of the operators of the family ``sparse_segment``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .numbers import MEAN, SQRTN, SUM, accumulator


def _segment_scale(count: int, reduction: int) -> float:
    return {SUM: 1.0, MEAN: 1.0 / count, SQRTN: 1.0 / math.sqrt(count)}[reduction]


def sparse_segment_reduce(
    data: Tensor, indices: Tensor, segment_ids: Tensor, num_segments: int | None, reduction: int
) -> Tensor:
    ids = segment_ids.tolist()
    if num_segments is None:
        num_segments = ids[-1] + 1 if ids else 0
    values = accumulator(data)
    out = values.new_zeros(num_segments, *data.shape[1:])
    for index, segment in zip(indices.tolist(), ids, strict=True):
        out[segment] += values[index]
    for segment in set(ids):
        out[segment] *= _segment_scale(ids.count(segment), reduction)
    return out.to(data.dtype)


def sparse_segment_reduce_grad(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, reduction: int
) -> Tensor:
    ids = segment_ids.tolist()
    values = accumulator(grad)
    out = values.new_zeros(output_dim0, *grad.shape[1:])
    for index, segment in zip(indices.tolist(), ids, strict=True):
        out[index] += _segment_scale(ids.count(segment), reduction) * values[segment]
    return out.to(grad.dtype)


def sparse_segment_reduce_grad_out(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, reduction: int, out: Tensor
) -> Tensor:
    return sparse_segment_reduce_grad(grad, indices, segment_ids, output_dim0, reduction)


def sparse_segment_reduce_grad_v2(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, dense_output_dim0: int, reduction: int
) -> tuple[Tensor, Tensor]:
    rows = torch.tensor(sorted(set(indices.tolist())), dtype=indices.dtype, device=indices.device)
    dense = sparse_segment_reduce_grad(grad, indices, segment_ids, dense_output_dim0, reduction)
    return dense[rows.long()], rows


def sparse_segment_reduce_grad_v2_out(
    grad: Tensor,
    indices: Tensor,
    segment_ids: Tensor,
    dense_output_dim0: int,
    reduction: int,
    values: Tensor,
    rows: Tensor,
) -> tuple[Tensor, Tensor]:
    return sparse_segment_reduce_grad_v2(grad, indices, segment_ids, dense_output_dim0, reduction)


FUNCTIONS = (
    sparse_segment_reduce,
    sparse_segment_reduce_grad,
    sparse_segment_reduce_grad_out,
    sparse_segment_reduce_grad_v2,
    sparse_segment_reduce_grad_v2_out,
)
