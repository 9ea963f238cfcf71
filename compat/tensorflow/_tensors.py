"""
TensorFlow's composite tensors: :class:`SparseTensor`, :class:`RaggedTensor` and :class:`IndexedSlices` over torch
tensors. Values may be strings too: then they are a numpy array of ``bytes``, since torch has no strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._arguments import as_strings, as_tensor


def as_values(argument: str, value: Any) -> Tensor | np.ndarray:
    """``value`` as a tensor, or as a numpy array of ``bytes`` if it holds strings."""
    strings = as_strings(argument, value)
    return as_tensor(argument, value) if strings is None else strings


def _int64(argument: str, value: Any, device: torch.device | None = None) -> Tensor:
    tensor = as_tensor(argument, value, empty=torch.int64, device=device)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{argument} must be int64, got {tensor.dtype}")
    return tensor.to(torch.int64)


def _device(values: Tensor | np.ndarray) -> torch.device | None:
    return values.device if isinstance(values, Tensor) else None


@dataclass(frozen=True)
class SparseTensor:
    """
    ``tf.SparseTensor``: entry ``i`` has the value ``values[i]`` at ``indices[i]``; all other elements are zero.

    Entries may come in any order and repeat, and indices are not checked against the shape: as in TensorFlow, the
    operators that care do so.

    Args:
        indices: ``[N, R]``, int64.
        values: ``[N]``, any dtype, or strings.
        dense_shape: ``[R]``, int64; kept on the CPU.

    Raises:
        ValueError: for other ranks, dtypes or lengths.

    Source: ``tf.SparseTensor``.

    Example:
        >>> SparseTensor([[0, 2], [1, 0]], [5.0, 6.0], [2, 3]).values
        tensor([5., 6.])
    """

    indices: Tensor
    values: Any
    dense_shape: Tensor

    def __post_init__(self) -> None:
        values = as_values("values", self.values)
        indices = _int64("indices", self.indices, _device(values))
        shape = _int64("dense_shape", self.dense_shape).cpu()
        if indices.dim() != 2 or values.ndim != 1 or shape.dim() != 1:
            raise ValueError(
                "indices, values and dense_shape must have the ranks 2, 1 and 1, got shapes "
                f"{list(indices.shape)}, {list(values.shape)} and {list(shape.shape)}"
            )
        if indices.shape[0] != values.shape[0] or indices.shape[1] != shape.shape[0]:
            raise ValueError(
                f"indices must have the shape [{values.shape[0]}, {shape.shape[0]}] of values and dense_shape, got "
                f"{list(indices.shape)}"
            )
        for name, value in (("indices", indices), ("values", values), ("dense_shape", shape)):
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, ...]:
        """``dense_shape`` as Python integers."""
        return tuple(self.dense_shape.tolist())

    @property
    def dtype(self) -> Any:
        """Of the values; ``bytes`` for strings."""
        return self.values.dtype if isinstance(self.values, Tensor) else bytes


@dataclass(frozen=True)
class RaggedTensor:
    """
    ``tf.RaggedTensor``: row ``r`` is ``values[row_splits[r] : row_splits[r + 1]]``.

    Made by the factories (``from_row_splits``, ...), not by the constructor, as in TensorFlow.
    """

    values: Any
    row_splits: Tensor

    @classmethod
    def from_row_splits(cls, values: Any, row_splits: Any, name: str | None = None) -> RaggedTensor:
        """
        From where each row begins, and where the last ends.

        Args:
            values: ``[N, ...]``, a tensor or strings, or the :class:`RaggedTensor` of the inner rows.
            row_splits: ``[nrows + 1]``, from 0 to N, not decreasing.
            name: ignored.

        Example:
            >>> RaggedTensor.from_row_splits([3, 1, 4], [0, 2, 2, 3]).row_splits
            tensor([0, 2, 2, 3])
        """
        if not isinstance(values, RaggedTensor):
            values = as_values("values", values)
        splits = _int64("row_splits", row_splits, None if isinstance(values, RaggedTensor) else _device(values))
        count = values.row_splits.shape[0] - 1 if isinstance(values, RaggedTensor) else values.shape[0]
        if splits.dim() != 1 or splits.shape[0] < 1:
            raise ValueError(f"row_splits must be a vector of at least 1 element, got shape {list(splits.shape)}")
        if int(splits[0]) != 0 or int(splits[-1]) != count or bool((splits.diff() < 0).any()):
            raise ValueError(f"row_splits must go from 0 to {count}, the number of values, without decreasing")
        return cls(values, splits)


@dataclass(frozen=True)
class IndexedSlices:
    """
    ``tf.IndexedSlices``: the rows ``indices`` of a tensor of shape ``dense_shape``; the values of repeated rows add up.

    Args:
        values: ``[N, ...]``.
        indices: ``[N]``, int32 or int64.
        dense_shape: ``[R]``, or None where it is not known; kept on the CPU.

    Source: ``tf.IndexedSlices``.
    """

    values: Tensor
    indices: Tensor
    dense_shape: Tensor | None = None

    def __post_init__(self) -> None:
        values = as_tensor("values", self.values)
        indices = as_tensor("indices", self.indices, empty=torch.int32, device=values.device)
        shape = None if self.dense_shape is None else _int64("dense_shape", self.dense_shape).cpu()
        for name, value in (("values", values), ("indices", indices), ("dense_shape", shape)):
            object.__setattr__(self, name, value)
