"""
The default merges a row's entries before they travel: bits of one process where a row is on one rank, else rounding.

A row's gradient is then the sum over ranks of sums over items. Both it and the sum in the order of one process are
within ``2^-23 * sqrt(n) * sum of |terms|`` of the exact sum of n terms (csrc/segment.h), so within twice that of each
other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from distributed.cases import (
    TABLES,
    Batch,
    Case,
    Table,
    collection_of,
    draw,
    joined,
    look_up,
    optimizer_of,
    sharded_of,
    tables_of,
    train_alone,
    train_rank,
    train_step,
)
from pairs import in_pairs, pairwise
from torch import Tensor

LR = 0.5
SHARED = (Table(20, 4, ("a",), "mean"), Table(50, 5, ("b", "c")), Table(1000, 8, ("b",), "sqrtn"))


def one_step(case: Case) -> Case:
    """Return a case with one step of SGD."""
    return replace(case, merge=True, optimizer="SGD", options={"lr": LR}, steps=1)


CASES = [
    (one_step(Case(SHARED, plan, kind, weighted, mode, batch=batch)), ranks)
    for (plan, kind), weighted, mode, batch, ranks in pairwise(
        [("row", "bags"), ("row", "rows"), ("table", "rows"), ("replicated", "bags"), ("replicated", "rows")],
        (False, True),
        ("fused", "sparse", "dense"),
        ("many", "empty"),
        (2, 4, 3),
        allowed=lambda of, weighted, *_: not (weighted and of[1] == "rows"),
    )
]


def slow_but(every: int) -> pytest.MarkDecorator:
    """Return the cases and their numbers of ranks; all but every so manieth are slow."""
    found = []
    for k, (case, ranks) in enumerate(CASES):
        marks = [] if k % every == 0 else pytest.mark.slow
        found.append(pytest.param(case, ranks, id=f"{case}-{ranks}", marks=marks))
    return pytest.mark.parametrize(("case", "ranks"), found)


def bounds(case: Case, ranks: int) -> dict[str, Tensor]:
    """Return how far the tables of two ways to add may be from each other after the step, element by element."""
    module = collection_of(replace(case, grad_mode="dense"))
    batches = [draw(case, 0, rank) for rank in range(ranks)]
    batch = joined(batches)
    results = look_up(case, module, batch)
    torch.autograd.backward(
        results,
        [(result.detach() - target).abs() / ranks for result, target in zip(results, batch.targets, strict=True)],
    )
    found = {}
    for (name, table), its in zip(module.named_parameters(), case.tables, strict=True):
        ids = torch.cat([batch.ids[feature] for feature in its.features])
        count = torch.bincount(ids, minlength=its.rows).unsqueeze(1)
        # Last, the gradient is divided, and subtracted from the table: each is rounded, on either side.
        rounded = 2.0**-23 * (table.detach().abs() + LR * table.grad)
        found[name] = LR * 2 * 2.0**-23 * count.sqrt() * table.grad + rounded
    return found


def on_one_rank(case: Case, ranks: int) -> list[Tensor]:
    """Return for each table which rows at most one rank has."""
    batches = [draw(case, 0, rank) for rank in range(ranks)]
    found = []
    for table in case.tables:
        counts = torch.zeros(table.rows, dtype=torch.int64)
        for batch in batches:
            counts[torch.cat([batch.ids[feature] for feature in table.features]).unique()] += 1
        found.append(counts <= 1)
    return found


@slow_but(2)
def test_within_the_bound_of_one_process(pool_of, device: str, case: Case, ranks: int) -> None:
    got, want = pool_of(ranks).run(train_rank, case, device), train_alone(case, ranks, device)
    allowed, alone = bounds(case, ranks), on_one_rank(case, ranks)
    for mine, its in zip(got, want, strict=True):
        for one, other in zip(mine.results[0], its.results[0], strict=True):
            assert torch.equal(one, other)
        assert list(mine.tables) == list(its.tables)
        for (name, table), rows in zip(mine.tables.items(), alone, strict=True):
            assert case.batch == "empty" or not rows.all(), "no row is on two ranks: nothing is tested"
            error = (table - its.tables[name]).abs()
            assert (error <= allowed[name]).all(), f"{name}: {error.max()}"
            if ranks != 3:  # a third of a sum is not the sum of thirds
                assert torch.equal(table[rows], its.tables[name][rows]), name
            assert torch.equal(table, got[0].tables[name]), name


@pytest.mark.parametrize("plan", ["table", "column"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_pooled_tables_of_whole_rows_have_the_bits_of_one_process(pool_of, device: str, plan: str, ranks: int) -> None:
    case = Case(TABLES, plan, merge=True)
    for mine, its in zip(pool_of(ranks).run(train_rank, case, device), train_alone(case, ranks, device), strict=True):
        assert all(torch.equal(table, its.tables[name]) for name, table in mine.tables.items())


@pytest.mark.parametrize("plan", ["row", "replicated"])
def test_the_same_bits_on_every_run(pool_of, device: str, plan: str) -> None:
    case = Case(TABLES, plan, optimizer="Adam", merge=True, steps=6)
    first, *others = [pool_of(4).run(train_rank, case, device) for _ in range(3)]
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(one.tables.values(), two.tables.values(), strict=True))
            assert all(
                torch.equal(x, y)
                for xs, ys in zip(one.results, two.results, strict=True)
                for x, y in zip(xs, ys, strict=True)
            )


# ---- By hand ---------------------------------------------------------------------------------------------------------


def step_of_ones(plan: str, merge: bool, device: str) -> Tensor:
    """Train one row, which every rank looks up once more than the rank before, by gradients of one."""
    case = Case((Table(64, 4, ("a",)),), plan, optimizer="SGD", options={"lr": 1.0}, merge=merge)
    module = sharded_of(case, device)
    optimizer = optimizer_of(case, module)
    before = tables_of(module)["embedding_bags.t0.weight"]
    times = dist.get_rank() + 1
    ids = torch.full((times,), 7, device=device)
    module({"a": ids.unsqueeze(1)}).values().sum().backward()
    optimizer.step()
    return before - tables_of(module)["embedding_bags.t0.weight"]


@in_pairs(plan=["row", "table", "column", "replicated"], merge=[False, True], ranks=[2, 4])
def test_a_row_of_all_ranks_gets_the_sum_over_ranks_divided_by_their_number(
    pool_of, device: str, plan: str, merge: bool, ranks: int
) -> None:
    for change in pool_of(ranks).run(step_of_ones, plan, merge, device):
        want = torch.zeros(64, 4)
        want[7] = sum(range(1, ranks + 1)) / ranks
        torch.testing.assert_close(change, want, rtol=0, atol=1e-6)


def two_batches(plan: str, mode: str, device: str) -> dict[str, Tensor]:
    """Accumulate the gradients of two batches, and step once."""
    case = Case(TABLES, plan, grad_mode=mode, optimizer="Adam", options={"lr": 0.1})
    module = sharded_of(case, device)
    optimizer = optimizer_of(case, module)
    _accumulate(case, module, [draw(case, step, dist.get_rank(), device) for step in range(2)], 1.0)
    optimizer.step()
    return tables_of(module)


def _accumulate(case: Case, module: torch.nn.Module, batches: list[Batch], factor: float) -> None:
    for batch in batches:
        results = look_up(case, module, batch)
        torch.autograd.backward(
            results, [(result.detach() - t) * factor for result, t in zip(results, batch.targets, strict=True)]
        )


@pytest.mark.parametrize("mode", ["sparse", "dense"])
@pytest.mark.parametrize("plan", ["row", "table", "column"])
def test_gradients_accumulate_as_on_one_process(two, device: str, plan: str, mode: str) -> None:
    case = Case(TABLES, plan, grad_mode=mode, optimizer="Adam", options={"lr": 0.1})
    module = collection_of(case, device)
    optimizer = optimizer_of(case, module)
    _accumulate(case, module, [joined([draw(case, step, rank, device) for rank in range(2)]) for step in range(2)], 0.5)
    optimizer.step()
    for tables in two.run(two_batches, plan, mode, device):
        for name, table in module.state_dict().items():
            assert torch.equal(tables[name], table.cpu()), name


def evaluated(plan: str, device: str) -> list[Tensor]:
    """Look up without gradients between steps."""
    case = Case(TABLES, plan)
    module = sharded_of(case, device)
    optimizer = optimizer_of(case, module)
    rank = dist.get_rank()
    train_step(case, module, optimizer, draw(case, 0, rank, device), None)
    module.eval()
    with torch.no_grad():
        found = look_up(case, module, draw(case, 9, rank, device))
    module.train()
    train_step(case, module, optimizer, draw(case, 1, rank, device), None)
    return [*[x.cpu() for x in found], *tables_of(module).values()]


@pytest.mark.parametrize("plan", ["row", "table", "column"])
def test_evaluation_between_steps(two, device: str, plan: str) -> None:
    case = Case(TABLES, plan, steps=2)
    module = collection_of(case, device)
    optimizer = optimizer_of(case, module)
    train_step(case, module, optimizer, joined([draw(case, 0, rank, device) for rank in range(2)]), 0.5)
    with torch.no_grad():
        want = [[x.cpu() for x in look_up(case, module, draw(case, 9, rank, device))] for rank in range(2)]
    tables = list(train_alone(case, 2, device)[0].tables.values())
    for rank, found in enumerate(two.run(evaluated, plan, device)):
        assert all(torch.equal(x, y) for x, y in zip(found, [*want[rank], *tables], strict=True))
