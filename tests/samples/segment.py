"""Sample inputs of the segment reductions without indices and of their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from samples.large_sizes import CHOSEN, Build, Size, generator_of, ids_of, offsets_of, segment_ids_of
from samples.sample import DIMENSIONS, FLOATS, INDICES, LAST_SEGMENT, Family, Random, Sample
from samples.unique import INTEGERS
from torch import Tensor

from torchsparse_rec.compat._parity.reference import MAX, MEAN, PROD, SQRTN, SUM

REDUCTIONS = ("sum", "mean", "sqrt_n", "max", "min", "prod")


@dataclass(frozen=True)
class _Rows:
    """Rows and their segment ids, sorted or in any order."""

    name: str
    data: Tensor
    ids: Tensor
    segments: int
    representative: bool = False
    num_segments: bool = True  # or None

    @property
    def grad(self) -> Tensor:
        return Random(9).floats(self.segments, *self.data.shape[self.ids.dim() :], dtype=self.data.dtype)

    @property
    def offsets(self) -> Tensor:
        return torch.searchsorted(self.ids.long(), torch.arange(self.segments + 1))


def _numbers(random: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return quarters and zeros with many ties: products and sums of few are exact. Integers span their whole range."""
    if dtype.is_floating_point:
        return random.integers(-6, 7, *shape, dtype=torch.int64).to(dtype) / 4
    whole = random.integers(-(2**63), 2**63 - 1, *shape, dtype=torch.int64)
    bits = {torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return whole.to(bits[dtype]).view(dtype) if dtype in bits else whole.to(dtype)


def _random(
    name: str,
    rows: int = 30,
    segments: int = 8,
    shape: tuple[int, ...] = (3,),
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    used: tuple[int, int] | None = None,
    seed: int = 0,
    **flags: bool,
) -> _Rows:
    random = Random(seed)
    low, high = used or (0, max(segments, 1))
    ids = random.integers(low, high, rows, dtype=index).sort().values
    if not flags.get("num_segments", True):
        segments = int(ids[-1]) + 1 if rows else 0
    return _Rows(name, _numbers(random, (rows, *shape), dtype), ids, segments, **flags)


def _problems(dtypes: tuple[torch.dtype, ...]) -> Iterator[_Rows]:
    yield _Rows(
        "by_hand",
        torch.tensor([[1.0, 2.0], [3.0, 2.0], [-5.0, 0.0], [7.0, 0.0]], dtype=torch.float32),
        torch.tensor([0, 0, 2, 2]),
        4,
        representative=True,
    )
    index = itertools.cycle(INDICES)
    for seed, (dtype, dim) in enumerate(itertools.product(dtypes, DIMENSIONS)):
        # Every width for float32, and one or two widths for the other dtypes.
        if dim == 17 or dtype == torch.float32 or (dim == 64 and dtype.is_floating_point):
            name = f"{dtype}_{dim}".replace("torch.", "")
            yield _random(name, shape=(dim,), dtype=dtype, index=next(index), seed=seed)
    yield _random("rank_1", shape=())
    yield _random("rank_3", shape=(2, 5))
    yield _random("rank_4", shape=(2, 1, 3), dtype=torch.float64)
    yield _random("no_num_segments", representative=True, num_segments=False)
    yield _random("empty_leading_and_trailing", segments=12, used=(4, 7))
    yield _random("mostly_empty", rows=5, segments=60, index=torch.int32)
    yield _random("all_in_one_segment", rows=300, segments=1, shape=(19,))
    yield _random("one_row", rows=1, segments=1)
    yield _random("no_rows", rows=0, segments=5, representative=True)
    yield _random("no_rows_no_num_segments", rows=0, segments=0, num_segments=False)
    yield _random("no_segments", rows=0, segments=0)
    yield _random("no_columns", shape=(4, 0))
    yield _random("many_rows", rows=900, segments=20, shape=(5,), seed=7)
    if torch.int8 in dtypes:
        yield _random("count_that_wraps", rows=600, segments=2, dtype=torch.int8, shape=(2,), seed=8)
        yield _random("count_that_wraps_unsigned", rows=600, segments=2, dtype=torch.uint8, shape=(2,), seed=8)
    nan = _random("not_finite", rows=40, segments=6, shape=(4,), seed=5)
    nan.data[3:30:5, 1] = torch.nan
    nan.data[2:30:7, 2] = torch.inf
    nan.data[4:30:7, 3] = -torch.inf
    yield nan


def _shuffled(problem: _Rows, seed: int) -> _Rows:
    """Return the same rows in another order, some of them left out."""
    rows = problem.data.shape[0]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    ids = problem.ids[order].clone()
    ids[: rows // 7] = -1
    ids[rows // 7 : rows // 5] = torch.iinfo(ids.dtype).min
    data = problem.data
    if data.dtype in (torch.uint16, torch.uint32, torch.uint64):
        signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}[data.dtype]
        return _Rows(problem.name, data.view(signed)[order].view(data.dtype), ids, problem.segments)
    return _Rows(problem.name, data[order], ids, problem.segments, problem.representative)


def _unsorted_problems(dtypes: tuple[torch.dtype, ...]) -> Iterator[_Rows]:
    for seed, problem in enumerate(_problems(dtypes)):
        yield _shuffled(problem, seed)
    random = Random(4)
    ids = random.integers(-2, 5, 4, 6, dtype=torch.int32)
    yield _Rows("ids_of_rank_2", _numbers(random, (4, 6, 3), torch.float32), ids, 5, representative=True)
    yield _Rows("ids_like_data", _numbers(random, (4, 6), torch.float64), ids, 5)
    yield _Rows("scalar_id", _numbers(random, (4, 6), torch.float32), torch.tensor(1), 3)
    yield _Rows("scalar_data", torch.tensor(2.5), torch.tensor(1), 3)
    yield _Rows("dropped_scalar_id", _numbers(random, (4,), torch.float32), torch.tensor(-1), 2)
    yield _Rows("ids_without_elements", torch.empty(0, 2, 3), torch.empty(0, 2, dtype=torch.int64), 2)
    yield _Rows("all_left_out", _numbers(random, (9, 2), torch.float32), torch.full((9,), -7), 3)


def _reductions(problem: _Rows) -> Iterator[tuple[int, str]]:
    for reduction, word in enumerate(REDUCTIONS):
        if reduction != SQRTN or problem.data.is_floating_point():
            if reduction != PROD or problem.name not in ("all_in_one_segment", "many_rows") or "int" in problem.name:
                yield reduction, word


def _backward_reductions(problem: _Rows) -> Iterator[tuple[int, str, Tensor | None]]:
    """Yield reductions with the data that the gradient takes; infinite products cannot be divided, and are left out."""
    for reduction, word in _reductions(problem):
        if reduction != PROD or problem.name != "not_finite":
            yield reduction, word, problem.data if reduction >= MAX else None


def _is_representative(problem: _Rows, reduction: int) -> bool:
    return problem.representative and reduction in (MEAN, MAX, PROD)


def segment_reduce_samples(operator: str) -> Iterator[Sample]:
    for problem in _problems(FLOATS + INTEGERS):
        size = problem.segments if problem.num_segments else None
        for reduction, word in _reductions(problem):
            chosen = _is_representative(problem, reduction)
            yield Sample(operator, f"{problem.name}-{word}", (problem.data, problem.ids, None, size, reduction), chosen)
            if problem.representative or problem.name == "float32_17":
                arguments = (problem.data, None, problem.offsets, None, reduction)
                yield Sample(operator, f"{problem.name}-offsets-{word}", arguments, chosen)


def segment_reduce_backward_samples(operator: str) -> Iterator[Sample]:
    for problem in _problems(FLOATS):
        rows = problem.data.shape[0]
        for reduction, word, data in _backward_reductions(problem):
            chosen = _is_representative(problem, reduction)
            arguments = (problem.grad, data, problem.ids, None, rows, reduction)
            yield Sample(operator, f"{problem.name}-{word}", arguments, chosen)
            if problem.representative or problem.name == "float32_17":
                arguments = (problem.grad, data, None, problem.offsets, rows, reduction)
                yield Sample(operator, f"{problem.name}-offsets-{word}", arguments, chosen)


def unsorted_segment_reduce_samples(operator: str) -> Iterator[Sample]:
    for problem in _unsorted_problems(FLOATS + INTEGERS):
        for reduction, word in _reductions(problem):
            arguments = (problem.data, problem.ids, problem.segments, reduction)
            yield Sample(operator, f"{problem.name}-{word}", arguments, _is_representative(problem, reduction))


def unsorted_segment_reduce_backward_samples(operator: str) -> Iterator[Sample]:
    for problem in _unsorted_problems(FLOATS):
        for reduction, word, data in _backward_reductions(problem):
            arguments = (problem.grad, data, problem.ids, reduction)
            yield Sample(operator, f"{problem.name}-{word}", arguments, _is_representative(problem, reduction))


def _smooth(zeros: bool) -> _Rows:
    """Return rows without ties; zeros only for products, whose gradient there cannot be differentiated once more."""
    random = Random(3)
    data = random.floats(9, 3, dtype=torch.float64)
    if zeros:
        data[1, 0] = data[4, 1] = data[5, 1] = 0
        data[6:9, 2] = 0
    return _Rows("smooth", data, torch.tensor([0, 0, 0, 0, 1, 1, 3, 3, 3]), 5)


def segment_gradient_samples(operator: str) -> Iterator[Sample]:
    for reduction, word in enumerate(REDUCTIONS):
        problem = _smooth(zeros=reduction == PROD and not operator.endswith("backward"))
        order = torch.tensor([4, 0, 8, 2, 6, 1, 7, 3, 5])
        ids = problem.ids[order].clone()
        ids[2] = -1
        data = problem.data[order]
        arguments = {
            "segment_reduce": (problem.data, problem.ids, None, 5, reduction),
            "segment_reduce_backward": (problem.grad, problem.data, problem.ids, None, 9, reduction),
            "unsorted_segment_reduce": (data, ids, 5, reduction),
            "unsorted_segment_reduce_backward": (problem.grad, data, ids, reduction),
        }[operator]
        yield Sample(operator, f"smooth-{word}", arguments)
        if operator == "segment_reduce":
            yield Sample(operator, f"smooth-offsets-{word}", (problem.data, None, problem.offsets, None, reduction))


# ---- Large samples --------------------------------------------------------------------------------------------------


def _near_one(size: Size) -> Tensor:
    """Return a row for each item, near 1 so that products stay finite."""
    return (1 + torch.rand(size.items, size.dim, generator=generator_of(size)) / size.items).to(size.dtype)


def _large(operator: str, size: Size, reduction: int) -> Sample:
    data = _near_one(size)
    is_sorted = operator.startswith("segment")
    ids, count = (segment_ids_of(size), size.segments) if is_sorted else (ids_of(size).clone(), size.rows)
    grad = torch.randn(count, size.dim, generator=generator_of(size)).to(size.dtype)
    needed = data if reduction in (MAX, PROD) else None
    arguments = {
        "segment_reduce": (data, ids, None, count, reduction),
        "segment_reduce_backward": (grad, needed, None, offsets_of(size), size.items, reduction),
        "unsorted_segment_reduce": (data, ids, count, reduction),
        "unsorted_segment_reduce_backward": (grad, needed, ids, reduction),
    }[operator]
    return Sample(operator, str(size), arguments)


_SAMPLES = {
    "segment_reduce": segment_reduce_samples,
    "segment_reduce_backward": segment_reduce_backward_samples,
    "unsorted_segment_reduce": unsorted_segment_reduce_samples,
    "unsorted_segment_reduce_backward": unsorted_segment_reduce_backward_samples,
}
FAMILY = Family(
    samples=_SAMPLES,
    gradients=dict.fromkeys(_SAMPLES, segment_gradient_samples),
    read_backs={"segment_reduce": LAST_SEGMENT},
    large=[
        Build(f"{operator}-{size}-{reduction}", partial(_large, operator, size, reduction))
        for size, reduction in zip(CHOSEN, itertools.cycle((SUM, MAX, PROD, MEAN)), strict=False)
        for operator in _SAMPLES
    ],
)
