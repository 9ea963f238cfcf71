"""Slow, obvious references of the operators of the family ``sparse_segment``: :mod:`segment`'s, on picked rows."""

from __future__ import annotations

import numpy as np

from .numbers import SUM, on_tensors
from .segment import segment_reduce, segment_reduce_backward, unsorted_segment_reduce


@on_tensors
def sparse_segment_reduce(
    data: np.ndarray, indices: np.ndarray, segment_ids: np.ndarray, num_segments: int | None, reduction: int
) -> np.ndarray:
    return segment_reduce(data[indices], segment_ids, None, num_segments, reduction)


@on_tensors
def sparse_segment_reduce_grad(
    grad: np.ndarray, indices: np.ndarray, segment_ids: np.ndarray, output_dim0: int, reduction: int
) -> np.ndarray:
    received = segment_reduce_backward(grad, None, segment_ids, None, len(indices), reduction)
    return unsorted_segment_reduce(received, indices, output_dim0, SUM)


def sparse_segment_reduce_grad_out(*arguments_and_out: object) -> np.ndarray:
    *arguments, _ = arguments_and_out
    return sparse_segment_reduce_grad(*arguments)


@on_tensors
def sparse_segment_reduce_grad_v2(
    grad: np.ndarray, indices: np.ndarray, segment_ids: np.ndarray, dense_output_dim0: int, reduction: int
) -> tuple[np.ndarray, np.ndarray]:
    rows, positions = np.unique(indices, return_inverse=True)
    return sparse_segment_reduce_grad(grad, positions, segment_ids, len(rows), reduction), rows


def sparse_segment_reduce_grad_v2_out(*arguments_and_outs: object) -> tuple[np.ndarray, np.ndarray]:
    *arguments, _, _ = arguments_and_outs
    return sparse_segment_reduce_grad_v2(*arguments)


FUNCTIONS = (
    sparse_segment_reduce,
    sparse_segment_reduce_grad,
    sparse_segment_reduce_grad_out,
    sparse_segment_reduce_grad_v2,
    sparse_segment_reduce_grad_v2_out,
)
