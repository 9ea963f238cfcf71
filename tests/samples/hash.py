"""Sample inputs of the family ``hash``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from samples.sample import Family, Random, ReadBack, Sample
from samples.unique import INTEGERS, extremes
from torch import Tensor


def _numbers_of_every_length() -> Tensor:
    """Return integers of 1 to 19 digits, at both ends of each length, with both signs, and the extremes."""
    positive = [n for digits in range(19) for n in (10**digits, 2 * 10**digits + 7, 10 ** (digits + 1) - 1)]
    numbers = {sign * n for n in positive for sign in (1, -1) if n < 2**63} | {0, 2**63 - 1, -(2**63), -(2**63) + 1}
    return torch.tensor(sorted(numbers))


# The keys of the strong hash, each used by some samples.
_KEYS = ((1, 2), (-1, -(2**63)), (2**63 - 1, 0))


def _arguments(operator: str, buckets: int) -> tuple[int, ...]:
    """Return the operator's arguments after its integers or strings."""
    if "fingerprint" in operator:
        return ()
    return (buckets, *_KEYS[buckets % len(_KEYS)]) if "strong" in operator else (buckets,)


def integer_hash_samples(operator: str) -> Iterator[Sample]:
    small = torch.tensor([0, 1, -1, 42])
    yield Sample(operator, "by_hand", (small, *_arguments(operator, 10)), representative=True)
    for buckets in (1, 2, 3, 1000, 2**31, 2**32 + 1, 2**62, 2**63 - 1):
        numbers = (_numbers_of_every_length(), *_arguments(operator, buckets))
        yield Sample(operator, f"every_length_{buckets}_buckets", numbers)
    for dtype in INTEGERS:
        word = str(dtype).removeprefix("torch.")
        yield Sample(
            operator, f"extremes_{word}", (torch.tensor(extremes(dtype), dtype=dtype), *_arguments(operator, 2**63 - 1))
        )
    for name, x in {
        "empty": torch.empty(0, 3, dtype=torch.int64),
        "scalar": torch.tensor(-17),
        "rank_3": Random(1).integers(-(2**31), 2**31, 3, 4, 5, dtype=torch.int64),
        "random": Random(2).integers(-(2**63), 2**63 - 1, 1003, dtype=torch.int64),
        "random_int32": Random(3).integers(0, 2**31, 1003, dtype=torch.int32),
        "largest_uint64": torch.tensor([2**64 - 1, 2**63, 10**19, 10**19 - 1], dtype=torch.uint64),
    }.items():
        yield Sample(operator, name, (x, *_arguments(operator, 2**61 - 1)))


def _string_hash_sample(operator: str, name: str, texts: list[bytes], buckets: int, **flags: bool) -> Sample:
    lengths = torch.tensor([0] + [len(text) for text in texts])
    data = torch.tensor(list(b"".join(texts)), dtype=torch.uint8)
    return Sample(operator, name, (data, lengths.cumsum(0), *_arguments(operator, buckets)), **flags)


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
    yield Sample(operator, "part_of_the_bytes", (text, torch.tensor([7, 12, 13]), *_arguments(operator, 2**50)))


def _jagged(random: Random, lengths: list[int], high: int = 2**62) -> tuple[Tensor, Tensor]:
    values = random.integers(-high, high, sum(lengths), dtype=torch.int64)
    return values, torch.tensor([0, *lengths]).cumsum(0)


def cross_samples(operator: str) -> Iterator[Sample]:
    random = Random(7)
    none = torch.empty(0, dtype=torch.int64)

    def sample(
        name: str, columns: list[tuple[Tensor, Tensor]], buckets: int = 0, key: int | None = 0xDECAFCAFFE, **flags: bool
    ) -> Sample:
        values, offsets = zip(*columns, strict=True)
        return Sample(operator, name, (list(values), list(offsets), buckets, key), **flags)

    def matrix(rows: int, width: int) -> tuple[Tensor, Tensor]:
        return random.integers(-(2**62), 2**62, rows, width, dtype=torch.int64), none

    small = [(torch.tensor([[1], [2]]), none), (torch.tensor([7, 8, 9]), torch.tensor([0, 2, 3]))]
    yield sample("by_hand", small, 100, -5, representative=True)
    yield sample("matrices", [matrix(5, 2), matrix(5, 1), matrix(5, 3)], representative=True)
    yield sample("jagged", [_jagged(random, [1, 3, 2]), _jagged(random, [2, 0, 4])], 2**62 + 1, 2**63 - 1)
    yield sample("one_value_in_every_row", [_jagged(random, [1] * 1300), matrix(1300, 1), matrix(1300, 1)], 1_000_003)
    lengths = [random.integers(0, 4, 600, dtype=torch.int64).tolist() for _ in range(4)]
    yield sample("many_rows", [_jagged(random, x) for x in lengths])
    yield sample("one_column", [_jagged(random, [3, 0, 1, 5])], 7, 0)
    yield sample(
        "extreme_values", [(torch.tensor([-1, 2**63 - 1, -(2**63), 0]), torch.tensor([0, 4]))] * 2, 1, -(2**63)
    )
    yield sample("without_a_key", [_jagged(random, [1] * 40), matrix(40, 1)], 2**50, None)
    yield sample("jagged_without_a_key", [_jagged(random, [3, 0, 1, 2]), matrix(4, 2)], 0, None)
    yield sample("one_column_without_a_key", [matrix(9, 3)], 1000, None)
    yield sample("no_rows", [_jagged(random, []), matrix(0, 3)])
    yield sample("no_values", [matrix(4, 0), _jagged(random, [1, 2, 3, 4])])
    yield sample("wide_row", [_jagged(random, [70, 1]), _jagged(random, [80, 1])], 2**40)
    yield sample("many_columns", [matrix(3, 1 + (c % 40 == 0)) for c in range(120)], 2**61 - 1)
    values = random.integers(0, 9, 20, dtype=torch.int64)
    yield sample("part_of_the_values", [(values, torch.tensor([3, 5, 9])), (values, torch.tensor([20, 20, 20]))])


def column_samples(operator: str) -> Iterator[Sample]:
    random = Random(8)

    def sample(name: str, columns: list[tuple[Tensor, int, int]], **flags: bool) -> Sample:
        return Sample(operator, name, tuple(map(list, zip(*columns, strict=True))), **flags)

    small = [(torch.tensor([3, -1, 0]), 0, 2), (torch.tensor([[7, -1], [-2, 8]], dtype=torch.int32), 10, 1)]
    yield sample("by_hand", small, representative=True)
    dtypes = [torch.tensor(extremes(dtype), dtype=dtype) for dtype in INTEGERS]
    for name, buckets in {"ids": 0, "hashes": 2**61 - 1}.items():
        for missing in range(3):
            yield sample(f"{name}_of_every_dtype_{missing}", [(x, buckets, missing) for x in dtypes])
    numbers = _numbers_of_every_length()
    yield sample("nothing_is_missing", [(numbers, 0, 0), (numbers, 1000, 0)], representative=True)
    yield sample("largest_uint64", [(torch.tensor([2**64 - 1, 2**63, 5], dtype=torch.uint64), b, 2) for b in (0, 9)])
    none = torch.empty(0, 3, dtype=torch.int64)
    yield sample("empty_columns", [(none, 0, 1), (torch.tensor(5), 7, 1), (none, 5, 0), (none, 0, 2)])
    yield sample("no_values", [(none, 3, 1)])
    # More columns than one launch takes, longer than a block, with few negative numbers.
    lengths = [1 + 700 * (c % 9 == 0) for c in range(130)]
    columns = [(random.integers(-2, 300, n, dtype=torch.int64), c % 2 * 999, c % 3) for c, n in enumerate(lengths)]
    yield sample("many_columns", columns)
    yield sample("long_columns", [(random.integers(-1, 10**6, 5000, dtype=torch.int64), b, 1) for b in (0, 12345)])


_HASHES = ("fingerprint64", "to_hash_bucket_fast", "to_hash_bucket_strong", "to_hash_bucket")
FAMILY = Family(
    samples={
        **dict.fromkeys(_HASHES, integer_hash_samples),
        **dict.fromkeys((f"string_{name}" for name in _HASHES), string_hash_samples),
        "column_ids": column_samples,
        "cross_hashed": cross_samples,
    },
    read_backs={"cross_hashed": ReadBack("the number of crosses", unless="with matrices alone")},
)
