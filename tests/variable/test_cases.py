"""Cases that random programs have found, or would find: rows of a variable that go, stay and come back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import assert_same_bits
from variable.cases import on_disk
from variable.test_machine import DIM, OPTIMIZERS, Optimizer, Trained

from torchsparse_rec import optim
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import CounterFilter, EmbeddingVariableOption, GlobalStepEvict, StorageOption, cold
from torchsparse_rec.variable.keys import KeyRows


def _tiered(folder: Path, **options: Any) -> EmbeddingVariable:
    """Make a variable whose first tier has 16 rows."""
    option = EmbeddingVariableOption(storage_option=on_disk(folder, cache_strategy="LRU"), **options)
    return EmbeddingVariable(2, initializer=0.5, capacity=2, ev_option=option)


def test_more_rows_are_inserted_than_the_first_tier_has(tmp_path: Path) -> None:
    """Insert pretrained vectors into a table that is larger than memory, at once and in parts."""
    variable = _tiered(tmp_path)
    values = torch.arange(80.0).reshape(40, 2)
    variable.insert(torch.arange(20), values[:20])
    for begin in (20, 30):
        variable.insert(torch.arange(begin, begin + 10), values[begin : begin + 10])
    assert variable.total_count() == 40
    assert_same_bits(variable.lookup(torch.arange(40)), values)


def test_a_row_that_is_written_is_new_in_every_tier(tmp_path: Path) -> None:
    """Write a row that is in use: its frequency begins anew, as its optimizer state does."""
    frequencies = []
    for variable in (EmbeddingVariable(2, initializer=0.5), _tiered(tmp_path)):
        variable(torch.tensor([100, 100]))
        for begin in (0, 10):
            variable(torch.arange(begin, begin + 10))
        variable.insert([100], [[1.0, 2.0]])
        exported = variable.export()
        frequencies.append(dict(zip(exported.keys.tolist(), exported.frequencies.tolist(), strict=True))[100])
    assert frequencies == [0, 0]


@pytest.mark.parametrize("how", ["erased", "expired", "admitted_and_erased"])
def test_a_delta_says_which_keys_no_longer_wait(tmp_path: Path, how: str) -> None:
    def made() -> EmbeddingVariable:
        option = EmbeddingVariableOption(filter_option=CounterFilter(2), evict_option=GlobalStepEvict(1))
        return EmbeddingVariable(2, initializer=0.5, ev_option=option)

    variable = made()
    variable(torch.tensor([5]))
    variable.save(tmp_path)
    if how == "expired":
        for _ in range(3):
            variable(torch.tensor([7, 7]))
    elif how == "admitted_and_erased":
        variable(torch.tensor([5]))
    variable.erase([5] if how != "expired" else [])
    variable.save_delta(tmp_path)
    assert variable.stats()["waiting"] == 0
    restored = made()
    restored.restore(tmp_path)
    assert restored.stats()["waiting"] == 0


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "lazy_adam"])
def test_what_has_no_rows_is_exported(name: str) -> None:
    """Export a variable after a step whose keys were all filtered, and after all keys were erased."""
    for filter_freq in (0, 3):
        option = EmbeddingVariableOption(filter_option=CounterFilter(filter_freq))
        trained = Trained(option, OPTIMIZERS[name], "sparse", 2)
        trained.step(torch.tensor([1, 2]), torch.ones(2, DIM))
        trained.variable.erase([1, 2])
        assert trained.rows() == {}


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("tiers", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        partial(optim.SGD, lr=0.5, momentum=0.5),
        *(x.ours for name, x in OPTIMIZERS.items() if name not in ("none", "sgd")),
    ],
    ids=["momentum", *(name for name in OPTIMIZERS if name not in ("none", "sgd"))],
)
def test_state_dicts_hold_the_optimizers_rows(make: Callable, tiers: bool, model_first: bool, tmp_path: Path) -> None:
    """Load state dicts with the rows of slow tiers too, the model's and the optimizer's in either order."""

    def made(name: str) -> Trained:
        storage = on_disk(tmp_path / name, cache_strategy="LRU") if tiers else StorageOption()
        return Trained(EmbeddingVariableOption(storage_option=storage), Optimizer(make, None), "sparse", 2)

    def step(trained: Trained, begin: int, end: int) -> None:
        trained.step(torch.arange(begin, end), torch.arange(1.0, DIM + 1).expand(end - begin, DIM))

    before, after = made("before"), made("after")
    step(before, 0, 10)
    step(before, 10, 20)
    saved = copy.deepcopy((before.variable.state_dict(), before.optimizer.state_dict()))
    for what in ("model", "optimizer") if model_first else ("optimizer", "model"):
        if what == "model":
            after.variable.load_state_dict(saved[0])
        else:
            after.optimizer.load_state_dict(saved[1])
    for trained in (before, after):
        step(trained, 0, 12)
    keys = torch.arange(20)
    assert_same_bits(after.variable.lookup(keys), before.variable.lookup(keys))


def test_keys_erased_without_waiting_leave_room() -> None:
    """Erase keys as a device does it, for which no step must wait."""
    keys = KeyRows("test", 16)
    ids = torch.arange(16)
    keys.insert(ids)
    keys.erase_soon(ids, ids % 2 == 0)
    rows, _ = keys.insert(torch.arange(100, 108))
    assert keys.capacity == 16
    assert rows.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert len(keys) == 16
    assert keys.find(ids).tolist() == [-1 if k % 2 == 0 else k for k in range(16)]


def test_memory_of_a_key_beyond_its_row() -> None:
    """Count key, row index, tag, frequency and version in a full table: its index fills three quarters of its slots."""
    keys = KeyRows("test", 900_000)
    keys.insert(torch.arange(900_000) * 7919)
    assert len(keys) == keys.capacity
    assert 900_000 <= keys.index.shape[0] * 12 * 0.75 < 900_000 + 64 * 9, "whole regions"
    assert keys.nbytes() / 900_000 <= 24


def test_a_state_dict_of_too_many_cold_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = _tiered(tmp_path)
    for begin in (0, 16):
        variable(torch.arange(begin, begin + 16))
    assert "cold.keys" in variable.state_dict()
    monkeypatch.setattr(cold, "STATE_DICT_BYTES", 100)
    with pytest.raises(RuntimeError, match=r"outside of the first tier, more than the 100 that .* use save\(\)"):
        variable.state_dict()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, at a break
def test_a_compiled_model_looks_up_outside_of_its_graph() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = EmbeddingVariable(2, initializer=0.5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.table(ids * 2) * 3).sum(1)

    model = Model()
    compiled = torch.compile(model, backend="eager")
    for ids in (torch.arange(3), torch.arange(2000)):  # the table grows
        assert torch.equal(compiled(ids), torch.full((len(ids),), 3.0))
    assert model.table.total_count() == 2000
    torch._dynamo.reset()  # otherwise dynamo would take the code that it has just compiled
    with pytest.raises(Exception, match="fullgraph|disable"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.arange(3))
