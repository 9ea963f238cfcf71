"""Keys and their rows: the tensors of a table that grows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..tables.growing import Places, marked, plain_rows
from ._counters import Known, late_keys, short_of_room
from ._index import MOST_HASHES, crowded, new_index, seed_of, unforeseen
from .own_tensors import OwnTensors

__all__ = ["KeyRows", "packed", "unpacked"]

# Positions in ``counters``. The operators do not touch the last one, which KeyRows keeps.
_USED, _REUSED, _FAILED, _INSERTED, _ERASED = range(5)


def packed(frequencies: Tensor, versions: Tensor) -> Tensor:
    """Return the second number of table entries, int64: version + 1 in the high 32 bits, frequency in the low ones."""
    return (versions.long() + 1) << 32 | frequencies.long()


def unpacked(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return frequencies and versions, int64, from the second number of table entries; version -1: of no step."""
    return numbers & 0xFFFFFFFF, (numbers >> 32) - 1


class KeyRows(OwnTensors):
    """
    Keys and their rows, in tensors whose format is described in csrc/table.h.

    Args:
        name: the name of the owner, for errors.
        capacity: rows at first.
        reserved: the first rows, which no key gets.
        device: the device of the tensors.
    """

    tensors = ("entries", "counters", "free_rows", "index")
    saved = ("entries", "counters", "free_rows")
    index: Tensor
    entries: Tensor
    counters: Tensor
    free_rows: Tensor
    _failed_before: int
    #: The host's knowledge of the counters.
    known: Known
    #: Whether it may always grow: on CUDA room is then made for more keys than may come, as to count them would wait.
    may_grow = True
    _known_places: tuple[tuple[int, ...], Places] | None = None
    # Rows of erased keys, added to free_rows when there is no other room; None: they must be searched for.
    _freed: list[Tensor] | None

    def __init__(self, name: str, capacity: int, reserved: int = 0, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.name, self.reserved = name, reserved
        self.clear(capacity, device)

    def clear(self, capacity: int, device: torch.device | str | None = None) -> None:
        """Erase all keys, and have ``capacity`` rows."""
        entries = torch.full((capacity, 2), -1, dtype=torch.int64, device=device)
        entries[: self.reserved, 0] = 0
        counters = torch.zeros(8, dtype=torch.int64, device=device)
        counters[_USED] = self.reserved
        self.set_state(entries, counters, torch.empty(0, dtype=torch.int32, device=device))

    def set_state(self, entries: Tensor, counters: Tensor, free_rows: Tensor) -> None:
        """Take over a state of any capacity, and build its index anew."""
        counters[_ERASED] = counters[_INSERTED] - (entries[self.reserved :, 1] != -1).sum()
        index = new_index(self.name, entries, counters)
        self.entries, self.counters, self.free_rows, self.index = entries, counters, free_rows, index
        self._known_places = None
        self._failed_before = self.failed
        self.known = Known()
        self._freed = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.counters.is_meta:
            for name in ("entries", "free_rows"):  # which are as long as they are for these keys
                marked(destination[prefix + name], (self.places(),))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load a state of any capacity."""
        if prefix + "counters" in state_dict and prefix + "free_rows" not in state_dict:
            # Safetensors keeps one of several empty tensors. Free rows are searched for when they are needed.
            none = {"free_rows": self.free_rows.new_empty(0), "counters": state_dict[prefix + "counters"].clone()}
            none["counters"][_REUSED] = 0
            state_dict = {**state_dict, **{prefix + name: x for name, x in none.items()}}
        if all(prefix + name in state_dict for name in self.saved):
            device = self.entries.device
            # Copies, even with assign=True: two tables cannot share their keys.
            self.set_state(*(plain_rows(state_dict[prefix + name]).to(device, copy=True) for name in self.saved))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def places(self) -> Places:
        """Return the row of each key; the same object while no key comes or goes. On CUDA it waits for the device."""
        _, _, _, inserted, erased, *_ = self.counters.tolist()
        known, now = self._known_places, (inserted, erased, self.capacity)
        if known is None or known[0] != now:
            known = self._known_places = now, Places(self.name, self.entries[:, 0], self.entries[:, 1] != -1)
        return known[1]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a file: places and the knowledge of counters are found anew."""
        return {**{name: x for name, x in self.__dict__.items() if name != "known"}, "_known_places": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`__getstate__` has returned."""
        super().__setstate__(state)
        self.known = Known()

    def _apply(self, fn: Any, recurse: bool = True):
        super()._apply(fn, recurse)
        self.known = Known()  # the tensors may be on another device
        return self

    def follow(self, other: KeyRows) -> None:
        """Give each key the row that it has in another table."""
        device = self.entries.device
        for name in self.tensors:
            setattr(self, name, getattr(other, name).to(device, copy=True))
        self._failed_before, self._freed, self.known = self.failed, None, Known()
        self._known_places = other._known_places

    # ---- Sizes -------------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """The number of rows, used or not."""
        return self.entries.shape[0]

    def __len__(self) -> int:
        """Return the number of keys. On CUDA it waits for the device."""
        return int(self.counters[_INSERTED] - self.counters[_ERASED])

    def __bool__(self) -> bool:
        return True

    @property
    def used(self) -> int:
        """How many rows have ever been used; no key has a later row. On CUDA it waits for the device."""
        return int(self.counters[_USED])

    @property
    def insertions(self) -> int:
        """How many keys have ever been inserted. On CUDA it waits for the device."""
        return int(self.counters[_INSERTED])

    @property
    def erasures(self) -> int:
        """How many keys have ever been erased. On CUDA it waits for the device."""
        return int(self.counters[_ERASED])

    @property
    def failed(self) -> int:
        """How often a key found no room. On CUDA it waits for the device."""
        return int(self.counters[_FAILED])

    def room(self) -> int:
        """Return how many keys can be inserted without growth."""
        return self.capacity - self.reserved - len(self)

    def _listed_room(self) -> int:
        """Return how many free rows an insertion finds: never used, or listed in ``free_rows``."""
        used, reused, *_ = self.counters.tolist()
        return self.capacity - used + self.free_rows.shape[0] - reused

    def taken(self) -> Tensor:
        """Say which rows have a key, ``[capacity]`` bool."""
        return self.entries[:, 1] != -1

    def nbytes(self) -> int:
        """Return the bytes of the buffers."""
        return sum(x.numel() * x.element_size() for x in (self.index, self.entries, self.counters, self.free_rows))

    # ---- Keys --------------------------------------------------------------------------------------------------------

    def find(self, ids: Tensor) -> Tensor:
        """Return the rows of keys, -1 for missing keys."""
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
        Find the rows of keys, insert missing keys, and return ``(rows, inserted)``.

        See :func:`ops.table_find_or_insert_`: where a key was inserted, ``inserted`` has its row, elsewhere -1.

        Args:
            ids: the keys.
            allowed: the argument of the operator, as are ``frequencies`` and ``count``.
            frequencies: the argument of the operator.
            version: the rows' new version; -1 (default): present rows keep theirs, new ones have -1.
            count: the argument of the operator.
            make_room: a function that is called where rows run out, with the number that must be free, and frees them.
                Default: grow.

        Raises:
            RuntimeError: no room was made; or keys collide under every hash. No key is inserted then.
        """
        make_room = self.grow_by if make_room is None else make_room
        insert = partial(self._insert, version=version + 1 if version >= 0 else -1, count=count)
        if short_of_room([self], [ids.shape[0]]):
            self._see_room_before(ids, allowed, make_room, version)
        rows, inserted = insert(ids, allowed, frequencies)
        if late_keys([self], [ids.shape[0]]):
            self._complete(ids, allowed, frequencies, insert, make_room, rows, inserted)
        return rows, inserted

    def _complete(
        self,
        ids: Tensor,
        allowed: Tensor | None,
        frequencies: Tensor | None,
        insert: Callable[[Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]],
        make_room: Callable[[int], None],
        rows: Tensor,
        inserted: Tensor,
    ) -> None:
        """Make room after an insertion for the keys that found none, and insert them; undo all if that raises."""
        hashes = 0
        try:
            while failed := self.failed - self._failed_before:
                self._take_back_late(ids, allowed, rows, inserted)
                where = (rows < 0).nonzero().flatten()
                some = [None if x is None else x[where] for x in (allowed, frequencies)]
                if self._listed_room() > 0:
                    # A region of the index was full.
                    hashes += 1
                    if hashes > MOST_HASHES:
                        raise crowded(self.name, failed, self.capacity)
                    self.spread()
                elif not self._list_free_rows():
                    self._see_room_for(ids[where], some[0], make_room, -1)  # the others have this version already
                self.counters[_FAILED] -= failed  # they will find room now
                self._failed_before = self.failed
                rows[where], inserted[where] = insert(ids[where], *some)
            self.known.used, self.known.inserted = self.used, self.insertions
        except BaseException:
            self.undo(ids, inserted)
            raise

    def undo(self, ids: Tensor, inserted: Tensor) -> None:
        """Undo an insertion: erase the keys where ``inserted`` is not negative, as if they had never been inserted."""
        gone = len(self.erase(ids, inserted >= 0))
        self.counters[_INSERTED] -= gone
        self.counters[_ERASED] -= gone
        self._failed_before = self.failed

    def _take_back_late(self, ids: Tensor, allowed: Tensor | None, rows: Tensor, inserted: Tensor) -> None:
        """Undo the insertion of keys after the first without room, since rows are given in the order of keys."""
        failed = rows < 0 if allowed is None else (rows < 0) & allowed
        late = (inserted >= 0) & (failed.cumsum(0) > 0)
        if not late.any():
            return
        theirs = ops.table_erase_(self.index, self.entries, ids, mask=late)[late]
        reused = int(torch.isin(theirs, self.free_rows[: int(self.counters[_REUSED])]).sum())
        self.entries[theirs[reused:]] = -1  # as rows never used: rows of free_rows were given first
        self.counters[_REUSED] -= reused
        self.counters[_USED] -= len(theirs) - reused
        self.counters[_INSERTED] -= len(theirs)
        rows[torch.isin(rows, theirs)] = -1
        inserted[late] = -1

    def _insert(
        self, ids: Tensor, allowed: Tensor | None, frequencies: Tensor | None, version: int, count: bool
    ) -> tuple[Tensor, Tensor]:
        state = self.index, self.entries, self.counters, self.free_rows
        return ops.table_find_or_insert_(
            *state, ids, allowed=allowed, frequencies=frequencies, version=version, count=count
        )

    def _see_room_for(self, ids: Tensor, allowed: Tensor | None, make_room: Callable[[int], None], version: int) -> int:
        """Make room for the missing keys among ``ids``, and return how many these are."""
        wanted = self.missing(ids, allowed)
        if self.room() < wanted:
            if version >= 0:
                # Rows of keys that are there must not be evicted to make room for the others.
                self._insert(ids, torch.zeros_like(ids, dtype=torch.bool), None, version + 1, False)
            make_room(wanted)
        self._list_free_rows()
        if self._listed_room() < wanted:
            raise RuntimeError(f"{self.name}: {self.capacity} rows must hold {wanted} more keys")
        return wanted

    def _see_room_before(
        self, ids: Tensor, allowed: Tensor | None, make_room: Callable[[int], None], version: int
    ) -> None:
        """Make room before an insertion, where doing so afterwards would be too late (on CUDA) or too slow."""
        count, known = ids.shape[0], self.known
        if not self.counters.is_cuda:
            # All keys are new: it is faster to make room for them at once.
            if self.used == self.reserved and self._listed_room() < count:
                self._see_room_for(ids, allowed, make_room, version)
            return
        if known.coming is not None:
            known.coming.take()
        if known.room >= count:
            return
        if self.failed > self._failed_before:
            self.spread()
        self._list_free_rows()
        known.room = self._listed_room()
        if known.room >= count:
            return
        if self.may_grow:
            make_room(2 * count)
            self._list_free_rows()
            known.room = self._listed_room()
        else:
            wanted = self._see_room_for(ids, allowed, make_room, version)
            known.room = self._listed_room() + count - wanted

    def missing(self, ids: Tensor, allowed: Tensor | None = None) -> int:
        """Count the distinct keys among ``ids`` that have no row. On CUDA it waits for the device."""
        absent = self.find(ids) < 0
        return len(ops.unique(ids[absent if allowed is None else absent & allowed]).values)

    def erase(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Erase keys, and return the rows that have become free. On CUDA it waits for the device."""
        rows = self.erase_soon(ids, mask)
        return rows[rows >= 0]

    def erase_soon(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Erase keys, and return their rows, -1 where there was none; never waits for a device."""
        rows = ops.table_erase_(self.index, self.entries, ids, mask=mask)
        self.counters[_ERASED] += (rows >= 0).sum()
        if rows.is_cuda:
            self._freed = None
        elif self._freed is not None:
            self._freed.append(rows[rows >= 0].int())
        return rows

    def _list_free_rows(self) -> bool:
        """List the free rows in ``free_rows``, and say whether some were not listed before."""
        rest = self.free_rows[int(self.counters[_REUSED]) :]
        if self._freed is None:
            free = (self.entries[self.reserved : self.used, 1] == -1).nonzero().flatten().int() + self.reserved
        else:
            free = torch.cat([rest, *self._freed]).sort().values if self._freed else rest
        self._freed = []
        if len(free) == len(rest):
            return False
        self.known.coming = None  # those counters know nothing of this list
        self.free_rows = free
        self.counters[_REUSED] = 0
        return True

    def set_numbers(self, rows: Tensor, numbers: Tensor) -> None:
        """Write the second number of the entries of ``rows``; where a row is repeated, its last number counts."""
        # Together with the keys that are there, so that whole entries are written.
        entries = torch.stack([self.entries[rows, 0], numbers], 1).view(torch.uint8)
        ops.table_assign_(self.entries.view(torch.uint8), rows, entries)

    def rows(self) -> Tensor:
        """Return the rows of all keys, ascending."""
        return (self.entries[: self.used, 1] != -1).nonzero().flatten()

    # ---- Growth ------------------------------------------------------------------------------------------------------

    def grow_by(self, rows: int) -> None:
        """Double the capacity until ``rows`` rows are free."""
        self.grow(self.capacity_for(rows))

    def capacity_for(self, rows: int, most: int | None = None) -> int:
        """Return the capacity doubled until ``rows`` rows would be free, or until it is ``most``."""
        room, capacity = self.room(), self.capacity
        while room + capacity - self.capacity < rows and (most is None or capacity < most):
            capacity = 2 * capacity if most is None else min(2 * capacity, most)
        return capacity

    def spread(self) -> None:
        """
        Build an index with another, unpredictable hash, since some keys found their region full.

        Regions are so large that this never happens by chance: somebody who knew the hash chose the keys. No result of
        a table depends on its hash. Tables of other keys never have a seed.
        """
        self.index = new_index(self.name, self.entries, self.counters, unforeseen())
        self._failed_before = self.failed

    def grow(self, capacity: int) -> None:
        """Grow to ``capacity`` rows; each key keeps its row."""
        entries = torch.full((capacity, 2), -1, dtype=torch.int64, device=self.entries.device)
        entries[: self.capacity] = self.entries
        index = new_index(self.name, entries, self.counters, seed_of(self.index))
        self.entries, self.index = entries, index
