"""
Benchmark rows of the gradients of the ``embedding`` family, alone and with torch's SGD on them.

Bytes of an update are counted by formula: the ids, a row of the gradient for each id, and every row that occurs read
once and written once. The search for equal ids counts in the time and not in the bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchsparse_rec import nn

from .embedding import GRID, POPULAR, Batch, Problem, mean_ids
from .rows import Call, Case, CudaTargets, Make, Options, Row

LEARNING_RATE = 0.01
BATCHES = 4
_SUM, _NO_PADDING = 0, -1
_ops = torch.ops.torchsparse_rec


@dataclass(frozen=True)
class Form:
    """A form of lookup: pooled, or one row per id."""

    name: str
    pooled: bool

    def results(self, batch: Batch) -> int:
        """Return the number of rows of the lookup's result."""
        return len(batch.offsets) - 1 if self.pooled else len(batch.ids)

    def gradient(self, batch: Batch, dim: int) -> Tensor:
        """Draw a gradient of the lookup's result."""
        return torch.randn(self.results(batch), dim, device=batch.ids.device)

    def per_id(self, gradient: Tensor, batch: Batch) -> Tensor:
        """Return the gradient's row for each id."""
        return gradient.index_select(0, batch.bags_of_ids()) if self.pooled else gradient

    def ours(self, table: nn.Embedding | nn.EmbeddingBag, batch: Batch) -> Tensor:
        """Compute our lookup."""
        return table(batch.ids, batch.offsets) if isinstance(table, nn.EmbeddingBag) else table(batch.ids)

    def in_torch(self, table: Tensor, batch: Batch) -> Tensor:
        """Compute torch's lookup."""
        if not self.pooled:
            return functional.embedding(batch.ids, table, sparse=True)
        return functional.embedding_bag(
            batch.ids, table, batch.offsets, mode="sum", sparse=True, include_last_offset=True
        )

    def module(self, table: Tensor) -> nn.Embedding | nn.EmbeddingBag:
        """Make our module on a table."""
        rows, dim = table.shape
        if not self.pooled:
            return nn.Embedding(rows, dim, _weight=table, grad_mode="sparse")
        return nn.EmbeddingBag(rows, dim, mode="sum", _weight=table, include_last_offset=True, grad_mode="sparse")


def backward_and_step(weight: Tensor, lookups: Sequence[Callable[[], Tensor]], gradients: list[Tensor]) -> Call:
    """Run the forwards, and return a call of backward and SGD's step for one batch after the other."""
    optimizer = torch.optim.SGD([weight], lr=LEARNING_RATE)

    def step(output: Tensor, gradient: Tensor) -> None:
        output.backward(gradient, retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()

    return in_turn(step, [lookup() for lookup in lookups], gradients)


def our_step(form: Form, table: Tensor, batches: list[Batch], gradients: list[Tensor]) -> Call:
    """Return a call of our sparse backward and torch's SGD."""
    module = form.module(table)
    return backward_and_step(module.weight, [partial(form.ours, module, batch) for batch in batches], gradients)


def torch_step(form: Form, table: Tensor, batches: list[Batch], gradients: list[Tensor]) -> Call:
    """Return a call of torch's sparse backward and torch's SGD."""
    weight = torch.nn.Parameter(table)
    return backward_and_step(weight, [partial(form.in_torch, weight, batch) for batch in batches], gradients)


def in_turn(function: Callable[..., Any], *columns: Sequence[Any]) -> Call:
    """Return a call of a function with the columns' first elements, then their second ones, and so on in a circle."""
    turns = itertools.cycle(list(zip(*columns, strict=True)))
    return lambda: function(*next(turns))


def index_add_step(form: Form, table: Tensor, batches: list[Batch], gradients: list[Tensor]) -> Call:
    """Return a call of the update alone, by index_add_, which leaves the order of addition open on a GPU."""

    def step(batch: Batch, gradient: Tensor) -> None:
        table.index_add_(0, batch.ids, form.per_id(gradient, batch), alpha=-LEARNING_RATE)

    return in_turn(step, batches, gradients)


def check_step(form: Form, problem: Problem, options: Options) -> None:
    """Compare a small table after two steps with torch's."""
    small = Options(options.device, True, options.threads)
    table, batches = problem.table(small), problem.batches(small, 2)
    gradients = [form.gradient(batch, problem.dim) for batch in batches]
    tables = []
    for step in (our_step, index_add_step):
        tables.append(table.clone())
        call = step(form, tables[-1], batches, gradients)
        call()
        call()
    assert not torch.equal(tables[0], table)
    torch.testing.assert_close(tables[0], tables[1], rtol=1e-4, atol=1e-4)


def sgd_row(form: Form, problem: Problem) -> Row:
    """Make a benchmark row of the sparse gradient and SGD."""

    def build(options: Options) -> Case:
        table, batches = problem.table(options), problem.batches(options, BATCHES)
        gradients = [form.gradient(batch, problem.dim) for batch in batches]
        ids = mean_ids(batches)
        unique = sum(len(batch.ids.unique()) for batch in batches) // len(batches)

        def side(step: Callable[..., Call]) -> Make:
            return lambda: step(form, table, batches, gradients)

        return Case(
            side(our_step),
            {"torch sparse gradient + SGD": side(torch_step), "torch index_add_": side(index_add_step)},
            lambda: check_step(form, problem, options),
            8 * ids + 4 * problem.dim * (ids + 2 * unique),
            ids=ids,
            sizes=f"{problem.sizes(options, ids)}, {unique:,} different",
        )

    published = "FBGEMM's backward + SGD: 44 % of peak bandwidth, + Adam 48 % (H100)" if problem == POPULAR else ""
    what = f"sparse gradient of {'pooled lookups' if form.pooled else 'one row per id'}, and torch's SGD on it"
    name = f"embedding/{form.name}-sgd-{problem.name()}"
    return Row(name, what, build, cuda=CudaTargets(copy_share=0.60), published=published)


def dense_row(problem: Problem) -> Row:
    """Make a benchmark row of a dense gradient, which is as large as the table."""

    def build(options: Options) -> Case:
        rows, batches = problem.rows(options), problem.batches(options, BATCHES)
        gradients = [torch.randn(len(batch.ids), problem.dim, device=options.device) for batch in batches]
        ids = mean_ids(batches)

        def ours(batch: Batch, gradient: Tensor) -> Tensor:
            return _ops.embedding_dense_backward.default(
                gradient, batch.ids, None, None, None, rows, _SUM, _NO_PADDING, False
            )

        def in_torch(batch: Batch, gradient: Tensor) -> Tensor:
            return torch.ops.aten.embedding_dense_backward(gradient, batch.ids, rows, -1, False)

        def index_add(batch: Batch, gradient: Tensor) -> Tensor:
            return gradient.new_zeros(rows, problem.dim).index_add_(0, batch.ids, gradient)

        def side(function: Callable[[Batch, Tensor], Tensor]) -> Make:
            return lambda: in_turn(function, batches, gradients)

        def check() -> None:
            batch, gradient = batches[0], gradients[0]
            result = ours(batch, gradient)
            present, places = batch.ids.unique(return_inverse=True)
            expected = gradient.new_zeros(len(present), problem.dim, dtype=torch.float64)
            expected.index_add_(0, places, gradient.double())
            torch.testing.assert_close(result[present].double(), expected, rtol=1e-4, atol=2e-3)
            assert int(result.any(1).sum()) == len(present)

        peers = {"torch embedding_dense_backward": side(in_torch), "torch zeros + index_add_": side(index_add)}
        moved = 8 * ids + 4 * problem.dim * (ids + rows)
        return Case(side(ours), peers, check, moved, ids=ids, sizes=problem.sizes(options, ids))

    return Row(f"embedding/rows-grad-dense-{problem.name()}", "gradient of one row per id as a table", build)


def weights_row(problem: Problem) -> Row:
    """Make a benchmark row of the gradient of a pooled lookup's weights."""

    def build(options: Options) -> Case:
        table, batches = problem.table(options), problem.batches(options, BATCHES)
        gradients = [torch.randn(len(batch.offsets) - 1, problem.dim, device=options.device) for batch in batches]
        ids, bags = mean_ids(batches), problem.bags(options)

        def ours(batch: Batch, gradient: Tensor) -> Tensor:
            return _ops.embedding_weights_backward.default(
                gradient, table, batch.ids, batch.offsets, batch.weights, gradient, _SUM, _NO_PADDING
            )

        def composed(batch: Batch, gradient: Tensor) -> Tensor:
            rows = gradient.index_select(0, batch.bags_of_ids())
            return rows.mul_(table.index_select(0, batch.ids)).sum(1)

        def in_torch() -> Call:
            weights = [batch.weights.clone().requires_grad_() for batch in batches]
            outputs = [
                functional.embedding_bag(
                    batch.ids, table, batch.offsets, mode="sum", per_sample_weights=each, include_last_offset=True
                )
                for batch, each in zip(batches, weights, strict=True)
            ]
            return in_turn(partial(torch.autograd.grad, retain_graph=True), outputs, weights, gradients)

        def side(function: Callable[[Batch, Tensor], Tensor]) -> Make:
            return lambda: in_turn(function, batches, gradients)

        def check() -> None:
            given = batches[0], gradients[0]
            torch.testing.assert_close(ours(*given), composed(*given), rtol=1e-4, atol=1e-4)

        # Ids, bags and result are counted, a row of the table per id, and one of the gradient per bag.
        moved = 12 * ids + 8 * bags + 4 * problem.dim * (ids + bags)
        peers: dict[str, Make] = {"torch embedding_bag's": in_torch, "torch index_select, mul, sum": side(composed)}
        return Case(side(ours), peers, check, moved, ids=ids, sizes=problem.sizes(options, ids))

    return Row(f"embedding/weights-grad-{problem.name()}", "gradient of the weights of pooled lookups", build)


BAGS, PER_ID = Form("bag", True), Form("rows", False)
ROWS = [
    *(sgd_row(form, problem) for form in (BAGS, PER_ID) for problem in GRID),
    dense_row(POPULAR),
    weights_row(POPULAR),
]
