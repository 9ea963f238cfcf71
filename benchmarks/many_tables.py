"""
The sparse part of a recommender: one training step of many tables, its inputs, and its reference results.

The gradient of the output is given. Every side starts from the same tables and steps through the same batches. All
accumulators start at 0.1: pages of zeros would not be in memory before a row is first touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .rows import Call

BATCHES = 4
LEARNING_RATE, EPS, INITIAL_SUM = 0.01, 1e-10, 0.1


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: each feature has so many ids in a bag, and a table in every part."""

    hots: tuple[int, ...]
    rows: int
    batch: int
    # The dimension and pooling of each part's tables.
    parts: tuple[tuple[int, str], ...]
    # Whether tables take any key, and have a row for each that has come: only ours can.
    grows: bool = False

    def ids(self) -> int:
        """Return the number of ids in a batch."""
        return self.batch * sum(self.hots)

    def sizes(self) -> str:
        """Return the sizes in words."""
        dims = " and ".join(f"{dim} ({mode})" for dim, mode in self.parts)
        tables = "rows in each table that grows" if self.grows else "rows each"
        return f"{len(self.hots)} features, {self.rows:,} {tables}, dim {dims}, {self.ids():,} ids in a batch"

    def bytes_moved(self, rule: str) -> int:
        """
        Count the bytes that a step must move.

        Lookups read the ids and a row for each, write the output, and read its gradient. The update reads and writes
        each row that occurs, with its accumulator.
        """
        occurring = sum(self.rows * -torch.expm1(torch.tensor(-self.batch * hot / self.rows)) for hot in self.hots)
        total = 8.0 * self.ids()
        for dim, _ in self.parts:
            state = {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1}[rule]
            total += 4 * dim * (self.ids() + 2 * self.batch * len(self.hots)) + 8 * (dim + state) * float(occurring)
        return round(total)


class Problem:
    """Tables, batches and the output's gradients; every side makes its own from them."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        lengths = torch.tensor(shape.hots, device=device).repeat_interleave(shape.batch)
        self.offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        """``[features * batch + 1]``: where each bag begins, feature after feature."""

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    @cached_property
    def batches(self) -> list[Tensor]:
        """The batches' ids, each ``[ids]``, feature after feature."""
        size, generator = self.shape.ids(), self._generator(0)
        return [
            torch.randint(0, self.shape.rows, (size,), generator=generator, device=self.device) for _ in range(BATCHES)
        ]

    @cached_property
    def gradients(self) -> list[Tensor]:
        """The output's gradient for each part, ``[batch, features * dim]``."""
        count, generator = len(self.shape.hots), self._generator(1)
        return [
            torch.randn(self.shape.batch, count * dim, generator=generator, device=self.device)
            for dim, _ in self.shape.parts
        ]

    @cached_property
    def tables(self) -> list[Tensor]:
        """
        A table for each feature of the first part, then for each of the second, drawn once.

        Some sides train them.
        """
        generator = self._generator(2)
        return [
            torch.empty(self.shape.rows, dim, device=self.device).uniform_(-0.01, 0.01, generator=generator)
            for dim, _ in self.shape.parts
            for _ in self.shape.hots
        ]

    def by_feature(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Split a batch's ids by feature, ``[batch * hot]`` each."""
        return ids.split([self.shape.batch * hot for hot in self.shape.hots])


@dataclass(frozen=True)
class Side:
    """A step to time, and how to read the tables that it trains."""

    step: Call
    tables: Callable[[], list[Tensor]]


def reference_tables(problem: Problem, rule: str, steps: int) -> list[Tensor]:
    """Return the tables after that many steps, computed by the formulas in float64."""
    tables = [table.double() for table in problem.tables]
    sums = [torch.full_like(table, INITIAL_SUM) for table in tables]
    for ids in itertools.islice(itertools.cycle(problem.batches), steps):
        for n, (table, (feature, hot, dim, mode, gradient)) in enumerate(
            zip(tables, _lookups(problem, ids), strict=True)
        ):
            scale = 1.0 / hot if mode == "mean" else 1.0
            rows = (scale * gradient.double()).repeat_interleave(hot, 0)
            total = torch.zeros_like(table).index_add_(0, feature, rows)
            if rule == "sgd":
                table -= LEARNING_RATE * total
                continue
            sums[n] += total**2 if rule == "adagrad" else (total**2).mean(1, keepdim=True).expand(-1, dim)
            table -= LEARNING_RATE * total / (sums[n].sqrt() + EPS)
    return [table.float() for table in tables]


def _lookups(problem: Problem, ids: Tensor) -> Iterator[tuple[Tensor, int, int, str, Tensor]]:
    """Yield each table's ids, their number in a bag, its dimension and pooling, and its output's gradient."""
    shape = problem.shape
    for (dim, mode), gradient in zip(shape.parts, problem.gradients, strict=True):
        for feature, hot, part in zip(problem.by_feature(ids), shape.hots, gradient.split(dim, 1), strict=True):
            yield feature, hot, dim, mode, part


def small(shape: Shape) -> Shape:
    """Return a smaller model with few rows, so that a batch looks up many of them twice."""
    return replace(shape, hots=shape.hots[:1] + shape.hots[-3:], rows=50, batch=16)
