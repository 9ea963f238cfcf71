"""Parity check of ``tf.sparse.segment_*`` and its gradient operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import draw
from .bounds import sums
from .case import FLOATS, INF, INT32_MAX, INT64_MAX, INTEGERS, NAN, Case, Operator, Outcome, Reference
from .draw import data, ints
from .reference import MEAN, SQRTN, SUM
from .reference.numbers import wide
from .reference.sparse_segment import sparse_segment_reduce, sparse_segment_reduce_grad

REDUCTIONS = {"sum": "Sum", "mean": "Mean", "sqrt_n": "SqrtN"}


def _picked_forward(operator: str) -> list[Case]:
    sized = "WithNumSegments" in operator
    cases = []

    def add(
        note: str, rows: Any, indices: Any, segment_ids: Any, num_segments: Any = None, upstream: Tensor | None = None
    ) -> None:
        arguments = {"data": rows, "indices": indices, "segment_ids": segment_ids}
        if sized and num_segments is None:
            num_segments = 1 + max([0, *segment_ids.reshape(-1).tolist()])
        if num_segments is not None:
            if not sized and not operator.startswith("sparse"):
                return
            arguments["num_segments"] = num_segments
        cases.append(Case(operator, arguments, note, upstream, ("data",) if upstream is not None else ()))

    floats = data(4)
    add("gap, duplicate rows", floats, ints(0, 2, 2, 3), ints(0, 0, 2, 2), None, data(3))
    add("num_segments", floats, ints(0, 2), ints(1, 1), 5, data(5))
    add("num_segments int64", floats, ints(0, 2), ints(1, 1), torch.tensor(3), data(3))
    add("num_segments of the wrong dtype", floats, ints(0, 2), ints(1, 1), torch.tensor(3.0))
    add("num_segments a vector", floats, ints(0, 2), ints(1, 1), ints(3))
    add("num_segments negative", floats, ints(0, 2), ints(0, 1), -1)
    add("num_segments 0 with entries", floats, ints(0), ints(0), 0)
    add("num_segments too small", floats, ints(1, 2, 1), ints(0, 1, 2), 2)
    add("no entries", floats, ints(), ints(), None, data(1)[: int(sized)])
    add("no entries, 3 segments", floats, ints(), ints(), 3, data(3))
    add("no entries, no rows", floats[:0], ints(), ints(), 2, data(2))
    add("entries, no rows", floats[:0], ints(0), ints(0))
    add("no columns", floats[:, :0], ints(1, 2), ints(0, 1), None, data(2)[:, :0])
    add("no columns, index out of range", floats[:, :0], ints(1, 9), ints(0, 1))
    add("no columns, unsorted", floats[:, :0], ints(1, 2), ints(1, 0))
    add("rank 1", floats[:, 0], ints(1, 2, 1), ints(0, 1, 1), None, data(2)[:, 0])
    add("rank 3", floats.reshape(2, 2, 3), ints(1, 0, 1), ints(0, 1, 1), None, data(4).reshape(2, 2, 3))
    add("scalar data", floats[0, 0], ints(0), ints(0))
    add("scalar indices", floats, torch.tensor(0, dtype=torch.int32), ints(0))
    add("indices of rank 2", floats, ints(0).unsqueeze(0), ints(0))
    add("segment_ids of rank 2", floats, ints(0), ints(0).unsqueeze(0))
    add("lengths differ", floats, ints(0, 1), ints(0))
    add("index too large", floats, ints(0, 4), ints(0, 0))
    add("index negative", floats, ints(0, -1), ints(0, 0))
    add("index above 2^32", floats, ints(2**32, dtype=torch.int64), ints(0))
    add("index 2^63 - 1", floats, ints(INT64_MAX, dtype=torch.int64), ints(0))
    add("unsorted", floats, ints(0, 1, 2), ints(0, 2, 1))
    add("unsorted, above num_segments in between", floats, ints(0, 1, 2), ints(0, 9, 2), 3)
    add("first segment id negative", floats, ints(0, 1), ints(-1, 0))
    add("all segment ids negative", floats, ints(0, 1), ints(-2, -1), 3)
    add("segment id above 2^32", floats, ints(0, 1), ints(2**32, 1, dtype=torch.int64), 3)
    add("indices int16", floats, ints(0, dtype=torch.int16), ints(0))
    add("indices float", floats, torch.zeros(1), ints(0))
    add(
        "infinities and NaN",
        torch.tensor([INF, -INF, NAN, 1.0]),
        ints(0, 3, 1, 0, 1, 2, 3),
        ints(0, 0, 1, 2, 2, 3, 4),
    )
    if not operator.endswith(("mean", "Mean", "MeanWithNumSegments")):  # a mean's sum overflows
        add("overflow of float32", torch.tensor([3e38, 3e38, 1.0]), ints(0, 1, 2), ints(0, 0, 1), None, torch.ones(2))
    add("overflow of float16", torch.tensor([6e4, 6e4, 1.0]).half(), ints(0, 1, 2), ints(0, 0, 1))
    for dtype in (torch.float16, torch.bfloat16):
        # A sum kept in float16 would leave 2048 + 8 * 1 at 2048, one kept in bfloat16 256 + 8 * 1 at 256.
        start = 2048.0 if dtype == torch.float16 else 256.0
        add("summed in float32", torch.tensor([start, 1.0], dtype=dtype), ints(0, *[1] * 8), ints(*[0] * 9))
    for dtype in FLOATS:
        upstream = torch.tensor([1.0, 3.0], dtype=dtype)
        add("every dtype", torch.tensor([1.0, 0.1, 3.0], dtype=dtype), ints(0, 1, 1), ints(0, 0, 1), None, upstream)
    for dtype in INTEGERS:
        top = torch.iinfo(dtype).max
        numbers = torch.tensor([top, 1, top - 1], dtype=dtype)
        add("integers wrap", numbers, ints(0, 1, 2, 2, 0), ints(0, 0, 2, 2, 2))
    for bad in (torch.bool, torch.complex64):
        add(f"data {bad}", torch.ones(2, dtype=bad), ints(0), ints(0))
    return cases


def _picked_grad(operator: str) -> list[Case]:
    size_name = "dense_output_dim0" if operator.endswith("V2") else "output_dim0"
    cases = []

    def add(note: str, grad: Tensor, indices: Tensor, segment_ids: Tensor, size: Any = 4) -> None:
        arguments = {"grad": grad, "indices": indices, "segment_ids": segment_ids, size_name: size}
        cases.append(Case(operator, arguments, note))

    grad = data(3)
    add("duplicates, rows without entries", grad, ints(3, 0, 3), ints(0, 0, 2))
    add("segment ids unsorted", grad, ints(0, 1, 0, 3), ints(2, 0, 1, 0))
    add("int64", grad, ints(0, 1, dtype=torch.int64), ints(2, 0, dtype=torch.int64))
    add("int64 indices", grad, ints(3, 1, dtype=torch.int64), ints(2, 0))
    add("no entries", grad, ints(), ints())
    add("no entries, no rows", grad[:0], ints(), ints(), 0)
    add("entries, no rows", grad[:0], ints(0), ints(0))
    add("no columns", grad[:, :0], ints(1, 1), ints(0, 1))
    add("no columns, index out of range", grad[:, :0], ints(5), ints(0))
    add("rank 1", grad[:, 0], ints(1, 1), ints(0, 1))
    add("rank 3", data(4).reshape(2, 2, 3), ints(1, 0, 1), ints(0, 1, 1))
    add("index too large", grad, ints(4), ints(0))
    add("index negative", grad, ints(-1), ints(0))
    add("last segment id too large", grad, ints(0, 1), ints(0, 3))
    add("segment id too large in between", grad, ints(0, 1, 1), ints(0, 3, 1))
    add("segment id negative", grad, ints(0, 1, 1), ints(0, -1, 1))
    add("segment id above 2^32", grad, ints(0, 1), ints(2**32, 0, dtype=torch.int64))
    add("segment id 2^63 - 1", grad, ints(0), ints(INT64_MAX, dtype=torch.int64))
    add("lengths differ", grad, ints(0, 1), ints(0))
    add("rank 2", grad, ints(0, 1).unsqueeze(0), ints(0, 1).unsqueeze(0))
    add("scalar grad", grad[0, 0], ints(0), ints(0))
    add("integer grad", ints(1, 2), ints(0), ints(0))
    add("negative size", grad, ints(0), ints(0), -2)
    add("negative size, no entries", grad, ints(), ints(), -2)
    add("size a vector", grad, ints(0), ints(0), ints(2))
    add("size int64", grad, ints(0), ints(0), torch.tensor(2))
    add("infinities and NaN", torch.tensor([INF, -INF, NAN]), ints(0, 0, 1, 2), ints(0, 1, 2, 0))
    if operator.endswith("V2"):
        add("the highest id", grad, ints(INT32_MAX - 1, 0), ints(0, 1), INT32_MAX)
    for dtype in FLOATS:
        add("every dtype", torch.tensor([0.1, 3.0], dtype=dtype), ints(0, 1, 1, 0, 0), ints(0, 0, 0, 1, 1))
    return cases


def _spoil(rng: np.random.Generator, arguments: dict[str, Any], bound: int) -> str:
    """Make one argument of a segment operator wrong and return which; ``bound`` is the indices' bound."""
    count = arguments["indices"].numel()
    data = next(name for name in ("data", "grad") if name in arguments)
    ways = ["length", "index dtype", "segment id dtype", "data dtype", "scalar data", "index rank", "segment id rank"]
    ways += ["index", "extreme index", "negative index", "negative segment id"] if count else []
    way = str(rng.choice(ways))
    position = int(rng.integers(count)) if count else 0
    target = "segment_ids" if "segment id" in way else "indices"
    changed = arguments[target].clone()
    if way == "length":
        changed = torch.cat([changed, changed.new_zeros(1)])
    elif way.endswith("dtype") and way != "data dtype":
        changed = changed.to(torch.int16)
    elif way.endswith("rank"):
        changed = changed.unsqueeze(0)
    elif way == "data dtype":
        target, changed = data, arguments[data].to(torch.complex64)
    elif way == "scalar data":
        target, changed = data, torch.ones((), dtype=arguments[data].dtype)
    else:
        bad = {"index": bound, "extreme index": torch.iinfo(changed.dtype).max, "negative index": -1}
        changed[position] = bad.get(way, -1)
    arguments[target] = changed
    return way


def random_forward(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw a segment reduction of up to ``elements`` numbers; one call in six is wrong."""
    is_sum = operator.endswith(("segment_sum", "Sum", "SumWithNumSegments"))
    dtype = draw.one_of(rng, FLOATS + INTEGERS if is_sum and rng.random() < 0.5 else FLOATS)
    inner = draw.inner_shape(rng)
    limit = draw.rows_limit(elements, inner)
    count, rows, spread = draw.size(rng, limit), draw.size(rng, limit), 1 + draw.size(rng, limit)
    rows = max(rows, 1) if count else rows
    segment_ids = torch.from_numpy(np.sort(draw.ids(rng, count, spread)))
    last = int(segment_ids[-1]) + 1 if count else 0
    arguments: dict[str, Any] = {
        "data": draw.values(rng, (rows, *inner), dtype),
        "indices": torch.from_numpy(draw.ids(rng, count, max(rows, 1))).to(draw.index_dtype(rng)),
        "segment_ids": segment_ids.to(draw.index_dtype(rng)),
    }
    if "WithNumSegments" in operator or (operator.startswith("sparse") and rng.random() < 0.5):
        arguments["num_segments"] = last + int(rng.integers(0, 1 + limit // 4))
    note = "random"
    if rng.random() < 1 / 6:
        kind = rng.random()
        if kind < 0.2 and count > 1 and last > 1:
            arguments["segment_ids"], note = arguments["segment_ids"].flip(0), "unsorted"
        elif kind < 0.4 and "num_segments" in arguments:
            arguments["num_segments"], note = last - 1, "num_segments too small"
        else:
            note = _spoil(rng, arguments, rows)
        return Case(operator, arguments, note)
    upstream = None
    if dtype in FLOATS:
        upstream = draw.values(rng, (arguments.get("num_segments", last), *inner), dtype)
    return Case(operator, arguments, note, upstream, ("data",) if upstream is not None else ())


def random_grad(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Draw the call of a gradient operator, with sorted or unsorted segment ids; one call in six is wrong."""
    inner = draw.inner_shape(rng)
    limit = draw.rows_limit(elements, inner)
    count, segments, bound = draw.size(rng, limit), draw.size(rng, limit), draw.size(rng, limit)
    segments, bound = (max(segments, 1), max(bound, 1)) if count else (segments, bound)
    sparse = operator.endswith("V2")
    indices = draw.ids(rng, count, max(bound, 1))
    if sparse and count and rng.random() < 0.15:
        indices, bound = indices + (2**31 - 1 - bound), 2**31 - 1  # ids as high as TensorFlow takes them
    segment_ids = draw.ids(rng, count, max(segments, 1))
    arguments: dict[str, Any] = {
        "grad": draw.values(rng, (segments, *inner), draw.one_of(rng, FLOATS)),
        "indices": torch.from_numpy(indices).to(draw.index_dtype(rng)),
        "segment_ids": torch.from_numpy(np.sort(segment_ids) if rng.random() < 0.5 else segment_ids),
        "dense_output_dim0" if sparse else "output_dim0": bound,
    }
    arguments["segment_ids"] = arguments["segment_ids"].to(draw.index_dtype(rng))
    note = "random"
    if rng.random() < 1 / 6:
        note = _spoil(rng, arguments, bound)
    return Case(operator, arguments, note)


# ---- References -----------------------------------------------------------------------------------------------------


def _number(operator: str) -> int:
    name = operator.lower()
    return SQRTN if "sqrt" in name else MEAN if "mean" in name else SUM


def _references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    data, segments = case.arguments["data"], theirs.values["output"].shape[0]
    if data.dtype not in FLOATS:
        return {}
    indices, segment_ids = (case.arguments[name].numpy() for name in ("indices", "segment_ids"))
    numbers, reduction = wide(data), _number(case.operator)
    value, magnitude = (
        sparse_segment_reduce(x, indices, segment_ids, segments, reduction) for x in (numbers, np.abs(numbers))
    )
    result = {"output": sums(value, magnitude, segment_ids, data.dtype, sources=indices, scaled=reduction != SUM)}
    if case.gradients:
        upstream = case.upstream_of("output", (segments, *data.shape[1:]))
        gradient = _gradient(case, upstream, segment_ids, indices, data.shape[0])
        result |= {"gradient of data": gradient, "sparse gradient of data": gradient}
        result["gradient of data"] = _unless_empty(gradient, indices)
    return result


def _references_of_grad(case: Case, theirs: Outcome) -> dict[str, Reference]:
    indices, segment_ids = (case.arguments[name].numpy() for name in ("indices", "segment_ids"))
    grad = case.arguments["grad"]
    if case.operator.endswith("V2"):
        ids, positions = np.unique(indices, return_inverse=True)
        return {"output": _gradient(case, grad, segment_ids, positions, len(ids))}
    reference = _gradient(case, grad, segment_ids, indices, int(case.arguments["output_dim0"]))
    return {"output": _unless_empty(reference, indices)}


def _gradient(case: Case, grad: Tensor, segment_ids: np.ndarray, rows: np.ndarray, size: int) -> Reference:
    numbers, reduction = wide(grad), _number(case.operator)
    value, magnitude = (
        sparse_segment_reduce_grad(x, rows, segment_ids, size, reduction) for x in (numbers, np.abs(numbers))
    )
    return sums(value, magnitude, rows, grad.dtype, sources=segment_ids, scaled=reduction != SUM)


def _unless_empty(reference: Reference, indices: np.ndarray) -> Reference:
    """Compare only ours if indices are empty: TensorFlow 2.21's dense gradient is then uninitialised memory."""
    return replace(reference, ours_only=len(indices) == 0)


_forward = Operator(
    random_forward,
    _picked_forward,
    _references,
    gradient_calls={"gradient": {}, "sparse gradient": {"sparse_gradient": True}},
)
_grad = Operator(random_grad, _picked_grad, _references_of_grad)

OPERATORS = {
    **{f"sparse.segment_{name}": _forward for name in REDUCTIONS},
    **{f"raw_ops.SparseSegment{name}": _forward for name in REDUCTIONS.values()},
    **{f"raw_ops.SparseSegment{name}WithNumSegments": _forward for name in REDUCTIONS.values()},
    **{f"raw_ops.SparseSegment{name}Grad": _grad for name in REDUCTIONS.values()},
    **{f"raw_ops.SparseSegment{name}GradV2": _grad for name in REDUCTIONS.values()},
}
