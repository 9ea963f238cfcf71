"""Turn Arrow's record batches into tensors and back, without copies where the layouts agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import torch
from torch import Tensor

from .._arrow_memory import decoded, without_views
from .._foreign import columns_by_name, is_array, own_array, tensor_of_numpy
from ..jagged import JaggedTensor
from ..ops.jagged import row_ids_to_offsets
from ._arrow import arrow
from ._types import is_text, leaf, way_to_numbers

if TYPE_CHECKING:
    import pyarrow

#: A column of a batch in training code.
Column: TypeAlias = Union[Tensor, JaggedTensor, "pyarrow.Array"]
#: The number that replaces nulls: one for all columns, or a mapping from columns' names to numbers.
Fill: TypeAlias = float | int | bool | Mapping[str, float | int | bool] | None

_INT32_MAX = 2**31 - 1
_INTEGERS = {
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}


def to_tensors(
    batch: pyarrow.RecordBatch, *, fill: Fill = None, integers: torch.dtype | None = None, bits: bool = False
) -> dict[str, Any]:
    """
    Turn the columns of a record batch into tensors, in the memory of the batch where there are no nulls.

    Args:
        batch: a record batch, or what :func:`to_record_batch` makes one of, except for mappings: columns of numbers,
            booleans, strings or binaries; lists and fixed-size lists of these.
        fill: the number that replaces nulls, or a mapping from column names to numbers. Without one, a null float is
            NaN and a null integer or boolean is an error. NaN for a column of integers makes it a column of float32,
            whether or not it has nulls; integers beyond 2^24, from where on float32 rounds, are errors. A null instead
            of a whole list is an empty row.
        integers: the dtype into which all integers are copied. Default None: each column keeps its own.
        bits: whether uint64 becomes the int64 of the same bits, as tables take them: ids from 2^63 on are negative
            then, and no two of them equal. ``fill`` is one of int64. Default False: such an id is an error of
            ``integers``, and of a lookup.

    Returns:
        A dict by column name: a tensor ``[B]`` for numbers and booleans, ``[B, k]`` for fixed-size lists, a
        :class:`JaggedTensor` for lists. Strings, and lists of strings, stay pyarrow arrays.

    Raises:
        TypeError: ``batch`` is neither a ``pyarrow.RecordBatch`` nor a table or a frame.
        ValueError: a null integer without ``fill``, a ``fill`` that does not fit the column, an integer outside the
            range of ``integers``, a type that has no tensor.

    Booleans, columns with nulls and the offsets of sliced lists are copied. All else is shared with the batch: writing
    to such a tensor writes to the batch.

    Example:
        >>> import pyarrow as pa
        >>> price = pa.array([0.5, None], pa.float32())
        >>> batch = pa.record_batch({"price": price, "seen": [[3, 1], []], "who": ["a", "b"]})
        >>> columns = to_tensors(batch)
        >>> columns["price"], columns["seen"]
        (tensor([0.5000,    nan]), JaggedTensor([[3, 1], []]))
        >>> columns["who"].to_pylist()
        ['a', 'b']
    """
    pa = arrow("to_tensors")
    if not isinstance(batch, pa.RecordBatch):
        given = None if isinstance(batch, Mapping) else columns_by_name(batch, "to_tensors")
        if given is None:
            raise TypeError(f"to_tensors: batch must be a pyarrow.RecordBatch or a frame, got {type(batch).__name__}")
        batch = to_record_batch(given)
    check_fill("to_tensors", fill)
    check_integers("to_tensors", integers)
    columns: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in columns:
            raise ValueError(f"to_tensors: the columns of batch must have distinct names, got {name!r} twice")
        columns[name] = _Reader(pa, name, _fill_of(fill, name), integers, bits).column(column)
    return columns


def check_fill(user: str, fill: Any) -> None:
    """Raise ValueError unless ``fill`` is a number, a mapping to numbers or None."""
    for value in fill.values() if isinstance(fill, Mapping) else (fill,):
        if not (value is None or isinstance(value, (int, float, np.number, np.bool_))):
            raise ValueError(f"{user}: fill must be a number, or numbers by column, got {value!r}")


def check_integers(user: str, integers: Any) -> None:
    """Raise ValueError unless ``integers`` is None or a dtype of integers."""
    if integers is not None and integers not in _INTEGERS:
        raise ValueError(f"{user}: integers must be an integer dtype, got {integers}")


def _fill_of(fill: Fill, name: str) -> float | int | bool | None:
    return fill.get(name) if isinstance(fill, Mapping) else fill


class _Reader:
    """Turns one column into tensors."""

    def __init__(
        self, pa: Any, name: str, fill: float | int | bool | None, integers: torch.dtype | None, bits: bool
    ) -> None:
        self.pa, self.name, self.fill, self.integers, self.bits = pa, name, fill, integers, bits
        # Error messages give a row, of values_each values, or the position of a value among the values of all lists.
        self.unit, self.values_each = "row", 1

    def column(self, array: Any) -> Column:
        types = self.pa.types
        if types.is_integer(array.type) or types.is_floating(array.type):
            return self.dense(array)
        array = decoded(array)
        if is_text(leaf(array.type)) or str(leaf(array.type)) in ("string_view", "binary_view"):
            return array
        if types.is_list(array.type) or types.is_large_list(array.type):
            self.unit = "value"
            return self.jagged(array)
        return self.dense(array)

    def jagged(self, array: Any) -> JaggedTensor:
        """Return an array of lists as a JaggedTensor whose offsets begin at 0."""
        if array.null_count:
            lengths = self.pa.compute.fill_null(self.pa.compute.list_value_length(array), 0)
            return JaggedTensor(self.dense(array.flatten()), lengths=torch.from_dlpack(lengths))
        wide = self.pa.types.is_large_list(array.type)
        if len(array) == 0:
            offsets = torch.zeros(1, dtype=torch.int64 if wide else torch.int32)
            return JaggedTensor(self.dense(array.values.slice(0, 0)), offsets=offsets)
        offsets = torch.from_dlpack(array.offsets)
        first, last = int(offsets[0]), int(offsets[-1])
        values = array.values
        if (first, last) != (0, len(values)):
            values = values.slice(first, last - first)
        return JaggedTensor(self.dense(values), offsets=offsets - first if first else offsets)

    def dense(self, array: Any) -> Tensor:
        """Return an array of numbers, or of fixed-size lists of numbers of any depth, as a tensor."""
        types, kind = self.pa.types, array.type
        if types.is_fixed_size_list(kind):
            rows = self.matrix(array)
        elif types.is_boolean(kind):
            filled = array.fill_null(False) if array.null_count else array
            # numpy's conversion of an array that is not packed bits is a copy, and writable.
            rows = torch.from_numpy(filled.to_numpy(zero_copy_only=False))
        elif self.bits and types.is_uint64(kind):
            return self.dense(array.view(self.pa.int64()))
        elif types.is_integer(kind):
            rows = self.cast(torch.from_dlpack(self.without_validity(array)), array)
        elif types.is_floating(kind):
            rows = torch.from_dlpack(self.without_validity(array))
        else:
            raise ValueError(
                f"to_tensors: column {self.name!r} must hold numbers, booleans, strings or lists of them, got {kind}: "
                f"{way_to_numbers(self.name, kind)}"
            )
        return self.fill_nulls(rows, array) if array.null_count else rows

    def matrix(self, array: Any) -> Tensor:
        """Return an array of fixed-size lists as a tensor ``[B, k, ...]``."""
        size = array.type.list_size
        values = array.values.slice(array.offset * size, len(array) * size)
        if array.null_count and self.pa.types.is_primitive(values.type):
            # A null row holds values that mean nothing: they become nulls too.
            nulls = np.repeat(array.is_null().to_numpy(zero_copy_only=False), size)
            values = self.pa.compute.if_else(self.pa.array(nulls), self.pa.scalar(None, values.type), values)
        each = self.values_each
        self.values_each = each * size
        rows = self.dense(values)
        self.values_each = each
        return rows.reshape(len(array), size, *rows.shape[1:])

    def without_validity(self, array: Any) -> Any:
        """Return the array without its nulls: in their place is whatever its memory holds there."""
        if not array.null_count:
            return array
        return self.pa.Array.from_buffers(array.type, len(array), [None, array.buffers()[1]], 0, array.offset)

    def cast(self, rows: Tensor, array: Any) -> Tensor:
        """Return the array's integers in ``self.integers``, or in float32 where NaN replaces nulls."""
        if isinstance(self.fill, float) and math.isnan(self.fill):
            wanted, least, most = torch.float32, -(1 << 24), 1 << 24
            way = ", which would round it: cast the column, or give a fill that is an integer"
        elif self.integers is None or self.integers == rows.dtype:
            return rows
        else:
            wanted, way = self.integers, ""
            least, most = torch.iinfo(wanted).min, torch.iinfo(wanted).max
        given = torch.iinfo(rows.dtype)
        if given.min < least or given.max > most:
            bounds = self.pa.compute.min_max(array).as_py()
            for value in (bounds["min"], bounds["max"]):
                if value is not None and not least <= value <= most:
                    place = self.place(self.pa.compute.index(array, value).as_py())
                    raise ValueError(f"to_tensors: column {self.name!r} has {value} at {place}, not {wanted}{way}")
        return rows.to(wanted)

    def place(self, i: int) -> str:
        return f"{self.unit} {i // self.values_each}"

    def fill_nulls(self, rows: Tensor, array: Any) -> Tensor:
        fill = math.nan if self.fill is None and rows.dtype.is_floating_point else self.fill
        nulls = array.is_null().to_numpy(zero_copy_only=False)
        if fill is None:
            raise ValueError(
                f"to_tensors: column {self.name!r} has a null at {self.place(int(nulls.argmax()))}, and {array.type} "
                f"has no value for it: give fill={{{self.name!r}: ...}}"
            )
        if not _fits(fill, rows.dtype):
            raise ValueError(f"to_tensors: fill of column {self.name!r} must be a {array.type}, got {fill!r}")
        # By numpy, since torch cannot assign by a mask in uint16, uint32 and uint64.
        filled = rows.numpy().copy()
        filled[nulls] = fill
        return torch.from_numpy(filled)


def _fits(fill: float | int | bool, dtype: torch.dtype) -> bool:
    """Say whether ``dtype`` can hold the value ``fill``; for floats only the range counts."""
    if dtype == torch.bool:
        return fill in (0, 1)
    if dtype.is_floating_point:
        return not math.isfinite(fill) or abs(fill) <= torch.finfo(dtype).max
    return math.isfinite(fill) and fill == int(fill) and torch.iinfo(dtype).min <= fill <= torch.iinfo(dtype).max


def to_record_batch(columns: Mapping[str, Any]) -> pyarrow.RecordBatch:
    """
    Turn tensors into a record batch, in their memory where they are contiguous: the inverse of :func:`to_tensors`.

    Args:
        columns: a mapping from names to columns, all with the same number of rows; a pandas frame; or what has
            ``__arrow_c_stream__`` or ``__arrow_c_array__`` and holds columns, such as a table of pyarrow, a frame of
            polars or a relation of DuckDB. Columns are tensors ``[B]`` or ``[B, k, ...]`` and numpy arrays of numbers
            or booleans; :class:`JaggedTensor` without weights; strings as lists, numpy or pyarrow arrays, with NaN
            where one is missing; arrays and series of other libraries with Arrow's methods or ``__array__``;
            TensorFlow's tensors, ragged and sparse ones too. Tensors on other devices are copied to the CPU.

    Returns:
        A ``pyarrow.RecordBatch`` with the columns in order. Jagged rows become lists with int32 offsets, or with int64
        ones where there are too many values for int32.

    Raises:
        TypeError: a column of another type.
        ValueError: no columns, columns of different lengths, a dtype that Arrow lacks, offsets that do not rise from 0
            to the number of values; a name that is there twice; what its library does not hand over.

    Example:
        >>> import torch
        >>> to_record_batch({"id": torch.tensor([7, 8]), "seen": JaggedTensor.from_dense([torch.tensor([3]),
        ...     torch.tensor([4, 1])])}).to_pylist()
        [{'id': 7, 'seen': [3]}, {'id': 8, 'seen': [4, 1]}]
    """
    pa = arrow("to_record_batch")
    given = columns_by_name(columns, "to_record_batch")
    if given is None:
        raise TypeError(f"to_record_batch: columns must be a mapping or a frame, got {type(columns).__name__}")
    arrays = {name: _array(pa, name, given[name]) for name in given}
    if not arrays:
        raise ValueError("to_record_batch: columns must have at least one column, got none")
    first = next(iter(arrays))
    for name, array in arrays.items():
        if len(array) != len(arrays[first]):
            raise ValueError(
                f"to_record_batch: columns must have one number of rows, got {len(arrays[first])} in {first!r} and "
                f"{len(array)} in {name!r}"
            )
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _array(pa: Any, name: str, column: Any) -> Any:
    if isinstance(column, JaggedTensor):
        return _lists(pa, name, column)
    if isinstance(column, Tensor):
        return _numbers(pa, name, column)
    if isinstance(column, pa.ChunkedArray):
        return without_views(column).combine_chunks()
    if isinstance(column, pa.Array):
        return without_views(column)
    if isinstance(column, np.ma.MaskedArray):
        raise TypeError(f"to_record_batch: column {name!r} must have no mask: give pa.array(values, mask=...)")
    if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
        return _numbers(pa, name, _from_numpy(name, column))
    if isinstance(column, (np.ndarray, list, tuple)):
        try:
            # Dates and times keep their unit, which numpy's tolist() drops.
            if isinstance(column, np.ndarray) and column.dtype.kind not in "mM":
                column = column.tolist()
            try:
                return pa.array(column)
            except (pa.ArrowException, TypeError):  # objects of a frame have NaN where a string is missing
                return pa.array(column, from_pandas=True)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise ValueError(f"to_record_batch: column {name!r} cannot be made an Arrow array: {error}") from None
    what = f"to_record_batch: column {name!r}"
    if all(hasattr(column, part) for part in ("indices", "values", "dense_shape")):
        rows, shape = _integers(column.indices, what)[:, 0], _integers(column.dense_shape, what).tolist()
        if len(shape) != 2 or bool((rows.diff() < 0).any()):
            raise ValueError(f"{what}: a SparseTensor must have rank 2 and its rows in order, got shape {shape}")
        return _list_array(pa, name, _array(pa, name, column.values), row_ids_to_offsets(rows, shape[0]))
    if hasattr(column, "row_splits") and hasattr(column, "values"):
        return _list_array(pa, name, _array(pa, name, column.values), _integers(column.row_splits, what))
    if is_array(column):
        return _array(pa, name, own_array(column, what, what))
    raise TypeError(
        f"{what} must be a tensor, a JaggedTensor, a numpy or pyarrow array or a list, got {type(column).__name__}"
    )


def _integers(x: Any, what: str) -> Tensor:
    """Return what says where rows are, in a ragged or sparse tensor, on the CPU."""
    own = own_array(x, what, what)
    return own.cpu() if isinstance(own, Tensor) else tensor_of_numpy(own)


def _from_numpy(name: str, column: np.ndarray) -> Tensor:
    """Return a numpy array as a tensor, in its memory if torch can use it, else as a contiguous copy."""
    if not column.flags.writeable or not column.dtype.isnative or any(stride < 0 for stride in column.strides):
        column = column.astype(column.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(column)
    except (TypeError, ValueError):
        raise ValueError(f"to_record_batch: column {name!r} has no tensor for numpy's {column.dtype}") from None


def _numbers(pa: Any, name: str, tensor: Tensor) -> Any:
    """Return a tensor of rank 1 or more as an Arrow array: each dimension after the first is a fixed-size list."""
    if tensor.dim() == 0:
        raise ValueError(f"to_record_batch: column {name!r} must have rank >= 1, got a scalar")
    try:
        array = pa.array(tensor.detach().cpu().contiguous().reshape(-1).numpy())
    except (TypeError, pa.ArrowException):
        raise ValueError(f"to_record_batch: column {name!r} has no Arrow type for {tensor.dtype}") from None
    if array.type == pa.null():
        raise ValueError(f"to_record_batch: column {name!r} has no Arrow type for {tensor.dtype}")
    sizes = list(tensor.shape)
    for dimension in range(tensor.dim() - 1, 0, -1):
        if sizes[dimension] == 0:
            raise ValueError(f"to_record_batch: column {name!r} must have no dimension of size 0 after the first")
        array = pa.FixedSizeListArray.from_arrays(array, sizes[dimension])
    return array


def _lists(pa: Any, name: str, column: JaggedTensor) -> Any:
    if column.weights_or_none() is not None:
        raise ValueError(
            f"to_record_batch: column {name!r} must have no weights, got some: give them as another column"
        )
    values, offsets = column.values().detach().cpu(), column.offsets().detach().cpu()
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(values) or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"to_record_batch: offsets of column {name!r} must rise from 0 to the number of values, {len(values)}, got "
            f"{offsets[0]} to {offsets[-1]}"
        )
    return _list_array(pa, name, _numbers(pa, name, values), offsets)


def _list_array(pa: Any, name: str, values: Any, offsets: Tensor) -> Any:
    if len(values) > _INT32_MAX:
        return pa.LargeListArray.from_arrays(_numbers(pa, name, offsets.to(torch.int64)), values)
    return pa.ListArray.from_arrays(_numbers(pa, name, offsets.to(torch.int32)), values)
