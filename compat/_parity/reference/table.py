"""
Slow, obvious references of the family ``table``: dictionaries of keys, lists of buckets, one key after another.

The layout of an index is exact, to the byte. Keys go to the first bucket on their way that has a free slot, and every
full bucket they pass counts one more. An erased key's slot has row 0, its entry key 0. With a seed, which chooses the
hash's factors, an index has one line more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SLOTS, WORDS, REGION = 12, 16, 64
MOST = 2**31 - 1
WORD = 2**64
_FIRST, _SECOND = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53

# ---- Hashes and places ----------------------------------------------------------------------------------------------


def factors_of(seed: int) -> tuple[int, int]:
    """Return the factors of the hash of a table with this seed."""
    if seed == 0:
        return _FIRST, _SECOND
    first = hash_key(seed)
    return first | 1, hash_key(first ^ 0x9E3779B97F4A7C15) | 1


def hash_key(key: int, seed: int = 0) -> int:
    """Hash a key by Murmur3's finalizer of 64 bits; a seed gives other factors."""
    first, second = factors_of(seed)
    x = key % WORD
    x = (x ^ x >> 33) * first % WORD
    x = (x ^ x >> 33) * second % WORD
    return x ^ x >> 33


def key_of_hash(x: int, seed: int = 0) -> int:
    """Return the key, as a signed number, whose hash is ``x``."""
    first, second = factors_of(seed)
    x = (x ^ x >> 33) * pow(second, -1, WORD) % WORD
    x = (x ^ x >> 33) * pow(first, -1, WORD) % WORD
    return signed(x ^ x >> 33)


def signed(x: int) -> int:
    """Return the same 64 bits as a signed number."""
    return x - WORD if x >= WORD // 2 else x


@dataclass(frozen=True)
class Place:
    """Where a key belongs: its region's first bucket and size, its home in the region, and its tag."""

    begin: int
    size: int
    home: int
    tag: int

    def way(self) -> Iterator[int]:
        """Yield the buckets that the key may be in, in the order of the search."""
        for step in range(self.size):
            yield self.begin + (self.home + step) % self.size


def regions_of(buckets: int) -> int:
    return 1 if buckets < 2 * REGION else buckets // REGION


def region_size(buckets: int, region: int) -> int:
    return buckets - region * REGION if region + 1 == regions_of(buckets) else REGION


def place_of(buckets: int, key: int, seed: int = 0) -> Place:
    x = hash_key(key, seed)
    region = x * regions_of(buckets) >> 64
    size = region_size(buckets, region)
    return Place(region * REGION, size, (x >> 8 & 0xFFFFFF) * size >> 24, x & 0xFF or 255)


def keys_at(buckets: int, bucket: int, low: int, count: int, first: int = 0, seed: int = 0) -> list[int]:
    """Return different keys whose home is ``bucket``; their hashes end in the byte ``low``, bits 32 to 63 differ."""
    regions = regions_of(buckets)
    region = min(bucket // REGION, regions - 1)
    size = region_size(buckets, region)
    middle = -(-(bucket - region * REGION) * 2**24 // size)
    high = -(-region * 2**32 // regions) + first
    keys = [key_of_hash((high + k) << 32 | middle << 8 | low, seed) for k in range(count)]
    assert all(region * REGION + place_of(buckets, key, seed).home == bucket for key in keys)
    return keys


# ---- The table ------------------------------------------------------------------------------------------------------


@dataclass
class Bucket:
    """Tags (0: empty) and rows of the slots, and how many keys passed by because all slots were taken."""

    tags: list[int] = field(default_factory=lambda: [0] * SLOTS)
    rows: list[int] = field(default_factory=lambda: [0] * SLOTS)
    passed: int = 0


@dataclass
class Entry:
    """The key, version and frequency of a row; a row without a version is free."""

    key: int = -1
    version: int | None = None
    frequency: int = 0


@dataclass
class ReferenceTable:
    """A table's state in Python's own types; ``rows`` has the row of each key, as the index does."""

    buckets: list[Bucket]
    entries: list[Entry]
    used: int = 0
    reused: int = 0
    failed: int = 0
    inserted: int = 0
    free_rows: Sequence[int] = ()
    rows: dict[int, int] = field(default_factory=dict)
    seed: int = 0

    @classmethod
    def empty(cls, buckets: int, rows: int, seed: int = 0) -> ReferenceTable:
        return cls([Bucket() for _ in range(buckets)], [Entry() for _ in range(rows)], seed=seed)

    def find(self, ids: Sequence[int]) -> list[int]:
        return [self.rows.get(key, -1) for key in ids]

    def _next_row(self) -> int | None:
        if self.reused < len(self.free_rows):
            return self.free_rows[self.reused]
        return self.used if self.used < len(self.entries) else None

    def _take_row(self) -> None:
        if self.reused < len(self.free_rows):
            self.reused += 1
        else:
            self.used += 1

    def _put(self, key: int, row: int) -> bool:
        """Enter a key that is missing; return False, and change nothing, if its region is full."""
        place = place_of(len(self.buckets), key, self.seed)
        full: list[Bucket] = []
        for bucket in (self.buckets[b] for b in place.way()):
            if 0 in bucket.tags:
                slot = bucket.tags.index(0)
                bucket.tags[slot], bucket.rows[slot] = place.tag, row
                self.rows[key] = row
                for other in full:
                    other.passed += 1
                return True
            full.append(bucket)
        return False

    def find_or_insert(
        self,
        ids: Sequence[int],
        allowed: Sequence[bool] | None = None,
        frequencies: Sequence[int] | None = None,
        version: int = -1,
        count: bool = False,
    ) -> tuple[list[int], list[int]]:
        born = [-1] * len(ids)
        refused = set()
        for i, key in enumerate(ids):
            if key in self.rows or key in refused or not (allowed is None or allowed[i]):
                continue
            row = self._next_row()
            if row is None or not self._put(key, row):
                refused.add(key)
                continue
            self._take_row()
            born[i] = row
            self.entries[row] = Entry(key, 0, 0 if frequencies is None else frequencies[i])
        new = {row for row in born if row >= 0}
        self.inserted += len(new)
        rows = self.find(ids)
        self.failed += sum(row < 0 and (allowed is None or allowed[i]) for i, row in enumerate(rows))
        for row in rows:
            if row >= 0 and version >= 0:
                self.entries[row].version = version
            if row >= 0 and count and not (frequencies is not None and row in new):
                self.entries[row].frequency = min(self.entries[row].frequency + 1, MOST)
        return rows, born

    def erase(self, ids: Sequence[int], mask: Sequence[bool] | None = None) -> list[int]:
        freed = [-1] * len(ids)
        for i, key in enumerate(ids):
            if key not in self.rows or not (mask is None or mask[i]):
                continue
            freed[i] = self.rows.pop(key)
            self.entries[freed[i]] = Entry(0)
            for bucket in (self.buckets[b] for b in place_of(len(self.buckets), key, self.seed).way()):
                here = [s for s in range(SLOTS) if bucket.tags[s] != 0 and bucket.rows[s] == freed[i]]
                if here:
                    bucket.tags[here[0]] = bucket.rows[here[0]] = 0
                    break
                bucket.passed -= 1
        return freed

    def rehashed(self, buckets: int, seed: int = 0) -> ReferenceTable:
        """Return a table of so many buckets with the same entries and counters."""
        copy = [Entry(x.key, x.version, x.frequency) for x in self.entries]
        table = ReferenceTable([Bucket() for _ in range(buckets)], copy, seed=seed)
        table.used, table.reused, table.inserted = self.used, self.reused, self.inserted
        table.free_rows, table.failed = self.free_rows, self.failed
        for row, entry in enumerate(table.entries):
            if entry.version is not None:
                table.failed += not table._put(entry.key, row)
        return table


# ---- Tensors --------------------------------------------------------------------------------------------------------


def pack(entry: Entry) -> int:
    return -1 if entry.version is None else entry.version << 32 | entry.frequency


def unpack(key: int, packed: int) -> Entry:
    return Entry(key, None) if packed == -1 else Entry(key, packed >> 32, packed & 0xFFFFFFFF)


def index_tensor(table: ReferenceTable) -> Tensor:
    words = [
        [int.from_bytes(bytes(bucket.tags[w : w + 4]), "little") for w in range(0, SLOTS, 4)]
        + [bucket.passed]
        + [row % 2**32 for row in bucket.rows]
        for bucket in table.buckets
    ]
    index = torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(torch.int32).reshape(-1, WORDS)
    if table.seed == 0:
        return index
    numbers = [table.seed, *map(signed, factors_of(table.seed)), *[0] * (WORDS // 2 - 3)]
    return torch.cat([index.flatten(), torch.tensor(numbers, dtype=torch.int64).view(torch.int32)])


def entries_tensor(table: ReferenceTable) -> Tensor:
    return torch.tensor([[x.key, pack(x)] for x in table.entries], dtype=torch.int64).reshape(-1, 2)


def counters_tensor(table: ReferenceTable) -> Tensor:
    return torch.tensor([table.used, table.reused, table.failed, table.inserted, 0, 0, 0, 0])


def table_of(
    index: Tensor, entries: Tensor, counters: Tensor | None = None, free_rows: Tensor | None = None
) -> ReferenceTable:
    """Return the table that tensors hold."""
    seed = 0
    if index.dim() == 1:
        index, seed = index[:-WORDS].reshape(-1, WORDS), int(index[-WORDS:].contiguous().view(torch.int64)[0])
    tags = index[:, : SLOTS // 4].contiguous().view(torch.uint8).tolist()
    buckets = [Bucket(t, words[4:], words[3]) for t, words in zip(tags, index.tolist(), strict=True)]
    table = ReferenceTable(buckets, [unpack(*entry) for entry in entries.tolist()], seed=seed)
    if counters is not None:
        table.used, table.reused, table.failed, table.inserted = counters.tolist()[:4]
    table.free_rows = [] if free_rows is None else free_rows.tolist()
    for bucket in buckets:
        for tag, row in zip(bucket.tags, bucket.rows, strict=True):
            if tag != 0:
                table.rows[table.entries[row].key] = row
    return table


def check_index(index: Tensor, entries: Tensor) -> None:
    """Check what holds for every index: no key twice, each key on its way, each passed bucket counted."""
    table = table_of(index, entries)
    taken = [(b, tag, row) for b, x in enumerate(table.buckets) for tag, row in zip(x.tags, x.rows, strict=True) if tag]
    assert len({row for _, _, row in taken}) == len(table.rows) == len(taken)
    passed = [0] * len(table.buckets)
    for bucket, tag, row in taken:
        entry = table.entries[row]
        assert entry.version is not None, f"row {row} is free, and in bucket {bucket}"
        place = place_of(len(table.buckets), entry.key, table.seed)
        assert tag == place.tag
        for b in place.way():
            if b == bucket:
                break
            passed[b] += 1
        else:
            raise AssertionError(f"key {entry.key} is in bucket {bucket}, outside its region")
    assert [bucket.passed for bucket in table.buckets] == passed


# ---- Operators ------------------------------------------------------------------------------------------------------


def _list(x: Tensor | None) -> list | None:
    return None if x is None else x.tolist()


def table_find(index: Tensor, entries: Tensor, ids: Tensor) -> Tensor:
    return torch.tensor(table_of(index, entries).find(ids.tolist()), dtype=torch.int64)


def table_find_or_insert_(
    index: Tensor,
    entries: Tensor,
    counters: Tensor,
    free_rows: Tensor,
    ids: Tensor,
    allowed: Tensor | None,
    frequencies: Tensor | None,
    version: int,
    count: bool,
) -> tuple[Tensor, ...]:
    table = table_of(index, entries, counters, free_rows)
    results = table.find_or_insert(ids.tolist(), _list(allowed), _list(frequencies), version, count)
    rows, born = (torch.tensor(x, dtype=torch.int64) for x in results)
    return rows, born, index_tensor(table), entries_tensor(table), counters_tensor(table)


def tables_find_or_insert_(
    index: list[Tensor],
    entries: list[Tensor],
    counters: list[Tensor],
    free_rows: list[Tensor],
    ids: Tensor,
    begins: list[int],
    ends: list[int],
    versions: list[int],
    count: bool,
) -> tuple[Tensor, ...]:
    rows, born = ids.long(), torch.full_like(ids, -1, dtype=torch.int64)
    states = []
    for i, e, c, f, begin, end, version in zip(
        index, entries, counters, free_rows, begins, ends, versions, strict=True
    ):
        results = table_find_or_insert_(i, e, c, f, ids[begin:end], None, None, version, count)
        rows[begin:end], born[begin:end] = results[:2]
        states.append(results[2:])
    return rows, born, *(x for each in zip(*states, strict=True) for x in each)


def table_erase_(index: Tensor, entries: Tensor, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    table = table_of(index, entries)
    rows = torch.tensor(table.erase(ids.tolist(), _list(mask)), dtype=torch.int64)
    return rows, index_tensor(table), entries_tensor(table)


def table_rehash(entries: Tensor, counters: Tensor, buckets: int, seed: int) -> tuple[Tensor, Tensor]:
    table = table_of(torch.zeros(0, WORDS, dtype=torch.int32), entries, counters).rehashed(buckets, seed)
    return index_tensor(table), counters_tensor(table)


# In the order of csrc/library.cpp.
FUNCTIONS: tuple[Callable, ...] = (
    table_find,
    table_find_or_insert_,
    tables_find_or_insert_,
    table_erase_,
    table_rehash,
)
