"""Copies of embedding variables in every form: state dicts, deep copies, checkpoints, rows in other tiers."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import prune
from variable.cases import on_disk, rows_of, step

from torchsparse_rec import optim
from torchsparse_rec.checkpoint import CheckpointStore
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import CounterFilter, EmbeddingVariableOption, GlobalStepEvict, StorageOption, rows

# ---- States ----------------------------------------------------------------------------------------------------------


def test_a_table_with_idle_rows_loads_a_larger_one() -> None:
    larger, table = EmbeddingVariable(2), EmbeddingVariable(2, capacity=2)
    optimizer = optim.Adam(table.parameters(), lr=0.1)
    for key in range(4):
        step(table, optimizer, [key])
    larger(torch.arange(9))
    table.load_state_dict(larger.state_dict())
    assert rows_of(table) == rows_of(larger)


def test_states_that_do_not_fit_change_nothing() -> None:
    table, wide = EmbeddingVariable(2, initializer=3.0), EmbeddingVariable(3, initializer=1.0)
    table(torch.tensor([7, 8]))
    with pytest.raises(
        RuntimeError, match=r"of 'embedding_variable': weight must be \[rows, 3\], got float32 \[1024, 2\]"
    ):
        wide.load_state_dict(table.state_dict())
    assert wide(torch.tensor([7])).tolist() == [[1.0] * 3]
    filtered = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(filter_option=CounterFilter(2)))
    with pytest.raises(RuntimeError, match="has no filter, the variable one"):
        filtered.load_state_dict(table.state_dict(), strict=False)
    assert filtered.total_count() == 0


def _of(name: str, change: Any) -> Any:
    return lambda state: {**state, name: change(state[name])}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: {k: x for k, x in state.items() if k != "keys.entries"}, "keys.entries must be a tensor"),
        (_of("weight", lambda x: x[:-1]), r"keys.entries must be \[5, 2\]"),
        (_of("weight", lambda x: x[:, 0]), r"weight must be \[rows, 2\]"),
        (_of("weight", lambda x: None), r"weight must be \[rows, 2\], got None"),
        (_of("keys.entries", lambda x: x.int()), "keys.entries must be a tensor of torch.int64"),
        (_of("keys.entries", lambda x: x[[0, 1, 1, 3, 4, 5]]), "keys.entries must have distinct keys"),
        (_of("keys.entries", lambda x: torch.where(x == -1, x, x - 2**40)), "no negative frequencies"),
        (_of("keys.counters", lambda x: x + 100), "keys.counters must be of 3 keys in 6 rows"),
        (_of("keys.counters", lambda x: -x), "keys.counters must be of 3 keys in 6 rows"),
        (_of("keys.counters", lambda x: x[:2]), r"counters \[8\], got int64 \[6, 2\] and int64 \[2\]"),
        (_of("keys.free_rows", lambda x: torch.tensor([10**6], dtype=torch.int32)), "free_rows must be rows without"),
        (_of("keys.free_rows", lambda x: torch.tensor([1], dtype=torch.int32)), "free_rows must be rows without a key"),
        (_of("_extra_state", lambda x: {}), "_extra_state must have counts of global_step"),
        (_of("_extra_state", lambda x: x - 5), "_extra_state must have counts of global_step"),
        (_of("admission.candidates.entries", lambda x: x.float()), "admission.candidates.entries must be a tensor"),
        (lambda state: {**state, "cold.keys": torch.arange(2)}, "shard 'rows' must hold keys, values, frequencies"),
    ],
)
def test_states_that_no_table_has_change_nothing(change: Any, text: str) -> None:
    tables = []
    for first in (7, 1):
        option = EmbeddingVariableOption(filter_option=CounterFilter(1 if first == 7 else 2))
        table = EmbeddingVariable(2, capacity=3, ev_option=option)
        table(torch.arange(first, first + 3).repeat(2))
        table(torch.arange(first + 3, first + 5 - first // 7))
        tables.append(table)
    table, other = tables
    state, before = change(other.state_dict()), copy.deepcopy(table.state_dict())
    with pytest.raises(RuntimeError, match=f"EmbeddingVariable.load_state_dict: of 'embedding_variable': .*{text}"):
        table.load_state_dict(state)
    torch.testing.assert_close(table.state_dict(), before, rtol=0, atol=0)
    table(torch.arange(30))


def test_a_state_without_the_table_leaves_rows_of_other_tiers(tmp_path: Path) -> None:
    table = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(storage_option=on_disk(tmp_path)))
    table.insert(torch.arange(100), torch.rand(100, 2))
    before = rows_of(table)
    table.load_state_dict({}, strict=False)
    assert len(table.cold) > 0 and rows_of(table) == before


def test_assigned_states_are_not_shared() -> None:
    table, other = EmbeddingVariable(2, capacity=2), EmbeddingVariable(2, capacity=2)
    table(torch.arange(50))
    other.load_state_dict(table.state_dict(), assign=True)
    other(torch.arange(60))
    assert (table.total_count(), other.total_count()) == (50, 60)


def test_a_weight_that_is_no_parameter() -> None:
    """Use a pruned table, whose weight is computed from a parameter of another name: rows of new ids would be lost."""
    table = EmbeddingVariable(2, initializer=1.0)
    table(torch.arange(3))
    prune.custom_from_mask(table, "weight", torch.ones(1024, 2))
    expected = torch.ones(5, 2)
    assert table.eval()(torch.arange(5)).equal(expected) and table.stats()["keys"] == 3
    with pytest.raises(RuntimeError, match="'embedding_variable': its weight is computed .* call eval"):
        table.train()(torch.arange(5))
    assert table.export().values.equal(expected[:3])


def test_copies_casts_and_moves() -> None:
    option = EmbeddingVariableOption(filter_option=CounterFilter(2))
    table = EmbeddingVariable(2, capacity=2, ev_option=option)
    optimizer = optim.Adagrad(table.parameters(), lr=0.1)
    step(table, optimizer, [*range(9), *range(9)])
    for copied in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert rows_of(copied) == rows_of(table)
        copied(torch.arange(100).repeat(2)).sum().backward()
        assert (copied.total_count(), table.total_count()) == (100, 9)
    step(table.double(), optimizer, torch.arange(99).repeat(2))
    assert table.export().values.dtype == torch.float64
    assert "admission.filtered" in dict(table.named_buffers())  # a buffer moves with the module
    assert "_filtered" not in table.state_dict()


@pytest.mark.parametrize("grad_mode", ["sparse", "dense", "fused", "auto"])
def test_variables_are_freed_at_once(grad_mode: str, tmp_path: Path) -> None:
    gc.disable()
    try:
        option = EmbeddingVariableOption(storage_option=on_disk(tmp_path), evict_option=GlobalStepEvict(9, every=2))
        table = EmbeddingVariable(2, grad_mode=grad_mode, ev_option=option)
        optimizer = optim.Adagrad(table.parameters(), lr=0.1, in_backward=True)
        for k in range(4):
            table.prefetch(torch.arange(9 * k, 9 * k + 16))
            step(table, optimizer, torch.arange(9 * k, 9 * k + 16))
        table.lookup(torch.arange(9))
        table.prefetch(torch.arange(9))
        table.stats()
        reference = weakref.ref(table)
        assert os.listdir(tmp_path)
        del table, optimizer
        assert reference() is None
        while os.listdir(tmp_path):  # reading ahead may not have ended yet
            time.sleep(0.01)
    finally:
        gc.enable()


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def test_a_delta_does_not_depend_on_what_the_caller_does_with_his_tensors(tmp_path: Path) -> None:
    table = EmbeddingVariable(2)
    table.insert([1, 2, 3], torch.ones(3, 2))
    for _ in range(3):
        table(torch.tensor([1]))
    table.save(tmp_path)
    table(torch.tensor([1]))
    for method, keys in ((lambda x: table.insert(x, torch.ones(2, 2)), [50, 51]), (table.erase, [2, 3])):
        given = torch.tensor(keys)
        method(given)
        given.fill_(0)
    table.save_delta(tmp_path)
    other = EmbeddingVariable(2)
    other.restore(tmp_path)
    assert rows_of(other) == rows_of(table)


def test_a_delta_has_what_was_trained_in_eval(tmp_path: Path) -> None:
    table = EmbeddingVariable(2)
    optimizer = optim.SGD(table.parameters(), lr=0.1)
    for _ in range(3):
        step(table, optimizer, [1])
    table.save(tmp_path)
    step(table.eval(), optimizer, [1])
    table.save_delta(tmp_path)
    other = EmbeddingVariable(2)
    other.restore(tmp_path)
    assert rows_of(other) == rows_of(table)


def test_a_delta_after_more_keys_have_gone_than_there_are_rows_is_a_full_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Erase more keys than a table notes for the next delta."""
    monkeypatch.setattr(rows, "_MOST_NOTED", 100)
    table, other = EmbeddingVariable(2, capacity=64), EmbeddingVariable(2)
    table.insert([1, 2, 3], torch.ones(3, 2))
    table.save(tmp_path)
    for key in range(10, 310):
        table.insert([key], torch.zeros(1, 2))
        table.erase([key])
    table.erase([2])
    assert not table._rows.erased and not table._rows.written
    table.save_delta(tmp_path)
    table.insert([4], torch.ones(1, 2))
    table.save_delta(tmp_path)
    assert [version.kind for version in CheckpointStore(tmp_path).versions()] == ["full", "full", "delta"]
    other.restore(tmp_path)
    assert rows_of(other) == rows_of(table) and sorted(rows_of(other)) == [1, 3, 4]


def test_no_delta_on_top_of_what_a_state_dict_has_replaced(tmp_path: Path) -> None:
    table, other = EmbeddingVariable(2), EmbeddingVariable(2)
    table.insert([1, 2], torch.ones(2, 2))
    other.insert([2, 3], torch.zeros(2, 2))
    table.save(tmp_path)
    table.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="there is none: save"):
        table.save_delta(tmp_path)
    table.save(tmp_path)
    other.restore(tmp_path)
    assert rows_of(other) == {2: [0.0, 0.0], 3: [0.0, 0.0]}


def test_another_optimizer_does_not_take_the_states_of_a_checkpoint(tmp_path: Path) -> None:
    table = EmbeddingVariable(2)
    optimizer = optim.Adagrad(table.parameters(), lr=0.1)
    step(table, optimizer, [1, 2])
    table.save(tmp_path)
    for kind, names in ((optim.Adagrad, {"sum", "step"}), (optim.Adam, {"step"})):
        other = EmbeddingVariable(2)
        its_optimizer = kind(other.parameters(), lr=0.1)
        other.restore(tmp_path)
        states = its_optimizer.state_dict()["state"].get(0, {})
        assert states.keys() <= names
        assert ("sum" in states) == (kind is optim.Adagrad)


# ---- Tiers -----------------------------------------------------------------------------------------------------------


def _of_both_layouts(path: Path) -> list[EmbeddingVariable]:
    layouts = (StorageOption(), on_disk(path))
    return [EmbeddingVariable(2, initializer=1.0, ev_option=EmbeddingVariableOption(storage_option=x)) for x in layouts]


@pytest.mark.parametrize("change", ["momentum", "optimizer", "state"])
def test_rows_on_disk_follow_when_the_optimizer_changes(change: str, tmp_path: Path) -> None:
    tables = _of_both_layouts(tmp_path)
    optimizers: list[Any] = [optim.SGD(table.parameters(), lr=0.1, momentum=0.9) for table in tables]
    for k in range(32):
        if k == 9 and change == "optimizer":
            optimizers = [optim.AdamW(table.parameters(), lr=0.1, weight_decay=0.1) for table in tables]
        if k == 20 and change == "optimizer":
            optimizers = [optim.SGD(table.parameters(), lr=0.1, momentum=0.9) for table in tables]
        for table, optimizer in zip(tables, optimizers, strict=True):
            if change == "momentum":
                optimizer.param_groups[0]["momentum"] = 0.9 if k < 8 else 0.0 if k < 12 else 0.5
            if k == 9 and change == "state":
                optimizer.load_state_dict(optimizer.state_dict())
            step(table, optimizer, torch.arange(k * 7 % 60, k * 7 % 60 + 10))
    plain, tiered = tables
    assert tiered.stats()["rows_ssd"] > 0
    assert rows_of(plain) == rows_of(tiered)


def test_optimizers_that_rows_on_disk_cannot_follow(tmp_path: Path) -> None:
    table = _of_both_layouts(tmp_path)[1]
    with pytest.warns(UserWarning, match="weight_decay=0.1 goes through the second moment"):
        optimizer = optim.Adam(table.parameters(), lr=0.1, weight_decay=0.1)
        step(table, optimizer, torch.arange(10))
    with pytest.raises(RuntimeError, match="rows in other tiers cannot follow an optimizer that updates all rows"):
        step(table, optimizer, torch.arange(10, 20))


def test_a_table_that_reads_nothing_ahead_notes_nothing(tmp_path: Path) -> None:
    table = _of_both_layouts(tmp_path)[1]
    for k in range(9):
        table(torch.arange(16 * k, 16 * k + 16))
    assert table.cold is not None and len(table.cold) > 100 and not table.cold._changed
    table.prefetch(torch.arange(16))
    table(torch.arange(16, 32))
    assert not table.cold._changed


@pytest.mark.parametrize("method", ["insert", "insert many", "train"])
def test_rows_that_were_read_ahead_and_then_written_are_read_again(method: str, tmp_path: Path) -> None:
    table = _of_both_layouts(tmp_path)[1]
    optimizer = optim.SGD(table.parameters(), lr=1.0)
    for k in range(4):
        step(table, optimizer, torch.arange(16 * k, 16 * k + 16))
    # Keys of the second tier, or new ones.
    keys = torch.arange(8) + (500 if method == "insert many" else 0)
    assert not table.keys.find(keys).ge(0).any()
    table.prefetch(keys)
    assert table.cold is not None and table.cold._read_ahead is not None
    table.cold._read_ahead[1].result()  # reading ahead has ended
    if method == "insert":
        table.insert(keys, torch.full((8, 2), 5.0))
    elif method == "insert many":  # more rows than the first tier has
        table.insert(torch.cat([torch.arange(1000, 1100), keys]), torch.full((108, 2), 5.0))
        assert not table.keys.find(keys).ge(0).any()
    else:
        step(table, optimizer, keys + 4)
        table.prefetch(keys)
        step(table, optimizer, keys + 40)  # they leave the first tier again
    before = rows_of(table)
    step(table, optimizer, keys)
    assert rows_of(table) == before | {key: [x - 1 for x in before[key]] for key in keys.tolist()}


def test_hit_rates_are_of_training(tmp_path: Path) -> None:
    table = _of_both_layouts(tmp_path)[1]
    for k in (0, 1, 2, 0, 1, 2):
        table.prefetch(torch.arange(10 * k, 10 * k + 10))
        table(torch.arange(10 * k, 10 * k + 10))
    for _ in range(9):
        table.lookup(torch.arange(40))
    stats = table.stats()
    assert 0 < stats["hit_rate_ssd"] <= 0.5
    assert stats["hit_rate_dram"] + stats["hit_rate_ssd"] == 1
