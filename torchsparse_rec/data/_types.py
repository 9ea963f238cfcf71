"""Arrow types of columns: the ones that a prebatched file can hold, and the narrowest one for a column's integers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .._arrow_memory import decoded
from ._arrow import arrow

# Signed, since torch indexes with them; uint64 only for values beyond int64.
_INTEGERS = ("int8", "int16", "int32", "int64", "uint64")


def arrow_types(owner: str, types: Mapping[str, Any] | None) -> dict[str, Any]:
    """
    Return Arrow's types by column, where names such as ``"int64"``, ``"int64[]"`` and ``"int64[10]"`` stand for types.

    Raises:
        ValueError: a name of no type; it begins with the owner.
    """
    pa, found = arrow("a reader"), {}
    for name, kind in (types or {}).items():
        if isinstance(kind, str):
            match = re.fullmatch(r"(\w+)(?:\[(\d*)\])?", kind.strip())
            try:
                value = pa.type_for_alias(match[1] if match else kind)
            except ValueError:
                raise ValueError(f"{owner}: Arrow has no type {kind!r}, for column {name!r}") from None
            size = match[2] if match else None
            kind = value if size is None else pa.list_(value, int(size) if size else -1)
        found[name] = kind
    return found


def leaf(kind: Any) -> Any:
    """Return the type of the values within nested lists, or the type itself if it is no list."""
    types = arrow("a column").types
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def nullable(kind: Any) -> Any:
    """Return a type with the default names of list items; all items may be null."""
    return with_leaf(kind, leaf(kind))


def with_leaf(kind: Any, value: Any) -> Any:
    """Return a type with the same lists around values of another type."""
    pa = arrow("a column")
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(with_leaf(kind.value_type, value), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(with_leaf(kind.value_type, value))
    if pa.types.is_list(kind):
        return pa.list_(with_leaf(kind.value_type, value))
    return value


def is_text(kind: Any) -> bool:
    """Say whether a type is one of Arrow's strings or binaries, not one of their views."""
    types = arrow("a column").types
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))


def is_number(kind: Any) -> bool:
    """Say whether a type is one of Arrow's integers, floats or booleans: no date, and no decimal."""
    types = arrow("a column").types
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def is_integer(kind: Any) -> bool:
    """Say whether a type holds integers, in lists or not."""
    return arrow("a column").types.is_integer(leaf(kind))


def way_to_numbers(name: str, kind: Any) -> str:
    """Say, for errors, what makes a column of a type that is not taken one of numbers."""
    types = arrow("a column").types
    if types.is_date(kind) or types.is_timestamp(kind):
        return f"with_time_parts(batch, {name!r}) makes integers of it"
    return "cast it first"


def stored_type(name: str, kind: Any) -> Any:
    """
    Return the type in which a prebatched file stores a column: a dictionary's values, lists with default names.

    Raises:
        ValueError: a type that a prebatched file cannot hold.
    """
    pa = arrow("write_prebatched")
    if pa.types.is_dictionary(kind):
        return stored_type(name, kind.value_type)
    views = {"string_view": pa.large_string(), "binary_view": pa.large_binary()}
    value = views.get(str(leaf(kind)), leaf(kind))
    if not (is_text(value) or is_number(value)):
        raise ValueError(
            f"column {name!r} must hold numbers, booleans, strings or lists of them, got {kind}: "
            f"{way_to_numbers(name, kind)}"
        )
    return with_leaf(kind, value)


def narrowest(array: Any) -> Any:
    """Return the array's type with the narrowest integers that hold its values; a type without integers unchanged."""
    pa = arrow("write_prebatched")
    if not is_integer(array.type):
        return array.type
    low, high = _bounds(array)
    return with_leaf(array.type, next(kind for kind in _kinds(pa) if _holds(kind, low, high)))


def cast_stored(array: Any, kind: Any) -> Any:
    """
    Cast an array to a type from :func:`stored_type`, and refuse integers that the type cannot hold.

    Raises:
        ValueError: an integer outside the type's range; the message names it. Nulls have no value.
    """
    if array.type == kind:
        return array
    array = decoded(array)
    if not (is_integer(array.type) and is_integer(kind)):
        return array.cast(kind)
    for value in _bounds(array):
        if not _holds(leaf(kind), value, value):
            raise ValueError(f"{leaf(kind)} has no {value}")
    return array.cast(kind, safe=False)


def _bounds(array: Any) -> tuple[int, int]:
    """Return the least and the greatest of an array's integers, nulls left out; zeros if there are none."""
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
    Return the type that holds the integers of two types, or None if they differ in more than the width of integers.

    The types come from :func:`stored_type`. An unsigned type below 64 bits counts as the signed one of twice its bits.
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


def unified(first: Any, second: Any) -> Any:
    """Return the type that holds all values of two types, or None if they differ in more than their width."""
    pa = arrow("a column")
    types, both = pa.types, (first, second)
    if first == second or types.is_null(second):
        return first
    if types.is_null(first):
        return second
    if any(map(types.is_dictionary, both)):
        return unified(*[kind.value_type if types.is_dictionary(kind) else kind for kind in both])
    if all(types.is_list(kind) or types.is_large_list(kind) for kind in both):
        inner = unified(first.value_type, second.value_type)
        of_lists = pa.large_list if any(map(types.is_large_list, both)) else pa.list_
        return None if inner is None else of_lists(inner)
    if all(map(types.is_fixed_size_list, both)) and first.list_size == second.list_size:
        inner = unified(first.value_type, second.value_type)
        return None if inner is None else pa.list_(inner, first.list_size)
    if all(map(types.is_integer, both)):
        # A signed type holds an unsigned one of half its bits.
        one_signed = types.is_signed_integer(first) != types.is_signed_integer(second)
        bits = max(kind.bit_width * (1 + (one_signed and types.is_unsigned_integer(kind))) for kind in both)
        kind = "uint" if all(map(types.is_unsigned_integer, both)) else "int"
        return getattr(pa, f"{kind}{bits}")() if bits <= 64 else None
    if all(map(types.is_floating, both)):
        return max(both, key=lambda kind: kind.bit_width)
    for narrow, wide in ((pa.string(), pa.large_string()), (pa.binary(), pa.large_binary())):
        if all(kind in (narrow, wide) for kind in both):
            return wide
    return None
