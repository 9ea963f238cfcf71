"""Sample inputs of the family ``unique``, and the integers it shares with others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from samples.sample import Family, Random, ReadBack, Sample

INTEGERS = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def extremes(dtype: torch.dtype) -> list[int]:
    info = torch.iinfo(dtype)
    return [0, info.max, info.min, info.max - 1, 1, info.min, info.max, 0, info.min + 1, 1]


def unique_samples(operator: str) -> Iterator[Sample]:
    yield Sample(operator, "by_hand", (torch.tensor([7, -1, 7, 3, -1, 7]),), representative=True)
    for dtype in INTEGERS:
        word = str(dtype).removeprefix("torch.")
        yield Sample(operator, f"extremes_{word}", (torch.tensor(extremes(dtype), dtype=dtype),))
        yield Sample(operator, f"random_{word}", (Random(1).integers(0, 100, 300, dtype=dtype),))
    for name, x in {
        "empty": torch.empty(0, dtype=torch.int64),
        "empty_uint8": torch.empty(0, dtype=torch.uint8),
        "one": torch.tensor([-5], dtype=torch.int32),
        "all_the_same": torch.full((1000,), -(2**62)),
        "all_distinct": Random(2).integers(-(2**62), 2**62, 2000, dtype=torch.int64),
        "narrow_range_far_from_zero": Random(3).integers(10**15, 10**15 + 50, 1000, dtype=torch.int64),
        "many_duplicates": Random(4).integers(-20, 20, 3000, dtype=torch.int32),
        "same_low_bits": torch.arange(500) * 2**40,
        "same_high_bits": torch.arange(500).flip(0) + 2**62,
    }.items():
        yield Sample(operator, name, (x,))


def unique_rows_samples(operator: str) -> Iterator[Sample]:
    yield Sample(operator, "by_hand", (torch.tensor([[7, 1], [7, 2], [7, 1], [0, 0], [7, 2]]),), representative=True)
    for dtype in INTEGERS:
        word = str(dtype).removeprefix("torch.")
        numbers = torch.tensor(extremes(dtype), dtype=torch.uint64 if dtype == torch.uint64 else torch.int64)
        columns = [numbers.view(torch.int64).roll(step) for step in (0, 5, 0)]
        bits = torch.stack(columns, 1).repeat(2, 1)
        yield Sample(operator, f"extremes_{word}", (bits.view(torch.uint64).to(dtype),))
    # Rows of 0 to 40 bytes, aligned or not.
    for columns in (0, 1, 2, 3, 4, 7, 8, 9, 16, 40):
        for dtype in (torch.uint8, torch.int32, torch.int64):
            x = Random(columns).integers(0, 2, 300 * columns, dtype=dtype).view(300, columns)
            yield Sample(operator, f"rows_of_{columns}_{str(dtype).removeprefix('torch.')}", (x,))
    wide = Random(5).integers(-(2**62), 2**62, 20 * 90, dtype=torch.int64).view(20, 90)
    last = wide.clone()
    last[:, -1] += 1
    for name, x in {
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "empty_without_columns": torch.empty(0, 0, dtype=torch.int32),
        "vector": torch.tensor([5, 6, 5], dtype=torch.int16),
        "one": torch.tensor([[-5, 3, 2]], dtype=torch.int32),
        "rank_3": Random(6).integers(0, 2, 200 * 4, dtype=torch.int16).view(200, 2, 2),
        "all_the_same": torch.full((1000, 3), -(2**62)),
        "all_distinct": torch.arange(6000).view(2000, 3),
        "differ_in_the_last_element": torch.cat([wide, last, wide.flip(0)]),
        "permuted_elements": torch.tensor([[1, 2, 3], [3, 2, 1], [2, 1, 3], [1, 2, 3]]),
    }.items():
        yield Sample(operator, name, (x,))


_DISTINCT = ReadBack("the number of distinct values")
FAMILY = Family(
    samples={"unique": unique_samples, "unique_with_counts": unique_samples, "unique_rows": unique_rows_samples},
    read_backs={"unique": _DISTINCT, "unique_with_counts": _DISTINCT, "unique_rows": _DISTINCT},
)
