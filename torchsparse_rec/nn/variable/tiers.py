"""
Tiers: where the rows lie that the fast table does not hold, as records of bytes by key.

:class:`DramTier` holds them in memory, :class:`SsdTier` in segments of a file, by LMDB. Both are scratch space of one
live table in one process; what must last is in checkpoints.
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
    Records in memory: rows found by the operators of family ``table``, doubled when full, used again when erased.

    It takes ``record_bytes`` and about 24 bytes for each row, whether it holds a record or not.

    Args:
        record_bytes: bytes of a record, at least 1.
        device: where the rows and their index lie. Default ``"cpu"``.
        pin_memory: whether what :meth:`get` returns is in page-locked memory, from which a GPU copies on its own.
            Default False.

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
        while (rows < 0).any():  # on a device, where inserting does not wait to see it
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

# LMDB's file is made so large, and grows in steps of it.
_STEP = 1 << 20
# Bytes of a segment: a share of all there are, so that a small tier takes little memory, between these.
_SHARE = 16
_LEAST_SEGMENT, _MOST_SEGMENT = 1 << 18, 1 << 24
_KEY_BYTES = 8
# In LMDB, the one value that is not a segment. It stays where it is, and so do all others relative to it.
_ANCHOR = b"anchor"
# A segment's numbers.
_BEGIN, _ROWS, _LIVE = range(3)


class SsdTier(Tier):
    """
    Records in a file, by LMDB (the extra ``ssd``), read through the system's page cache.

    Records are appended to a segment in memory that goes to the file when it is full, at most 16 MiB; one that is
    overwritten or erased stays there, dead, until more than half of its segment is. Then the others are appended again
    and the segment is removed. So the disk is written in long runs, and holds at most about twice the live records, of
    ``record_bytes + 8`` bytes each. Where each key's record lies is in memory: 32 bytes for each row of a
    :class:`DramTier`.

    It is scratch space: nothing is brought to the disk on purpose, and what a process that died has left is cleared by
    the next tier in its folder.

    Args:
        path: a folder that no other tier is in; made if it is not there.
        record_bytes: bytes of a record, at least 1.

    Raises:
        BlockingIOError: the folder is in use by another tier, of this process or of one that lives.
        ImportError: lmdb is not installed.
        OSError: the folder cannot be written; later, when records are put: the disk is full. What was there can still
            be read.
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

    # LMDB has the segments' bytes one after the other in one map of memory, removes wholly or not at all, and uses
    # again what was removed. It does not know the keys: an entry for each costs a microsecond of py-lmdb's
    # time (`python -m benchmarks.tiers`).
    #
    # A place is the number of a segment times _most_rows, and a row in it. Rows are a record and its key, by which
    # compaction knows whether the row is still the key's. One segment is open: it is in memory, and takes rows.

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
        # writemap: segments are copied once. Room for what is written through the map is reserved, so that a full disk
        # is an error and not a signal. One call at a time of one process: LMDB's own lock would have nothing to guard.
        options = {"lock": False, "sync": False, "writemap": True, "readahead": False, "meminit": False}
        rows = str(self._folder.rows)
        self._environment = self._lmdb.open(rows, map_size=self._map_bytes, subdir=False, **options)
        try:
            self._page_bytes = self._environment.stat()["psize"]
            self._folder.reserve((self._environment.info()["last_pgno"] + 1) * self._page_bytes, self._map_bytes)
            # At least a page: LMDB moves smaller values.
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
        """Have no records."""
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
        """Which keys there are, and their places, 0 for others."""
        found, places = self._places._get(keys)
        return found.numpy(), places.view(torch.int64).flatten().numpy()

    def _put(self, keys: np.ndarray, records: Tensor) -> None:
        for begin in range(0, len(keys), self._most_rows):
            end = begin + self._most_rows
            self._append(keys[begin:end], records[begin:end])
        self._compact()

    def _append(self, keys: np.ndarray, records: Tensor, in_memory: bool = False) -> None:
        """Records that one segment has room for. If it raises, nothing has happened."""
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
        """Rows that are no key's any more."""
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
        """Have so many rows in the open segment, which may become longer where there is no room in the file."""
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
        """Open one that has room for so many rows."""
        if self._segments[_ROWS].all():
            self._segments = np.pad(self._segments, ((0, 0), (0, self._segments.shape[1])))
        self._number = int(self._segments[_ROWS].argmin())
        fitting = int(self._segments[_ROWS].sum()) // _SHARE
        rows = min(max(fitting, self._least_rows, count), self._most_rows)
        self._used = 0
        if rows != len(self._open):
            self._open = torch.empty(rows, self._row_bytes, dtype=torch.uint8)

    def _finish_segment(self) -> None:
        """Bring the open segment to the file."""
        rows = max(self._used, self._page_bytes // self._row_bytes + 1)
        value = self._open[:rows].flatten().numpy().data
        self._write(lambda transaction: transaction.put(_name(self._number), value))
        self._segments[_BEGIN, self._number] = self._address(_name(self._number)) - self._address(_ANCHOR)
        self._segments[_ROWS, self._number] = self._used
        self._see_segments()

    def _compact(self) -> None:
        """Append again what is alive in segments that are more than half dead, and remove these."""
        # Where the disk is too full for it, it waits for another call: nothing is lost.
        with suppress(OSError):
            while len(wasted := np.flatnonzero(2 * self._segments[_LIVE] < self._segments[_ROWS])):
                number = int(wasted[self._segments[_LIVE, wasted].argmin()])  # first what needs no room
                begin, count, live = self._segments[:, number].tolist()
                if live > 0:
                    begin -= self._first
                    rows = self._bytes_of_file[begin : begin + count * self._row_bytes].view(count, -1)
                    # In memory if need be: what is removed then makes room for it.
                    self._append(*self._parts(self._alive(number, rows)), in_memory=True)
                self._write(lambda transaction, number=number: transaction.delete(_name(number)))  # type: ignore[misc]
                self._segments[_ROWS, number] = 0
                self._see_segments()

    def _alive(self, number: int, rows: Tensor) -> Tensor:
        """A copy of the rows of a segment that are still their keys'."""
        found, places = self._find(self._parts(rows)[0])
        alive = found & (places == np.arange(len(rows)) + number * self._most_rows)
        return rows.index_select(0, torch.from_numpy(np.flatnonzero(alive)))

    def _parts(self, rows: Tensor) -> tuple[np.ndarray, Tensor]:
        """Keys and records."""
        keys = rows[:, self.record_bytes :].clone(memory_format=torch.contiguous_format)
        return keys.view(torch.int64).flatten().numpy(), rows[:, : self.record_bytes]

    # ---- The file ----------------------------------------------------------------------------------------------------

    def _write(self, change: Callable[[Any], Any]) -> None:
        """Make a change that happens wholly or not at all; the file grows until it has the room."""
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
                    self._environment.set_mapsize(size)  # the file may be mapped elsewhere from now on
                    self._map_bytes = size
        finally:
            self._reader = self._environment.begin(buffers=True)
            self._see_segments()

    def _see_segments(self) -> None:
        """
        Have the file's bytes from the first segment to the end of the last as one tensor, and as one of records that
        may begin at any byte: so one gather reads from all segments.
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
        """Of a value. py-lmdb touches every page of what it reads: not for segments that may not be in memory."""
        return np.frombuffer(self._reader.get(name), np.uint8).ctypes.data


def _name(segment: int) -> bytes:
    return segment.to_bytes(8, "big")


def _as_bytes(numbers: np.ndarray) -> Tensor:
    """Eight bytes of each."""
    return torch.from_numpy(numbers.view(np.uint8).reshape(-1, 8))


def _end(process: int, folder: ScratchFolder, environment: Any) -> None:
    """Close the file and remove it. A process forked from the tier's does neither."""
    if os.getpid() == process:
        environment.close()
        folder.release()
