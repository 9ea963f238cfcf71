"""Hours and weekdays of dates and times, as columns of integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._arrow_memory import decoded
from .._foreign import columns_by_name
from ._arrow import arrow
from ._types import is_text
from .tensors import to_record_batch

__all__ = ["with_time_parts"]

_PARTS = ("hour", "weekday")
_UNITS = ("s", "ms", "us", "ns")


def with_time_parts(
    batch: Any, name: str, parts: Sequence[str] = _PARTS, *, unit: str | None = None, timezone: str | None = None
) -> dict[str, Any]:
    """
    Return the columns of a batch, and in columns of their own the hours and weekdays of one of them.

    Args:
        batch: the columns, in any form that :func:`to_record_batch` takes.
        name: the column of dates, times, timestamps, integers since 1970 in UTC, or texts as ISO 8601 writes them: all
            without a zone, or all with one, which are then in UTC.
        parts: the columns to make: ``"hour"``, 0 to 23, and ``"weekday"``, 0 (Monday) to 6. Default: both. They are
            called ``name_hour`` and ``name_weekday``.
        unit: the unit of integers: ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``.
        timezone: the zone whose hours and weekdays are wanted, such as ``"Europe/Oslo"``: times without a zone are in
            UTC then. Default None: a column's own zone, or the time as it is written.

    Returns:
        A dict, which :class:`FeatureTransform` and :func:`to_record_batch` take. The new columns are int64, with nulls
        where a time is missing.

    Raises:
        ImportError: without pyarrow.
        TypeError: a batch in no form of columns.
        ValueError: an unknown column, part, unit or zone; integers without a unit; a text that is no time, with its
            row; weekdays of times without dates; a zone for dates alone or times alone; a column of other values; a
            column of the new name.

    Example:
        >>> columns = with_time_parts({"time": ["2026-11-29 20:15", None]}, "time")
        >>> columns["time_hour"].to_pylist(), columns["time_weekday"].to_pylist()
        ([20, None], [6, None])
    """
    pa = arrow("with_time_parts")
    given = columns_by_name(batch, "with_time_parts")
    if given is None:
        raise TypeError(f"with_time_parts: batch must be a mapping or a frame, got {type(batch).__name__}")
    columns = {key: given[key] for key in given}
    if name not in columns:
        raise ValueError(f"with_time_parts: batch must have column {name!r}, got {list(columns)}")
    if unit not in (None, *_UNITS):
        raise ValueError(f"with_time_parts: unit must be one of {', '.join(_UNITS)}, got {unit!r}")
    what = f"with_time_parts: column {name!r}"
    column = to_record_batch({name: columns[name]}).column(0)
    times = _times(pa, what, column, unit)
    if timezone is not None and (pa.types.is_date(column.type) or pa.types.is_time(column.type)):
        raise ValueError(f"{what} must hold times with dates to have a timezone, got {column.type}")
    try:
        if timezone is not None:
            times = times.cast(pa.timestamp(times.type.unit, timezone))
        for part in [parts] if isinstance(parts, str) else parts:
            if part not in _PARTS:
                raise ValueError(f"with_time_parts: parts must be among {', '.join(_PARTS)}, got {part!r}")
            if f"{name}_{part}" in columns:
                raise ValueError(f"with_time_parts: batch must have no column {name}_{part}, which is made")
            if part == "weekday" and pa.types.is_time(times.type):
                raise ValueError(f"{what} must hold dates to have weekdays, got {times.type}")
            found = pa.compute.hour(times) if part == "hour" else pa.compute.day_of_week(times)
            columns[f"{name}_{part}"] = found.cast(pa.int64())
    except pa.ArrowException as error:
        raise ValueError(f"{what}: {error}") from None
    return columns


def _times(pa: Any, what: str, column: Any, unit: str | None) -> Any:
    """Return a column as timestamps, or as times of a day."""
    types = pa.types
    column = decoded(column)
    if types.is_timestamp(column.type) or types.is_time(column.type):
        return column
    if types.is_date(column.type) or types.is_null(column.type):
        return column.cast(pa.timestamp("s"))
    if types.is_integer(column.type):
        if unit is None:
            raise ValueError(f"{what} holds {column.type}, of no unit: give unit='s', 'ms', 'us' or 'ns'")
        return column.cast(pa.int64()).cast(pa.timestamp(unit))
    if not (is_text(column.type) or str(column.type) == "string_view"):
        raise ValueError(f"{what} must hold dates, times, texts or integers, got {column.type}")
    text = column.cast(pa.string())
    first, kind = text.drop_null().slice(0, 1), pa.timestamp("us")
    if _parsed(pa, first, kind) is None and _parsed(pa, first, pa.timestamp("us", "UTC")) is not None:
        kind = pa.timestamp("us", "UTC")
    times = _parsed(pa, text, kind)
    if times is not None:
        return times
    row = next(row for row in range(len(text)) if _parsed(pa, text.slice(row, 1), kind) is None)
    raise ValueError(f"{what} must hold times such as '2026-11-29 20:15', got {text[row]} at row {row}")


def _parsed(pa: Any, text: Any, kind: Any) -> Any:
    """Return text as timestamps; None if one of them is none of the kind."""
    try:
        return text.cast(kind)
    except pa.ArrowException:
        return None
