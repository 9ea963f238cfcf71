"""
TensorFlow's V2 checkpoints, read and written without TensorFlow.

``<prefix>.index`` is a sorted table of LevelDB's format, from names to where the bytes of a tensor are;
``<prefix>.data-00000-of-00001`` and so on, the shards, have the bytes. Shards are mapped into memory, never read whole.

Source: tensorflow/core/util/tensor_bundle/tensor_bundle.cc, tensorflow/core/lib/io/table*.cc,
tensorflow/core/protobuf/tensor_bundle.proto.
"""

from __future__ import annotations

import math
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import ops
from .wire import (
    Slices,
    block_entries,
    fields,
    masked,
    masked_crc,
    number_of,
    shape_of,
    slice_key,
    slices_of,
    varint,
)

__all__ = [
    "CHUNK",
    "CheckpointReader",
    "Entry",
    "Piece",
    "check_crcs",
    "check_member",
    "copy_bytes",
    "mapped_file",
    "overlap",
    "reading",
    "stored_begin",
]

MAGIC = 0xDB4775248B80FB57
FOOTER = 48
#: TensorFlow's numbers of dtypes that torch has too.
DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    17: torch.uint16,
    19: torch.float16,
    22: torch.uint32,
    23: torch.uint64,
}
_STRING = 7
#: The most bytes that are copied through other memory at once.
CHUNK = 16 * 2**20


class Entry(NamedTuple):
    """The index's entry of a tensor."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc: int
    slices: tuple[Slices, ...]


class Piece(NamedTuple):
    """A part of a tensor: its place there, and its elements as they lie in a file."""

    place: tuple[slice, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: Tensor
    """uint8; it need not be aligned for ``dtype``."""
    crc: int | None
    """The masked CRC-32C of the bytes; None: unknown."""
    file: str


class CheckpointReader:
    """
    The tensors of a V2 checkpoint by name.

    Args:
        prefix: the path without ``.index``.

    Raises:
        FileNotFoundError: there is no index.
        ValueError: the index is damaged, or of a kind that is not read: the error names the file.

    Example:
        >>> import os, tempfile
        >>> from torchsparse_rec.compat.checkpoints.writer import CheckpointWriter
        >>> prefix = os.path.join(tempfile.mkdtemp(), "model")
        >>> with CheckpointWriter(prefix) as writer:
        ...     writer.add("items", torch.tensor([[1.0], [2.0]]))
        >>> CheckpointReader(prefix).read("items")
        tensor([[1.],
                [2.]])
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.path = f"{prefix}.index"
        with open(self.path, "rb") as file:
            self._index = file.read()
        self.entries: dict[str, Entry] = {}
        self._slices: dict[bytes, Entry] = {}
        self._shards: dict[int, Tensor] = {}
        header = None
        for key, value in self._records():
            if key == b"":
                header = value
            elif key.startswith(b"\0"):
                self._slices[key] = self._entry(key, value)
            else:
                self.entries[key.decode(errors="backslashreplace")] = self._entry(key, value)
        if header is None:
            raise ValueError(f"{self.path} must begin with a header, the entry of the name '', got none")
        self.num_shards = number_of(self.path, header, 1)
        if number_of(self.path, header, 2) != 0:
            raise ValueError(f"{self.path} must be little endian, got big endian numbers, which this does not read")

    # ---- The index ---------------------------------------------------------------------------------------------------

    def _records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield names and their entries, both as bytes, in order."""
        data = self._index
        if len(data) < FOOTER or struct.unpack("<Q", data[-8:])[0] != MAGIC:
            raise ValueError(
                f"{self.path} must be the index of a V2 checkpoint, which ends with {MAGIC:#x}: it does not"
            )
        footer = data[-FOOTER:-8]
        _, at = varint(self.path, footer, 0)
        _, at = varint(self.path, footer, at)
        for _, handle in block_entries(self.path, self._block(footer[at:])):
            yield from block_entries(self.path, self._block(handle))

    def _block(self, handle: bytes) -> bytes:
        """Return the block whose offset and size are given as two varints."""
        offset, at = varint(self.path, handle, 0)
        size, _ = varint(self.path, handle, at)
        end = offset + size
        if end + 5 > len(self._index) - FOOTER:
            raise ValueError(
                f"{self.path}: a block must lie within the {len(self._index)} bytes of the file, got bytes {offset} to "
                f"{end}: is the file cut short?"
            )
        kind, (crc,) = self._index[end], struct.unpack("<I", self._index[end + 1 : end + 5])
        found = masked_crc(self._index[offset : end + 1])
        if found != crc:
            raise ValueError(
                f"{self.path} is damaged: the block at byte {offset} must have the CRC {crc:#010x}, got {found:#010x}"
            )
        if kind != 0:
            raise ValueError(
                f"{self.path}: the block at byte {offset} is compressed (kind {kind}; snappy is 1), which TensorFlow's "
                "writer never does and this does not read"
            )
        return self._index[offset:end]

    def _entry(self, key: bytes, value: bytes) -> Entry:
        found: dict[int, list] = {}
        for number, content in fields(self.path, value):
            found.setdefault(number, []).append(content)
        numbers = [found.get(k, [0])[-1] for k in (1, 3, 4, 5, 6)]
        if not all(isinstance(x, int) and x >= 0 for x in numbers):
            raise ValueError(f"{self.path}: the entry of {key!r} must have numbers of at least 0, got {numbers}")
        dtype, shard, offset, size, crc = numbers
        shape = shape_of(self.path, found[2][-1]) if 2 in found else ()
        slices = tuple(slices_of(self.path, content, shape) for content in found.get(7, []))
        return Entry(dtype, shape, shard, offset, size, crc, slices)

    def _named(self, name: str) -> Entry:
        if name not in self.entries:
            raise KeyError(f"{self.path} has no tensor {name!r}")
        return self.entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._named(name).shape

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor, or None for strings and what else torch does not have."""
        return DTYPES.get(self._named(name).dtype)

    # ---- The shards --------------------------------------------------------------------------------------------------

    def pieces(self, name: str) -> list[Piece]:
        """
        Return the parts in which a tensor is stored, mapped and not yet read.

        Raises:
            ValueError: they do not make up the tensor, or lie outside of their file; or torch has no such dtype.
            FileNotFoundError: their shard is missing.
        """
        entry = self._named(name)
        if not entry.slices:
            return [self._piece(name, entry, tuple(slice(0, size) for size in entry.shape))]
        pieces, elements = [], 0
        for slices in entry.slices:
            its = self._slices.get(slice_key(name, slices))
            if its is None:
                raise ValueError(f"{self.path} has no slice {list(slices)} of {name!r}, which it names as one")
            place = tuple(
                slice(0, size) if length < 0 else slice(start, start + length)
                for (start, length), size in zip(slices, entry.shape, strict=True)
            )
            wanted = tuple(part.stop - part.start for part in place)
            if its.shape != wanted or its.dtype != entry.dtype:
                raise ValueError(f"{self.path}: slice {list(slices)} of {name!r} must be {wanted}, got {its.shape}")
            pieces.append(self._piece(name, its, place))
            elements += math.prod(wanted)
        if elements != math.prod(entry.shape) or overlap([piece.place for piece in pieces]):
            raise ValueError(
                f"{self.path}: the slices of {name!r} must make up its {math.prod(entry.shape)} elements, each once, "
                f"got {elements}: {[list(slices) for slices in entry.slices]}"
            )
        return pieces

    def _piece(self, name: str, entry: Entry, place: tuple[slice, ...]) -> Piece:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise ValueError(f"{self.path}: torch has no dtype for {name!r}, whose TensorFlow number is {entry.dtype}")
        size = math.prod(entry.shape) * dtype.itemsize
        if entry.size != size:
            raise ValueError(f"{self.path}: {name!r} of shape {entry.shape} must take {size} bytes, got {entry.size}")
        file, content = self._bytes(name, entry)
        return Piece(place, entry.shape, dtype, content, entry.crc, file)

    def _bytes(self, name: str, entry: Entry) -> tuple[str, Tensor]:
        """Return a file and the mapped bytes in it of an entry."""
        if entry.shard >= self.num_shards:
            raise ValueError(f"{self.path}: {name!r} must be in one of {self.num_shards} shards, got {entry.shard}")
        path = f"{self.prefix}.data-{entry.shard:05d}-of-{self.num_shards:05d}"
        if entry.shard not in self._shards:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path} is missing: {self.path} says that {name!r} lies there")
            self._shards[entry.shard] = mapped_file(path)
        shard, end = self._shards[entry.shard], entry.offset + entry.size
        if end > len(shard):
            raise ValueError(
                f"{path} must have the bytes {entry.offset} to {end} of {name!r}, but ends at {len(shard)}"
            )
        return path, shard[entry.offset : end]

    def text(self, name: str) -> bytes:
        """Return the value of a string tensor without dimensions, as bytes."""
        entry = self._named(name)
        if entry.dtype != _STRING or entry.shape != ():
            raise ValueError(
                f"{self.path}: {name!r} must be one string, got dtype {entry.dtype} of shape {entry.shape}"
            )
        path, content = self._bytes(name, entry)
        data = content.numpy().tobytes()
        length, at = varint(path, data, 0)
        if at + 4 + length != len(data):
            raise ValueError(f"{path}: the string {name!r} must take {len(data)} bytes, got {at + 4 + length}")
        packed = struct.pack("<I" if length < 2**32 else "<Q", length)
        if masked_crc(packed + data[at:]) != entry.crc:
            raise ValueError(f"{path} is damaged: the string {name!r} does not have the CRC {entry.crc:#010x}")
        return data[at + 4 :]

    def read(self, name: str) -> Tensor:
        """Return a copy of a tensor, its checksums compared."""
        pieces = self.pieces(name)
        check_crcs(name, pieces)
        result = torch.empty(self.shape(name), dtype=pieces[0].dtype)
        for piece in pieces:
            copy_bytes(piece, result)
        return result


def overlap(places: list[tuple[slice, ...]]) -> bool:
    """Say whether two of the places have an element in common, or are none within the tensor."""
    ordered = sorted(places, key=lambda place: [part.start for part in place])
    for k, a in enumerate(ordered):
        for b in ordered[k + 1 :]:
            if b[0].start >= a[0].stop:
                break
            if all(x.start < y.stop and y.start < x.stop for x, y in zip(a, b, strict=True)):
                return True
    return False


def mapped_file(path: str) -> Tensor:
    """Return the bytes of a file, mapped into memory: uint8. Writing to them does not change the file."""
    size = os.path.getsize(path)
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """
    Raise what readers raise of a damaged or foreign file as ``ValueError`` that names it.

    A file that is missing, or may not be opened, keeps its kind of error.

    Args:
        path: the caller's path.
    """
    try:
        yield
    except _OF_READERS as error:
        is_closed = isinstance(error, (FileNotFoundError, PermissionError))
        kind = type(error) if is_closed else ValueError
        if type(error) is kind and path in str(error):
            raise
        said = "" if is_closed or type(error) is ValueError else " is damaged, or of another kind than its name says"
        raise kind(f"{path}{said}: {error or type(error).__name__}") from error


#: What readers of files raise, most of them without the file's name: zipfile, h5py, torch and pickle among them.
_OF_READERS = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, TypeError),
    *(ValueError, pickle.UnpicklingError, struct.error, zipfile.BadZipFile),
)


def stored_begin(file: Any, member: zipfile.ZipInfo) -> int:
    """Return where the content of a member that is not compressed begins in an archive, a file open for reading."""
    file.seek(max(0, member.header_offset))
    head = file.read(30)
    if len(head) < 30 or head[:4] != b"PK\3\4":
        raise zipfile.BadZipFile(f"{member.filename!r} must begin at byte {member.header_offset}: it does not")
    lengths = struct.unpack("<HH", head[26:])  # of the name, and of what else is before the content
    return int(member.header_offset + 30 + sum(lengths))


def check_member(path: str, content: Tensor, begin: int, member: zipfile.ZipInfo, name: str | None = None) -> None:
    """Raise ``ValueError`` unless a member of an archive, not compressed, has its checksum; ``name`` is of what."""
    found = zlib.crc32(content[begin : begin + member.file_size].numpy().data)
    if found != member.CRC:
        what = name or member.filename
        raise ValueError(f"{path} is damaged: {what!r} must have the CRC {member.CRC:#010x} there, got {found:#010x}")


def check_crcs(name: str, pieces: list[Piece]) -> None:
    """Raise ``ValueError`` unless the bytes of all pieces have their checksums."""
    known = [piece for piece in pieces if piece.crc is not None]
    for piece, crc in zip(known, ops.crc32c([piece.bytes for piece in known]).tolist(), strict=True):
        found = masked(crc)
        if found != piece.crc:
            raise ValueError(
                f"{piece.file} is damaged: {name!r} must have the CRC {piece.crc:#010x} there, got {found:#010x}"
            )


def copy_bytes(piece: Piece, out: Tensor) -> None:
    """Copy a piece to its place in a tensor, whose dtype may be a wider one, and whose device any."""
    part = out[piece.place]
    if part.device.type == "cpu" and part.dtype == piece.dtype and part.is_contiguous():
        part.reshape(-1).view(torch.uint8).copy_(piece.bytes)
        return
    rows = max(1, piece.shape[0]) if piece.shape else 1
    row = len(piece.bytes) // rows
    step = max(1, CHUNK // max(row, 1))
    for begin in range(0, rows, step):
        aligned = piece.bytes[begin * row : (begin + step) * row].clone().view(piece.dtype)
        if not piece.shape:
            part.copy_(aligned.reshape(()))
        else:
            part[begin : begin + step].copy_(aligned.view(-1, *piece.shape[1:]))
