"""The index of tables: random calls against the reference to the byte, frequencies, and keys made to collide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from calls import assert_same_bits
from devices import cpu_only
from hypothesis import given, settings
from hypothesis import strategies as st
from samples.table import EXTREMES
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import table as reference_table
from torchsparse_rec.compat._parity.reference.table import (
    MOST,
    SLOTS,
    WORDS,
    ReferenceTable,
    check_index,
    keys_at,
    place_of,
    region_size,
    regions_of,
)

pytestmark = pytest.mark.usefixtures("kernels")

NO_ROWS = torch.empty(0, dtype=torch.int32)


def _integers(x: Sequence[int] | None, dtype: torch.dtype = torch.int64) -> Tensor | None:
    return None if x is None else torch.tensor(x, dtype=dtype)


class Checked:
    """A table and its reference: every call does the same to both, and leaves the same bits."""

    def __init__(self, buckets: int, rows: int, index_dtype: torch.dtype = torch.int64, seed: int = 0) -> None:
        self.table = ReferenceTable.empty(buckets, rows, seed)
        self.entries, self.counters = torch.full((rows, 2), -1), torch.zeros(8, dtype=torch.int64)
        self.index = ops.table_rehash(self.entries, self.counters, buckets, seed=seed)
        self.free_rows = NO_ROWS
        self.dtype = index_dtype

    def _check(self) -> None:
        assert_same_bits(self.index, reference_table.index_tensor(self.table))
        assert_same_bits(self.entries, reference_table.entries_tensor(self.table))
        assert_same_bits(self.counters, reference_table.counters_tensor(self.table))
        check_index(self.index, self.entries)

    def insert(
        self,
        ids: Sequence[int],
        allowed: Sequence[bool] | None = None,
        frequencies: Sequence[int] | None = None,
        version: int = -1,
        count: bool = False,
    ) -> list[int]:
        result = ops.table_find_or_insert_(
            self.index,
            self.entries,
            self.counters,
            self.free_rows,
            torch.tensor(ids, dtype=self.dtype),
            allowed=_integers(allowed, torch.bool),
            frequencies=_integers(frequencies, torch.int32),
            version=version,
            count=count,
        )
        rows, born = self.table.find_or_insert(ids, allowed, frequencies, version, count)
        assert result.rows.dtype == result.born.dtype == torch.int64
        assert (result.rows.tolist(), result.born.tolist()) == (rows, born)
        self._check()
        return rows

    def find(self, ids: Sequence[int]) -> list[int]:
        found = ops.table_find(self.index, self.entries, torch.tensor(ids, dtype=self.dtype))
        assert found.dtype == torch.int64
        assert found.tolist() == self.table.find(ids)
        return found.tolist()

    def erase(self, ids: Sequence[int], mask: Sequence[bool] | None = None) -> list[int]:
        keys = torch.tensor(ids, dtype=self.dtype)
        freed = ops.table_erase_(self.index, self.entries, keys, mask=_integers(mask, torch.bool))
        assert freed.dtype == torch.int64
        assert freed.tolist() == self.table.erase(ids, mask)
        self._check()
        return freed.tolist()

    def rehash(self, buckets: int, seed: int = 0) -> None:
        self.table = self.table.rehashed(buckets, seed)
        self.index = ops.table_rehash(self.entries, self.counters, buckets, seed=seed)
        self._check()

    def rehash_until_all_fit(self, buckets: int, seed: int = 0) -> None:
        """Rehash as a program does: an index of too few buckets leaves keys out, and one must not go on with it."""
        self.rehash(buckets, seed)
        if len(self.table.rows) < sum(entry.version is not None for entry in self.table.entries[: self.table.used]):
            self.rehash_until_all_fit(4 * buckets, seed)

    def list_free_rows(self) -> None:
        """List the rows of erased keys as free, to be given out again, as a program does after it has erased."""
        free = [row for row in range(self.table.used) if self.table.entries[row].version is None]
        self.table.free_rows, self.table.reused = free, 0
        self.free_rows = torch.tensor(free, dtype=torch.int32)
        self.counters[1] = 0


# ---- Random programs ------------------------------------------------------------------------------------------------


def _crowd(buckets: int, seed: int) -> list[int]:
    """Return keys that fill a region from its last bucket on; and some with the home and the tag of key 0."""
    places = [(buckets - 1, 7, 15), (0, 0, 4), (0, 255, 4)]
    return [key for bucket, low, count in places for key in keys_at(buckets, bucket, low, count, seed=seed)]


_SEEDS = st.sampled_from([0, 0, 1, -(2**63)])
_Program = tuple[int, int, torch.dtype, int, list[tuple]]


@st.composite
def programs(draw: Callable) -> _Program:
    buckets, seed = draw(st.sampled_from([1, 2, 3, 5, 130])), draw(_SEEDS)
    rows = draw(st.integers(0, 60))
    dtype = draw(st.sampled_from([torch.int64, torch.int64, torch.int32]))
    info = torch.iinfo(dtype)
    pool = [key for key in [*EXTREMES, *range(2, 8), *_crowd(buckets, seed)] if info.min <= key <= info.max]
    lists = st.lists(st.sampled_from(pool), max_size=40) | st.permutations(pool)

    def for_each(ids: list[int], values: st.SearchStrategy) -> st.SearchStrategy:
        return st.none() | st.lists(values, min_size=len(ids), max_size=len(ids))

    steps: list[tuple] = []
    for kind in draw(st.lists(st.sampled_from(["insert", "insert", "erase", "rehash", "find", "free"]), max_size=12)):
        if kind == "insert":
            ids = draw(lists)
            allowed = draw(for_each(ids, st.booleans()))
            frequencies = draw(for_each(ids, st.sampled_from([0, 1, 9, MOST - 1, MOST])))
            version = draw(st.sampled_from([-1, 0, 1, 77, MOST]))
            steps.append((Checked.insert, ids, allowed, frequencies, version, draw(st.booleans())))
        elif kind == "erase":
            ids = draw(lists)
            steps.append((Checked.erase, ids, draw(for_each(ids, st.booleans()))))
        elif kind == "rehash":
            steps.append((Checked.rehash_until_all_fit, draw(st.sampled_from([1, 2, 4, 9, 127, 128])), draw(_SEEDS)))
        elif kind == "find":
            steps.append((Checked.find, draw(lists)))
        else:
            steps.append((Checked.list_free_rows,))
    return buckets, rows, dtype, seed, steps


def _run(program: _Program) -> None:
    """Run the calls of a program on full tables and full regions, with duplicates, masks and reused rows."""
    buckets, rows, dtype, seed, steps = program
    checked = Checked(buckets, rows, dtype, seed)
    for step, *arguments in steps:
        step(checked, *arguments)
    checked.find([key for key in EXTREMES if dtype == torch.int64 or -(2**31) <= key < 2**31])
    checked.find(list(checked.table.rows))


@cpu_only
@settings(max_examples=200)
@given(program=programs())
def test_random_programs(program: _Program) -> None:
    _run(program)


@pytest.mark.parametrize("kernels", ["emulated"], indirect=True)
@settings(max_examples=60)
@given(program=programs())
def test_random_programs_of_the_emulated_kernels(program: _Program) -> None:
    """Run fewer programs, since each runs in several orders of threads."""
    _run(program)


# ---- By hand --------------------------------------------------------------------------------------------------------


def test_rows_are_given_out_in_the_order_of_first_appearance() -> None:
    checked = Checked(4, 10)
    assert checked.insert([7, -1, 7, 2**63 - 1, -(2**63), 0]) == [0, 1, 0, 2, 3, 4]
    assert checked.insert([0, 5, 5, -1]) == [4, 5, 5, 1]
    assert checked.find([-(2**63), 6, 0, 2**63 - 1, -1]) == [3, -1, 4, 2, 1]
    assert checked.counters.tolist() == [6, 0, 0, 6, 0, 0, 0, 0]


def test_a_key_is_inserted_at_the_first_position_that_allows_it() -> None:
    checked = Checked(2, 10)
    assert checked.insert([5, 6, 5, 6, 7], [False, True, True, True, False], [10, 20, 30, 40, 50]) == [1, 0, 1, 0, -1]
    assert [checked.table.entries[row].frequency for row in (0, 1)] == [20, 30]
    assert checked.insert([5, 7], [False, True]) == [1, 2]


def test_free_rows_come_first_and_each_once() -> None:
    checked = Checked(2, 5)
    checked.insert([1, 2, 3, 4])
    assert checked.erase([3, 1, 3, 9]) == [2, 0, -1, -1]
    checked.list_free_rows()
    assert checked.insert([10]) == [0]
    assert checked.insert([11, 12, 13, 14]) == [2, 4, -1, -1]
    assert checked.counters.tolist() == [5, 2, 2, 7, 0, 0, 0, 0]


def test_versions_and_frequencies() -> None:
    checked = Checked(2, 5)
    checked.insert([1, 2, 1], version=4, count=True)
    checked.insert([1, 3], frequencies=[50, 60], count=True)
    checked.insert([2, 2], [False, False], version=9)
    of = [(x.key, x.version, x.frequency) for x in checked.table.entries[:3]]
    assert of == [(1, 4, 3), (2, 9, 1), (3, 0, 60)]
    assert checked.entries[:3, 1].tolist() == [4 * 2**32 + 3, 9 * 2**32 + 1, 60]


@pytest.mark.parametrize("start", [MOST - 2, MOST - 1, MOST])
def test_frequencies_stay_at_their_largest_value(start: int) -> None:
    checked = Checked(1, 3)
    checked.insert([8], frequencies=[start], version=MOST)
    for _ in range(3):
        checked.insert([8, 8, 9], count=True)
    assert checked.entries[0].tolist() == [8, MOST << 32 | MOST]


def test_frequencies_below_zero_count_as_zero() -> None:
    """Store 0 rather than -1, which marks a free row."""
    checked = Checked(1, 3)
    frequencies = torch.tensor([-1, -(2**31)], dtype=torch.int32)
    ids = torch.tensor([8, 9])
    ops.table_find_or_insert_(
        checked.index, checked.entries, checked.counters, NO_ROWS, ids, frequencies=frequencies, version=1
    )
    assert checked.entries[:, 1].tolist() == [2**32, 2**32, -1]
    assert ops.table_find(checked.index, checked.entries, ids).tolist() == [0, 1]


@pytest.mark.parametrize("key", [0, -1])
def test_erasing_keys_of_one_tag_at_once(key: int) -> None:
    """Find the second key, although the first leaves traces of the same tag."""
    place = place_of(1, key)
    neighbours = keys_at(1, 0, place.tag, 5)
    for keys in ([*neighbours, key], [key, *neighbours], [*neighbours[:2], key, *neighbours[2:]]):
        checked = Checked(1, 9)
        checked.insert(keys)
        assert checked.erase(keys) == list(range(6))
        assert not checked.index.any()


def test_no_ids_and_no_rows() -> None:
    checked = Checked(1, 0)
    for ids in ([], [1, 2, 1]):
        assert checked.insert(ids, version=1, count=True) == [-1] * len(ids)
        assert checked.find(ids) == [-1] * len(ids)
        assert checked.erase(ids) == [-1] * len(ids)
    assert checked.counters[2] == 3, "how often a key found no room"
    checked.rehash(3)


# ---- Collisions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [0, 63, 64, 129])
@pytest.mark.parametrize("low", [0, 1, 255])
def test_keys_of_one_home_and_tag_fill_their_region(bucket: int, low: int) -> None:
    """Fill a region round and round, from the last bucket to the first, and not into the other region."""
    buckets = 130
    region = min(bucket // 64, regions_of(buckets) - 1)
    room = region_size(buckets, region) * SLOTS
    keys = keys_at(buckets, bucket, low, room + 5)
    others = [key for key in range(300) if (place_of(buckets, key).begin == 0) == (region == 1)][:50]
    checked = Checked(buckets, room + 100)
    assert checked.insert(keys[::2] + others[:20]) == list(range(len(keys[::2]) + 20))
    checked.insert(keys)
    assert checked.counters[2] == 5, "how many found no room"
    assert len(set(checked.find(others[:20])) - {-1}) == 20
    words = checked.index.tolist()
    inside = range(region * 64, region * 64 + room // SLOTS)
    assert all((words[b][3] > 0) == (b != inside[(bucket - inside[0] - 1) % len(inside)]) for b in inside)
    refused = [key for key, row in zip(keys, checked.find(keys), strict=True) if row < 0]
    assert refused == keys[1::2][-5:], "those that came last"
    # The next key that is inserted takes the hole; keys behind the hole stay where they are.
    checked.erase(keys[4:9])
    assert -1 not in checked.insert([refused[0], *keys[5:9]])
    checked.insert([keys[4], *others])
    checked.erase([*refused, *keys])
    checked.erase(others)
    assert not checked.index.any(), "of an empty table every bit is 0"


def test_tags_0_and_255_are_one() -> None:
    keys = keys_at(3, 1, 0, 2) + keys_at(3, 1, 255, 2)
    checked = Checked(3, 9)
    assert checked.insert(keys) == [0, 1, 2, 3]
    assert checked.index[1, :3].view(torch.uint8).tolist() == [255] * 4 + [0] * 8
    checked.erase(keys[:1])
    assert checked.find(keys) == [-1, 1, 2, 3]


def test_a_full_region_takes_no_row() -> None:
    """Give the next row to a later key of another region."""
    crowd = keys_at(130, 3, 9, 64 * SLOTS + 1)
    other = keys_at(130, 100, 9, 2)
    checked = Checked(130, 64 * SLOTS + 5)
    checked.insert(crowd[:-1])
    assert checked.insert([other[0], crowd[-1], other[1]]) == [64 * SLOTS, -1, 64 * SLOTS + 1]


@pytest.mark.parametrize("buckets", [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193])
def test_every_size_of_an_index(buckets: int) -> None:
    """Use one region up to 127 buckets, then one for each 64, the last with the rest; full, over-full, and emptied."""
    checked = Checked(buckets, SLOTS * buckets + 3)
    keys = torch.randint(-(2**63), 2**63 - 1, (SLOTS * buckets + 7,), generator=torch.Generator().manual_seed(buckets))
    checked.insert(keys.tolist(), count=True)
    assert checked.index.shape == (buckets, WORDS)
    assert checked.counters[0] <= SLOTS * buckets
    if regions_of(buckets) == 1:
        assert checked.counters[:3].tolist() == [SLOTS * buckets, 0, 7]
    checked.rehash(buckets)
    checked.erase(keys.tolist())
    assert not checked.index.any()


def test_rehashing_counts_the_keys_that_find_no_room() -> None:
    checked = Checked(3, 40)
    checked.insert(list(range(30)))
    checked.rehash(1)
    assert checked.counters[2] == 18
    assert checked.find(list(range(30))) == [*range(12), *[-1] * 18]
    checked.rehash(4)
    assert checked.find(list(range(30))) == list(range(30)), "their entries were kept"


def test_rehashing_gives_what_inserting_in_the_order_of_rows_gives() -> None:
    checked = Checked(5, 50)
    checked.insert(list(range(40)))
    checked.erase(list(range(0, 40, 3)))
    checked.list_free_rows()
    checked.insert(list(range(100, 110)))
    by_row = [x.key for x in checked.table.entries if x.version is not None]
    checked.rehash(64)
    fresh = ReferenceTable.empty(64, 50)
    fresh.find_or_insert(by_row)
    assert torch.equal(checked.index[:, :4], reference_table.index_tensor(fresh)[:, :4])


# ---- Seeds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, -1, 2**63 - 1, -(2**63)])
def test_keys_that_fill_a_region_fill_none_under_a_seed(seed: int) -> None:
    """Fill no region under a seed with keys that fill one without it, nor the reverse."""
    buckets = 400  # six regions, of which five take 768 keys
    without, under = (keys_at(buckets, 70, 9, 900, seed=x) for x in (0, seed))
    for keys, other, rest in ((without, 0, seed), (under, seed, 0)):
        checked = Checked(buckets, 1000, seed=other)
        checked.insert(keys)
        assert checked.counters[2] == 900 - 64 * SLOTS
        checked.rehash(buckets, rest)
        found = checked.find(keys)
        assert checked.insert(keys) == [*found[: 64 * SLOTS], *range(64 * SLOTS, 900)]
        regions = torch.tensor([place_of(buckets, key, rest).begin for key in keys]).bincount()
        assert regions.max() <= 250, "150 of 900 keys have the mean region"


def test_a_seed_is_kept_in_the_index_alone() -> None:
    """Compare with a table without a seed: equal entries and counters, and equal buckets after a rehash without it."""
    tables = [Checked(130, 900, seed=seed) for seed in (0, 7)]
    keys = torch.randint(-(2**63), 2**63 - 1, (800,), generator=torch.Generator().manual_seed(1)).tolist()
    for table in tables:
        table.insert(keys, version=3, count=True)
        table.erase(keys[::3])
        table.list_free_rows()
        table.insert(keys[100:300])
    plain, seeded = tables
    assert_same_bits(plain.entries, seeded.entries)
    assert_same_bits(plain.counters, seeded.counters)
    assert plain.index.shape == (130, WORDS) and seeded.index.shape == (131 * WORDS,)
    assert seeded.index[-WORDS:].view(torch.int64)[0] == 7
    seeded.rehash(130)
    plain.rehash(130)
    assert_same_bits(plain.index, seeded.index)
