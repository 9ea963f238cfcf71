"""compat.tensorflow's lookups beside TensorFlow's: odd ones that the parity check has no cases of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchsparse_rec.compat import tensorflow as ours

pytestmark = [pytest.mark.tensorflow, pytest.mark.filterwarnings("ignore")]

INTEGERS = np.array([[3, -4], [7, 8], [0, 5]], dtype=np.int32)
TABLE = np.array([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]], dtype=np.float32)


def _sparse(api: Any, rows: list, values: list, shape: list, dtype: str = "int64") -> Any:
    indices = np.array([row if isinstance(row, list) else [row, 0] for row in rows], dtype=np.int64)
    return api.SparseTensor(indices.reshape(-1, len(shape)), np.array(values, dtype=dtype), shape)


def safe(api: Any, *arguments: Any, **options: Any) -> Any:
    return api.nn.safe_embedding_lookup_sparse(*arguments, **options)


ODD = {
    "a tuple is one table": lambda tf: tf.nn.embedding_lookup((TABLE, TABLE + 1), [1, 0]),
    "int16 ids": lambda tf: tf.nn.embedding_lookup([TABLE, TABLE], np.array([0, 5], np.int16), max_norm=1),
    "a table of integers": lambda tf: tf.nn.embedding_lookup([[7, 8], [9, 6]], [3, 0]),
    "ragged, no rows": lambda tf: tf.nn.embedding_lookup_sparse(
        TABLE, tf.RaggedTensor.from_row_splits(np.zeros(0, np.int64), [0, 0]), None
    ),
    "safe, rank 1 and a table of numbers": lambda tf: safe(
        tf, TABLE[:, 1].copy(), _sparse(tf, [[0], [3]], [0, 2], [5]), default_id=1
    ),
    "safe, rank 1, integers": lambda tf: safe(tf, INTEGERS, _sparse(tf, [[0], [3]], [0, 2], [5]), combiner="sum"),
    "safe, integers": lambda tf: safe(tf, INTEGERS, _sparse(tf, [2, 0, 0, 1], [2, -1, 1, -3], [4, 2]), combiner="sum"),
    "safe, integers, shards, default": lambda tf: safe(
        tf, [INTEGERS, INTEGERS + 100], _sparse(tf, [0, 0, 1], [5, 1, -3], [4, 2]), combiner="sum", default_id=3
    ),
    "safe, integers, mean": lambda tf: safe(tf, INTEGERS, _sparse(tf, [0], [1], [4, 2])),
    "safe, integers, max_norm": lambda tf: safe(
        tf, INTEGERS, _sparse(tf, [0], [1], [4, 2]), combiner="sum", max_norm=1.0
    ),
    "safe, integers, weights": lambda tf: safe(
        tf, INTEGERS, _sparse(tf, [0], [1], [4, 2]), _sparse(tf, [0], [1], [4, 2], "int32"), combiner="sum"
    ),
    "safe, integers, too large id": lambda tf: safe(tf, INTEGERS, _sparse(tf, [0], [3], [4, 2]), combiner="sum"),
    "safe, column beyond": lambda tf: safe(tf, TABLE, _sparse(tf, [[0, 7]], [0], [2, 2])),
    "safe, it carries over": lambda tf: safe(tf, TABLE, _sparse(tf, [[0, 0, 3]], [0], [2, 2, 2])),
    "safe, row beyond": lambda tf: safe(tf, TABLE, _sparse(tf, [2], [0], [2, 2])),
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


def test_sparse_gradients_are_coalesced() -> None:
    table = torch.from_numpy(TABLE.copy()).requires_grad_()
    ours.nn.embedding_lookup(table, [2, 0, 2], max_norm=0.5, sparse_gradient=True).sum().backward()
    assert table.grad.is_coalesced() and table.grad.indices().tolist() == [[0, 2]]
