"""pyarrow's arrays as tensors, and strings as bytes and offsets, without copies where there are no nulls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arrow_memory import elements, strings
from ..ops.jagged import lengths_to_offsets
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
    values, valid = _flat(x, name)
    return Raw(name, values, len(x), width=1, valid=valid)


def _is_rows(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    views = [getattr(types, name) for name in ("is_list_view", "is_large_list_view") if hasattr(types, name)]
    return any(is_rows(kind) for is_rows in (types.is_list, types.is_large_list, *views))


def _of_fixed(x: Any, name: str) -> Raw:
    size = x.type.list_size
    child = x.values.slice(x.offset * size, len(x) * size)
    values, valid = _flat(child, name)
    if x.null_count:
        rows = torch.from_numpy(x.is_valid().to_numpy(zero_copy_only=False).copy()).repeat_interleave(size)
        valid = rows if valid is None else rows & valid
    return Raw(name, values, len(x), width=size, valid=valid)


def _of_lists(x: Any, name: str) -> Raw:
    import pyarrow.compute as pc

    # A null list may still have values in memory: flatten() skips them, and the null's length counts as 0.
    lengths = torch.tensor(pc.list_value_length(x).fill_null(0).to_numpy(zero_copy_only=False))
    values, valid = _flat(x.flatten(), name)
    return Raw(name, values, len(x), offsets=lengths_to_offsets(lengths), valid=valid)


def _flat(x: Any, name: str) -> tuple[Tensor | Strings, Tensor | None]:
    """Return the values of an array without lists, and a mask that is false for nulls."""
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
        return torch.zeros(len(x), dtype=torch.int64), valid
    text = str(kind)
    if text in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view") or (
        pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind)
    ):
        return Strings(*strings(x)), valid
    if pa.types.is_boolean(kind):
        bits = x.fill_null(False) if x.null_count else x
        return torch.from_numpy(bits.to_numpy(zero_copy_only=False).copy()), valid
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ValueError(f"column {name!r}: must hold numbers or strings, or lists of them, got {kind}")
    dtype = {"halffloat": torch.float16, "float": torch.float32, "double": torch.float64}.get(text)
    dtype = dtype or getattr(torch, text)
    # The number stored at a null may be anything: 0 replaces it, so that no result depends on it.
    numbers = x.fill_null(0) if x.null_count and not pa.types.is_float16(kind) else x
    return elements(numbers.buffers()[1], dtype, numbers.offset, len(numbers)), valid
