"""Failures for want of memory or disk leave everything unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from variable.cases import on_disk, rows_of, step

from torchsparse_rec import ops, optim
from torchsparse_rec.jagged import KeyedJaggedTensor
from torchsparse_rec.nn import EmbeddingCollection, EmbeddingConfig, EmbeddingVariable
from torchsparse_rec.variable import EmbeddingVariableOption, LRUEvict, StorageOption, optimizer_rows, store
from torchsparse_rec.variable.tiers import DramTier, SsdTier, Tier


def once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
    """Let the next call of a function raise, and no later one."""
    real = getattr(owner, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        raise error

    monkeypatch.setattr(owner, name, fails)


def records_of(keys: Tensor) -> Tensor:
    return torch.stack([keys & 255, (keys >> 8) & 255], 1).to(torch.uint8)


def check_tier(tier: Tier, keys: Tensor) -> None:
    """Check that a tier has these keys and no others."""
    found, records = tier.get(keys)
    assert found.all() and torch.equal(records, records_of(keys)) and len(tier) == len(keys)
    assert sum(len(some) for some, _ in tier.items()) == len(keys)


# ---- Memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dram", "ssd"])
def test_a_tier_that_could_not_grow(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DramTier(2) if kind == "dram" else SsdTier(tmp_path, 2)
    keys, more = torch.arange(1000), torch.arange(1000, 1100)
    tier.put(keys, records_of(keys))
    once(monkeypatch, ops, "table_rehash", MemoryError())
    with pytest.raises(MemoryError):
        tier.put(more, records_of(more))
    check_tier(tier, keys)
    assert not tier.get(more)[0].any()
    tier.put(more, records_of(more))
    check_tier(tier, torch.cat([keys, more]))
    tier.close()


@pytest.mark.parametrize("where", ["weight", "state", "index"])
def test_a_table_that_could_not_grow(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [EmbeddingVariable(2, capacity=4, seed=1) for _ in range(2)]
    optimizers = [optim.Adam(table.parameters(), lr=0.1) for table in tables]
    for table, optimizer in zip(tables, optimizers, strict=True):
        step(table, optimizer, [1, 2, 3])
    module, name = {
        "weight": (store, "new_zeros"),
        "state": (optimizer_rows, "new_zeros"),
        "index": (ops, "table_rehash"),
    }[where]
    before = rows_of(tables[0])
    once(monkeypatch, module, name, MemoryError())
    with pytest.raises(MemoryError):
        tables[0](torch.tensor([4, 5, 6]))
    assert rows_of(tables[0]) == before and tables[0].lookup(torch.tensor([4])).shape == (1, 2)
    for table, optimizer in zip(tables, optimizers, strict=True):
        step(table, optimizer, [3, 4, 5, 6])
    assert rows_of(tables[0]) == rows_of(tables[1])


# ---- Room -----------------------------------------------------------------------------------------------------------


def test_no_table_of_a_collection_has_new_keys_where_one_has_no_room() -> None:
    options = {"a": EmbeddingVariableOption(), "b": EmbeddingVariableOption(evict_option=LRUEvict(4))}
    configs = [
        EmbeddingConfig(100, 2, name, feature_names=[name], ev_option=option, initializer=0.5)
        for name, option in options.items()
    ]
    collection = EmbeddingCollection(configs)

    def look_up(a: list[int], b: list[int]) -> Tensor:
        lengths = torch.tensor([len(a), len(b)])
        return collection(KeyedJaggedTensor(["a", "b"], torch.tensor(a + b), lengths=lengths))["a"].values()

    look_up([10], [10])
    with pytest.raises(RuntimeError, match="a capacity of 4 rows must hold the ids of one step"):
        look_up([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    assert [sorted(rows_of(collection.embeddings[name])) for name in options] == [[10], [10]]
    assert torch.equal(look_up([1, 2, 7], [1, 2, 3]), torch.full((3, 2), 0.5))


# ---- Files ----------------------------------------------------------------------------------------------------------


def _three_tiers(path: Path) -> StorageOption:
    return StorageOption("HBM_DRAM_SSD", storage_path=str(path), storage_size=[1, 1])


@pytest.mark.parametrize("storage", [on_disk, pytest.param(_three_tiers, marks=pytest.mark.cuda)], ids=["two", "three"])
def test_rows_stay_where_a_full_disk_does_not_take_them(
    storage: Callable[[Path], StorageOption], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option = EmbeddingVariableOption(storage_option=storage(tmp_path / "a"))
    plain, table = (EmbeddingVariable(2, seed=1, ev_option=each) for each in (None, option))
    optimizers = [optim.Adagrad(each.parameters(), lr=0.1) for each in (plain, table)]
    for begin in (0, 16):
        for each, optimizer in zip((plain, table), optimizers, strict=True):
            step(each, optimizer, torch.arange(begin, begin + 16, device=each.weight.device))
    before = rows_of(table)
    once(monkeypatch, SsdTier, "put", OSError(28, "No space left on device"))
    ids = torch.arange(32, 48)
    with pytest.raises(OSError, match="No space left"):
        table(ids.to(table.weight.device))
    assert rows_of(table) == before and table.total_count() == 32
    for each, optimizer in zip((plain, table), optimizers, strict=True):
        step(each, optimizer, ids.to(each.weight.device))
    assert rows_of(table) == rows_of(plain)
