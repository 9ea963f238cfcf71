"""
Benchmark rows of the DLRM example: a training step of its 26 tables, and of the whole network.

Raw ids of Criteo's shape are in memory. Ours are dynamic tables keyed by them; torch's are EmbeddingBags of a fixed
number of rows, and hashing, a remainder, is part of their step. Every batch has been trained on before the timing, so
that no key is new. The dense part is one class on both sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

import torchsparse_rec
from torchsparse_rec.data.criteo import CATEGORIES
from torchsparse_rec.examples.dlrm import Batch, DenseLayers, Generator

from .rows import Call, Case, Make, Options, Row

BUCKETS, BATCH, DIM, BATCHES = 100_000, 8_192, 16, 32
BOTTOM, TOP = (512, 256, 64), (512, 256)
RATE, EPS = 0.01, 1e-10
PEER, HASHED = "torch sparse EmbeddingBags, hashed ids", "ours, hashed ids"


class Problem:
    """
    Batches, gradient and first weights; every side makes its own from them.

    Args:
        device: the device of all tensors.
        buckets: rows of the hashed tables.
        batch: the number of examples of a batch.
        distinct: whether raw ids are below ``buckets``, so that no two of them are hashed to one row.
    """

    def __init__(self, device: str, buckets: int = BUCKETS, batch: int = BATCH, distinct: bool = False) -> None:
        self.device, self.buckets, self.batch, self.distinct = device, buckets, batch, distinct

    @cached_property
    def batches(self) -> list[Batch]:
        """The batches, on the device."""
        made = map(Generator(self.batch).batch, range(4 if self.distinct else BATCHES))
        return [self._moved(batch) for batch in made]

    def _moved(self, batch: Batch) -> Batch:
        ids = batch.ids % self.buckets if self.distinct else batch.ids
        return Batch(*(x.to(self.device) for x in (batch.labels, batch.numbers, ids)))

    @cached_property
    def gradient(self) -> Tensor:
        """The gradient of the pooled rows, ``[batch, features * DIM]``."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, len(CATEGORIES) * DIM, generator=generator).to(self.device)

    def first_row(self) -> Tensor:
        """Return the row with which all rows begin where the trained rows are checked."""
        return torch.linspace(-0.1, 0.1, DIM)

    def layers(self) -> DenseLayers:
        """Make the dense part with its first weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return DenseLayers(len(CATEGORIES), DIM, BOTTOM, TOP).to(self.device)


class Tables(Protocol):
    """A side's tables and their optimizer."""

    def look_up(self, ids: Tensor) -> list[Tensor]:
        """Return the embeddings of raw ids ``[26, B]``, all in one tensor or one for each feature."""

    def update(self) -> None:
        """Update the tables after a backward."""

    def rows(self, ids: Tensor) -> list[Tensor]:
        """Return the trained rows of raw ids, one tensor for each table."""


class OurTables:
    """A collection of ours, which is updated within backward."""

    def __init__(self, problem: Problem, kind: str) -> None:
        self.problem, self.kind = problem, kind
        self.bags = torchsparse_rec.nn.EmbeddingBagCollection(
            [self._config(name) for name in CATEGORIES],
            grad_mode="fused",
            device=torch.device(problem.device),
        )
        self.optimizer = torchsparse_rec.optim.Adagrad(self.bags.parameters(), lr=RATE, eps=EPS, in_backward=True)
        self.offsets = torch.arange(len(CATEGORIES) * problem.batch + 1, device=problem.device)
        self.counts = [problem.batch] * len(CATEGORIES)

    def _config(self, name: str) -> Any:
        problem, nn = self.problem, torchsparse_rec.nn
        if self.kind == "hashed":
            start = (lambda weight: weight.copy_(problem.first_row())) if problem.distinct else None
            return nn.EmbeddingBagConfig(problem.buckets, DIM, name, feature_names=[name], init_fn=start)
        first = problem.first_row() if problem.distinct else torchsparse_rec.initializers.Uniform(-0.01, 0.01)
        option = torchsparse_rec.variable.EmbeddingVariableOption()
        return nn.EmbeddingBagConfig(1024, DIM, name, feature_names=[name], ev_option=option, initializer=first)

    def look_up(self, ids: Tensor) -> list[Tensor]:
        """Return the embeddings of all features in one tensor."""
        ids = ids.flatten()
        if self.kind == "hashed":
            ids = ids % self.problem.buckets
        features = torchsparse_rec.KeyedJaggedTensor(CATEGORIES, ids, offsets=self.offsets, length_per_key=self.counts)
        return [self.bags(features).values()]

    def update(self) -> None:
        """Call the optimizer's step and zero_grad. The tables have been updated in the backward."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rows(self, ids: Tensor) -> list[Tensor]:
        """Return the rows of raw ids by lookups without training."""
        if self.kind == "hashed":
            return [self.bags.get_parameter(f"embedding_bags.{name}.weight").detach()[ids] for name in CATEGORIES]
        tables: Any = self.bags.embedding_bags
        return [tables[name].lookup(ids) for name in CATEGORIES]


class TorchTables:
    """A loop over torch.nn.EmbeddingBag with sparse gradients."""

    def __init__(self, problem: Problem) -> None:
        # This is the default, but unless it is called, torch warns of its own optimizer's gradients.
        torch.sparse.check_sparse_tensor_invariants.disable()
        self.problem = problem
        self.bags = [
            torch.nn.EmbeddingBag(problem.buckets, DIM, mode="sum", sparse=True, device=problem.device)
            for _ in CATEGORIES
        ]
        if problem.distinct:
            for bag in self.bags:
                bag.weight.data.copy_(problem.first_row())
        self.optimizer = torch.optim.Adagrad([bag.weight for bag in self.bags], lr=RATE, eps=EPS)

    def look_up(self, ids: Tensor) -> list[Tensor]:
        """Return the embeddings feature by feature."""
        hashed = (ids % self.problem.buckets).unsqueeze(2)
        return [bag(row) for bag, row in zip(self.bags, hashed, strict=True)]

    def update(self) -> None:
        """Call step and zero_grad of torch's optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rows(self, ids: Tensor) -> list[Tensor]:
        """Return the rows of raw ids from the weights."""
        return [bag.weight.detach()[ids % self.problem.buckets] for bag in self.bags]


MakeTables = Callable[[Problem], Tables]
SIDES: dict[str, MakeTables] = {
    "ours": partial(OurTables, kind="dynamic"),
    PEER: TorchTables,
    HASHED: partial(OurTables, kind="hashed"),
}


# ---- The sparse step -------------------------------------------------------------------------------------------------


def sparse_step(tables: Tables, problem: Problem) -> Call:
    """Make a step of lookup, backward with a given gradient, and update, on one batch after the other."""
    batches = itertools.cycle(problem.batches)
    parts = [part.contiguous() for part in problem.gradient.split(DIM, 1)]

    def step() -> None:
        outputs = tables.look_up(next(batches).ids)
        torch.autograd.backward(outputs, [problem.gradient] if len(outputs) == 1 else parts)
        tables.update()

    return step


def reference_rows(problem: Problem, steps: int) -> list[Tensor]:
    """Return the rows of the raw ids below ``buckets`` after that many steps, computed by the formula in float64."""
    tables = [problem.first_row().double().repeat(problem.buckets, 1) for _ in CATEGORIES]
    sums = [torch.zeros_like(table) for table in tables]
    parts = problem.gradient.double().cpu().split(DIM, 1)
    for batch in itertools.islice(itertools.cycle(problem.batches), steps):
        for table, total, ids, part in zip(tables, sums, batch.ids.cpu(), parts, strict=True):
            gradient = torch.zeros_like(table).index_add_(0, ids, part)
            total += gradient**2
            table -= RATE * gradient / (total.sqrt() + EPS)
    return [table.float() for table in tables]


def check_rows(problem: Problem, sides: dict[str, MakeTables]) -> None:
    """Compare the rows that every side trains with the formula's."""
    expected, ids = reference_rows(problem, 3), torch.arange(problem.buckets, device=problem.device)
    for name, make in sides.items():
        tables = make(problem)
        step = sparse_step(tables, problem)
        for _ in range(3):
            step()
        for feature, (rows, wanted) in enumerate(zip(tables.rows(ids), expected, strict=True)):
            seen = torch.cat([batch.ids[feature].cpu() for batch in problem.batches[:3]]).unique()
            found = rows.cpu()[seen]
            torch.testing.assert_close(found, wanted[seen], rtol=0, atol=2e-6, msg=f"{name}: {{}}".format)


# ---- The whole step --------------------------------------------------------------------------------------------------


def whole_step(tables: Tables, problem: Problem) -> Call:
    """Make a step of lookup, dense part, backward and updates, on one batch after the other; it returns the loss."""
    layers, batches = problem.layers(), itertools.cycle(problem.batches)
    optimizer = torch.optim.Adagrad(layers.parameters(), lr=RATE, eps=EPS)
    loss_of = torch.nn.BCEWithLogitsLoss()

    def step() -> Tensor:
        batch = next(batches)
        outputs = tables.look_up(batch.ids)
        loss = loss_of(layers(batch.numbers, outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)), batch.labels)
        loss.backward()
        tables.update()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def check_losses(problem: Problem, sides: dict[str, MakeTables]) -> None:
    """Compare every side's losses with those of the first."""
    expected = None
    for name, make in sides.items():
        call = whole_step(make(problem), problem)
        losses = [float(call()) for _ in range(10)]
        expected = expected or losses
        # Differences are compared one by one because max would pass over a NaN.
        for number, (one, other) in enumerate(zip(losses, expected, strict=True)):
            assert abs(one - other) < 1e-4, f"{name}: losses differ by {abs(one - other)} in step {number}"


# ---- Rows ------------------------------------------------------------------------------------------------------------


def row(name: str, what: str, step: Callable[[Tables, Problem], Call], check: Any, targets: dict[str, float]) -> Row:
    """Make a benchmark row for one kind of step."""

    def build(options: Options) -> Case:
        small = Problem(options.device, 50, 16, distinct=True)
        problem = small if options.quick else Problem(options.device)

        def call(make: MakeTables) -> Make:
            def made() -> Call:
                its = step(make(problem), problem)
                for _ in problem.batches:
                    its()
                return its

            return made

        ours, *others = SIDES
        return Case(
            call(SIDES[ours]),
            {name: call(SIDES[name]) for name in others},
            lambda: check(small, SIDES),
            samples=problem.batch,
            ids=problem.batch * len(CATEGORIES),
            sizes=f"26 features, {problem.buckets:,} rows each where they are hashed, dim {DIM}",
        )

    return Row(f"dlrm/{name}", what, build, targets)


ROWS = [
    row(
        "sparse",
        "DLRM's sparse step, Criteo shape, 26 dynamic tables: lookup, backward, Adagrad; batch 8,192",
        sparse_step,
        check_rows,
        {PEER: 3.0},
    ),
    row("whole", "DLRM's whole step, the same with perceptrons 512-256-64 and 512-256", whole_step, check_losses, {}),
]
