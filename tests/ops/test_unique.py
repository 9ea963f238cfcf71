"""unique and unique_with_counts: first-appearance order, against plain Python."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from devices import cpu_only
from torch import Tensor

from torchsparse_rec.compat._parity.reference import unique as reference
from torchsparse_rec.ops import unique, unique_with_counts

pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


def assert_equal(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for result, expected in zip(results, wanted, strict=True):
        assert result.dtype == expected.dtype and torch.equal(result, expected)


def check(x: Tensor) -> None:
    """Check both operators against the reference, with dtypes."""
    wanted = reference.unique_with_counts(x)
    assert_equal(unique_with_counts(x), wanted)
    assert_equal(unique(x), wanted[:2])


@pytest.fixture(params=[1, 2, 3])
def threads(request, restore_threads):
    """Set each number of threads in turn, and restore the former one afterwards."""
    torch.set_num_threads(request.param)
    return request.param


def random_ids(n: int, span: int, seed: int = 0) -> Tensor:
    """Return n ids in a window of ``span`` around 0, both ends of it included."""
    low = -(span // 2)
    x = torch.randint(low, low + span, (n,), generator=torch.Generator().manual_seed(seed))
    if n > 2:
        x[n // 2], x[n // 3] = low, low + span - 1
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 2, 300, 20_000])
def test_unique_every_dtype_over_its_whole_range(dtype, n):
    info = torch.iinfo(dtype)
    bits = torch.randint(-(2**63), 2**63 - 1, (n,), generator=torch.Generator().manual_seed(1))
    few = bits[torch.randint(0, max(1, n // 2), (n,), generator=torch.Generator().manual_seed(2))]
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(dtype, dtype)
    check(few.to(signed).view(dtype))
    check(torch.tensor([info.max, info.min, info.max, info.min, 1] * (n // 5 + 1), dtype=dtype))


@cpu_only
@pytest.mark.parametrize("value", [0, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("n", [1, 16_384, 16_385, 100_000])
def test_unique_all_equal(n, value, threads):
    values, inverse, counts = unique_with_counts(torch.full((n,), value))
    assert values.tolist() == [value] and counts.tolist() == [n]
    assert inverse.eq(0).all() and inverse.shape == (n,)


# Up to 16384 keys one table serves; ranges up to N (65536 for more keys) have a table by value; 49153 keys and more are
# cut into more than two partitions; every 32768 keys are worth a thread.
@cpu_only
@pytest.mark.parametrize("n", [5, 16_383, 16_384, 16_385, 49_153, 65_535, 65_536, 98_305])
def test_unique_around_every_threshold(n, restore_threads):
    for span in sorted({n // 4 + 1, n - 1, n, n + 1, 65_536, 65_537, 2**62}):
        x = random_ids(n, span)
        wanted = reference.unique_with_counts(x)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert_equal(unique_with_counts(x), wanted)
            assert_equal(unique(x), wanted[:2])


@cpu_only
@pytest.mark.parametrize("n", [1000, 40_000])
@pytest.mark.parametrize("edge", [-(2**63), 2**63 - 1])
def test_unique_range_at_the_ends_of_int64(n, edge, threads):
    offsets = torch.randint(0, 500, (n,), generator=torch.Generator().manual_seed(3))
    check(edge + offsets if edge < 0 else edge - offsets)
    x = edge + offsets if edge < 0 else edge - offsets
    x[n // 3] = -1 - edge
    check(x)


@cpu_only
def test_unique_hot_keys_in_one_partition(threads):
    generator = torch.Generator().manual_seed(4)
    keys = torch.randint(-(2**62), 2**62, (50_000,), generator=generator)
    hot = keys[torch.randint(0, 3, (60_000,), generator=generator)]
    check(torch.cat([hot, keys])[torch.randperm(110_000, generator=generator)])


def colliding_keys(n: int) -> Tensor:
    """Return n different keys whose hashes (mix_key in csrc/cpu/unique_hashed.h) agree in their top 43 bits."""
    first, second = (np.uint64(pow(m, -1, 2**64)) for m in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93))
    h = (np.uint64(0x5EEDC0DE << 32) | np.arange(n, dtype=np.uint64)) * second
    return torch.from_numpy(((h ^ (h >> np.uint64(32))) * first).view(np.int64))


@cpu_only
@pytest.mark.parametrize(
    "n", [4_000, 10_000, pytest.param(2_000_000, marks=pytest.mark.always("with fewer keys it could not fail"))]
)
def test_unique_keys_made_to_collide_are_not_quadratic(n, threads):
    """Finish in time: the square of the largest number is hours of steps, and the test would be ended as hanging."""
    keys = colliding_keys(n)
    x = torch.cat([keys, keys.flip(0)])
    values, inverse, counts = unique_with_counts(x)
    assert torch.equal(values, keys)
    assert torch.equal(inverse, torch.cat([torch.arange(n), torch.arange(n).flip(0)]))
    assert counts.eq(2).all() and counts.shape == (n,)


def test_unique_of_a_strided_vector():
    x = torch.arange(30).reshape(10, 3) // 7
    check(x[:, 1])
    check(random_ids(60_000, 2**40)[::3])


def test_unique_leaves_its_input_alone():
    x = random_ids(50_000, 2**40)
    copy = x.clone()
    unique_with_counts(x)
    assert torch.equal(x, copy)


@pytest.mark.parametrize(("function", "name"), [(unique, "unique"), (unique_with_counts, "unique_with_counts")])
def test_unique_errors_name_the_argument_and_the_value(function, name):
    with pytest.raises(ValueError, match=rf"^{name}: x must have rank 1, got shape \[2, 3\]$"):
        function(torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=rf"^{name}: x must have rank 1, got shape \[\]$"):
        function(torch.tensor(3))
    for dtype in (torch.float32, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=rf"^{name}: x must have an integer dtype, got "):
            function(torch.zeros(3, dtype=dtype))
