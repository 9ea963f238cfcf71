"""
The index at the end of a prebatched file: where its batches are, and the checksums of all that is not data.

An Arrow IPC file ends with a footer, its length and ``ARROW1``. The index lies between the last batch and the footer,
where readers of Arrow do not look: 32 bytes for each batch (ENTRY), then TAIL. All numbers are little endian.
"""

from __future__ import annotations

import os
from typing import BinaryIO

import numpy as np
import torch

from ..ops import crc32c
from .errors import DataError

FORMAT_KEY, VERSION_KEY = b"torchsparse_rec.format", b"torchsparse_rec.version"
LAYOUT_KEY, SCHEMA_KEY = b"torchsparse_rec.layout", b"torchsparse_rec.schema"
FORMAT, VERSION = b"prebatched", b"1"
#: The keys of a batch's own metadata.
CHECKSUMS_KEY, PARTS_KEY = b"crc32c", b"parts"

#: The entry of a batch: the offset of its message, the bytes of its metadata and their checksum, the bytes of its
#: data, and its number of rows.
ENTRY = np.dtype([("offset", "<i8"), ("metadata", "<u4"), ("crc", "<u4"), ("body", "<i8"), ("rows", "<i8")])
#: The end of the index: the checksum of the entries, the checksum of all bytes after the index, and the number of
#: entries.
TAIL = np.dtype([("entries_crc", "<u4"), ("footer_crc", "<u4"), ("count", "<i8"), ("magic", "S8")])
_MAGIC = b"TSRINDEX"
_ARROW_MAGIC = b"ARROW1"
_END = 4 + len(_ARROW_MAGIC)
# The most rows of a file: sums over many files stay within 64 bits.
_MOST_ROWS = 1 << 48


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32C of some bytes, 0 if there are none."""
    if len(data) == 0:
        return 0
    # A copy, since torch warns of buffers that are read-only.
    return int(crc32c([torch.frombuffer(bytearray(data), dtype=torch.uint8)])[0])


def write_index(file: BinaryIO, entries: np.ndarray) -> None:
    """Insert the index into a complete Arrow file, before its footer; the file must be readable as ``file.name``."""
    file.flush()
    size = file.seek(0, os.SEEK_END)
    with open(file.name, "rb") as written:
        start, footer = _footer(written.fileno(), file.name, size)
    tail = np.array((checksum(entries.tobytes()), checksum(footer), len(entries), _MAGIC), TAIL)
    file.seek(start)
    file.write(entries.tobytes() + tail.tobytes() + footer)
    file.flush()


def read_index(descriptor: int, path: str, size: int) -> np.ndarray:
    """
    Return the index entries (dtype ``ENTRY``) of an open prebatched file of ``size`` bytes, checked.

    Raises:
        DataError: the file is not a prebatched one, or its index or footer is damaged.
    """
    start, footer = _footer(descriptor, path, size)
    place = start - TAIL.itemsize
    if place < 8:
        raise DataError(path, start, "there is no room for an index before Arrow's footer: no prebatched file")
    tail = np.frombuffer(_read(descriptor, path, place, TAIL.itemsize), TAIL)[0]
    if tail["magic"] != _MAGIC:
        raise DataError(
            path, place + 16, f"expected {_MAGIC!r} before Arrow's footer: damaged, or not written by write_prebatched"
        )
    if checksum(footer) != tail["footer_crc"]:
        raise DataError(path, start, "the checksum of Arrow's footer is wrong")
    count = int(tail["count"])
    first = place - count * ENTRY.itemsize
    if count < 0 or first < 8:
        raise DataError(path, place + 8, f"the index has room for {(place - 8) // ENTRY.itemsize} batches, got {count}")
    raw = _read(descriptor, path, first, place - first)
    if checksum(raw) != tail["entries_crc"]:
        raise DataError(path, first, "the checksum of the index is wrong")
    entries = np.frombuffer(raw, ENTRY)
    _check_entries(entries, path, first)
    return entries


def _check_entries(entries: np.ndarray, path: str, first: int) -> None:
    """
    Raise ``DataError`` unless every batch lies between the file's beginning and the index.

    The entries are compared as Python's integers, which do not overflow.
    """
    total = 0
    for i, (offset, metadata, _, body, rows) in enumerate(entries.tolist()):
        if offset < 8 or offset % 8 or metadata < 8 or body < 0 or rows < 0 or offset + metadata + body > first:
            raise DataError(
                path,
                first + i * ENTRY.itemsize,
                f"batch {i} must lie between bytes 8 and {first}, got {metadata} + {body} at {offset}, {rows} rows",
            )
        total += rows
    if total > _MOST_ROWS:
        raise DataError(path, first, f"a file may have {_MOST_ROWS} rows, got {total}")


def _footer(descriptor: int, path: str, size: int) -> tuple[int, bytes]:
    """Return the offset of Arrow's footer, and the bytes from there to the end of the file."""
    if size < 8 + _END:
        raise DataError(path, size, f"expected an Arrow IPC file of more than {8 + _END} bytes, got {size}")
    if _read(descriptor, path, 0, len(_ARROW_MAGIC)) != _ARROW_MAGIC:
        raise DataError(path, 0, f"expected {_ARROW_MAGIC!r}: no Arrow IPC file")
    end = _read(descriptor, path, size - _END, _END)
    if end[4:] != _ARROW_MAGIC:
        raise DataError(
            path, size - len(_ARROW_MAGIC), f"expected {_ARROW_MAGIC!r} at the end: the file is cut or damaged"
        )
    length = int.from_bytes(end[:4], "little")
    if not 0 < length <= size - _END - 8:
        raise DataError(path, size - _END, f"the footer's length must be 1 to {size - _END - 8}, got {length}")
    start = size - _END - length
    return start, _read(descriptor, path, start, length) + end


def _read(descriptor: int, path: str, offset: int, length: int) -> bytes:
    data = os.pread(descriptor, length, offset)
    if len(data) != length:
        raise DataError(path, offset + len(data), f"expected {length} bytes from byte {offset} on, got {len(data)}")
    return data
