"""Parity check of ``tf.math.segment_*`` and ``tf.math.unsorted_segment_*``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import draw
from .bounds import epsilon, extremes, products, sums
from .case import COMPLEX, FLOATS, HALVES, INF, INT64_MAX, INTEGERS, NAN, Case, Operator, Outcome, Reference
from .draw import data, ints
from .reference import MAX, MEAN, MIN, PROD, SQRTN, SUM
from .reference.numbers import wide
from .reference.segment import (
    segment_reduce,
    segment_reduce_backward,
    unsorted_segment_reduce,
    unsorted_segment_reduce_backward,
)

SORTED = ("sum", "mean", "max", "min", "prod")
UNSORTED = (*SORTED, "sqrt_n")
_NUMBERS = {"sum": SUM, "mean": MEAN, "max": MAX, "min": MIN, "prod": PROD, "sqrt_n": SQRTN}


def _reduction(operator: str) -> str:
    name = operator.lower().removesuffix("_n")
    return next(reduction for reduction in UNSORTED if name.endswith(reduction.removesuffix("_n")))


def _is_unsorted(operator: str) -> bool:
    return "unsorted" in operator.lower()


def _dtypes(operator: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes that TensorFlow takes, without complex products, which tests/compat/test_math.py checks."""
    reduction = _reduction(operator)
    if reduction == "sqrt_n":
        return FLOATS
    is_complex = reduction == "sum" or (reduction == "mean" and not _is_unsorted(operator))
    return FLOATS + INTEGERS + (COMPLEX if is_complex else ())


def _refused(operator: str) -> list[torch.dtype]:
    """Return the dtypes that both sides refuse."""
    others = () if _reduction(operator) == "prod" else COMPLEX
    return [dtype for dtype in (torch.bool, *others) if dtype not in _dtypes(operator)]


# ---- Hand-picked ----------------------------------------------------------------------------------------------------


def _picked_sorted(operator: str) -> list[Case]:
    cases = []

    def add(note: str, rows: Any, segment_ids: Any, upstream: Tensor | None = None) -> None:
        arguments = {"data": rows, "segment_ids": segment_ids}
        cases.append(Case(operator, arguments, note, upstream, ("data",) if upstream is not None else ()))

    floats = data(4)
    add("gaps, ties", torch.tensor([2.0, 2.0, 1.0, 5.0, 0.0, 3.0, 0.0]), ints(1, 1, 1, 3, 4, 4, 4), data(5, 1)[:, 0])
    add("one zero, two zeros", torch.tensor([2.0, 0.0, 3.0, 0.0, 0.0, 7.0]), ints(0, 0, 0, 1, 1, 1), torch.ones(2))
    add("no rows", floats[:0], ints(), data(0))
    add("no columns", floats[:, :0], ints(0, 0, 2, 2), data(3)[:, :0])
    add("no columns, unsorted", floats[:, :0], ints(0, 2, 1, 2))
    add("rank 3", floats.reshape(2, 2, 3), ints(0, 1), data(4).reshape(2, 2, 3))
    add("scalar data", floats[0, 0], ints(0))
    add("scalar segment_ids", floats, torch.tensor(0, dtype=torch.int32))
    add("segment_ids of rank 2", floats, ints(0, 0, 1, 1).unsqueeze(0))
    add("lengths differ", floats, ints(0, 1))
    add("unsorted", floats, ints(0, 2, 1, 1))
    add("last id smaller", floats, ints(0, 3, 3, 1))
    add("first id negative", floats, ints(-1, 0, 0, 1))
    add("all ids negative", floats, ints(-3, -3, -2, -1))
    add("segment_ids int16", floats, ints(0, 0, 1, 1, dtype=torch.int16))
    add("segment_ids float", floats, torch.zeros(4))
    add("a single -0.0", torch.tensor([-0.0, 1.0]), ints(0, 1))
    add("infinities and NaN", torch.tensor([INF, -INF, INF, NAN, 1.0]), ints(0, 0, 1, 2, 3))
    for dtype in INTEGERS:
        top = torch.iinfo(dtype).max
        numbers = torch.tensor([top, 1, top - 1, 3, torch.iinfo(dtype).min], dtype=dtype)
        add("integers wrap", numbers, ints(0, 0, 2, 2, 2))
    for dtype in _refused(operator):
        add(f"data {dtype}", torch.ones(2, dtype=dtype), ints(0, 0))
    return cases


def _picked_unsorted(operator: str) -> list[Case]:
    cases = []

    def add(note: str, rows: Any, segment_ids: Any, num_segments: Any, upstream: Tensor | None = None) -> None:
        arguments = {"data": rows, "segment_ids": segment_ids, "num_segments": num_segments}
        cases.append(Case(operator, arguments, note, upstream, ("data",) if upstream is not None else ()))

    floats = data(4)
    add("gaps, ties", torch.tensor([2.0, 0.0, 2.0, 5.0, 1.0, 3.0, 0.0]), ints(1, 4, 1, 3, 1, 4, 4), 6, data(6, 1)[:, 0])
    add("zeros", torch.tensor([2.0, 0.0, 3.0, 0.0, 0.0, 7.0]), ints(0, 1, 0, 0, 1, 1), 2, torch.ones(2))
    add("negative ids", floats, ints(-1, 1, -7, 1), 2, data(2))
    add("all left out", floats, ints(-1, -1, -1, -1), 2, data(2))
    add("no rows", floats[:0], ints(), 2, data(2))
    add("no segments", floats, ints(-1, -1, -1, -1), 0)
    add("no columns", floats[:, :0], ints(0, 1, 0, 1), 2, data(2)[:, :0])
    add("no columns, id too large", floats[:, :0], ints(0, 9, 0, 1), 2)
    add("ids of rank 2", floats, ints(*range(-1, 11)).reshape(4, 3), 12, data(12, 1)[:, 0])
    add("scalar id", floats, torch.tensor(1, dtype=torch.int32), 2, data(8).reshape(2, 4, 3))
    add("scalar data", torch.tensor(2.5), torch.tensor(1), 3, data(1)[0])
    add("not a prefix", floats, ints(0, 1, 0), 2)
    add("ids of a larger rank", floats[:, 0], ints(0, 1, 0, 1).unsqueeze(1), 2)
    add("id too large", floats, ints(0, 1, 2, 0), 2)
    add("id 2^63 - 1", floats, ints(0, 1, INT64_MAX, 0, dtype=torch.int64), 2)
    add("id -2^63", floats, ints(0, 1, -INT64_MAX - 1, 0, dtype=torch.int64), 2)
    add("num_segments negative", floats, ints(0, 1, 1, 0), -1)
    add("num_segments int64", floats, ints(0, 1, 1, 0), torch.tensor(3))
    add("num_segments a vector", floats, ints(0, 1, 1, 0), ints(3))
    add("num_segments float", floats, ints(0, 1, 1, 0), torch.tensor(3.0))
    for index in (torch.int8, torch.int16, torch.float32):
        add(f"segment_ids {index}", floats, torch.zeros(4, dtype=index), 2)
    add("infinities and NaN", torch.tensor([INF, -INF, INF, NAN, 1.0]), ints(0, 0, 1, 2, 3), 4)
    for dtype in INTEGERS:
        top = torch.iinfo(dtype).max
        numbers = torch.tensor([top, 1, top - 1, 3, torch.iinfo(dtype).min], dtype=dtype)
        add("integers wrap", numbers, ints(2, 0, 0, 2, 2), 4)
    for dtype in _refused(operator):
        add(f"data {dtype}", torch.ones(2, dtype=dtype), ints(0, 0), 1)
    return cases


# ---- Random ---------------------------------------------------------------------------------------------------------


def _numbers(rng: np.random.Generator, operator: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw numbers: floats with ties and zeros in one of three cases; factors of so many rows that do not overflow."""
    if dtype in INTEGERS or dtype.is_complex:
        return draw.values(rng, shape, dtype)
    if _reduction(operator) == "prod":
        exponents = rng.uniform(-1, 1, shape) * min(1.0, 20 / np.sqrt(max(rows, 1)))
        factors = np.asarray(2.0**exponents * rng.choice(np.array([-1.0, 1.0]), shape))
        return torch.from_numpy(np.where(rng.random(shape) < rng.choice([0, 0.01, 0.3]), 0, factors)).to(dtype)
    if rng.random() < 1 / 3:
        return torch.from_numpy(np.asarray(rng.integers(-6, 7, shape) / 4)).to(dtype)
    return draw.with_specials(rng, draw.values(rng, shape, dtype))


def _spoil(rng: np.random.Generator, arguments: dict[str, Any]) -> str:
    """Make one argument wrong and return the fault."""
    ids = arguments["segment_ids"]
    ways = ["length", "id dtype", "bool", *(["too large"] if "num_segments" in arguments else ["rank"])]
    ways += ["negative", "unsorted"] if "num_segments" not in arguments and ids.shape[0] > 1 else []
    way = draw.one_of(rng, ways)
    if way == "length":
        arguments["segment_ids"] = torch.cat([ids, ids[:1] if ids.numel() else ids.new_zeros(1, *ids.shape[1:])])
    elif way == "id dtype":
        arguments["segment_ids"] = ids.to(torch.uint8)
    elif way == "bool":
        arguments["data"] = torch.zeros(arguments["data"].shape, dtype=torch.bool)
    elif way == "rank":
        arguments["segment_ids"] = ids.unsqueeze(0)
    elif way == "negative":
        arguments["segment_ids"] = torch.cat([ids.new_tensor([-1]), ids[1:]])
    elif way == "unsorted":
        arguments["segment_ids"] = torch.cat([ids[-1:] + 1, ids[1:]])
    elif ids.numel() and arguments["data"].numel():
        arguments["segment_ids"] = ids.clone()
        arguments["segment_ids"].view(-1)[int(rng.integers(ids.numel()))] = arguments["num_segments"]
    else:
        arguments["num_segments"] = -1
    return way


def _count_wraps_to_zero(dtype: torch.dtype, ids: np.ndarray) -> bool:
    """Say whether a segment's number of rows wraps to 0 in the data's dtype: TensorFlow would divide by it and end."""
    if dtype not in INTEGERS or dtype.itemsize > 2 or not ids.size:
        return False
    counts = np.bincount(ids)
    return bool((counts[counts > 0] % 2 ** (8 * dtype.itemsize) == 0).any())


def random_case(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw a reduction of up to ``elements`` numbers; one call in eight is wrong."""
    unsorted = _is_unsorted(operator)
    dtypes = _dtypes(operator)
    dtype = draw.one_of(rng, FLOATS if rng.random() < 0.5 else dtypes)
    inner = draw.inner_shape(rng)
    limit = draw.rows_limit(elements, inner)
    rows, spread = draw.size(rng, limit), 1 + draw.size(rng, limit)
    ids = draw.ids(rng, rows, spread)
    shape: tuple[int, ...] = (rows,)
    if unsorted:
        shape = draw.one_of(rng, [(rows,), (rows, 1), (1, rows, 1), (rows,)])
        if rng.random() < 0.5:
            ids = np.where(rng.random(rows) < 0.2, -1 - ids, ids)
    else:
        ids = np.sort(ids)
    if _count_wraps_to_zero(dtype, ids[ids >= 0]):
        dtype = torch.int32
    segments = max(int(ids.max(initial=-1)) + 1, 0)
    arguments: dict[str, Any] = {
        "data": _numbers(rng, operator, rows, (*shape, *inner), dtype),
        "segment_ids": torch.from_numpy(ids.reshape(shape)).to(draw.index_dtype(rng)),
    }
    if unsorted:
        segments += int(rng.integers(0, 1 + limit // 4))
        arguments["num_segments"] = segments
    if rng.random() < 1 / 8:
        return Case(operator, arguments, _spoil(rng, arguments))
    # TensorFlow cannot differentiate where there are no segments to gather from.
    differentiable = dtype in FLOATS + COMPLEX and (segments > 0 or not unsorted)
    upstream = draw.values(rng, (segments, *inner), dtype) if differentiable else None
    return Case(operator, arguments, "random", upstream, ("data",) if differentiable else ())


# ---- References -----------------------------------------------------------------------------------------------------


def _references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    numbers, segment_ids = case.arguments["data"], case.arguments["segment_ids"].numpy()
    if numbers.dtype in INTEGERS or numbers.numel() == 0:  # the ids do not matter then
        return {}
    data, segments = wide(numbers), theirs.values["output"].shape[0]
    output = _output(case, data, segment_ids, segments)
    result = {"output": output}
    if case.gradients:
        upstream = wide(case.upstream_of("output", (segments, *numbers.shape[segment_ids.ndim :])))
        result["gradient of data"] = _gradient(case, data, segment_ids, upstream, output)
    if numbers.dtype in HALVES:  # TensorFlow computes in the half type itself
        result = {name: replace(reference, ours_only=True) for name, reference in result.items()}
    return result


def _reduced(case: Case, data: np.ndarray, segment_ids: np.ndarray, segments: int) -> np.ndarray:
    number = _NUMBERS[_reduction(case.operator)]
    if _is_unsorted(case.operator):
        return unsorted_segment_reduce(data, segment_ids, segments, number)
    return segment_reduce(data, segment_ids, None, segments, number)


def _output(case: Case, data: np.ndarray, segment_ids: np.ndarray, segments: int) -> Reference:
    reduction, dtype = _reduction(case.operator), case.arguments["data"].dtype
    value, ids = _reduced(case, data, segment_ids, segments), segment_ids.reshape(-1).astype(np.int64)
    if reduction == "prod":
        return products(value, ids, dtype)
    if reduction in ("max", "min"):
        if _is_unsorted(case.operator):
            # The search starts from the lowest or highest finite number: an infinity beyond it does not win either.
            info = torch.finfo(dtype)
            value = np.minimum(value, info.max) if reduction == "min" else np.maximum(value, info.min)
        return extremes(value)
    return sums(value, _reduced(case, np.abs(data), segment_ids, segments), ids, dtype, scaled=reduction != "sum")


def _gradient(
    case: Case, data: np.ndarray, segment_ids: np.ndarray, upstream: np.ndarray, output: Reference
) -> Reference:
    """Return each row's gradient, nothing if its id is negative."""
    reduction, eps, segments = _reduction(case.operator), epsilon(case.arguments["data"].dtype), len(upstream)
    if not segments:
        return Reference(np.zeros_like(data), np.zeros(data.shape))
    number, only = _NUMBERS[reduction], np.zeros(data.shape, bool)
    if reduction in ("max", "min"):
        # Infinities that did not win receive nothing. Where a NaN won, TensorFlow's result is different.
        upstream = np.where(output.value == _reduced(case, data, segment_ids, segments), upstream, 0)
        only = np.isnan(output.value)[np.maximum(segment_ids, 0)]
    if _is_unsorted(case.operator):
        value = unsorted_segment_reduce_backward(upstream, data, segment_ids, number)
    else:
        value = segment_reduce_backward(upstream, data, segment_ids, None, len(data), number)
    rounding = {"sum": 0.0, "prod": eps * (4 + segment_ids.size)}.get(reduction, 2 * eps)
    return Reference(value, rounding * np.abs(value), ours_only=only)


_sorted = Operator(random_case, _picked_sorted, _references)
_unsorted = Operator(random_case, _picked_unsorted, _references)

OPERATORS: dict[str, Operator] = {
    **{f"math.segment_{name}": _sorted for name in SORTED},
    **{f"math.unsorted_segment_{name}": _unsorted for name in UNSORTED},
    **{f"raw_ops.Segment{name.capitalize()}": _sorted for name in SORTED},
    **{f"raw_ops.UnsortedSegment{name.capitalize()}": _unsorted for name in SORTED if name != "mean"},
}
