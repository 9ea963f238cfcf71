"""Columns of other libraries as tensors, recognised by their protocols and methods: none of the libraries is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ._arrow_memory import decoded, elements, strings, without_views
from ._extras import extra_module
from .ops.jagged import lengths_to_offsets

_STREAM, _ARRAY = "__arrow_c_stream__", "__arrow_c_array__"
_INT64 = "pandas makes floats of integers beside missing ones, and astype('Int64') keeps them integers"
# The examples of a dataset that are read together.
_ROWS = 10_000


def is_arrow(x: Any) -> bool:
    """Say whether ``x`` is an object of pyarrow, which need not be installed."""
    return _library(x) == "pyarrow"


def _library(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def is_array(x: Any) -> bool:
    """Say whether :func:`own_array` reads ``x``."""
    if isinstance(x, torch.fx.Proxy):  # which seems to have every method
        return False
    forms = (_ARRAY, _STREAM, "__arrow_array__", "__array__")
    return isinstance(x, (Tensor, np.ndarray)) or _is_lazy(x) or any(hasattr(x, form) for form in forms)


def _is_lazy(x: Any) -> bool:
    """Say whether a slice of ``x`` reads its values: that of a column of ``datasets`` does."""
    return isinstance(x, Sequence) and not isinstance(x, (str, bytes, list, tuple, range))


# ---- Batches --------------------------------------------------------------------------------------------------------


def _is_frame(x: Any) -> bool:
    """Say whether ``x`` is a frame of columns that is read as a mapping is: pandas', and those that imitate it."""
    return hasattr(x, "keys") and hasattr(x, "columns")


def _is_dataset(x: Any) -> bool:
    """Say whether ``x`` is one of ``datasets``, which gives batches of Arrow's if it is asked for them."""
    return hasattr(x, "with_format") and hasattr(x, "iter") and not isinstance(x, torch.fx.Proxy)


def columns_by_name(batch: Any, user: str) -> Any:
    """
    Return the columns of a batch by name: a mapping unchanged, or those of a frame or of Arrow's batches.

    The columns of a pandas frame are read one by one: as a whole it would make nulls of the NaN among its numbers.

    Args:
        batch: the batch.
        user: the function that reads it, for errors.

    Returns:
        An object with ``[]``, ``in`` and ``iter()``; None for anything else than a batch.

    Raises:
        ValueError: a name that is there twice; an Arrow stream that cannot be read, or is none of columns.
    """
    if isinstance(batch, Mapping) or _is_frame(batch):
        return batch
    if _is_dataset(batch) and hasattr(batch, "num_rows"):  # a stream of examples is no batch
        batch = batch.with_format("arrow")[:]
    if not (hasattr(batch, _STREAM) or hasattr(batch, _ARRAY)):
        return None
    pa = extra_module("pyarrow", "arrow", user)
    try:
        table = pa.table(batch) if hasattr(batch, _STREAM) else pa.record_batch(batch)
    except Exception as error:
        raise ValueError(f"{user}: {type(batch).__name__} cannot be read as columns: {error}") from error
    found: dict[str, Any] = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if name in found:
            raise ValueError(f"{user}: the columns of batch must have distinct names, got {name!r} twice")
        found[name] = column
    return found


def batches_of(x: Any, user: str) -> Iterable[Any]:
    """Return an iterable of batches unchanged; of one batch itself, or of a stream of Arrow's, the batches in it."""
    if isinstance(x, Mapping) or _is_frame(x):
        return [x]
    if _is_dataset(x):
        return x.with_format("arrow").iter(batch_size=_ROWS)
    if hasattr(x, _STREAM):
        return extra_module("pyarrow", "arrow", user).RecordBatchReader.from_stream(x)
    return [x] if hasattr(x, _ARRAY) else x


# ---- Columns --------------------------------------------------------------------------------------------------------


def own_array(x: Any, what: str, user: str) -> Any:
    """
    Return another library's array as a numpy or pyarrow array, first by Arrow's protocols, which know nulls.

    Args:
        x: an array for which :func:`is_array` is true; tensors, and numpy's own but of objects, are returned unchanged.
        what: the beginning of errors: what the array is.
        user: the function that needs pyarrow, for errors.

    Raises:
        ValueError: an array that its library does not hand over.
    """
    try:
        own = x[:] if _is_lazy(x) else x
        is_numpys = isinstance(getattr(own, "dtype", None), np.dtype)
        if isinstance(own, Tensor) or (isinstance(own, np.ndarray) and own.dtype != object):
            return own
        if isinstance(own, (list, np.ndarray)):
            return extra_module("pyarrow", "arrow", user).array(own)
        if not (is_numpys and own.dtype.kind in "biuf"):
            if hasattr(own, _ARRAY) or hasattr(own, "__arrow_array__"):
                return extra_module("pyarrow", "arrow", user).array(own)
            if hasattr(own, _STREAM):
                return extra_module("pyarrow", "arrow", user).chunked_array(own)
            if not is_numpys and _library(own) == "pandas":  # as objects, its own types would lose what is missing
                return extra_module("pyarrow", "arrow", user).array(own)
        return np.asarray(own.__array__())  # numpy itself would pass arguments that few accept
    except Exception as error:
        raise ValueError(f"{what}: {type(x).__name__} cannot be read as an array: {error}") from error


def beside_nan(values: Any) -> str:
    """Return the way out that an error of floats, where integers are wanted, ends with if there is NaN among them."""
    return f": {_INT64}" if bool(torch.as_tensor(values).isnan().any()) else ""


def tensor_of_numpy(x: np.ndarray) -> Tensor:
    """Return numbers as a tensor, in the array's memory unless that is read-only or of another byte order."""
    native = np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("=")).reshape(x.shape)
    # A copy of read-only memory: torch would warn of it, although nothing here writes to it.
    return torch.from_numpy(native if native.flags.writeable else native.copy())


class Rows(NamedTuple):
    """The values of an Arrow array: ``width`` for each row, or rows that begin at ``offsets``."""

    #: Numbers, or the bytes and offsets of strings.
    values: Tensor | tuple[Tensor, Tensor]
    length: int
    width: int | None
    offsets: Tensor | None
    #: False where a value is null. None: no value is.
    valid: Tensor | None


def rows_of_arrow(x: Any, what: str) -> Rows:
    """
    Return the values of a pyarrow array.

    Scalars give one value per row, fixed-size lists ``k``, lists any number. The tensors may share the array's memory,
    which the result keeps alive: do not write to them.

    Args:
        x: an array.
        what: the beginning of errors: what the array is.

    Raises:
        ValueError: anything else than an array, and an array of other values than numbers, booleans and strings.
    """
    import pyarrow as pa

    if isinstance(x, pa.ChunkedArray):
        x = without_views(x).combine_chunks()
        if isinstance(x, pa.ChunkedArray):
            x = x.chunk(0) if x.num_chunks else pa.array([], x.type)
    if not isinstance(x, pa.Array):
        raise ValueError(f"{what}: must be a pyarrow Array or ChunkedArray, got {type(x).__name__}")
    kind = x.type
    if pa.types.is_fixed_size_list(kind):
        return _of_fixed(x, what)
    if _is_rows(kind):
        return _of_lists(x, what)
    values, valid = _flat(x, what)
    return Rows(values, len(x), 1, None, valid)


def _is_rows(kind: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    views = [getattr(types, name) for name in ("is_list_view", "is_large_list_view") if hasattr(types, name)]
    return any(is_rows(kind) for is_rows in (types.is_list, types.is_large_list, *views))


def _of_fixed(x: Any, what: str) -> Rows:
    size = x.type.list_size
    child = x.values.slice(x.offset * size, len(x) * size)
    values, valid = _flat(child, what)
    if x.null_count:
        rows = torch.from_numpy(x.is_valid().to_numpy(zero_copy_only=False).copy()).repeat_interleave(size)
        valid = rows if valid is None else rows & valid
    return Rows(values, len(x), size, None, valid)


def _of_lists(x: Any, what: str) -> Rows:
    import pyarrow.compute as pc

    # A null list may still have values in memory: flatten() skips them, and the null's length counts as 0.
    lengths = torch.tensor(pc.list_value_length(x).fill_null(0).to_numpy(zero_copy_only=False))
    values, valid = _flat(x.flatten(), what)
    return Rows(values, len(x), None, lengths_to_offsets(lengths), valid)


def _flat(x: Any, what: str) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | None]:
    """Return the values of an array without lists, and a mask that is false for nulls."""
    import pyarrow as pa

    kind = x.type
    if hasattr(pa.types, "is_run_end_encoded") and pa.types.is_run_end_encoded(kind):
        import pyarrow.compute as pc

        x = pc.run_end_decode(x)
        kind = x.type
    x = decoded(x)
    kind = x.type
    valid = torch.from_numpy(x.is_valid().to_numpy(zero_copy_only=False).copy()) if x.null_count else None
    if pa.types.is_null(kind):
        return torch.zeros(len(x), dtype=torch.int64), valid
    text = str(kind)
    if text in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view") or (
        pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind)
    ):
        return strings(x), valid
    if pa.types.is_boolean(kind):
        bits = x.fill_null(False) if x.null_count else x
        return torch.from_numpy(bits.to_numpy(zero_copy_only=False).copy()), valid
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise ValueError(f"{what}: must hold numbers or strings, or lists of them, got {kind}")
    dtype = {"halffloat": torch.float16, "float": torch.float32, "double": torch.float64}.get(text)
    dtype = dtype or getattr(torch, text)
    # The number stored at a null may be anything: 0 replaces it, so that no result depends on it.
    numbers = x.fill_null(0) if x.null_count and not pa.types.is_float16(kind) else x
    return elements(numbers.buffers()[1], dtype, numbers.offset, len(numbers)), valid
