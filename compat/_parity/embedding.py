"""Of the parity check: the embedding lookups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import RaggedTensor, SparseTensor
from .bounds import epsilon, sums
from .case import FLOATS, HALVES, Case, Operator, Outcome, Reference
from .embedding_cases import picked_lookup, picked_sparse, random_lookup, random_sparse
from .reference import SUM
from .reference.numbers import wide
from .reference.segment import unsorted_segment_reduce

# ---- The meaning of a call -------------------------------------------------------------------------------------------


def _safe(case: Case) -> bool:
    return "safe" in case.operator


def _params(case: Case) -> Any:
    return case.arguments["embedding_weights" if _safe(case) else "params"]


def _places(case: Case, shards: list[Tensor], ids: np.ndarray) -> np.ndarray:
    """The ids as rows of the shards laid end to end."""
    n, sizes = len(shards), np.array([len(shard) for shard in shards])
    strategy = "mod" if "v1" in case.operator and not _safe(case) else "div"
    strategy = case.arguments.get("partition_strategy", strategy)
    if strategy == "mod" or n == 1:
        shard, row = ids % n, ids // n
    else:
        q, e = divmod(int(sizes.sum()), n)
        long = ids < e * (q + 1)
        shard = np.where(long, ids // (q + 1), (ids - e) // max(q, 1))
        row = np.where(long, ids % (q + 1), (ids - e) % max(q, 1))
    return (np.cumsum(sizes) - sizes)[shard] + row


def _rows(ids: Any) -> tuple[np.ndarray, int]:
    """The row of each id, and how many rows there are."""
    if isinstance(ids, RaggedTensor):
        splits = ids.row_splits.numpy()
        return np.repeat(np.arange(len(splits) - 1), np.diff(splits)), len(splits) - 1
    indices, shape = ids.indices.numpy(), ids.shape
    if len(shape) <= 2:
        return (indices[:, 0], shape[0]) if len(shape) == 2 else (np.zeros(len(indices), np.int64), 1)
    return np.ravel_multi_index(tuple(indices[:, :-1].T), shape[:-1]), int(np.prod(shape[:-1]))


@dataclass
class _Entries:
    """What is looked up: entry i is row ``places[i]``, weighted, in bag ``bags[i]``; ``given[i]`` is its position."""

    places: np.ndarray
    bags: np.ndarray
    count: int  # of bags
    weights: np.ndarray | None
    given: np.ndarray

    def denominators(self, combiner: str) -> np.ndarray:
        weights = np.ones(len(self.bags)) if self.weights is None else self.weights
        if combiner == "sum":
            return np.ones(self.count, np.longdouble)
        powers = np.bincount(self.bags, weights ** (2 if combiner == "sqrtn" else 1), self.count).astype(np.longdouble)
        return np.sqrt(powers) if combiner == "sqrtn" else powers


def _entries(case: Case, shards: list[Tensor]) -> _Entries:
    arguments = case.arguments
    if "ids" in arguments:
        ids = arguments["ids"]
        ids = (ids.values if isinstance(ids, RaggedTensor) else ids).numpy().reshape(-1).astype(np.int64)
        every = np.arange(len(ids))
        return _Entries(_places(case, shards, ids), every, len(ids), None, every)
    sparse = arguments["sparse_ids" if _safe(case) else "sp_ids"]
    given_weights = arguments.get("sparse_weights" if _safe(case) else "sp_weights")
    ids = sparse.values.numpy().astype(np.int64)
    weights = None if given_weights is None else given_weights.values.double().numpy()
    if not _safe(case):
        bags = sparse.indices.numpy()[:, 0] if isinstance(sparse, SparseTensor) else _rows(sparse)[0]
        count = int(bags[-1]) + 1 if len(bags) else 0
        return _Entries(_places(case, shards, ids), bags, count, weights, np.arange(len(ids)))
    bags, count = _rows(sparse)
    kept = ids >= 0
    if weights is not None and arguments.get("combiner", "mean") != "sum":
        kept &= weights > 0
    given = np.flatnonzero(kept)
    ids, bags, weights = ids[kept], bags[kept], None if weights is None else weights[kept]
    if arguments.get("default_id") is not None:
        empty = np.setdiff1d(np.arange(count), bags)
        ids = np.concatenate([ids, np.full(len(empty), int(arguments["default_id"]))])
        bags = np.concatenate([bags, empty])
        given = np.concatenate([given, np.full(len(empty), -1)])
        weights = None if weights is None else np.concatenate([weights, np.ones(len(empty))])
    return _Entries(_places(case, shards, ids), bags, count, weights, given)


# ---- References ------------------------------------------------------------------------------------------------------


def _clip(x: np.ndarray, max_norm: float | None) -> np.ndarray:
    """What each row is multiplied with."""
    if max_norm is None:
        return np.ones((len(x), 1), np.longdouble)
    bound = np.longdouble(max(float(max_norm), 0.0))
    with np.errstate(all="ignore"):
        return bound / np.maximum(np.sqrt((x * x).sum(1, keepdims=True)), bound)


def _added(terms: np.ndarray, ids: np.ndarray, size: int) -> np.ndarray:
    return unsorted_segment_reduce(terms, ids, size, SUM)


def _sums(terms: np.ndarray, ids: np.ndarray, size: int, dtype: torch.dtype, sources: np.ndarray) -> Reference:
    value, magnitude = _added(terms, ids, size), _added(np.abs(terms), ids, size)
    return sums(value, magnitude, ids, dtype, sources=sources, scaled=True)


def _references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    params = _params(case)
    shards = params if isinstance(params, list) else [params]
    dtype, inner = shards[0].dtype, shards[0].shape[1:]
    max_norm = case.arguments.get("max_norm")
    if dtype not in FLOATS:
        return {}
    table = np.concatenate([wide(shard).reshape(len(shard), int(np.prod(inner))) for shard in shards])
    entries = _entries(case, shards)
    combiner = "sum" if "ids" in case.arguments else case.arguments.get("combiner", "mean") or "mean"
    denominators = entries.denominators(combiner)
    with np.errstate(all="ignore"):
        inverse = np.where(denominators == 0, 0, 1 / denominators)
    weights = np.ones(len(entries.bags)) if entries.weights is None else entries.weights
    factors = (weights * inverse[entries.bags])[:, None]
    clip = _clip(table, max_norm)
    eps, columns = epsilon(dtype), table.shape[1]
    # Of the norm's sum, its root and what is done with it.
    clip_error = 0.0 if max_norm is None else eps * (6 + np.sqrt(columns))

    with np.errstate(all="ignore"):
        terms = (table * clip)[entries.places] * factors
    # A zero denominator gives zeros, whatever is summed.
    bags = np.where(denominators[entries.bags] == 0, -1, entries.bags)
    output = _sums(terms, bags, entries.count, dtype, entries.places)
    magnitude = _added(np.abs(terms), bags, entries.count)
    if "ids" in case.arguments and max_norm is None:
        output = replace(output, tolerance=np.zeros_like(output.value), their_tolerance=None)
    else:
        output = _with_tolerances(output, lambda allowed: allowed + (eps + clip_error) * magnitude)
    # TensorFlow clips halves in halves.
    output.ours_only = dtype in HALVES and max_norm is not None
    shape = tuple(theirs.values[_output_name(case)].shape)
    result = {_output_name(case): _reshaped(output, shape)}
    if not case.gradients:
        return result
    upstream = wide(case.upstream_of(_output_name(case), shape)).reshape(entries.count, columns)
    gradient = _gradient_of_table(table, entries, factors, upstream, max_norm, dtype, clip_error)
    gradient.ours_only = dtype in HALVES and (max_norm is not None or entries.weights is not None)
    argument = "embedding_weights" if _safe(case) else "params"
    first = 0
    for position, shard in enumerate(shards):
        part = slice(first, first + len(shard))
        first = part.stop
        name = argument if not isinstance(params, list) else f"{argument}[{position}]"
        own = _with_tolerances(replace(gradient, value=gradient.value[part]), itemgetter(part))
        for label in ("gradient", "sparse gradient"):
            result[f"{label} of {name}"] = _reshaped(own, (len(shard), *inner))
    if entries.weights is not None:
        name = "sparse_weights" if _safe(case) else "sp_weights"
        count = len(case.arguments[name].values)
        own = _gradient_of_weights(
            table * clip, entries, weights, inverse, combiner, upstream, output, dtype, count, clip_error
        )
        for label in ("gradient", "sparse gradient"):
            result[f"{label} of {name}"] = own
    return result


def _output_name(case: Case) -> str:
    return "output.values" if isinstance(case.arguments.get("ids"), RaggedTensor) else "output"


def _reshaped(reference: Reference, shape: tuple[int, ...]) -> Reference:
    return _with_tolerances(
        replace(reference, value=reference.value.reshape(shape)), lambda allowed: allowed.reshape(shape)
    )


def _with_tolerances(reference: Reference, change: Callable[[np.ndarray], np.ndarray]) -> Reference:
    """The same with both sides' tolerances changed."""
    theirs = reference.their_tolerance
    return replace(
        reference,
        tolerance=change(reference.tolerance),
        their_tolerance=None if theirs is None else change(theirs),
    )


def _gradient_of_table(
    table: np.ndarray,
    entries: _Entries,
    factors: np.ndarray,
    upstream: np.ndarray,
    max_norm: float | None,
    dtype: torch.dtype,
    clip_error: float,
) -> Reference:
    terms = upstream[entries.bags] * factors
    total = _sums(terms, entries.places, len(table), dtype, entries.bags)
    eps = epsilon(dtype)
    magnitude = _added(np.abs(terms), entries.places, len(table))
    total = _with_tolerances(total, lambda allowed: allowed + eps * magnitude)
    if max_norm is None:
        return total
    with np.errstate(all="ignore"):
        squares = (table * table).sum(1, keepdims=True)
        along = (table * total.value).sum(1, keepdims=True) / squares
        clipped = np.sqrt(squares) >= max(float(max_norm), 0.0)
        factor = max(float(max_norm), 0.0) / np.sqrt(squares)
        value = np.where(clipped, factor * (total.value - table * along), total.value)
        untouched = (total.value == 0).all(1, keepdims=True) & (magnitude == 0).all(1, keepdims=True)
        value = np.where(untouched, 0, value)

        def spread(x: np.ndarray) -> np.ndarray:
            return factor * (x + np.abs(table) * ((np.abs(table) * x).sum(1, keepdims=True) / squares))

        def clip(allowed: np.ndarray) -> np.ndarray:
            error = np.where(clipped, spread(allowed) + 2 * clip_error * spread(magnitude), allowed)
            return np.where(untouched, 0, error)

        return _with_tolerances(replace(total, value=value), clip)


def _gradient_of_weights(
    rows: np.ndarray,
    entries: _Entries,
    weights: np.ndarray,
    inverse: np.ndarray,
    combiner: str,
    upstream: np.ndarray,
    output: Reference,
    dtype: torch.dtype,
    count: int,
    clip_error: float,
) -> Reference:
    """``<g, x>``, ``<g, x - output> / sum w``, or ``<g, x - output w / q> / q``."""
    bags = entries.bags
    own = np.zeros(len(bags)) if combiner == "sum" else np.ones(len(bags))
    if combiner == "sqrtn":
        own = weights * inverse[bags]
    scale = inverse[bags]
    g, x, out = upstream[bags], rows[entries.places], output.value[bags] * own[:, None]
    dots = (g * (x - out)).sum(1) * scale
    parts = (np.abs(g) * (np.abs(x) + np.abs(out))).sum(1)
    kept = entries.given >= 0

    def of_given(x: np.ndarray) -> np.ndarray:
        result = np.zeros(count, np.longdouble)
        result[entries.given[kept]] = x[kept]
        return result

    def errors(of_output: np.ndarray) -> np.ndarray:
        errors = (np.abs(g) * of_output[bags]).sum(1) * np.abs(own)
        # Our gradient begins with the output as it is, rounded to a half where tables are halves.
        rounding = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}.get(dtype, 0.0)
        errors = errors + rounding * (np.abs(g) * np.abs(out)).sum(1)
        if dtype == torch.float16:
            errors = errors + 2.0**-25 * (np.abs(g).sum(1)) * np.abs(own)  # subnormal outputs
        parts_error = (epsilon(dtype) * (6 + np.sqrt(rows.shape[1])) + clip_error) * parts
        return of_given((errors + parts_error) * np.abs(scale))

    return _with_tolerances(replace(output, value=of_given(dots), ours_only=dtype in HALVES), errors)


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
        # TensorFlow's sparse gradient of a safe lookup has a row 0 of zeros that ours has not: only compared dense.
        gradient_calls={"gradient": {}}
        if "safe" in name
        else {"gradient": {}, "sparse gradient": {"sparse_gradient": True}},
        run_tensorflow=run_tensorflow,
    )


_NAMES = ("embedding_lookup", "embedding_lookup_sparse", "safe_embedding_lookup_sparse")
OPERATORS = {name: _operator(name) for part in ("nn", "compat.v1.nn") for name in (f"{part}.{each}" for each in _NAMES)}
