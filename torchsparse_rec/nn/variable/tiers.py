"""
Tiers: where the rows lie that the fast table does not hold, as records of bytes by key.

:class:`DramTier` holds them in memory, :class:`SsdTier` in a file, by LMDB. Both are scratch space of one live table in
one process; what must last is in checkpoints.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...ops.table import table_assign_, table_erase_, table_find, table_find_or_insert_, table_rehash
from ._scratch import ScratchFolder
from ._tier import Tier

__all__ = ["DramTier", "SsdTier", "Tier"]

_Result = TypeVar("_Result")

# ---- Memory ---------------------------------------------------------------------------------------------------------

# Keys of a bucket of 12 slots when all rows are taken.
_KEYS_PER_BUCKET = 9
_FIRST_ROWS = 1024
# Of csrc/table.h: entries of free rows, and its counters.
_FREE, _USED, _REUSED = -1, 0, 1


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
        self._device, self._pin_memory = torch.device(device), pin_memory
        self._index: Tensor
        self._clear()

    def _clear(self) -> None:
        self._size = 0  # records
        self._rows = torch.empty(0, self.record_bytes, dtype=torch.uint8, device=self._device)
        self._entries = torch.empty(0, 2, dtype=torch.int64, device=self._device)
        self._counters = torch.zeros(8, dtype=torch.int64, device=self._device)
        self._free_rows = torch.empty(0, dtype=torch.int32, device=self._device)
        self._resize(_FIRST_ROWS)

    _close = _clear

    def _count(self) -> int:
        return self._size

    def _bytes(self) -> int:
        return sum(x.nbytes for x in (self._rows, self._entries, self._index, self._free_rows))

    def _get(self, keys: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = table_find(self._index, self._entries, self._keys(keys))
        found = rows >= 0
        records = self._rows.index_select(0, rows.clamp_(min=0))
        if not found.all():
            records[~found] = 0
        found, records = found.cpu(), records.cpu()
        return found, records.pin_memory() if self._pin_memory else records

    def _put(self, keys: np.ndarray, records: Tensor) -> None:
        ids = self._keys(keys)
        missing = int((table_find(self._index, self._entries, ids) < 0).sum())
        self._make_room(missing)
        rows = table_find_or_insert_(self._index, self._entries, self._counters, self._free_rows, ids).rows
        while bool((rows < 0).any()):  # rows enough, but the keys of some buckets are too many: they spread over more
            self._index = table_rehash(self._entries, self._counters, 2 * len(self._index))
            rows = table_find_or_insert_(self._index, self._entries, self._counters, self._free_rows, ids).rows
        table_assign_(self._rows, rows, records.to(self._device))
        self._size += missing

    def _make_room(self, count: int) -> None:
        """Have free rows for so many new keys."""
        used, reused = int(self._counters[_USED]), int(self._counters[_REUSED])
        if len(self._free_rows) - reused + len(self._entries) - used >= count:
            return
        # Rows that have been erased are looked for only now, all at once.
        self._free_rows = (self._entries[:used, 1] == _FREE).nonzero().flatten().to(torch.int32)
        self._counters[_REUSED] = 0
        if self._size + count > len(self._entries):
            self._resize(max(2 * len(self._entries), self._size + count))

    def _resize(self, capacity: int) -> None:
        """More rows; those there are stay where they are."""
        before = len(self._entries)
        rows, entries = self._rows.new_empty(capacity, self.record_bytes), self._entries.new_full((capacity, 2), _FREE)
        rows[:before], entries[:before] = self._rows, self._entries
        self._index = table_rehash(entries, self._counters, -(-capacity // _KEYS_PER_BUCKET))
        self._rows, self._entries = rows, entries

    def _erase(self, keys: np.ndarray) -> int:
        erased = int((table_erase_(self._index, self._entries, self._keys(keys)) >= 0).sum())
        self._size -= erased
        return erased

    def _items(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        with self._opened("items"):
            keys = np.sort(self._entries[self._entries[:, 1] != _FREE, 0].cpu().numpy())
        for begin in range(0, len(keys), size):
            batch = keys[begin : begin + size]
            with self._opened("items"):
                found, records = self._get(batch)
            if found.any():
                yield torch.from_numpy(batch)[found], records[found]

    def _keys(self, keys: np.ndarray) -> Tensor:
        return torch.from_numpy(keys).to(self._device)


# ---- Disk -----------------------------------------------------------------------------------------------------------

# LMDB's file is made so large, and grows in steps of it.
_STEP = 1 << 20
# Records of a get that are Python objects at the same time.
_AT_ONCE = 1 << 16
# Records of one transaction: the pages that it changes are written anew, and the file must hold both.
_CHANGES = 1 << 14
_SIGN = np.uint64(1 << 63)


class SsdTier(Tier):
    """
    Records in a file, by LMDB (the extra ``ssd``), read through the system's page cache.

    It takes no memory of its own, and of the disk about twice ``record_bytes + 17`` bytes for each key: pages that are
    filled in random order stay a third empty, and the file grows by a quarter. It is scratch space: nothing is brought
    to the disk before :meth:`close`, and what a process that died has left is cleared by the next tier in its folder.

    Args:
        path: a folder that no other tier is in; made if it is not there.
        record_bytes: bytes of a record, at least 1.
        keep: whether :meth:`close` leaves the records in the folder, for the next tier there. Default False.

    Raises:
        BlockingIOError: the folder is in use by another tier, of this process or of one that lives.
        ImportError: lmdb is not installed.
        OSError: the folder cannot be written; later, when records are put or erased, which changes pages: the disk is
            full. What was there can still be read.
        ValueError: wrong arguments, here and in all methods; records that were kept are of another width.

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

    # LMDB, not RocksDB: through their bindings a get of a batch is the binding's work per row, and py-lmdb reads
    # 0.6-0.9 M random rows a second of 2-20 M in a warm page cache where rocksdict reads 0.3-0.4 (128 bytes; `python -m
    # benchmarks.tiers`). RocksDB writes faster (1.4 M rows a second against 0.2-0.7), but merges in the background.

    def __init__(self, path: str | os.PathLike[str], record_bytes: int, keep: bool = False):
        super().__init__(record_bytes)
        self._lmdb = _lmdb()
        self._process = os.getpid()
        # A value says that it is there: then missing ones need no pass of their own.
        self._value = np.dtype([("record", f"V{self.record_bytes}"), ("there", "u1")])
        note = f"record_bytes = {self.record_bytes}"
        self._folder = ScratchFolder(self._name, path)
        try:
            if self._folder.kept not in (None, note):
                raise ValueError(f"{self._name}: path {os.fspath(path)!r} holds {self._folder.kept}, got {note}")
            self._open()
        except BaseException:
            self._folder.release(self._folder.kept)
            raise
        self._folder.forget_kept()
        at_end = (self._process, self._folder, self._environment, note if keep else None)
        self._ending = weakref.finalize(self, _end, *at_end)

    def _open(self) -> None:
        rows = self._folder.rows
        reserved = rows.stat().st_size if self._folder.kept is not None else 0
        self._map_bytes = max(_STEP, reserved)
        # writemap: puts are twice as fast. Room for what is written through the map is reserved, so that a full disk is
        # an error and not a signal. One call at a time of one process: LMDB's own lock would have nothing to guard.
        options = {"lock": False, "sync": False, "writemap": True, "readahead": False, "meminit": False}
        self._environment = self._lmdb.open(str(rows), map_size=self._map_bytes, subdir=False, **options)
        try:
            if reserved == 0:
                written = (self._environment.info()["last_pgno"] + 1) * self._environment.stat()["psize"]
                self._folder.reserve(written, self._map_bytes)
        except OSError:
            self._environment.close()
            raise

    def _count(self) -> int:
        return self._environment.stat()["entries"]

    def _bytes(self) -> int:
        return self._folder.disk_bytes()

    def _get(self, keys: np.ndarray) -> tuple[Tensor, Tensor]:
        found = np.empty(len(keys), bool)
        records = np.empty((len(keys), self.record_bytes), np.uint8)
        missing = bytes(self._value.itemsize)
        order = keys.argsort()  # neighbours in the tree are read one after the other
        with self._environment.begin() as transaction:
            for begin in range(0, len(keys), _AT_ONCE):
                places = order[begin : begin + _AT_ONCE]
                # Transaction.get and not Cursor.getmulti, which is a third slower and leaves missing keys out.
                values = b"".join(map(transaction.get, _encoded(keys[places]), repeat(missing)))
                read = np.frombuffer(values, self._value)
                found[places] = read["there"] != 0
                records.view(self._value["record"])[places, 0] = read["record"]
        return torch.from_numpy(found), torch.from_numpy(records)

    def _put(self, keys: np.ndarray, records: Tensor) -> None:
        order = keys.argsort()
        given = records.numpy().view(self._value["record"])
        for begin in range(0, len(keys), _CHANGES):
            places = order[begin : begin + _CHANGES]
            values = np.ones(len(places), self._value)
            values["record"] = given[places, 0]
            encoded, written = _encoded(keys[places]), values.view(f"V{values.itemsize}").tolist()
            self._write(_put_all, encoded, written)

    def _erase(self, keys: np.ndarray) -> int:
        erased = 0
        ordered = np.sort(keys)
        for begin in range(0, len(keys), _CHANGES):
            erased += self._write(_erase_all, _encoded(ordered[begin : begin + _CHANGES]))
        return erased

    def _clear(self) -> None:
        table = self._environment.open_db()
        self._write(lambda transaction: transaction.drop(table, delete=False))

    def _write(self, change: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of a change that happens wholly or not at all; the file grows until it has the room."""
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    return change(transaction, *arguments)
            except self._lmdb.MapFullError:
                more = max(self._map_bytes // 4, _STEP)
                size = (self._map_bytes + more + _STEP - 1) // _STEP * _STEP
                self._folder.reserve(self._map_bytes, size)
                self._environment.set_mapsize(size)
                self._map_bytes = size

    def _items(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        pair = np.dtype([("key", ">u8"), ("value", self._value)])
        first: int | None = 0
        while first is not None:
            with self._opened("items"), self._environment.begin() as transaction:
                cursor = transaction.cursor()
                found = cursor.iternext() if cursor.set_range(first.to_bytes(8, "big")) else iter(())
                pairs = np.frombuffer(b"".join(chain.from_iterable(islice(found, size))), pair)
            if len(pairs) > 0:
                keys = (pairs["key"].astype(np.uint64) ^ _SIGN).view(np.int64)
                records = pairs["value"]["record"].copy().view(np.uint8)
                yield torch.from_numpy(keys), torch.from_numpy(records.reshape(len(pairs), -1))
            last = int(pairs["key"][-1]) if len(pairs) == size else 2**64 - 1
            first = last + 1 if last + 1 < 2**64 else None

    def _close(self) -> None:
        self._ending()


def _lmdb() -> Any:
    try:
        import lmdb
    except ImportError:
        raise ImportError("SsdTier needs lmdb: pip install 'torchsparse_rec[ssd]'") from None
    return lmdb


def _encoded(keys: np.ndarray) -> list[bytes]:
    """Eight bytes for each key, whose order as bytes is that of the keys as numbers."""
    return (keys.view(np.uint64) ^ _SIGN).astype(">u8").view("V8").tolist()


def _put_all(transaction: Any, keys: list[bytes], values: list[bytes]) -> None:
    transaction.cursor().putmulti(zip(keys, values, strict=True))


def _erase_all(transaction: Any, keys: list[bytes]) -> int:
    return sum(map(transaction.delete, keys))


def _end(process: int, folder: ScratchFolder, environment: Any, note: str | None) -> None:
    """Close the file, and remove it unless it is to be kept. A process forked from the tier's does neither."""
    if os.getpid() == process:
        if note is not None:
            environment.sync(True)
        environment.close()
        folder.release(note)
