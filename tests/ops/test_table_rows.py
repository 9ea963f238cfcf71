"""Rows of tables: their initial values, to the bit and as distributions; lookups and assignments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import NormalDist

import pytest
import torch
from calls import assert_same_bits
from devices import cpu_only
from pairs import in_pairs
from samples.sample import FLOATS, Random
from samples.table import KINDS, filled, keys_of, state_of
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.table_rows import initial_row, key_of_numbers, rounded, uniform_number

pytestmark = pytest.mark.usefixtures("kernels")

each_kind = pytest.mark.parametrize("kind", KINDS)
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=str)
TWO_NUMBERS = ["uniform", "normal", "truncated_normal"]


def _initial(
    keys: Sequence[int] | Tensor, dim: int, dtype: torch.dtype, kind: str, parameters: Sequence[float], seed: int = 0
) -> Tensor:
    """Return the initial values of keys, in their order."""
    keys = torch.as_tensor(keys)
    weight = torch.full((len(keys), dim), torch.nan, dtype=dtype)
    ops.table_initialize_(weight, torch.arange(len(keys)), keys, kind=kind, parameters=parameters, seed=seed)
    return weight


def _reference(keys: Sequence[int], dim: int, dtype: torch.dtype, kind: str, seed: int) -> Tensor:
    like = torch.empty(0, dim, dtype=dtype)
    return torch.stack([initial_row(like, key, None, *KINDS[kind], seed) for key in keys])


# ---- Initial values: to the bit -------------------------------------------------------------------------------------


@in_pairs(kind=KINDS, dtype=FLOATS, seed=[0, 1, -1, 2**63 - 1, -(2**63)])
def test_initial_values_to_the_bit(kind: str, dtype: torch.dtype, seed: int) -> None:
    keys = keys_of(12, seed=seed % 100)
    assert_same_bits(_initial(keys, 9, dtype, kind, KINDS[kind][1], seed), _reference(keys, 9, dtype, kind, seed))


@each_kind
def test_initial_values_depend_on_seed_key_and_column_alone(kind: str) -> None:
    """Vary order, batch, row, number of columns and the keys' dtype: the values stay the same."""
    parameters = KINDS[kind][1]
    keys = keys_of(70, dtype=torch.int32)
    wanted = _initial(keys, 33, torch.float32, kind, parameters, 5)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor(keys)
    assert_same_bits(_initial(ids[order], 33, torch.float32, kind, parameters, 5), wanted[order])
    assert_same_bits(_initial(ids.int(), 33, torch.float32, kind, parameters, 5), wanted)
    assert_same_bits(_initial(ids, 4, torch.float32, kind, parameters, 5), wanted[:, :4].contiguous())
    for i in (0, 13, 69):
        assert_same_bits(_initial(keys[i : i + 1], 33, torch.float32, kind, parameters, 5), wanted[i : i + 1])
    weight = torch.zeros(200, 33)
    rows = torch.randperm(200, generator=torch.Generator().manual_seed(2))[:70]
    ops.table_initialize_(weight, rows, ids, kind=kind, parameters=parameters, seed=5)
    assert_same_bits(weight[rows], wanted)
    if kind != "constant":
        assert wanted.unique().numel() == wanted.numel()
        assert not torch.isin(_initial(keys, 33, torch.float32, kind, parameters, 6), wanted).any()


def test_other_rows_and_negative_ones_are_left_alone() -> None:
    weight = torch.full((6, 3), torch.nan)
    ops.table_initialize_(weight, torch.tensor([4, -1, 0, -(2**63)]), torch.tensor([1, 2, 3, 4]), parameters=(2.0,))
    assert weight.isnan().all(1).tolist() == [False, True, True, True, False, True]
    assert weight[[0, 4]].eq(2).all()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        # A little above the middle of two float16 (bfloat16): float32 would round to the middle, which is rounded down.
        (torch.float16, 1 + 2**-11 + 2**-40),
        (torch.float16, -(2**-14 + 2**-25 + 2**-60)),
        (torch.bfloat16, 1 + 2**-8 + 2**-40),
        (torch.bfloat16, 1 + 2**-8 - 2**-40),
        (torch.bfloat16, 3 * 2.0**-134 + 2.0**-134 * 2**-30),
        (torch.float16, 1 + 3 * 2**-11 - 2**-40),
        (torch.float32, 1 + 2**-24 + 2**-50),
        (torch.float16, 65519.999),
        (torch.float16, 65520.0),
        (torch.float16, 3e-8),
        (torch.float16, 2.9e-8),
        (torch.bfloat16, 3.3961775292304596e38),
        (torch.float32, 1e-45),
        (torch.float64, 0.1),
    ],
)
def test_values_are_rounded_once(dtype: torch.dtype, value: float) -> None:
    wanted = torch.tensor([[rounded(value, dtype)]], dtype=torch.float64).to(dtype)
    assert_same_bits(_initial([5], 1, dtype, "constant", [value]), wanted)
    # A uniform distribution of no width gives the same number.
    assert_same_bits(_initial([5], 1, dtype, "uniform", [value, value]), wanted)


@each_float
@pytest.mark.parametrize("kind", TWO_NUMBERS)
def test_half_types_are_the_float64_values_rounded(kind: str, dtype: torch.dtype) -> None:
    keys = keys_of(300)
    exact = _initial(keys, 16, torch.float64, kind, KINDS[kind][1])
    wanted = [[rounded(x, dtype) for x in row] for row in exact.tolist()]
    actual = _initial(keys, 16, dtype, kind, KINDS[kind][1])
    assert_same_bits(actual, torch.tensor(wanted, dtype=torch.float64).to(dtype))


@each_float
def test_default_rows_are_copied_by_the_remainder_of_the_key(dtype: torch.dtype) -> None:
    """Copy rows for negative keys too, whose remainder is not negative."""
    keys = keys_of(40)
    for count in (1, 7, 64):
        values = Random(count).floats(count, 5, dtype=dtype)
        values[0, 0] = torch.nan
        weight = torch.zeros(50, 5, dtype=dtype)
        ops.table_initialize_(weight, torch.arange(40), torch.tensor(keys), values=values)
        assert_same_bits(weight[:40], values[[key % count for key in keys]])
        assert not weight[40:].any()


# ---- Initial values: as distributions -------------------------------------------------------------------------------

# Draws where the approximation changes its formula, in the middle, and at the ends of the 32 bits.
BITS = [0, 1, 2**32 - 1, 2**32 - 2, 2**31 - 1, 2**31, *(int(0.02425 * 2**32) + k for k in (-1, 0, 1))]
BITS += [2**32 - 1 - x for x in BITS[-3:]] + [2**k for k in range(1, 31)]


def _drawn(bits: Sequence[int], kind: str, parameters: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the values for these draws of 32 bits each, by keys made to draw them in column 3."""
    keys = [key_of_numbers(17, 1, 99, x) for x in bits]
    assert all(uniform_number(17, key, 3) == (x + 0.5) / 2**32 for key, x in zip(keys, bits, strict=True))
    return _initial(keys, 4, dtype, kind, parameters, 17)[:, 3]


def test_normal_values_are_those_of_the_inverse_distribution_function() -> None:
    """Compare with another computation, of 16 digits."""
    bits = BITS + Random(1).integers(0, 2**32, 2000, dtype=torch.int64).tolist()
    standard = NormalDist()
    low = standard.cdf(-2)
    for kind, of in {
        "normal": lambda u: standard.inv_cdf(u),
        "truncated_normal": lambda u: standard.inv_cdf(low + (1 - 2 * low) * u),
    }.items():
        wanted = torch.tensor([of((x + 0.5) / 2**32) for x in bits], dtype=torch.float64)
        torch.testing.assert_close(_drawn(bits, kind, [0.0, 1.0]), wanted, rtol=1.15e-9, atol=1e-15)
        torch.testing.assert_close(_drawn(bits, kind, [7.0, 0.5]), 7 + wanted / 2, rtol=0, atol=4e-9)


def test_values_are_symmetric() -> None:
    mirrored = [2**32 - 1 - x for x in BITS]
    for kind in ("normal", "truncated_normal"):
        torch.testing.assert_close(
            _drawn(BITS, kind, [0.0, 1.0]), -_drawn(mirrored, kind, [0.0, 1.0]), rtol=0, atol=1e-8
        )


@each_float
def test_bounds(dtype: torch.dtype) -> None:
    """Keep all draws of 32 bits within the bounds after rounding; before rounding, none is a bound itself."""
    uniform = _drawn(BITS, "uniform", [-0.5, 0.25], dtype)
    assert uniform.min() >= -0.5 and uniform.max() <= 0.25
    truncated = _drawn(BITS, "truncated_normal", [1.0, 0.25], dtype)
    assert truncated.min() >= 0.5 and truncated.max() <= 1.5
    normal = _drawn(BITS, "normal", [0.0, 1.0], dtype)
    assert normal.isfinite().all() and 6.2 < normal.max() < 6.4 and -6.4 < normal.min() < -6.2
    if dtype == torch.float64:
        assert uniform.min() > -0.5 and uniform.max() < 0.25
        assert truncated.min() > 0.5 and truncated.max() < 1.5


def _distance(values: Tensor, distribution: Callable[[Tensor], Tensor]) -> float:
    """Return the Kolmogorov-Smirnov statistic: the largest difference of distribution functions, times sqrt(n)."""
    n = len(values)
    expected = distribution(values.sort().values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum(steps[1:] - expected, expected - steps[:-1]).max()) * n**0.5


LOW = NormalDist().cdf(-2)
# Mean, deviation and distribution function of each kind with the parameters 0 and 1.
SHAPES: dict[str, tuple[float, float, Callable[[Tensor], Tensor]]] = {
    "uniform": (0.5, 12**-0.5, lambda x: x),
    "normal": (0.0, 1.0, torch.special.ndtr),
    "truncated_normal": (0.0, 0.8796256610342398, lambda x: (torch.special.ndtr(x) - LOW) / (1 - 2 * LOW)),
}


@pytest.mark.parametrize("keys", ["from_0", "far_apart", "random"])
@pytest.mark.parametrize("kind", TWO_NUMBERS)
def test_distributions(kind: str, keys: str) -> None:
    """Compare over many keys, over many columns, and over neighbours, which must not resemble each other."""
    n = 400
    ids = {
        "from_0": torch.arange(n),
        "far_apart": torch.arange(n) * 2**54 - 2**61,
        "random": Random(3).integers(-(2**63), 2**63 - 1, n, dtype=torch.int64),
    }[keys]
    values = _initial(ids, n, torch.float64, kind, [0.0, 1.0], 12)
    mean, deviation, distribution = SHAPES[kind]
    flat = (values - mean) / deviation
    assert flat.mean().abs() < 4 / n
    assert (flat.std() - 1).abs() < 4 / n
    assert _distance(values.flatten(), distribution) < 1.95, "more than that has one sample of a thousand"
    for lag in (1, 2, 3, 64):
        assert (flat[lag:] * flat[:-lag]).mean().abs() < 4.5 / n
        assert (flat[:, lag:] * flat[:, :-lag]).mean().abs() < 4.5 / n
    assert flat.mean(0).abs().max() < 4.5 / n**0.5 and flat.mean(1).abs().max() < 4.5 / n**0.5


def test_seeds_give_unrelated_values() -> None:
    ids = torch.arange(300)
    values = [_initial(ids, 300, torch.float64, "normal", [0.0, 1.0], seed) for seed in (0, 1, 2, -1, 2**62)]
    for i, x in enumerate(values):
        for y in values[:i]:
            assert (x * y).mean().abs() < 4.5 / 300


# ---- Lookups --------------------------------------------------------------------------------------------------------


@in_pairs(dim=[0, 1, 7, 16, 130], kind=[*KINDS, "values", "missing"], dtype=FLOATS)
def test_lookup_is_find_and_gather_and_initial_values(dim: int, kind: str, dtype: torch.dtype) -> None:
    keys = keys_of(50)
    index, entries, _, _ = state_of(filled(6, 60, keys[:40], 3))
    weight = Random(1).floats(60, dim, dtype=dtype)
    ids = torch.tensor(keys)[Random(2).integers(0, 50, 90, dtype=torch.int64)]
    options: dict[str, object] = {"seed": 3}
    if kind in KINDS:
        options |= {"kind": kind, "parameters": KINDS[kind][1]}
    else:
        options["values"] = Random(4).floats(5, dim, dtype=dtype)
    wanted = torch.full((90, dim), torch.nan, dtype=dtype)
    ops.table_initialize_(wanted, torch.arange(90), ids, **options)
    if kind == "missing":
        options["missing"] = Random(5).floats(dim, dtype=dtype)
        wanted = options["missing"].expand(90, dim)
    rows = ops.table_find(index, entries, ids)
    assert 10 < (rows < 0).sum() < 80
    wanted = torch.where(rows[:, None] < 0, wanted, weight[rows])
    before = [x.clone() for x in (index, entries, weight)]
    assert_same_bits(ops.table_lookup(index, entries, weight, ids, **options), wanted)
    for x, y in zip((index, entries, weight), before, strict=True):
        assert_same_bits(x, y)


# ---- Assignments ----------------------------------------------------------------------------------------------------


def test_assignment_copies_bits() -> None:
    bits = torch.tensor([[0x7FC12345, -0x80000000, 1]], dtype=torch.int32)
    weight = torch.zeros(2, 3)
    ops.table_assign_(weight, torch.tensor([1]), bits.view(torch.float32))
    assert weight.view(torch.int32).tolist() == [[0, 0, 0], bits[0].tolist()]


# ---- Size and threads -----------------------------------------------------------------------------------------------

LARGE = 330_000


def _each_number_of_threads(call: Callable[[], Tensor]) -> Tensor:
    torch.set_num_threads(1)
    wanted = call()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_same_bits(call(), wanted)
    return wanted


@cpu_only
def test_large_batches_are_the_same_for_every_number_of_threads(restore_threads: None) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(-(2**63), 2**63 - 1, (50_000,), generator=generator)
    entries, counters = torch.full((40_000, 2), -1), torch.zeros(8, dtype=torch.int64)
    index = ops.table_rehash(entries, counters, 5_000)
    ops.table_find_or_insert_(index, entries, counters, torch.empty(0, dtype=torch.int32), keys[:40_000])
    picked = torch.randint(0, 50_000, (LARGE,), generator=generator)
    normal = {"kind": "normal", "parameters": (0.0, 1.0), "seed": 9}

    def initialized() -> Tensor:
        weight = torch.zeros(50_000, 5)
        ops.table_initialize_(weight, torch.arange(50_000), keys, **normal)
        return weight

    start = _each_number_of_threads(initialized)
    weight = torch.arange(200_000.0).reshape(40_000, 5)
    found = _each_number_of_threads(lambda: ops.table_lookup(index, entries, weight, keys[picked], **normal))
    assert_same_bits(found, torch.cat([weight, start[40_000:]])[picked])

    def assigned() -> Tensor:
        result = torch.zeros(50_000, 5)
        ops.table_assign_(result, picked, found + torch.arange(LARGE)[:, None])
        return result

    last = torch.full((50_000,), -1).scatter_reduce(0, picked, torch.arange(LARGE), "amax")
    wanted = torch.where(last[:, None] < 0, 0, found[last] + last[:, None])
    assert_same_bits(_each_number_of_threads(assigned), wanted)
