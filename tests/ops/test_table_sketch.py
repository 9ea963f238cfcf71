"""count_min_sketch_: counts are never too low, how often they are too high, full counters, threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from calls import assert_same_bits
from devices import cpu_only
from hypothesis import given, settings
from hypothesis import strategies as st
from samples.sample import Random
from samples.table import EXTREMES
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.table_rows import count_min_sketch_, sketch_counters

pytestmark = pytest.mark.usefixtures("kernels")

COUNTERS = [torch.int8, torch.int16, torch.int32, torch.int64]
MOST = 2**31 - 1


@st.composite
def programs(draw: Callable) -> tuple[int, int, torch.dtype, list[tuple]]:
    """Draw width, hashes, dtype, and batches of ids, masks and whether they are counted."""
    pool = EXTREMES + list(range(30))
    batches = []
    for _ in range(draw(st.integers(0, 6))):
        ids = draw(st.lists(st.sampled_from(pool), max_size=60))
        mask = draw(st.none() | st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
        batches.append((ids, mask, draw(st.booleans())))
    width, num_hashes = draw(st.sampled_from([1, 2, 7, 64, 1000])), draw(st.sampled_from([1, 2, 4, 64]))
    return width, num_hashes, draw(st.sampled_from(COUNTERS)), batches


@settings(max_examples=100)
@given(program=programs())
def test_random_programs(program: tuple[int, int, torch.dtype, list[tuple]]) -> None:
    """Compare with the reference's bits; a count is never below the true one, unless its counter is full."""
    width, num_hashes, dtype, batches = program
    sketch = torch.zeros(width, dtype=dtype)
    counted: Counter[int] = Counter()
    for keys, flags, count in batches:
        ids = torch.tensor(keys, dtype=torch.int64)
        mask = None if flags is None else torch.tensor(flags, dtype=torch.bool)
        wanted, after = count_min_sketch_(sketch, ids, mask, num_hashes, count)
        counts = ops.count_min_sketch_(sketch, ids, mask=mask, num_hashes=num_hashes, count=count)
        assert_same_bits(counts, wanted)
        assert_same_bits(sketch, after)
        taking_part = [key for i, key in enumerate(keys) if flags is None or flags[i]]
        counted.update(taking_part if count else [])
        most = min(torch.iinfo(dtype).max, MOST)
        for i, key in enumerate(keys):
            lowest = min(counted[key], most) if flags is None or flags[i] else 0
            assert counts[i] >= lowest


def test_counts_by_hand() -> None:
    sketch = torch.zeros(1000, dtype=torch.int16)
    ids = torch.tensor([7, -7, 7, 2**63 - 1])
    assert ops.count_min_sketch_(sketch, ids).tolist() == [2, 1, 2, 1]
    mask = torch.tensor([True, True, False, False])
    assert ops.count_min_sketch_(sketch, ids, mask=mask).tolist() == [3, 2, 0, 0]
    assert ops.count_min_sketch_(sketch, ids, count=False).tolist() == [3, 2, 3, 1]
    assert ops.count_min_sketch_(sketch, ids.int()[:2], count=False).tolist() == [3, 2], "int32 keys are the same keys"
    assert sketch.sum() == 4 * 6
    assert sketch.nonzero().flatten().tolist() == sorted(
        {p for key in ids.tolist() for p in sketch_counters(key, 4, 1000)}
    )


@pytest.mark.parametrize("dtype", COUNTERS, ids=str)
def test_full_counters_stay_as_they_are(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    sketch = torch.full((1,), most - 2, dtype=dtype)
    for after in (most - 1, most, most, most):
        count = ops.count_min_sketch_(sketch, torch.tensor([3]), num_hashes=1)
        assert sketch.tolist() == [after]
        assert count.dtype == torch.int32 and count.tolist() == [min(after, MOST)]
    assert ops.count_min_sketch_(sketch, torch.arange(500), num_hashes=3).eq(min(most, MOST)).all()
    assert sketch.tolist() == [most]


def test_counts_beyond_int32_are_its_largest_value() -> None:
    for value in (MOST - 1, MOST, MOST + 1, 2**40):
        sketch = torch.full((9,), value)
        assert ops.count_min_sketch_(sketch, torch.tensor([1]), count=False).tolist() == [min(value, MOST)]


@pytest.mark.parametrize(("num_hashes", "width"), [(1, 4000), (2, 8000), (4, 10_000), (7, 10_000)])
def test_how_often_counts_are_too_high(num_hashes: int, width: int) -> None:
    """Compare with a Bloom filter's probability that all counters of a key are also those of other keys."""
    distinct = 1000
    generator = torch.Generator().manual_seed(num_hashes)
    keys = torch.randint(-(2**63), 2**63 - 1, (21 * distinct,), generator=generator)
    for ids in (keys, torch.arange(21 * distinct), torch.arange(21 * distinct) * 2**40):
        sketch = torch.zeros(width, dtype=torch.int32)
        ops.count_min_sketch_(sketch, ids[:distinct], num_hashes=num_hashes)
        assert sketch.sum() == num_hashes * distinct
        strangers = ops.count_min_sketch_(sketch, ids[distinct:], num_hashes=num_hashes, count=False)
        expected = (1 - torch.exp(torch.tensor(-num_hashes * distinct / width))) ** num_hashes
        share = (strangers > 0).double().mean()
        deviation = (expected * (1 - expected) / len(strangers)) ** 0.5
        # The share of full counters varies with the keys that were counted, too.
        assert abs(share - expected) < 4 * deviation + 0.15 * expected
        own = ops.count_min_sketch_(sketch, ids[:distinct], num_hashes=num_hashes, count=False)
        assert (
            own.min() == 1 and (own > 1).double().mean() < expected + 5 * (expected / distinct) ** 0.5 + 0.15 * expected
        )


def test_error_bound_of_a_skewed_stream() -> None:
    """Bound a count's excess over e N num_hashes / W by a probability of exp(-num_hashes) at most."""
    ids = (torch.rand(20_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) ** 4 * 5_000).long()
    width, num_hashes = 2000, 4
    sketch = torch.zeros(width, dtype=torch.int32)
    ops.count_min_sketch_(sketch, ids, num_hashes=num_hashes)
    distinct, counts = ids.unique(return_counts=True)
    estimates = ops.count_min_sketch_(sketch, distinct, num_hashes=num_hashes, count=False)
    errors = estimates - counts
    assert errors.min() == 0
    bound = 2.718281828459045 * len(ids) * num_hashes / width
    assert (errors > bound).double().mean() <= 0.0184
    assert errors.double().mean() < len(ids) * num_hashes / width


def test_all_bits_of_a_key_count() -> None:
    """Give keys that differ in one bit alone different counters."""
    width = 2**20
    places = {key: tuple(sketch_counters(key, 4, width)) for key in [0, *(1 << b for b in range(63)), -(2**63)]}
    assert len(set(places.values())) == len(places)
    sketch = torch.zeros(width, dtype=torch.int8)
    assert ops.count_min_sketch_(sketch, torch.tensor(list(places))).eq(1).all()


@cpu_only
@pytest.mark.parametrize("dtype", COUNTERS, ids=str)
def test_large_batches_are_the_same_for_every_number_of_threads(dtype: torch.dtype, restore_threads: None) -> None:
    """Let threads count in the same counters, and fill them."""
    n = 330_000
    ids = (Random(1).integers(0, 3000, n, dtype=torch.int64) ** 2 // 3000) * 2**33
    mask = Random(2).integers(0, 4, n, dtype=torch.int64) > 0
    wanted: list[Tensor] = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        sketch = torch.zeros(1000, dtype=dtype)
        results = [ops.count_min_sketch_(sketch, ids, mask=mask, num_hashes=3), sketch]
        for actual, same in zip(results, wanted or results, strict=True):
            assert_same_bits(actual, same)
        wanted = results
    expected = torch.zeros(1000, dtype=torch.int64)
    keys, counts = ids[mask].unique(return_counts=True)
    for key, times in zip(keys.tolist(), counts.tolist(), strict=True):
        for place in sketch_counters(key, 3, 1000):
            expected[place] += times
    assert_same_bits(wanted[1], expected.clamp_max(torch.iinfo(dtype).max).to(dtype))
