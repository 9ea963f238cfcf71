"""Conversions of the parity check's arguments and results: to a device, to TensorFlow and back, and to names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..converters import tensor_to_tensorflow, tensor_to_torch
from ..installed import tensorflow
from ..tensorflow import IndexedSlices, RaggedTensor, SparseTensor


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return ``value`` with every tensor in it changed, also inside SparseTensor, RaggedTensor and IndexedSlices."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, SparseTensor):
        return SparseTensor(change(value.indices), mapped(value.values, change), value.dense_shape)
    if isinstance(value, RaggedTensor):
        return RaggedTensor(mapped(value.values, change), change(value.row_splits))
    if isinstance(value, IndexedSlices):
        return IndexedSlices(change(value.values), change(value.indices), value.dense_shape)
    return value


def to_tensorflow(value: Any) -> Any:
    """Return a copy of ``value`` for TensorFlow, every tensor in it converted."""
    tf = tensorflow()
    if isinstance(value, Tensor):
        return tensor_to_tensorflow(value, share=False)
    if isinstance(value, torch.dtype):
        return getattr(tf, str(value).removeprefix("torch."))
    if isinstance(value, dict):
        return {name: to_tensorflow(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(to_tensorflow(item) for item in value)
    if isinstance(value, SparseTensor):
        return tf.SparseTensor(*map(to_tensorflow, (value.indices, _strings(value.values), value.dense_shape)))
    if isinstance(value, RaggedTensor):
        values, splits = map(to_tensorflow, (_strings(value.values), value.row_splits))
        return tf.RaggedTensor.from_row_splits(values, splits, validate=False)
    if isinstance(value, IndexedSlices):
        return tf.IndexedSlices(*map(to_tensorflow, (value.values, value.indices, value.dense_shape)))
    return value


def _strings(values: Any) -> Any:
    return tensorflow().constant(values, tensorflow().string) if isinstance(values, np.ndarray) else values


def from_tensorflow(value: Any) -> Any:
    """Return a TensorFlow tensor as a torch tensor; a tensor of strings as bytes or a list of bytes."""
    if not hasattr(value, "numpy") or isinstance(value, Tensor):
        return value
    return np.asarray(value.numpy()).tolist() if value.dtype.name == "string" else tensor_to_torch(value)


def flattened(result: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """
    Yield the tensors of a result of either side with their names.

    A named tuple's tensors have the names of its fields, a tuple's ``output[0]``, ..., composite tensors'
    ``output.indices``, ...; a name inside another is ``outer.inner``.
    """
    prefix = "" if name == "output" else f"{name}."
    if isinstance(result, (Tensor, np.ndarray)) or result is None:
        yield name, result
    elif hasattr(result, "_asdict") or isinstance(result, dict):
        for field, item in (result if isinstance(result, dict) else result._asdict()).items():
            yield from flattened(item, prefix + field)
    elif isinstance(result, (list, tuple)):
        for position, item in enumerate(result):
            yield from flattened(item, f"{name}[{position}]")
    elif hasattr(result, "row_splits"):
        yield from flattened(result.values, f"{name}.values")
        yield f"{name}.row_splits", result.row_splits
    elif hasattr(result, "dense_shape"):
        for field in ("indices", "values", "dense_shape"):
            yield f"{name}.{field}", getattr(result, field)
    else:
        yield name, result


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an argument, of either side, that have a gradient: tensors, and values of composite ones."""
    if isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from leaves(item, f"{name}[{position}]")
    elif isinstance(value, dict):
        for field, item in value.items():
            yield from leaves(item, f"{name}.{field}")
    elif not isinstance(value, Tensor) and (hasattr(value, "row_splits") or hasattr(value, "dense_shape")):
        yield from leaves(value.values, name)
    elif value is not None:
        yield name, value


def coalesced(indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> IndexedSlices:
    """Return a sparse gradient with sorted, unique rows; repeated rows are summed in float64."""
    indices = indices.to(torch.int64)
    if bool((indices[1:] <= indices[:-1]).any()):
        indices, places = indices.unique(return_inverse=True)
        sums = torch.zeros(indices.shape[0], *values.shape[1:], dtype=torch.float64)
        values = sums.index_add_(0, places, values.to(torch.float64)).to(values.dtype)
    return IndexedSlices(values, indices, torch.tensor(shape, dtype=torch.int64))


def dense(slices: IndexedSlices) -> Tensor:
    """Return the dense gradient that coalesced slices stand for."""
    assert slices.dense_shape is not None
    result = torch.zeros(slices.dense_shape.tolist(), dtype=slices.values.dtype)
    result[slices.indices] = slices.values
    return result
