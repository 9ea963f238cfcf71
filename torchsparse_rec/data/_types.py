"""The types of columns: which a prebatched file holds, and integers in the narrowest that has all their values."""

from __future__ import annotations

from typing import Any

from ._arrow import arrow

# Signed, since torch indexes with them; uint64 only for what int64 lacks.
_INTEGERS = ("int8", "int16", "int32", "int64", "uint64")


def leaf(kind: Any) -> Any:
    """The type of the values that lists of lists hold in the end."""
    types = arrow("a column").types
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def nullable(kind: Any) -> Any:
    """The same lists, of items of one name that may be null."""
    return with_leaf(kind, leaf(kind))


def with_leaf(kind: Any, value: Any) -> Any:
    """The same lists of values of another type."""
    pa = arrow("a column")
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(with_leaf(kind.value_type, value), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(with_leaf(kind.value_type, value))
    if pa.types.is_list(kind):
        return pa.list_(with_leaf(kind.value_type, value))
    return value


def is_integer(kind: Any) -> bool:
    """Whether it holds integers, in lists or not."""
    return arrow("a column").types.is_integer(leaf(kind))


def stored_type(name: str, kind: Any) -> Any:
    """
    The type in which a column is stored: dictionaries by their values, lists with children of one name.

    Raises:
        ValueError: for a type that has no place in a prebatched file.
    """
    pa = arrow("write_prebatched")
    if pa.types.is_dictionary(kind):
        return stored_type(name, kind.value_type)
    views = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}
    value = views.get(str(leaf(kind)), leaf(kind))
    types = pa.types
    text = types.is_string(value) or types.is_large_string(value)
    text = text or types.is_binary(value) or types.is_large_binary(value)
    if not (text or types.is_boolean(value) or types.is_integer(value) or types.is_floating(value)):
        raise ValueError(
            f"column {name!r} must hold numbers, booleans, strings or lists of them, got {kind}: cast it first"
        )
    return with_leaf(kind, value)


def narrowest(array: Any) -> Any:
    """The array's type with the narrowest integers that hold its values; other types as they are."""
    pa = arrow("write_prebatched")
    if not is_integer(array.type):
        return array.type
    low, high = _bounds(array)
    return with_leaf(array.type, next(kind for kind in _kinds(pa) if _holds(kind, low, high)))


def cast_stored(array: Any, kind: Any) -> Any:
    """
    The array in a type of :func:`stored_type`.

    Raises:
        ValueError: with the integer that the type lacks. What lies under nulls is no value.
    """
    if array.type == kind:
        return array
    if arrow("a column").types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if not (is_integer(array.type) and is_integer(kind)):
        return array.cast(kind)
    for value in _bounds(array):
        if not _holds(leaf(kind), value, value):
            raise ValueError(f"{leaf(kind)} has no {value}")
    return array.cast(kind, safe=False)


def _bounds(array: Any) -> tuple[int, int]:
    """The least and the greatest of its integers, nulls left out; zeros if there are none."""
    pa = arrow("a column")
    while not pa.types.is_integer(array.type):
        array = array.flatten()
    bounds = pa.compute.min_max(array).as_py()
    return (0, 0) if bounds["min"] is None else (bounds["min"], bounds["max"])


def _kinds(pa: Any) -> list[Any]:
    return [getattr(pa, name)() for name in _INTEGERS]


def _holds(kind: Any, low: int, high: int) -> bool:
    if str(kind).startswith("u"):
        return low >= 0 and high < 2**kind.bit_width
    return -(2 ** (kind.bit_width - 1)) <= low and high < 2 ** (kind.bit_width - 1)


def wider(first: Any, second: Any) -> Any:
    """
    The type that holds the integers of both; None if they differ in more than the width of integers.

    Types are those of :func:`stored_type`. Widths not among the narrowest ones (uint32, say) count as the next one up.
    """
    pa = arrow("a column")
    if first == second:
        return first
    if not (is_integer(first) and is_integer(second)):
        return None
    if with_leaf(first, pa.int64()) != with_leaf(second, pa.int64()):
        return None
    ranks = [_rank(str(leaf(kind))) for kind in (first, second)]
    return with_leaf(first, getattr(pa, _INTEGERS[max(ranks)])())


def _rank(name: str) -> int:
    above = {"uint8": "int16", "uint16": "int32", "uint32": "int64"}
    return _INTEGERS.index(above.get(name, name))
