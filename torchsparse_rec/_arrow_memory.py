"""Tensors in the memory of Arrow's arrays. None of them may be written to, and each keeps its memory alive."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: The types whose values lie in one buffer, by the views that have others.
_WIDE = {"string_view": "large_string", "binary_view": "large_binary"}


def elements(buffer: Any, dtype: torch.dtype, first: int, count: int) -> Tensor:
    """Return ``count`` elements of a buffer, from number ``first`` on."""
    if count == 0 or buffer is None:
        return torch.empty(0, dtype=dtype)
    # By address: given the buffer itself, torch would warn that it is read-only.
    start: int = buffer.address + first * dtype.itemsize
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(start)
    memory._keeps_alive = buffer  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=dtype)


def without_views(array: Any) -> Any:
    """Return an array with a dictionary of views, as polars' categories are, with one that Arrow takes values from."""
    import pyarrow as pa

    wide = _WIDE.get(str(array.type.value_type)) if pa.types.is_dictionary(array.type) else None
    return array if wide is None else array.cast(pa.dictionary(array.type.index_type, getattr(pa, wide)()))


def decoded(array: Any) -> Any:
    """Return an array that a dictionary encodes as its values; any other array unchanged."""
    array = without_views(array)
    return array.dictionary_decode() if hasattr(array, "dictionary_decode") else array


def strings(array: Any) -> tuple[Tensor, Tensor]:
    """Return the bytes of an array of strings or binaries, and the offsets of each, int64, from 0 on."""
    kind = str(array.type)
    if kind not in ("string", "binary", "large_string", "large_binary"):
        import pyarrow

        kind = _WIDE.get(kind, "large_binary")
        array = array.cast(getattr(pyarrow, kind)())
    _, offsets, values = array.buffers()
    if len(array) == 0 or offsets is None:
        return torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    width = np.int64 if kind.startswith("large") else np.int32
    bounds = np.frombuffer(offsets, width)[array.offset :][: len(array) + 1]
    first, last = int(bounds[0]), int(bounds[-1])
    # Only the slice's own bytes: the whole array may be much larger.
    text = elements(values, torch.uint8, first, last - first)
    return text, torch.from_numpy(np.subtract(bounds, first, dtype=np.int64))
