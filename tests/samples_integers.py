"""Sample inputs of the families ``unique`` and ``hash``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sample import Random, Sample
from torch import Tensor

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


def _extremes(dtype: torch.dtype) -> list[int]:
    info = torch.iinfo(dtype)
    return [0, info.max, info.min, info.max - 1, 1, info.min, info.max, 0, info.min + 1, 1]


def unique_samples(operator: str) -> Iterator[Sample]:
    yield Sample(operator, "by_hand", (torch.tensor([7, -1, 7, 3, -1, 7]),), representative=True)
    for dtype in INTEGERS:
        word = str(dtype).removeprefix("torch.")
        yield Sample(operator, f"extremes_{word}", (torch.tensor(_extremes(dtype), dtype=dtype),))
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
        extremes = torch.tensor(_extremes(dtype), dtype=torch.uint64 if dtype == torch.uint64 else torch.int64)
        columns = [extremes.view(torch.int64).roll(step) for step in (0, 5, 0)]
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


def _numbers_of_every_length() -> Tensor:
    """Decimal texts of 1 to 19 digits, at both ends of each length, with both signs, and the extremes."""
    positive = [n for digits in range(19) for n in (10**digits, 2 * 10**digits + 7, 10 ** (digits + 1) - 1)]
    numbers = {sign * n for n in positive for sign in (1, -1) if n < 2**63} | {0, 2**63 - 1, -(2**63), -(2**63) + 1}
    return torch.tensor(sorted(numbers))


def integer_hash_samples(operator: str) -> Iterator[Sample]:
    yield Sample(operator, "by_hand", (torch.tensor([0, 1, -1, 42]), 10), representative=True)
    for buckets in (1, 2, 3, 1000, 2**31, 2**32 + 1, 2**62, 2**63 - 1):
        yield Sample(operator, f"every_length_{buckets}_buckets", (_numbers_of_every_length(), buckets))
    for dtype in INTEGERS:
        word = str(dtype).removeprefix("torch.")
        yield Sample(operator, f"extremes_{word}", (torch.tensor(_extremes(dtype), dtype=dtype), 2**63 - 1))
    for name, x in {
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "scalar": torch.tensor(-17),
        "rank_3": Random(1).integers(-(2**31), 2**31, 3, 4, 5, dtype=torch.int64),
        "random": Random(2).integers(-(2**63), 2**63 - 1, 1003, dtype=torch.int64),
        "random_int32": Random(3).integers(0, 2**31, 1003, dtype=torch.int32),
        "largest_uint64": torch.tensor([2**64 - 1, 2**63, 10**19, 10**19 - 1], dtype=torch.uint64),
    }.items():
        yield Sample(operator, name, (x, 2**61 - 1))


def _string_hash_sample(operator: str, name: str, texts: list[bytes], buckets: int, **flags: bool) -> Sample:
    lengths = torch.tensor([0] + [len(text) for text in texts])
    data = torch.tensor(list(b"".join(texts)), dtype=torch.uint8)
    return Sample(operator, name, (data, lengths.cumsum(0), buckets), **flags)


def string_hash_samples(operator: str) -> Iterator[Sample]:
    random = Random(5)
    every_length = [
        bytes(random.integers(0, 256, length, dtype=torch.uint8).tolist()) for length in (*range(200), 511, 4096)
    ]
    yield _string_hash_sample(operator, "by_hand", [b"a", b"", b"hello", b"a"], 1000, representative=True)
    for buckets in (1, 7, 2**31, 2**63 - 1):
        yield _string_hash_sample(operator, f"every_length_{buckets}_buckets", every_length, buckets)
    yield _string_hash_sample(operator, "nul_and_invalid_utf8", [b"\0", b"\0\0", b"\xff\xfe", b"a\0b"], 2**40)
    yield _string_hash_sample(operator, "no_strings", [], 5)
    yield _string_hash_sample(operator, "only_empty_strings", [b"", b"", b""], 5)
    text = torch.tensor(list(b"unused hello unused"), dtype=torch.uint8)
    yield Sample(operator, "part_of_the_bytes", (text, torch.tensor([7, 12, 13]), 2**50))
