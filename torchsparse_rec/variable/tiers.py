"""
Tiers, which hold the rows that the first tier has no room for, as records of bytes by key.

:class:`DramTier` holds them in memory, :class:`SsdTier` in a file. Both are scratch space of one live table in one
process; only checkpoints last.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from ..ops import table_assign_
from ._scratch import ScratchFile
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
        device: the device of the rows and their index. Default ``"cpu"``.
        pin_memory: whether the records that :meth:`get` returns are in page-locked memory: a GPU copies from it without
            the CPU. Default False.

    Raises:
        ValueError: wrong arguments, here and in all methods.

    Source: DeepRec's ``StorageOption`` with ``DRAM``.

    Example:
        >>> import torch
        >>> from torchsparse_rec.variable.tiers import DramTier
        >>> tier = DramTier(record_bytes=2)
        >>> tier.put(torch.tensor([7, -1]), torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8))
        >>> found, records = tier.get(torch.tensor([-1, 8]))
        >>> found.tolist(), records.tolist()
        ([True, False], [[3, 4], [0, 0]])
    """

    kind = "DRAM"

    @classmethod
    def of_table(cls, record_bytes: int, folder: str | None, pin_memory: bool) -> Tier:
        """Make a tier of a table, see :meth:`Tier.of_table`."""
        return cls(record_bytes, pin_memory=pin_memory)

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

# The bytes of a segment, and the least by which the file grows.
_SEGMENT = 1 << 20
# The file grows by this share of its bytes.
_SHARE = 8
_KEY_BYTES = 8


class SsdTier(Tier):
    """
    Records in a file, read through the system's page cache.

    Records are appended to segments of 1 MiB. A record that is overwritten or erased stays in the file, dead, until
    more than half of its segment is dead. Then the live records are appended again, and the segment is used anew. So
    the disk is written in long runs, and holds at most about twice the live records, of ``record_bytes + 8`` bytes
    each. A :class:`DramTier` keeps where each key's record lies: 32 bytes of memory for each of its rows.

    It is scratch space: nothing is synced to the disk, and the next tier in the folder clears a dead process's
    leftovers.

    Args:
        path: a folder that no other tier uses; created if it is missing.
        record_bytes: bytes of a record, at least 1.

    Raises:
        BlockingIOError: the folder is in use by another tier, of this process or another live one.
        OSError: the folder cannot be written; in ``put``: the disk is full. Earlier records can still be read.
        ValueError: wrong arguments, here and in all methods.

    Source: DeepRec's ``StorageOption`` with ``SSDHASH`` and ``LEVELDB``.

    Example:
        >>> import tempfile, torch
        >>> from torchsparse_rec.variable.tiers import SsdTier
        >>> tier = SsdTier(tempfile.mkdtemp(), record_bytes=2)
        >>> tier.put(torch.tensor([7, -1]), torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8))
        >>> [(keys.tolist(), records.tolist()) for keys, records in tier.items()]
        [([-1, 7], [[3, 4], [1, 2]])]
        >>> tier.close()
    """

    kind, on_disk = "SSD", True

    @classmethod
    def of_table(cls, record_bytes: int, folder: str | None, pin_memory: bool) -> Tier:
        """Make a tier of a table, see :meth:`Tier.of_table`."""
        assert folder is not None
        return cls(folder, record_bytes)

    # The file is a matrix: a row is a record and its key. Compaction compares the key to see whether the row is still
    # the key's. A segment is some rows in succession. One segment, the open one, has rows left for the next records;
    # the others are full or, without a live row, free. One is always free, so that compaction, which puts live rows
    # elsewhere before it frees theirs, never needs more of the disk.

    def __init__(self, path: str | os.PathLike[str], record_bytes: int):
        super().__init__(record_bytes)
        self._process = os.getpid()
        self._row_bytes = self.record_bytes + _KEY_BYTES
        self._segment_rows = _SEGMENT // self._row_bytes + 1
        self._file = ScratchFile(self._name, path)
        self._ending = weakref.finalize(self, _end, self._process, self._file)
        try:
            self._clear()
            self._free(0, spare=1)
        except OSError:
            self._ending()
            raise

    def _count(self) -> int:
        return self._places._count()

    def _bytes(self) -> int:
        return self._file.disk_bytes() + self._places._bytes()

    # ---- Records -----------------------------------------------------------------------------------------------------

    def _get(self, keys: np.ndarray) -> tuple[Tensor, Tensor]:
        found, places = self._find(keys)
        records = self._rows[:, : self.record_bytes].index_select(0, torch.from_numpy(places))
        if not found.all():
            records[torch.from_numpy(~found)] = 0
        return torch.from_numpy(found), records

    def _find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which keys have a record, and the rows of these; 0 for the others."""
        found, places = self._places._get(keys)
        return found.numpy(), places.view(torch.int64).flatten().numpy()

    def _put(self, keys: np.ndarray, records: Tensor) -> None:
        self._append(keys, records)
        self._compact()

    def _erase(self, keys: np.ndarray) -> int:
        found, before = self._find(keys)
        self._places._erase(keys)
        self._live -= self._by_segment(before[found])
        self._compact()
        return len(before[found])

    def _sorted_keys(self) -> np.ndarray:
        return self._places._sorted_keys()

    def _clear(self) -> None:
        self._places = DramTier(8)
        self._live = np.zeros(0, np.int64)  # how many rows of each segment are live
        self._left = np.zeros(0, np.int64)  # the rows that are left of the open segment
        self._rows = torch.zeros(1, self._row_bytes, dtype=torch.uint8)
        self._file.cut(0)

    def _close(self) -> None:
        del self._rows
        self._places.close()
        self._ending()

    # ---- Segments ----------------------------------------------------------------------------------------------------

    def _append(self, keys: np.ndarray, records: Tensor, spare: int = 1) -> None:
        """Write records to free rows, and leave ``spare`` segments free. If it raises, nothing has changed."""
        each, left, count = self._segment_rows, self._left, len(keys)
        if count > len(left):
            opened = self._free((count - len(left) - 1) // each + 1, spare)
            left = np.concatenate([left, (opened[:, None] * each + np.arange(each)).ravel()])
        for end in range(len(self._left) or each, count + each, each):  # the rest of a segment, then whole ones
            part = slice(max(end - each, 0), end)
            data = np.concatenate([records[part].numpy(), _as_bytes(keys[part])], 1)
            self._file.write(int(left[part.start]) * self._row_bytes, data)
        rows = left[:count]
        found, before = self._find(keys)
        self._places._put(keys, torch.from_numpy(_as_bytes(rows)))
        self._left = left[count:]
        self._live += self._by_segment(rows) - self._by_segment(before[found])

    def _free(self, count: int, spare: int) -> np.ndarray:
        """Return the numbers of ``count`` free segments; make the file longer if it has less, or no ``spare`` more."""
        free = self._segments(self._live == 0)
        if len(free) < count + spare:
            before = len(self._live)
            after = before + max(count + spare - len(free), before // _SHARE)
            begin, end = (x * self._segment_rows * self._row_bytes for x in (before, after))
            self._rows = self._file.grow(begin, end).view(-1, self._row_bytes)
            self._live = np.pad(self._live, (0, after - before))
            free = np.concatenate([free, np.arange(before, after)])
        return free[:count]

    def _compact(self) -> None:
        """Append the live rows of segments that are more than half dead again, which frees these segments."""
        each = self._segment_rows
        with suppress(OSError):  # a later call compacts
            while len(wasted := self._segments((self._live > 0) & (2 * self._live < each))):
                begin = int(wasted[0]) * each
                rows = self._rows[begin : begin + each]
                keys = rows[:, self.record_bytes :].contiguous().view(torch.int64).flatten().numpy()
                found, places = self._find(keys)
                alive = np.flatnonzero(found & (places == np.arange(begin, begin + each)))
                records = rows[:, : self.record_bytes].index_select(0, torch.from_numpy(alive))
                self._append(keys[alive], records, spare=0)

    def _segments(self, which: np.ndarray) -> np.ndarray:
        """Return the numbers of the segments, except the open one, at which ``which`` is true."""
        which[self._left[:1] // self._segment_rows] = False
        return np.flatnonzero(which)

    def _by_segment(self, rows: np.ndarray) -> np.ndarray:
        """Count rows by their segments."""
        return np.bincount(rows // self._segment_rows, minlength=len(self._live))


def _as_bytes(numbers: np.ndarray) -> np.ndarray:
    """Return the eight bytes of each number, uint8 ``[N, 8]``."""
    return numbers.view(np.uint8).reshape(-1, 8)


def _end(process: int, file: ScratchFile) -> None:
    """Remove the file, except in a process forked from the tier's."""
    if os.getpid() == process:
        file.release()
