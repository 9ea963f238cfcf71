"""Slow, obvious references of the family ``table``, beyond its index: initial values, rows, and the sketch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .table import MOST, WORD, hash_key, key_of_hash, signed, table_of

CONSTANT, UNIFORM, NORMAL, TRUNCATED_NORMAL = range(4)

# ---- Initial values -------------------------------------------------------------------------------------------------


def rounded(x: float, dtype: torch.dtype) -> float:
    """Return the nearest number of a dtype, rounded once, to even in a tie."""
    info = torch.finfo(dtype)
    if dtype == torch.float64 or x == 0 or not math.isfinite(x):
        return x
    digits = 1 - int(math.log2(info.eps))
    exponent = max(math.frexp(x)[1], int(math.log2(info.tiny)) + 1)
    quantum = math.ldexp(1.0, exponent - digits)
    result = round(x / quantum) * quantum
    return math.copysign(result if abs(result) <= info.max else math.inf, x)


def _polynomial(coefficients: Sequence[float], x: float) -> float:
    total = coefficients[0]
    for c in coefficients[1:]:
        total = total * x + c
    return total


def portable_log(x: float) -> float:
    m, exponent = math.frexp(x)
    m, exponent = 2 * m, exponent - 1
    if m > 1.4142135623730951:
        m, exponent = m * 0.5, exponent + 1
    t = (m - 1) / (m + 1)
    return exponent * 0.6931471805599453 + 2 * t * _polynomial([1 / k for k in range(21, 0, -2)], t * t)


_TAIL = (
    (-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e00)
    + (-2.549732539343734e00, 4.374664141464968e00, 2.938163982698783e00),
    (7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e00, 3.754408661907416e00, 1.0),
)
_MIDDLE = (
    (-3.969683028665376e01, 2.209460984245205e02, -2.759285104469687e02)
    + (1.383577518672690e02, -3.066479806614716e01, 2.506628277459239e00),
    (-5.447609879822406e01, 1.615858368580409e02, -1.556989798598866e02, 6.680131188771972e01)
    + (-1.328068155288572e01, 1.0),
)


def inverse_normal(p: float) -> float:
    """Return Acklam's approximation, in the contract's order of operations, so that all devices agree to the bit."""
    if p < 0.02425 or p > 1 - 0.02425:
        q = math.sqrt(-2 * portable_log(p if p < 0.02425 else 1 - p))
        x = _polynomial(_TAIL[0], q) / _polynomial(_TAIL[1], q)
        return x if p < 0.02425 else -x
    q = p - 0.5
    r = q * q
    return _polynomial(_MIDDLE[0], r) * q / _polynomial(_MIDDLE[1], r)


_SEED, _KEY, _STEP = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0x9E3779B97F4A7C15


def _mixed(x: int) -> int:
    """Mix bits by splitmix64's finalizer."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def _unmixed(x: int) -> int:
    x = (x ^ x >> 31 ^ x >> 62) * pow(0x94D049BB133111EB, -1, WORD) % WORD
    x = (x ^ x >> 27 ^ x >> 54) * pow(0xBF58476D1CE4E5B9, -1, WORD) % WORD
    return x ^ x >> 30 ^ x >> 60


def uniform_number(seed: int, key: int, column: int) -> float:
    """Return a number in (0, 1) of 32 random bits."""
    stream = hash_key(hash_key(seed ^ _SEED) ^ key * _KEY % WORD)
    bits = _mixed((stream + (column // 2 + 1) * _STEP) % WORD)
    return ((bits >> 32 if column % 2 else bits % 2**32) + 0.5) / 2**32


def key_of_numbers(seed: int, pair: int, even: int, odd: int) -> int:
    """Return the key whose columns ``2 pair`` and ``2 pair + 1`` draw these two numbers of 32 bits."""
    stream = (_unmixed(odd << 32 | even) - (pair + 1) * _STEP) % WORD
    return signed((key_of_hash(stream) ^ hash_key(seed ^ _SEED)) % WORD * pow(_KEY, -1, WORD) % WORD)


def initial_number(kind: int, parameters: Sequence[float], u: float) -> float:
    """Return the initial value that follows from a number in (0, 1), in float64."""
    if kind == CONSTANT:
        return parameters[0]
    a, b = parameters
    if kind == UNIFORM:
        return a + (b - a) * u
    if kind == TRUNCATED_NORMAL:
        u = 0.022750131948179195 + 0.9544997361036416 * u
    return a + b * inverse_normal(u)


def initial_row(
    weight: Tensor, key: int, values: Tensor | None, kind: int, parameters: Sequence[float], seed: int
) -> Tensor:
    if values is not None:
        return values[key % values.shape[0]]
    row = [initial_number(kind, parameters, uniform_number(seed, key, c)) for c in range(weight.shape[1])]
    return torch.tensor([rounded(x, weight.dtype) for x in row], dtype=torch.float64).to(weight.dtype)


# ---- Operators ------------------------------------------------------------------------------------------------------


def table_initialize_(
    weight: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor | None,
    kind: int,
    parameters: Sequence[float],
    seed: int,
) -> Tensor:
    weight = weight.clone()
    for row, key in zip(rows.tolist(), keys.tolist(), strict=True):
        if row >= 0:
            weight[row] = initial_row(weight, key, values, kind, parameters, seed)
    return weight


def table_lookup(
    index: Tensor,
    entries: Tensor,
    weight: Tensor,
    ids: Tensor,
    missing: Tensor | None,
    values: Tensor | None,
    kind: int,
    parameters: Sequence[float],
    seed: int,
) -> Tensor:
    found = table_of(index, entries).rows
    out = weight.new_empty(ids.shape[0], weight.shape[1])
    for i, key in enumerate(ids.tolist()):
        if key in found:
            out[i] = weight[found[key]]
        elif missing is not None:
            out[i] = missing
        else:
            out[i] = initial_row(weight, key, values, kind, parameters, seed)
    return out


def table_assign_(weight: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    weight = weight.clone()
    for i, row in enumerate(rows.tolist()):
        if row >= 0:
            weight[row] = values[i]
    return weight


def sketch_counters(key: int, num_hashes: int, width: int) -> list[int]:
    """Return the positions of the counters of a key in each row of the sketch."""
    first = hash_key(key)
    step = hash_key(first ^ 0x9E3779B97F4A7C15) | 1
    return [((first + k * step) % WORD) * width >> 64 for k in range(num_hashes)]


def count_min_sketch_(
    sketch: Tensor, ids: Tensor, mask: Tensor | None, num_hashes: int, count: bool
) -> tuple[Tensor, Tensor]:
    counters, most = sketch.tolist(), torch.iinfo(sketch.dtype).max
    keys = ids.tolist()
    taking_part = [True] * len(keys) if mask is None else mask.tolist()
    places = [sketch_counters(key, num_hashes, len(counters)) for key in keys]
    for own, takes_part in zip(places, taking_part, strict=True):
        for place in own if takes_part and count else ():
            counters[place] = min(counters[place] + 1, most)
    counts = [
        min(*(counters[p] for p in own), MOST) if takes_part else 0
        for own, takes_part in zip(places, taking_part, strict=True)
    ]
    return torch.tensor(counts, dtype=torch.int32), torch.tensor(counters, dtype=sketch.dtype)


# In the order of csrc/library.cpp.
FUNCTIONS: tuple[Callable, ...] = (table_initialize_, table_lookup, table_assign_, count_min_sketch_)
