"""The cases of the parity check: what a call is, and random calls of every operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)
INTEGERS = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
)
REDUCTIONS = {"sum": "Sum", "mean": "Mean", "sqrt_n": "SqrtN"}
INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Case:
    """One call, the same on both sides."""

    #: The dotted name in ``tf`` and in ``compat.tensorflow``.
    operator: str
    #: Keyword arguments: torch tensors, numbers, dtypes, or strings in a list or numpy array.
    arguments: dict[str, Any]
    #: What is special about it.
    note: str
    #: The gradient of the result, where the gradient of ``data`` is compared too.
    upstream: Tensor | None = None

    @property
    def dtype(self) -> str:
        """The dtype that the table shows."""
        first = next(iter(self.arguments.values()))
        return str(first.dtype).removeprefix("torch.") if isinstance(first, Tensor) else "string"

    @property
    def reduction(self) -> str | None:
        """``sum``, ``mean`` or ``sqrt_n`` of a segment operator, else None."""
        for name, camel in REDUCTIONS.items():
            if self.operator == f"sparse.segment_{name}" or self.operator.startswith(f"raw_ops.SparseSegment{camel}"):
                return name
        return None


# ---- Random parts ---------------------------------------------------------------------------------------------------


def _size(rng: np.random.Generator, limit: int) -> int:
    """A size from 0 to ``limit``, each magnitude as likely as the next."""
    return 0 if rng.random() < 0.06 else int(np.exp(rng.uniform(0, np.log(max(limit, 1) + 0.5))))


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of a random magnitude; integers over the whole range, so that sums wrap."""
    if dtype in INTEGERS:
        info = torch.iinfo(dtype)
        numbers = rng.integers(info.min, info.max, shape, dtype=str(dtype).removeprefix("torch."), endpoint=True)
        return torch.from_numpy(np.asarray(numbers))
    scale = 10.0 ** rng.uniform(-2, 2)
    return torch.from_numpy(np.asarray(rng.standard_normal(shape) * scale)).to(dtype)


def _index_dtype(rng: np.random.Generator) -> torch.dtype:
    return torch.int32 if rng.random() < 0.5 else torch.int64


def _ids(rng: np.random.Generator, count: int, bound: int) -> np.ndarray:
    """``count`` numbers in [0, bound): even, skewed so that few values repeat often, or all at the ends."""
    kind = rng.random()
    if kind < 0.5:
        return rng.integers(0, bound, count)
    if kind < 0.9:
        return (bound * rng.random(count) ** 6).astype(np.int64)
    return rng.choice(np.array([0, bound - 1]), count)


def _inner_shape(rng: np.random.Generator) -> tuple[int, ...]:
    """The dimensions after the first, of rank 0 to 3."""
    if rng.random() < 0.03:
        return (3, 0)
    rank = int(rng.integers(0, 4))
    return tuple(int(rng.integers(1, limit)) for limit in ((), (65,), (17, 9), (9, 5, 4))[rank])


def _dtype(rng: np.random.Generator, choices: tuple[torch.dtype, ...]) -> torch.dtype:
    return choices[int(rng.integers(len(choices)))]


def _spoil(rng: np.random.Generator, arguments: dict[str, Any], bound: int) -> str:
    """Make one argument of a segment operator wrong; ``bound`` is that of the indices. Returns what is wrong."""
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


# ---- Random calls ---------------------------------------------------------------------------------------------------


def random_forward(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """A segment reduction of up to ``elements`` numbers, one in six of them wrong."""
    is_sum = operator.endswith(("segment_sum", "Sum", "SumWithNumSegments"))
    dtype = _dtype(rng, FLOATS + INTEGERS if is_sum and rng.random() < 0.5 else FLOATS)
    inner = _inner_shape(rng)
    limit = max(elements // max(int(np.prod(inner)), 1), 1)
    count, rows, spread = _size(rng, limit), _size(rng, limit), 1 + _size(rng, limit)
    rows = max(rows, 1) if count else rows
    segment_ids = torch.from_numpy(np.sort(_ids(rng, count, spread)))
    last = int(segment_ids[-1]) + 1 if count else 0
    arguments: dict[str, Any] = {
        "data": _values(rng, (rows, *inner), dtype),
        "indices": torch.from_numpy(_ids(rng, count, max(rows, 1))).to(_index_dtype(rng)),
        "segment_ids": segment_ids.to(_index_dtype(rng)),
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
        upstream = _values(rng, (arguments.get("num_segments", last), *inner), dtype)
    return Case(operator, arguments, note, upstream)


def random_grad(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """A gradient operator, its segment ids sorted or not, one in six of them wrong."""
    inner = _inner_shape(rng)
    limit = max(elements // max(int(np.prod(inner)), 1), 1)
    count, segments, bound = _size(rng, limit), _size(rng, limit), _size(rng, limit)
    segments, bound = (max(segments, 1), max(bound, 1)) if count else (segments, bound)
    sparse = operator.endswith("V2")
    indices = _ids(rng, count, max(bound, 1))
    if sparse and count and rng.random() < 0.15:
        indices, bound = indices + (2**31 - 1 - bound), 2**31 - 1  # ids as high as TensorFlow takes them
    segment_ids = _ids(rng, count, max(segments, 1))
    arguments: dict[str, Any] = {
        "grad": _values(rng, (segments, *inner), _dtype(rng, FLOATS)),
        "indices": torch.from_numpy(indices).to(_index_dtype(rng)),
        "segment_ids": torch.from_numpy(np.sort(segment_ids) if rng.random() < 0.5 else segment_ids),
        "dense_output_dim0" if sparse else "output_dim0": bound,
    }
    arguments["segment_ids"] = arguments["segment_ids"].to(_index_dtype(rng))
    note = "random"
    if rng.random() < 1 / 6:
        note = _spoil(rng, arguments, bound)
    return Case(operator, arguments, note)


def random_unique(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """A vector with many or few distinct values, of every dtype."""
    count = _size(rng, elements)
    distinct = 1 + _size(rng, max(count, 1))
    out_idx = _index_dtype(rng)
    kind = rng.random()
    if kind < 0.15:
        words = [rng.bytes(int(length)) for length in rng.integers(0, 20, min(distinct, 2000))]
        strings = [words[i] for i in _ids(rng, max(min(count, 20_000), 1), len(words))]
        return Case(operator, {"x": strings, "out_idx": out_idx}, "random strings")
    dtype = torch.bool if kind < 0.2 else _dtype(rng, FLOATS + INTEGERS)
    if dtype == torch.bool:
        values = torch.from_numpy(rng.integers(0, 2, count)).to(dtype)
    else:
        pool = _values(rng, (distinct,), dtype)
        if dtype in FLOATS:
            # TensorFlow's hash of a half type tells -0.0 from 0.0, although they are equal.
            zero = 0.0 if dtype in HALVES else -0.0
            pool[: distinct // 4] = float("nan") if rng.random() < 0.5 else zero
            pool[distinct // 4 : distinct // 3] = 0.0
        values = pool[torch.from_numpy(_ids(rng, count, distinct))] if count else pool[:0]
        if dtype in FLOATS and values.isnan().any():
            # No NaN equals another, and TensorFlow's hash map gives all the same place: its time is quadratic.
            values = values[:5000]
    if rng.random() < 0.05:
        return Case(operator, {"x": values.unsqueeze(0), "out_idx": out_idx}, "rank 2")
    return Case(operator, {"x": values, "out_idx": out_idx}, "random")


def random_hash(rng: np.random.Generator, operator: str, elements: int) -> Case:
    """Strings of up to 300 bytes, or integers of every length; few or many buckets."""
    buckets = int(rng.choice(np.array([1, 2, 1000, 2**31, INT64_MAX]))) if rng.random() < 0.9 else 0
    note = "random" if buckets else "no buckets"
    if operator.endswith("of integers"):
        dtype = _dtype(rng, INTEGERS)
        values = _values(rng, (_size(rng, elements),), dtype)
        shifts = torch.from_numpy(rng.integers(0, 8 * values.element_size(), values.shape))
        signed = values.view(getattr(torch, str(dtype).removeprefix("torch.").removeprefix("u")))
        return Case(operator, {"input": (signed >> shifts.to(signed.dtype)).view(dtype), "num_buckets": buckets}, note)
    limit = 300 if rng.random() < 0.5 else 12
    count = _size(rng, min(elements, 10_000))
    strings = np.empty(count, dtype=object)
    strings[:] = [rng.bytes(int(length)) for length in rng.integers(0, limit, count)]
    if count % 2 == 0 and rng.random() < 0.5:
        return Case(operator, {"input": strings.reshape(2, count // 2), "num_buckets": buckets}, note)
    return Case(operator, {"input": strings, "num_buckets": buckets}, note)


RandomCase = Callable[[np.random.Generator, str, int], Case]

#: Every operator that is compared, and what makes its random calls.
OPERATORS: dict[str, RandomCase] = {
    **{f"sparse.segment_{name}": random_forward for name in REDUCTIONS},
    **{f"raw_ops.SparseSegment{name}": random_forward for name in REDUCTIONS.values()},
    **{f"raw_ops.SparseSegment{name}WithNumSegments": random_forward for name in REDUCTIONS.values()},
    **{f"raw_ops.SparseSegment{name}Grad": random_grad for name in REDUCTIONS.values()},
    **{f"raw_ops.SparseSegment{name}GradV2": random_grad for name in REDUCTIONS.values()},
    "unique": random_unique,
    "unique_with_counts": random_unique,
    "raw_ops.Unique": random_unique,
    "raw_ops.UniqueWithCounts": random_unique,
    "strings.to_hash_bucket_fast": random_hash,
    "strings.to_hash_bucket_fast of integers": random_hash,
    "raw_ops.StringToHashBucketFast": random_hash,
}
