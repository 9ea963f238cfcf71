"""CUDA's builtins and CUB's primitives in emulation, compared with the same computed in Python."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import reduce

import pytest

from emulation.test_emulation import ORDERS, _run_case

LANES = range(32)
_EXTREMES = [0, 2**64 - 1, 2**63, 1, 2**63 - 1, 2**31, 2**32 - 1, 2**32]
NAN = math.nan


# ---- What the cases of emulation/builtins.cu start from -------------------------------------------------------------


def _number(i: int) -> int:
    return _EXTREMES[i] if i < 8 else i * 0x9E3779B97F4A7C15 % 2**64


X = [_number(t) for t in LANES]
Y = [_number((t * 5 + 8) % 64) for t in LANES]


def _low(x: int) -> int:
    return x % 2**32


def _high(x: int) -> int:
    return x >> 32


def _signed(x: int, bits: int = 32) -> int:
    return (x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def _as_float(x: int) -> float:
    return struct.unpack("f", struct.pack("I", _low(x) & 0xBFFFFFFF))[0]


def _float_bits(x: float) -> int:
    return struct.unpack("I", struct.pack("f", x))[0]


def _double_bits(x: float) -> int:
    return struct.unpack("Q", struct.pack("d", x))[0]


def _number_of(x: float, other: float) -> float:
    """Return what CUDA's minimum and maximum of a NaN and a number are: the number."""
    return other if math.isnan(x) else x


def _first_set(x: int) -> int:
    return (x & -x).bit_length()


def _funnel(x: int, shift: int, right: bool) -> int:
    return _low(x >> shift) if right else _low(x << shift >> 32)


def _byte_perm(x: int, selector: int) -> int:
    digits = [selector >> 4 * i & 15 for i in range(4)]
    source = [x >> 8 * (digit & 7) & 255 for digit in digits]
    picked = [(255 if s >= 128 else 0) if d & 8 else s for s, d in zip(source, digits, strict=True)]
    return sum(byte << 8 * i for i, byte in enumerate(picked))


def _mask(lanes: object) -> int:
    return sum(1 << lane for lane in lanes)


# ---- One thread -----------------------------------------------------------------------------------------------------

ARITHMETIC: dict[str, Callable[[int, int, int], int]] = {
    "umulhi": lambda x, y, t: _high(x) * _high(y) >> 32,
    "mulhi": lambda x, y, t: _low(_signed(_high(x)) * _signed(_high(y)) >> 32),
    "umul64hi": lambda x, y, t: x * y >> 64,
    "mul64hi": lambda x, y, t: (_signed(x, 64) * _signed(y, 64) >> 64) % 2**64,
    "popc": lambda x, y, t: f"{_high(x):b}".count("1"),
    "popcll": lambda x, y, t: f"{x:b}".count("1"),
    "clz": lambda x, y, t: 32 - _low(x).bit_length(),
    "clzll": lambda x, y, t: 64 - x.bit_length(),
    "ffs": lambda x, y, t: _first_set(_high(x)),
    "ffsll": lambda x, y, t: _first_set(x),
    "brev": lambda x, y, t: int(f"{_high(x):032b}"[::-1], 2),
    "brevll": lambda x, y, t: int(f"{x:064b}"[::-1], 2),
    "funnelshift_l": lambda x, y, t: _funnel(x, 3 * t % 32, right=False),
    "funnelshift_r": lambda x, y, t: _funnel(x, 3 * t % 32, right=True),
    "funnelshift_lc": lambda x, y, t: _funnel(x, min(3 * t, 32), right=False),
    "funnelshift_rc": lambda x, y, t: _funnel(x, min(3 * t, 32), right=True),
    "byte_perm": lambda x, y, t: _byte_perm(x, y),
    "min_int": lambda x, y, t: _low(min(_signed(_low(x)), _signed(_low(y)))),
    "max_mixed": lambda x, y, t: max(_low(x), _low(y)),
    "max_long": lambda x, y, t: max(_signed(x, 64), _signed(y, 64)) % 2**64,
    "max_float": lambda x, y, t: _float_bits(
        max(_number_of(NAN if t % 2 else _as_float(x), _as_float(y)), _as_float(y))
    ),
    "min_float": lambda x, y, t: _float_bits(
        min(_as_float(x), _number_of(NAN if t % 2 else _as_float(y), _as_float(x)))
    ),
    "fadd_rn": lambda x, y, t: _float_bits(_as_float(x) + _as_float(y)),
    "fmul_rn": lambda x, y, t: _float_bits(_as_float(x) * _as_float(y)),
    "fdiv_rn": lambda x, y, t: _float_bits(_as_float(x) / (t + 3)),
    "fsqrt_rn": lambda x, y, t: _float_bits(math.sqrt(t)),
    # (1 + e)^2 - 1 = 2e + e^2, rounded once: two roundings lose e^2.
    "fmaf_rn": lambda x, y, t: _float_bits(2 * (t * 2.0**-23) + (t * 2.0**-23) ** 2),
    "dadd_rn": lambda x, y, t: _double_bits(0.1 * t + 1e17),
    "dmul_rn": lambda x, y, t: _double_bits(0.1 * t),
    "ddiv_rn": lambda x, y, t: _double_bits(t / 7),
    "dsqrt_rn": lambda x, y, t: _double_bits(math.sqrt(t)),
    "fma_rn": lambda x, y, t: _double_bits(2 * (t * 2.0**-52) + (t * 2.0**-52) ** 2),
    "double_bits": lambda x, y, t: x & ~(3 << 61),
    "float_bits": lambda x, y, t: _low(x) & 0xBFFFFFFF,
}

# ---- A warp ---------------------------------------------------------------------------------------------------------

_highs, _lows = [_high(x) for x in X], [_low(x) for x in X]
COLLECTIVE: dict[str, Callable[[int], int]] = {
    "match_any": lambda t: _mask(u for u in LANES if (0 if u % 5 == 1 else u % 3) == (0 if t % 5 == 1 else t % 3)),
    "match_any_64": lambda t: _mask(u for u in LANES if u % 4 == t % 4),
    "match_any_half": lambda t: _mask(
        u for u in LANES if u % 2 == t % 2 and u // (4 if t % 2 else 8) == t // (4 if t % 2 else 8)
    ),
    "match_all": lambda t: 1 + 2,
    "reduce_add": lambda t: _low(sum(_highs)),
    "reduce_add_int": lambda t: _low(sum(_highs)),
    "reduce_min": lambda t: min(_high(y) for y in Y),
    "reduce_min_int": lambda t: _low(min(_signed(x) for x in _highs)),
    "reduce_max": lambda t: max(_lows),
    "reduce_max_int": lambda t: _low(max(_signed(x) for x in _lows)),
    "reduce_and": lambda t: reduce(lambda a, b: a & b, (x | 0xF0F for x in _highs)),
    "reduce_or": lambda t: 0b11 << 4,
    "reduce_xor": lambda t: reduce(lambda a, b: a ^ b, _highs),
    "reduce_quarter": lambda t: sum(range(t // 8 * 8, t // 8 * 8 + 8)),
    "shuffle_8": lambda t: t // 8 * 8 + (t + 3) % 8,
    "shuffle_up_8": lambda t: t - 3 if t % 8 >= 3 else t,
    "shuffle_down_8": lambda t: t + 3 if t % 8 < 5 else t,
    # A lane keeps its own value instead of one beyond its group's end, but gets a value before its group's start.
    "shuffle_xor_8": lambda t: t ^ 4 if t < 16 else (t ^ 8 if (t ^ 8) < t else t),
    "shuffle_double": lambda t: X[t * 7 % 32] ^ (t * 7 % 32),
    "shuffle_half": lambda t: 101 * (31 - t),
    "ballot_odd": lambda t: _mask(u for u in range(1, 9, 2)) if t % 2 else 2,
}


@pytest.mark.parametrize("name", [*ARITHMETIC, *COLLECTIVE])
def test_builtin(name: str) -> None:
    wanted = [COLLECTIVE[name](t) if name in COLLECTIVE else ARITHMETIC[name](X[t], Y[t], t) for t in LANES]
    for order in ORDERS:
        values, refused = _run_case(name, order, "Q")
        assert refused == ""
        assert [f"{x:x}" for x in values] == [f"{x:x}" for x in wanted], order


@pytest.mark.parametrize("order", ORDERS)
def test_loads_and_stores_move_everything(order: str) -> None:
    values, refused = _run_case("copy", order)
    assert refused == "" and values == [float(i) for i in range(64)]


@pytest.mark.parametrize("order", ORDERS)
def test_block_votes(order: str) -> None:
    """Vote in a block of 40 threads: t % 3 is not 0 for 26; all bring t < 40; none brings t > 41; the 41st returned."""
    values, refused = _run_case("block_votes", order, "i")
    assert refused == "" and values[:3] == [26, 2, 1]


# ---- Atomics --------------------------------------------------------------------------------------------------------

# The kind of number, the result of 40 threads, and the result of 80.
_SUM = sum(range(40))
ATOMIC: dict[str, tuple[str, float, float]] = {
    "atomic_add_int": ("i", 5 + _SUM - 800, 5 + 2 * (_SUM - 800)),
    "atomic_add_unsigned": ("I", 5 + _SUM, 5 + 2 * _SUM),
    "atomic_add_64": ("Q", 5 + (_SUM << 33), 5 + (2 * _SUM << 33)),
    "atomic_add_float": ("f", 5 + _SUM, 5 + 2 * _SUM),
    "atomic_add_double": ("d", 5 + _SUM, 5 + 2 * _SUM),
    "atomic_sub": ("i", 5 - _SUM, 5 - 2 * _SUM),
    "atomic_min": ("i", -36, -36),
    "atomic_max_64": ("Q", 39 << 40, 39 << 40),
    "atomic_max_signed_64": ("q", 0, 0),
    "atomic_and": ("I", 0xFF00, 0xFF00),
    "atomic_or": ("Q", 2**40 - 1, 2**40 - 1),
    "atomic_xor": ("I", 1 ^ 0xFFFFFF00, 1),
    "atomic_inc": ("I", 40 % 7, 80 % 7),
    "atomic_dec": ("I", (2 - 40) % 7, (2 - 80) % 7),
    "atomic_exchange": ("f", 2.5, 2.5),
    "atomic_cas": ("Q", sum(t * t for t in range(40)), 2 * sum(t * t for t in range(40))),
    "atomic_cas_16": ("H", _SUM, 2 * _SUM),
}


@pytest.mark.parametrize("name", ATOMIC)
def test_atomic(name: str) -> None:
    """Add to global memory from two blocks, and to the shared memory of each block."""
    kind, once, twice = ATOMIC[name]
    for order in ORDERS:
        values, refused = _run_case(name, order, kind)
        assert refused == "" and values[:3] == [twice, once, once], order


# ---- CUB ------------------------------------------------------------------------------------------------------------

GARBAGE = 2**32 - 1


def _sorted_positions(n: int, begin_bit: int, end_bit: int) -> list[int]:
    keys = [(5 + 1237 * i) % 4096 for i in range(n)]
    return sorted(range(n), key=lambda i: (keys[i] >> begin_bit) % 2 ** (end_bit - begin_bit))


@pytest.mark.parametrize(
    ("name", "n", "bits", "buffer"),
    [
        ("sort_few", 20, (0, 32), 1),
        ("sort_by_one_pass", 62, (0, 8), 1),
        ("sort_by_two_passes", 62, (0, 12), 0),
        ("sort_by_upper_bits", 62, (4, 12), 1),
    ],
)
def test_sort(name: str, n: int, bits: tuple[int, int], buffer: int) -> None:
    """Sort stably by the given bits alone; the number of passes says which buffer has the result, the other garbage."""
    values, refused = _run_case(name, kind="I")
    assert refused == ""
    assert values[:n] == _sorted_positions(n, *bits)
    assert values[62:] == [buffer, GARBAGE]


@pytest.mark.parametrize("name", ["scan", "scan_in_place"])
def test_scan(name: str) -> None:
    values, refused = _run_case(name, kind="I")
    assert refused == "" and values[:40] == [7 + i for i in range(40)]


def test_select() -> None:
    """Select entries; the rest of the output is garbage."""
    values, refused = _run_case("select_if", kind="I")
    assert refused == "" and values[:14] == list(range(14))
    assert values[14:40] == [GARBAGE] * 26 and values[63] == 14
    values, refused = _run_case("select_flagged", kind="I")
    assert refused == "" and values[:10] == list(range(101, 140, 4))
    assert values[10:40] == [GARBAGE] * 30 and values[63] == 10


def test_select_by_a_functor_that_reads_the_output_goes_wrong() -> None:
    """Give a wrong result and no error: no address tells what a functor reads."""
    values, refused = _run_case("select_if_by_output", kind="I")
    assert refused == "" and values[63] != 14


def test_run_lengths() -> None:
    values, refused = _run_case("run_lengths", kind="I")
    assert refused == "" and values[63] == 6
    assert values[:7] == [0, 9, 18, 27, 36, 45, GARBAGE]
    assert values[30:37] == [1, 2, 3, 4, 5, 6, GARBAGE]
