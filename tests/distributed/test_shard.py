"""What ``shard`` takes and what it refuses, on every rank."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import (
    TABLES,
    Case,
    Table,
    collection_of,
    draw,
    look_up,
    optimizer_of,
    plans_of,
    sharded_of,
    tables_of,
    train_alone,
    train_rank,
    train_step,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from torchsparse_rec import distributed
from torchsparse_rec.nn import Embedding, EmbeddingBagCollection, EmbeddingBagConfig

# ---- What it takes ---------------------------------------------------------------------------------------------------


def its_form(case: Case, device: str) -> tuple[Any, ...]:
    """Return what can be seen of a sharded module from outside."""
    whole, module = collection_of(case, device), sharded_of(case, device)
    assert isinstance(module, type(whole))
    held = sum(parameter.numel() for parameter in module.parameters())
    results = module({name: torch.tensor([1, 2], device=device) for name in "abc"})
    keys = results.keys() if case.kind == "bags" else list(results)
    return held, list(keys), module.embedding_names()


@pytest.mark.parametrize("kind", ["bags", "rows"])
@pytest.mark.parametrize("plan", ["row", "table", "column"])
def test_a_rank_holds_its_part_alone(pool_of, device: str, plan: str, kind: str) -> None:
    case = Case(plan=plan, kind=kind, grad_mode=None)
    outcomes = pool_of(4).run(its_form, case, device)
    names = collection_of(case).embedding_names()
    assert all(list(keys) == names and found == names for _, keys, found in outcomes)
    whole = sum(table.rows * table.dim for table in TABLES)
    # Row-wise, a block's last place may have no row.
    assert whole <= sum(held for held, *_ in outcomes) <= whole * 17 / 16
    assert max(held for held, *_ in outcomes) < whole


def optimizer_first(case: Case, device: str) -> dict[str, Tensor]:
    """Make the optimizer, then shard."""
    module = collection_of(case, device)
    optimizer = optimizer_of(case, module)
    distributed.shard(module, plan=plans_of(case, dist.get_world_size()), merge=False)
    for step in range(case.steps):
        train_step(case, module, optimizer, draw(case, step, dist.get_rank(), device), None)
    return tables_of(module)


@pytest.mark.parametrize("optimizer", ["Adam", "torch.SGD"])
@pytest.mark.parametrize("plan", ["row", "table", "column"])
def test_an_optimizer_made_before_goes_on(two, device: str, plan: str, optimizer: str) -> None:
    case = Case(plan=plan, optimizer=optimizer, grad_mode="sparse" if "torch" in optimizer else "fused")
    want = train_alone(case, 2, device)[0].tables
    for tables in two.run(optimizer_first, case, device):
        assert all(torch.equal(table, want[name]) for name, table in tables.items())


def optimizer_with_states(case: Case, device: str) -> None:
    """Shard after a step."""
    module = collection_of(case, device)
    optimizer = optimizer_of(case, module)
    train_step(case, module, optimizer, draw(case, 0, 0, device), None)
    distributed.shard(module, plan=plans_of(case, dist.get_world_size()))


def test_an_optimizer_that_has_states_is_refused(two, device: str) -> None:
    for error in two.errors(optimizer_with_states, Case(optimizer="Adam"), device):
        assert "optimizer" in str(error) and "Adam" in str(error), error


def train_ids_of_two_types(case: Case, device: str) -> dict[str, Tensor]:
    """Train with int32 ids on one rank."""
    module = sharded_of(case, device)
    optimizer = optimizer_of(case, module)
    for step in range(case.steps):
        batch = draw(case, step, dist.get_rank(), device)
        if dist.get_rank() == 1:
            batch.ids = {name: ids.int() for name, ids in batch.ids.items()}
            batch.lengths = {name: lengths.int() for name, lengths in batch.lengths.items()}
        train_step(case, module, optimizer, batch, None)
    return tables_of(module)


@pytest.mark.parametrize("plan", ["row", "table", "column"])
def test_ids_of_int32_on_one_rank(two, device: str, plan: str) -> None:
    case = Case(plan=plan)
    want = train_alone(case, 2, device)[0].tables
    for tables in two.run(train_ids_of_two_types, case, device):
        assert all(torch.equal(table, want[name]) for name, table in tables.items())


# ---- What it refuses -------------------------------------------------------------------------------------------------


def given(plan: Any, device: str) -> None:
    """Shard by a plan."""
    distributed.shard(collection_of(Case(), device), plan=plan)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"t1": "rows"}, "'t1'.*row_wise, table_wise, column_wise, data_parallel, got 'rows'"),
        ({"t1": distributed.TableWise(2)}, r"'t1'.*\[0, 2\), got 2"),
        ({"t1": distributed.ColumnWise((0, 2))}, r"'t1'.*\[0, 2\), got 2"),
        ({"t9": distributed.RowWise()}, "'t9'"),
        ("nonsense", "'nonsense'"),
        ({"t1": 5}, r"'t1'.*RowWise\(\).*got 5"),
    ],
)
def test_plans_that_are_refused(two, device: str, plan: Any, text: str) -> None:
    for error in two.errors(given, plan, device):
        assert type(error) is (TypeError if plan == {"t1": 5} else ValueError), error
        assert re.search(text, str(error)), error


CHANGES: dict[str, dict[str, Any]] = {
    "rows": {"rows": 51},
    "dim": {"dim": 6},
    "features": {"features": ("b", "d")},
    "pooling": {"pooling": "mean"},
    "dtype": {"dtype": torch.float64},
}


def differing(what: str, device: str) -> None:
    """Shard with something that differs on rank 1."""
    case, merge, seed = Case(), True, 0
    plan: Any = plans_of(case, dist.get_world_size())
    if dist.get_rank() == 1:
        if what in CHANGES:
            case = replace(case, tables=(TABLES[0], replace(TABLES[1], **CHANGES[what]), TABLES[2]))
        elif what == "plan":
            plan["t1"] = distributed.RowWise()
        elif what == "one table more":
            case = replace(case, tables=(*TABLES, Table(9, 2, ("d",))))
        elif what == "grad_mode":
            case = replace(case, grad_mode="sparse")
        elif what == "merge":
            merge = False
        elif what == "values":
            seed = 1
    if what == "values":
        plan = {name: distributed.Replicated() for name in plan}
    distributed.shard(collection_of(case, device, seed), plan=plan, merge=merge)


@pytest.mark.parametrize("what", [*CHANGES, "plan", "one table more"])
def test_the_first_table_that_differs_is_named(pool_of, device: str, what: str) -> None:
    first, *others = pool_of(4).errors(differing, what, device)
    assert re.search("'t3'" if what == "one table more" else "'t1'", str(first)), first
    assert isinstance(first, (ValueError, RuntimeError)) and "rank 1" in str(first)
    assert all(type(error) is type(first) for error in others)


@pytest.mark.parametrize("what", ["grad_mode", "merge"])
def test_options_that_differ(two, device: str, what: str) -> None:
    for error in two.errors(differing, what, device):
        assert isinstance(error, (ValueError, RuntimeError)) and what in str(error), error


def test_copies_that_do_not_begin_equal(two, device: str) -> None:
    for error in two.errors(differing, "values", device):
        assert isinstance(error, (ValueError, RuntimeError)) and "'t0'" in str(error), error


def on_a_mesh_of_two_dimensions(device: str) -> None:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("nodes", "ranks"))
    distributed.shard(collection_of(Case(), device), mesh)


def test_a_mesh_of_two_dimensions(pool_of, device: str) -> None:
    for error in pool_of(4).errors(on_a_mesh_of_two_dimensions, device):
        assert type(error) is ValueError and re.search("mesh must have one dimension, .*got.*2", str(error)), error


LAZY = {"lazy": True}
# Optimizers that see whole rows: those with one number or norm for each, and those that leave rows of zeros alone which
# the formula would move.
OF_WHOLE_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "RowWiseAdagrad": ("RowWiseAdagrad", {}),
    "PartialRowWiseAdam": ("PartialRowWiseAdam", {}),
    "LAMB": ("LAMB", {}),
    "Ftrl": ("Ftrl", {}),
    "Adam": ("Adam", LAZY),
    "amsgrad": ("Adam", {"amsgrad": True, **LAZY}),
    "AdamW": ("AdamW", LAZY),
    "momentum": ("SGD", {"momentum": 0.9, **LAZY}),
    "decay": ("SGD", {"weight_decay": 0.1, **LAZY}),
    "decay of Adagrad": ("Adagrad", {"weight_decay": 0.1, **LAZY}),
    "0 / 0 of Adagrad": ("Adagrad", {"eps": 0.0}),
    "RMSprop": ("RMSprop", LAZY),
    "Adadelta": ("Adadelta", LAZY),
}


def errors_by_columns(case: Case, device: str) -> list[str]:
    """Return the errors of a first step by columns: with the optimizer as it is, made before, made too late."""
    found = []
    for begin in (train_rank, optimizer_first, optimizer_late):
        with pytest.raises(ValueError, match="^(rank 0: )?table 't0' is ColumnWise, but ") as error:
            begin(case, device)
        found.append(str(error.value))
    return found


def optimizer_late(case: Case, device: str) -> None:
    """Make the optimizer between lookup and step."""
    module = sharded_of(case, device)
    results = look_up(case, module, draw(case, 0, dist.get_rank(), device))
    optimizer = optimizer_of(case, module)
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    before = [parameter.detach().clone() for parameter in module.parameters()]
    try:
        optimizer.step()
    finally:
        assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("name", OF_WHOLE_ROWS)
def test_slices_of_columns_refuse_optimizers_of_whole_rows(two, device: str, name: str) -> None:
    optimizer, options = OF_WHOLE_ROWS[name]
    case = Case(plan="column", optimizer=optimizer, options={"lr": 0.1, **options}, grad_mode="sparse")
    for errors in two.run(errors_by_columns, case, device):
        for error in errors:
            ways = "RowWise() or TableWise() for it" + (", or lazy=False" if options.get("lazy") else "")
            assert optimizer in error and error.endswith(ways), error


def max_norm_set_late(device: str) -> None:
    module = distributed.shard(Embedding(6, 4, device=device), plan="column_wise")
    module.max_norm = 1.0
    module(torch.tensor([1], device=device))


def test_slices_of_columns_refuse_a_norm_of_rows_that_is_set_later(two, device: str) -> None:
    for error in two.errors(max_norm_set_late, device):
        assert type(error) is ValueError and "is ColumnWise, but has max_norm" in str(error), error


# ---- An example batch ------------------------------------------------------------------------------------------------


def planned_by(given: str, device: str) -> tuple[list[str], list[tuple[float, float, float]]]:
    """Split tables, four of bags of 20 ids and one of single ids; return plans, and what the planner assumed."""
    tables = [
        *(
            EmbeddingBagConfig(num_embeddings=100_000, embedding_dim=16, name=f"seen{k}", feature_names=[f"seen{k}"])
            for k in range(4)
        ),
        EmbeddingBagConfig(num_embeddings=50, embedding_dim=16, name="day", feature_names=["day", "before"]),
    ]
    module = EmbeddingBagCollection(tables, device=torch.device(device))
    rank, random = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    batch: Any = None
    if given == "all" or (given == "one" and rank == 1):
        batch = {
            **{f"seen{k}": torch.randint(0, 100_000, (2048, 20), generator=random) for k in range(4)},
            "day": torch.arange(8),
            "before": torch.arange(6 + 4 * rank) % 7,
            "else": torch.zeros(3, dtype=torch.int64),
        }
    elif given == "incomplete":
        batch = {name: torch.arange(2) for name in ("seen0", "seen1", "seen2", "seen3", "before", "day")[: 5 + rank]}
    planned = distributed.plan_of(distributed.shard(module, batch=batch)).tables.values()
    return [type(each.plan).__name__ for each in planned], [
        (each.use.ids, each.use.distinct, each.use.bags) for each in planned
    ]


def test_an_example_batch_tells_the_planner_what_tables_get(two, device: str) -> None:
    alone, with_batch = two.run(planned_by, "none", device)[0], two.run(planned_by, "all", device)
    assert with_batch[0] == with_batch[1]
    plans, (seen, *_, day) = with_batch[0]
    assert seen[0] == 2048 * 20 and 30_000 < seen[1] < 2048 * 20 and seen[2] == 2048
    assert day == (8 + (6 + 10) / 2, 8.0, 8 + (6 + 10) / 2)
    assert (set(alone[0][:4]), set(plans[:4])) == ({"RowWise"}, {"TableWise"})
    assert alone[1][0][0] == alone[1][0][2] == 4096


def test_the_batch_of_one_rank_is_enough(two, device: str) -> None:
    for plans, (seen, *_, day) in two.run(planned_by, "one", device):
        assert set(plans[:4]) == {"TableWise"} and seen[::2] == (2048 * 20, 2048) and day == (18.0, 8.0, 18.0)


def test_an_example_batch_without_a_feature_is_an_error_on_all(two, device: str) -> None:
    for error in two.errors(planned_by, "incomplete", device):
        assert type(error) is ValueError and re.match("rank 0: shard: batch: .*'day'", str(error)), error
