"""Sample inputs of the family ``scores``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch
from samples.large_sizes import Build
from samples.sample import INDICES, Family, Random, Sample
from torch import Tensor

INF = torch.inf
_FLOATS = (torch.float32, torch.float64)
# Columns: none, fewer than a vector, whole vectors, a rest, and more than are added before float64 takes them.
_SHAPES = ((3, 0), (0, 5), (4, 1), (5, 7), (2, 16), (3, 32), (7, 50), (2, 129), (3, 1024), (2, 2075))


def _scores(random: Random, shape: tuple[int, int], dtype: torch.dtype, spread: float) -> Tensor:
    return random.floats(*shape, dtype=dtype) * spread


def _targets(random: Random, count: int, first: int, columns: int) -> Tensor:
    """Return targets around the block, and some that do not count."""
    targets = random.integers(max(first - 2, 0), first + columns + 2, count, dtype=torch.int64)
    targets[1::3] = -1
    return targets


def targets_samples(operator: str) -> Iterator[Sample]:
    by_hand = torch.tensor([0, -100, 4, 2])
    yield Sample(operator, "by_hand", (by_hand, 5, -100, False), representative=True)
    for index, ignored in itertools.product(INDICES, (-100, -1, 3)):
        target = Random(1).integers(0, 9, 40, dtype=index)
        target[::7] = ignored
        yield Sample(operator, f"{index}_{ignored}".replace("torch.", ""), (target, 9, ignored, ignored == -1))
    yield Sample(operator, "none", (torch.empty(0, dtype=torch.int64), 0, -100, False))


def exclude_samples(operator: str) -> Iterator[Sample]:
    ids, samples = torch.tensor([-1, 2, 3, 3, 9]), torch.tensor([0, 1, 0, 1, 0])
    yield Sample(operator, "by_hand", (torch.zeros(2, 3), ids, samples, 2), representative=True)
    for seed, (dtype, shape) in enumerate(itertools.product(_FLOATS, _SHAPES)):
        random, first = Random(seed), seed % 3 * 10
        count = 60 if shape[0] else 0
        ids = random.integers(-1, first + shape[1] + 5, count, dtype=torch.int64).sort().values
        of = random.integers(0, max(shape[0], 1), count, dtype=torch.int64)
        scores = _scores(random, shape, dtype, 1.0)
        yield Sample(operator, f"{dtype}_{shape[0]}x{shape[1]}".replace("torch.", ""), (scores, ids, of, first))


def _state(random: Random, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return maximum, sum and own as blocks before may have left them."""
    count = scores.shape[0]
    maximum = random.floats(count, dtype=scores.dtype)
    total = random.integers(1, 100, count, dtype=torch.float64) / 8
    maximum[::2], total[::2] = -INF, 0.0
    return maximum, total, random.floats(count, dtype=scores.dtype)


def lse_samples(operator: str) -> Iterator[Sample]:
    scores = torch.tensor([[0.0, 1.0, -1.0], [-INF, -INF, -INF], [-INF, 88.0, -30.0]])
    state = (torch.tensor([0.5, -INF, 1e4]), torch.tensor([2.0, 0.0, 1.0]).double(), torch.zeros(3))
    yield Sample(operator, "by_hand", (scores, torch.tensor([6, 5, -1]), 5, *state), representative=True)
    for seed, (dtype, shape, spread) in enumerate(itertools.product(_FLOATS, _SHAPES, (1.0, 40.0))):
        random, first = Random(seed), seed % 3 * 10
        scores = _scores(random, shape, dtype, spread)
        scores[:, 3::11] = -INF
        name = f"{dtype}_{shape[0]}x{shape[1]}_{spread:g}".replace("torch.", "")
        yield Sample(
            operator, name, (scores, _targets(random, shape[0], first, shape[1]), first, *_state(random, scores))
        )
    odd = torch.zeros(5, 40)
    odd[0, 33], odd[1, 2], odd[2, 39], odd[3] = torch.nan, INF, -INF, -1e30
    odd[4, 17] = 1e30
    yield Sample(operator, "not_finite", (odd, torch.tensor([0, 1, 2, 3, -1]), 0, *_state(Random(0), odd)))


def softmax_samples(operator: str) -> Iterator[Sample]:
    scores = torch.tensor([[0.0, 1.0], [-INF, 2.0]])
    factors = (torch.tensor([0.5, 2.0]), torch.tensor([-1.0, -0.25]))
    given = (scores, torch.tensor([1.0, 2.0]), torch.tensor([5, 6]), 5, *factors)
    yield Sample(operator, "by_hand", given, representative=True)
    for seed, (dtype, shape, spread) in enumerate(itertools.product(_FLOATS, _SHAPES, (1.0, 40.0))):
        random, first = Random(seed), seed % 3 * 10
        scores = _scores(random, shape, dtype, spread)
        maximum = scores.amax(1) if shape[1] else scores.new_zeros(shape[0])
        maximum[1::4] += 1
        target = _targets(random, shape[0], first, shape[1])
        factors = [random.floats(shape[0], dtype=dtype) for _ in range(2)]
        name = f"{dtype}_{shape[0]}x{shape[1]}_{spread:g}".replace("torch.", "")
        yield Sample(operator, name, (scores, maximum, target, first, *factors))
    excluded = torch.full((2, 20), -INF)
    nothing = torch.tensor([-INF, -INF])
    yield Sample(operator, "all_excluded", (excluded, nothing, torch.tensor([-1, 3]), 0, torch.ones(2), torch.ones(2)))


def _best(scores: Tensor, k: int, random: Random | None = None) -> tuple[Tensor, Tensor]:
    """Return the best rows so far: none, or of half the samples some among the rows around the block."""
    values, rows = scores.new_full((scores.shape[0], k), -INF), torch.full((scores.shape[0], k), -1)
    if random is not None:
        known = (k + 1) // 2
        values[::2, :known] = random.floats(len(values[::2]), known, dtype=scores.dtype).sort(1, descending=True).values
        rows[::2, :known] = torch.arange(known) * 20_000 % 50_007
    return values, rows


def top_k_samples(operator: str) -> Iterator[Sample]:
    scores = torch.tensor([[1.0, 3.0, -INF, 1.0], [torch.nan, -INF, INF, torch.nan], [-INF, -INF, -0.0, 0.0]])
    best = torch.tensor([[2.0, 1.0, -INF]] * 3), torch.tensor([[90, 6, -1]] * 3)
    yield Sample(operator, "by_hand", (scores, 5, *best), representative=True)
    for seed, (dtype, shape, k) in enumerate(itertools.product(_FLOATS, _SHAPES, (1, 5, 100, 600))):
        random, first = Random(seed), seed % 3 * 10_000
        scores = _scores(random, shape, dtype, 1.0)
        scores[:, 3::11] = -INF
        scores[:, 1::2] = scores[:, 1::2].round()  # some are equal
        scores[1::3, 5::97] = torch.nan
        name = f"{dtype}_{shape[0]}x{shape[1]}_{k}".replace("torch.", "")
        yield Sample(operator, name, (scores, first, *_best(scores, k, random if seed % 2 else None)))
    for k in (0, 3):
        yield Sample(operator, f"equal_{k}", (torch.ones(2, 100), 50, *_best(torch.ones(2, 100), k)))
    late = torch.tensor([[1.0] * 4]), torch.tensor([[3, 70, 200, 201]])
    yield Sample(operator, "an_earlier_block", (torch.ones(1, 80), 50, *late))
    nothing = torch.full((1, 70), torch.nan), torch.full((1, 70), torch.nan)
    yield Sample(
        operator, "nan_only", (nothing[0], 50, nothing[1], torch.cat([torch.arange(35), torch.arange(150, 185)])[None])
    )


def _large(operator: str, shape: tuple[int, int]) -> Sample:
    random = Random(0)
    scores = _scores(random, shape, torch.float32, 3.0)
    target = _targets(random, shape[0], 0, shape[1])
    if operator == "scores_targets":
        return Sample(operator, str(shape), (target, shape[1] + 2, -1, True))
    if operator == "scores_exclude_":
        ids = random.integers(-1, shape[1] + 5, 9 * shape[0], dtype=torch.int64).sort().values
        return Sample(
            operator, str(shape), (scores, ids, random.integers(0, shape[0], 9 * shape[0], dtype=torch.int64), 0)
        )
    if operator == "scores_lse_":
        return Sample(operator, str(shape), (scores, target, 0, *_state(random, scores)))
    if operator == "scores_top_k_":
        return Sample(operator, str(shape), (scores, 0, *_best(scores, 100, random)))
    factors = [random.floats(shape[0], dtype=torch.float32) for _ in range(2)]
    return Sample(operator, str(shape), (scores, scores.amax(1), target, 0, *factors))


FAMILY = Family(
    samples={
        "scores_targets": targets_samples,
        "scores_exclude_": exclude_samples,
        "scores_lse_": lse_samples,
        "scores_softmax_": softmax_samples,
        "scores_top_k_": top_k_samples,
    },
    precision={"scores_lse_": torch.float32},  # sums of exponentials in float32, in float64
    large=[
        Build(f"{operator}-{shape[0]}x{shape[1]}", partial(_large, operator, shape))
        for operator in ("scores_targets", "scores_exclude_", "scores_lse_", "scores_softmax_", "scores_top_k_")
        for shape in ((3000, 517), (40, 50_000))
    ],
)
