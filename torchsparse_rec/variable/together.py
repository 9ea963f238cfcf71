"""Insertions of keys into several tables that grow, by one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from .. import ops
from ._counters import late_keys, short_of_room
from .keys import KeyRows

__all__ = ["insert_together"]


def insert_together(
    tables: Sequence[KeyRows],
    ids: Tensor,
    parts: Sequence[tuple[int, int]],
    versions: Sequence[int],
    make_rooms: Sequence[Callable[[int], None]],
) -> tuple[Tensor, Tensor]:
    """
    Find and insert the keys of several tables in one call: as :meth:`KeyRows.insert` with ``count=True``.

    Args:
        tables: the tables.
        ids: the keys of all tables.
        parts: the beginning and end of each table's keys in ``ids``, in ascending order.
        versions: the versions of each table.
        make_rooms: the function ``make_room`` of each table.

    Returns:
        ``(rows, inserted)``; at positions in no part, the ids themselves and -1.

    Raises:
        RuntimeError: as :meth:`KeyRows.insert`. No key is inserted in any table then.
    """
    sizes = [end - begin for begin, end in parts]
    for k in short_of_room(tables, sizes):
        begin, end = parts[k]
        tables[k]._see_room_before(ids[begin:end], None, make_rooms[k], versions[k])
    rows, inserted = ops.tables_find_or_insert_(
        [keys.index for keys in tables],
        [keys.entries for keys in tables],
        [keys.counters for keys in tables],
        [keys.free_rows for keys in tables],
        ids,
        [begin for begin, _ in parts],
        [end for _, end in parts],
        versions=[version + 1 for version in versions],
        count=True,
    )
    try:
        for k in late_keys(tables, sizes):
            (begin, end), keys = parts[k], tables[k]
            insert = partial(keys._insert, version=versions[k] + 1, count=True)
            keys._complete(ids[begin:end], None, None, insert, make_rooms[k], rows[begin:end], inserted[begin:end])
    except BaseException:
        for keys, (begin, end) in zip(tables, parts, strict=True):
            keys.undo(ids[begin:end], inserted[begin:end])
        raise
    return rows, inserted
