"""
The compressed layout of prebatched files: each buffer of a column is cut into byte planes, each stored by a codec.

A column's buffers become parts. An array's parts are its validity (without elements if it has no nulls), the lengths of
its lists or strings, and its values or its child's parts. A directory, a JSON object of three lists of integers,
describes the parts of a batch's columns. ``columns`` has the number of parts of each column. ``parts`` has three
integers for each part: its kind, the bytes of an element and the number of elements. ``planes`` has two integers for
every byte of an element of every part that has elements: its codec and the number of stored bytes.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..ops import join_byte_planes_, to_byte_planes
from ._arrow import arrow

#: The codecs of a plane: its bytes unchanged, a frame of zstd, the one byte that all its bytes equal, or the lowest
#: bits of its bytes as join_byte_planes_ reads them.
RAW, ZSTD, CONSTANT, PACKED = 0, 1, 2, 3
#: The kinds of parts.
VALIDITY, LENGTHS, VALUES = 0, 1, 2

# A block of a zstd frame takes 3 bytes or more and decodes to 128 KiB at most.
_LARGEST_RATIO = 1 << 17
# The decoded bytes that any batch may have, and the further ones for each stored byte: a small file that claims to hold
# gigabytes is damaged.
_MOST_FREE, _MOST_EACH = 1 << 28, 1 << 10
# The most bytes of scratch memory that a thread keeps under each name.
_MOST_SCRATCH = 1 << 24
# The most elements of a part: sums of their bytes are no more than 2^63.
_MOST_ELEMENTS = 1 << 48
# The alignment of decoded parts and the bytes of a packed block, as join_byte_planes_ has them.
_ALIGNMENT, _PACKED_BLOCK = 64, 1024
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: A part of a column: its kind, bytes of an element, number of elements, and the codec and the bytes of each plane.
ColumnPart = list[Any]


def most_bytes(stored: int) -> int:
    """Return the most bytes to which a batch of ``stored`` bytes may decode."""
    return max(_MOST_FREE, _MOST_EACH * stored)


def decoded_bytes(parts: list[ColumnPart]) -> int:
    """Return the number of bytes of an array that consists of these parts."""
    return sum(size * count for _, size, count, _ in parts)


def to_directory(columns: list[list[ColumnPart]]) -> str:
    """Return the directory of a batch as JSON, from the parts of each of its columns."""
    parts = [part for column in columns for part in column]
    directory = {
        "columns": [len(column) for column in columns],
        "parts": [number for part in parts for number in part[:3]],
        "planes": [number for part in parts for plane in part[3] for number in plane],
    }
    return json.dumps(directory, separators=(",", ":"))


class Encoder:
    """Turns an array into its parts and the bytes of their planes, compressed where that saves enough of a plane."""

    def __init__(self, level: int | None, min_saving: float) -> None:
        pa = arrow("write_prebatched")
        self.pa, self.codec = pa, pa.Codec("zstd", compression_level=level)
        self.kept = 1.0 - min_saving

    def encode(self, array: Any) -> tuple[list[ColumnPart], bytes]:
        """Return the parts and the stored bytes of an array, which must begin where its buffers begin."""
        parts: list[ColumnPart] = []
        stored: list[bytes] = []
        self._array(array, parts, stored)
        return parts, b"".join(stored)

    def _array(self, array: Any, parts: list[ColumnPart], stored: list[bytes]) -> None:
        types, kind, rows = self.pa.types, array.type, len(array)
        validity, *buffers = array.buffers()
        bits = (rows + 7) // 8 if array.null_count else 0
        self._part(VALIDITY, _bytes_of(validity, bits), parts, stored)
        if types.is_fixed_size_list(kind):
            self._array(array.values, parts, stored)
        elif types.is_boolean(kind):
            self._part(VALUES, _bytes_of(buffers[0], (rows + 7) // 8), parts, stored)
        elif types.is_integer(kind) or types.is_floating(kind):
            width = kind.bit_width // 8
            self._part(VALUES, _bytes_of(buffers[0], rows * width).view(_DTYPES[width]), parts, stored)
        else:
            wide = types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
            dtype = torch.int64 if wide else torch.int32
            lengths = _bytes_of(buffers[0], (rows + 1) * dtype.itemsize).view(dtype).diff() if rows else None
            self._part(LENGTHS, torch.empty(0, dtype=dtype) if lengths is None else lengths, parts, stored)
            if types.is_list(kind) or types.is_large_list(kind):
                self._array(array.values, parts, stored)
            else:
                size = 0 if lengths is None else int(lengths.sum())
                self._part(VALUES, _bytes_of(buffers[1], size), parts, stored)

    def _part(self, what: int, values: Tensor, parts: list[ColumnPart], stored: list[bytes]) -> None:
        directory = []
        for plane in to_byte_planes(values).numpy() if len(values) else ():
            codec, data = self._plane(plane)
            directory.append([codec, len(data)])
            stored.append(data)
        parts.append([what, values.element_size(), len(values), directory])

    def _plane(self, plane: np.ndarray) -> tuple[int, bytes]:
        if (plane == plane[0]).all():
            return CONSTANT, plane[:1].tobytes()
        plain, data = RAW, plane
        bits = int(plane.max()).bit_length()
        if bits < 8 and bits * -(-len(plane) // 8) <= self.kept * len(plane):
            plain, data = PACKED, _pack(plane, bits)
        frame = self.codec.compress(plane, asbytes=True)
        worth = len(frame) < len(data) and len(frame) <= len(data) - (1.0 - self.kept) * len(plane)
        return (ZSTD, frame) if worth else (plain, data.tobytes())


def _pack(plane: np.ndarray, bits: int) -> np.ndarray:
    """Return the lowest ``bits`` bits of a plane's bytes, in the order in which ``join_byte_planes_`` reads them."""
    places = np.arange(bits, dtype=np.uint8)[:, None, None]
    whole = len(plane) // _PACKED_BLOCK * _PACKED_BLOCK
    stored = []
    for values, stride in ((plane[:whole], _PACKED_BLOCK // 8), (plane[whole:], -(-(len(plane) - whole) // 8))):
        if len(values):
            runs = np.pad(values, (0, -len(values) % (8 * stride))).reshape(-1, 1, 8, stride)
            stored.append(np.packbits(runs >> places & 1, axis=2, bitorder="little").ravel())
    return np.concatenate(stored)


class _Scratch(threading.local):
    """Memory that each thread keeps by name: fresh memory costs more than the work done in it."""

    def __init__(self) -> None:
        self.memory: dict[str, np.ndarray] = {}


_SCRATCH = _Scratch()


def scratch(name: str, size: int) -> np.ndarray:
    """Return uint8 memory ``[size]``, valid until this thread's next call with the same name."""
    if size > _MOST_SCRATCH:
        return np.empty(size, np.uint8)
    memory = _SCRATCH.memory.get(name)
    if memory is None or len(memory) < size:
        memory = _SCRATCH.memory[name] = np.empty(size, np.uint8)
    return memory[:size]


def _bytes_of(buffer: Any, size: int) -> Tensor:
    """Return a copy of the first ``size`` bytes of a buffer, which may be None if ``size`` is 0."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(buffer, np.uint8, size).copy())


class _Recycled:
    """
    Blocks of memory that are used again once no array in them is alive: fresh memory costs as much as decoding.

    Args:
        most: the most bytes to keep. Blocks in use do not count.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._free: list[np.ndarray] = []
        # No code waits for the lock. Garbage collection may run in a thread that holds it, and in a forked process a
        # thread that no longer exists may hold it. Where it is taken, memory is allocated anew, or freed.
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """Return uninitialised uint8 memory of ``size`` elements or more."""
        if self._lock.acquire(blocking=False):
            try:
                for i, block in enumerate(self._free):
                    if size <= len(block) <= 2 * size:
                        return self._free.pop(i)
            finally:
                self._lock.release()
        return np.empty(size, np.uint8)

    def lend(self, block: np.ndarray) -> Any:
        """Return a pyarrow buffer of a block from :meth:`take`; the block comes back with the last reference to it."""
        return arrow("PrebatchedDataset").foreign_buffer(block.ctypes.data, len(block), _Loan(self, block))

    def give_back(self, block: np.ndarray) -> None:
        """Keep a block for another use, unless that makes more than ``most`` bytes."""
        if self._lock.acquire(blocking=False):
            try:
                if len(block) + sum(map(len, self._free)) <= self._most:
                    self._free.append(block)
            finally:
                self._lock.release()


class _Loan:
    """The owner of a lent block, which gives the block back when it is deleted."""

    def __init__(self, memory: _Recycled, block: np.ndarray) -> None:
        self.memory, self.block = memory, block

    def __del__(self) -> None:
        self.memory.give_back(self.block)


#: The memory of decoded batches of all files that this process reads.
_MEMORY = _Recycled(1 << 27)


def _runs(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the integers ``[begin, begin + count)`` of each pair, one range after the other."""
    return np.arange(counts.sum()) + np.repeat(begins - np.cumsum(counts) + counts, counts)


class Decoder:
    """
    Decodes the stored bytes of a batch into arrays, and checks that they fit the arrays' types.

    One call decompresses all planes of a batch, and another joins them, since columns are many and small.

    Args:
        stored: the batch's bytes, uint8.
        directory: the batch's directory, from :func:`to_directory`.
        columns: the number of columns of the batch.
        places: the positions of the wanted columns among them.
        ranges: ``[columns wanted, 2]``, where each wanted column begins and ends in ``stored``.
        room: the most bytes that the arrays of all wanted columns may have together.

    Raises:
        ValueError: a directory that does not fit the columns or the stored bytes, or arrays of more than ``room``
            bytes.
    """

    def __init__(
        self, stored: np.ndarray, directory: bytes, columns: int, places: list[int], ranges: np.ndarray, room: int
    ) -> None:
        self.pa, self.stored = arrow("PrebatchedDataset"), stored
        found = json.loads(directory)
        counts, parts, planes = (
            np.array(found[name], np.int64).reshape(shape)
            for name, shape in (("columns", -1), ("parts", (-1, 3)), ("planes", (-1, 2)))
        )
        widths, elements = parts[:, 1], parts[:, 2]
        odd = (widths < 1) | (widths > 8) | (widths & (widths - 1) != 0) | (elements < 0) | (elements > _MOST_ELEMENTS)
        if odd.any():
            raise ValueError(f"expected parts of elements of 1, 2, 4 or 8 bytes, got {parts[odd.argmax()].tolist()}")
        widths = np.where(elements > 0, widths, 0)
        if len(counts) != columns or (counts < 0).any() or counts.sum() != len(parts):
            raise ValueError(f"expected the parts of {columns} columns")
        if widths.sum() != len(planes):
            raise ValueError(f"expected {widths.sum()} planes, one for each byte of the parts' elements")
        # From here on only the wanted columns.
        part = _runs((np.cumsum(counts) - counts)[places], counts[places])
        plane = _runs((np.cumsum(widths) - widths)[part], widths[part])
        parts, widths, elements, planes = parts[part], widths[part], elements[part], planes[plane]
        sizes = widths * elements
        if sizes.astype(float).sum() > room:
            raise ValueError(f"the stored bytes cannot decode to arrays of more than {room} bytes")
        column = np.repeat(np.repeat(np.arange(len(places)), counts[places]), widths)
        self._locate(planes, np.repeat(elements, widths), column, ranges)
        #: For each part that has elements, the bytes of one and their number.
        self.words = np.stack([widths, elements], 1)[elements > 0]
        aligned = -(-sizes // _ALIGNMENT) * _ALIGNMENT
        #: The bytes of all arrays; of each part its kind, its size and where it begins in these bytes; the next part.
        self.size = int(aligned.sum())
        self.what, self.widths, self.elements = parts.T.tolist()
        self.begins = (np.cumsum(aligned) - aligned).tolist()
        self.next = 0
        #: The number of parts up to the end of each column.
        self.ends = np.cumsum(counts[places]).tolist()

    def _locate(self, planes: np.ndarray, counts: np.ndarray, column: np.ndarray, ranges: np.ndarray) -> None:
        """Set ``frames``, ``unpacked`` and ``planes``: where the planes, of ``counts`` bytes decoded, are stored."""
        codec, sizes = planes[:, 0], planes[:, 1]
        packed = -(-counts // 8)
        fits = (codec == RAW) & (sizes == counts)
        fits |= (codec == CONSTANT) & (sizes == 1)
        fits |= (codec == PACKED) & (sizes % packed == 0) & (sizes < 8 * packed)
        fits |= (codec == ZSTD) & (sizes >= counts // _LARGEST_RATIO)
        fits &= (sizes > 0) & (sizes <= len(self.stored))
        if not fits.all():
            i = int(fits.argmin())
            raise ValueError(f"a plane of {counts[i]} bytes cannot be stored in {sizes[i]} bytes by codec {codec[i]}")
        stored = np.bincount(column, sizes, len(ranges))
        if (stored != ranges[:, 1] - ranges[:, 0]).any():
            raise ValueError("the planes of a column must have as many bytes as it has")
        before = np.cumsum(sizes) - sizes
        starts = before + (ranges[:, 0] - (np.cumsum(stored) - stored).astype(np.int64))[column]
        frames = codec == ZSTD
        unpacked = np.where(frames, counts, 0)
        #: The frames of zstd, and the bytes to which they decode together.
        self.frames = [
            self.stored[start : start + size]
            for start, size in zip(starts[frames].tolist(), sizes[frames].tolist(), strict=True)
        ]
        self.unpacked = int(unpacked.sum())
        bits = np.where(codec == PACKED, sizes // packed, np.where(codec == CONSTANT, 0, 8))
        starts = np.where(frames, np.cumsum(unpacked) - unpacked, starts)
        #: The planes as join_byte_planes_ takes them: source 0 is the stored bytes, source 1 the decoded frames.
        self.planes = np.stack([frames.astype(np.int64), starts, bits], 1)

    def decode(self, kinds: list[Any], rows: int) -> list[Any]:
        """
        Return the wanted columns as arrays of the types ``kinds``, each of ``rows`` rows; they share one buffer.

        Raises:
            ValueError: parts that do not fit the types, or planes that zstd cannot decode.
        """
        sources = [torch.from_numpy(self.stored)]
        if self.frames:
            # Frames of zstd may follow one another, and one call decodes them all.
            frames = np.concatenate(self.frames, out=scratch("frames", sum(map(len, self.frames))))
            joined = self.pa.Codec("zstd").decompress(frames, decompressed_size=self.unpacked)
            sources.append(from_dlpack(self.pa.Array.from_buffers(self.pa.uint8(), self.unpacked, [None, joined])))
        block = _MEMORY.take(max(self.size, _ALIGNMENT))
        planes, words = torch.from_numpy(self.planes), torch.from_numpy(self.words)
        self.decoded = join_byte_planes_(torch.from_numpy(block), sources, planes, words)
        self.buffer = _MEMORY.lend(block)
        return [self._whole(kind, rows, end) for kind, end in zip(kinds, self.ends, strict=True)]

    def _whole(self, kind: Any, rows: int, end: int) -> Any:
        """Return the next array, or raise ``ValueError`` unless its parts end before part number ``end``."""
        array = self._array(kind, rows)
        if self.next != end:
            raise ValueError(f"a column of type {kind} has {abs(end - self.next)} parts too many or too few")
        return array

    def _array(self, kind: Any, rows: int) -> Any:
        types = self.pa.types
        if self._is(VALIDITY, 1, 0):
            self.next += 1
            validity = None
        else:
            validity = self._part(VALIDITY, 1, (rows + 7) // 8)
        children, buffers = [], [validity]
        if types.is_fixed_size_list(kind):
            children = [self._array(kind.value_type, rows * kind.list_size)]
        elif types.is_boolean(kind):
            buffers.append(self._part(VALUES, 1, (rows + 7) // 8))
        elif types.is_integer(kind) or types.is_floating(kind):
            buffers.append(self._part(VALUES, kind.bit_width // 8, rows))
        else:
            wide = types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
            offsets = self._offsets(torch.int64 if wide else torch.int32, rows)
            buffers.append(self.pa.py_buffer(offsets.numpy()))
            if types.is_list(kind) or types.is_large_list(kind):
                children = [self._array(kind.value_type, int(offsets[-1]))]
            else:
                buffers.append(self._part(VALUES, 1, int(offsets[-1])))
        return self.pa.Array.from_buffers(kind, rows, buffers, children=children)

    def _offsets(self, dtype: torch.dtype, rows: int) -> Tensor:
        begin = self._place(LENGTHS, dtype.itemsize, rows)
        lengths = self.decoded[begin : begin + rows * dtype.itemsize].view(dtype)
        offsets = torch.zeros(rows + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        # Sums of 2^63 and more have wrapped to negative numbers along the way.
        if bool((lengths < 0).any()) or bool((offsets < 0).any()) or int(offsets[-1]) > torch.iinfo(dtype).max:
            raise ValueError(f"lengths of lists must be positive and add up to less than {torch.iinfo(dtype).max}")
        return offsets.to(dtype)

    def _part(self, what: int, width: int, count: int) -> Any:
        """Return the decoded bytes of the next part, which must be of this kind and size."""
        return self.buffer.slice(self._place(what, width, count), width * count)

    def _place(self, what: int, width: int, count: int) -> int:
        """Return where the next part begins, or raise ``ValueError`` unless it is of this kind and size."""
        if not self._is(what, width, count):
            i = self.next
            got = [self.what[i], self.widths[i], self.elements[i]] if i < len(self.what) else "none"
            raise ValueError(f"expected a part {[what, width, count]}, got {got}")
        self.next += 1
        return self.begins[self.next - 1]

    def _is(self, what: int, width: int, count: int) -> bool:
        """Say whether the next part is of this kind and size."""
        i = self.next
        there = i < len(self.what)
        return there and self.what[i] == what and self.widths[i] == width and self.elements[i] == count
