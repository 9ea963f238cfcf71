"""The host's knowledge of the counters of tables that grow."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Known", "late_keys", "short_of_room"]


class Known:
    """The host's knowledge of a table's counters without reading them back."""

    __slots__ = ("used", "inserted", "room", "since", "coming")

    def __init__(self) -> None:
        # On the CPU, as the last insertion has left them.
        self.used, self.inserted = 0, -1
        # On CUDA: how many rows are surely free, and how many ids came after the counters that are on their way.
        self.room, self.since = 0, 0
        self.coming: _Coming | None = None


class Counted(Protocol):
    """A table that grows, as far as its counters go: :class:`~.keys.KeyRows`."""

    counters: Tensor
    entries: Tensor
    free_rows: Tensor
    reserved: int
    known: Known
    _failed_before: int

    def spread(self) -> None:
        """Make room where keys crowd."""


class _Coming:
    """The counters of some tables, on their way from a CUDA device: an asynchronous copy."""

    def __init__(self, tables: Sequence[Counted]) -> None:
        # Not kept alive: each of them keeps this.
        self._tables, device = [weakref.ref(keys) for keys in tables], tables[0].counters.device
        # Pinned memory, as torch gives to what does not block.
        self._numbers = torch.stack([keys.counters for keys in tables]).to("cpu", non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))
        for keys in tables:
            keys.known.coming, keys.known.since = self, 0

    def have_come(self) -> bool:
        """Say whether :meth:`take` would not wait."""
        return bool(self._event.query())

    def take(self) -> None:
        """Tell the tables how much room they have."""
        self._event.synchronize()
        for reference, (used, reused, failed, *_) in zip(self._tables, self._numbers.tolist(), strict=True):
            keys = reference()
            if keys is None or keys.known.coming is not self:
                continue
            keys.known.coming = None
            keys.known.room = keys.entries.shape[0] - used + keys.free_rows.shape[0] - reused - keys.known.since
            if failed > keys._failed_before:
                keys.spread()


def short_of_room(tables: Sequence[Counted], sizes: Sequence[int]) -> list[int]:
    """Return which tables must look for room before an insertion of so many keys each."""
    if not tables[0].counters.is_cuda:
        return [k for k, keys in enumerate(tables) if keys.known.used <= keys.reserved]
    for coming in {keys.known.coming for keys in tables}:
        if coming is not None and coming.have_come():
            coming.take()
    return [k for k, keys in enumerate(tables) if keys.known.room < sizes[k]]


def late_keys(tables: Sequence[Counted], sizes: Sequence[int]) -> list[int]:
    """Take note of an insertion, and return which tables had keys that found no room; none on CUDA: it would wait."""
    if not tables[0].counters.is_cuda:
        late = []
        numbers = torch.stack([keys.counters for keys in tables]).tolist()
        for k, (keys, (used, _, failed, inserted, *_)) in enumerate(zip(tables, numbers, strict=True)):
            keys.known.used, keys.known.inserted = used, inserted
            if failed > keys._failed_before:
                late.append(k)
        return late
    for keys, size in zip(tables, sizes, strict=True):
        keys.known.room -= size
        keys.known.since += size
    rest = [keys for keys in tables if keys.known.coming is None]
    if rest:
        _Coming(rest)
    return []
