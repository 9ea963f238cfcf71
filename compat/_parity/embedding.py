"""Parity check of the embedding lookups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from ..tensorflow import RaggedTensor, SparseTensor
from .bounds import epsilon, sums
from .case import FLOATS, HALVES, Case, Operator, Outcome, Reference
from .embedding_cases import picked_lookup, picked_sparse, random_lookup, random_sparse
from .reference import MEAN, SQRTN, SUM
from .reference.embedding import Entries, embedding_dense_backward
from .reference.embedding import entries as entries_of
from .reference.embedding_lookup import (
    clip_rows_backward,
    clipped,
    embedding_bag_shards,
    embedding_bag_shards_weights_backward,
    pruned_bags,
    shard_rows,
)
from .reference.numbers import wide
from .reference.segment import segment_reduce

_MODES = {"sum": SUM, "mean": MEAN, "sqrtn": SQRTN}

# ---- The meaning of a call -------------------------------------------------------------------------------------------


def _safe(case: Case) -> bool:
    return "safe" in case.operator


def _params(case: Case) -> Any:
    return case.arguments["embedding_weights" if _safe(case) else "params"]


def _strategy(case: Case) -> int:
    """Return the number of the case's partition strategy for ``shard_rows``."""
    by_default = "mod" if "v1" in case.operator and not _safe(case) else "div"
    return ("mod", "div").index(case.arguments.get("partition_strategy", by_default))


def _rows(ids: Any) -> tuple[np.ndarray, int]:
    """Return the row of each id, and the number of rows."""
    if isinstance(ids, RaggedTensor):
        splits = ids.row_splits.numpy()
        return np.repeat(np.arange(len(splits) - 1), np.diff(splits)), len(splits) - 1
    indices, shape = ids.indices.numpy(), ids.shape
    if len(shape) <= 2:
        return (indices[:, 0], shape[0]) if len(shape) == 2 else (np.zeros(len(indices), np.int64), 1)
    return np.ravel_multi_index(tuple(indices[:, :-1].T), shape[:-1]), int(np.prod(shape[:-1]))


@dataclass
class _Lookup:
    """A lookup in the form that the operators of ``ops`` take."""

    indices: np.ndarray  # rows of the shards laid end to end; an id that is left out has their number of rows
    offsets: np.ndarray | None
    weights: np.ndarray | None
    positions: np.ndarray  # the places of the kept ids among the ids given
    count: int  # the number of bags


def _lookup(case: Case, sizes: list[int]) -> _Lookup:
    arguments, total = case.arguments, sum(sizes)
    # With one shard all strategies are the same.
    strategy = _strategy(case) if len(sizes) > 1 else 0
    if "ids" in arguments:
        ids = arguments["ids"]
        ids = (ids.values if isinstance(ids, RaggedTensor) else ids).numpy().reshape(-1).astype(np.int64)
        return _Lookup(shard_rows(ids, sizes, strategy, False), None, None, np.arange(len(ids)), len(ids))
    sparse = arguments["sparse_ids" if _safe(case) else "sp_ids"]
    given = arguments.get("sparse_weights" if _safe(case) else "sp_weights")
    ids = sparse.values.numpy().astype(np.int64)
    if _safe(case):
        bags, count = _rows(sparse)
    else:
        bags = sparse.indices.numpy()[:, 0] if isinstance(sparse, SparseTensor) else _rows(sparse)[0]
        count = int(bags[-1]) + 1 if len(bags) else 0
    prune = _safe(case) and given is not None and arguments.get("combiner", "mean") != "sum"
    default = arguments.get("default_id")
    default = None if default is None else int(default)
    weights = None if given is None else wide(given.values)
    weights, indices, offsets, positions = pruned_bags(ids, bags, weights, count, total, prune, default, True)
    indices = shard_rows(indices, sizes, strategy, True)
    return _Lookup(indices, offsets, None if given is None else weights, positions, count)


# ---- References ------------------------------------------------------------------------------------------------------


def _added(terms: np.ndarray, ids: np.ndarray, size: int) -> np.ndarray:
    """Return the sums of the terms' absolute values within each id."""
    return segment_reduce(np.abs(terms), ids, None, size, SUM)


def _references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    params = _params(case)
    shards = params if isinstance(params, list) else [params]
    dtype, inner = shards[0].dtype, shards[0].shape[1:]
    if dtype not in FLOATS:
        return {}
    tables = [wide(shard).reshape(len(shard), int(np.prod(inner))) for shard in shards]
    given = case.arguments.get("max_norm")
    max_norm = -1.0 if given is None else max(float(given), 0.0)
    mode = SUM if "ids" in case.arguments else _MODES[case.arguments.get("combiner", "mean") or "mean"]
    lookup = _lookup(case, [len(table) for table in tables])
    bags = (lookup.indices, lookup.offsets, lookup.weights)
    rows, columns = sum(map(len, tables)), tables[0].shape[1]
    eps = epsilon(dtype)
    # The relative error of clipping: of the norm's sum, its root and the operations that follow.
    clip_error = 0.0 if given is None else eps * (6 + np.sqrt(columns))

    entries = entries_of(*bags, mode, rows)
    value = embedding_bag_shards(tables, *bags, mode, rows, max_norm, False)
    with np.errstate(all="ignore"):
        table = clipped(tables, max_norm)
        magnitude = _added(table[entries.rows] * entries.factors[:, None], entries.bags, lookup.count)
    output = sums(value, magnitude, entries.bags, dtype, sources=entries.rows, scaled=True)
    if "ids" in case.arguments and given is None:
        output = replace(output, tolerance=np.zeros_like(value), their_tolerance=None)
    else:
        output = _with_tolerances(output, lambda allowed: allowed + (eps + clip_error) * magnitude)
    # TensorFlow clips half types in the half type.
    output.ours_only = dtype in HALVES and given is not None
    shape = tuple(theirs.values[_output_name(case)].shape)
    result = {_output_name(case): _reshaped(output, shape)}
    if not case.gradients:
        return result
    upstream = wide(case.upstream_of(_output_name(case), shape)).reshape(lookup.count, columns)
    value = embedding_dense_backward(upstream, *bags, None, rows, mode, rows, False)
    magnitude = _added(upstream[entries.bags] * entries.factors[:, None], entries.rows, rows)
    gradient = sums(value, magnitude, entries.rows, dtype, sources=entries.bags, scaled=True)
    gradient = _with_tolerances(gradient, lambda allowed: allowed + eps * magnitude)
    if given is not None:
        gradient = _through_clip(gradient, tables, max_norm, magnitude, clip_error)
    gradient.ours_only = dtype in HALVES and (given is not None or lookup.weights is not None)
    argument = "embedding_weights" if _safe(case) else "params"
    first = 0
    for position, shard in enumerate(shards):
        part = slice(first, first + len(shard))
        first = part.stop
        name = argument if not isinstance(params, list) else f"{argument}[{position}]"
        own = _with_tolerances(replace(gradient, value=gradient.value[part]), itemgetter(part))
        for label in ("gradient", "sparse gradient"):
            result[f"{label} of {name}"] = _reshaped(own, (len(shard), *inner))
    if lookup.weights is not None:
        arguments = (*bags, output.value, mode, rows)
        value = embedding_bag_shards_weights_backward(upstream, tables, *arguments, max_norm)
        errors = _errors_of_weights(table, entries, mode, upstream, output.value, dtype, clip_error)

        def of_given(allowed: np.ndarray) -> np.ndarray:
            every = np.zeros(len(lookup.indices), np.longdouble)
            every[entries.places] = errors(allowed)
            return every[lookup.positions]

        own = _with_tolerances(replace(output, value=value[lookup.positions], ours_only=dtype in HALVES), of_given)
        for label in ("gradient", "sparse gradient"):
            result[f"{label} of {'sparse_weights' if _safe(case) else 'sp_weights'}"] = own
    return result


def _output_name(case: Case) -> str:
    return "output.values" if isinstance(case.arguments.get("ids"), RaggedTensor) else "output"


def _reshaped(reference: Reference, shape: tuple[int, ...]) -> Reference:
    return _with_tolerances(
        replace(reference, value=reference.value.reshape(shape)), lambda allowed: allowed.reshape(shape)
    )


def _with_tolerances(reference: Reference, change: Callable[[np.ndarray], np.ndarray]) -> Reference:
    """Return the reference with both sides' tolerances changed."""
    theirs = reference.their_tolerance
    return replace(
        reference,
        tolerance=change(reference.tolerance),
        their_tolerance=None if theirs is None else change(theirs),
    )


def _through_clip(
    total: Reference, tables: list[np.ndarray], max_norm: float, magnitude: np.ndarray, clip_error: float
) -> Reference:
    """Return the gradient of rows that were scaled down to a norm."""
    table = np.concatenate(tables)
    with np.errstate(all="ignore"):
        squares = (table * table).sum(1, keepdims=True)
        is_clipped, factor = np.sqrt(squares) >= max_norm, max_norm / np.sqrt(squares)
        untouched = (total.value == 0).all(1, keepdims=True) & (magnitude == 0).all(1, keepdims=True)

        def spread(x: np.ndarray) -> np.ndarray:
            return factor * (x + np.abs(table) * ((np.abs(table) * x).sum(1, keepdims=True) / squares))

        def clip(allowed: np.ndarray) -> np.ndarray:
            error = np.where(is_clipped, spread(allowed) + 2 * clip_error * spread(magnitude), allowed)
            return np.where(untouched, 0, error)

        return _with_tolerances(replace(total, value=clip_rows_backward(total.value, tables, None, max_norm)), clip)


def _errors_of_weights(
    table: np.ndarray,
    entries: Entries,
    mode: int,
    upstream: np.ndarray,
    output: np.ndarray,
    dtype: torch.dtype,
    clip_error: float,
) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function of the output's bounds: the bounds on the gradient of each entry's weight."""
    own = {SUM: np.zeros_like(entries.factors), MEAN: np.ones_like(entries.factors)}.get(mode, entries.factors)
    g, x, out = np.abs(upstream[entries.bags]), np.abs(table[entries.rows]), output[entries.bags] * own[:, None]
    parts = (g * (x + np.abs(out))).sum(1)

    def errors(of_output: np.ndarray) -> np.ndarray:
        errors = (g * of_output[entries.bags]).sum(1) * np.abs(own)
        # Our gradient is computed from the returned output: rounded, if tables have a half type.
        rounding = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}.get(dtype, 0.0)
        errors = errors + rounding * (g * np.abs(out)).sum(1)
        if dtype == torch.float16:
            errors = errors + 2.0**-25 * g.sum(1) * np.abs(own)  # subnormal outputs
        parts_error = (epsilon(dtype) * (6 + np.sqrt(table.shape[1])) + clip_error) * parts
        return (errors + parts_error) / np.abs(entries.divisors)

    return errors


# ---- Operators -------------------------------------------------------------------------------------------------------


def _operator(name: str) -> Operator:
    def run_tensorflow(tf: Any, arguments: dict[str, Any]) -> Any:
        function = tf
        for part in name.split("."):
            function = getattr(function, part)
        return function(**{key: value for key, value in arguments.items() if key != "sparse_gradient"})

    plain = name.endswith("embedding_lookup")
    return Operator(
        random_lookup if plain else random_sparse,
        picked_lookup if plain else picked_sparse,
        _references,
        # In a safe lookup TensorFlow's sparse gradient has a row 0 of zeros that ours lacks: dense ones are compared.
        gradient_calls={"gradient": {}}
        if "safe" in name
        else {"gradient": {}, "sparse gradient": {"sparse_gradient": True}},
        run_tensorflow=run_tensorflow,
    )


_NAMES = ("embedding_lookup", "embedding_lookup_sparse", "safe_embedding_lookup_sparse")
OPERATORS = {name: _operator(name) for part in ("nn", "compat.v1.nn") for name in (f"{part}.{each}" for each in _NAMES)}
