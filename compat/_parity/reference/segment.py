"""The slow, obvious meaning of the segment reductions without indices."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .numbers import MAX, MEAN, MIN, PROD, SQRTN, SUM

_HALVES = (torch.float16, torch.bfloat16)


def _wrapped(number: int, dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return (number - info.min) % (info.max - info.min + 1) + info.min


def _reduced_integers(numbers: list[int], reduction: int, dtype: torch.dtype) -> int:
    if reduction in (MAX, MIN):
        return max(numbers) if reduction == MAX else min(numbers)
    total = _wrapped(math.prod(numbers) if reduction == PROD else sum(numbers), dtype)
    if reduction != MEAN:
        return total
    count = _wrapped(len(numbers), dtype)
    quotient = abs(total) // abs(count) if count else 0
    return _wrapped(quotient if (total < 0) == (count < 0) else -quotient, dtype)


def _reduced_floats(numbers: list[float], reduction: int) -> float:
    if reduction in (MAX, MIN):
        if any(math.isnan(x) for x in numbers):
            return math.nan
        return max(numbers) if reduction == MAX else min(numbers)
    if reduction == PROD:
        return math.prod(numbers)
    if not all(map(math.isfinite, numbers)):
        return sum(numbers)  # whatever it is divided by
    return math.fsum(numbers) / {SUM: 1, MEAN: len(numbers), SQRTN: math.sqrt(len(numbers))}[reduction]


def _empty(dtype: torch.dtype, reduction: int, unsorted: bool) -> float | int:
    if reduction == PROD:
        return 1
    if not unsorted or reduction not in (MAX, MIN):
        return 0
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min if reduction == MAX else info.max


def _reduce(
    data: Tensor, ids: list[int], segments: int, row: tuple[int, ...], reduction: int, unsorted: bool
) -> Tensor:
    columns = math.prod(row)
    numbers = data.reshape(-1).tolist()
    members: list[list[int]] = [[] for _ in range(segments)]
    for i, s in enumerate(ids):
        if s >= 0:
            members[s].append(i)
    result = []
    for member in members:
        for c in range(columns):
            column = [numbers[i * columns + c] for i in member]
            if not column:
                result.append(_empty(data.dtype, reduction, unsorted))
            elif data.is_floating_point():
                result.append(_reduced_floats(column, reduction))
            else:
                result.append(_reduced_integers(column, reduction, data.dtype))
    if data.dtype in _HALVES:
        return torch.tensor(result, dtype=torch.float32).to(data.dtype).reshape((segments, *row))
    return torch.tensor(result, dtype=data.dtype).reshape((segments, *row))


def _ids(segment_ids: Tensor | None, offsets: Tensor | None) -> list[int]:
    if segment_ids is not None:
        return segment_ids.reshape(-1).tolist()
    bounds = offsets.tolist()
    return [s for s, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)) for _ in range(a, b)]


def segment_reduce(
    data: Tensor, segment_ids: Tensor | None, offsets: Tensor | None, num_segments: int | None, reduction: int
) -> Tensor:
    ids = _ids(segment_ids, offsets)
    if num_segments is None:
        num_segments = len(offsets) - 1 if offsets is not None else (ids[-1] + 1 if ids else 0)
    return _reduce(data, ids, num_segments, data.shape[1:], reduction, unsorted=False)


def unsorted_segment_reduce(data: Tensor, segment_ids: Tensor, num_segments: int, reduction: int) -> Tensor:
    ids = segment_ids.reshape(-1).tolist()
    return _reduce(data, ids, num_segments, data.shape[segment_ids.dim() :], reduction, unsorted=True)


def _parts(numbers: list[float], reduction: int) -> Iterable[float]:
    """What each number receives of one unit."""
    n = len(numbers)
    if reduction in (SUM, MEAN, SQRTN):
        return [{SUM: 1.0, MEAN: 1.0 / n, SQRTN: 1.0 / math.sqrt(n)}[reduction]] * n
    if reduction == PROD:
        return [math.prod(numbers[:i] + numbers[i + 1 :]) for i in range(n)]
    extreme = _reduced_floats(numbers, reduction)
    return [1.0 / numbers.count(extreme) if x == extreme else 0.0 for x in numbers]


def _backward(grad: Tensor, data: Tensor | None, ids: list[int], reduction: int) -> Tensor:
    columns = math.prod(grad.shape[1:])
    grads = grad.reshape(-1).tolist()
    numbers = [0.0] * (len(ids) * columns) if data is None else data.reshape(-1).tolist()
    result = [0.0] * (len(ids) * columns)
    for s in set(ids) - {x for x in ids if x < 0}:
        member = [i for i, x in enumerate(ids) if x == s]
        for c in range(columns):
            parts = _parts([numbers[i * columns + c] for i in member], reduction)
            for i, part in zip(member, parts, strict=True):
                result[i * columns + c] = grads[s * columns + c] * part if part else 0.0
    dtype = torch.float32 if grad.dtype in _HALVES else grad.dtype
    return torch.tensor(result, dtype=dtype).to(grad.dtype)


def segment_reduce_backward(
    grad: Tensor, data: Tensor | None, segment_ids: Tensor | None, offsets: Tensor | None, rows: int, reduction: int
) -> Tensor:
    return _backward(grad, data, _ids(segment_ids, offsets), reduction).reshape(rows, *grad.shape[1:])


def unsorted_segment_reduce_backward(grad: Tensor, data: Tensor | None, segment_ids: Tensor, reduction: int) -> Tensor:
    ids = segment_ids.reshape(-1).tolist()
    return _backward(grad, data, ids, reduction).reshape((*segment_ids.shape, *grad.shape[1:]))


FUNCTIONS = (segment_reduce, segment_reduce_backward, unsorted_segment_reduce, unsorted_segment_reduce_backward)
