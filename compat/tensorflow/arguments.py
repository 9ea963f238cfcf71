"""Conversions of what callers may pass where TensorFlow takes "something convertible to a tensor"."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_INT32 = torch.iinfo(torch.int32)


def as_tensor(
    argument: str, value: Any, *, empty: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """
    Convert ``value`` to a tensor, with the dtypes TensorFlow gives to Python numbers.

    Args:
        argument: the name of the argument, for errors.
        value: a tensor, returned unchanged; a numpy array, whose dtype is kept; or a number or nested list of numbers.
            Integers become int32 where all fit, else int64, and floats become float32.
        empty: the dtype of an empty list.
        device: the device for what is not a tensor yet. Default: the CPU.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, Tensor):
        return value
    try:
        array = np.array(_array_of(value))
        if not hasattr(value, "__array__"):
            array = _as_tensorflow_would(array, empty)
        return torch.from_numpy(array).to(device)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument} must be a tensor or numbers, got {type(value).__name__}: {error}") from error


def _array_of(value: Any) -> Any:
    """Return another library's object as an array by ``__array__()``; numpy would pass arguments that few accept."""
    if isinstance(value, (np.ndarray, np.generic)) or not hasattr(value, "__array__"):
        return value
    return value.__array__()


def _as_tensorflow_would(array: np.ndarray, empty: torch.dtype) -> np.ndarray:
    """Convert the array of a Python list to the dtype that TensorFlow chooses for the list."""
    if array.size == 0:
        return np.zeros(array.shape, str(empty).removeprefix("torch."))
    if array.dtype.kind == "i":
        fits = _INT32.min <= array.min() and array.max() <= _INT32.max
        return array.astype(np.int32 if fits else np.int64)
    if array.dtype.kind in "fb":
        return array.astype(np.float32) if array.dtype.kind == "f" else array
    raise TypeError(f"numbers of numpy dtype {array.dtype}")


def holds_integers(tensor: Tensor) -> bool:
    """Say whether a tensor holds integers, of any width; booleans are none."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def as_size(argument: str, value: Any, dtypes: tuple[torch.dtype, ...] = (torch.int32, torch.int64)) -> Any:
    """
    Convert a scalar size to a Python integer (a SymInt while torch.compile traces); a CUDA tensor is read back.

    Raises:
        ValueError: for anything but an integer or a scalar tensor of one of ``dtypes``.
    """
    if isinstance(value, (int, torch.SymInt)):
        return value
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.dtype not in dtypes:
            names = " or ".join(str(dtype) for dtype in dtypes)
            raise ValueError(
                f"{argument} must be a scalar of dtype {names}, got {value.dtype} of shape {list(value.shape)}"
            )
        return int(value)
    try:
        return operator.index(value)
    except TypeError as error:
        raise ValueError(f"{argument} must be an integer, got {value!r}") from error


def as_strings(argument: str, value: Any) -> np.ndarray | None:
    """
    Convert strings to a numpy array of ``bytes`` objects, ``str`` as UTF-8; return None if ``value`` has no strings.

    An empty array is of strings if its dtype is.

    Args:
        argument: the name of the argument, for errors.
        value: a ``str`` or ``bytes``, a nested list of them, a numpy array of dtype ``S``, ``U`` or ``O``, or a
            pyarrow array.

    Raises:
        ValueError: if strings are mixed with something else, or cannot be encoded.
    """
    if isinstance(value, Tensor):
        return None
    if type(value).__module__.partition(".")[0] == "pyarrow":
        value = value.to_pylist()
    value = _array_of(value)
    array = np.array(value, dtype=object)
    if array.size == 0 and isinstance(value, np.ndarray) and value.dtype.kind in "SUO":
        return array
    elements = array.reshape(-1).tolist()
    if not any(isinstance(element, (str, bytes)) for element in elements):
        return None
    for position, element in enumerate(elements):
        if not isinstance(element, (str, bytes)):
            raise ValueError(
                f"{argument}[{position}] must be str or bytes like the others, got {type(element).__name__}: "
                f"{element!r}"
            )
    result = np.empty(len(elements), dtype=object)
    try:
        result[:] = [element.encode() if isinstance(element, str) else element for element in elements]
    except UnicodeEncodeError as error:
        raise ValueError(f"{argument} holds a string that cannot be encoded as UTF-8: {error}") from error
    return result.reshape(array.shape)
