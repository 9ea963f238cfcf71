"""Capacities: the tiers in which rows lie make no difference to the keys that stay."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from variable.cases import on_disk, step

from torchsparse_rec import optim
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import CounterFilter, EmbeddingVariableOption, LFUEvict, LRUEvict, StorageOption


def _rows(table: EmbeddingVariable) -> dict[int, Any]:
    found = table.export()
    return dict(zip(found.keys.tolist(), zip(*(x.tolist() for x in found[1:]), strict=True), strict=True))


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("strategy", ["LRU", "LFU"])
@pytest.mark.parametrize("evict", [LRUEvict, LFUEvict])
def test_tiers_keep_the_keys_that_memory_alone_keeps(evict: Any, strategy: str, filtered: bool, tmp_path: Path) -> None:
    def made(storage: StorageOption) -> tuple[EmbeddingVariable, optim.Adagrad]:
        option = EmbeddingVariableOption(
            evict_option=evict(60), filter_option=CounterFilter(2) if filtered else None, storage_option=storage
        )
        table = EmbeddingVariable(2, initializer=0.5, ev_option=option)
        return table, optim.Adagrad(table.parameters(), lr=0.1)

    pair = [made(StorageOption()), made(on_disk(tmp_path / "rows", cache_strategy=strategy))]
    draw = random.Random(1)
    for k in range(50):
        what = draw.random()
        ids = [draw.randrange(20 + 3 * k if draw.random() < 0.6 else 20) for _ in range(10)]
        for number, (table, optimizer) in enumerate(pair):
            if what < 0.1:
                table.insert(ids, torch.ones(10, 2))
            elif what < 0.15:
                table.erase(ids)
            elif what < 0.2:
                table.save(tmp_path / f"{number}")
                table.restore(tmp_path / f"{number}")
            else:
                step(table, optimizer, ids)
        assert _rows(pair[0][0]) == _rows(pair[1][0])
    (table, _), (tiered, _) = pair
    assert table.stats()["evicted"] == tiered.stats()["evicted"] > 10
    assert tiered.stats()["rows_ssd"] > 20
    table.save(tmp_path / "larger")
    smaller = []
    for storage in (StorageOption(), on_disk(tmp_path / "smaller", cache_strategy=strategy)):
        option = EmbeddingVariableOption(evict_option=evict(25), storage_option=storage)
        smaller.append(EmbeddingVariable(2, ev_option=option))
        with pytest.warns(UserWarning, match="no optimizer"):
            smaller[-1].restore(tmp_path / "larger")
    assert _rows(smaller[0]) == _rows(smaller[1])
    assert smaller[0].total_count() == 25


@pytest.mark.parametrize("tiers", [False, True])
def test_more_rows_are_inserted_than_a_capacity_holds(tiers: bool, tmp_path: Path) -> None:
    """Refuse an insertion of more rows than a capacity holds. Rows that did not make room stay."""
    storage = on_disk(tmp_path) if tiers else StorageOption()
    table = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(evict_option=LRUEvict(20), storage_option=storage))
    table.insert(torch.arange(20), torch.ones(20, 2))
    text = "a capacity of 20 rows must hold the ids of one step, but 1 have no room"
    with pytest.raises(RuntimeError, match=text):
        table.insert(torch.arange(10, 31), torch.zeros(21, 2))
    assert _rows(table).keys() == set(range(20))
