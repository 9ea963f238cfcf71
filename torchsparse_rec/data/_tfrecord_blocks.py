"""The records of TFRecord files, a block of bytes at a time, and where in which file each was."""

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
from ._files import DataError, PathLike

#: Bytes of a record around its data.
FRAME = 16
#: Of which so many are before it.
_HEADER = 12
#: What is read of a compressed file at a time: little, since of what follows a compressed file's end there is a copy.
_COMPRESSED = 1 << 16
_WINDOW_BITS = {"gzip": 31, "zlib": 15}


class Records(NamedTuple):
    """
    Whole records of a file.

    Attributes:
        path: of the file.
        unit: of offsets: ``"byte"``, or ``"decompressed byte"``.
        data: uint8, in which they are.
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
        """Some of the records, in the same memory."""
        return self._replace(ranges=self.ranges[which], places=self.places[which])

    def gathered(self) -> Records:
        """The same in memory that holds nothing else."""
        view = self.data.numpy().data
        joined = bytearray().join([view[begin:end] for begin, end in self.ranges.tolist()])
        data = torch.frombuffer(joined, dtype=torch.uint8) if joined else self.data.new_empty(0)
        ends = (self.ranges[:, 1] - self.ranges[:, 0]).cumsum(0)
        begins = torch.cat([ends.new_zeros(1), ends])[:-1]
        return self._replace(data=data, ranges=torch.stack([begins, ends], dim=1))

    def fault(self, record: int, offset: int, problem: str) -> DataError:
        """The error for the byte ``offset`` of ``data``, which is one of a record's, in terms of the file."""
        place = int(self.places[record]) + offset - int(self.ranges[record, 0])
        return DataError(self.path, place, problem, unit=self.unit)


def room(size: int) -> Tensor:
    """Bytes to be written. Of large ones numpy asks for huge pages, whose first use takes a third of the time."""
    return torch.from_numpy(np.empty(size, dtype=np.uint8))


class _Plain:
    """A file's bytes as they are."""

    unit = "byte"

    def __init__(self, path: PathLike, file: BinaryIO, start: bytes) -> None:
        self.path, self._file, self._start, self._read = path, file, start, 0
        status = os.fstat(file.fileno())
        # What is appended meanwhile is not read; of a pipe nobody knows the size.
        self.size: int | None = status.st_size if stat.S_ISREG(status.st_mode) else None

    def read_into(self, view: memoryview) -> int:
        """Fill the view as far as there are bytes; how many there were."""
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
    """The bytes that a gzip or zlib file holds; several such files in one are read one after the other."""

    unit = "decompressed byte"
    size: int | None = None

    def __init__(self, path: PathLike, file: BinaryIO, start: bytes, kind: str) -> None:
        self.path, self._file, self._kind = path, file, kind
        self._inflate = zlib.decompressobj(_WINDOW_BITS[kind])
        self._input, self._read = start, len(start)

    def read_into(self, view: memoryview) -> int:
        """Fill the view as far as there are bytes; how many there were."""
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
        """Have something to inflate; False at the end of the file."""
        if self._inflate.eof and not self._refill_after_end():
            return False
        if not self._input and not self._refill():
            raise DataError(self.path, self._read, f"the file ends within its {self._kind} data")
        return True

    def _refill_after_end(self) -> bool:
        """Whether another compressed file follows the one that has ended; zeros after it are padding."""
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
    """``"gzip"``, ``"zlib"`` or None, by a file's first bytes."""
    header = torch.frombuffer(bytearray(start), dtype=torch.uint8) if start else torch.empty(0, dtype=torch.uint8)
    # The checksum of a record's length decides: a length can look like a magic number.
    if not start or (len(start) >= _HEADER and ops.tfrecord_frames(header)[1].fault != "length_crc"):
        return None
    if start[:3] == b"\x1f\x8b\x08":
        return "gzip"
    return "zlib" if start[0] == 0x78 and int.from_bytes(start[:2], "big") % 31 == 0 else None


def _source(path: PathLike, file: BinaryIO, compression: str | None) -> _Plain | _Inflated:
    start = b""
    if compression == "auto":
        # A pipe gives what there is, and cannot be read again.
        while len(start) < _HEADER and (piece := file.read(_HEADER - len(start))):
            start += piece
        compression = compression_of(start)
    return _Plain(path, file, start) if compression is None else _Inflated(path, file, start, compression)


def blocks(path: PathLike, compression: str | None, verify: bool, chunk: int) -> Iterator[Records]:
    """
    The records of a file, in blocks of about ``chunk`` bytes, or of one record if it is longer.

    Good records before a bad one are given before it is raised; where compressed data are bad or end too early, those
    of the blocks before.

    Raises:
        DataError: a record that its checksum does not fit or that the file cuts off, or compressed data that are bad.
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
            # Room for the record that has begun; what a length claims is believed only as bytes arrive.
            size = max(chunk, min(status.needed, 2 * left))


def _check(source: _Plain | _Inflated, offset: int, left: int, status: ops.FrameStatus, at_end: bool) -> None:
    """Raise what cannot be mended by reading on."""

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
