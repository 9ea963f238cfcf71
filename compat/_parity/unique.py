"""Parity check of ``tf.unique`` and ``tf.unique_with_counts``, and of both along an axis."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import draw
from .case import FLOATS, HALVES, INF, INTEGERS, NAN, Case, Operator
from .draw import ints


def _unique(operator: str) -> list[Case]:
    cases = []

    def add(note: str, x: Any, out_idx: torch.dtype = torch.int32) -> None:
        cases.append(Case(operator, {"x": x, "out_idx": out_idx}, note))

    add("order of first appearance", ints(7, 3, 7, 9, 3))
    add("out_idx int64", ints(7, 3, 7, 9, 3), torch.int64)
    for out_idx in (torch.int16, torch.float32, torch.uint32):
        add(f"out_idx {out_idx}", ints(1, 2), out_idx)
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        add("extremes", torch.tensor([info.max, info.min, 0, 1, info.max, info.min], dtype=dtype))
    for dtype in FLOATS:
        # TensorFlow's hash of a half type distinguishes -0.0 from 0.0, although they are equal.
        zero = 0.0 if dtype in HALVES else -0.0
        add("zeros and NaN", torch.tensor([0.0, zero, NAN, 1.0, NAN, zero, 1.0, INF, -INF, INF], dtype=dtype))
        if dtype not in HALVES:
            add("-0.0 first", torch.tensor([-0.0, 0.0, 2.0], dtype=dtype))
    add("bool", torch.tensor([True, False, True]))
    add("complex", torch.ones(2, dtype=torch.complex64))
    for dtype in (torch.int64, torch.float16, torch.bool):
        add("empty", torch.empty(0, dtype=dtype))
    add("scalar", torch.tensor(3))
    add("rank 2", ints(3).unsqueeze(0))
    add("rank 2, empty", torch.empty(0, 2))
    add("strings", ["a", "b", b"a", "é", "a\0", "", "a"])
    add("strings of rank 2", [["a"], ["b"]])
    add("strings mixed with numbers", ["a", 1])
    add("a string", "a")
    return cases


def random_unique(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw a vector with many or few distinct values, of every dtype."""
    count = draw.size(rng, elements)
    distinct = 1 + draw.size(rng, max(count, 1))
    out_idx = draw.index_dtype(rng)
    kind = rng.random()
    if kind < 0.15:
        words = [rng.bytes(int(length)) for length in rng.integers(0, 20, min(distinct, 2000))]
        strings = [words[i] for i in draw.ids(rng, max(min(count, 20_000), 1), len(words))]
        return Case(operator, {"x": strings, "out_idx": out_idx}, "random strings")
    dtype = torch.bool if kind < 0.2 else draw.one_of(rng, FLOATS + INTEGERS)
    if dtype == torch.bool:
        values = torch.from_numpy(rng.integers(0, 2, count)).to(dtype)
    else:
        pool = draw.values(rng, (distinct,), dtype)
        if dtype in FLOATS:
            # TensorFlow's hash of a half type distinguishes -0.0 from 0.0, although they are equal.
            zero = 0.0 if dtype in HALVES else -0.0
            pool[: distinct // 4] = float("nan") if rng.random() < 0.5 else zero
            pool[distinct // 4 : distinct // 3] = 0.0
        values = pool[torch.from_numpy(draw.ids(rng, count, distinct))] if count else pool[:0]
        if dtype in FLOATS and values.isnan().any():
            # No NaN equals another, but TensorFlow's hash map puts all in one place: its time is quadratic.
            values = values[:5000]
    if rng.random() < 0.05:
        return Case(operator, {"x": values.unsqueeze(0), "out_idx": out_idx}, "rank 2")
    return Case(operator, {"x": values, "out_idx": out_idx}, "random")


def _unique_along(operator: str) -> list[Case]:
    cases = []

    def add(note: str, x: Any, axis: Any, out_idx: torch.dtype = torch.int32) -> None:
        cases.append(Case(operator, {"x": x, "axis": axis, "out_idx": out_idx}, note))

    rows = torch.tensor([[1, 2], [3, 4], [1, 2], [2, 1]])
    for axis in (0, 1, -1, -2):
        add(f"axis {axis}", rows, ints(axis))
        add("rank 3", torch.arange(12).reshape(2, 3, 2) % 4 // 2, ints(axis, dtype=torch.int64))
    add("no axis", ints(3, 1, 3), ints())
    add("no axis, rank 2", rows, ints())
    add("no axis, scalar", torch.tensor(3), ints())
    add("rank 1", ints(3, 1, 3), ints(0), torch.int64)
    for axis in (2, -3):
        add(f"no axis {axis}", rows, ints(axis))
    add("axis of a scalar", torch.tensor(3), ints(0))
    add("axis is a scalar", rows, torch.tensor(0))
    add("two axes", rows, ints(0, 1))
    add("axis of rank 2", rows, ints(0).unsqueeze(0))
    for dtype in (torch.int16, torch.float32):
        add(f"axis {dtype}", rows, torch.zeros(1, dtype=dtype))
    add("out_idx int16", rows, ints(0), torch.int16)
    for shape in ((3, 0), (0, 3), (0, 0), (2, 0, 3)):
        for axis in range(len(shape)):
            add(f"empty {shape}", torch.empty(shape), ints(axis))
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        numbers = torch.tensor([info.max, info.min, 0, info.max, info.min, 0, info.max, info.max, 0], dtype=dtype)
        add("extremes", numbers.reshape(3, 3), ints(0))
    for dtype in FLOATS:
        zero = 0.0 if dtype in HALVES else -0.0
        numbers = torch.tensor([[NAN, 1.0], [NAN, 1.0], [zero, INF], [0.0, INF], [0.0, -INF]], dtype=dtype)
        add("zeros and NaN", numbers, ints(0))
    add("bool", torch.tensor([[True, False], [True, False]]), ints(0))
    add("complex", torch.ones(2, 2, dtype=torch.complex64), ints(0))
    add("strings", [["a", "b"], ["a", "b"], ["", "ab"]], ints(0))
    return cases


def _random_unique_along(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw slices out of a pool, of every dtype, along any axis."""
    inner, out_idx = draw.inner_shape(rng), draw.index_dtype(rng)
    # TensorFlow is slow here, since it compares element by element, through strides: thousands are enough.
    count = draw.size(rng, draw.rows_limit(min(elements, 100_000), inner))
    distinct = 1 + draw.size(rng, max(count, 1))
    dtype = draw.one_of(rng, (torch.bool, *FLOATS, *INTEGERS))
    pool = draw.values(rng, (distinct, *inner), dtype)
    if dtype in FLOATS and pool.numel():
        # TensorFlow's hash of a half type distinguishes -0.0 from 0.0, although they are equal.
        flat = pool.reshape(-1)
        flat[: distinct // 4] = float("nan") if rng.random() < 0.3 else 0.0
        flat[distinct // 4 : distinct // 2] = 0.0 if dtype in HALVES else -0.0
    slices = pool[torch.from_numpy(draw.ids(rng, count, distinct))] if count else pool[:0]
    if dtype in FLOATS and slices.isnan().any():
        slices = slices[:2000]
    axis = int(rng.integers(0, slices.dim()))
    x = slices.movedim(0, axis).contiguous()
    given = axis - x.dim() if rng.random() < 0.5 else axis
    arguments = {"x": x, "out_idx": out_idx}
    kind = rng.random()
    if kind < 0.05:
        return Case(operator, {**arguments, "axis": ints(x.dim())}, "no such axis")
    if kind < 0.1:
        return Case(operator, {**arguments, "axis": ints(0, 0)}, "two axes")
    return Case(operator, {**arguments, "axis": ints(given, dtype=draw.index_dtype(rng))}, "random")


OPERATORS = {
    **{
        name: Operator(random_unique, _unique)
        for name in ("unique", "unique_with_counts", "raw_ops.Unique", "raw_ops.UniqueWithCounts")
    },
    **{
        name: Operator(_random_unique_along, _unique_along)
        for name in ("raw_ops.UniqueV2", "raw_ops.UniqueWithCountsV2")
    },
}
