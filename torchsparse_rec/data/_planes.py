"""
The compressed layout of prebatched files: each buffer of a column as byte planes, each plane as it is or by zstd.

A column's buffers become parts: of each array its validity (without elements if it has no nulls), the lengths of its
lists or strings, and its values or its child's parts. A part is ``[what, bytes of an element, elements, [[codec,
bytes], ...]]`` with one pair for each plane; in a batch's metadata there is a list of parts for each column, as JSON.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..ops import join_byte_planes_, to_byte_planes
from ._arrow import arrow

#: How a plane is stored: its bytes, a frame of zstd, or the one byte that it consists of.
RAW, ZSTD, CONSTANT = 0, 1, 2
#: What a part is.
VALIDITY, LENGTHS, VALUES = 0, 1, 2

# A frame of zstd describes no more than 128 KiB in 3 bytes or more.
_LARGEST_RATIO = 1 << 17
# So many bytes a batch may have whatever is stored of it, and so many for each byte that is stored: a small file that
# describes gigabytes is no data.
_MOST_FREE, _MOST_EACH = 1 << 28, 1 << 10
# Bytes that a thread keeps under each name.
_MOST_SCRATCH = 1 << 24
# Where a plane is taken from: what is stored, or what zstd made of all frames.
_STORED, _UNPACKED = 0, 1
# That of join_byte_planes_.
_ALIGNMENT = 64
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Part = list[Any]


def most_bytes(stored: int) -> int:
    """How many bytes a batch may have of which so many are stored."""
    return max(_MOST_FREE, _MOST_EACH * stored)


def decoded_bytes(parts: list[Part]) -> int:
    """The bytes of an array of these parts."""
    return sum(size * count for _, size, count, _ in parts)


class Encoder:
    """Turns an array into its parts and the bytes of their planes, compressed where that saves enough of a plane."""

    def __init__(self, level: int | None, min_saving: float) -> None:
        pa = arrow("write_prebatched")
        self.pa, self.codec = pa, pa.Codec("zstd", compression_level=level)
        self.kept = 1.0 - min_saving

    def encode(self, array: Any) -> tuple[list[Part], bytes]:
        """The parts of an array that begins at its buffers' beginning, and what is stored of them."""
        parts: list[Part] = []
        stored: list[bytes] = []
        self._array(array, parts, stored)
        return parts, b"".join(stored)

    def _array(self, array: Any, parts: list[Part], stored: list[bytes]) -> None:
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

    def _part(self, what: int, values: Tensor, parts: list[Part], stored: list[bytes]) -> None:
        directory = []
        for plane in to_byte_planes(values).numpy() if len(values) else ():
            codec, data = self._plane(plane)
            directory.append([codec, len(data)])
            stored.append(data)
        parts.append([what, values.element_size(), len(values), directory])

    def _plane(self, plane: np.ndarray) -> tuple[int, bytes]:
        if (plane == plane[0]).all():
            return CONSTANT, plane[:1].tobytes()
        packed = self.codec.compress(plane, asbytes=True)
        worth = len(packed) < len(plane) and len(packed) <= self.kept * len(plane)
        return (ZSTD, packed) if worth else (RAW, plane.tobytes())


class _Scratch(threading.local):
    """Memory of each thread: fresh memory costs more than what is done in it."""

    def __init__(self) -> None:
        self.memory: dict[str, np.ndarray] = {}


_SCRATCH = _Scratch()


def scratch(name: str, size: int) -> np.ndarray:
    """``[size]``, uint8, until the next call of this thread with this name."""
    if size > _MOST_SCRATCH:
        return np.empty(size, np.uint8)
    memory = _SCRATCH.memory.get(name)
    if memory is None or len(memory) < size:
        memory = _SCRATCH.memory[name] = np.empty(size, np.uint8)
    return memory[:size]


def _bytes_of(buffer: Any, size: int) -> Tensor:
    """The first bytes of a buffer, copied; an absent one is empty."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(buffer, np.uint8, size).copy())


class Recycled:
    """
    Blocks of memory that come back once nobody refers to what lies in them: fresh memory costs as much as decoding.

    Args:
        most: the bytes to keep at most. What is lent does not count.
    """

    def __init__(self, most: int = 1 << 27) -> None:
        self._most, self._lock = most, threading.Lock()
        self._free: list[np.ndarray] = []

    def take(self, size: int) -> np.ndarray:
        """``[size or more]``, uint8, with anything in it."""
        with self._lock:
            for i, block in enumerate(self._free):
                if size <= len(block) <= 2 * size:
                    return self._free.pop(i)
        return np.empty(size, np.uint8)

    def lend(self, block: np.ndarray) -> Any:
        """A pyarrow buffer of a block that was taken, which comes back when the last reference to it goes."""
        return arrow("PrebatchedDataset").foreign_buffer(block.ctypes.data, len(block), _Loan(self, block))

    def give_back(self, block: np.ndarray) -> None:
        """Keep a block, unless there are enough. May be called by any thread, at any moment."""
        # A collection of garbage may have interrupted this very thread with the lock in its hands.
        if self._lock.acquire(blocking=False):
            if len(block) + sum(map(len, self._free)) <= self._most:
                self._free.append(block)
            self._lock.release()


class _Loan:
    """What keeps a block away."""

    def __init__(self, memory: Recycled, block: np.ndarray) -> None:
        self.memory, self.block = memory, block

    def __del__(self) -> None:
        self.memory.give_back(self.block)


class Decoder:
    """
    Turns parts back into arrays, checking step by step that they fit their types.

    All planes of a batch are decompressed in one call, and put together in another: columns are many and small.

    Args:
        stored: a batch's bytes, uint8.
        room: the bytes that all arrays may have together.
    """

    def __init__(self, stored: np.ndarray, room: int) -> None:
        pa = arrow("PrebatchedDataset")
        self.pa, self.codec, self.stored, self.room = pa, pa.Codec("zstd"), stored, room
        self.frames: list[np.ndarray] = []
        self.unpacked = 0
        self.planes: list[tuple[int, int, int]] = []
        self.sizes: list[tuple[int, int]] = []
        #: Of each array what its parts are and where they begin in the decoded bytes, the last one first.
        self.columns: list[list[tuple[list[int], int]]] = []
        self.end = 0

    def add(self, parts: list[Part], begin: int, end: int) -> None:
        """
        Add the next array, whose planes are ``stored[begin:end]``.

        Raises:
            ValueError: planes that cannot be those of such parts, or that need more room than there is.
        """
        column = []
        for what, width, count, directory in parts:
            if type(width) is not int or width not in _DTYPES or type(count) is not int or count < 0:
                raise ValueError(f"expected a part of whole elements, got {count} of {width} bytes")
            if len(directory) != (width if count else 0):
                raise ValueError(f"expected {width if count else 0} planes, got {len(directory)}")
            self.room -= width * count
            if self.room < 0:
                raise ValueError(f"{end - begin} bytes cannot stand for so many that {-self.room} have no room")
            for codec, size in directory:
                least = {RAW: count, ZSTD: max(1, count // _LARGEST_RATIO), CONSTANT: 1}.get(codec)
                most = end - begin if codec == ZSTD else least
                if type(size) is not int or least is None or most is None or not least <= size <= most:
                    raise ValueError(f"a plane of {count} bytes cannot be stored in {size} bytes by codec {codec}")
                if codec == ZSTD:
                    self.frames.append(self.stored[begin : begin + size])
                    self.planes.append((_UNPACKED, self.unpacked, 1))
                    self.unpacked += count
                else:
                    self.planes.append((_STORED, begin, int(codec == RAW)))
                begin += size
                if begin > end:
                    raise ValueError(f"a plane ends {begin - end} bytes after its column")
            column.append(([what, width, count], self.end))
            if count:
                self.sizes.append((width, count))
                self.end += -(-width * count // _ALIGNMENT) * _ALIGNMENT
        if begin != end:
            raise ValueError(f"{end - begin} bytes are left over")
        self.columns.append(column[::-1])

    def decode(self, kinds: list[Any], rows: int, memory: Recycled) -> list[Any]:
        """
        The arrays, which are of these types; they share one buffer, which is taken from ``memory``.

        Raises:
            ValueError: parts that are not those of such arrays, or planes that zstd cannot read.
        """
        sources = [torch.from_numpy(self.stored)]
        if self.frames:
            # Frames of zstd may follow one another.
            frames = np.concatenate(self.frames, out=scratch("frames", sum(map(len, self.frames))))
            joined = self.codec.decompress(frames, decompressed_size=self.unpacked)
            sources.append(from_dlpack(self.pa.Array.from_buffers(self.pa.uint8(), self.unpacked, [None, joined])))
        planes = torch.tensor(self.planes, dtype=torch.int64).reshape(-1, 3)
        sizes = torch.tensor(self.sizes, dtype=torch.int64).reshape(-1, 2)
        block = memory.take(max(self.end, _ALIGNMENT))
        self.decoded = join_byte_planes_(torch.from_numpy(block), sources, planes, sizes)
        self.buffer = memory.lend(block)
        return [self._whole(column, kind, rows) for column, kind in zip(self.columns, kinds, strict=True)]

    def _whole(self, column: list[tuple[list[int], int]], kind: Any, rows: int) -> Any:
        array = self._array(column, kind, rows)
        if column:
            raise ValueError(f"{len(column)} parts are left over")
        return array

    def _array(self, column: list[tuple[list[int], int]], kind: Any, rows: int) -> Any:
        types = self.pa.types
        if column and column[-1][0] == [VALIDITY, 1, 0]:
            column.pop()
            validity = None
        else:
            validity = self._part(column, VALIDITY, 1, (rows + 7) // 8)
        children, buffers = [], [validity]
        if types.is_fixed_size_list(kind):
            children = [self._array(column, kind.value_type, rows * kind.list_size)]
        elif types.is_boolean(kind):
            buffers.append(self._part(column, VALUES, 1, (rows + 7) // 8))
        elif types.is_integer(kind) or types.is_floating(kind):
            buffers.append(self._part(column, VALUES, kind.bit_width // 8, rows))
        else:
            wide = types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
            offsets = self._offsets(column, torch.int64 if wide else torch.int32, rows)
            buffers.append(self.pa.py_buffer(offsets.numpy()))
            if types.is_list(kind) or types.is_large_list(kind):
                children = [self._array(column, kind.value_type, int(offsets[-1]))]
            else:
                buffers.append(self._part(column, VALUES, 1, int(offsets[-1])))
        return self.pa.Array.from_buffers(kind, rows, buffers, children=children)

    def _offsets(self, column: list[tuple[list[int], int]], dtype: torch.dtype, rows: int) -> Tensor:
        begin = self._place(column, LENGTHS, dtype.itemsize, rows)
        lengths = self.decoded[begin : begin + rows * dtype.itemsize].view(dtype)
        offsets = torch.zeros(rows + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        # Sums of 2^63 and more would have wrapped to something negative along the way.
        if bool((lengths < 0).any()) or bool((offsets < 0).any()) or int(offsets[-1]) > torch.iinfo(dtype).max:
            raise ValueError(f"lengths of lists must be positive and add up to less than {torch.iinfo(dtype).max}")
        return offsets.to(dtype)

    def _part(self, column: list[tuple[list[int], int]], what: int, width: int, count: int) -> Any:
        """The decoded bytes of the next part."""
        return self.buffer.slice(self._place(column, what, width, count), width * count)

    def _place(self, column: list[tuple[list[int], int]], what: int, width: int, count: int) -> int:
        """Where the next part begins, which must be of this kind and size."""
        expected = [what, width, count]
        if not column or column[-1][0] != expected:
            raise ValueError(f"expected a part {expected}, got {column[-1][0] if column else 'none'}")
        return column.pop()[1]
