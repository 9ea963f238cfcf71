"""
Make training loops that are slow for a known cause, and healthy ones, to show a diagnosis of each.

A cause is planted into a healthy loop, and costs ``strength`` times a step of the healthy loop, as measured here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ..jagged import KeyedJaggedTensor
from ..optim import SGD, Adam
from ._healthy import HEALTHY_LOOPS, Demo, Healthy, Ranker, RankerBatch, Sizes

__all__ = ["HEALTHY_LOOPS", "PLANTS", "Demo", "build"]

_TUNING_STEPS = 4
_ROUNDS, _LONG = 5, 0.2


def build(name: str, *, strength: float = 3.0, seed: int = 0) -> Demo:
    """
    Make the training loop of a cause, or a healthy one.

    Args:
        name: a key of :data:`PLANTS` (a cause) or of :data:`HEALTHY_LOOPS`.
        strength: the cost of the cause, in healthy steps. Default 3; healthy loops ignore it.
        seed: the seed of sizes and values. Default 0.

    Returns:
        The loop.

    Raises:
        ValueError: an unknown name; a strength that is not positive or not finite.

    Example:
        >>> build("healthy_small").model.__class__.__name__
        'Pairs'
    """
    if not 0 < strength < math.inf:
        raise ValueError(f"strength must be positive and finite, got {strength}")
    torch.manual_seed(seed)
    if name in HEALTHY_LOOPS:
        return HEALTHY_LOOPS[name](seed)
    if name in PLANTS:
        return PLANTS[name](Healthy(seed), strength)
    raise ValueError(f"name must be one of {', '.join([*PLANTS, *HEALTHY_LOOPS])}, got {name!r}")


def times_as_long(call: Callable[[], Any], reference: Callable[[], Any]) -> float:
    """Return how many times as long one call takes as another: the median of rounds in which they take turns."""
    ratios: list[float] = []
    start = perf_counter()
    _seconds(call), _seconds(reference)
    while len(ratios) < _ROUNDS and (len(ratios) < 3 or perf_counter() - start < _LONG):
        ratios.append(_seconds(call) / _seconds(reference))
    return statistics.median(ratios)


def _seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of the shortest of three calls."""
    times = []
    for _ in range(3):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)


def tuned(cost: Callable[[int], float], target: float, start: int, least: int = 1) -> int:
    """Return the number whose cost is about ``target``, if costs grow with it, by a few steps of the secant rule."""
    # On a busy machine a fast call may seem as slow as wanted: a cost that ends the search is measured twice.
    number, nothing = max(start, least + 1), min(cost(least), cost(least))
    if nothing >= target:
        return least
    for _ in range(_TUNING_STEPS):
        measured = cost(number)
        if abs(measured - target) < 0.2 * target:
            measured = (measured + cost(number)) / 2
            if abs(measured - target) < 0.2 * target:
                break
        growth = (target - nothing) / max(measured - nothing, 0.1 * target)
        number = least + max(1, round((number - least) * min(growth, 4.0)))
    return number


# ---- Causes ----------------------------------------------------------------------------------------------------------


def _slow_loader(healthy: Healthy, strength: float) -> Demo:
    """Return the loop with a loader that waits for every batch, as for a disk or a network."""
    pause = strength * statistics.median(_seconds(healthy.run) for _ in range(7))

    def loader() -> Iterator[RankerBatch]:
        for batch in cycle(healthy.batches):
            time.sleep(pause)
            yield batch

    return healthy.demo(loader=loader())


def _parse(line: str) -> list[int]:
    return [int(field) for field in line.split(",")]


def _per_row_records(healthy: Healthy, strength: float) -> Demo:
    """Return the loop with a loader that parses one line of text per example, with enough fields to be slow enough."""
    sizes = healthy.sizes

    def lines(fields: int) -> list[str]:
        draw = healthy.draw.randrange
        return [",".join(str(draw(sizes.rows)) for _ in range(fields)) for _ in range(256)]

    def batches(records: list[str]) -> Iterator[RankerBatch]:
        rows = cycle(records)
        for ready in cycle(healthy.batches):
            ids = ready.ids.values().reshape(sizes.features, sizes.batch).clone()
            parsed = torch.tensor([_parse(next(rows)) for _ in range(sizes.batch)]).t()[: sizes.features]
            ids[: parsed.shape[0]] = parsed
            yield healthy.batch_of(ids)

    def cost(fields: int) -> float:
        some = batches(lines(fields))
        return times_as_long(lambda: next(some), healthy.run)

    fields = tuned(cost, strength, 4)
    return healthy.demo(loader=batches(lines(fields)))


class _WithProfile(nn.Module):
    """A ranker with one more table, of torch's own, whose gradient is dense."""

    def __init__(self, ranker: Ranker, rows: int, width: int) -> None:
        super().__init__()
        self.ranker = ranker
        self.profiles = nn.Embedding(rows, width, _weight=torch.zeros(rows, width))

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        """Return logits, ``[B]``."""
        own = self.profiles(ids["f0"].values() % self.profiles.num_embeddings)
        return self.ranker(ids, dense) + own.sum(dim=1)  # type: ignore[no-any-return]


def _dense_gradient(healthy: Healthy, strength: float) -> Demo:
    """Return the loop with one more table of torch's own, so big that its dense gradient costs as much as wanted."""
    width, optimizer = healthy.draw.choice([16, 32, 64]), healthy.draw.choice([SGD, Adam])
    reference = healthy.another(optimizer)
    ranker = healthy.model

    def cost(rows: int) -> float:
        healthy.model = _WithProfile(ranker, rows, width)  # type: ignore[assignment]
        healthy.optimizer = optimizer(healthy.model.parameters(), lr=0.001, in_backward=True)
        return times_as_long(healthy.run, reference.run) - 1

    least = 4 * healthy.sizes.batch
    cost(tuned(cost, strength, 2 * least, least))
    return healthy.demo()


def _needless_copies(healthy: Healthy, strength: float) -> Demo:
    """Return the loop with a step that converts or copies features without need."""
    kind = healthy.draw.randrange(3)
    extra = torch.rand(healthy.sizes.batch, 256)

    def copy(x: Tensor) -> Tensor:
        if kind == 0:
            return x.double().float()
        return x.clone() if kind == 1 else x.t().contiguous().t()

    def cost(count: int) -> float:
        return times_as_long(lambda: [copy(extra) for _ in range(count)], healthy.run)

    count = tuned(cost, strength, 8)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: RankerBatch) -> Tensor:
        for _ in range(count):
            copy(extra)
        return healthy.step(model, optimizer, batch)

    return healthy.demo(step=step)


def _heavy_mlp(healthy: Healthy, strength: float) -> Demo:
    """Return the loop with a deeper and wider perceptron."""
    sizes, depth, reference = healthy.sizes, healthy.draw.randint(1, 3), healthy.another(SGD)
    first = sizes.features * sizes.width + sizes.dense

    def cost(width: int) -> float:
        layers: list[nn.Module] = [nn.Linear(first, width), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        healthy.model.mlp = nn.Sequential(*layers, nn.Linear(width, 1))
        healthy.optimizer = SGD(healthy.model.parameters(), lr=0.01, in_backward=True)
        return times_as_long(healthy.run, reference.run) - 1

    cost(tuned(cost, strength, 64, sizes.hidden))
    return healthy.demo()


class _Separate(nn.Module):
    """A ranking model like :class:`Ranker`, but with one lookup for each table, and a linear head."""

    def __init__(self, sizes: Sizes, features: int) -> None:
        super().__init__()
        self.names = [f"f{k % sizes.features}" for k in range(features)]
        self.tables = nn.ModuleList(nn.EmbeddingBag(sizes.rows, sizes.width, sparse=True) for _ in range(features))
        self.head = nn.Linear(features * sizes.width, 1)

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        """Return logits, ``[B]``."""
        pooled = [
            table(ids[name].values(), ids[name].offsets()[:-1])
            for name, table in zip(self.names, self.tables, strict=True)
        ]
        return self.head(torch.cat(pooled, dim=1)).squeeze(1)  # type: ignore[no-any-return]


def _unfused_lookups(healthy: Healthy, strength: float) -> Demo:
    """Return the loop with tables that are looked up one by one, the more of them the greater ``strength`` is."""
    healthy.model = _Separate(healthy.sizes, max(8, round(strength * healthy.sizes.features)))  # type: ignore[assignment]
    healthy.optimizer = torch.optim.SGD(healthy.model.parameters(), lr=0.01)
    return healthy.demo()


#: The functions that plant a cause into a healthy loop, by the name of the cause.
PLANTS: dict[str, Callable[[Healthy, float], Demo]] = {
    "slow_loader": _slow_loader,
    "per_row_records": _per_row_records,
    "dense_gradient": _dense_gradient,
    "needless_copies": _needless_copies,
    "heavy_mlp": _heavy_mlp,
    "unfused_lookups": _unfused_lookups,
}
