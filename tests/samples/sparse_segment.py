"""Sample inputs of the family ``segment``: calls of the forward, each also a sample of the gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from samples.sample import (
    DIMENSIONS,
    FLOATS,
    INDICES,
    LAST_SEGMENT,
    PRESENT_ROWS,
    REDUCTIONS,
    Family,
    Random,
    Sample,
)
from torch import Tensor

from torchsparse_rec.compat._parity.reference import MEAN


@dataclass(frozen=True)
class _Segments:
    """A problem of the forward, and ``grad``, the gradient of its result: one row per segment."""

    name: str
    data: Tensor
    indices: Tensor
    segment_ids: Tensor
    num_segments: int | None
    grad: Tensor
    representative: bool = False


def _random_segments(
    name: str,
    rows: int = 11,
    items: int = 40,
    segments: int = 9,
    shape: tuple[int, ...] = (3,),
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    segment: torch.dtype = torch.int64,
    num_segments: int | None = None,
    used: tuple[int, int] | None = None,
    representative: bool = False,
    seed: int = 0,
) -> _Segments:
    """Return random rows; ``used`` is the half-open range of segments with entries; ``num_segments`` may exceed it."""
    random = Random(seed)
    low, high = used or (0, max(segments, 1))
    ids = random.integers(low, high, items, dtype=segment).sort().values
    rows_out = num_segments if num_segments is not None else (int(ids[-1]) + 1 if items else 0)
    return _Segments(
        name,
        random.floats(rows, *shape, dtype=dtype),
        random.integers(0, max(rows, 1), items, dtype=index),
        ids,
        num_segments,
        random.floats(rows_out, *shape, dtype=dtype),
        representative,
    )


def _by_hand() -> _Segments:
    return _Segments(
        "by_hand",
        torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        torch.tensor([0, 2, 1, 0]),
        torch.tensor([0, 0, 2, 2]),
        4,
        torch.tensor([[2.0, 4.0], [1.0, 1.0], [6.0, 8.0], [1.0, 1.0]]),
        representative=True,
    )


def _segment_problems() -> Iterator[_Segments]:
    yield _by_hand()
    kinds = itertools.product(FLOATS, DIMENSIONS)
    index_kinds = itertools.cycle(itertools.product(INDICES, INDICES))
    for seed, ((dtype, dim), (index, segment)) in enumerate(zip(kinds, index_kinds, strict=False)):
        name = f"{dtype}_{dim}_{index}_{segment}".replace("torch.", "")
        yield _random_segments(name, shape=(dim,), dtype=dtype, index=index, segment=segment, seed=seed)
    yield _random_segments("rank_1", shape=())
    yield _random_segments("rank_3", shape=(2, 5), num_segments=9)
    yield _random_segments("rank_4", shape=(2, 1, 3), dtype=torch.float64)
    yield _random_segments("no_num_segments", items=12, representative=True)
    yield _random_segments("empty_leading_and_trailing", used=(4, 7), num_segments=12)
    yield _random_segments("mostly_empty", items=5, segments=60, num_segments=70, index=torch.int32)
    yield _random_segments("one_entry_each", items=30, segments=1000, num_segments=1000)
    yield _random_segments("all_in_one_segment", items=100, used=(0, 1), segment=torch.int32)
    yield _random_segments("all_the_same_row", rows=1, items=100, dtype=torch.float16)
    yield _random_segments("one_entry", rows=1, items=1, segments=1)
    yield _random_segments("no_entries", items=0, num_segments=5, representative=True)
    yield _random_segments("no_entries_no_num_segments", items=0, segments=0)
    yield _random_segments("no_rows_no_entries", rows=0, items=0, num_segments=3)
    yield _random_segments("no_segments", items=0, num_segments=0)
    yield _random_segments("no_columns", shape=(0,))
    yield _random_segments("no_columns_rank_3", shape=(4, 0), num_segments=20)
    yield _random_segments("many_entries", rows=150, items=900, segments=200, shape=(5,), seed=7)


def sparse_segment_samples(operator: str, extra: Callable[[_Segments], tuple]) -> Iterator[Sample]:
    """Yield every problem with every reduction; ``extra`` makes the arguments that the operator writes into."""
    forward = operator == "sparse_segment_reduce"
    for problem in _segment_problems():
        values, size = (problem.data, problem.num_segments) if forward else (problem.grad, problem.data.shape[0])
        for reduction, word in REDUCTIONS.items():
            arguments = (values, problem.indices, problem.segment_ids, size, reduction, *extra(problem))
            representative = problem.representative and reduction == MEAN
            yield Sample(operator, f"{problem.name}-{word}", arguments, representative)
    if not forward:
        random = Random(3)
        ids = random.integers(0, 6, 25, dtype=torch.int64)
        unsorted = _Segments(
            "unsorted_segment_ids",
            torch.empty(8, 4),
            random.integers(0, 8, 25, dtype=torch.int32),
            ids,
            6,
            random.floats(6, 4, dtype=torch.float32),
        )
        for reduction, word in REDUCTIONS.items():
            arguments = (unsorted.grad, unsorted.indices, unsorted.segment_ids, 8, reduction, *extra(unsorted))
            yield Sample(operator, f"unsorted_segment_ids-{word}", arguments)


def nothing(problem: _Segments) -> tuple:
    return ()


def dense_out(problem: _Segments) -> tuple:
    """Return garbage of the right size, of the wrong size and of size 0, in turn."""
    shape = {0: problem.data.shape, 1: (2, 3), 2: (0,)}[len(problem.name) % 3]
    return (torch.full(shape, torch.nan, dtype=problem.data.dtype),)


def sparse_out(problem: _Segments) -> tuple:
    return (*dense_out(problem), torch.full((len(problem.name) % 4,), -7, dtype=problem.indices.dtype))


def sparse_segment_gradient_samples(operator: str) -> Iterator[Sample]:
    problem = _random_segments("smooth", rows=4, items=7, segments=3, shape=(2,), dtype=torch.float64, num_segments=4)
    forward = operator == "sparse_segment_reduce"
    values, size = (problem.data, 4) if forward else (problem.grad, problem.data.shape[0])
    for reduction, word in REDUCTIONS.items():
        yield Sample(operator, f"smooth-{word}", (values, problem.indices, problem.segment_ids, size, reduction))
    if not forward:
        shuffled = torch.tensor([2, 0, 1, 0, 2, 2, 0])
        yield Sample(operator, "smooth-unsorted", (values, problem.indices, shuffled, size, MEAN))


FAMILY = Family(
    samples={
        "sparse_segment_reduce": partial(sparse_segment_samples, extra=nothing),
        "sparse_segment_reduce_grad": partial(sparse_segment_samples, extra=nothing),
        "sparse_segment_reduce_grad_out": partial(sparse_segment_samples, extra=dense_out),
        "sparse_segment_reduce_grad_v2": partial(sparse_segment_samples, extra=nothing),
        "sparse_segment_reduce_grad_v2_out": partial(sparse_segment_samples, extra=sparse_out),
    },
    gradients={
        "sparse_segment_reduce": sparse_segment_gradient_samples,
        "sparse_segment_reduce_grad": sparse_segment_gradient_samples,
        "sparse_segment_reduce_grad_v2": sparse_segment_gradient_samples,
    },
    read_backs={
        "sparse_segment_reduce": LAST_SEGMENT,
        "sparse_segment_reduce_grad_v2": PRESENT_ROWS,
        "sparse_segment_reduce_grad_v2_out": PRESENT_ROWS,
    },
)
