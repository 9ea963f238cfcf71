"""Read the records of TFRecord files, a block of bytes at a time, with each one's place in its file."""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..files import PathLike
from .errors import DataError

#: The number of bytes that frame a record's data.
FRAME = 16
#: The number of these bytes that come before the data.
_HEADER = 12
#: The bytes of a compressed file that are read at once: few, since zlib copies all bytes after the end of a stream.
_COMPRESSED = 1 << 16
_WINDOW_BITS = {"gzip": 31, "zlib": 15}


class Records(NamedTuple):
    """
    Whole records of a file.

    Attributes:
        path: the file's name.
        unit: the unit of offsets in the file: ``"byte"``, or ``"decompressed byte"``.
        data: the block of bytes that holds the records, uint8.
        ranges: ``[n, 2]``, where in ``data`` each record's data begin and end, in order.
        places: ``[n]``, where in the file each record's data begin.
    """

    path: str
    unit: str
    data: Tensor
    ranges: Tensor
    places: Tensor

    def size(self) -> int:
        return int(self.ranges.shape[0])

    def begin(self) -> int:
        return int(self.ranges[0, 0])

    def end(self) -> int:
        return int(self.ranges[-1, 1])

    def part(self, which: slice) -> Records:
        """Return some of the records, in the same memory."""
        return self._replace(ranges=self.ranges[which], places=self.places[which])

    def gathered(self) -> Records:
        """Return a copy of the records in memory that holds nothing else."""
        view = self.data.numpy().data
        joined = bytearray().join([view[begin:end] for begin, end in self.ranges.tolist()])
        data = torch.frombuffer(joined, dtype=torch.uint8) if joined else self.data.new_empty(0)
        ends = (self.ranges[:, 1] - self.ranges[:, 0]).cumsum(0)
        begins = torch.cat([ends.new_zeros(1), ends])[:-1]
        return self._replace(data=data, ranges=torch.stack([begins, ends], dim=1))

    def fault(self, record: int, offset: int, problem: str) -> DataError:
        """Return the error for byte ``offset`` of ``data``, which belongs to ``record``, with its place in the file."""
        place = int(self.places[record]) + offset - int(self.ranges[record, 0])
        return DataError(self.path, place, problem, unit=self.unit)


def room(size: int) -> Tensor:
    """
    Return uninitialised memory of ``size`` bytes as a uint8 tensor.

    It is numpy's: for large arrays numpy asks for huge pages, whose first use takes a third of the time.
    """
    return torch.from_numpy(np.empty(size, dtype=np.uint8))


class _Plain:
    """The bytes of an uncompressed file."""

    unit = "byte"

    def __init__(self, path: PathLike, file: BinaryIO, start: bytes) -> None:
        self.path, self._file, self._start, self._read = path, file, start, 0
        status = os.fstat(file.fileno())
        # Bytes appended after opening are not read; a pipe has no known size.
        self.size: int | None = status.st_size if stat.S_ISREG(status.st_mode) else None

    def read_into(self, view: memoryview) -> int:
        """Fill the view with the next bytes, as far as there are any, and return their number."""
        if self.size is not None:
            view = view[: self.size - self._read]
        filled = min(len(self._start), len(view))
        view[:filled], self._start = self._start[:filled], self._start[filled:]
        while filled < len(view) and (count := self._file.readinto(view[filled:])):  # type: ignore[attr-defined]
            filled += count
        self._read += filled
        if filled < len(view) and self.size is not None and self._read < self.size:
            raise DataError(
                self.path, self._read, f"the file ends here, but had {self.size} bytes when it was opened: it was cut"
            )
        return filled


class _Inflated:
    """The decompressed bytes of a gzip or zlib file, which may be several such files joined into one."""

    unit = "decompressed byte"
    size: int | None = None

    def __init__(self, path: PathLike, file: BinaryIO, start: bytes, kind: str) -> None:
        self.path, self._file, self._kind = path, file, kind
        self._inflate = zlib.decompressobj(_WINDOW_BITS[kind])
        self._input, self._read = start, len(start)

    def read_into(self, view: memoryview) -> int:
        """Fill the view with the next bytes, as far as there are any, and return their number."""
        filled = 0
        while filled < len(view) and self._more():
            try:
                piece = self._inflate.decompress(self._input, len(view) - filled)
            except zlib.error as error:
                where = self._read - len(self._input)
                raise DataError(self.path, where, f"no valid {self._kind} data from here on: {error}") from error
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
            self._input = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
        return filled

    def _more(self) -> bool:
        """Read more input if none is left; return False at the end of the file."""
        if self._inflate.eof and not self._refill_after_end():
            return False
        if not self._input and not self._refill():
            raise DataError(self.path, self._read, f"the file ends within its {self._kind} data")
        return True

    def _refill_after_end(self) -> bool:
        """Begin the next of several joined compressed files, after skipping zeros, and say whether there is one."""
        self._input = self._input.lstrip(b"\0")
        while not self._input and self._refill():
            self._input = self._input.lstrip(b"\0")
        if self._input:
            self._inflate = zlib.decompressobj(_WINDOW_BITS[self._kind])
        return bool(self._input)

    def _refill(self) -> bool:
        self._input = self._file.read(_COMPRESSED)
        self._read += len(self._input)
        return bool(self._input)


def compression_of(start: bytes) -> str | None:
    """Return a file's compression, ``"gzip"``, ``"zlib"`` or None, from its first bytes."""
    header = torch.frombuffer(bytearray(start), dtype=torch.uint8) if start else torch.empty(0, dtype=torch.uint8)
    # A valid checksum of the first record's length decides: the length itself can look like a magic number.
    if not start or (len(start) >= _HEADER and ops.tfrecord_frames(header)[1].fault != "length_crc"):
        return None
    if start[:3] == b"\x1f\x8b\x08":
        return "gzip"
    return "zlib" if start[0] == 0x78 and int.from_bytes(start[:2], "big") % 31 == 0 else None


def _source(path: PathLike, file: BinaryIO, compression: str | None) -> _Plain | _Inflated:
    start = b""
    if compression == "auto":
        # A read from a pipe may give fewer bytes than asked for, and cannot be repeated.
        while len(start) < _HEADER and (piece := file.read(_HEADER - len(start))):
            start += piece
        compression = compression_of(start)
    return _Plain(path, file, start) if compression is None else _Inflated(path, file, start, compression)


def blocks(path: PathLike, compression: str | None, verify: bool, chunk: int) -> Iterator[Records]:
    """
    Yield the records of a file, in blocks of about ``chunk`` bytes, or of one record if it is longer.

    The good records before a damaged one are yielded before its error is raised. If compressed data are damaged or cut
    off, the records of the blocks before are yielded.

    Raises:
        DataError: a record whose checksum is wrong or that is cut off, or damaged compressed data.
        OSError: a file that cannot be read.
    """
    with open(path, "rb", buffering=0) as raw:
        source = _source(path, raw, compression)  # type: ignore[arg-type]
        base, rest, size = 0, torch.empty(0, dtype=torch.uint8), chunk
        while True:
            if source.size is not None:
                size = min(size, max(source.size - base, 1))
            data = room(max(size, rest.numel() + 1))
            data[: rest.numel()] = rest
            filled = rest.numel() + source.read_into(data.numpy().data[rest.numel() :])
            at_end = filled < data.numel()
            data = data[:filled]
            ranges, status = ops.tfrecord_frames(data, verify=verify)
            if ranges.shape[0]:
                yield Records(os.fsdecode(path), source.unit, data, ranges, ranges[:, 0] + base)
            left = filled - status.end
            if status.fault is not None:
                _check(source, base + status.end, left, status, at_end)
            if at_end:
                return
            base, rest = base + status.end, data[status.end :]
            # Room for the record that has begun. Its length may be wrong, so room at most doubles as bytes arrive.
            size = max(chunk, min(status.needed, 2 * left))


def _check(source: _Plain | _Inflated, offset: int, left: int, status: ops.FrameStatus, at_end: bool) -> None:
    """Raise ``DataError`` for a fault that is not merely a record whose rest is still to be read."""

    def fault(problem: str) -> DataError:
        return DataError(source.path, offset, problem, unit=source.unit)

    if status.fault == "length_crc":
        raise fault("the length of a record does not fit its checksum")
    if status.fault == "data_crc":
        raise fault(f"the data of a record of {status.needed - FRAME} bytes do not fit their checksum")
    known = left >= _HEADER
    beyond = known and source.size is not None and offset + status.needed > source.size
    if beyond or at_end:
        record = f"a record of {status.needed - FRAME} bytes" if known else "the header of a record"
        there = left if source.size is None else source.size - offset
        raise fault(f"the file ends within {record}, of whose frame and data {there} bytes are there")
