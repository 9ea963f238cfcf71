"""
Ranks have the bits of one process: tables after training, and results in every step.

That holds where the entries of a table's gradient are added in the order of one process: in table-wise and column-wise
tables whose lookups are pooled, and in all others with ``merge=False``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from distributed.cases import TABLES, Case, Table, Trained, draw, train_alone, train_rank
from optim.cases import other_kinds
from pairs import pairwise

from torchsparse_rec.optim._together import LEAST_WHOLE_ROWS, WHOLE

# ---- Comparisons -----------------------------------------------------------------------------------------------------


def check_equal(case: Case, got: list[Trained], want: list[Trained]) -> None:
    """Compare every rank's results, gradients of weights and tables, bit by bit."""
    for rank, (mine, its) in enumerate(zip(got, want, strict=True)):
        for step, (ours, theirs) in enumerate(zip(mine.results, its.results, strict=True)):
            for k, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                same(one, other, f"rank {rank}, step {step}, result {k}")
        for step, (own, other_own) in enumerate(zip(mine.gradients, its.gradients, strict=True)):
            assert own.keys() == other_own.keys(), f"rank {rank}, step {step}"
            for name in own:
                # Over three ranks the one process has divided and multiplied; slices of columns are added up.
                exact = len(got) != 3 and case.plan in ("row", "table")
                where = f"rank {rank}, step {step}, gradient of the weights of {name}"
                same(own[name], other_own[name], where) if exact else close(own[name], other_own[name], where)
        assert list(mine.tables) == list(its.tables)
        for name in mine.tables:
            same(mine.tables[name], its.tables[name], f"rank {rank}, {name} after training")


def same(one: torch.Tensor, other: torch.Tensor, where: str) -> None:
    """Compare two tensors bit by bit."""
    assert one.dtype == other.dtype and one.shape == other.shape, f"{where}: {one.dtype} {tuple(one.shape)}"
    assert torch.equal(one, other), f"{where}: they differ by up to {(one.double() - other.double()).abs().max()}"


def close(one: torch.Tensor, other: torch.Tensor, where: str) -> None:
    """Compare two tensors to rounding."""
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=lambda text: f"{where}: {text}")


def check(pool_of: Any, ranks: int, case: Case, device: str) -> None:
    """Train a case on ranks and alone, and compare."""
    check_equal(case, pool_of(ranks).run(train_rank, case, device), train_alone(case, ranks, device))


# ---- Plans, pooling and batches --------------------------------------------------------------------------------------


def of_pooling(pooling: str) -> tuple[Table, ...]:
    """Return the tables with a pooling."""
    return tuple(Table(table.rows, table.dim, table.features, pooling) for table in TABLES)


PLANS = ("row", "table", "column")
POOLINGS = (*product(("sum", "mean", "sqrtn"), (False, True)), ("max", False))
BAGS = [
    (Case(tables=of_pooling(pooling), plan=plan, weighted=weighted, batch=batch), ranks)
    for plan, (pooling, weighted), batch, ranks in pairwise(PLANS, POOLINGS, ("even", "uneven", "empty"), (2, 4, 3))
]
ROWS = [
    (Case(plan=plan, kind="rows", batch=batch), ranks)
    for plan, batch, ranks in pairwise(PLANS, ("even", "uneven", "empty", "single"), (2, 4, 3))
]
SINGLE = [
    (Case(plan=plan, batch="single"), ranks) for plan, ranks in (("row", 2), ("table", 4), ("column", 3), ("mixed", 4))
]


def cases(of: list[tuple[Case, int]], every: int) -> Any:
    """Return cases and their numbers of ranks; all but every so manieth are slow."""
    found = []
    for k, (case, ranks) in enumerate(of):
        name = f"{case}-{case.tables[0].pooling}-{ranks}"
        found.append(pytest.param(case, ranks, id=name, marks=[] if k % every == 0 else pytest.mark.slow))
    return pytest.mark.parametrize(("case", "ranks"), found)


@cases(BAGS, 2)
def test_pooled(pool_of, device: str, case: Case, ranks: int) -> None:
    check(pool_of, ranks, case, device)


@cases(ROWS, 4)
def test_not_pooled(pool_of, device: str, case: Case, ranks: int) -> None:
    check(pool_of, ranks, case, device)


@cases(SINGLE, 3)
def test_bags_of_one_id(pool_of, device: str, case: Case, ranks: int) -> None:
    check(pool_of, ranks, case, device)


# ---- Optimizers and gradient modes -----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "nesterov-decay": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.01}),
    "RowWiseAdagrad": ("RowWiseAdagrad", {"lr": 0.1}),
    "Adam": ("Adam", {"lr": 0.1}),
    "amsgrad": ("Adam", {"lr": 0.1, "amsgrad": True}),
    "AdamW": ("AdamW", {"lr": 0.1, "weight_decay": 0.1}),
    "PartialRowWiseAdam": ("PartialRowWiseAdam", {"lr": 0.1}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "centered": True}),
    "Ftrl": ("Ftrl", {"lr": 0.5, "l1": 0.01}),
    "Adadelta": ("Adadelta", {"lr": 1.0}),
    "LAMB": ("LAMB", {"lr": 0.1, "weight_decay": 0.01}),
    "torch.SGD": ("torch.SGD", {"lr": 0.1}),
    "torch.Adagrad": ("torch.Adagrad", {"lr": 0.1}),
    "torch.SparseAdam": ("torch.SparseAdam", {"lr": 0.1}),
}
for _case in other_kinds(OPTIMIZERS):  # lazy where it would warn that every step updates all rows
    OPTIMIZERS[_case.kind] = _case.kind, {"lr": _case.lr, **_case.arguments, "lazy": _case.warns}
# They see whole rows, and do not take slices of columns.
OF_ROWS = ("RowWiseAdagrad", "PartialRowWiseAdam", "LAMB", "Ftrl")
OF_ROWS += tuple(name for name, (_, options) in OPTIMIZERS.items() if options.get("lazy"))


def takes(name: str, mode: str | None, plan: str, ranks: int) -> bool:
    """Say whether an optimizer takes a gradient mode and a plan."""
    if mode == "fused" and "torch." in name or name == "torch.SparseAdam" and mode != "sparse":
        return False
    return (plan != "mixed") == (name in OF_ROWS)


def of_optimizers() -> Iterator[Any]:
    """Yield a case for each optimizer and each of the gradient modes that it takes."""
    modes, plans = (None, "dense", "sparse", "fused", "auto"), ("row", "table", "mixed")
    for name, mode, plan, ranks in pairwise(OPTIMIZERS, modes, plans, (2, 4), allowed=takes):
        optimizer, options = OPTIMIZERS[name]
        case = Case(plan=plan, grad_mode=mode, optimizer=optimizer, options=options, steps=6)
        is_slow = mode in (None, "dense", "auto") and name not in ("Adam", "torch.Adagrad")
        marks = [pytest.mark.slow] if is_slow else []
        yield pytest.param(case, ranks, id=f"{name}-{mode}-{plan}-{ranks}", marks=marks)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's Adagrad warns
@pytest.mark.parametrize(("case", "ranks"), list(of_optimizers()))
def test_optimizers(pool_of, device: str, case: Case, ranks: int) -> None:
    check(pool_of, ranks, case, device)


# ---- Tables ----------------------------------------------------------------------------------------------------------

MIXED = (
    Table(300, 3, ("a",), "mean"),
    Table(40, 8, ("a", "b"), "sum", torch.float64),
    Table(100, 5, ("b",), "max", torch.float16),
    Table(64, 6, ("c",), "sum", torch.bfloat16),
    Table(7, 4, ("c", "d"), "sqrtn"),
    Table(1, 2, ("e",)),
    Table(30, 4, ("d",), "min"),
)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", ["row", "table", "column", "mixed"])
def test_dims_poolings_and_dtypes_may_differ(pool_of, device: str, plan: str, ranks: int) -> None:
    check(pool_of, ranks, Case(MIXED, plan, optimizer="SGD"), device)


@pytest.mark.xfail(strict=True, reason="an entry of a row of half precision is rounded before it travels")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_entries_of_half_precision_are_not_rounded_on_the_way(pool_of, device: str, dtype: torch.dtype) -> None:
    check(pool_of, 2, Case((Table(64, 6, ("a", "b"), "mean", dtype),), "row", optimizer="SGD", batch="many"), device)


@pytest.mark.parametrize(("name", "lazy"), [("Adam", False), ("SGD", True), ("Adagrad", True)])
def test_rows_whose_gradient_is_zero_in_the_columns_of_some_ranks(pool_of, device: str, name: str, lazy: bool) -> None:
    optimizer, options = OPTIMIZERS[name]
    tables = (Table(12, 4, ("a", "b"), "max"), Table(9, 2, ("c",), "min"))  # each column has its own winner
    check(pool_of, 2, Case(tables, "column", optimizer=optimizer, options={**options, "lazy": lazy}), device)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("plan", ["row", "table"])
def test_ranks_without_a_table(pool_of, device: str, plan: str, ranks: int) -> None:
    check(pool_of, ranks, Case((Table(5, 4, ("a",)),), plan), device)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["fused", "sparse"])
def test_a_table_of_all_blocks(pool_of, device: str, mode: str, ranks: int) -> None:
    check(pool_of, ranks, Case((Table(100_000, 4, ("a", "b")),), "row", grad_mode=mode), device)


@pytest.mark.parametrize("mode", ["fused", "sparse"])
@pytest.mark.parametrize("plan", ["table", "column"])
def test_a_table_of_which_steps_name_a_fifth_is_stepped_whole(pool_of, device: str, plan: str, mode: str) -> None:
    rows = LEAST_WHOLE_ROWS
    case = Case((Table(rows, 4, tuple("abcd")),), plan, grad_mode=mode, optimizer="Adam", batch="many")
    drawn = [torch.cat([*draw(case, step, rank).ids.values()]) for step in range(case.steps) for rank in range(2)]
    named = [torch.cat(drawn[2 * step : 2 * step + 2]).unique().numel() for step in range(case.steps)]
    assert WHOLE * min(named) >= rows > max(named)
    check(pool_of, 2, case, device)
