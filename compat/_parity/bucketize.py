"""Parity check of ``tf.raw_ops.Bucketize``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from . import draw
from .case import INF, NAN, Case, Operator
from .draw import ints

_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)
_LIMIT = 2.0**24


def _hand_picked(operator: str) -> list[Case]:
    cases = []

    def add(note: str, x: Any, boundaries: Any) -> None:
        cases.append(Case(operator, {"input": x, "boundaries": boundaries}, note))

    for dtype in _DTYPES:
        add("boundaries belong to the bucket above", torch.tensor([-1, 0, 1, 10, 11], dtype=dtype), [0.0, 10.0])
        add("equal boundaries", torch.tensor([[0, 1], [2, 3]], dtype=dtype), [1.0, 1.0, 2.0])
        add("no boundaries", torch.tensor([1], dtype=dtype), [])
        add("no numbers", torch.empty(0, 2, dtype=dtype), [1.0])
        add("scalar", torch.tensor(3, dtype=dtype), [1.0, 4.0])
    for dtype in (torch.float32, torch.float64):
        add("specials", torch.tensor([NAN, INF, -INF, 0.0, -0.0], dtype=dtype), [-INF, 0.0, INF])
        add("0.1 as float32", torch.tensor([0.1], dtype=dtype), [0.1])
        add("0.1 as float32, met", torch.tensor([0.1], dtype=torch.float32).to(dtype), [0.1])
        add("boundary beyond float32", torch.tensor([1e38, INF], dtype=dtype), [1e40])
    for dtype in (torch.int32, torch.int64):
        numbers = torch.tensor([2**24 - 1, 2**24, 2**24 + 1, 2**24 + 2, 2**24 + 3], dtype=dtype)
        add("integers beyond float32", numbers, [_LIMIT, _LIMIT + 2])
    add("integers beyond float32, large", torch.tensor([2**62 - 1, 2**62, 2**63 - 1]), [2.0**62, 2.0**63])
    add("integer boundaries", ints(1, 5), [1, 5])
    add("descending", ints(1), [2.0, 1.0])
    add("boundaries not a list", ints(1), 1.0)
    for dtype in (torch.float16, torch.uint8, torch.bool):
        add(f"input {dtype}", torch.zeros(2, dtype=dtype), [1.0])
    return cases


def _random(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw numbers between and on the boundaries."""
    dtype, inner = draw.one_of(rng, _DTYPES), draw.inner_shape(rng)
    scale = 10.0 ** rng.uniform(-2, 10)
    boundaries = np.sort(rng.standard_normal(draw.size(rng, 300)).astype(np.float32) * np.float32(scale))
    shape = (draw.size(rng, draw.rows_limit(elements, inner)), *inner)
    numbers = rng.standard_normal(shape) * scale
    if boundaries.size and numbers.size:
        numbers = np.where(
            rng.random(shape) < 0.3, boundaries[draw.ids(rng, numbers.size, boundaries.size)].reshape(shape), numbers
        )
    x = draw.with_specials(rng, torch.from_numpy(np.asarray(numbers)).to(dtype))
    arguments = {"input": x, "boundaries": boundaries.tolist()}
    if boundaries.size > 1 and boundaries[0] < boundaries[-1] and rng.random() < 0.1:
        return Case(
            operator, {**arguments, "boundaries": boundaries[::-1].tolist()}, "descending", names=("boundaries",)
        )
    return Case(operator, arguments, "random")


OPERATORS: dict[str, Operator] = {"raw_ops.Bucketize": Operator(_random, _hand_picked)}
