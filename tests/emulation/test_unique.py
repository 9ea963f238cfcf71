"""The CUDA kernels of unique and of the hashes, run without a GPU in every order of threads: the CPU's bits."""

from __future__ import annotations

import pytest
import torch
from ops.test_hash import DTYPES, assorted

from emulation.fixture import check


def ids(n: int, low: int, high: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, (n,), generator=torch.Generator().manual_seed(seed))


# ---- unique ---------------------------------------------------------------------------------------------------------

# Sizes near warps, tiles of 1024 elements and 2000 (from which the emulated kernel's positions have 64 bits), and more
# tiles than blocks run.
SIZES = [0, 1, 2, 31, 32, 33, 255, 257, 1023, 1025, 1999, 2000, 5000, 7001]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["equal", "few", "popular", "distinct", "spread"])
def test_unique_of_every_size(n: int, kind: str) -> None:
    """Count more values than a block has counters, too."""
    x = {
        "equal": torch.full((n,), -7),
        "few": ids(n, -3, 4),
        "popular": (ids(n, 1, 2**40).double() ** 0.25).long() - 100,
        "distinct": torch.randperm(n, generator=torch.Generator().manual_seed(n)) * 2**32,
        "spread": ids(n, -(2**63), 2**63 - 1)[ids(n, 0, max(n // 2, 1))],
    }[kind]
    check("unique_with_counts", x)
    check("unique", x.flip(0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [3, 300, 1999, 5000])
def test_unique_of_every_dtype(n: int, dtype: torch.dtype) -> None:
    """Use all bits, the limits, and the value whose bits are all ones."""
    size = torch.empty(0, dtype=dtype).element_size()
    bits = ids(n, -(2**63), 2**63 - 1, seed=1)[ids(n, 0, n // 2 + 1, seed=2)].view(dtype)[:: 8 // size].clone()
    info = torch.iinfo(dtype)
    limits = torch.tensor([info.max, info.min, 0, info.max, info.min, 1, 0], dtype=dtype)
    ones = torch.full((2,), -1, dtype=torch.int64).view(dtype)
    check("unique_with_counts", torch.cat([bits, limits, ones, bits[: n // 3]]))
    check("unique", bits[1:])


def colliding(n: int, top: int) -> torch.Tensor:
    """Return values whose hashes (scattered() in unique.cu) agree in the upper 24 bits and in the lower 8, 0x5a."""
    word = 2**64
    first, second = (pow(m, -1, word) for m in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93))
    values = []
    for middle in range(n):
        h = top << 40 | middle << 8 | 0x5A
        h = (h ^ h >> 32) * second % word
        values.append((h ^ h >> 32) * first % word)
    return torch.tensor(values, dtype=torch.uint64).view(torch.int64)


@pytest.mark.parametrize("n", [20, 600, 3000])
@pytest.mark.parametrize("top", [0, 0x800000, 0xFFFFFF])
def test_unique_of_values_made_to_collide(n: int, top: int) -> None:
    """Share slot and tag; the last slot's neighbour is the first. 0, whose hash is 0, finds slot 0 taken."""
    values = colliding(n, top)
    hashes = [int(x) * 0x9E3779B97F4A7C15 % 2**64 for x in values]
    hashes = [(h ^ h >> 32) * 0xD6E8FEB86659FD93 % 2**64 for h in hashes]
    assert {((h ^ h >> 32) >> 40, (h ^ h >> 32) & 0xFF) for h in hashes} == {(top, 0x5A)}
    check("unique_with_counts", torch.cat([values, values.flip(0), values[: n // 2], torch.tensor([0, 0])]))


# ---- to_hash_bucket_fast --------------------------------------------------------------------------------------------


def extremes(dtype: torch.dtype) -> list[int]:
    """Return 0, the limits of the dtype, and the numbers around every power of ten within them."""
    info = torch.iinfo(dtype)
    near = [sign * 10**k + d for k in range(20) for d in (-1, 0, 1) for sign in (-1, 1)]
    return [v for v in [0, info.min, info.max, info.min + 1, info.max - 1, *near] if info.min <= v <= info.max]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hash_around_every_power_of_ten(dtype: torch.dtype) -> None:
    """Hash numbers of every length of text too, with either sign."""
    for num_buckets in (1, 2, 997, 2**31 + 11, 2**63 - 1):
        check("to_hash_bucket_fast", torch.tensor(extremes(dtype), dtype=dtype), num_buckets)
        check("to_hash_bucket_fast", assorted(1500, seed=num_buckets % 1000).view(dtype)[:3001], num_buckets)


@pytest.mark.parametrize("n", [0, 1, 2, 255, 257, 1537, 5000])
def test_hash_of_every_size(n: int) -> None:
    check("to_hash_bucket_fast", assorted(n, seed=n), 1009)
    check("to_hash_bucket_fast", assorted(2 * n + 1)[1:].reshape(2, n), 1009)


def test_hash_of_every_digit() -> None:
    """Hash every digit in every place, and numbers beside the borders of blocks of digits, where none may carry."""
    values = [d * 10**k + rest for k in range(19) for d in range(1, 10) for rest in (0, 1, 9)]
    values += [q * 10**k - 1 for k in (4, 8, 12, 16) for q in (1, 2, 99, 921)]
    check("to_hash_bucket_fast", torch.tensor([v for x in values for v in (x, -x) if x < 2**63]), 2**63 - 1)
    many = [q * 10**16 + d for q in range(1, 1844) for d in (-1, 0)]
    check("to_hash_bucket_fast", torch.tensor(many, dtype=torch.uint64), 2**63 - 1)


# ---- string_to_hash_bucket_fast -------------------------------------------------------------------------------------


def random_bytes(n: int, seed: int = 0) -> torch.Tensor:
    return ids(n, 0, 256, seed).to(torch.uint8)


def hash_strings(lengths: list[int], seed: int = 0) -> None:
    """Hash strings that fill their tensor of bytes."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    check("string_to_hash_bucket_fast", random_bytes(int(offsets[-1]), seed), offsets, 2**63 - 1)


@pytest.mark.parametrize("shift", range(8))
def test_strings_of_every_length_at_every_alignment(shift: int) -> None:
    hash_strings([shift, *range(201)], seed=shift)
    hash_strings([*range(200, -1, -1), shift], seed=shift)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
def test_strings_at_the_ends_of_the_bytes(length: int) -> None:
    """Read no bytes before the tensor and behind it: AddressSanitizer watches."""
    for before in range(6):
        for behind in range(6):
            hash_strings([before, length, behind], seed=before)


def test_strings_alone() -> None:
    for length in range(201):
        hash_strings([length], seed=length)


def test_strings_of_bytes_that_start_anywhere() -> None:
    """Hash views: the tensor's address is no multiple of a word's size."""
    lengths = [3, 0, 9, 17, 1, 40, 5, 64, 100, 8]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    size = int(offsets[-1])
    for shift in range(1, 9):
        check("string_to_hash_bucket_fast", random_bytes(size + shift)[shift:], offsets, 997)
