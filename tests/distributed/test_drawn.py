"""Tables on meta: each rank draws its own part, and any number of ranks begins with the same values under any plan."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import TABLES, Case, Table, draw, optimizer_of, peak, plans_of, tables_of, train_step
from torch import Tensor

from torchsparse_rec import distributed, initializers, nn, optim


def on_meta(case: Case, **fields: Any) -> Any:
    """Return a case's collection on meta; ``fields`` are those of its configs beside the sizes."""
    bags = case.kind == "bags"
    config: Any = nn.EmbeddingBagConfig if bags else nn.EmbeddingConfig
    configs = [
        config(t.rows, t.dim, name=f"t{k}", feature_names=list(t.features), data_type=t.dtype, **fields)
        for k, t in enumerate(case.tables)
    ]
    return (nn.EmbeddingBagCollection if bags else nn.EmbeddingCollection)(
        configs, device="meta", grad_mode=case.grad_mode
    )


def begin(case: Case, device: str, fields: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tables of ranks of which each has another seed but the first."""
    torch.manual_seed(7 * dist.get_rank())
    module = on_meta(case, **fields)
    distributed.shard(module, plan=plans_of(case, dist.get_world_size()))
    assert {parameter.device.type for parameter in module.parameters()} == {device}
    return tables_of(module)


def begin_all(cases: list[Case], device: str) -> list[dict[str, Tensor]]:
    return [begin(case, device, {}) for case in cases]


PLANS = ["row", "table", "column", "replicated", "mixed"]


@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_ranks_and_plans_begin_alike(pool_of, device: str, kind: str) -> None:
    case = Case(kind=kind)
    want = pool_of(2).run(begin, replace(case, plan="table"), device, {})[0]
    for ranks in (2, 3, 4):
        for of_plans in pool_of(ranks).run(begin_all, [replace(case, plan=plan) for plan in PLANS], device):
            for plan, tables in zip(PLANS, of_plans, strict=True):
                assert list(tables) == list(want)
                for name, table in tables.items():
                    assert torch.equal(table, want[name]), (ranks, plan, name)
    for k, (table, rows) in enumerate(zip(case.tables, want.values(), strict=True)):
        bound = table.rows**-0.5
        assert rows.shape == (table.rows, table.dim)
        assert rows.abs().max() <= bound and rows.std() > 0.4 * bound, k
    # Each table has a seed of its own: the same rows and columns of two tables differ by more than their bounds.
    first, second = (want[name][:20, :4] * table.rows**0.5 for name, table in zip(want, case.tables[:2], strict=False))
    assert (first - second).abs().mean() > 0.3


LARGE = (Table(70_001, 3, ("a",)), Table(9, 3, ("b",)))


# Daily: every plan, and every dtype. What is drawn in pieces does not know the plan, only which rows and columns.
@pytest.mark.parametrize(
    ("dtype", "plan"),
    [
        pytest.param(
            *(dtype, plan),
            id=f"{dtype}-{plan}",
            marks=[] if plan == "row" or dtype == torch.float32 else [pytest.mark.slow],
        )
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        for plan in PLANS
    ],
)
def test_parts_drawn_in_pieces(two, device: str, plan: str, dtype: torch.dtype) -> None:
    case = Case(tables=tuple(replace(table, dtype=dtype) for table in LARGE), plan=plan)
    fields = {"init_fn": initializers.Normal(mean=5.0), "padding_idx": -2}
    tables, others = two.run(begin, case, device, fields)
    assert all(torch.equal(rows, others[name]) for name, rows in tables.items()) and tables.keys() == others.keys()
    for table, rows in zip(case.tables, tables.values(), strict=True):
        assert rows.dtype == dtype
        assert not rows[-2].any()
        kept = torch.cat([rows[:-2], rows[-1:]]).double()
        assert len(kept.unique(dim=0)) == len(kept) or dtype in (torch.float16, torch.bfloat16)
        assert abs(kept.mean() - 5) < 5 * (3 * table.rows) ** -0.5
        assert table.rows < 100 or 0.98 < kept.std() < 1.02


def single(kind: str, device: str) -> Tensor:
    """Return the table of a module of its own."""
    torch.manual_seed(3)
    module = getattr(nn, kind)(5000, 4, padding_idx=1, device="meta")
    model = distributed.shard(torch.nn.ModuleDict({"user": module}), plan="row_wise")
    module.weight.requires_grad_(False)
    (table,) = tables_of(model).values()
    return table


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_single_tables_begin_normal_as_those_of_torch(two, device: str, kind: str) -> None:
    one, other = two.run(single, kind, device)
    assert torch.equal(one, other)
    assert not one[1].any()
    assert abs(one.mean()) < 0.04 and abs(one.std() - 1) < 0.03


def train(case: Case, device: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train tables that began on meta, and tables on the device that were given the same values."""
    found = []
    torch.manual_seed(0)
    module: Any = on_meta(case)
    distributed.shard(module, plan=plans_of(case, dist.get_world_size()))
    begun = tables_of(module)
    for values in (None, begun):
        if values is not None:
            module = on_meta(case).to_empty(device=device)
            module.load_state_dict(values)
            distributed.shard(module, plan=plans_of(case, dist.get_world_size()))
        optimizer = optimizer_of(case, module)
        for step in range(3):
            train_step(case, module, optimizer, draw(case, step, dist.get_rank(), device), None)
        found.append(tables_of(module))
    assert any(not torch.equal(begun[name], table) for name, table in found[0].items())
    return found[0], found[1]


@pytest.mark.parametrize(
    "case",
    [
        Case(plan="mixed"),
        Case(plan="mixed", grad_mode="sparse", optimizer="Adam"),
        Case(plan="replicated", grad_mode="dense", optimizer="torch.SGD"),
    ],
    ids=str,
)
def test_they_train_as_others(two, device: str, case: Case) -> None:
    for mine, other in two.run(train, case, device):
        assert all(torch.equal(table, other[name]) for name, table in mine.items())


# ---- Errors ----------------------------------------------------------------------------------------------------------


def refused(what: str) -> str:
    """Return the error of a collection that cannot be drawn."""
    case = Case(tables=TABLES[:1])
    if what == "init_fn":
        module = on_meta(case, init_fn=torch.nn.init.zeros_)
    elif what == "initializer":
        module = on_meta(case, init_fn=initializers.Constant(float(dist.get_rank())))
    else:
        module = on_meta(case)
    kept = optim.SGD(module.parameters(), lr=0.1) if what == "optimizer" else None
    with pytest.raises((ValueError, RuntimeError)) as raised:
        distributed.shard(module, plan="row_wise")
    assert all(parameter.is_meta for parameter in module.parameters()), kept
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "init_fn",
            "ValueError: rank 0: shard: init_fn of table 't0', which is on meta, must be Constant, .* got <func",
        ),
        ("optimizer", "RuntimeError: rank 0: shard: table 't0' is on meta, .* SGD, would not know: make the optimizer"),
        ("initializer", "RuntimeError: shard: all ranks must have the same tables, got 't0' .*Constant.value=0.0.*"),
    ],
)
def test_what_is_refused(two, device: str, what: str, message: str) -> None:
    for text in two.run(refused, what):
        assert re.match(message, text), text


# ---- Memory ----------------------------------------------------------------------------------------------------------


def megabytes(rows: int, plan: str, device: str) -> float:
    """Return by how much the peak of this rank's memory exceeds what it has before a table of 64 columns is drawn."""
    case = Case(tables=(Table(rows, 64, ("a",)),), plan=plan)
    on = on_meta(case)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak()
    distributed.shard(on, plan=plans_of(case, dist.get_world_size()))
    return (peak() - before) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot begin anew here")
@pytest.mark.parametrize("plan", ["row", "column"])
def test_no_rank_holds_a_whole_table(pool_of, device: str, plan: str) -> None:
    rows = 2_000_000  # 512 MB, 128 MB a rank
    grown = pool_of(4).run(megabytes, rows, plan, device)
    assert all(each < 128 * 1.5 + 60 for each in grown), grown
