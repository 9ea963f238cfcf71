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

from ..ops import from_byte_planes, to_byte_planes
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
# Bytes that a thread keeps.
_MOST_SCRATCH = 1 << 24
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
    """Memory for planes, of each thread: fresh memory costs more than what is done in it."""

    memory = np.empty(0, np.uint8)


_SCRATCH = _Scratch()


def _scratch(planes: int, count: int) -> np.ndarray:
    """``[planes, count]``, uint8, until the next call of this thread."""
    size = planes * count
    if size > _MOST_SCRATCH:
        return np.empty((planes, count), np.uint8)
    if len(_SCRATCH.memory) < size:
        _SCRATCH.memory = np.empty(size, np.uint8)
    return _SCRATCH.memory[:size].reshape(planes, count)


def _bytes_of(buffer: Any, size: int) -> Tensor:
    """The first bytes of a buffer, copied; an absent one is empty."""
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.frombuffer(buffer, np.uint8, size).copy())


class Decoder:
    """
    Turns parts back into an array of a type, checking step by step that they fit it.

    Args:
        parts: of the array, in order.
        stored: the bytes of the planes, a pyarrow buffer.
        room: the bytes that the array may have; what it leaves of them is ``room`` afterwards.
    """

    def __init__(self, parts: list[Part], stored: Any, room: int) -> None:
        pa = arrow("PrebatchedDataset")
        self.pa, self.codec = pa, pa.Codec("zstd")
        self.parts, self.stored, self.position, self.room = list(reversed(parts)), stored, 0, room
        self.bytes = np.frombuffer(stored, np.uint8)

    def decode(self, kind: Any, rows: int) -> Any:
        """
        The array, of which all parts and bytes must be used up.

        Raises:
            ValueError: parts that are not those of such an array, or planes that zstd cannot read.
        """
        array = self._array(kind, rows)
        if self.parts or self.position != self.stored.size:
            raise ValueError(f"{len(self.parts)} parts and {self.stored.size - self.position} bytes are left over")
        return array

    def _array(self, kind: Any, rows: int) -> Any:
        types = self.pa.types
        children, buffers = [], [self._validity(rows)]
        if types.is_fixed_size_list(kind):
            children = [self._array(kind.value_type, rows * kind.list_size)]
        elif types.is_boolean(kind):
            buffers.append(self._values(torch.uint8, (rows + 7) // 8))
        elif types.is_integer(kind) or types.is_floating(kind):
            buffers.append(self._values(_DTYPES[kind.bit_width // 8], rows))
        else:
            wide = types.is_large_list(kind) or types.is_large_string(kind) or types.is_large_binary(kind)
            offsets = self._offsets(torch.int64 if wide else torch.int32, rows)
            buffers.append(self._buffer(offsets))
            if types.is_list(kind) or types.is_large_list(kind):
                children = [self._array(kind.value_type, int(offsets[-1]))]
            else:
                buffers.append(self._values(torch.uint8, int(offsets[-1])))
        return self.pa.Array.from_buffers(kind, rows, buffers, children=children)

    def _validity(self, rows: int) -> Any:
        if self.parts and self.parts[-1][:3] == [VALIDITY, 1, 0]:
            self._part(VALIDITY, torch.uint8, 0)
            return None
        return self._buffer(self._part(VALIDITY, torch.uint8, (rows + 7) // 8))

    def _values(self, dtype: torch.dtype, count: int) -> Any:
        return self._buffer(self._part(VALUES, dtype, count))

    def _offsets(self, dtype: torch.dtype, rows: int) -> Tensor:
        lengths = self._part(LENGTHS, dtype, rows)
        offsets = torch.zeros(rows + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=offsets[1:])
        # Sums of 2^63 and more would have wrapped to something negative along the way.
        if bool((lengths < 0).any()) or bool((offsets < 0).any()) or int(offsets[-1]) > torch.iinfo(dtype).max:
            raise ValueError(f"lengths of lists must be positive and add up to less than {torch.iinfo(dtype).max}")
        return offsets.to(dtype)

    def _buffer(self, values: Tensor) -> Any:
        return self.pa.py_buffer(values.numpy())

    def _part(self, what: int, dtype: torch.dtype, count: int) -> Tensor:
        """The next part, which must be of this kind and size."""
        expected = [what, dtype.itemsize, count]
        if not self.parts or self.parts[-1][:3] != expected:
            raise ValueError(f"expected a part {expected}, got {self.parts[-1][:3] if self.parts else 'none'}")
        directory = self.parts.pop()[3]
        if len(directory) != (dtype.itemsize if count else 0):
            raise ValueError(f"expected {dtype.itemsize} planes, got {len(directory)}")
        if count == 0:
            return torch.empty(0, dtype=dtype)
        self.room -= dtype.itemsize * count
        if self.room < 0:
            raise ValueError(f"{self.stored.size} bytes cannot stand for so many that {-self.room} have no room")
        for codec, size in directory:
            self._check_plane(codec, size, count)
        planes = np.empty((1, count), np.uint8) if dtype.itemsize == 1 else _scratch(dtype.itemsize, count)
        for plane, (codec, size) in zip(planes, directory, strict=True):
            self._plane(plane, codec, size)
        matrix = torch.from_numpy(planes)
        return matrix[0] if dtype.itemsize == 1 else from_byte_planes(matrix, dtype)

    def _check_plane(self, codec: int, size: int, count: int) -> None:
        """Before memory is taken for them."""
        least = {RAW: count, ZSTD: max(1, count // _LARGEST_RATIO), CONSTANT: 1}.get(codec)
        most = self.stored.size - self.position if codec == ZSTD else least
        if least is None or most is None or not least <= size <= most:
            raise ValueError(f"a plane of {count} bytes cannot be stored in {size} bytes by codec {codec}")

    def _plane(self, plane: np.ndarray, codec: int, size: int) -> None:
        start, end = self.position, self.position + size
        if end > self.stored.size:
            raise ValueError(f"a plane ends at byte {end} of {self.stored.size}")
        if codec == ZSTD:
            frame = self.stored.slice(start, size)
            plane[:] = np.frombuffer(self.codec.decompress(frame, decompressed_size=len(plane)), np.uint8)
        else:
            plane[:] = self.bytes[start:end]
        self.position = end
