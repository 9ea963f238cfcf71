"""compat.tensorflow's sparse and ragged tensors beside TensorFlow, beyond the hand-picked cases of the parity check."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensorflow_programs import Program, check_same, deep, numbers, sparse, texts

from torchsparse_rec.compat import tensorflow as ours

pytestmark = pytest.mark.tensorflow

NAN = math.nan


def ragged(tf: Any) -> Any:
    return tf.RaggedTensor.from_row_splits([1, 2, 3, 4], [0, 3, 3, 4])


def rows_of_two(tf: Any) -> Any:
    return tf.RaggedTensor.from_row_splits(np.arange(8.0).reshape(4, 2), [0, 3, 3, 4])


def rows_of_matrices(tf: Any) -> Any:
    return tf.RaggedTensor.from_row_splits(np.arange(18.0).reshape(3, 2, 3), [0, 1, 3])


def words(tf: Any) -> Any:
    return tf.RaggedTensor.from_row_splits(["a", "b", "c"], [0, 2, 2, 3])


def nothing(tf: Any) -> Any:
    return tf.RaggedTensor.from_row_splits(np.zeros(0, np.float32), [0])


I64 = np.int64
ONES = np.ones((2, 3, 2), np.int32)
TABLE = [[1, 0, 2, 0], [0, 0, 0, 0], [3, 0, 0, 0]]

SPARSE: dict[str, Program] = {
    "reshape_of_a_list": lambda tf: tf.sparse.reshape([[1]], [1]),
    "fill_float_for_integers": lambda tf: tf.sparse.fill_empty_rows(sparse(tf, [[1]], [5], [3]), 0.5),
    "fill_number_for_strings": lambda tf: tf.sparse.fill_empty_rows(texts(tf), 0),
    "raw_fill_no_rank": lambda tf: tf.raw_ops.SparseFillEmptyRows(
        indices=np.zeros((1, 0), I64), values=[1], dense_shape=np.zeros(0, I64), default_value=-1
    ),
    "reorder_of_a_list": lambda tf: tf.sparse.reorder([[1]]),
    "retain_too_few": lambda tf: tf.sparse.retain(texts(tf), [True]),
    "to_dense_numpy_default": lambda tf: tf.sparse.to_dense(sparse(tf, [[1]], [5.5], [3]), np.float64(2.5)),
    "to_dense_strings": lambda tf: tf.sparse.to_dense(texts(tf)),
    "to_dense_strings_default": lambda tf: tf.sparse.to_dense(texts(tf), "-"),
    "to_dense_float_for_integers": lambda tf: tf.sparse.to_dense(sparse(tf, [[1]], [5], [3]), 0.5),
    "raw_to_dense_no_rank": lambda tf: tf.raw_ops.SparseToDense(
        sparse_indices=np.zeros((2, 0), I64),
        output_shape=np.zeros(0, I64),
        sparse_values=[1, 2],
        default_value=0,
        validate_indices=False,
    ),
    "raw_to_dense_rank_3": lambda tf: tf.raw_ops.SparseToDense(
        sparse_indices=[[[0]]], output_shape=[4], sparse_values=[7], default_value=0
    ),
    "with_values": lambda tf: numbers(tf).with_values([4, 5, 6]),
    "with_too_few_values": lambda tf: numbers(tf).with_values([4]),
}

RAGGED: dict[str, Program] = {
    "value_rowids_nrows": lambda tf: tf.RaggedTensor.from_value_rowids(["a", "b", "c"], [0, 0, 2], 5),
    "value_rowids_few_rows": lambda tf: tf.RaggedTensor.from_value_rowids([1, 2, 3], [0, 0, 2], 2),
    "value_rowids_nothing": lambda tf: tf.RaggedTensor.from_value_rowids(np.zeros(0, np.int32), [], 3),
    "uniform_not_a_divisor": lambda tf: tf.RaggedTensor.from_uniform_row_length([1, 2, 3, 4], 3),
    "nested_row_splits": deep,
    "nested_row_lengths": lambda tf: tf.RaggedTensor.from_nested_row_lengths([1, 2, 3], [[1, 1], [2, 1]]),
    "from_tensor_float_padding": lambda tf: tf.RaggedTensor.from_tensor(TABLE, padding=2.5),
    "from_tensor_nan": lambda tf: tf.RaggedTensor.from_tensor([[1.0, 2.0], [2.0, 3.0]], padding=NAN),
    "from_tensor_rank_3": lambda tf: tf.RaggedTensor.from_tensor(np.arange(12).reshape(2, 3, 2), lengths=[1, 2]),
    "from_tensor_row_padding": lambda tf: tf.RaggedTensor.from_tensor(np.ones((2, 3, 2)), padding=[1.0, 1.0]),
    "from_tensor_numpy_padding": lambda tf: [
        tf.RaggedTensor.from_tensor(TABLE, padding=zero) for zero in (np.int64(0), np.array(0), np.int32(0))
    ],
    "from_tensor_row_of_floats": lambda tf: tf.RaggedTensor.from_tensor(ONES, padding=[0.5, 0.5]),
    "from_tensor_row_of_numpy": lambda tf: tf.RaggedTensor.from_tensor(ONES, padding=np.array([1, 1])),
    "to_tensor_row_of_floats": lambda tf: tf.RaggedTensor.from_row_splits(
        np.arange(6).reshape(3, 2), [0, 2, 3]
    ).to_tensor([0.5, 0.5]),
    "from_sparse_of_a_list": lambda tf: tf.RaggedTensor.from_sparse([[1]]),
    "shape": lambda tf: [ragged(tf).shape, deep(tf).shape, rows_of_two(tf).shape],
    "ranks": lambda tf: [ragged(tf).ragged_rank, deep(tf).ragged_rank],
    "row_lengths_axis_2": lambda tf: deep(tf).row_lengths(axis=2),
    "row_lengths_inner": lambda tf: rows_of_two(tf).row_lengths(axis=-1),
    "row_lengths_uniform": lambda tf: [rows_of_matrices(tf).row_lengths(axis) for axis in (1, 2, 3, -1)],
    "row_lengths_deep_uniform": lambda tf: [
        tf.RaggedTensor.from_nested_row_splits(np.zeros((2, 3, 4)), [[0, 0, 2], [0, 1, 2]]).row_lengths(axis)
        for axis in (2, 3, 4)
    ],
    "row_lengths_axis_0": lambda tf: ragged(tf).row_lengths(axis=0),
    "nrows_int32": lambda tf: ragged(tf).nrows(out_type=tf.int32 if hasattr(tf, "int32") else torch.int32),
    "bounding_axis": lambda tf: ragged(tf).bounding_shape(axis=1),
    "bounding_axes": lambda tf: deep(tf).bounding_shape(axis=[2, 0]),
    "bounding_axis_9": lambda tf: ragged(tf).bounding_shape(axis=9),
    "with_flat_values": lambda tf: deep(tf).with_flat_values([1.0, 2.0, 3.0, 4.0, 5.0]),
    "with_too_few": lambda tf: ragged(tf).with_values([1.0]),
    "to_tensor_default": lambda tf: ragged(tf).to_tensor(-1),
    "to_tensor_cut": lambda tf: ragged(tf).to_tensor(shape=[2, 2]),
    "to_tensor_wide": lambda tf: ragged(tf).to_tensor(shape=[None, 5]),
    "to_tensor_long": lambda tf: ragged(tf).to_tensor(9, shape=[5, None]),
    "to_tensor_deep_cut": lambda tf: deep(tf).to_tensor(shape=[2, 1, 2]),
    "to_tensor_deep_default": lambda tf: deep(tf).to_tensor(7),
    "to_tensor_negative": lambda tf: ragged(tf).to_tensor(shape=[-1, 2]),
    "to_tensor_float": lambda tf: ragged(tf).to_tensor(-1.5),
    "to_tensor_rows": lambda tf: rows_of_two(tf).to_tensor([7.0, 8.0]),
    "to_tensor_strings": lambda tf: words(tf).to_tensor("x"),
}
METHODS = ("to_list", "nested_row_lengths", "nested_value_rowids")
for make in (ragged, deep, rows_of_two, words, nothing):
    for method in METHODS:
        RAGGED[f"{make.__name__}_{method}"] = lambda tf, make=make, method=method: getattr(make(tf), method)()


@pytest.mark.parametrize("program", [*SPARSE.values(), *RAGGED.values()], ids=[*SPARSE, *RAGGED])
def test_same_as_tensorflow(program: Program, tensorflow: Any) -> None:
    check_same(program, tensorflow)


@pytest.mark.parametrize(
    ("values", "length", "rows"), [([1, 2, 3, 4], 2, None), (np.zeros(0), 0, 3), (np.zeros(0), 2, None)]
)
def test_uniform_rows_have_tensorflows_rows(values: Any, length: int, rows: int | None, tensorflow: Any) -> None:
    """Compare the rows as lists: TensorFlow's tensors also remember that they are uniform."""
    wanted = tensorflow.RaggedTensor.from_uniform_row_length(values, length, rows).to_list()
    assert ours.RaggedTensor.from_uniform_row_length(values, length, rows).to_list() == wanted


def test_values_keep_their_gradient() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    rows = ours.RaggedTensor.from_row_splits(values, [0, 2, 2, 3])
    made = ours.sparse.reorder(ours.sparse.reshape(rows.to_sparse(), [-1]))
    (rows.to_tensor() * 2).sum().backward()
    (ours.sparse.retain(made, [True, False, True]).values * 10).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [12, 2, 12]


def test_from_dense_keeps_nan_and_its_gradient() -> None:
    dense = torch.tensor([[0.0, NAN], [-0.0, 3.0]], requires_grad=True)
    found = ours.sparse.from_dense(dense)
    assert found.indices.tolist() == [[0, 1], [1, 1]] and found.shape == (2, 2)
    found.values.sum().backward()
    assert dense.grad is not None and dense.grad.tolist() == [[0, 1], [0, 1]]


HALVES = [0.5, 0.5]
padded = ours.RaggedTensor.from_tensor


@pytest.mark.parametrize(
    ("kind", "program", "message"),
    [
        (TypeError, lambda: padded(TABLE, padding=2.5), "padding must be of the kind of torch.int32, got 2.5"),
        (
            TypeError,
            lambda: padded(ONES, padding=HALVES),
            r"padding must be of the kind of torch.int32, got \[0.5, 0.5\]",
        ),
        (ValueError, lambda: padded(TABLE, padding=[1, 2, 3]), r"padding must be a scalar or have shape \[\]"),
        (TypeError, lambda: padded(TABLE, padding="x"), "padding must be of the kind of"),
        (TypeError, lambda: ragged(ours).to_tensor("x"), "default_value must be of the kind of"),
        (ValueError, lambda: ragged(ours).bounding_shape(axis=9), r"axis must be in \[-2, 2\), got 9"),
        (ValueError, lambda: ragged(ours).bounding_shape(axis=[0, -3]), r"axis must be in \[-2, 2\), got \[0, -3\]"),
    ],
)
def test_errors_name_the_argument(kind: type[Exception], program: Callable[[], Any], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}"):
        program()


def test_bounding_shapes_along_axes() -> None:
    shape = ragged(ours).bounding_shape()
    assert ragged(ours).bounding_shape(axis=[1, 0, -1]).tolist() == [shape[i] for i in (1, 0, 1)]
    assert int(ragged(ours).bounding_shape(axis=-1)) == 3
