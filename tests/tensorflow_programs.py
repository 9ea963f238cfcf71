"""One program on TensorFlow and on compat.tensorflow: equal results, or failures of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from torchsparse_rec.compat import tensorflow as ours

Program = Callable[[Any], Any]


def plain(value: Any) -> Any:
    """Return a result of either side as Python values, with the names of its parts and dtypes."""
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in value]
    kind = type(value).__name__
    if kind == "SparseTensor":
        return ["sparse", plain(value.indices), plain(value.values), plain(value.dense_shape)]
    if kind == "RaggedTensor":
        return ["ragged", plain(value.flat_values), [plain(splits) for splits in value.nested_row_splits]]
    if kind == "TensorShape":
        return value.as_list()
    if isinstance(value, torch.Tensor):
        return [value.tolist(), list(value.shape), str(value.dtype).removeprefix("torch.")]
    if hasattr(value, "numpy"):
        array = np.asarray(value.numpy())
        is_text = array.dtype == object or array.dtype.kind == "S"
        return [array.tolist(), list(array.shape), "string" if is_text else str(array.dtype)]
    if isinstance(value, np.ndarray):
        return [value.tolist(), list(value.shape), "string" if value.dtype == object else str(value.dtype)]
    return value


def sparse(tf: Any, indices: list, values: Any, shape: list[int]) -> Any:
    return tf.SparseTensor(np.array(indices, np.int64).reshape(len(indices), len(shape)), values, shape)


def numbers(tf: Any) -> Any:
    """Return a sparse tensor whose entries are not in order, with rows 1 and 3 empty and two entries in row 2."""
    return sparse(tf, [[2, 1], [0, 3], [2, 0]], [1.0, 2.0, 3.0], [4, 4])


def texts(tf: Any) -> Any:
    return sparse(tf, [[0, 1], [2, 0]], ["a", "bc"], [3, 2])


def deep(tf: Any) -> Any:
    return tf.RaggedTensor.from_nested_row_splits([1, 2, 3, 4, 5], [[0, 2, 2, 3], [0, 3, 4, 5]])


def check_same(program: Program, tensorflow: Any) -> None:
    """Compare results and their dtypes; if TensorFlow fails, check that both or neither raise a TypeError."""
    try:
        wanted = plain(program(tensorflow))
    except Exception as error:  # whatever TensorFlow raises
        kind = TypeError if isinstance(error, TypeError) else (ValueError, IndexError, TypeError)
        with pytest.raises(kind):
            program(ours)
    else:
        assert plain(program(ours)) == wanted
