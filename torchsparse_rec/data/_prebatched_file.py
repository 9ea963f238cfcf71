"""Open one prebatched file, check it and read it batch by batch."""

from __future__ import annotations

import base64
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, get_args

import numpy as np
import torch

from ..files import PathLike
from ..ops import crc32c
from ..typing import Verify
from . import _index
from ._arrow import arrow
from ._mapped import mapped, populate
from ._planes import Decoder, most_bytes, scratch
from .errors import DataError

VERIFY = get_args(Verify)
# The errors that reading damaged metadata may raise, beside Arrow's own.
_COMPLAINTS = (OSError, ValueError, TypeError, LookupError, OverflowError, RecursionError)
_T = TypeVar("_T")


class PrebatchedFile:
    """
    An open file that :func:`write_prebatched` wrote.

    Args:
        path: the file's name.
        columns: the names of the columns to read, in this order. Default None: all.
        verify: the reads that compare checksums of data: ``"first"``, the first one of each batch, ``"always"`` or
            ``"never"``. Checksums of metadata are compared the first time a batch is read, whatever ``verify`` is.

    Raises:
        DataError: the file is not a prebatched one, or its metadata is damaged.
        ValueError: an unknown column.
    """

    def __init__(self, path: PathLike, columns: Sequence[str] | None = None, verify: Verify = "first") -> None:
        self.path, self.verify = os.fspath(path), verify
        self._open()
        self.choose(columns)

    def _open(self) -> None:
        pa = arrow("PrebatchedDataset")
        self._pa = pa
        self._seen: set[int] = set()
        with open(self.path, "rb") as file:
            self._descriptor = os.dup(file.fileno())
        try:
            status = os.fstat(self._descriptor)
            self.size, self._changed = status.st_size, status.st_mtime_ns
            self._entries = _index.read_index(self._descriptor, self.path, self.size)
            # A private mapping, although nothing writes to it: torch warns of tensors in read-only memory.
            self._map = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_COPY)
            self._reader = self._checked("Arrow's footer", self.size, lambda: pa.ipc.open_file(pa.py_buffer(self._map)))
            self._checked("the schema", self.size, self._read_schema)
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            raise

    def choose(self, columns: Sequence[str] | None) -> None:
        """Select the columns that are read from now on; None: all."""
        names = self.stored.names if columns is None else columns
        for name in names:
            if name not in self._place_of:
                raise ValueError(f"{self.path}: columns must be among {self.stored.names}, got {name!r}")
        self.columns = columns
        self._places = [self._place_of[name] for name in names]
        self._all = len(self._places) == len(self.stored.names)
        self.schema = self._pa.schema([self.stored.field(place) for place in self._places])

    def _read_schema(self) -> None:
        physical = self._reader.schema
        metadata = physical.metadata or {}
        if metadata.get(_index.FORMAT_KEY) != _index.FORMAT:
            raise DataError(self.path, None, "its schema does not say that write_prebatched wrote it")
        version = metadata.get(_index.VERSION_KEY, b"")
        if version != _index.VERSION:
            raise DataError(self.path, None, f"its version is {version!r}, this release reads {_index.VERSION!r}")
        layout = metadata.get(_index.LAYOUT_KEY)
        if layout not in (b"plain", b"planes"):
            raise DataError(self.path, None, f"its layout must be plain or planes, got {layout!r}")
        if self._reader.num_record_batches != len(self._entries):
            raise DataError(
                self.path,
                None,
                f"Arrow's footer has {self._reader.num_record_batches} batches, the index {len(self._entries)}",
            )
        self.compressed = layout == b"planes"
        self._physical = physical
        #: The schema of all columns as the writer was given them.
        self.stored = physical
        if self.compressed:
            text = metadata.get(_index.SCHEMA_KEY, b"")
            self.stored = self._pa.ipc.read_schema(self._pa.py_buffer(base64.b64decode(text)))
            if self.stored.names != physical.names:
                raise DataError(self.path, None, "its columns do not fit its schema")
            for field in physical:
                if field.type != self._pa.large_binary():
                    raise DataError(self.path, None, f"column {field.name!r} must be stored as bytes, got {field.type}")
        self._place_of = {name: place for place, name in enumerate(self.stored.names)}
        if len(self._place_of) != len(self.stored.names):
            raise DataError(self.path, None, f"its columns must have distinct names, got {self.stored.names}")

    def _identity(self) -> tuple[int, int]:
        """
        Return the size and the index's checksum, by which the file differs from others.

        The index has the checksums of the batches' metadata, and these have the checksums of the data.
        """
        return self.size, _index.checksum(self._entries.tobytes())

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to open the file anew, and to find out if it is no longer the same."""
        return {"path": self.path, "columns": self.columns, "verify": self.verify, "identity": self._identity()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._descriptor = -1
        self.path, self.verify = state["path"], state["verify"]
        self._open()
        if self._identity() != state["identity"]:
            raise DataError(self.path, None, "the file is not the one that the other process had opened")
        self.choose(state["columns"])

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    def rows(self) -> np.ndarray:
        """Return the number of rows of each batch, int64."""
        return self._entries["rows"]

    def read(self, i: int) -> Any:
        """
        Return batch i as a ``pyarrow.RecordBatch`` in private memory.

        Writing to that memory changes neither the file nor what later reads return.

        Raises:
            DataError: the file has changed, or the batch is damaged.
            OSError: the process may have no more mappings.
        """
        status = os.fstat(self._descriptor)
        if status.st_size < self.size:
            raise DataError(
                self.path, status.st_size, f"the file has shrunk from {self.size} bytes since it was opened"
            )
        if status.st_mtime_ns != self._changed:
            raise DataError(self.path, None, "the file has been written to since it was opened")
        offset = int(self._entries["offset"][i])
        first = i not in self._seen
        verify = self.verify == "always" or (first and self.verify == "first")
        if self.compressed:
            batch = self._checked(f"batch {i}", offset, lambda: self._read_planes(i, verify, first))
        else:
            start, memory = self._map_batch(i)
            batch = self._checked(f"batch {i}", offset, lambda: self._read_plain(i, start, memory, verify, first))
        if batch.num_rows != self._entries["rows"][i]:
            raise DataError(self.path, offset, f"batch {i} has {batch.num_rows} rows, the index says otherwise")
        self._seen.add(i)
        return batch

    def _checked(self, what: str, offset: int, call: Callable[[], _T]) -> _T:
        """Return what ``call`` returns; raise what pyarrow or the decoder raises as a ``DataError``."""
        try:
            return call()
        except (DataError, MemoryError):  # also Arrow's: the machine has too little memory, the file is not damaged
            raise
        except (self._pa.ArrowException, *_COMPLAINTS) as error:
            raise DataError(self.path, offset, f"{what} is damaged: {error}") from error

    def _check_metadata(self, i: int, message: memoryview) -> None:
        entry = self._entries[i]
        if _index.checksum(message[: int(entry["metadata"])]) != entry["crc"]:
            raise DataError(self.path, int(entry["offset"]), f"the checksum of the metadata of batch {i} is wrong")

    # ---- Plain ------------------------------------------------------------------------------------------------------

    def _map_batch(self, i: int) -> tuple[int, np.ndarray]:
        """Return the file offset at which the mapping of batch i begins, and the mapping as uint8."""
        entry = self._entries[i]
        offset, end = int(entry["offset"]), int(entry["offset"]) + int(entry["metadata"]) + int(entry["body"])
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        try:
            return start, mapped(self._descriptor, start, end - start)
        except OSError as error:
            problem = f"batch {i} cannot be mapped: {error.strerror}; each batch that is kept takes a mapping"
            raise OSError(error.errno, problem, self.path) from None

    def _read_plain(self, i: int, start: int, private: np.ndarray, verify: bool, first: bool) -> Any:
        memory = self._pa.py_buffer(private)
        if self._all:
            populate(memory.address, memory.size)
        begin = int(self._entries["offset"][i]) - start
        if first:
            self._check_metadata(i, private[begin:].data)
        message = self._pa.ipc.read_message(memory.slice(begin))
        batch = self._pa.ipc.read_record_batch(message, self._physical)
        if self.columns is not None:
            batch = batch.select(self._places)
        if not self._all:
            for buffer in (buffer for column in batch.columns for buffer in column.buffers() if buffer):
                populate(buffer.address, buffer.size)
        if verify:
            self._verify(i, batch, self._reader.get_batch_with_custom_metadata(i), private, start)
        # Operators rely on offsets that rise and the like: these are checked once, whatever `verify` says.
        batch.validate(full=first)
        return batch

    def _verify(self, i: int, batch: Any, stored: tuple[Any, Any], memory: Any, start: int) -> None:
        """
        Compare the checksums of batch i, or raise ``DataError``.

        ``batch`` has the chosen columns; their buffers lie in ``memory``, which holds the file's bytes from ``start``
        on. ``stored`` is the batch with all columns, and its metadata.
        """
        physical, metadata = stored
        address = self._pa.py_buffer(memory).address
        counts = [len(column.buffers()) for column in physical.columns]
        bounds = np.concatenate([[0], np.cumsum(counts)])
        sums = np.frombuffer(bytes.fromhex((metadata or {})[_index.CHECKSUMS_KEY].decode()), "<u4")
        if len(sums) != bounds[-1]:
            raise ValueError(f"{bounds[-1]} checksums were expected, got {len(sums)}")
        expected = [int(x) for place in self._places for x in sums[bounds[place] : bounds[place + 1]]]
        all_names = self.stored.names
        names = [all_names[place] for place in self._places for _ in range(counts[place])]
        buffers = [buffer for column in batch.columns for buffer in column.buffers()]
        places = [0 if not buffer else buffer.address - address for buffer in buffers]
        sizes = [0 if not buffer else buffer.size for buffer in buffers]
        for place, size in zip(places, sizes, strict=True):
            if not 0 <= place <= place + size <= len(memory):
                raise ValueError("a buffer lies outside of it")
        empty = torch.empty(0, dtype=torch.uint8)
        tensors = [
            torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=place) if size else empty
            for place, size in zip(places, sizes, strict=True)
        ]
        for found, wanted, name, place in zip(crc32c(tensors).tolist(), expected, names, places, strict=True):
            if found != wanted:
                raise DataError(self.path, start + place, f"the checksum of column {name!r} in batch {i} is wrong")

    # ---- Planes -----------------------------------------------------------------------------------------------------

    def _read_planes(self, i: int, verify: bool, first: bool) -> Any:
        memory, begin = self._read_message(i)
        if first:
            self._check_metadata(i, memory[begin:].data)
        with self._pa.ipc.open_stream(self._pa.py_buffer(memory)) as stream:
            physical, metadata = stream.read_next_batch_with_custom_metadata()
        if physical.num_rows != 1:
            raise ValueError(f"its columns must be one value each, got {physical.num_rows}")
        physical.validate(full=first)
        chosen = physical.select(self._places)
        if verify:
            start = int(self._entries["offset"][i]) - begin
            self._verify(i, chosen, (physical, metadata), memory, start)
        rows = int(self._entries["rows"][i])
        address = memory.ctypes.data
        values = [column.buffers()[2] for column in chosen.columns]
        begins = np.array([value.address - address if value else 0 for value in values], np.int64)
        ranges = np.stack([begins, begins + [value.size if value else 0 for value in values]], 1)
        room = most_bytes(int(self._entries["body"][i]))
        directory = (metadata or {})[_index.PARTS_KEY]
        decoder = Decoder(memory, directory, physical.num_columns, self._places, ranges, room)
        arrays = decoder.decode(self.schema.types, rows)
        batch = self._pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        batch.validate(full=first)
        return batch

    def _read_message(self, i: int) -> tuple[np.ndarray, int]:
        """
        Return an Arrow stream of the schema and batch i, uint8, and where the batch begins in it.

        The stream is valid until this thread's next call. It is read, not mapped: decoding copies anyway, and a file
        that shrinks meanwhile is an error here.
        """
        offset, metadata, body = (int(self._entries[name][i]) for name in ("offset", "metadata", "body"))
        head = np.frombuffer(self._physical.serialize(), np.uint8)
        memory = scratch("message", len(head) + metadata + body)
        memory[: len(head)] = head
        wanted = memory[len(head) :].data
        done = 0
        while done < len(wanted):
            count = os.preadv(self._descriptor, [wanted[done:]], offset + done)
            if count == 0:
                problem = f"the file has shrunk from {self.size} bytes since it was opened"
                raise DataError(self.path, os.fstat(self._descriptor).st_size, problem)
            done += count
        return memory, len(head)
