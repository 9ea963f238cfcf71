"""
:class:`SparseTensor` and :class:`IndexedSlices` over torch tensors. Values may be strings too: then they are a numpy
array of ``bytes``, since torch has no strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ops.unique import SIGNED
from .arguments import as_strings, as_tensor


def as_values(argument: str, value: Any) -> Tensor | np.ndarray:
    """Convert ``value`` to a tensor, or to a numpy array of ``bytes`` if it holds strings."""
    strings = as_strings(argument, value)
    return as_tensor(argument, value) if strings is None else strings


def take(values: Tensor | np.ndarray, positions: Tensor) -> Tensor | np.ndarray:
    """Return ``values[positions]``, for tensors and for strings in a numpy array."""
    if isinstance(values, Tensor):
        if values.dtype in SIGNED:  # torch indexes them on the CPU alone
            return values.view(SIGNED[values.dtype])[positions].view(values.dtype)
        return values[positions]
    return values[positions.cpu().numpy()]


def with_last(values: Any, last: Any) -> Any:
    """Return ``values`` and one more row: ``last``, spread over the row's innermost dimensions."""
    if isinstance(values, Tensor):
        return torch.cat([values, last.expand(1, *values.shape[1:])])
    row = np.empty((1, *values.shape[1:]), dtype=object)
    row[...] = last
    return np.concatenate([values, row])


def as_scalar_like(argument: str, value: Any, values: Tensor | np.ndarray) -> Any:
    """
    Convert a default value as TensorFlow does: to a scalar tensor with the dtype of ``values``, or to ``bytes``.

    Raises:
        TypeError: for a number of another kind, such as 0.5 for integers.
        ValueError: for a tensor of another dtype or shape, or a number that the dtype cannot hold.
    """
    if not isinstance(values, Tensor):
        strings = as_strings(argument, value)
        if strings is None:
            raise TypeError(f"{argument} must be a string like the values, got {type(value).__name__}: {value!r}")
        if strings.ndim != 0:
            raise ValueError(f"{argument} must be a scalar, got shape {list(strings.shape)}")
        return strings.item()
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0:
        value = value.item()  # TensorFlow converts such numbers as it does Python's
    if isinstance(value, (Tensor, np.ndarray)):
        tensor = as_tensor(argument, value, device=values.device)
        if tensor.dtype != values.dtype:
            raise ValueError(f"{argument} must have the dtype of the values, {values.dtype}, got {tensor.dtype}")
    else:
        check_kind(argument, value, values.dtype)
        try:
            tensor = torch.tensor(value, dtype=values.dtype, device=values.device)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{argument} must fit {values.dtype}, got {value!r}: {error}") from error
    if tensor.dim() != 0:
        raise ValueError(f"{argument} must be a scalar, got shape {list(tensor.shape)}")
    return tensor


def check_kind(argument: str, value: Any, dtype: torch.dtype) -> None:
    """Raise ``TypeError`` for numbers of a kind that the dtype does not hold; ints fit floats, floats fit complex."""
    kinds: tuple[type, ...] = (int,)
    if dtype == torch.bool:
        kinds = (bool,)
    elif dtype.is_complex:
        kinds = (int, float, complex)
    elif dtype.is_floating_point:
        kinds = (int, float)
    for number in np.array(value, dtype=object).reshape(-1).tolist():
        if not isinstance(number, kinds) or (isinstance(number, bool) and dtype != torch.bool):
            raise TypeError(f"{argument} must be of the kind of {dtype}, got {value!r}")


def as_int64(argument: str, value: Any, device: torch.device | None = None) -> Tensor:
    tensor = as_tensor(argument, value, empty=torch.int64, device=device)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{argument} must be int64, got {tensor.dtype}")
    return tensor.to(torch.int64)


def device_of(values: Tensor | np.ndarray) -> torch.device | None:
    return values.device if isinstance(values, Tensor) else None


@dataclass(frozen=True)
class SparseTensor:
    """
    ``tf.SparseTensor``: entry ``i`` has the value ``values[i]`` at ``indices[i]``; all other elements are zero.

    Entries may come in any order and repeat. Indices are not checked against the shape here: as in TensorFlow, the
    operators that need it check them.

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
        indices = as_int64("indices", self.indices, device_of(values))
        shape = as_int64("dense_shape", self.dense_shape).cpu()
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
        """The dtype of the values; ``bytes`` for strings."""
        return self.values.dtype if isinstance(self.values, Tensor) else bytes

    def get_shape(self) -> tuple[int, ...]:
        """Return ``shape``."""
        return self.shape

    def with_values(self, new_values: Any) -> SparseTensor:
        """
        Return a tensor with the same indices and shape and with other values.

        Raises:
            ValueError: unless there are as many.
        """
        return SparseTensor(self.indices, new_values, self.dense_shape)


def checked(argument: str, value: Any) -> SparseTensor:
    """Return a SparseTensor unchanged; raise TypeError for anything else."""
    if not isinstance(value, SparseTensor):
        raise TypeError(f"{argument} must be a SparseTensor, got {type(value).__name__}")
    return value


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
        shape = None if self.dense_shape is None else as_int64("dense_shape", self.dense_shape).cpu()
        for name, value in (("values", values), ("indices", indices), ("dense_shape", shape)):
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """``dense_shape`` as Python integers, or None."""
        return None if self.dense_shape is None else tuple(self.dense_shape.tolist())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype
