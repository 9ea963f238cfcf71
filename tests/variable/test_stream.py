"""Far more keys than a table's capacity: the right keys remain, and memory stays bounded."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import EmbeddingVariableOption, LFUEvict, LRUEvict
from torchsparse_rec.variable.coldness import coldest
from torchsparse_rec.variable.keys import packed

# The bytes of a key beside its row: its share of a bucket of 9 keys, and the entry.
BYTES_OF_KEY = 64 / 9 + 16


def _stream(kind: type[LRUEvict], keys: int, capacity: int, dim: int, batch: int, first_rows: int):
    """Send ``keys`` new keys through a table; yield it with the ids of each step."""
    option = EmbeddingVariableOption(evict_option=kind(capacity))
    table = EmbeddingVariable(dim, initializer=0.5, ev_option=option, capacity=first_rows)
    with torch.no_grad():
        for first in range(0, keys, batch):
            # The keys differ from one another, and are spread over all bits, because the factor is odd.
            ids = torch.arange(first, min(first + batch, keys)) * 0x5851F42D4C957F2D
            table(ids)
            yield table, ids


def _check_numbers(table: EmbeddingVariable, keys: int, capacity: int, dim: int) -> None:
    stats = table.stats()
    assert stats["failed"] == 0
    assert stats["admitted"] == keys
    assert stats["keys"] == stats["rows_dram"] == table.total_count() <= capacity
    assert stats["evicted"] == keys - stats["keys"]
    assert stats["bytes_dram"] <= 1.1 * capacity * (4 * dim + BYTES_OF_KEY)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", [LRUEvict, LFUEvict])
def test_two_million_keys_go_through_a_hundred_thousand_rows(kind: type[LRUEvict]) -> None:
    keys, capacity, batch = 2_000_000, 100_000, 40_000
    for step, (table, ids) in enumerate(_stream(kind, keys, capacity, 4, batch, 1024)):
        assert (table.lookup(ids[-3:]) == 0.5).all()
        if step % 10 == 9:
            _check_numbers(table, (step + 1) * batch, capacity, 4)
    # All keys of the last two steps are there, beside some of earlier ones.
    present = table.export().keys
    assert len(present.unique()) == len(present) == table.total_count()
    assert (table.keys.find(ids) >= 0).all()
    if kind is LRUEvict:
        assert (table.keys.find((torch.arange(keys - 2 * batch, keys)) * 0x5851F42D4C957F2D) >= 0).all()


@pytest.mark.usefixtures("one_thread")
def test_the_keys_that_remain_are_those_of_an_ordered_dictionary() -> None:
    """Insert one key at each step, so that no two are equally old; a full table drops a share of its capacity."""
    capacity, share = 64, 2
    table = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(evict_option=LRUEvict(capacity)), capacity=4)
    known: OrderedDict[int, None] = OrderedDict()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key in torch.randint(-60, 60, (1500,), generator=draw).tolist():
            table(torch.tensor([key, key]))
            if key not in known and len(known) == capacity:
                for _ in range(share):
                    known.popitem(last=False)
            known[key] = None
            known.move_to_end(key)
            assert len(known) == table.total_count()
    assert set(table.export().keys.tolist()) == set(known)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize(
    ("rows", "most_frequency", "most_version"),
    [(1, 1, 1), (500, 3, 4), (100_000, 2**31 - 1, 2**31 - 2), (100_000, 5, 70_000)],
)
def test_the_coldest_are_the_first_and_of_equal_ones_the_lowest_keys(
    rows: int, most_frequency: int, most_version: int, by_frequency: bool
) -> None:
    draw = torch.Generator().manual_seed(rows)
    frequencies = torch.randint(0, most_frequency + 1, (rows,), generator=draw)
    versions = torch.randint(-1, most_version, (rows,), generator=draw)
    keys = torch.randperm(rows, generator=draw) - rows // 2
    order = torch.argsort(keys)
    order = order[torch.argsort(versions[order], stable=True)]
    if by_frequency:
        order = order[torch.argsort(frequencies[order], stable=True)]
    entries = torch.stack([keys, packed(frequencies, versions)], 1)
    for count in {1, (rows + 1) // 2, rows}:
        assert torch.equal(coldest(entries, count, by_frequency), order[:count].sort().values)


def _resident() -> int:
    """Return the bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say how much memory is used")
def test_a_hundred_million_keys_go_through_five_million_rows() -> None:
    keys, capacity, dim = 100_000_000, 5_000_000, 8
    batch = keys // 1000
    # First use makes torch and the library load things that are not the table's memory.
    for _ in _stream(LRUEvict, 10 * batch, 2 * batch, dim, batch, 2 * batch):
        pass
    most, before, begin = 0, _resident(), time.perf_counter()
    # The table has all its rows from the beginning, because growth holds two tables for a moment.
    for table, _ in _stream(LRUEvict, keys, capacity, dim, batch, capacity):  # noqa: B007
        most = max(most, _resident() - before)
    bound = 1.1 * capacity * (4 * dim + BYTES_OF_KEY)
    seconds = time.perf_counter() - begin
    print(f"{seconds:.0f} s, resident {most / 1e6:.0f} MB more than before, bound {bound / 1e6:.0f}")
    _check_numbers(table, keys, capacity, dim)
    assert most <= bound
