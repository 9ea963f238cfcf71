"""Parity check of the embedding lookups: their calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import RaggedTensor, SparseTensor
from . import draw
from .case import FLOATS, INF, INTEGERS, NAN, Case
from .draw import data, ints, sparse_of

# ---- Random cases ----------------------------------------------------------------------------------------------------


def _random_params(rng: np.random.Generator, operator: str, elements: int) -> tuple[Any, dict[str, Any], int]:
    """Draw tables, further arguments, and the number of ids that have a row."""
    dtype = draw.one_of(rng, FLOATS)
    inner = draw.inner_shape(rng)
    if "safe" in operator:
        inner = (int(np.prod(inner)),)
    if 0 in inner:
        inner = (3,)
    n = int(rng.integers(1, 5)) if rng.random() < 0.5 else 1
    limit = draw.rows_limit(elements, inner)
    options: dict[str, Any] = {}
    strategy = "div"
    if "v1" in operator and rng.random() < 0.7:
        strategy = options["partition_strategy"] = draw.one_of(rng, ("mod", "div"))
    elif "v1" in operator and "safe" not in operator:
        strategy = "mod"
    total = max(draw.size(rng, limit), n)
    sizes = [len(range(shard, total, n)) for shard in range(n)]  # the strategies agree on the sizes
    shards = [draw.values(rng, (size, *inner), dtype) for size in sizes]
    del strategy
    if rng.random() < 0.4:
        norm = float((shards[0].double().reshape(sizes[0], -1) ** 2).sum(1).mean().sqrt())
        options["max_norm"] = float(np.float32(norm * rng.uniform(0.3, 1.7)))
    alone = n == 1 and rng.random() < 0.7
    return shards[0] if alone else shards, options, total


def random_lookup(rng: np.random.Generator, operator: str, elements: int) -> Case:
    params, options, total = _random_params(rng, operator, elements)
    first = params[0] if isinstance(params, list) else params
    shape = tuple(int(rng.integers(0, 6)) for _ in range(int(rng.integers(0, 4))))
    if rng.random() < 0.4:
        shape = (draw.size(rng, draw.rows_limit(elements, tuple(first.shape[1:]))),)
    count = int(np.prod(shape))
    ids = torch.from_numpy(draw.ids(rng, count, total).reshape(shape)).to(draw.index_dtype(rng))
    arguments: dict[str, Any] = {"params": params, "ids": ids, **options}
    if count and rng.random() < 1 / 6:
        bad = int(draw.one_of(rng, (-1, total * 2 + 7, 2**31 - 1)))
        ids.view(-1)[int(rng.integers(count))] = bad
        return Case(operator, arguments, "bad id", names=(str(bad),))
    ragged = len(shape) == 1 and rng.random() < 0.2
    if ragged:
        arguments["ids"] = RaggedTensor.from_row_splits(ids, torch.tensor([0, count // 2, count // 2, count]))
    upstream = draw.values(rng, (97,), first.dtype)
    return Case(operator, arguments, "random", upstream if not ragged else None, ("params",) if not ragged else ())


def _random_ids(
    rng: np.random.Generator, safe: bool, count: int, total: int
) -> tuple[SparseTensor | RaggedTensor, tuple[int, ...] | None]:
    low = 3 if safe else 0
    ids = torch.from_numpy(draw.ids(rng, count, total + low) - low).to(draw.index_dtype(rng))
    # For ragged ids TensorFlow's safe lookup allocates ids x rows elements.
    if rng.random() < 0.3 and not (safe and count > 1_000):
        rows = 1 + draw.size(rng, 2 * count + 1)
        splits = np.concatenate([[0], np.bincount(draw.ids(rng, count, rows), minlength=rows).cumsum()])
        return RaggedTensor.from_row_splits(ids, torch.from_numpy(splits)), None
    rank = int(rng.choice([2, 2, 2, 3, 4])) if safe else int(rng.choice([1, 2, 2, 3]))
    shape = (1 + draw.size(rng, 2 * count + 1), *(int(rng.integers(1, 6)) for _ in range(rank - 1)))
    return draw.sparse(rng, shape, ids, ordered=not safe or rng.random() < 0.5), shape


def _with_values(ids: SparseTensor | RaggedTensor, values: Tensor) -> SparseTensor | RaggedTensor:
    if isinstance(ids, RaggedTensor):
        return RaggedTensor.from_row_splits(values, ids.row_splits)
    return SparseTensor(ids.indices, values, ids.dense_shape)


def random_sparse(rng: np.random.Generator, operator: str, elements: int) -> Case:
    safe = "safe" in operator
    params, options, total = _random_params(rng, operator, elements)
    first = params[0] if isinstance(params, list) else params
    count = draw.size(rng, draw.rows_limit(elements, tuple(first.shape[1:])))
    ids, _ = _random_ids(rng, safe, count, total)
    prefix = "sparse" if safe else "sp"
    arguments: dict[str, Any] = {"embedding_weights" if safe else "params": params, f"{prefix}_ids": ids, **options}
    weighted = rng.random() < 0.5
    if weighted:
        # Sums of eighths are exact, so that a zero denominator is zero on both sides.
        values = torch.from_numpy(rng.integers(-4, 25, count) / 8).to(first.dtype)
        arguments[f"{prefix}_weights"] = _with_values(ids, values)
    elif not safe:
        arguments["sp_weights"] = None
    arguments["combiner"] = draw.one_of(rng, ("sum", "mean", "sqrtn", None))
    if safe and rng.random() < 0.6:
        arguments["default_id"] = int(rng.integers(total))
    if count and rng.random() < 1 / 6:
        return _spoiled(rng, operator, arguments, total, prefix)
    gradients = ["embedding_weights" if safe else "params"] + [f"{prefix}_weights"] * weighted
    return Case(operator, arguments, "random", draw.values(rng, (97,), first.dtype), tuple(gradients))


def _spoiled(rng: np.random.Generator, operator: str, arguments: dict[str, Any], total: int, prefix: str) -> Case:
    ids = arguments[f"{prefix}_ids"]
    ways = ["too large id", "combiner"] + (["negative id"] if prefix == "sp" else [])
    ways += ["weights' length"] * (arguments.get(f"{prefix}_weights") is not None)
    way = str(rng.choice(ways))
    if way == "combiner":
        return Case(operator, {**arguments, "combiner": "max"}, way, names=("combiner", "max"))
    if way == "weights' length":
        values = torch.ones(len(ids.values) + 1, dtype=arguments[f"{prefix}_weights"].values.dtype)
        spoiled: SparseTensor | RaggedTensor = RaggedTensor.from_row_splits(values, torch.tensor([0, len(values)]))
        if isinstance(ids, SparseTensor):
            spoiled = SparseTensor(torch.zeros(len(values), 2, dtype=torch.int64), values, torch.tensor([1, 1]))
        return Case(operator, {**arguments, f"{prefix}_weights": spoiled}, way, names=(f"{prefix}_weights",))
    bad = -1 if way == "negative id" else 2 * total + 9
    ids.values[int(rng.integers(len(ids.values)))] = bad
    arguments[f"{prefix}_weights"] = None  # a weight might leave the bad id out
    return Case(operator, arguments, way, names=(str(bad),))


# ---- Hand-picked cases -----------------------------------------------------------------------------------------------

# The words of our errors in cases where the operator that raises them names its arguments otherwise.
_ERRORS = {
    "index too large": ("indices[0]", "6"),
    "index negative": ("indices[0]", "-1"),
    "too large id": ("[1]", "6"),
    "negative id": ("indices[1]", "-1"),
    "unsorted": ("sp_ids", "1", "0"),
    "no table": ("default_id", "None"),
    "negative row": ("row_ids[0]", "-1"),
}


def picked_lookup(operator: str) -> list[Case]:
    table = data(6)
    shards = [table[:2], table[2:4], table[4:]]
    cases = []

    def add(note: str, params: Any, ids: Any, upstream: bool = True, **options: Any) -> None:
        arguments = {"params": params, "ids": ids, **options}
        gradients = ("params",) if upstream else ()
        cases.append(Case(operator, arguments, note, data(8) if upstream else None, gradients, _ERRORS.get(note)))

    add("repeated ids", table, ints(5, 0, 5))
    add("no ids", table, ints())
    add("a scalar id", table, torch.tensor(3))
    add("rank 3", table, ints(0, 1, 2, 3).reshape(2, 1, 2))
    add("shards", shards, ints(5, 0, 3, 3))
    add("uneven shards", [table[:2], table[:1], table[:1]], ints(3, 0, 2))
    add("an empty shard", [table[:3], table[:0]], ints(0, 1))
    add("one shard in a list", [table], ints(5, 0))
    add("clipped", table, ints(5, 0, 5), max_norm=1.0)
    add("clipped shards", shards, ints(5, 0, 3, 3), max_norm=1.0)
    add("max_norm an integer", table, ints(5), max_norm=1)
    add("at the norm", torch.tensor([[3.0, 4.0], [0.0, 5.0]]), ints(0, 1, 0), max_norm=5.0)
    add("a row of zeros", torch.tensor([[0.0, 0.0], [1.0, 0.0]]), ints(0, 1), max_norm=0.5)
    add("max_norm 0", torch.tensor([[0.0, 0.0], [1.0, 0.0]]), ints(0, 1), upstream=False, max_norm=0.0)
    add("max_norm negative", torch.tensor([[1.0, 0.0]]), ints(0), upstream=False, max_norm=-2.0)
    add("infinities and NaN", torch.tensor([[INF, 1.0], [NAN, 1.0], [-INF, 0.0]]), ints(0, 1, 2), False, max_norm=2.0)
    add("rank 1", table[:, 0].contiguous(), ints(2, 2, 0), max_norm=0.5)
    add("rank 4", data(8).reshape(4, 1, 2, 3), ints(2, 2, 0))
    add("a scalar table", table[0, 0], ints(0))
    add("index too large", table, ints(6), upstream=False)
    add("index negative", table, ints(-1), upstream=False)
    add("too large, shards", shards, ints(7), upstream=False)
    add("negative, shards", shards, ints(-1), upstream=False)
    add("no params", [], ints(0), upstream=False)
    add("ids int16", shards, ints(3, dtype=torch.int16))
    add("ids int8", table, ints(3, dtype=torch.int8), upstream=False)
    add("ids float", table, torch.ones(1), upstream=False)
    for dtype in (*INTEGERS[:5], torch.int64, torch.bool):
        add("a table of another dtype", table.to(dtype), ints(3, 0), upstream=False)
    add("integers have no norm", table.int(), ints(3), upstream=False, max_norm=1.0)
    for dtype in FLOATS:
        add("every dtype", table.to(dtype), ints(3, 3, 0))
        add("every dtype, clipped", table.to(dtype), ints(3, 3, 0), max_norm=1.0)
    ragged = RaggedTensor.from_row_splits(ints(3, 5, 0), torch.tensor([0, 2, 2, 3]))
    add("ragged ids", shards, ragged, upstream=False, max_norm=1.0)
    if "v1" in operator:
        for strategy in ("mod", "div"):
            add(strategy, shards, ints(5, 0, 3, 1), partition_strategy=strategy)
        add("a strategy that is not looked at", table, ints(1), partition_strategy="any")
        add("an unknown strategy", shards, ints(1), upstream=False, partition_strategy="any")
    return cases


def picked_sparse(operator: str) -> list[Case]:
    safe = "safe" in operator
    prefix, argument = ("sparse", "embedding_weights") if safe else ("sp", "params")
    table = data(6)
    shards = [table[:2], table[2:4], table[4:]]
    rows, shape = [[0, 0], [0, 1], [2, 0], [2, 1]], [4, 2]
    ids, weights = ints(5, 0, 3, 5), torch.tensor([1.0, 2.0, 0.5, -0.25])
    some, weighted = sparse_of(rows, ids, shape), sparse_of(rows, weights, shape)
    cases = []

    def add(note: str, params: Any, sparse: Any, given: Any = None, upstream: bool = True, **options: Any) -> None:
        arguments = {argument: params, f"{prefix}_ids": sparse, f"{prefix}_weights": given, **options}
        gradients: tuple[str, ...] = (argument, f"{prefix}_weights") if given is not None else (argument,)
        gradients = gradients if upstream else ()
        cases.append(Case(operator, arguments, note, data(8) if upstream else None, gradients, _ERRORS.get(note)))

    for combiner in ("sum", "mean", "sqrtn", None):
        add(f"{combiner}", table, some, combiner=combiner)
        add(f"{combiner}, weights", table, some, weighted, combiner=combiner)
    add("shards", shards, some, weighted)
    add("clipped", table, some, max_norm=1.0)
    add("clipped shards", shards, some, weighted, max_norm=1.0)
    opposite = torch.tensor([1.0, -1.0, 0.5, -0.5])
    add("zero denominators", table, some, sparse_of(rows, opposite, shape), combiner="mean")
    add("no ids", table, sparse_of([], ints(), shape))
    add("rank 3", table, sparse_of([[0, 0, 1], [0, 2, 0], [1, 1, 1]], ints(5, 1, 0), [3, 3, 2]))
    add("rank 1", table, sparse_of([[0], [2]], ints(5, 1), [4]))
    add("unsorted", table, sparse_of([[1, 0], [0, 0], [1, 1]], ints(5, 1, 0), [2, 2]), upstream=safe)
    add("negative row", table, sparse_of([[-1, 0]], ints(1), [2, 2]), upstream=False)
    add("too large id", table, sparse_of(rows, ints(5, 6, 0, 1), shape), upstream=False)
    add("negative id", table, sparse_of(rows, ints(5, -1, -2, -1), shape), upstream=safe)
    ragged = RaggedTensor.from_row_splits(ids, torch.tensor([0, 2, 2, 4, 4]))
    add("ragged", table, ragged)
    add("ragged, weights", shards, ragged, RaggedTensor.from_row_splits(weights, ragged.row_splits), max_norm=1.5)
    if not safe:  # TensorFlow's safe lookup raises an AttributeError
        add("ids are a tensor", table, ids, upstream=False)
    add("weights of another kind", table, some, ragged, upstream=False)
    add("fewer weights", table, some, sparse_of(rows[:3], weights[:3], shape), upstream=False)
    add("unknown combiner", table, some, upstream=False, combiner="max")
    add("int16 ids", table, sparse_of(rows, ids.short(), shape), upstream=False)
    add("int16 ids, clipped", table, sparse_of(rows, ids.short(), shape), upstream=False, max_norm=1.0)
    add("float ids", table, sparse_of(rows, ids.float(), shape), upstream=False)
    add("no params", [], some, upstream=False)
    for dtype in FLOATS:
        given = sparse_of(rows, weights.to(dtype), shape)
        add("every dtype", table.to(dtype), some)
        add("every dtype, weights", table.to(dtype), some, given)
    if safe:
        for default in (None, 0, 4):
            add(f"default_id {default}", table, sparse_of(rows, ints(5, -1, -2, -1), shape), default_id=default)
        add("default of shards", shards, sparse_of(rows, ints(5, -1, -2, -1), shape), default_id=3)
        add("a bad default, needed", table, some, upstream=False, default_id=6)
        add("a bad default, not needed", table, sparse_of([[0, 0]], ints(1), [1, 1]), default_id=6)
        add("no table", table[:0], sparse_of([], ints(), shape), upstream=False)
        add("NaN weights", table, some, sparse_of(rows, weights.clone().fill_(NAN), shape))
        add(
            "weights of another dtype",
            table,
            some,
            sparse_of(rows, weights.double(), shape),
            False,
        )
        add("table of rank 3", table[:, None].contiguous(), some, upstream=False)
        add("table of rank 3, default", table[:, None].contiguous(), some, default_id=1)
    else:
        add("trailing rows", table, sparse_of(rows, ids, [9, 2]))
        add(
            "weights int32",
            table,
            some,
            sparse_of(rows, ints(1, 2, 3, 4), shape),
            upstream=False,
        )
        add(
            "weights float64",
            table,
            some,
            sparse_of(rows, weights.double(), shape),
            upstream=False,
        )
        add("tables of rank 1", table[:, 0].contiguous(), some)
        add("tables of rank 3", data(8).reshape(4, 2, 3), sparse_of(rows, ints(1, 0, 3, 3), shape))
        add("integers", table.int(), some, upstream=False, combiner="sum")
        add("integers, mean", table.int(), some, upstream=False)
        counts = sparse_of(rows, ints(3, 2, 1, 1), shape)
        add("integers, weighted mean", (4 * table).int(), some, counts, upstream=False)
        half = sparse_of(rows, torch.tensor([0.1, 0.3, 0.7, 0.9]), shape)
        add("halves, other weights", table.half(), some, half, upstream=False)
    return cases
