"""A third tier below the first, the one that docs/developing.md adds: results do not depend on tiers."""

from __future__ import annotations

import enum
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from calls import assert_same_bits
from project.test_docs import ROOT, examples
from variable.cases import step

from torchsparse_rec import optim
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import EmbeddingVariableOption, GlobalStepEvict, StorageOption, StorageType, options


class WithDict(enum.Enum):
    """The storage types of the test: the first, and what the new tier adds."""

    DRAM = "DRAM"
    HBM_DRAM_SSD_DICT = "HBM_DRAM_SSD_DICT"
    tiers = StorageType.tiers


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StorageOption:
    """
    Return an option of the document's tier below all others, each of which holds 16 rows.

    Its first tier is HBM, so that three lie below. A device that is given lets it lie on the CPU.
    """
    document = {"__name__": "__example__"}
    exec(next(program for program, _ in examples(ROOT / "docs/developing.md") if "(Tier)" in program), document)
    monkeypatch.setattr(options, "_TIERS", (*options._TIERS, document["DictTier"]))
    monkeypatch.setattr(options, "StorageType", WithDict)
    path = str(tmp_path / "rows")
    return StorageOption("HBM_DRAM_SSD_DICT", storage_path=path, storage_size=[1, 1, 1], cache_strategy="LRU")


def test_a_third_tier_changes_no_result(storage: StorageOption, tmp_path: Path) -> None:
    tables, optimizers = [], []

    def make(storage: StorageOption) -> EmbeddingVariable:
        option = EmbeddingVariableOption(storage_option=storage, evict_option=GlobalStepEvict(8))
        tables.append(EmbeddingVariable(2, capacity=2, seed=0, ev_option=option, device="cpu"))
        optimizers.append(optim.Adagrad(tables[-1].parameters(), lr=0.5))
        return tables[-1]

    plain, tiered = make(StorageOption()), make(storage)

    def assert_same() -> None:
        exported = [table.export() for table in tables]
        orders = [export.keys.argsort() for export in exported]
        for export, order in zip(exported[1:], orders[1:], strict=True):
            for wanted, got in zip(exported[0], export, strict=True):
                assert_same_bits(got[order], wanted[orders[0]])

    def rows() -> dict[str, int]:
        return {name: number for name, number in tables[-1].stats().items() if name.startswith("rows_")}

    values = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    for begin in range(0, 60, 10):
        for table in tables:
            table.insert(torch.arange(begin, begin + 10), values[begin : begin + 10])
    assert rows() == {"rows_dram": 16, "rows_ssd": 16, "rows_dict": 12}
    assert_same()
    for begin in (0, 10, 20, 30, 25, 60):  # rows of each tier, rows that were read ahead, and new ones
        tiered.prefetch(torch.arange(begin, begin + 8))
        for table, optimizer in zip(tables, optimizers, strict=True):
            step(table, optimizer, torch.arange(begin, begin + 12) % 64)
    assert_same()
    assert min(rate for name, rate in tiered.stats().items() if name.startswith("hit_rate")) > 0
    keys = torch.arange(80)
    assert_same_bits(tiered.lookup(keys), plain.lookup(keys))
    assert plain.erase(keys[::7]) == tiered.erase(keys[::7])
    plain.save(tmp_path / "plain")
    tiered.save(tmp_path / "tiered")
    make(replace(storage, storage_path=str(tmp_path / "others"))).restore(tmp_path / "plain")
    assert min(rows().values()) > 0
    make(StorageOption()).restore(tmp_path / "tiered")
    assert_same()
    for _ in range(4):
        for table, optimizer in zip(tables, optimizers, strict=True):
            step(table, optimizer, torch.arange(0, 10))
    evicted = [table.evict() for table in tables]
    assert evicted[0] > 0 and evicted == [evicted[0]] * len(tables)
    assert_same()


def test_the_new_tier_says_what_it_needs(storage: StorageOption) -> None:
    with pytest.raises(ValueError, match="storage_path must be a folder for HBM_DRAM_SSD_DICT, got None"):
        StorageOption("HBM_DRAM_SSD_DICT")
    with pytest.raises(ValueError, match="storage_size must have the bytes of 3 tiers, got 2"):
        StorageOption("HBM_DRAM_SSD_DICT", storage_path=storage.storage_path, storage_size=[1, 1])


def test_storage_types_leave_out_no_tier_in_between() -> None:
    order = ["HBM", *(tier.kind for tier in options._TIERS)]
    runs = [order[begin:end] for begin, end in combinations(range(len(order) + 1), 2) if begin < 2]
    assert sorted("_".join(run) for run in runs) == sorted(storage_type.value for storage_type in StorageType)
