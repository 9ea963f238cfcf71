"""pyarrow's arrays as tensors, and strings as bytes and offsets, without copies where there are no nulls."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .raw import Raw, Strings


def is_arrow(x: Any) -> bool:
    """Say whether ``x`` is an object of pyarrow, which need not be installed."""
    return type(x).__module__.partition(".")[0] == "pyarrow"


def raw_of_arrow(x: Any, name: str) -> Raw:
    """
    Return a pyarrow array as a raw column.

    Scalars give one value per example, fixed-size lists ``k``, lists any number. Nulls are missing. The tensors may
    share the array's memory, which the result keeps alive: do not write to them.
    """
    import pyarrow as pa

    if isinstance(x, pa.ChunkedArray):
        x = x.combine_chunks()
        if isinstance(x, pa.ChunkedArray):
            x = x.chunk(0) if x.num_chunks else pa.array([], x.type)
    if not isinstance(x, pa.Array):
        raise ValueError(f"column {name!r}: must be a pyarrow Array or ChunkedArray, got {type(x).__name__}")
    kind = x.type
    if pa.types.is_fixed_size_list(kind):
        return _of_fixed(x, name)
    if _is_rows(kind):
        return _of_lists(x, name)
    values, valid, owner = _flat(x, name)
    return Raw(name, values, len(x), width=1, valid=valid, owner=owner)


def _is_rows(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    views = [getattr(types, name) for name in ("is_list_view", "is_large_list_view") if hasattr(types, name)]
    return any(is_rows(kind) for is_rows in (types.is_list, types.is_large_list, *views))


def _of_fixed(x: Any, name: str) -> Raw:
    size = x.type.list_size
    child = x.values.slice(x.offset * size, len(x) * size)
    values, valid, owner = _flat(child, name)
    if x.null_count:
        rows = torch.from_numpy(x.is_valid().to_numpy(zero_copy_only=False).copy()).repeat_interleave(size)
        valid = rows if valid is None else rows & valid
    return Raw(name, values, len(x), width=size, valid=valid, owner=owner)


def _of_lists(x: Any, name: str) -> Raw:
    import pyarrow.compute as pc

    # A null list may still have values in memory: flatten() skips them, and the null's length counts as 0.
    lengths = pc.list_value_length(x).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(x) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    values, valid, owner = _flat(x.flatten(), name)
    return Raw(name, values, len(x), offsets=torch.from_numpy(offsets), valid=valid, owner=owner)


def _flat(x: Any, name: str) -> tuple[Tensor | Strings, Tensor | None, Any]:
    """Return the values of an array without lists, a mask that is false for nulls, and the owner of the memory."""
    import pyarrow as pa

    kind = x.type
    if hasattr(pa.types, "is_run_end_encoded") and pa.types.is_run_end_encoded(kind):
        import pyarrow.compute as pc

        x = pc.run_end_decode(x)
        kind = x.type
    if pa.types.is_dictionary(kind):
        x = x.dictionary_decode()
        kind = x.type
    valid = torch.from_numpy(x.is_valid().to_numpy(zero_copy_only=False).copy()) if x.null_count else None
    if pa.types.is_null(kind):
        return torch.zeros(len(x), dtype=torch.int64), valid, None
    text = str(kind)
    if text in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view") or (
        pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind)
    ):
        wide = x.cast(pa.large_binary()) if not text.startswith(("string", "large_string")) else _as_binary(x, text)
        return _strings(wide), valid, wide
    if pa.types.is_boolean(kind):
        bits = x.fill_null(False) if x.null_count else x
        return torch.from_numpy(bits.to_numpy(zero_copy_only=False).copy()), valid, None
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ValueError(f"column {name!r}: must hold numbers or strings, or lists of them, got {kind}")
    dtype = {"halffloat": torch.float16, "float": torch.float32, "double": torch.float64}.get(text)
    dtype = dtype or getattr(torch, text)
    # The number stored at a null may be anything: 0 replaces it, so that no result depends on it.
    numbers = x.fill_null(0) if x.null_count and not pa.types.is_float16(kind) else x
    return _at(numbers.buffers()[1], dtype, numbers.offset, len(numbers)), valid, numbers


def _as_binary(x: Any, text: str) -> Any:
    import pyarrow as pa

    wide = x if text == "large_string" else x.cast(pa.large_string())
    return wide.view(pa.large_binary())


def _strings(x: Any) -> Strings:
    """Return the strings of an array of large binaries."""
    _, offsets, values = x.buffers()
    if len(x) == 0 or offsets is None:
        return Strings(torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    bounds = _at(offsets, torch.int64, x.offset, len(x) + 1)
    first, last = int(bounds[0]), int(bounds[-1])
    # Only the slice's own bytes, which are copied to the device: the whole array may be much larger.
    return Strings(_at(values, torch.uint8, first, last - first), bounds if first == 0 else bounds - first)


def _at(buffer: Any, dtype: torch.dtype, offset: int, count: int) -> Tensor:
    """Return ``count`` elements of a buffer as a tensor in the buffer's memory; the buffer must outlive the tensor."""
    if count == 0 or buffer is None:
        return torch.empty(0, dtype=dtype)
    # By address: given the buffer itself, torch would warn that it is read-only.
    start = buffer.address + offset * dtype.itemsize
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(start)
    return torch.frombuffer(memory, dtype=dtype)
