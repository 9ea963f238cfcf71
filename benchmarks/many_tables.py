"""
Many tables in one training step, as a recommender's sparse part has them: what is looked up, and what must come out.

The gradient of the output is given. Every side starts from the same tables and steps through the same batches. The
accumulators start at 0.1 in all of them: zeros would be pages that do not exist before a row is first touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .rows import Call

BATCHES = 4
LEARNING_RATE, EPS, INITIAL_SUM = 0.01, 1e-10, 0.1


@dataclass(frozen=True)
class Shape:
    """What a model has: features with so many ids in a bag, and for each of them a table of every part."""

    hots: tuple[int, ...]
    rows: int
    batch: int
    # Dimension and pooling of each part's tables.
    parts: tuple[tuple[int, str], ...]

    def ids(self) -> int:
        """In a batch."""
        return self.batch * sum(self.hots)

    def sizes(self) -> str:
        """In words."""
        dims = " and ".join(f"{dim} ({mode})" for dim, mode in self.parts)
        return f"{len(self.hots)} features, {self.rows:,} rows each, dim {dims}, {self.ids():,} ids in a batch"

    def bytes_moved(self, rule: str) -> int:
        """
        The least a step moves: the ids; a row read for each id; the output written, its gradient read; and for the
        update each row that occurs read and written, with its accumulator's.
        """
        occurring = sum(self.rows * -torch.expm1(torch.tensor(-self.batch * hot / self.rows)) for hot in self.hots)
        total = 8.0 * self.ids()
        for dim, _ in self.parts:
            state = {"sgd": 0, "adagrad": dim, "rowwise_adagrad": 1}[rule]
            total += 4 * dim * (self.ids() + 2 * self.batch * len(self.hots)) + 8 * (dim + state) * float(occurring)
        return round(total)


class Problem:
    """Tables, batches and the output's gradients. What every side makes its own from."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        lengths = torch.tensor(shape.hots, device=device).repeat_interleave(shape.batch)
        self.offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        """``[features * batch + 1]``: where each bag begins, feature after feature."""

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    @cached_property
    def batches(self) -> list[Tensor]:
        """``[ids]`` each: feature after feature."""
        size, generator = self.shape.ids(), self._generator(0)
        return [
            torch.randint(0, self.shape.rows, (size,), generator=generator, device=self.device) for _ in range(BATCHES)
        ]

    @cached_property
    def gradients(self) -> list[Tensor]:
        """``[batch, features * dim]`` of each part."""
        count, generator = len(self.shape.hots), self._generator(1)
        return [
            torch.randn(self.shape.batch, count * dim, generator=generator, device=self.device)
            for dim, _ in self.shape.parts
        ]

    @cached_property
    def tables(self) -> list[Tensor]:
        """A table for each feature of the first part, then those of the second: drawn once, trained on by who asks."""
        generator = self._generator(2)
        return [
            torch.empty(self.shape.rows, dim, device=self.device).uniform_(-0.01, 0.01, generator=generator)
            for dim, _ in self.shape.parts
            for _ in self.shape.hots
        ]

    def by_feature(self, ids: Tensor) -> tuple[Tensor, ...]:
        """``[batch * hot]`` for each feature."""
        return ids.split([self.shape.batch * hot for hot in self.shape.hots])


@dataclass(frozen=True)
class Side:
    """A step to time, and how to read the tables that it trains."""

    step: Call
    tables: Callable[[], list[Tensor]]


def reference_tables(problem: Problem, rule: str, steps: int) -> list[Tensor]:
    """The tables after that many steps, by the formulas, in float64."""
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
    """For each table: its ids, their number in a bag, its dimension and pooling, its output's gradient."""
    shape = problem.shape
    for (dim, mode), gradient in zip(shape.parts, problem.gradients, strict=True):
        for feature, hot, part in zip(problem.by_feature(ids), shape.hots, gradient.split(dim, 1), strict=True):
            yield feature, hot, dim, mode, part


def small(shape: Shape) -> Shape:
    """The same model with few rows, of which a batch looks many up twice."""
    return Shape(shape.hots[:1] + shape.hots[-3:], 50, 16, shape.parts)
