"""Lists as text: text that is split into lists of strings, and lists whose items are joined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .._arrow_memory import decoded
from ._arrow import arrow
from ._types import is_text, with_leaf

#: The separator of the items of a list in a CSV file.
BAR = "|"


def checked_split(function: str, split: Mapping[str, str] | None) -> dict[str, str]:
    """Return separators by column; raise ``ValueError`` unless all are text that is not empty."""
    for name, separator in (split or {}).items():
        if not isinstance(separator, str) or not separator:
            raise ValueError(f"{function}: split of column {name!r} must be the text between items, got {separator!r}")
    return dict(split or {})


def split_text(text: Any, separator: str) -> Any:
    """Return an array of text as lists of what is between the separators; an empty text is an empty list."""
    pa = arrow("a reader")
    items = pa.compute.split_pattern(text, separator)
    # Splitting an empty string gives one empty item.
    return pa.compute.if_else(pa.compute.equal(pa.compute.binary_length(text), 0), pa.scalar([], items.type), items)


def with_lists(batches: Iterable[Any], function: str, split: Mapping[str, str] | None) -> Iterator[Any]:
    """
    Return an iterator over record batches whose columns in ``split`` are lists of strings.

    Args:
        batches: the record batches, with text in these columns.
        function: the reader, for errors.
        split: a mapping from columns to the text between the items of their lists. None: no column is split.

    Raises:
        ValueError: while reading, a column that is not there or holds no text.
    """
    separators = checked_split(function, split)
    return (_with_lists(batch, function, separators) for batch in batches) if separators else iter(batches)


def _with_lists(batch: Any, function: str, separators: Mapping[str, str]) -> Any:
    pa, names = arrow(function), batch.schema.names
    columns = dict(zip(names, batch.columns, strict=True))
    for name, separator in separators.items():
        if name not in columns:
            raise ValueError(f"{function}: split must name columns among {names}, got {name!r}")
        column = decoded(columns[name])
        if not is_text(column.type):
            raise ValueError(f"{function}: column {name!r} must hold text to be split, got {column.type}")
        columns[name] = split_text(column, separator)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=names)


def join_items(name: str, column: Any) -> Any:
    """Return a column of lists as strings, the items joined by bars; ``ValueError`` if it could not be split again."""
    pa = arrow("write_csv")
    if column.flatten().null_count:
        raise ValueError(f"write_csv: column {name!r} must have no nulls among the items of its lists")
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    items = column.cast(with_leaf(column.type, pa.string()))
    if pa.compute.any(pa.compute.match_substring(items.flatten(), BAR)).as_py():
        raise ValueError(f"write_csv: column {name!r} must have no {BAR!r} in the items of its lists")
    compute, text = pa.compute, pa.compute.binary_join(items, BAR)
    if compute.any(compute.and_(compute.equal(text, ""), compute.greater(compute.list_value_length(items), 0))).as_py():
        raise ValueError(
            f"write_csv: column {name!r} must have no list of one empty string, which reads as an empty one"
        )
    return text
