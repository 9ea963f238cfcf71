"""Keys that were chosen to fill one part of the index, whose hash is public: tables behave as with any other keys."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import assert_same_bits
from torch import Tensor
from variable.cases import on_disk, rows_of, step
from variable.like_cuda import LikeCuda

from torchsparse_rec import optim
from torchsparse_rec.compat._parity.reference.table import key_of_hash
from torchsparse_rec.jagged import KeyedJaggedTensor
from torchsparse_rec.nn import EmbeddingCollection, EmbeddingConfig, EmbeddingVariable
from torchsparse_rec.variable import CBFFilter, CounterFilter, EmbeddingVariableOption, LFUEvict, LRUEvict, _index, keys
from torchsparse_rec.variable.keys import KeyRows
from torchsparse_rec.variable.tiers import DramTier, SsdTier, Tier


def crowd(count: int, seed: int = 0) -> Tensor:
    """Return ascending keys whose hashes begin with zeros: any table puts all into its first region, of 768 slots."""
    return torch.tensor(sorted(key_of_hash(number, seed) for number in range(1, count + 1)))


CROWD = crowd(3000)


def foresee(monkeypatch: pytest.MonkeyPatch, *seeds: int) -> None:
    """Replace the seeds that nobody can foresee by these; the last one is used again and again."""
    left = list(seeds)

    def unforeseen() -> int:
        return left.pop(0) if len(left) > 1 else left[0]

    for module in (_index, keys):
        monkeypatch.setattr(module, "unforeseen", unforeseen)


def has_seed(table: KeyRows) -> bool:
    return table.index.dim() == 1


def assert_bounded(table: KeyRows) -> None:
    """Check that the index has 9 keys a bucket, in whole regions, beside one line for a seed."""
    buckets = table.index.nbytes // 64 - has_seed(table)
    assert table.capacity <= 9 * buckets < table.capacity + 9 * 64 and (buckets < 128 or buckets % 64 == 0)


def assert_same_tables(crowded: KeyRows, plain: KeyRows, its: Tensor) -> None:
    """Compare all bits but the index's; ``its[k]`` is the crowded table's key for the key k of the other."""
    for name in ("counters", "free_rows"):
        assert_same_bits(getattr(crowded, name), getattr(plain, name))
    assert_same_bits(crowded.entries[:, 1], plain.entries[:, 1])
    rows = plain.rows()
    assert_same_bits(crowded.entries[rows, 0], its[plain.entries[rows, 0]])
    free = torch.ones(plain.capacity, dtype=torch.bool).index_fill(0, rows, False)
    assert_same_bits(crowded.entries[free, 0], plain.entries[free, 0])
    assert_bounded(crowded)


# ---- Keys and their rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [16, 1200, 4000])
@pytest.mark.parametrize("filtered", [False, True])
def test_rows_frequencies_and_counters_are_those_of_any_keys(capacity: int, filtered: bool) -> None:
    """Mix crowding keys with others in one call, each several times, and insert them into freed rows too."""
    generator = torch.Generator().manual_seed(capacity)
    its = torch.cat([CROWD, torch.arange(600) * 2**40])[torch.randperm(3600, generator=generator)]
    crowded, plain = (KeyRows("t", capacity, reserved=1) for _ in range(2))
    for number in range(12):
        ids = torch.randint(0, 300 * (number + 1), (1500,), generator=generator)
        options: dict[str, Any] = {"version": number, "count": True}
        if filtered:
            options |= {"allowed": ids % 7 != number % 7, "frequencies": (ids % 9).int()}
        for actual, wanted in zip(crowded.insert(its[ids], **options), plain.insert(ids, **options), strict=True):
            assert_same_bits(actual, wanted)
        assert_same_tables(crowded, plain, its)
        if number % 3 == 1:
            assert_same_bits(crowded.erase(its[ids[::2]]), plain.erase(ids[::2]))
    assert has_seed(crowded) and not has_seed(plain)
    assert_same_bits(crowded.find(its), plain.find(torch.arange(3600)))


@pytest.mark.parametrize("capacity", [1143, 1144, 1600, 1728, 1729, 2304, 5000])
def test_a_full_table_of_other_keys_has_no_seed(capacity: int) -> None:
    """Fill tables of many sizes: all their regions have equally many buckets."""
    table = KeyRows("t", capacity)
    table.insert(torch.arange(capacity))
    assert len(table) == table.capacity == capacity and not has_seed(table)
    assert_bounded(table)


def test_a_loaded_state_of_keys_that_crowd() -> None:
    """Load a state from a table of one hash into a table of another. The state does not hold the seed."""
    tables = [KeyRows("t", 2000) for _ in range(3)]
    for table in tables[:2]:
        table.insert(CROWD[:1500])
    tables[2].insert(torch.arange(1000))
    states = [table.state_dict() for table in tables]
    for actual, wanted in zip(states[0].values(), states[1].values(), strict=True):
        assert_same_bits(actual, wanted)
    assert not torch.equal(tables[0].index, tables[1].index)
    states = copy.deepcopy(states)
    for table, state, ids in ((tables[0], states[2], torch.arange(1000)), (tables[2], states[0], CROWD[:1500])):
        table.load_state_dict(state)
        assert table.find(ids).tolist() == list(range(len(ids)))
        assert table.find(torch.tensor([2000, CROWD[1500]])).tolist() == [-1, -1]
        assert_bounded(table)
        assert table.insert(CROWD[:2000])[0].unique().numel() == 2000
    assert has_seed(tables[2])


@pytest.mark.parametrize("via", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies(via: Any) -> None:
    table = KeyRows("t", 2000)
    rows, _ = table.insert(CROWD[:1500])
    other = via(table)
    assert_same_bits(other.index, table.index)
    assert_same_bits(other.find(CROWD[:1500]), rows)
    for each in (table, other):
        each.insert(CROWD)
        assert_bounded(each)
    assert_same_bits(table.entries, other.entries)


def test_keys_that_crowd_under_a_seed_that_became_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find another seed whenever keys crowd under the present one, also while a table grows."""
    foresee(monkeypatch, 11, 22, 33)
    table, inserted = KeyRows("t", 2000), torch.arange(0)
    for seed in (0, 11, 22):
        inserted = torch.cat([inserted, crowd(1000, seed)])
        table.insert(inserted)
        assert _index.seed_of(table.index) == {0: 11, 11: 22, 22: 33}[seed]
    assert table.find(inserted).tolist() == list(range(3000)) and table.capacity == 4000
    foresee(monkeypatch, 44)
    table.grow(8000)
    assert _index.seed_of(table.index) == 33, "a table keeps it where nothing crowds"
    more = torch.cat([crowd(1000, 33)[500:], crowd(1000, 33)[:500]])
    table.insert(more)
    assert table.find(more).tolist() == list(range(3000, 4000)) and _index.seed_of(table.index) == 44


@pytest.mark.parametrize("foreseen", [11, 0])
def test_keys_that_no_hash_holds_are_refused_alone(foreseen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse keys that crowd under all seeds, as if somebody could foresee them; no key of the call is inserted."""
    foresee(monkeypatch, foreseen)
    table, bad = KeyRows("t", 4000), torch.cat([crowd(1000, 11), CROWD[:1000]])
    others = torch.arange(100) * 2**40
    rows, _ = table.insert(others)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^t: \d+ keys collide with others in an index of 448 buckets for 4000"):
            table.insert(torch.cat([others + 1, bad]))
        assert_same_bits(table.find(others), rows)
        assert len(table) == 100 and table.capacity == 4000 and (table.find(torch.cat([others + 1, bad])) < 0).all()
        assert_bounded(table)
    foresee(monkeypatch, 5)
    assert (table.insert(bad)[0] >= 0).all() and len(table) == 2100


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_where_no_insertion_waits_keys_find_room_in_the_next(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, ids = KeyRows("t", 4000, device=device), CROWD[:1000].to(device)
    if device == "cpu":
        LikeCuda(monkeypatch)
    rows, _ = table.insert(ids)
    assert int((rows < 0).sum()) == 1000 - 768 and not has_seed(table)
    again, _ = table.insert(ids)
    assert has_seed(table)
    assert torch.equal(again[rows >= 0], rows[rows >= 0]) and again.unique().tolist() == list(range(1000))
    index = table.index
    table.insert(ids)
    assert table.index is index, "once is enough"


# ---- Variables ------------------------------------------------------------------------------------------------------

_OPTIONS = {
    "plain": {},
    "counter": {"filter_option": CounterFilter(2)},
    "bloom": {"filter_option": CBFFilter(2, 100_000, 1e-9)},
    "lru": {"evict_option": LRUEvict(1300)},
    "lfu": {"evict_option": LFUEvict(1300), "filter_option": CounterFilter(2)},
    "tiers": {"storage_option": True},
}


def variable(folder: Path, options: dict[str, Any]) -> EmbeddingVariable:
    if options.get("storage_option"):
        options = {"storage_option": on_disk(folder, 40_000)}
    return EmbeddingVariable(2, initializer=0.5, capacity=1200, ev_option=EmbeddingVariableOption(**options))


@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_training_is_that_of_any_keys(options: dict[str, Any], tmp_path: Path) -> None:
    crowded, plain = (variable(tmp_path / name, options) for name in ("a", "b"))
    optimizers = [optim.Adagrad(each.parameters(), lr=0.1) for each in (crowded, plain)]
    generator = torch.Generator().manual_seed(5)
    for number in range(10):
        ids = torch.randint(0, 250 * (number + 1), (600,), generator=generator)
        for each, optimizer, some in zip((crowded, plain), optimizers, (CROWD[ids], ids), strict=True):
            step(each, optimizer, some)
        assert_bounded(crowded.keys)
    found, wanted = rows_of(crowded), rows_of(plain)
    assert list(found) == [int(CROWD[key]) for key in wanted] and list(found.values()) == list(wanted.values())
    assert has_seed(crowded.keys) and not has_seed(plain.keys) and crowded.stats()["failed"] == 0
    assert_same_tables(crowded.keys, plain.keys, CROWD)
    ids = torch.arange(3000)
    assert_same_bits(crowded.lookup(CROWD), plain.lookup(ids))


def test_checkpoints_of_tables_of_different_hashes(tmp_path: Path) -> None:
    """Restore checkpoints and load state dicts into tables that have keys of the other kind, and train on."""
    first, second, third = (EmbeddingVariable(2, initializer=0.5, capacity=1200) for _ in range(3))
    optimizers = [optim.SGD(each.parameters(), lr=0.1) for each in (first, second, third)]
    step(first, optimizers[0], CROWD[:1100])
    step(second, optimizers[1], torch.arange(900))
    step(third, optimizers[2], CROWD[:1000].flip(0))
    wanted = rows_of(first)
    first.save(tmp_path)
    second.restore(tmp_path)
    third.load_state_dict(first.state_dict())
    assert rows_of(second) == rows_of(third) == wanted
    for each, optimizer in zip((first, second, third), optimizers, strict=True):
        step(each, optimizer, CROWD[500:1700])
        assert_bounded(each.keys)
    assert rows_of(second) == rows_of(third) == rows_of(first) and len(rows_of(first)) == 1700
    second.restore(tmp_path)
    assert rows_of(second) == wanted


def test_exported_programs_have_the_hash_of_their_table() -> None:
    table = EmbeddingVariable(2, capacity=1200, seed=1)
    table(CROWD[:1000])
    assert has_seed(table.keys)
    program = torch.export.export(table.eval(), (CROWD[:1200],)).module()
    assert_same_bits(program(CROWD[:1200]), table.lookup(CROWD[:1200]))


def test_one_table_of_a_collection() -> None:
    configs = [
        EmbeddingConfig(100, 2, name, feature_names=[name], ev_option=EmbeddingVariableOption(), initializer=0.5)
        for name in "ab"
    ]
    collection = EmbeddingCollection(configs)
    for begin in range(0, 2000, 500):
        ids = torch.cat([CROWD[begin : begin + 500], torch.arange(begin, begin + 500)])
        collection(KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([500, 500])))
    crowded, plain = (collection.embeddings[name].keys for name in "ab")
    assert has_seed(crowded) and not has_seed(plain)
    assert_same_tables(crowded, plain, CROWD)


# ---- Tiers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dram", "ssd", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_tier_keeps_every_record(kind: str, tmp_path: Path) -> None:
    tier: Tier = SsdTier(tmp_path, 2) if kind == "ssd" else DramTier(2, device="cuda" if kind == "cuda" else "cpu")
    records = torch.arange(6000).view(3000, 2).to(torch.uint8)
    for begin in range(0, 3000, 600):
        tier.put(CROWD[begin : begin + 600], records[begin : begin + 600])
    tier.put(CROWD[:50], records[100:150])
    found, read = tier.get(CROWD)
    assert found.all() and len(tier) == 3000
    assert torch.equal(read, torch.cat([records[100:150], records[50:]]))
    tier.close()
