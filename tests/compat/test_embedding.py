"""compat.tensorflow's lookups against TensorFlow: random problems with their gradients, and odd ones made by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchsparse_rec.compat import tensorflow as ours

pytestmark = [pytest.mark.tensorflow, pytest.mark.filterwarnings("ignore")]

random_problems = settings(
    max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass(frozen=True)
class Problem:
    """One lookup, as NumPy arrays for TensorFlow and for torch."""

    shards: list[np.ndarray]
    indices: np.ndarray
    ids: np.ndarray
    shape: tuple[int, ...]
    weights: np.ndarray | None
    options: dict[str, Any]
    strategy: str | None  # None: the form of TensorFlow 2
    ragged: bool


@st.composite
def problems(draw: st.DrawFn, safe: bool) -> Problem:
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(["float32", "float64"]))
    count = draw(st.integers(1, 3))
    strategy = draw(st.sampled_from([None, "mod", "div"]))
    shards = [random.standard_normal((4, draw(st.integers(1, 5)))).astype(dtype)]
    shards += [random.standard_normal(shards[0].shape).astype(dtype) for _ in range(count - 1)]
    rows, columns, items = draw(st.integers(1, 9)), draw(st.integers(1, 6)), draw(st.integers(1, 25))
    ragged = draw(st.booleans())
    shape = (rows, columns) if ragged or draw(st.booleans()) else (rows, 2, columns)
    indices = np.stack([random.integers(0, size, items) for size in shape], 1)
    if not safe or ragged:
        indices = indices[np.lexsort(indices.T[::-1])]
    options: dict[str, Any] = {"combiner": draw(st.sampled_from([None, "sum", "mean", "sqrtn"]))}
    options["max_norm"] = draw(st.sampled_from([None, 0.7, 1.5, 3]))
    if safe:
        options["default_id"] = draw(st.sampled_from([None, 0, 2]))
    weights = None
    if draw(st.booleans()):
        weights = (random.standard_normal(items) + 0.8).astype(dtype)
        weights[random.random(items) < 0.2] = 0
    low = -2 if safe else 0
    ids = random.integers(low, 4 * count, items).astype(draw(st.sampled_from(["int32", "int64"])))
    return Problem(shards, indices, ids, shape, weights, options, strategy, ragged)


def sparse_ids(api: Any, problem: Problem, values: np.ndarray) -> Any:
    if not problem.ragged:
        return api.SparseTensor(problem.indices, values, problem.shape)
    counts = np.bincount(problem.indices[:, 0], minlength=problem.shape[0])
    return api.RaggedTensor.from_row_splits(values, np.concatenate([[0], counts.cumsum()]))


def call(api: Any, problem: Problem, params: list, weights: Any, safe: bool) -> Any:
    name = ("safe_" if safe else "") + "embedding_lookup_sparse"
    function = getattr(api.nn if problem.strategy is None else api.compat.v1.nn, name)
    strategy = {} if problem.strategy is None else {"partition_strategy": problem.strategy}
    arguments = [params, sparse_ids(api, problem, problem.ids)]
    return function(*arguments, None if weights is None else weights, **problem.options, **strategy)


def check(tf: Any, problem: Problem, safe: bool) -> None:
    variables = [tf.Variable(shard) for shard in problem.shards]
    values = None if problem.weights is None else tf.constant(problem.weights)
    with tf.GradientTape() as tape:
        given_weights = None
        if values is not None:
            tape.watch(values)
            given_weights = sparse_ids(tf, problem, values)
        wanted = call(tf, problem, variables, given_weights, safe)
        loss = tf.reduce_sum(wanted * wanted)
    sources = [*variables, *([] if values is None else [values])]
    grads = [tf.convert_to_tensor(x) if x is not None else None for x in tape.gradient(loss, sources)]

    params = [torch.from_numpy(shard.copy()).requires_grad_() for shard in problem.shards]
    own_values = None if problem.weights is None else torch.from_numpy(problem.weights.copy()).requires_grad_()
    own_weights = None if own_values is None else sparse_ids(ours, problem, own_values)
    actual = call(ours, problem, params, own_weights, safe)
    assert actual.shape == wanted.shape and str(actual.dtype) == f"torch.{wanted.dtype.name}"
    tolerance = 1e-11 if wanted.dtype == tf.float64 else 2e-4
    np.testing.assert_allclose(actual.detach().numpy(), wanted.numpy(), rtol=tolerance, atol=tolerance)
    own_sources = [*params, *([] if own_values is None else [own_values])]
    own_grads = torch.autograd.grad((actual * actual).sum(), own_sources, allow_unused=True)
    for mine, theirs in zip(own_grads, grads, strict=True):
        theirs = np.zeros(mine.shape) if theirs is None else theirs.numpy()
        scale = max(1.0, np.abs(theirs).max(initial=0.0))
        np.testing.assert_allclose(mine.numpy() / scale, theirs / scale, rtol=0, atol=10 * tolerance)


@random_problems
@given(problem=problems(safe=False))
def test_lookup_sparse(tensorflow: Any, problem: Problem) -> None:
    check(tensorflow, problem, safe=False)


@random_problems
@given(problem=problems(safe=True))
def test_safe_lookup_sparse(tensorflow: Any, problem: Problem) -> None:
    check(tensorflow, problem, safe=True)


# ---- Odd ones, by hand ----------------------------------------------------------------------------------------------

INTEGERS = np.array([[3, -4], [7, 8], [0, 5]], dtype=np.int32)
TABLE = np.array([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]], dtype=np.float32)


def _sparse(api: Any, rows: list, values: list, shape: list, dtype: str = "int64") -> Any:
    indices = np.array([row if isinstance(row, list) else [row, 0] for row in rows], dtype=np.int64)
    return api.SparseTensor(indices.reshape(-1, len(shape)), np.array(values, dtype=dtype), shape)


ODD = {
    "shards take turns": lambda tf: tf.compat.v1.nn.embedding_lookup([TABLE, TABLE + 1], [0, 1, 5]),
    "shards in a row": lambda tf: tf.nn.embedding_lookup([TABLE, TABLE + 1], [[0, 1], [5, 3]]),
    "a tuple is one table": lambda tf: tf.nn.embedding_lookup((TABLE, TABLE + 1), [1, 0]),
    "int16 ids": lambda tf: tf.nn.embedding_lookup([TABLE, TABLE], np.array([0, 5], np.int16), max_norm=1),
    "int8 ids": lambda tf: tf.nn.embedding_lookup(TABLE, np.array([0, 1], np.int8)),
    "a table of integers": lambda tf: tf.nn.embedding_lookup([[7, 8], [9, 6]], [3, 0]),
    "integers have no norm": lambda tf: tf.nn.embedding_lookup([7, 8], [1], max_norm=1.0),
    "a table of numbers": lambda tf: tf.nn.embedding_lookup(TABLE[:, 0].copy(), [[2], [0]], max_norm=2.0),
    "max_norm 0": lambda tf: tf.nn.embedding_lookup(TABLE, [0, 1], max_norm=0),
    "max_norm below 0": lambda tf: tf.nn.embedding_lookup(TABLE, [0, 1], max_norm=-1.0),
    "negative id": lambda tf: tf.nn.embedding_lookup(TABLE, [-1]),
    "negative id, shards": lambda tf: tf.compat.v1.nn.embedding_lookup([TABLE, TABLE], [-1]),
    "too large id": lambda tf: tf.nn.embedding_lookup([TABLE, TABLE], [6]),
    "a strategy that is not looked at": lambda tf: tf.compat.v1.nn.embedding_lookup(TABLE, [0], "any"),
    "a strategy that is": lambda tf: tf.compat.v1.nn.embedding_lookup([TABLE, TABLE], [0], "any"),
    "no params": lambda tf: tf.nn.embedding_lookup([], [0]),
    "trailing rows are dropped": lambda tf: tf.nn.embedding_lookup_sparse(TABLE, _sparse(tf, [1], [2], [9, 1]), None),
    "no ids": lambda tf: tf.nn.embedding_lookup_sparse(TABLE, _sparse(tf, [], [], [9, 1]), None),
    "rank 3": lambda tf: tf.nn.embedding_lookup_sparse(
        TABLE, _sparse(tf, [[0, 0, 1], [0, 3, 0], [2, 0, 0]], [2, 0, 0], [3, 4, 2]), None
    ),
    "rank 1": lambda tf: tf.nn.embedding_lookup_sparse(TABLE, _sparse(tf, [[0], [2]], [2, 0], [5]), None),
    "unsorted rows": lambda tf: tf.nn.embedding_lookup_sparse(TABLE, _sparse(tf, [1, 0], [2, 0], [2, 1]), None),
    "negative row": lambda tf: tf.nn.embedding_lookup_sparse(TABLE, _sparse(tf, [-1], [2], [2, 1]), None),
    "weights are cast": lambda tf: tf.nn.embedding_lookup_sparse(
        TABLE, _sparse(tf, [0, 0], [2, 0], [2, 1]), _sparse(tf, [0, 0], [2, -3], [2, 1], "int32")
    ),
    "half tables, other weights": lambda tf: tf.nn.embedding_lookup_sparse(
        TABLE.astype(np.float16),
        _sparse(tf, [0, 0], [2, 0], [2, 1]),
        _sparse(tf, [0, 0], [0.1, 0.3], [2, 1], "float32"),
    ),
    "zero denominator": lambda tf: tf.nn.embedding_lookup_sparse(
        TABLE, _sparse(tf, [0, 0], [2, 0], [2, 1]), _sparse(tf, [0, 0], [1, -1], [2, 1], "float32"), "mean"
    ),
    "fewer weights": lambda tf: tf.nn.embedding_lookup_sparse(
        TABLE, _sparse(tf, [0, 0], [2, 0], [2, 1]), _sparse(tf, [0], [1], [2, 1], "float32")
    ),
    "integers, sum": lambda tf: tf.nn.embedding_lookup_sparse(
        [[3, 4], [7, 8]][0], _sparse(tf, [0, 0], [1, 0], [2, 1]), None, "sum"
    ),
    "integers, mean": lambda tf: tf.nn.embedding_lookup_sparse([3, 4], _sparse(tf, [0], [0], [2, 1]), None),
    "integers, weighted mean": lambda tf: tf.nn.embedding_lookup_sparse(
        np.array([[3, -4], [7, 8]], np.int32),
        _sparse(tf, [0, 0], [0, 1], [2, 1]),
        _sparse(tf, [0, 0], [2, 3], [2, 1], "int32"),
        "mean",
    ),
    "int16 ids, plain": lambda tf: tf.nn.embedding_lookup_sparse(TABLE, _sparse(tf, [0], [2], [2, 1], "int16"), None),
    "int16 ids, clipped": lambda tf: tf.nn.embedding_lookup_sparse(
        TABLE, _sparse(tf, [0], [0], [2, 1], "int16"), None, max_norm=1.0
    ),
    "ids must be sparse": lambda tf: tf.nn.embedding_lookup_sparse(TABLE, [0], None),
    "weights of another kind": lambda tf: tf.nn.embedding_lookup_sparse(
        TABLE, _sparse(tf, [0], [0], [2, 1]), tf.RaggedTensor.from_row_splits([1.0], [0, 1])
    ),
    "unknown combiner": lambda tf: tf.nn.embedding_lookup_sparse(TABLE, _sparse(tf, [0], [2], [2, 1]), None, "max"),
    "ragged, trailing rows": lambda tf: tf.nn.embedding_lookup_sparse(
        TABLE, tf.RaggedTensor.from_row_splits([0, 2], [0, 0, 2, 2, 2]), None
    ),
    "ragged, no rows": lambda tf: tf.nn.embedding_lookup_sparse(
        TABLE, tf.RaggedTensor.from_row_splits(np.zeros(0, np.int64), [0, 0]), None
    ),
    "safe, any rank": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        TABLE, _sparse(tf, [[1, 0, 1], [0, 1, 0], [0, 1, 2]], [2, 0, 2], [2, 2, 3])
    ),
    "safe, rank 1": lambda tf: tf.nn.safe_embedding_lookup_sparse(TABLE, _sparse(tf, [[0], [3]], [2, 0], [5])),
    "safe, rank 1 and a table of numbers": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        TABLE[:, 1].copy(), _sparse(tf, [[0], [3]], [0, 2], [5]), default_id=1
    ),
    "safe, rank 1, integers": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        INTEGERS, _sparse(tf, [[0], [3]], [0, 2], [5]), combiner="sum"
    ),
    "safe, integers": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        INTEGERS, _sparse(tf, [2, 0, 0, 1], [2, -1, 1, -3], [4, 2]), combiner="sum"
    ),
    "safe, integers, shards, default": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        [INTEGERS, INTEGERS + 100], _sparse(tf, [0, 0, 1], [5, 1, -3], [4, 2]), combiner="sum", default_id=3
    ),
    "safe, integers, mean": lambda tf: tf.nn.safe_embedding_lookup_sparse(INTEGERS, _sparse(tf, [0], [1], [4, 2])),
    "safe, integers, max_norm": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        INTEGERS, _sparse(tf, [0], [1], [4, 2]), combiner="sum", max_norm=1.0
    ),
    "safe, integers, weights": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        INTEGERS, _sparse(tf, [0], [1], [4, 2]), _sparse(tf, [0], [1], [4, 2], "int32"), combiner="sum"
    ),
    "safe, integers, too large id": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        INTEGERS, _sparse(tf, [0], [3], [4, 2]), combiner="sum"
    ),
    "safe, column beyond": lambda tf: tf.nn.safe_embedding_lookup_sparse(TABLE, _sparse(tf, [[0, 7]], [0], [2, 2])),
    "safe, it carries over": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        TABLE, _sparse(tf, [[0, 0, 3]], [0], [2, 2, 2])
    ),
    "safe, row beyond": lambda tf: tf.nn.safe_embedding_lookup_sparse(TABLE, _sparse(tf, [2], [0], [2, 2])),
    "safe, default not needed": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        TABLE, _sparse(tf, [0, 1], [0, 2], [2, 2]), default_id=9
    ),
    "safe, default needed": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        TABLE, _sparse(tf, [0, 1], [0, -2], [2, 2]), default_id=9
    ),
    "safe, no row to look up": lambda tf: tf.nn.safe_embedding_lookup_sparse(TABLE[:0], _sparse(tf, [], [], [2, 2])),
    "safe, too large id": lambda tf: tf.nn.safe_embedding_lookup_sparse(TABLE, _sparse(tf, [0], [3], [2, 2])),
    "safe, rows of rank 2 without default": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        TABLE[:, None], _sparse(tf, [0], [0], [2, 2])
    ),
    "safe, rows of rank 2": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        TABLE[:, None], _sparse(tf, [0], [0], [2, 2]), default_id=2
    ),
    "safe, NaN weight": lambda tf: tf.nn.safe_embedding_lookup_sparse(
        TABLE, _sparse(tf, [0, 0], [0, 2], [2, 2]), _sparse(tf, [0, 0], [np.nan, 2], [2, 2], "float32")
    ),
}


def _nan(api: Any, **arguments: Any) -> Any:
    """Look up ids of which row 0 has a NaN among its weights, and row 2 has none."""
    table = arguments.pop("table", TABLE)
    ids, weights = (
        _sparse(api, [0, 0, 2], [2, 0, 0], [3, 2]),
        _sparse(api, [0, 0, 2], [np.nan, 2, 3], [3, 2], "float32"),
    )
    return arguments.pop("call", api.nn.embedding_lookup_sparse)(table, ids, weights, **arguments)


ODD |= {f"NaN weight, {combiner}": lambda tf, c=combiner: _nan(tf, combiner=c) for combiner in ("sum", "mean", "sqrtn")}
ODD |= {
    "NaN weight, clipped shards": lambda tf: _nan(tf, table=[TABLE[:2], TABLE], max_norm=2.0),
    "NaN weight, half table": lambda tf: _nan(tf, table=TABLE.astype(np.float16), combiner="sqrtn"),
    "NaN weight, safe sum": lambda tf: _nan(tf, call=tf.nn.safe_embedding_lookup_sparse, combiner="sum"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_ones(tensorflow: Any, name: str) -> None:
    """Compare results with TensorFlow's, or fail where TensorFlow fails."""
    try:
        wanted = ODD[name](tensorflow)
    except Exception:
        with pytest.raises((ValueError, IndexError, TypeError)):
            ODD[name](ours)
        return
    actual = ODD[name](ours)
    assert str(actual.dtype) == f"torch.{wanted.dtype.name}"
    np.testing.assert_allclose(actual.numpy(), wanted.numpy(), rtol=1e-3 if wanted.dtype.size == 2 else 1e-6)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([1, 0], "sp_ids must have sorted rows, got 1 followed by 0 at position 1"),
        ([0, 1, 1, 7, 2, 2], "sp_ids must have sorted rows, got 7 followed by 2 at position 4"),
        ([0, -2], "sp_ids must have sorted rows, got 0 followed by -2 at position 1"),
        ([-2, -1], r"sp_ids must have rows >= 0, got row_ids\[0\] = -2"),
    ],
)
def test_unsorted_rows_are_named(rows: list[int], text: str) -> None:
    ids = _sparse(ours, rows, [0] * len(rows), [9, 1])
    with pytest.raises(ValueError, match=f"^{text}$"):
        ours.nn.embedding_lookup_sparse(TABLE, ids, None)


def test_ragged_ids(tensorflow: Any) -> None:
    def looked_up(tf: Any) -> Any:
        return tf.nn.embedding_lookup([TABLE, TABLE], tf.RaggedTensor.from_row_splits([0, 5, 3], [0, 2, 2, 3]), 2.0)

    wanted, actual = looked_up(tensorflow), looked_up(ours)
    np.testing.assert_allclose(actual.values.numpy(), wanted.values.numpy(), rtol=1e-6)
    assert actual.row_splits.tolist() == wanted.row_splits.numpy().tolist()


def test_sparse_gradients_hold_what_indexed_slices_add_up_to(tensorflow: Any) -> None:
    table = torch.from_numpy(TABLE.copy()).requires_grad_()
    ours.nn.embedding_lookup(table, [2, 0, 2], max_norm=0.5, sparse_gradient=True).sum().backward()
    variable = tensorflow.Variable(TABLE)
    with tensorflow.GradientTape() as tape:
        loss = tensorflow.reduce_sum(tensorflow.nn.embedding_lookup(variable, [2, 0, 2], max_norm=0.5))
    wanted = tensorflow.convert_to_tensor(tape.gradient(loss, variable)).numpy()
    assert table.grad.is_coalesced() and table.grad.indices().tolist() == [[0, 2]]
    np.testing.assert_allclose(table.grad.to_dense().numpy(), wanted, rtol=1e-6)
