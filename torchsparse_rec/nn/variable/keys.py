"""Keys and their rows: the tensors of a table that grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ._index import MOST_HASHES, crowded, new_index, seed_of, unforeseen

__all__ = ["KeyRows", "insert_together", "packed", "unpacked"]

# The operators leave the last one alone: it is KeyRows' own.
_USED, _REUSED, _FAILED, _INSERTED, _ERASED = range(5)


def packed(frequencies: Tensor, versions: Tensor) -> Tensor:
    """The second number of entries."""
    return (versions.long() + 1) << 32 | frequencies.long()


def unpacked(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Frequencies and versions, int64; version -1: of no step."""
    return numbers & 0xFFFFFFFF, (numbers >> 32) - 1


class KeyRows(torch.nn.Module):
    """
    Keys and their rows, as buffers; see csrc/table.h for what they hold.

    Args:
        name: of the owner, for errors.
        capacity: rows at first.
        reserved: the first rows, which no key gets.
        device: of the buffers.
    """

    index: Tensor
    entries: Tensor
    counters: Tensor
    free_rows: Tensor
    _failed_before: int
    # Rows that are surely free on a device.
    _sure_room = 0
    # Rows of erased keys, which free_rows gets when there is no other room; None: they must be looked for.
    _freed: list[Tensor] | None

    def __init__(self, name: str, capacity: int, reserved: int = 0, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.name, self.reserved = name, reserved
        self.clear(capacity, device)

    def clear(self, capacity: int, device: torch.device | str | None = None) -> None:
        """Forget all keys."""
        entries = torch.full((capacity, 2), -1, dtype=torch.int64, device=device)
        entries[: self.reserved, 0] = 0
        counters = torch.zeros(8, dtype=torch.int64, device=device)
        counters[_USED] = self.reserved
        self.set_state(entries, counters, torch.empty(0, dtype=torch.int32, device=device))

    def set_state(self, entries: Tensor, counters: Tensor, free_rows: Tensor) -> None:
        """Take over a state; the index is made anew."""
        counters[_ERASED] = counters[_INSERTED] - (entries[self.reserved :, 1] != -1).sum()
        index = new_index(self.name, entries, counters)
        for name, value in (("entries", entries), ("counters", counters), ("free_rows", free_rows)):
            self.register_buffer(name, value)
        self.register_buffer("index", index, persistent=False)
        self._failed_before = self.failed
        self._sure_room = 0
        self._freed = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """A state of any capacity."""
        names = ("entries", "counters", "free_rows")
        if all(prefix + name in state_dict for name in names):
            device = self.entries.device
            self.set_state(*(state_dict[prefix + name].to(device, copy=True) for name in names))
            # With assign=True, too, copies: two tables cannot share their keys.
            state_dict = {**state_dict, **{prefix + name: getattr(self, name) for name in names}}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # ---- Sizes -------------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Rows that there are, used or not."""
        return self.entries.shape[0]

    def __len__(self) -> int:
        """Keys. On CUDA it waits for the device."""
        return int(self.counters[_INSERTED] - self.counters[_ERASED])

    def __bool__(self) -> bool:
        return True

    @property
    def used(self) -> int:
        """Rows that have ever been used; keys are among them. On CUDA it waits for the device."""
        return int(self.counters[_USED])

    @property
    def inserted(self) -> int:
        """Keys that have ever been inserted."""
        return int(self.counters[_INSERTED])

    @property
    def failed(self) -> int:
        """How often a key found no room."""
        return int(self.counters[_FAILED])

    def room(self) -> int:
        """Rows that new keys can have without growth."""
        return self.capacity - self.reserved - len(self)

    def _listed_room(self) -> int:
        """Of them those that an insertion finds."""
        used, reused, *_ = self.counters.tolist()
        return self.capacity - used + self.free_rows.shape[0] - reused

    def nbytes(self) -> int:
        """Of the buffers."""
        return sum(x.numel() * x.element_size() for x in (self.index, self.entries, self.counters, self.free_rows))

    # ---- Keys --------------------------------------------------------------------------------------------------------

    def find(self, ids: Tensor) -> Tensor:
        """Rows, -1 for those that are missing."""
        return ops.table_find(self.index, self.entries, ids)

    def insert(
        self,
        ids: Tensor,
        *,
        allowed: Tensor | None = None,
        frequencies: Tensor | None = None,
        version: int = -1,
        count: bool = False,
        make_room: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """
        Rows and new rows, see :func:`ops.table_find_or_insert_`.

        Args:
            ids: the keys.
            allowed: as of the operator, as are ``frequencies`` and ``count``.
            frequencies: see there.
            version: what the rows' version becomes; -1 (default): rows that are there keep theirs, new ones have -1.
            count: see there.
            make_room: where rows run out, is called with how many must be free, and sees to it. Default: grow.

        Raises:
            RuntimeError: no room was made; or keys that collide under every hash. No key has come then.
        """
        make_room = self.grow_by if make_room is None else make_room
        insert = partial(self._insert, version=version + 1 if version >= 0 else -1, count=count)
        self._prepare(ids, allowed, make_room, version)
        rows, born = insert(ids, allowed, frequencies)
        self._complete(ids, allowed, frequencies, insert, make_room, rows, born)
        return rows, born

    def _prepare(self, ids: Tensor, allowed: Tensor | None, make_room: Callable[[int], None], version: int) -> None:
        """Before an insertion: see to room where it would be late to do so after."""
        if self.counters.is_cuda:
            self._see_room_ahead(ids, allowed, make_room, version)
            return
        self._sure_room = 0
        if self._listed_room() < len(ids) and self.used == self.reserved:
            # All are new: to find out one by one that there is no room takes longer.
            self._see_room_for(ids, allowed, make_room, version)

    def _complete(
        self,
        ids: Tensor,
        allowed: Tensor | None,
        frequencies: Tensor | None,
        insert: Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]],
        make_room: Callable[[int], None],
        rows: Tensor,
        born: Tensor,
    ) -> None:
        """After one: see to room for the keys that found none, and insert them; or undo it all."""
        if self.counters.is_cuda:
            return
        hashes = 0
        try:
            while failed := self.failed - self._failed_before:
                self._take_back_late(ids, allowed, rows, born)
                where = (rows < 0).nonzero().flatten()
                some = [None if x is None else x[where] for x in (allowed, frequencies)]
                if self._listed_room() > 0:
                    # A region of the index was full.
                    hashes += 1
                    if hashes > MOST_HASHES:
                        raise crowded(self.name, failed, self.capacity)
                    self.spread()
                elif not self._list_free_rows():
                    self._see_room_for(ids[where], some[0], make_room, -1)  # the others are of this step already
                self.counters[_FAILED] -= failed  # they will find room now
                self._failed_before = self.failed
                rows[where], born[where] = insert(ids[where], *some)
        except BaseException:
            self.undo(ids, born)
            raise

    def undo(self, ids: Tensor, born: Tensor) -> None:
        """As if the keys that have just been inserted, where ``born`` is not negative, had not."""
        gone = len(self.erase(ids, born >= 0))
        self.counters[_INSERTED] -= gone
        self.counters[_ERASED] -= gone
        self._failed_before = self.failed

    def _take_back_late(self, ids: Tensor, allowed: Tensor | None, rows: Tensor, born: Tensor) -> None:
        """Keys that have just been inserted after one without room: rows are given in the order of keys."""
        failed = rows < 0 if allowed is None else (rows < 0) & allowed
        late = (born >= 0) & (failed.cumsum(0) > 0)
        if not late.any():
            return
        theirs = ops.table_erase_(self.index, self.entries, ids, mask=late)[late]
        reused = int(torch.isin(theirs, self.free_rows[: int(self.counters[_REUSED])]).sum())
        self.entries[theirs[reused:]] = -1  # as rows that have never been used: free rows come first
        self.counters[_REUSED] -= reused
        self.counters[_USED] -= len(theirs) - reused
        self.counters[_INSERTED] -= len(theirs)
        rows[torch.isin(rows, theirs)] = -1
        born[late] = -1

    def _insert(
        self, ids: Tensor, allowed: Tensor | None, frequencies: Tensor | None, version: int, count: bool
    ) -> tuple[Tensor, Tensor]:
        state = self.index, self.entries, self.counters, self.free_rows
        return ops.table_find_or_insert_(
            *state, ids, allowed=allowed, frequencies=frequencies, version=version, count=count
        )

    def _see_room_for(self, ids: Tensor, allowed: Tensor | None, make_room: Callable[[int], None], version: int) -> int:
        """How many new keys these are, for which there is room then."""
        wanted = self.missing(ids, allowed)
        if self.room() < wanted:
            if version >= 0:
                # Those that are there must not go to make room for the others.
                self._insert(ids, torch.zeros_like(ids, dtype=torch.bool), None, version + 1, False)
            make_room(wanted)
        self._list_free_rows()
        if self._listed_room() < wanted:
            raise RuntimeError(f"{self.name}: {self.capacity} rows must hold {wanted} more keys")
        return wanted

    def _see_room_ahead(
        self, ids: Tensor, allowed: Tensor | None, make_room: Callable[[int], None], version: int
    ) -> None:
        """On a device: to ask it at each insertion whether there was room would make every step wait for it."""
        if self._sure_room < len(ids):
            if self.failed > self._failed_before:
                self.spread()
            self._list_free_rows()
            self._sure_room = self._listed_room()
        if self._sure_room < len(ids):
            wanted = self._see_room_for(ids, allowed, make_room, version)
            self._sure_room = self._listed_room() - wanted
        else:
            self._sure_room -= len(ids)

    def missing(self, ids: Tensor, allowed: Tensor | None = None) -> int:
        """How many new keys these are. On CUDA it waits for the device."""
        absent = self.find(ids) < 0
        return len(ops.unique(ids[absent if allowed is None else absent & allowed]).values)

    def erase(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Erase keys; returns the rows that have become free. On CUDA it waits for the device."""
        rows = self.erase_soon(ids, mask)
        return rows[rows >= 0]

    def erase_soon(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """As :meth:`erase`, with -1 for those that are no key's, without waiting for a device."""
        rows = ops.table_erase_(self.index, self.entries, ids, mask=mask)
        self.counters[_ERASED] += (rows >= 0).sum()
        if rows.is_cuda:
            self._freed = None
        elif self._freed is not None:
            self._freed.append(rows[rows >= 0].int())
        return rows

    def _list_free_rows(self) -> bool:
        """Whether there are some that were not listed."""
        rest = self.free_rows[int(self.counters[_REUSED]) :]
        if self._freed is None:
            free = (self.entries[self.reserved : self.used, 1] == -1).nonzero().flatten().int() + self.reserved
        else:
            free = torch.cat([rest, *self._freed]).sort().values if self._freed else rest
        self._freed = []
        if len(free) == len(rest):
            return False
        self.free_rows = free
        self.counters[_REUSED] = 0
        return True

    def set_numbers(self, rows: Tensor, numbers: Tensor) -> None:
        """Write the second number of entries; of several for one row the last counts."""
        # Side by side with the keys, which are those that are there: so whole entries are written.
        entries = torch.stack([self.entries[rows, 0], numbers], 1).view(torch.uint8)
        ops.table_assign_(self.entries.view(torch.uint8), rows, entries)

    def rows(self) -> Tensor:
        """The rows of all keys, ascending."""
        return (self.entries[: self.used, 1] != -1).nonzero().flatten()

    # ---- Growth ------------------------------------------------------------------------------------------------------

    def grow_by(self, rows: int) -> None:
        """Double, until so many rows are free."""
        self.grow(self.capacity_for(rows))

    def capacity_for(self, rows: int, most: int | None = None) -> int:
        """The capacity, doubled until so many rows are free, or until it is ``most``."""
        room, capacity = self.room(), self.capacity
        while room + capacity - self.capacity < rows and (most is None or capacity < most):
            capacity = 2 * capacity if most is None else min(2 * capacity, most)
        return capacity

    def spread(self) -> None:
        """
        Have an index with another hash, which nobody can foresee: some keys found their region full.

        In an index of so many buckets that is no chance: they were chosen by one who knew the hash. Nothing that a
        table gives depends on it; tables of other keys never have a seed.
        """
        self.index = new_index(self.name, self.entries, self.counters, unforeseen())
        self._failed_before = self.failed

    def grow(self, capacity: int) -> None:
        """Have so many rows. Those of keys stay where they are."""
        entries = torch.full((capacity, 2), -1, dtype=torch.int64, device=self.entries.device)
        entries[: self.capacity] = self.entries
        index = new_index(self.name, entries, self.counters, seed_of(self.index))
        self.entries, self.index = entries, index


def insert_together(
    tables: Sequence[KeyRows],
    ids: Tensor,
    parts: Sequence[tuple[int, int]],
    versions: Sequence[int],
    make_rooms: Sequence[Callable[[int], None]],
) -> tuple[Tensor, Tensor]:
    """
    As :meth:`KeyRows.insert`, with ``count``, of several tables at once.

    Args:
        tables: the tables.
        ids: the keys of all of them.
        parts: where each table's are, in ascending order.
        versions: of each table.
        make_rooms: likewise.

    Returns:
        Rows and new rows; elsewhere in ``ids``, these and -1.

    Raises:
        RuntimeError: as :meth:`KeyRows.insert`. No key of any of them has come then.
    """
    for keys, (begin, end), version, make_room in zip(tables, parts, versions, make_rooms, strict=True):
        keys._prepare(ids[begin:end], None, make_room, version)
    rows, born = ops.tables_find_or_insert_(
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
        for keys, (begin, end), version, make_room in zip(tables, parts, versions, make_rooms, strict=True):
            insert = partial(keys._insert, version=version + 1, count=True)
            keys._complete(ids[begin:end], None, None, insert, make_room, rows[begin:end], born[begin:end])
    except BaseException:
        for keys, (begin, end) in zip(tables, parts, strict=True):
            keys.undo(ids[begin:end], born[begin:end])
        raise
    return rows, born
