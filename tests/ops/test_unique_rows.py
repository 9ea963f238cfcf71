"""unique along a dimension: rows whose hashes collide, every dimension, and refused inputs."""

import pytest
import torch
from torch import Tensor

from torchsparse_rec.compat._parity.reference.unique import unique_rows
from torchsparse_rec.ops import unique, unique_with_counts

pytestmark = pytest.mark.usefixtures("kernels")

WORD = 2**64
FIRST, SECOND = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93


def check(x: Tensor, dim: int) -> None:
    """Compare with the reference, whose rows are the slices."""
    slices = x.movedim(dim, 0)
    first, inverse, counts = unique_rows(slices)
    got = unique_with_counts(x, dim)
    assert torch.equal(got.inverse, inverse) and torch.equal(got.counts, counts)
    assert got.values.dtype == x.dtype and got.values.movedim(dim, 0).tolist() == [slices[i].tolist() for i in first]
    values, plain = unique(x, dim)
    assert torch.equal(values, got.values) and torch.equal(plain, got.inverse)


def mixed(x: int) -> int:
    """Hash an integer by the function of this name in csrc/cpu/unique_rows.cpp."""
    x = x * FIRST % WORD
    return x ^ x >> 32


def scattered(x: int) -> int:
    """Hash an integer by the function of this name in csrc/cuda/unique.cu."""
    h = x * FIRST % WORD
    h = (h ^ h >> 32) * SECOND % WORD
    return h ^ h >> 32


def unscattered(h: int) -> int:
    """Return the integer whose scattered() is h."""
    h = (h ^ h >> 32) * pow(SECOND, -1, WORD) % WORD
    return (h ^ h >> 32) * pow(FIRST, -1, WORD) % WORD


def as_rows(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint64).view(torch.int64)


@pytest.mark.parametrize("n", [2, 100, 1500])
def test_rows_made_to_collide_on_the_cpu(n: int) -> None:
    rows = as_rows([[a, mixed(a) ^ 12345] for a in range(n)])
    check(torch.cat([rows, rows.flip(0), rows[: n // 2]]), 0)


@pytest.mark.parametrize("n", [2, 100, 700])
def test_rows_made_to_collide_on_cuda(n: int) -> None:
    places = [scattered(1), scattered(2)]
    rows = []
    for a in range(n):
        rest = (777 - scattered(a ^ places[0])) % WORD
        rows.append([a, unscattered(rest) ^ places[1]])
        assert sum(scattered(unit ^ place) for unit, place in zip(rows[-1], places, strict=True)) % WORD == 777
    x = as_rows(rows)
    check(torch.cat([x, x.flip(0), x[: n // 2]]), 0)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint16, torch.int64, torch.uint64], ids=str)
def test_every_dimension(dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(dim)
    x = torch.randint(0, 2, (6, 5, 4), generator=generator).to(dtype)
    check(torch.cat([x, x], dim), dim)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0), (2, 0, 3), (0,)])
def test_slices_without_elements_are_equal(shape: tuple[int, ...]) -> None:
    for dim in range(len(shape)):
        check(torch.empty(shape, dtype=torch.int32), dim)


def test_last_elements_and_unaligned_rows_count() -> None:
    x = torch.randint(0, 100, (40 * 11 + 1,), dtype=torch.uint8)[1:].view(40, 11)
    other = x.clone()
    other[:, -1] += 1
    check(torch.cat([x, other, x]), 0)
    check(x, 0)


def test_errors_name_the_argument_and_the_value() -> None:
    for dim in (2, -3):
        with pytest.raises(IndexError, match=rf"^unique: dim must be in \[-2, 2\), got {dim}$"):
            unique(torch.zeros(2, 3, dtype=torch.int64), dim)
    with pytest.raises(IndexError, match=r"dim must be in \[0, 0\), got 0"):
        unique_with_counts(torch.tensor(3), 0)
    with pytest.raises(ValueError, match=r"^unique_rows: x must have an integer dtype, got Float"):
        unique(torch.zeros(2, 3), 0)
    with pytest.raises(ValueError, match=r"^unique_rows: x must have rank 1 or more, got a scalar"):
        torch.ops.torchsparse_rec.unique_rows.default(torch.tensor(3))
