"""
Tiers, which hold the rows that the first tier has no room for, as records of bytes by key.

:class:`DramTier` holds them in memory, :class:`SsdTier` in segments of a file, by LMDB. Both are scratch space of one
live table in one process; only checkpoints last.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._extras import extra_module
from ...ops import table_assign_
from ._scratch import ScratchFolder
from ._tier import Tier
from .keys import KeyRows

__all__ = ["DramTier", "SsdTier", "Tier"]

# ---- Memory ---------------------------------------------------------------------------------------------------------

_FIRST_ROWS = 1024


class DramTier(Tier):
    """
    Records in the rows of a tensor, found by the operators of family ``table``. The tensor doubles when it is full.

    Each row takes ``record_bytes`` and about 24 bytes, whether it holds a record or not. Erased rows are used again.

    Args:
        record_bytes: bytes of a record, at least 1.
        device: where the rows and their index lie. Default ``"cpu"``.
        pin_memory: whether the records that :meth:`get` returns are in page-locked memory, from which a GPU copies
            without the CPU. Default False.

    Raises:
        ValueError: wrong arguments, here and in all methods.

    Source: DeepRec's ``StorageOption`` with ``DRAM``.

    Example:
        >>> import torch
        >>> from torchsparse_rec.nn.variable.tiers import DramTier
        >>> tier = DramTier(record_bytes=2)
        >>> tier.put(torch.tensor([7, -1]), torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8))
        >>> found, records = tier.get(torch.tensor([-1, 8]))
        >>> found.tolist(), records.tolist()
        ([True, False], [[3, 4], [0, 0]])
    """

    def __init__(self, record_bytes: int, device: torch.device | str = "cpu", pin_memory: bool = False):
        super().__init__(record_bytes)
        self._pin_memory = pin_memory
        self._keys = KeyRows(self._name, _FIRST_ROWS, device=device)
        self._clear()

    def _clear(self) -> None:
        self._keys.clear(_FIRST_ROWS, self._keys.entries.device)
        self._rows = torch.empty(_FIRST_ROWS, self.record_bytes, dtype=torch.uint8, device=self._keys.entries.device)

    _close = _clear

    def _count(self) -> int:
        return len(self._keys)

    def _bytes(self) -> int:
        return self._rows.nbytes + self._keys.nbytes()

    def _get(self, keys: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = self._keys.find(self._given(keys))
        found = rows >= 0
        records = self._rows.index_select(0, rows.clamp_(min=0))
        if not found.all():
            records[~found] = 0
        found, records = found.cpu(), records.cpu()
        return found, records.pin_memory() if self._pin_memory else records

    def _put(self, keys: np.ndarray, records: Tensor) -> None:
        records = records.to(self._rows.device)
        rows, _ = self._keys.insert(self._given(keys), make_room=self._grow_by)
        while (rows < 0).any():  # on CUDA, where an insertion does not wait to see failures
            self._keys.spread()
            rows, _ = self._keys.insert(self._given(keys), make_room=self._grow_by)
        table_assign_(self._rows, rows, records)

    def _grow_by(self, rows: int) -> None:
        capacity = self._keys.capacity_for(rows)
        more = self._rows.new_empty(capacity, self.record_bytes)
        more[: len(self._rows)] = self._rows
        self._rows = more
        self._keys.grow(capacity)

    def _erase(self, keys: np.ndarray) -> int:
        return len(self._keys.erase(self._given(keys)))

    def _sorted_keys(self) -> np.ndarray:
        return np.sort(self._keys.entries[self._keys.rows(), 0].cpu().numpy())

    def _given(self, keys: np.ndarray) -> Tensor:
        return torch.from_numpy(keys).to(self._rows.device)


# ---- Disk -----------------------------------------------------------------------------------------------------------

# The initial size of LMDB's file, and the unit by which it grows.
_STEP = 1 << 20
# A segment has this share of all bytes, so that a small tier takes little memory, but between these two numbers.
_SHARE = 16
_LEAST_SEGMENT, _MOST_SEGMENT = 1 << 18, 1 << 24
_KEY_BYTES = 8
# The one value in LMDB that is no segment. Addresses of segments are relative to its own, which only remapping changes.
_ANCHOR = b"anchor"
# The rows of ``_segments``: where each segment begins, its rows, and how many of them are live.
_BEGIN, _ROWS, _LIVE = range(3)


class SsdTier(Tier):
    """
    Records in a file, by LMDB (the extra ``ssd``), read through the system's page cache.

    Records are appended to a segment in memory, of at most 16 MiB, which is written to the file when it is full. A
    record that is overwritten or erased stays in the file, dead, until more than half of its segment is dead. Then the
    live records are appended again and the segment is removed. So the disk is written in long runs, and holds at most
    about twice the live records, of ``record_bytes + 8`` bytes each. A :class:`DramTier` keeps where each key's record
    lies: 32 bytes of memory for each of its rows.

    It is scratch space: nothing is synced to the disk, and the next tier in the folder clears what a process that died
    has left.

    Args:
        path: a folder that no other tier uses; created if it is missing.
        record_bytes: bytes of a record, at least 1.

    Raises:
        BlockingIOError: the folder is in use by another tier, of this process or another live one.
        ImportError: lmdb is not installed.
        OSError: the folder cannot be written; in ``put``: the disk is full. Earlier records can still be read.
        ValueError: wrong arguments, here and in all methods.

    Source: DeepRec's ``StorageOption`` with ``SSDHASH`` and ``LEVELDB``.

    Example:
        >>> import tempfile, torch
        >>> from torchsparse_rec.nn.variable.tiers import SsdTier
        >>> tier = SsdTier(tempfile.mkdtemp(), record_bytes=2)
        >>> tier.put(torch.tensor([7, -1]), torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8))
        >>> [(keys.tolist(), records.tolist()) for keys, records in tier.items()]
        [([-1, 7], [[3, 4], [1, 2]])]
        >>> tier.close()
    """

    # LMDB keeps each segment's bytes contiguous in one memory map, writes and removes segments atomically, and reuses
    # the space of those removed. It does not know the keys: an entry for each would cost a microsecond in py-lmdb
    # (`python -m benchmarks.tiers`).
    #
    # A record's place is the number of its segment times _most_rows, plus its row in the segment. A row is a record and
    # its key, by which compaction knows whether the row is still the key's. One segment is open: it is in memory, and
    # records are appended to it.

    def __init__(self, path: str | os.PathLike[str], record_bytes: int):
        super().__init__(record_bytes)
        self._lmdb = extra_module("lmdb", "ssd", self._name)
        self._process = os.getpid()
        self._row_bytes = self.record_bytes + _KEY_BYTES
        self._used: int  # rows of the open segment
        self._folder = ScratchFolder(self._name, path)
        try:
            self._open_file()
        except BaseException:
            self._folder.release()
            raise
        self._ending = weakref.finalize(self, _end, self._process, self._folder, self._environment)

    def _open_file(self) -> None:
        self._map_bytes = _STEP
        # writemap: segments are copied once. Disk space is reserved before it is written through the map, so that a
        # full disk is an error and not a signal. One process makes one call at a time: LMDB's own lock is not needed.
        options = {"lock": False, "sync": False, "writemap": True, "readahead": False, "meminit": False}
        rows = str(self._folder.rows)
        self._environment = self._lmdb.open(rows, map_size=self._map_bytes, subdir=False, **options)
        try:
            self._page_bytes = self._environment.stat()["psize"]
            self._folder.reserve((self._environment.info()["last_pgno"] + 1) * self._page_bytes, self._map_bytes)
            # At least a page: LMDB moves smaller values, whose addresses would change.
            self._least_rows, self._most_rows = (
                max(x, self._page_bytes) // self._row_bytes + 1 for x in (_LEAST_SEGMENT, _MOST_SEGMENT)
            )
            self._forget()
            self._reader = self._environment.begin(buffers=True)
            self._write(self._put_anchor)
        except OSError:
            self._environment.close()
            raise

    def _put_anchor(self, transaction: Any) -> None:
        transaction.put(_ANCHOR, bytes(self._page_bytes))

    def _forget(self) -> None:
        """Forget all records, and begin with an empty segment."""
        self._places = DramTier(8)
        self._segments = np.zeros((3, 16), np.int64)
        self._see_segments()
        self._open = torch.empty(0, self._row_bytes, dtype=torch.uint8)
        self._begin_segment(1)

    def _count(self) -> int:
        return self._places._count()

    def _bytes(self) -> int:
        return self._folder.disk_bytes() + self._places._bytes() + self._open.nbytes

    # ---- Records -----------------------------------------------------------------------------------------------------

    def _get(self, keys: np.ndarray) -> tuple[Tensor, Tensor]:
        found, places = self._find(keys)
        segments = places // self._most_rows
        rows = places - segments * self._most_rows
        is_open = segments == self._number
        begins = self._segments[_BEGIN, segments] + rows * self._row_bytes - self._first
        records = self._records.index_select(0, torch.from_numpy(np.where(found & ~is_open, begins, 0)))
        if (of_open := found & is_open).any():
            records[torch.from_numpy(of_open)] = self._open[torch.from_numpy(rows[of_open]), : self.record_bytes]
        if not found.all():
            records[torch.from_numpy(~found)] = 0
        return torch.from_numpy(found), records

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which keys have a record, and the places of these; 0 for the others."""
        found, places = self._places._get(keys)
        return found.numpy(), places.view(torch.int64).flatten().numpy()

    def _put(self, keys: np.ndarray, records: Tensor) -> None:
        for begin in range(0, len(keys), self._most_rows):
            end = begin + self._most_rows
            self._append(keys[begin:end], records[begin:end])
        self._compact()

    def _append(self, keys: np.ndarray, records: Tensor, in_memory: bool = False) -> None:
        """Append records that fit in one segment. If it raises, nothing has changed."""
        self._make_room(len(keys), in_memory)
        begin, end = self._used, self._used + len(keys)
        self._open[begin:end, : self.record_bytes] = records
        self._open[begin:end, self.record_bytes :] = _as_bytes(keys)
        found, before = self._find(keys)
        self._places._put(keys, _as_bytes(np.arange(begin, end) + self._number * self._most_rows))
        self._used = end
        self._segments[_LIVE, self._number] += len(keys)
        self._bury(before[found])

    def _erase(self, keys: np.ndarray) -> int:
        found, before = self._find(keys)
        self._places._erase(keys)
        self._bury(before[found])
        self._compact()
        return len(before[found])

    def _bury(self, places: np.ndarray) -> None:
        """Count rows as dead whose record was overwritten or erased."""
        self._segments[_LIVE] -= np.bincount(places // self._most_rows, minlength=self._segments.shape[1])

    def _sorted_keys(self) -> np.ndarray:
        return self._places._sorted_keys()

    def _clear(self) -> None:
        table = self._environment.open_db()

        def drop(transaction: Any) -> None:
            transaction.drop(table, delete=False)
            self._put_anchor(transaction)

        self._write(drop)
        self._forget()

    def _close(self) -> None:
        del self._records, self._bytes_of_file, self._open
        self._places.close()
        self._ending()

    # ---- Segments ----------------------------------------------------------------------------------------------------

    def _make_room(self, count: int, in_memory: bool) -> None:
        """Make room for ``count`` rows in the open segment; with ``in_memory``, extend it if the disk is full."""
        if self._used + count > len(self._open) and 2 * self._segments[_LIVE, self._number] <= self._used:
            kept = self._alive(self._number, self._open[: self._used])
            self._used = 0
            self._append(*self._parts(kept))
        if self._used + count > len(self._open):
            try:
                if self._used > 0:
                    self._finish_segment()
                self._begin_segment(count)
            except OSError:
                if not in_memory or self._used + count > self._most_rows:
                    raise
                self._open = torch.cat([self._open, self._open.new_empty(count, self._row_bytes)])

    def _begin_segment(self, count: int) -> None:
        """Open a segment that has room for at least ``count`` rows."""
        if self._segments[_ROWS].all():
            self._segments = np.pad(self._segments, ((0, 0), (0, self._segments.shape[1])))
        self._number = int(self._segments[_ROWS].argmin())
        fitting = int(self._segments[_ROWS].sum()) // _SHARE
        rows = min(max(fitting, self._least_rows, count), self._most_rows)
        self._used = 0
        if rows != len(self._open):
            self._open = torch.empty(rows, self._row_bytes, dtype=torch.uint8)

    def _finish_segment(self) -> None:
        """Write the open segment to the file."""
        rows = max(self._used, self._page_bytes // self._row_bytes + 1)
        value = self._open[:rows].flatten().numpy().data
        self._write(lambda transaction: transaction.put(_name(self._number), value))
        self._segments[_BEGIN, self._number] = self._address(_name(self._number)) - self._address(_ANCHOR)
        self._segments[_ROWS, self._number] = self._used
        self._see_segments()

    def _compact(self) -> None:
        """Append the live rows of segments that are more than half dead again, and remove these segments."""
        # If the disk is too full, a later call compacts: nothing is lost.
        with suppress(OSError):
            while len(wasted := np.flatnonzero(2 * self._segments[_LIVE] < self._segments[_ROWS])):
                number = int(wasted[self._segments[_LIVE, wasted].argmin()])  # first those that need the least room
                begin, count, live = self._segments[:, number].tolist()
                if live > 0:
                    begin -= self._first
                    rows = self._bytes_of_file[begin : begin + count * self._row_bytes].view(count, -1)
                    # In memory if the disk is full: removing the segment makes room.
                    self._append(*self._parts(self._alive(number, rows)), in_memory=True)
                self._write(lambda transaction, number=number: transaction.delete(_name(number)))  # type: ignore[misc]
                self._segments[_ROWS, number] = 0
                self._see_segments()

    def _alive(self, number: int, rows: Tensor) -> Tensor:
        """Copy the live rows of a segment: those at which their keys' places point."""
        found, places = self._find(self._parts(rows)[0])
        alive = found & (places == np.arange(len(rows)) + number * self._most_rows)
        return rows.index_select(0, torch.from_numpy(np.flatnonzero(alive)))

    def _parts(self, rows: Tensor) -> tuple[np.ndarray, Tensor]:
        """Split rows into keys and records."""
        keys = rows[:, self.record_bytes :].clone(memory_format=torch.contiguous_format)
        return keys.view(torch.int64).flatten().numpy(), rows[:, : self.record_bytes]

    # ---- The file ----------------------------------------------------------------------------------------------------

    def _write(self, change: Callable[[Any], Any]) -> None:
        """Make a change to the file in one transaction, and grow the file until the change fits."""
        self._reader.abort()
        try:
            while True:
                try:
                    with self._environment.begin(write=True) as transaction:
                        change(transaction)
                    return
                except self._lmdb.MapFullError:
                    more = max(self._map_bytes // 8, _STEP)
                    size = (self._map_bytes + more + _STEP - 1) // _STEP * _STEP
                    self._folder.reserve(self._map_bytes, size)
                    self._environment.set_mapsize(size)  # which may move the map to another address
                    self._map_bytes = size
        finally:
            self._reader = self._environment.begin(buffers=True)
            self._see_segments()

    def _see_segments(self) -> None:
        """
        Map the file's bytes, from the first segment to the end of the last, as one tensor, and as a tensor of the
        records that begin at each byte, so that one gather reads from all segments.
        """
        begins, rows = self._segments[:2, self._segments[_ROWS] > 0]
        if len(begins) == 0:
            self._first, self._bytes_of_file = 0, torch.zeros(self._row_bytes, dtype=torch.uint8)
        else:
            self._first = int(begins.min())
            count = int((begins + rows * self._row_bytes).max()) - self._first
            values = (ctypes.c_uint8 * count).from_address(self._address(_ANCHOR) + self._first)
            self._bytes_of_file = torch.frombuffer(values, dtype=torch.uint8)
        count = len(self._bytes_of_file) - self.record_bytes + 1
        self._records = self._bytes_of_file.as_strided((count, self.record_bytes), (1, 1))

    def _address(self, name: bytes) -> int:
        """Return the address of a value. py-lmdb reads every page of it: avoid this for segments not in memory."""
        return np.frombuffer(self._reader.get(name), np.uint8).ctypes.data


def _name(segment: int) -> bytes:
    return segment.to_bytes(8, "big")


def _as_bytes(numbers: np.ndarray) -> Tensor:
    """Return the eight bytes of each number, uint8 ``[N, 8]``."""
    return torch.from_numpy(numbers.view(np.uint8).reshape(-1, 8))


def _end(process: int, folder: ScratchFolder, environment: Any) -> None:
    """Close the file and remove it, except in a process forked from the tier's."""
    if os.getpid() == process:
        environment.close()
        folder.release()
