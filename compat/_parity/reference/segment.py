"""Slow, obvious references of the segment reductions without indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .numbers import MAX, MEAN, MIN, PROD, SQRTN, SUM, on_tensors

Array = np.ndarray  # or a Tensor: see on_tensors


def _limits(x: Array | Tensor) -> tuple[float, float]:
    """Return the lowest and the highest finite number of the dtype of ``x``."""
    if isinstance(x, Tensor):
        given = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        return given.min, given.max
    info: Any = np.iinfo(x.dtype) if x.dtype.kind in "iu" else np.finfo(x.dtype)
    return info.min, info.max


def _beside(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Return a number for each row in a shape that broadcasts over the rows of ``like``."""
    return x.reshape(-1, *[1] * (like.ndim - 1))


def _ids(segment_ids: Array | None, offsets: Array | None) -> np.ndarray:
    if segment_ids is not None:
        return np.asarray(segment_ids).reshape(-1).astype(np.int64)
    bounds = np.asarray(offsets)
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


def _counts(ids: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(ids[ids >= 0], minlength=size)


def _divisors(counts: np.ndarray, reduction: int) -> np.ndarray:
    counts = np.maximum(counts, 1).astype(np.longdouble)
    return {MEAN: counts, SQRTN: np.sqrt(counts)}.get(reduction, np.ones_like(counts))


@on_tensors
def _reduced(x: np.ndarray, ids: np.ndarray, size: int, reduction: int, empty: float) -> np.ndarray:
    """Reduce the rows of each id that is not negative; integers wrap."""
    is_integer = x.dtype.kind in "iu"
    counts, kept = _counts(ids, size), ids >= 0
    add = {PROD: np.multiply, MAX: np.maximum, MIN: np.minimum}.get(reduction, np.add)
    lowest, highest = _limits(x) if is_integer else (-np.inf, np.inf)
    start = {PROD: 1, MAX: lowest, MIN: highest}.get(reduction, 0)
    out = np.full((size, *x.shape[1:]), start, x.dtype)
    add.at(out, ids[kept], x[kept])
    if reduction == MEAN and is_integer:
        divisors = _beside(counts.astype(x.dtype), x)
        out = (out - np.fmod(out, divisors)) // divisors  # cut towards zero; 0 if the divisor is 0
    elif reduction in (MEAN, SQRTN):
        out = out / _beside(_divisors(counts, reduction), x)
    out[counts == 0] = empty
    return out


def segment_reduce(
    data: Array, segment_ids: Array | None, offsets: Array | None, num_segments: int | None, reduction: int
) -> Array:
    ids = _ids(segment_ids, offsets)
    if num_segments is None:
        num_segments = len(offsets) - 1 if offsets is not None else int(ids.max(initial=-1)) + 1
    return _reduced(data, ids, num_segments, reduction, 1 if reduction == PROD else 0)


def unsorted_segment_reduce(data: Array, segment_ids: Array, num_segments: int, reduction: int) -> Array:
    ids, (lowest, highest) = _ids(segment_ids, None), _limits(data)
    empty = {PROD: 1, MAX: lowest, MIN: highest}.get(reduction, 0)
    return _reduced(data.reshape(len(ids), *data.shape[segment_ids.ndim :]), ids, num_segments, reduction, empty)


@on_tensors
def _received(grad: np.ndarray, x: Any, ids: np.ndarray, reduction: int) -> np.ndarray:
    """Return each row's gradient: its part of its id's gradient, nothing if the id is negative."""
    size, kept = len(grad), ids >= 0
    if size == 0:
        return np.zeros((len(ids), *grad.shape[1:]), grad.dtype)
    place = np.maximum(ids, 0)
    if reduction in (MAX, MIN):
        is_best = (x == _reduced(x, ids, size, reduction, 0)[place]).astype(np.longdouble)
        part = is_best / np.maximum(_reduced(is_best, ids, size, SUM, 0)[place], 1)
    elif reduction == PROD:
        # The product of all numbers but zeros, divided by the row's own.
        is_zero, numbers = x == 0, np.where(x == 0, 1, x)
        zeros = _reduced(is_zero.astype(np.int64), ids, size, SUM, 0)[place]
        part = np.where(zeros == is_zero, _reduced(numbers, ids, size, PROD, 1)[place] / numbers, 0)
    else:
        part = _beside(1 / _divisors(_counts(ids, size), reduction)[place], grad)
    return np.where((part == 0) | ~_beside(kept, grad), 0, grad[place] * part)


def segment_reduce_backward(
    grad: Array, data: Array | None, segment_ids: Array | None, offsets: Array | None, rows: int, reduction: int
) -> Array:
    return _received(grad, data, _ids(segment_ids, offsets), reduction)


def unsorted_segment_reduce_backward(grad: Array, data: Array | None, segment_ids: Array, reduction: int) -> Array:
    ids = _ids(segment_ids, None)
    rows = None if data is None else data.reshape(len(ids), *grad.shape[1:])
    return _received(grad, rows, ids, reduction).reshape((*segment_ids.shape, *grad.shape[1:]))


FUNCTIONS = (segment_reduce, segment_reduce_backward, unsorted_segment_reduce, unsorted_segment_reduce_backward)
