"""The states of sharded modules: round trips, one process's tables, and the other way."""

from __future__ import annotations

import errno
import os
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.cases import Case, collection_of, draw, optimizer_of, sharded_of, tables_of, train_alone, train_step
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchsparse_rec import distributed
from torchsparse_rec.distributed import whole
from torchsparse_rec.tables.blocks import Blocks

PLANS = ["row", "table", "column", "replicated", "mixed"]


def through_state_dict(case: Case, device: str) -> list[dict[str, Tensor]]:
    """Train, and load the state into another module; train both on."""
    rank, found = dist.get_rank(), []
    one, other = sharded_of(case, device), sharded_of(case, device)
    optimizer = optimizer_of(case, one)
    for step in range(2):
        train_step(case, one, optimizer, draw(case, step, rank, device), None)
    state = one.state_dict()
    assert list(state) == list(collection_of(case).state_dict())
    assert not other.load_state_dict(state).missing_keys
    found += [tables_of(one), tables_of(other)]
    plain = replace(case, optimizer="SGD", options={"lr": 0.1})
    for module in (one, other):
        train_step(plain, module, optimizer_of(plain, module), draw(case, 5, rank, device), None)
        found.append(tables_of(module))
    return found


@pytest.mark.parametrize("kind", ["bags", "rows"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_round_trip(pool_of, device: str, plan: str, kind: str) -> None:
    case = Case(plan=plan, kind=kind, steps=2)
    want = train_alone(case, 4, device)[0].tables
    for one, other, one_later, other_later in pool_of(4).run(through_state_dict, case, device):
        for name in want:
            if plan != "replicated":  # its copies add rows merged by rank
                assert torch.equal(one[name], want[name]), name
            assert torch.equal(one[name], other[name]), name
            assert torch.equal(one_later[name], other_later[name]), name
            assert not torch.equal(one_later[name], one[name]), name


def load_whole(case: Case, device: str) -> dict[str, Tensor]:
    """Load one process's tables into a sharded module, and the whole tables of that one into another."""
    one, other = sharded_of(case, device), sharded_of(case, device)
    one.load_state_dict(collection_of(case, device, seed=7).state_dict())
    other.load_state_dict(distributed.full_state_dict(one))
    return tables_of(other)


@pytest.mark.parametrize("plan", PLANS)
def test_whole_tables_load_into_a_sharded_module(pool_of, device: str, plan: str) -> None:
    case = Case(plan=plan)
    want = collection_of(case, seed=7).state_dict()
    for tables in pool_of(4).run(load_whole, case, device):
        assert list(tables) == list(want) and all(torch.equal(tables[name], want[name]) for name in want)


# ---- DTensors --------------------------------------------------------------------------------------------------------


def layouts(case: Case, device: str) -> dict[str, tuple]:
    """Return of each table's DTensor its shape, its layout and this rank's part."""
    found = {}
    for name, x in sharded_of(case, device).state_dict().items():
        assert isinstance(x, DTensor)
        found[name] = list(x.shape), str(x.placements[0]), x.device_mesh.mesh.tolist(), x.to_local().cpu().clone()
    return found


LAYOUTS = {"row": "S(1)", "column": "S(2)", "table": "R", "replicated": "R"}


@pytest.mark.parametrize("plan", list(LAYOUTS))
def test_a_state_has_tables_by_blocks(two, device: str, plan: str) -> None:
    case = Case(plan=plan)
    both = two.run(layouts, case, device)
    for name, table in collection_of(case).state_dict().items():
        rows, dim = table.shape
        blocks = Blocks(rows)
        shape, layout, mesh, _ = both[0][name]
        assert (shape, layout) == ([blocks.places, blocks.count, dim], LAYOUTS[plan])
        assert len(mesh) == (1 if plan == "table" else 2) and both[1][name][:3] == both[0][name][:3]
        parts = [found[name][3] for found in both]
        if plan == "table":
            assert parts[1 - mesh[0]].numel() == 0
        box = {"row": lambda p: torch.cat(p, 1), "column": lambda p: torch.cat(p, 2)}.get(
            plan, lambda p, mesh=mesh: p[mesh[0]]
        )(parts)
        assert torch.equal(blocks.whole(box), table)


def write_dcp(case: Case, folder: str, device: str) -> None:
    """Save a sharded module's state with torch's checkpoints."""
    dcp.save(sharded_of(case, device).state_dict(), checkpoint_id=folder)


def read_dcp(case: Case, folder: str, device: str) -> dict[str, Tensor]:
    """Load it into a sharded module that has begun with other values."""
    module = sharded_of(case, device)
    for parameter in module.parameters():
        parameter.data.fill_(7)
    state = module.state_dict()
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state)
    return tables_of(module)


@pytest.mark.parametrize("other", [*LAYOUTS, "mixed"])
@pytest.mark.parametrize("plan", [*LAYOUTS, "mixed"])
def test_torch_s_checkpoints_reshard(pool_of, device: str, plan: str, other: str, tmp_path: Path) -> None:
    pool_of(4).run(write_dcp, Case(plan=plan), str(tmp_path), device)
    want = collection_of(Case()).state_dict()
    for tables in pool_of(2).run(read_dcp, Case(plan=other), str(tmp_path), device):
        assert all(torch.equal(tables[name], want[name]) for name in want)


def load_other(case: Case, other: Case, device: str) -> None:
    """Load the state of one plan into another."""
    sharded_of(other, device).load_state_dict(sharded_of(case, device).state_dict())


def test_a_state_of_another_plan_is_refused(two, device: str) -> None:
    text = (
        r"'embedding_bags.t0.weight' must be a DTensor as of state_dict\(\).*Shard\(dim=1\)\] on ranks \[0, 1\], got "
    )
    for error in two.errors(load_other, Case(plan="column"), Case(plan="row"), device):
        assert isinstance(error, ValueError) and re.search(text, str(error))


def load_shape(case: Case, device: str) -> None:
    """Load a table of another shape."""
    state = collection_of(case, device).state_dict()
    state["embedding_bags.t1.weight"] = torch.zeros(3, 5)
    sharded_of(case, device).load_state_dict(state)


def test_a_table_of_another_shape_is_refused(two, device: str) -> None:
    for error in two.errors(load_shape, Case(plan="row"), device):
        assert "'embedding_bags.t1.weight' must be a whole table, [50, 5], or a DTensor" in str(error)


# ---- Whole tables ----------------------------------------------------------------------------------------------------


def stream(case: Case, folder: str | None, bytes_: int, device: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return whole tables, which travel in so many bytes at a time, and what is in the folder then."""
    module, before = sharded_of(case, device), whole._BYTES
    whole._BYTES = bytes_
    try:
        state = distributed.full_state_dict(module, folder=folder)
    finally:
        whole._BYTES = before
    return {name: x.clone() for name, x in state.items()}, os.listdir(folder) if folder else []


@pytest.mark.parametrize("plan", PLANS)
def test_whole_tables_travel_in_parts(pool_of, device: str, plan: str, tmp_path: Path) -> None:
    want = collection_of(Case()).state_dict()
    for tables, left in pool_of(4).run(stream, Case(plan=plan), str(tmp_path), 1000, device):
        assert left == [] and list(tables) == list(want)
        assert all(torch.equal(tables[name], want[name]) for name in want)


def stream_where(case: Case, folder: str, device: str) -> dict[str, Tensor]:
    """Return whole tables on ranks that stand for machines of their own."""
    machine, platform.node = platform.node, lambda: f"machine {dist.get_rank() // 2}"
    try:
        return {
            name: x.clone() for name, x in distributed.full_state_dict(sharded_of(case, device), folder=folder).items()
        }
    finally:
        platform.node = machine


@pytest.mark.parametrize("plan", PLANS)
def test_every_machine_has_whole_tables(pool_of, device: str, plan: str, tmp_path: Path) -> None:
    want = collection_of(Case()).state_dict()
    for tables in pool_of(4).run(stream_where, Case(plan=plan), str(tmp_path), device):
        assert all(torch.equal(tables[name], want[name]) for name in want)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(two, device: str, tmp_path: Path) -> None:
    for error in two.errors(stream, Case(plan="row"), str(tmp_path / "none"), 1000, device):
        assert isinstance(error, OSError) and str(tmp_path / "none") in str(error)


def stream_without_room(case: Case, device: str) -> tuple[str, dict[str, Tensor]]:
    """Find no room for whole tables on rank 0, train on, and return the error and the tables."""
    module, rank, reserve = sharded_of(case, device), dist.get_rank(), os.posix_fallocate

    def fail(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.posix_fallocate = fail
    try:
        with pytest.raises(OSError, match="no room for a table") as raised:
            distributed.full_state_dict(module)
    finally:
        os.posix_fallocate = reserve
    train_step(case, module, optimizer_of(case, module), draw(case, 0, rank, device), None)
    return str(raised.value), tables_of(module)


def test_a_full_disk_is_an_error_of_all_ranks_and_training_goes_on(two, device: str) -> None:
    case = Case(plan="row", steps=1)
    want = train_alone(case, 2, device)[0].tables
    found = two.run(stream_without_room, case, device)
    assert os.strerror(errno.ENOSPC) in found[0][0] and found[1][0].startswith("rank 0: ")
    for _, tables in found:
        assert all(torch.equal(tables[name], want[name]) for name in want)
