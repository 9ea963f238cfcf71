"""Parity check of the conversion of ``tf.IndexedSlices`` to dense tensors."""

from __future__ import annotations

import numpy as np
import torch

from ..tensorflow import IndexedSlices
from . import draw
from .bounds import sums
from .case import FLOATS, INTEGERS, Case, Operator, Outcome, Reference
from .draw import data, ints
from .reference import SUM
from .reference.numbers import wide
from .reference.segment import unsorted_segment_reduce


def _hand_picked(operator: str) -> list[Case]:
    cases = []

    def add(note: str, slices: IndexedSlices, **further: object) -> None:
        cases.append(Case(operator, {"value": slices, **further}, note))

    shape = ints(4, 3, dtype=torch.int64)
    add("repeated rows add up", IndexedSlices(data(3), ints(2, 0, 2), shape))
    add("a negative row drops out", IndexedSlices(data(3), ints(2, -1, -7), shape))
    add("no slices", IndexedSlices(data(0), ints(), shape))
    add("a vector", IndexedSlices(data(3)[:, 0], ints(1, 1, 0, dtype=torch.int64), shape[:1]))
    add("integers", IndexedSlices(torch.arange(3), ints(1, 1, 0), shape[:1]))
    add("only the first size counts", IndexedSlices(data(1), ints(1), ints(4, 9, dtype=torch.int64)))
    add("its own dtype", IndexedSlices(data(1), ints(1), shape), dtype=torch.float32)
    add("too large", IndexedSlices(data(2), ints(0, 4), shape))
    cases[-1] = Case(operator, cases[-1].arguments, "too large", names=("4",))
    add("no shape", IndexedSlices(data(1), ints(0)))
    add("another dtype", IndexedSlices(data(1), ints(0), shape), dtype=torch.float64)
    return cases


def _random(rng: np.random.Generator, operator: str, elements: int) -> Case:
    inner, dtype = draw.inner_shape(rng), draw.one_of(rng, (*FLOATS[2:], *INTEGERS))
    count = draw.size(rng, draw.rows_limit(elements, inner))
    rows = 1 + draw.size(rng, draw.rows_limit(elements, inner))
    values = draw.with_specials(rng, draw.values(rng, (count, *inner), dtype))
    indices = draw.ids(rng, count, rows)
    if count and rng.random() < 0.3:
        indices[rng.random(count) < 0.2] = -1
    shape = torch.tensor([rows, *inner], dtype=torch.int64)
    names = None
    if count and values.numel() and rng.random() < 0.15:
        indices[int(rng.integers(count))] = rows
        names = (str(rows),)
    slices = IndexedSlices(values, torch.from_numpy(indices).to(draw.index_dtype(rng)), shape)
    return Case(operator, {"value": slices}, "random", names=names)


def _references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    slices = case.arguments["value"]
    if slices.values.dtype not in FLOATS or slices.dense_shape is None:
        return {}
    terms, ids, rows = wide(slices.values), slices.indices.numpy(), int(slices.dense_shape[0])
    value, magnitude = (unsorted_segment_reduce(x, ids, rows, SUM) for x in (terms, np.abs(terms)))
    return {"output": sums(value, magnitude, ids, slices.values.dtype)}


OPERATORS: dict[str, Operator] = {"convert_to_tensor of IndexedSlices": Operator(_random, _hand_picked, _references)}
