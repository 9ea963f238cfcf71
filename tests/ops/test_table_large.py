"""Large batches of keys: the same bits for every number of threads, and correct results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from calls import assert_same_bits
from samples.table import EXTREMES, state_of
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import table as reference_table
from torchsparse_rec.compat._parity.reference.table import MOST, ReferenceTable, check_index

LARGE = 330_000


def _spread(distinct: int, n: int, seed: int) -> Tensor:
    """Return n keys of int64's whole range, ``distinct`` of them different; a few of them most often."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**63), 2**63 - 1, (distinct,), generator=generator)
    keys[: len(EXTREMES)] = torch.tensor(EXTREMES)
    picked = (torch.rand(n, generator=generator, dtype=torch.float64) ** 2 * distinct).long()
    return keys[picked]


def _each_number_of_threads(call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    torch.set_num_threads(1)
    wanted = call()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for actual, same in zip(call(), wanted, strict=True):
            assert_same_bits(actual, same)
    return wanted


def _insert(state: tuple[Tensor, ...], ids: Tensor, **options: object) -> tuple[Tensor, ...]:
    state = tuple(x.clone() for x in state)
    return *ops.table_find_or_insert_(*state, ids, **options), *state


def _assert_large_insert(buckets: int, rows: int, distinct: int, **options: object) -> tuple[Tensor, ...]:
    ids = _spread(distinct, LARGE, buckets)
    state = state_of(ReferenceTable.empty(buckets, rows))
    results = _each_number_of_threads(lambda: _insert(state, ids, **options))
    arguments = (options.get("allowed"), options.get("frequencies"), 5, True)
    wanted = reference_table.table_find_or_insert_(*state, ids, *arguments)
    for actual, right in zip(results[:5], wanted, strict=True):
        assert_same_bits(actual, right)
    return results


@pytest.mark.parametrize("kind", ["room", "few_rows", "few_buckets", "one_bucket"])
def test_large_inserts_are_the_same_for_every_number_of_threads(kind: str, restore_threads: None) -> None:
    """Compare with the reference too, also if rows run out, and if most regions are full."""
    buckets, rows = {
        "room": (4_000, 40_000),
        "few_rows": (4_000, 9_999),
        "few_buckets": (1_000, 40_000),
        "one_bucket": (1, 40_000),
    }[kind]
    generator = torch.Generator().manual_seed(2)
    options: dict[str, object] = {"version": 5, "count": True}
    if kind != "room":
        options["allowed"] = torch.rand(LARGE, generator=generator) < 0.5
        options["frequencies"] = torch.randint(0, MOST, (LARGE,), generator=generator, dtype=torch.int32)
    results = _assert_large_insert(buckets, rows, 30_000, **options)
    check_index(results[2], results[3])
    assert (results[4][2] > 0) == (kind != "room")


def test_different_keys_are_the_same_for_every_number_of_threads(restore_threads: None) -> None:
    """Insert keys that are all new, in as many rows."""
    ids = torch.randperm(LARGE, generator=torch.Generator().manual_seed(1)) * 0x1234567
    entries, counters = torch.full((LARGE, 2), -1), torch.zeros(8, dtype=torch.int64)
    index = ops.table_rehash(entries, counters, LARGE // 9)
    state = (index, entries, counters, torch.empty(0, dtype=torch.int32))
    results = _each_number_of_threads(lambda: _insert(state, ids))
    assert torch.equal(results[0], torch.arange(LARGE)) and torch.equal(results[1], results[0])
    assert torch.equal(results[3][:, 0], ids) and not results[3][:, 1].any()
    found = _each_number_of_threads(lambda: (ops.table_find(*results[2:4], ids.flip(0)),))
    assert torch.equal(found[0], torch.arange(LARGE).flip(0))
    rehashed = _each_number_of_threads(lambda: (ops.table_rehash(results[3], counters, LARGE // 9),))
    assert torch.equal(rehashed[0], results[2])


def test_erasing_is_the_same_for_every_number_of_threads(restore_threads: None) -> None:
    """Erase keys that occur many times once, at the first position that is not masked out."""
    results = _insert(state_of(ReferenceTable.empty(3_000, 40_000)), _spread(30_000, LARGE, 4))
    ids = _spread(60_000, LARGE, 4)
    for mask in (None, torch.rand(LARGE, generator=torch.Generator().manual_seed(1)) < 0.1):

        def erase(mask: Tensor | None = mask) -> tuple[Tensor, ...]:
            index, entries = results[2].clone(), results[3].clone()
            return ops.table_erase_(index, entries, ids, mask=mask), index, entries

        wanted = reference_table.table_erase_(*results[2:4], ids, mask)
        for actual, right in zip(_each_number_of_threads(erase), wanted, strict=True):
            assert_same_bits(actual, right)


def test_frequencies_of_one_key_in_a_large_batch(restore_threads: None) -> None:
    """Count every occurrence, whichever thread sees it, up to the largest value."""
    state = state_of(ReferenceTable.empty(2, 3))
    ids = torch.tensor([7, -7]).repeat_interleave(torch.tensor([LARGE, 5]))
    rows = _each_number_of_threads(lambda: _insert(state, ids, count=True))
    assert rows[3][:2].tolist() == [[7, LARGE], [-7, 5]]
    rows[3][0, 1] = MOST - LARGE // 2
    again = _each_number_of_threads(lambda: _insert((*rows[2:5], torch.empty(0, dtype=torch.int32)), ids, count=True))
    assert again[3][:2].tolist() == [[7, MOST], [-7, 10]]
