"""The CUDA kernels of tables, run without a GPU in every order of threads: the bits of the CPU's kernels."""

from __future__ import annotations

import re

import pytest
import torch
from calls import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from samples.sample import FLOATS, Random
from torch import Tensor

from emulation import fixture
from emulation.fixture import check
from emulation.test_emulation import ORDERS
from torchsparse_rec.compat._parity.reference.table import key_of_hash

MOST = 2**31 - 1
NO_ROWS = torch.empty(0, dtype=torch.int32)


def ids_of(n: int, low: int, high: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    return Random(seed).integers(low, high, n, dtype=dtype)


class State:
    """A table, and calls that compare both kinds of kernels."""

    def __init__(self, buckets: int, rows: int) -> None:
        self.entries, self.counters = torch.full((rows, 2), -1), torch.zeros(8, dtype=torch.int64)
        self.free_rows = NO_ROWS
        self.index = check("table_rehash", self.entries, self.counters, buckets)

    def insert(
        self,
        ids: Tensor,
        allowed: Tensor | None = None,
        frequencies: Tensor | None = None,
        version: int = -1,
        count: bool = False,
    ) -> tuple[Tensor, Tensor]:
        state = self.index, self.entries, self.counters, self.free_rows
        return check("table_find_or_insert_", *state, ids, allowed, frequencies, version, count)

    def find(self, ids: Tensor) -> Tensor:
        return check("table_find", self.index, self.entries, ids)

    def erase(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return check("table_erase_", self.index, self.entries, ids, mask)

    def rehash(self, buckets: int) -> None:
        self.index = check("table_rehash", self.entries, self.counters, buckets)

    def collect(self) -> None:
        """Free the rows of erased keys, to be given out again."""
        used = int(self.counters[0])
        self.free_rows = (self.entries[:used, 1] == -1).nonzero().flatten().int()
        self.counters[1] = 0


# ---- Inserting, finding, erasing ------------------------------------------------------------------------------------

# Sizes near warps and blocks of 256 threads, and more threads than the blocks that run have.
SIZES = [0, 1, 31, 33, 255, 257, 1537, 3000]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["equal", "few", "popular", "distinct"])
def test_batches_of_every_size(n: int, kind: str) -> None:
    """Let many threads insert, find and count the same ids, in one region of 1524 slots and in six."""
    ids = {
        "equal": torch.full((n,), -7),
        "few": ids_of(n, -3, 4),
        "popular": (ids_of(n, 1, 2**40).double() ** 0.25).long() - 100,
        "distinct": torch.randperm(n, generator=torch.Generator().manual_seed(n)) * 2**32,
    }[kind]
    for buckets in (127, 400):
        table = State(buckets, 3000)
        table.insert(ids[: n // 3], None, None, 5, True)
        rows, born = table.insert(ids, None, None, 2**31 - 1, True)
        keys = min(len(ids.unique()), 12 * buckets)
        assert int((born >= 0).sum()) == keys - len(ids[: n // 3].unique())
        assert torch.equal(table.find(ids.flip(0)), rows.flip(0))
        assert int((table.erase(torch.cat([ids[::2], ids])) >= 0).sum()) == keys
        assert not bool(table.index.any())


def _batch(seed: int, n: int, spread: int, dtype: torch.dtype) -> Tensor:
    """Return ids of which small ones come often."""
    numbers = Random(seed).integers(0, spread, n, dtype=torch.int64)
    return (numbers * numbers // spread - spread // 9).to(dtype)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "insert", "erase", "collect", "rehash", "find"]),
        st.integers(0, 2**20),  # seed
        st.integers(0, 400),  # ids
        st.sampled_from([9, 60, 700, 5000]),  # how many different ids there may be
        st.sampled_from([None, "allowed", "frequencies", "both"]),
        st.sampled_from([-1, 0, 1, MOST]),  # version
        st.booleans(),  # count, or a mask
    ),
    min_size=2,
    max_size=7,
)


@given(st.sampled_from([1, 3, 20, 66, 129]), st.sampled_from([1200, 300, 20, 0]), st.booleans(), STEPS)
@settings(max_examples=100)
def test_random_programs(buckets: int, rows: int, wide: bool, steps: list[tuple]) -> None:
    """Run random calls: full regions, no rows left, keys erased and inserted again, tables of other sizes."""
    dtype = torch.int64 if wide else torch.int32
    table = State(buckets, rows)
    for what, seed, n, spread, given_, version, flag in steps:
        ids = _batch(seed, n, spread, dtype)
        chosen = Random(seed + 1).integers(0, 2, n, dtype=torch.bool)
        if what == "insert":
            allowed = chosen if given_ in ("allowed", "both") else None
            frequencies = Random(seed + 2).integers(-9, MOST, n, dtype=torch.int32)
            table.insert(ids, allowed, frequencies if given_ in ("frequencies", "both") else None, version, flag)
            table.find(ids.flip(0))
        elif what == "erase":
            table.erase(ids, chosen if flag else None)
        elif what == "collect":
            table.collect()
        elif what == "rehash":
            table.rehash(1 + seed % 200)
        else:
            table.find(ids)


@pytest.mark.parametrize("n", [2, 40, 500])
@pytest.mark.parametrize("top", [0, 2**20 - 1, 2**19])
def test_keys_made_to_collide(n: int, top: int) -> None:
    """Insert keys whose hashes agree in the upper 20 bits: they meet in the call's own hash table, also at its end."""
    keys = torch.tensor([key_of_hash(top << 44 | k * 2**30 | k % 3) for k in range(n)])
    ids = torch.cat([keys, keys.flip(0), keys[: n // 2]])
    table = State(300, n)
    rows, _ = table.insert(ids, None, None, 1, True)
    assert sorted(rows[:n].tolist()) == list(range(n))
    assert torch.equal(table.find(ids), rows)
    table.erase(ids.flip(0)[: n // 2 + 3])
    table.collect()
    table.insert(ids.flip(0))


@pytest.mark.parametrize("seed", [1, -5, MOST << 32])
def test_an_index_with_a_seed(seed: int) -> None:
    state, ids = State(10, 300), torch.arange(300) * 2**33 + 7
    state.insert(ids)
    index = check("table_rehash", state.entries, state.counters, 40, seed)
    assert check("table_find", index, state.entries, ids).tolist() == state.find(ids).tolist()


def test_rows_that_run_out_leave_no_trace() -> None:
    """Give back the slots of the last new keys, in regions where other keys have passed the same buckets."""
    for rows in (0, 1, 37, 80, 99, 100):
        table = State(9, rows)
        keys = ids_of(100, -(2**60), 2**60)
        found, born = table.insert(torch.cat([keys, keys]), None, None, 3, True)
        assert int((born >= 0).sum()) == rows and int((found < 0).sum()) == 2 * (100 - rows)
        assert table.counters.tolist() == [rows, 0, 2 * (100 - rows), rows, 0, 0, 0, 0]
        before = table.index.clone()
        table.rehash(9)
        assert torch.equal(table.index, before)


def test_frequencies_in_a_batch_stay_at_their_largest_value() -> None:
    """Keep the largest frequency whatever the number of occurrences, and leave the version as it is."""
    for start in (MOST - 700, MOST - 300, MOST - 299, MOST - 298, MOST):
        table = State(2, 3)
        table.insert(torch.tensor([5, 6]), None, torch.tensor([start, 7], dtype=torch.int32), MOST)
        table.insert(torch.tensor([5, 6]).repeat(300), None, None, -1, True)
        assert table.entries[:2, 1].tolist() == [MOST << 32 | min(start + 300, MOST), MOST << 32 | 307]


def test_index_at_any_address() -> None:
    """Use an index at every address, although a bucket's head is read by one load if its address allows it."""
    for shift in range(4):
        table = State(3, 40)
        memory = torch.empty(3 * 16 + 4, dtype=torch.int32)
        table.index = memory[shift : shift + 48].view(3, 16).zero_()
        ids = ids_of(60, -40, 40)
        table.insert(ids, None, None, 4, True)
        table.erase(ids[:20])
        table.insert(ids[5:30].int())
        table.find(ids)


def test_index_of_other_rows_does_no_harm() -> None:
    """Find no key at a row of the index that the entries do not have."""
    table = State(2, 20)
    ids = torch.arange(20)
    table.insert(ids)
    for rows in (table.entries[:7].clone(), table.entries[:0].clone(), table.entries.flip(0).contiguous()):
        found = check("table_find", table.index, rows, ids)
        assert found.max() < len(rows)
        check("table_lookup", table.index, rows, torch.ones(len(rows), 3), ids, None, None, 0, [2.0], 0)
    broken = table.index.clone()
    broken[:, 4:] = -1
    assert check("table_find", broken, table.entries, ids).tolist() == [-1] * 20


@pytest.mark.parametrize("order", ORDERS)
def test_state_that_cannot_be_is_told_and_left_alone(order: str) -> None:
    """Refuse counters beyond the rows, and free rows that are in use or repeated, found after slots were taken."""
    table = State(2, 9)
    table.insert(torch.arange(6), None, None, 4, True)
    table.erase(torch.tensor([0, 1, 4]))
    good, ids = table.counters, torch.tensor([3, 20, 21, 3, 22, 20])
    no_row = "must be in [0, 6), without a key and more than the one before it, got"
    for counters, rows, text in (
        (good + torch.tensor([4] + [0] * 7), [0, 1, 4], "counters[0] must be in [0, 9], got 10"),
        (good - torch.tensor([0, 1] + [0] * 6), [0, 1, 4], "counters[1] must be in [0, 3], got -1"),
        (good, [0, 1, 6], f"free_rows[2] {no_row} 6"),
        (good, [0, 1, 5], f"free_rows[2] {no_row} 5"),
        (good, [0, 1, 1], f"free_rows[2] {no_row} 1"),
        (good, [0, 4, 1], f"free_rows[2] {no_row} 1"),
        (good, [-1, 1, 4], f"free_rows[0] {no_row} -1"),
    ):
        free_rows = torch.tensor(rows, dtype=torch.int32)
        index, entries, before = table.index.clone(), table.entries.clone(), counters.clone()
        fixture.set_order(order)
        fixture.operator("table_find_or_insert_")(index, entries, counters, free_rows, ids, None, None, 7, True)
        with pytest.raises(ValueError, match="^table_find_or_insert_: " + re.escape(text)):
            fixture.check_errors()
        for x, y in ((index, table.index), (entries, table.entries), (counters, before)):
            assert_same_bits(x, y)


# ---- Several tables -------------------------------------------------------------------------------------------------


def _several(tables: int, buckets: int = 9, rows: int = 80) -> list[State]:
    """Return tables with keys, erased keys, and listed free rows; every third one with a seed, every fourth empty."""
    made = [State(buckets + k, rows + k) for k in range(tables)]
    for k, table in enumerate(made):
        if k % 3 == 0:
            table.index = check("table_rehash", table.entries, table.counters, buckets + k, k + 1)
        if k % 4:
            table.insert(torch.arange(k, k + 40), None, None, 2, True)
            table.erase(torch.arange(k + 5, k + 15))
            table.collect()
    return made


def _lists(tables: list[State]) -> list[list[Tensor]]:
    return [[getattr(table, name) for table in tables] for name in ("index", "entries", "counters", "free_rows")]


@pytest.mark.parametrize("spread", [1, 20, 60, 2000])
@pytest.mark.parametrize("count", [False, True])
def test_tables_in_one_pass(spread: int, count: bool) -> None:
    """Insert the same keys in several tables, some with an empty part, some without room, with ids between parts."""
    tables = _several(7)
    sizes, gaps = [50, 0, 400, 1, 300, 257, 64], [3, 0, 0, 5, 0, 1, 2]
    begins, end = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        begins.append(end + gap)
        end += gap + size
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    ids, versions = ids_of(end + 4, -spread // 2, spread, seed=spread), [4, -1, 0, MOST, 3, -1, 7]
    copies = [[x.clone() for x in each] for each in _lists(tables)]
    rest = ids, begins, ends, versions, count
    wanted = torch.ops.torchsparse_rec.tables_find_or_insert_.default(*copies, *rest)
    found = fixture.run_in_every_order("tables_find_or_insert_", *_lists(tables), *rest)
    for mine, its in [(found, wanted), *zip(_lists(tables), copies, strict=True)]:
        for x, y in zip(mine, its, strict=True):
            assert_same_bits(x, y)


@pytest.mark.parametrize("order", ORDERS)
def test_a_table_whose_state_cannot_be_is_left_alone(order: str) -> None:
    """Refuse one of several tables, and insert in the others."""
    tables = _several(3)
    tables[1].counters[0] = 500
    before = [[x.clone() for x in each] for each in _lists(tables)]
    ids = torch.arange(60)
    fixture.set_order(order)
    fixture.operator("tables_find_or_insert_")(*_lists(tables), ids, [0, 20, 40], [20, 40, 60], [7, 7, 7], True)
    with pytest.raises(ValueError, match=re.escape("counters[0] must be in [0, 81], got 500")):
        fixture.check_errors()
    for now, then in zip(_lists(tables), before, strict=True):
        assert_same_bits(now[1], then[1])
    assert [int(x[3]) for x in before[2]] == [0, 40, 40]
    assert [int(table.counters[3]) for table in tables] == [20, 40, 58], "keys 40 and 41 were there"


@pytest.mark.parametrize("tables", [1, 26, 60])
def test_launches_do_not_grow_with_the_tables(tables: int) -> None:
    """Give all tables' keys to one set of kernels."""
    lists, begins = _lists([State(2, 20) for _ in range(tables)]), [30 * k for k in range(tables)]
    ids = ids_of(30 * tables, 0, 9)
    launches = fixture.library().tsr_emulated_launches
    for _ in range(2):
        before = launches()
        rest = [begin + 30 for begin in begins], [3] * tables, True
        fixture.operator("tables_find_or_insert_")(*lists, ids, begins, *rest)
        # A kernel's arguments hold what it must know of some 33 tables.
        assert launches() - before <= (11 if tables < 30 else 12)


# ---- Rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [1, 4, 15, 16, 129])
def test_lookup_of_rows_at_any_address(dim: int, dtype: torch.dtype) -> None:
    """Move 16 bytes by one load where the addresses of weight, defaults and the row for missing keys allow it."""
    table = State(5, 40)
    table.insert(torch.arange(40), None, None, 0, False)
    ids = ids_of(70, -20, 60, dtype=torch.int32)
    random = Random(dim)
    for shift in (0, 1):
        weight = random.floats(40 * dim + 1, dtype=dtype)[shift : shift + 40 * dim].view(40, dim)
        values = random.floats(6 * dim + 1, dtype=dtype)[1 - shift : 1 - shift + 6 * dim].view(6, dim)
        missing = random.floats(dim + 1, dtype=dtype)[shift : shift + dim]
        state = table.index, table.entries, weight, ids
        check("table_lookup", *state, None, None, 3, [0.5, 2.0], 2**62)
        check("table_lookup", *state, None, values, 0, [0.0], 1)
        check("table_lookup", *state, missing, values, 0, [0.0], 1)


@pytest.mark.parametrize("kind", range(4))
def test_initial_values_of_many_keys(kind: int) -> None:
    """Compute all parts of the inverse distribution function, in float64 and in rounded numbers."""
    parameters = [0.25] if kind == 0 else [-0.5, 3.0]
    keys = ids_of(1500, -(2**63), 2**63 - 1)
    rows = torch.randperm(1500, generator=torch.Generator().manual_seed(1))
    rows[::7] = -rows[::7] - 1
    for dtype in FLOATS:
        check("table_initialize_", torch.zeros(1500, 5, dtype=dtype), rows, keys, None, kind, parameters, -3)


@pytest.mark.parametrize("columns", [0, 1, 2, 3, 4, 8, 33, 64])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float64], ids=str)
def test_assignment_at_any_address(columns: int, dtype: torch.dtype) -> None:
    """Assign by 16 bytes, 4 or one; of several values for a row the last one stays."""
    rows = ids_of(700, -2, 30)
    for shift in (0, 1):
        memory = torch.zeros(30 * columns + 1, dtype=dtype)
        weight = memory[shift : shift + 30 * columns].view(30, columns)
        values = torch.arange(700 * columns).to(dtype).view(700, columns)
        check("table_assign_", weight, rows, values)
        check("table_assign_", weight, rows[:1], values[5:6])


# ---- count_min_sketch_ ----------------------------------------------------------------------------------------------

COUNTERS = [torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", COUNTERS, ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 90])
def test_sketches_at_any_address(width: int, dtype: torch.dtype) -> None:
    """Count in counters that share a word with others, with none, and with memory of others."""
    ids = ids_of(400, -5, 30)
    mask = Random(1).integers(0, 4, 400, dtype=torch.int64) > 0
    for shift in range(4):
        memory = torch.full((width + 8,), 3, dtype=dtype)
        for num_hashes in (1, 3):
            check("count_min_sketch_", memory[shift : shift + width], ids[:40], mask[:40], num_hashes, True)
            check("count_min_sketch_", memory[shift : shift + width], ids, mask, num_hashes, False)
        assert memory[:shift].tolist() + memory[shift + width :].tolist() == [3] * 8
        check("count_min_sketch_", memory[shift : shift + width], ids, None, 2, True)
        assert memory[:shift].tolist() + memory[shift + width :].tolist() == [3] * 8


@pytest.mark.parametrize("dtype", COUNTERS, ids=str)
@pytest.mark.parametrize("n", [1, 33, 300, 3000])
def test_one_id_fills_a_counter(n: int, dtype: torch.dtype) -> None:
    """Count one id by many threads, which stop at the largest count."""
    most = torch.iinfo(dtype).max
    for room in (0, 1, n - 1, n, n + 1, 2 * n):
        before = max(most - room, 0)
        sketch = torch.full((7,), before, dtype=dtype)
        counts = check("count_min_sketch_", sketch, torch.full((n,), 12), None, 1, True)
        assert counts.tolist() == [min(before + n, most, MOST)] * n


@pytest.mark.parametrize("dtype", COUNTERS, ids=str)
def test_an_id_whose_counters_are_one(dtype: torch.dtype) -> None:
    """Count an id once per hash function, although all of them use one counter."""
    for start in (0, torch.iinfo(dtype).max - 70):
        sketch = torch.full((1,), start, dtype=dtype)
        check("count_min_sketch_", sketch, torch.tensor([1, 2], dtype=torch.int32), None, 64, True)
