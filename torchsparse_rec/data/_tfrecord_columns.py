"""Turn record batches into the columns that the encoder of TensorFlow's Examples takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._arrow_memory import decoded, elements, strings
from ..ops import ExampleColumn, ExampleValues
from ..typing import ExampleDtype
from ._arrow import arrow
from ._types import way_to_numbers


def example_columns(batch: Any) -> tuple[dict[str, ExampleColumn], dict[str, ExampleValues]]:
    """
    Return, by column name, the feature that a record batch's column is in an Example, and the column's values.

    The values are in the batch's memory where their type allows it. Integers and booleans are written as int64, floats
    as float32, strings as bytes. A row's null is written as no feature.

    Raises:
        ValueError: a type that no Example can hold, an integer beyond int64, or a null within a list.
    """
    columns: dict[str, ExampleColumn] = {}
    values: dict[str, ExampleValues] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if name in columns:
            raise ValueError(f"the columns of a batch must have distinct names, got {name!r} twice")
        columns[name], values[name] = _column(name, array)
    return columns, values


def _column(name: str, array: Any) -> tuple[ExampleColumn, ExampleValues]:
    pa = arrow("TFRecord")
    array = decoded(array)
    present = _bools(array.is_valid()) if array.null_count else None
    if pa.types.is_fixed_size_list(array.type):
        k = array.type.list_size
        _check_whole(name, array)
        dtype, values, offsets = _flat(name, array.values.slice(array.offset * k, len(array) * k))
        return ExampleColumn(dtype, k), ExampleValues(values, offsets, None, present)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        _check_whole(name, array)
        dtype, values, offsets = _flat(name, array.flatten())
        return ExampleColumn(dtype, None), ExampleValues(values, offsets, _row_offsets(array, present), present)
    dtype, values, offsets = _flat(name, array)
    return ExampleColumn(dtype, 1), ExampleValues(values, offsets, None, present)


def _check_whole(name: str, array: Any) -> None:
    # flatten() leaves out the items of null lists, which are not written.
    if array.flatten().null_count:
        raise ValueError(f"column {name!r} has a null within a list, which no Example can hold")


def _row_offsets(array: Any, present: Tensor | None) -> Tensor:
    """Return the offsets of the rows' values among all values, without null rows' values, int64 ``[rows + 1]``."""
    offsets = _integers(array.offsets.cast(arrow("TFRecord").int64()))
    lengths = offsets[1:] - offsets[:-1]
    if present is not None:
        lengths = lengths * present
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _flat(name: str, array: Any) -> tuple[ExampleDtype, Tensor, Tensor | None]:
    """
    Return the dtype and the values of an array that is no list, and the offsets if it holds strings, else None.

    A null has some value.
    """
    pa = arrow("TFRecord")
    array = decoded(array)
    types, kind = pa.types, array.type
    if types.is_boolean(kind) or types.is_integer(kind):
        dtype: ExampleDtype = "int32" if types.is_int32(kind) else "int64"
        return dtype, _integers(_cast(name, _filled(array), getattr(pa, dtype)())), None
    if types.is_floating(kind):
        numbers = _cast(name, _filled(array), pa.float32())
        if types.is_float64(kind):
            _check_rounded(name, array, numbers)
        return "float32", _tensor(numbers, torch.float32), None
    if str(kind) in ("string", "large_string", "binary", "large_binary", "string_view", "binary_view"):
        return "bytes", *strings(array)
    raise ValueError(
        f"column {name!r} must hold numbers, booleans, strings, binaries or lists of them, got {kind}; "
        f"{way_to_numbers(name, kind)}"
    )


def _filled(array: Any) -> Any:
    return (
        array.fill_null(False if arrow("TFRecord").types.is_boolean(array.type) else 0) if array.null_count else array
    )


def _cast(name: str, array: Any, kind: Any) -> Any:
    if array.type == kind:
        return array
    try:
        return array.cast(kind)
    except arrow("TFRecord").ArrowInvalid as error:
        raise ValueError(f"column {name!r} must fit into {kind}: {error}") from error


def _check_rounded(name: str, doubles: Any, floats: Any) -> None:
    """Raise ``ValueError`` for a double whose whole part float32 does not hold, or that it does not hold at all."""
    compute = arrow("TFRecord").compute
    made = floats.cast(doubles.type)
    lost = compute.or_(compute.greater_equal(compute.abs(doubles), 2.0**24), compute.equal(made, 0.0))
    place = compute.index(compute.and_(compute.not_equal(made, doubles), lost), True).as_py()
    if place >= 0:
        raise ValueError(
            f"column {name!r} has {doubles[place]}, of which float32, the only float of an Example, makes "
            f"{made[place]}: cast the column to float32 to round it, or to integers or strings to keep it"
        )


def _bools(array: Any) -> Tensor:
    return _tensor(array.cast(arrow("TFRecord").uint8()), torch.uint8).view(torch.bool)


def _integers(array: Any) -> Tensor:
    return _tensor(array, torch.int32 if arrow("TFRecord").types.is_int32(array.type) else torch.int64)


def _tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """Return the values of an array of numbers as a tensor in its memory."""
    return elements(array.buffers()[1], dtype, array.offset, len(array))
