"""Sparse tensors joined, sliced, counted, multiplied and crossed: the same on TensorFlow and on torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensorflow_programs import Program, check_same, deep, numbers, sparse, texts

from torchsparse_rec.compat import tensorflow as ours

pytestmark = pytest.mark.tensorflow


def ragged_words(tf: Any) -> Any:
    return tf.RaggedTensor.from_row_lengths(["b", "c", "", "d"], [2, 0, 2])


def rows_of_floats(tf: Any) -> Any:
    return tf.RaggedTensor.from_row_lengths([1.0, 2.0], [1, 0, 1])


WORDS = np.array([[b"x", b"y"], [b"z", b"z"], [b"", b"v"]], dtype=object)


def dense(tf: Any) -> Any:
    integers = [[1, -2], [3, 4], [5, 6]]
    return tf.constant(integers) if hasattr(tf, "constant") else torch.tensor(integers, dtype=torch.int32)


def numbers_of_three_rows(tf: Any) -> Any:
    return sparse(tf, [[0, 1], [0, 2], [2, 0]], np.array([7, 8, 9], np.int32), [3, 4])


def wide(tf: Any) -> Any:
    return sparse(tf, [[0, 1], [0, 4], [1, 3]], [1, 2, 3], [2, 9])


def counted(tf: Any) -> Any:
    return sparse(tf, [[0, 0], [0, 3], [2, 1]], np.array([2, 2, 5]), [4, 4])


def constant(tf: Any, value: Any) -> Any:
    return tf.constant(value) if hasattr(tf, "constant") else torch.tensor(value)


def matrix(tf: Any, rows: int = 2) -> Any:
    """Return a sparse matrix whose entries are not in order, with one position twice."""
    return sparse(tf, [[1, 0], [0, 2], [1, 0]], np.array([2.0, 3.0, 4.0], np.float32), [rows, 3])


def matmul(tf: Any, *arguments: Any) -> Any:
    return tf.sparse.sparse_dense_matmul(*arguments)


COUNTED = np.array([[1, 1, 3], [0, 7, 7]], dtype=np.int32)
DENSE = np.arange(12.0, dtype=np.float32).reshape(3, 4)

PROGRAMS: dict[str, Program] = {
    "concat": lambda tf: tf.sparse.concat(1, [numbers(tf), numbers(tf)]),
    "concat_rows": lambda tf: tf.sparse.concat(-2, [texts(tf), texts(tf), texts(tf)]),
    "concat_one": lambda tf: tf.sparse.concat(0, [numbers(tf)]),
    "concat_nothing": lambda tf: tf.sparse.concat(0, []),
    "concat_other_sizes": lambda tf: tf.sparse.concat(0, [sparse(tf, [[0, 0]], [1], [1, 2]), wide(tf)]),
    "concat_expanded": lambda tf: tf.sparse.concat(0, [sparse(tf, [[0, 0]], [1], [1, 2]), wide(tf)], True),
    "concat_other_ranks": lambda tf: tf.sparse.concat(0, [sparse(tf, [[0]], [1], [1]), wide(tf)]),
    "concat_other_dtypes": lambda tf: tf.sparse.concat(0, [sparse(tf, [[0, 1]], [1.0], [2, 9]), wide(tf)]),
    "concat_axis_2": lambda tf: tf.sparse.concat(2, [wide(tf), wide(tf)]),
    "concat_of_a_tensor": lambda tf: tf.sparse.concat(0, [[[1]]]),
    "slice": lambda tf: tf.sparse.slice(wide(tf), [0, 3], [2, 4]),
    "slice_strings": lambda tf: tf.sparse.slice(texts(tf), [0, 0], [1, 3]),
    "slice_beyond": lambda tf: tf.sparse.slice(wide(tf), [1, 4], [7, 9]),
    "slice_nothing": lambda tf: tf.sparse.slice(wide(tf), [0, 3], [2, 0]),
    "slice_negative_size": lambda tf: tf.sparse.slice(wide(tf), [0, 1], [2, -1]),
    "slice_too_few": lambda tf: tf.sparse.slice(wide(tf), [0], [2]),
    "slice_of_a_list": lambda tf: tf.sparse.slice([[1]], [0, 0], [1, 1]),
    "expand_dims": lambda tf: [tf.sparse.expand_dims(wide(tf), axis) for axis in (None, 0, 1, 2, -1, -3)],
    "expand_dims_3": lambda tf: tf.sparse.expand_dims(wide(tf), 3),
    "expand_dims_float": lambda tf: tf.sparse.expand_dims(wide(tf), 0.5),
    "bincount": lambda tf: tf.sparse.bincount(COUNTED),
    "bincount_rows": lambda tf: tf.sparse.bincount(COUNTED, axis=-1),
    "bincount_vector_rows": lambda tf: tf.sparse.bincount(COUNTED[0], axis=-1),
    "bincount_int64": lambda tf: tf.sparse.bincount(COUNTED.astype(np.int64)),
    "bincount_binary": lambda tf: tf.sparse.bincount(COUNTED, axis=-1, binary_output=True),
    "bincount_least": lambda tf: tf.sparse.bincount(COUNTED, axis=-1, minlength=9),
    "bincount_most": lambda tf: tf.sparse.bincount(COUNTED, axis=-1, maxlength=3),
    "bincount_most_large": lambda tf: tf.sparse.bincount(COUNTED, maxlength=30),
    "bincount_least_and_most": lambda tf: tf.sparse.bincount(COUNTED, minlength=9, maxlength=4),
    "bincount_of_sparse": lambda tf: tf.sparse.bincount(counted(tf)),
    "bincount_of_sparse_rows": lambda tf: tf.sparse.bincount(counted(tf), axis=-1),
    "bincount_of_ragged": lambda tf: tf.sparse.bincount(
        tf.RaggedTensor.from_row_lengths(np.array([2, 2, 0]), [2, 0, 1]), axis=-1
    ),
    "bincount_weights": lambda tf: tf.sparse.bincount(COUNTED, constant(tf, [[1.0, 2.0, 0.5], [3.0, 4.0, -4.0]])),
    "bincount_weights_of_rows": lambda tf: tf.sparse.bincount(
        COUNTED, constant(tf, [[1.0, 2.0, 0.5], [3.0, 4.0, -4.0]]), axis=-1
    ),
    "bincount_weights_of_sparse": lambda tf: tf.sparse.bincount(
        counted(tf), counted(tf).with_values(constant(tf, [1.0, 2.0, 4.0])), axis=-1
    ),
    "bincount_other_weights": lambda tf: tf.sparse.bincount(counted(tf), constant(tf, [1.0, 2.0, 4.0]), axis=-1),
    "bincount_weights_and_binary": lambda tf: tf.sparse.bincount(
        COUNTED, constant(tf, [[1.0] * 3] * 2), binary_output=True
    ),
    "bincount_negative": lambda tf: tf.sparse.bincount([[1, -1]], axis=-1),
    "bincount_axis_1": lambda tf: tf.sparse.bincount(COUNTED, axis=1),
    "bincount_floats": lambda tf: tf.sparse.bincount([1.0, 2.0]),
    "bincount_nothing": lambda tf: tf.sparse.bincount(np.zeros((2, 0), np.int64), axis=-1),
    "bincount_most_0": lambda tf: tf.sparse.bincount(COUNTED, maxlength=0),
    "bincount_most_negative": lambda tf: tf.sparse.bincount(COUNTED, maxlength=-3),
    "matmul": lambda tf: matmul(tf, matrix(tf), DENSE),
    "matmul_adjoints": lambda tf: matmul(tf, matrix(tf), constant(tf, DENSE[:2].T.copy()), True, True),
    "matmul_of_a_sparse_right": lambda tf: matmul(tf, constant(tf, DENSE.T.copy()), matrix(tf, 3)),
    "matmul_sparse_right_adjoint": lambda tf: matmul(tf, constant(tf, DENSE), matrix(tf, 3), True, False),
    "matmul_sparse_right_transposed": lambda tf: matmul(
        tf, constant(tf, DENSE[:, :2].copy()), matrix(tf, 3), False, True
    ),
    "matmul_complex": lambda tf: matmul(
        tf, sparse(tf, [[0, 1]], np.array([1j]), [2, 2]), np.array([[1.0 + 1j], [2.0 - 1j]]), True
    ),
    "matmul_integers": lambda tf: matmul(
        tf, sparse(tf, [[0, 1], [0, 1]], np.array([3, 4], np.int32), [2, 2]), np.array([[1], [2]], np.int32)
    ),
    "matmul_other_dtypes": lambda tf: matmul(tf, matrix(tf), DENSE.astype(np.float64)),
    "matmul_other_sizes": lambda tf: matmul(tf, matrix(tf), DENSE[:2]),
    "matmul_index_beyond": lambda tf: matmul(tf, sparse(tf, [[0, 3]], [1.0], [2, 3]), DENSE),
    "matmul_dense": lambda tf: matmul(tf, constant(tf, DENSE), constant(tf, DENSE)),
    "cross": lambda tf: tf.ragged.cross([ragged_words(tf), tf.constant(WORDS) if hasattr(tf, "constant") else WORDS]),
    "cross_of_kinds": lambda tf: tf.ragged.cross([dense(tf), ragged_words(tf), numbers_of_three_rows(tf)]),
    "cross_of_floats": lambda tf: tf.ragged.cross([ragged_words(tf), rows_of_floats(tf)]),
    "cross_of_two_levels": lambda tf: tf.ragged.cross([deep(tf), deep(tf)]),
    "cross_other_rows": lambda tf: tf.ragged.cross([ragged_words(tf), tf.RaggedTensor.from_row_lengths(["a"], [1])]),
    "cross_of_no_list": lambda tf: tf.ragged.cross(ragged_words(tf)),
    "cross_hashed": lambda tf: tf.ragged.cross_hashed([ragged_words(tf), dense(tf)]),
    "cross_hashed_buckets": lambda tf: tf.ragged.cross_hashed([dense(tf), ragged_words(tf)], 100, 17),
    "cross_hashed_key_0": lambda tf: tf.ragged.cross_hashed([dense(tf), ragged_words(tf)], 100, 0),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_same_as_tensorflow(program: Program, tensorflow: Any) -> None:
    check_same(program, tensorflow)


def test_matmul_gradients_are_the_tapes(tensorflow: Any) -> None:
    values, right = torch.tensor([2.0, 3.0, 4.0], requires_grad=True), torch.from_numpy(DENSE.copy()).requires_grad_()
    ours.sparse.sparse_dense_matmul(matrix(ours).with_values(values), right).square().sum().backward()
    theirs, their_right = tensorflow.constant(values.detach().numpy()), tensorflow.constant(DENSE)
    with tensorflow.GradientTape() as tape:
        tape.watch([theirs, their_right])
        product = tensorflow.sparse.sparse_dense_matmul(matrix(tensorflow).with_values(theirs), their_right)
        total = tensorflow.reduce_sum(tensorflow.square(product))
    assert values.grad is not None and right.grad is not None
    wanted, wanted_right = (gradient.numpy().tolist() for gradient in tape.gradient(total, [theirs, their_right]))
    assert values.grad.tolist() == wanted and right.grad.tolist() == wanted_right
