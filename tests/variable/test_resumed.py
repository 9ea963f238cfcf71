"""Rows that get another key, and variables that go on from a checkpoint: as if nothing had happened before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from variable.cases import on_disk, rows_of, step

from torchsparse_rec import optim
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import CheckpointOption, EmbeddingVariableOption, GlobalStepEvict

# ---- Rows of erased keys ---------------------------------------------------------------------------------------------

MOMENTUM = partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("goes", ["erased", "evicted", "restored"])
@pytest.mark.parametrize("between", ["steps", "flush", "state_dict", "save", "a gradient of all rows"])
@pytest.mark.parametrize("make", [MOMENTUM, partial(optim.Adagrad, lr=0.1)], ids=["sgd", "adagrad"])
def test_a_key_in_a_row_of_another_one_has_no_past(make: Callable, between: str, goes: str, tmp_path: Path) -> None:
    option = EmbeddingVariableOption(evict_option=GlobalStepEvict(5) if goes == "evicted" else None)
    table = EmbeddingVariable(1, initializer=0.5, capacity=2, ev_option=option)
    optimizer = make(table.parameters())
    other = EmbeddingVariable(1)
    other.insert([8], [[0.5]])
    other.save(tmp_path / "other")
    for _ in range(3):
        step(table, optimizer, [7, 8, 7, 7])
    if goes == "erased":
        table.erase([7])
    elif goes == "restored":
        table.restore(tmp_path / "other")
    for _ in range(10):
        step(table, optimizer, [8])
    if goes == "evicted":
        assert table.evict() == 1
    step(table, optimizer, [8])
    if between == "flush":
        optimizer.flush()
    elif between == "state_dict":
        optimizer.state_dict()
    elif between == "save":
        table.save(tmp_path / "table")
    elif between == "a gradient of all rows":
        optimizer.zero_grad()
        table.weight.sum().backward()
        optimizer.step()
    step(table, optimizer, [9])
    assert table.keys.capacity == 2  # key 9 has the row of key 7
    fresh = EmbeddingVariable(1, initializer=0.5)
    its = make(fresh.parameters())
    step(fresh, its, [9])
    assert rows_of(table)[9] == rows_of(fresh)[9]
    name = "momentum_buffer" if make is MOMENTUM else "sum"
    states = [
        o.state[t.stored_weight()][name][t.keys.find(torch.tensor([9]))] for t, o in ((table, optimizer), (fresh, its))
    ]
    assert states[0].equal(states[1])


def test_a_flush_leaves_rows_on_a_disk_which_then_are_right_when_they_are_read(tmp_path: Path) -> None:
    def records(table: EmbeddingVariable) -> list[Any]:
        tiers = [] if table.cold is None else table.cold._tiers
        return [records.tolist() for tier in tiers for _, records in tier.items()]

    found = []
    for option in (EmbeddingVariableOption(), EmbeddingVariableOption(storage_option=on_disk(tmp_path, size=64))):
        table = EmbeddingVariable(1, initializer=0.5, ev_option=option)
        optimizer = optim.Adam(table.parameters(), lr=0.1)
        for key in range(20):
            step(table, optimizer, [key, key // 2])
        before = records(table)
        optimizer.flush()
        assert records(table) == before
        found.append(table.lookup(torch.arange(20)).flatten().tolist())
        assert found[-1] == [rows_of(table)[key][0] for key in range(20)]
    assert before and found[0] == pytest.approx(found[1], rel=1e-6)


# ---- Schedules of evictions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["state_dict", "old state_dict", "save", "deepcopy", "pickle"])
@pytest.mark.parametrize("every", [3, 4, 5])
def test_a_resumed_run_evicts_at_the_same_steps(how: str, every: int, tmp_path: Path) -> None:
    option = EmbeddingVariableOption(evict_option=GlobalStepEvict(2, every=every))

    def made() -> tuple[EmbeddingVariable, optim.SGD]:
        table = EmbeddingVariable(1, initializer=0.5, ev_option=option)
        return table, optim.SGD(table.parameters(), lr=0.1)

    table, optimizer = made()
    for key in range(8):
        step(table, optimizer, [key])
    other, its = made()
    if how == "save":
        table.save(tmp_path)
        other.restore(tmp_path)
    elif how.endswith("state_dict"):
        state = table.state_dict()
        if how == "old state_dict":
            state["_extra_state"] = dict(zip(("global_step", "evicted"), state["_extra_state"].tolist(), strict=False))
        other.load_state_dict(state)
    else:
        other = copy.deepcopy(table) if how == "deepcopy" else pickle.loads(pickle.dumps(table))
        its = optim.SGD(other.parameters(), lr=0.1)
    for key in range(8, 20):
        step(table, optimizer, [key])
        step(other, its, [key])
        assert rows_of(table) == rows_of(other)


# ---- Optimizers' states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiers", [False, True])
def test_amsgrad_is_restored(tiers: bool, tmp_path: Path) -> None:
    def made(name: str) -> tuple[EmbeddingVariable, optim.Adam]:
        option = EmbeddingVariableOption(storage_option=on_disk(tmp_path / name)) if tiers else None
        table = EmbeddingVariable(2, initializer=1.0, ev_option=option)
        return table, optim.Adam(table.parameters(), lr=0.1, amsgrad=True)

    table, optimizer = made("one")
    for begin in (0, 10, 20):
        step(table, optimizer, torch.arange(begin, begin + 12))
    table.save(tmp_path / "saved")
    other, its = made("other")
    other.restore(tmp_path / "saved")
    for begin in (20, 5, 12):
        for one, of_it in ((table, optimizer), (other, its)):
            step(one, of_it, torch.arange(begin, begin + 12))
    assert rows_of(table) == rows_of(other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("module_first", [False, True])
@pytest.mark.parametrize("make", [partial(optim.Adagrad, lr=0.1), partial(optim.Adam, lr=0.1)], ids=["adagrad", "adam"])
def test_half_tables_grow_between_loading_and_the_first_step(
    make: Callable, module_first: bool, dtype: torch.dtype
) -> None:
    def made() -> tuple[EmbeddingVariable, Any]:
        table = EmbeddingVariable(2, initializer=1.0, capacity=2, dtype=dtype)
        return table, make(table.parameters())

    table, optimizer = made()
    step(table, optimizer, [1, 2])
    saved = copy.deepcopy((table.state_dict(), optimizer.state_dict()))
    other, its = made()
    if module_first:
        other.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    if not module_first:
        other.load_state_dict(saved[0])
    for one, of_it in ((table, optimizer), (other, its)):
        step(one, of_it, [3, 4, 5, 1])
        step(one, of_it, [6, 2])
    assert rows_of(table) == rows_of(other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_rows_of_half_tables_begin_with_the_same_sums(dtype: torch.dtype) -> None:
    table = EmbeddingVariable(1, capacity=2, dtype=dtype)
    optimizer = optim.Adagrad(table.parameters(), lr=0.1, initial_accumulator_value=0.1)
    for ids in ([1, 2], [3, 4, 5]):  # the second step grows the table
        step(table, optimizer, ids)
    sums = optimizer.state[table.stored_weight()]["sum"][table.keys.find(torch.arange(1, 6))]
    assert sums.equal(torch.full((5, 1), 1.1))


def test_a_variable_starts_from_the_checkpoint_of_its_options(tmp_path: Path) -> None:
    table = EmbeddingVariable(2)
    table.insert([7, 8], torch.ones(2, 2))
    table.save(tmp_path)
    other = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(ckpt=CheckpointOption(str(tmp_path))))
    assert rows_of(other) == rows_of(table)
    other.insert([9], torch.ones(1, 2))
    assert other.save_delta(tmp_path) == 2  # on top of that checkpoint
