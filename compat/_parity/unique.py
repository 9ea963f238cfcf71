"""Of the parity check: ``tf.unique`` and ``tf.unique_with_counts``."""

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
        # TensorFlow's hash of a half type tells -0.0 from 0.0, although they are equal.
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
    """A vector with many or few distinct values, of every dtype."""
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
            # TensorFlow's hash of a half type tells -0.0 from 0.0, although they are equal.
            zero = 0.0 if dtype in HALVES else -0.0
            pool[: distinct // 4] = float("nan") if rng.random() < 0.5 else zero
            pool[distinct // 4 : distinct // 3] = 0.0
        values = pool[torch.from_numpy(draw.ids(rng, count, distinct))] if count else pool[:0]
        if dtype in FLOATS and values.isnan().any():
            # No NaN equals another, and TensorFlow's hash map gives all the same place: its time is quadratic.
            values = values[:5000]
    if rng.random() < 0.05:
        return Case(operator, {"x": values.unsqueeze(0), "out_idx": out_idx}, "rank 2")
    return Case(operator, {"x": values, "out_idx": out_idx}, "random")


OPERATORS = {
    name: Operator(random_unique, _unique)
    for name in ("unique", "unique_with_counts", "raw_ops.Unique", "raw_ops.UniqueWithCounts")
}
