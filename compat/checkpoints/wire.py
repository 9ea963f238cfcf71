"""The bytes of a V2 checkpoint's index: blocks of sorted names, protocol buffers, and the names of slices."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

from ... import ops

__all__ = [
    "Slices",
    "block_entries",
    "field",
    "fields",
    "masked",
    "masked_crc",
    "number_of",
    "shape_of",
    "slice_key",
    "slices_of",
    "varint",
    "written_block",
    "written_shape",
    "written_slices",
    "written_varint",
]

#: For each dimension the start and the length; length -1: all of the dimension.
Slices = tuple[tuple[int, int], ...]

_HEADS = (b"", b"\x80", b"\xc0", b"\xe0", b"\xf0", b"\xf8", b"\xfc", b"\xfe", b"\xff", b"\xff\x80", b"\xff\xc0")


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of some bytes as TensorFlow stores it."""
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return masked(int(ops.crc32c([buffer])))


def masked(crc: int) -> int:
    """Return a CRC-32C as TensorFlow stores it."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


# ---- Numbers and blocks ---------------------------------------------------------------------------------------------


def varint(path: str, data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a byte, and the byte after it."""
    result = 0
    for k in range(10):
        if at + k >= len(data):
            break
        result |= (data[at + k] & 0x7F) << (7 * k)
        if data[at + k] < 0x80:
            return result & (2**64 - 1), at + k + 1
    raise ValueError(f"{path} is damaged: a number must end within 10 bytes and its record, got {data[at : at + 10]!r}")


def written_varint(number: int) -> bytes:
    """Return the bytes of a number; a negative one as its two's complement of 64 bits."""
    number &= 2**64 - 1
    result = bytearray()
    while number > 0x7F:
        result.append(number & 0x7F | 0x80)
        number >>= 7
    result.append(number)
    return bytes(result)


def block_entries(path: str, block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block."""
    count = struct.unpack("<I", block[-4:])[0] if len(block) >= 4 else 0
    end = len(block) - 4 - 4 * count
    if end < 0:
        raise ValueError(f"{path} is damaged: a block of {len(block)} bytes must have its restarts, got {count}")
    at, key = 0, b""
    while at < end:
        shared, at = varint(path, block, at)
        more, at = varint(path, block, at)
        length, at = varint(path, block, at)
        if shared > len(key) or at + more + length > end:
            raise ValueError(f"{path} is damaged: an entry must end within its block, got {shared}, {more}, {length}")
        key = key[:shared] + block[at : at + more]
        at += more + length
        yield key, block[at - length : at]


def written_block(offset: int, entries: list[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Return the handle of a block that begins at ``offset``, and its bytes, its kind and checksum included."""
    content, restarts = b"", []
    for key, value in entries:  # each key whole, at a restart of its own
        restarts.append(len(content))
        content += b"\0" + written_varint(len(key)) + written_varint(len(value)) + key + value
    restarts = restarts or [0]
    content += struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))
    handle = written_varint(offset) + written_varint(len(content))
    return handle, content + b"\0" + struct.pack("<I", masked_crc(content + b"\0"))


# ---- Protocol buffers -----------------------------------------------------------------------------------------------


def fields(path: str, data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the content of each field of a message: integers, and bytes of all else."""
    at = 0
    while at < len(data):
        tag, at = varint(path, data, at)
        kind = tag & 7
        if kind == 0:
            content, at = varint(path, data, at)
            yield tag >> 3, content - 2**64 if content >= 2**63 else content
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = varint(path, data, at)
        if size is None or at + size > len(data):
            raise ValueError(f"{path} is damaged: field {tag >> 3} of kind {kind} must end within its message")
        at += size
        raw = data[at - size : at]
        yield tag >> 3, raw if kind == 2 else int.from_bytes(raw, "little")


def field(number: int, content: int | bytes) -> bytes:
    """Return the bytes of a field: an integer, or bytes."""
    if isinstance(content, int):
        return written_varint(number << 3) + written_varint(content)
    return written_varint(number << 3 | 2) + written_varint(len(content)) + content


def number_of(path: str, data: bytes, number: int) -> int:
    """Return the last integer that a message has in a field, or 0."""
    found = [content for k, content in fields(path, data) if k == number]
    if found and not isinstance(found[-1], int):
        raise ValueError(f"{path} is damaged: field {number} must be an integer, got {found[-1]!r}")
    return found[-1] if found else 0  # type: ignore[return-value]


def _messages(path: str, data: bytes, number: int) -> list[bytes]:
    found = [content for k, content in fields(path, data) if k == number]
    if not all(isinstance(content, bytes) for content in found):
        raise ValueError(f"{path} is damaged: field {number} must be a message, got {found}")
    return found  # type: ignore[return-value]


def shape_of(path: str, data: bytes) -> tuple[int, ...]:
    """Return the sizes in a ``TensorShapeProto``."""
    if not isinstance(data, bytes):
        raise ValueError(f"{path} is damaged: a shape must be a message, got {data!r}")
    shape = tuple(number_of(path, dim, 1) for dim in _messages(path, data, 2))
    if any(size < 0 for size in shape):
        raise ValueError(f"{path}: a shape must have sizes of at least 0, got {shape}")
    return shape


def written_shape(shape: tuple[int, ...]) -> bytes:
    """Return a ``TensorShapeProto``."""
    return b"".join(field(2, field(1, size) if size else b"") for size in shape)


def slices_of(path: str, data: bytes, shape: tuple[int, ...]) -> Slices:
    """Return the extents of a ``TensorSliceProto`` of a tensor of some shape, within which they must lie."""
    if not isinstance(data, bytes):
        raise ValueError(f"{path} is damaged: a slice must be a message, got {data!r}")
    extents = []
    for extent in _messages(path, data, 1):
        has_length = any(number == 2 for number, _ in fields(path, extent))
        extents.append((number_of(path, extent, 1), number_of(path, extent, 2) if has_length else -1))
    within = len(extents) == len(shape) and all(
        (start == 0 and length == -1) or (start >= 0 and length >= 0 and start + length <= size)
        for (start, length), size in zip(extents, shape, strict=False)
    )
    if not within:
        raise ValueError(f"{path}: a slice must lie within the shape {shape}, got {extents}")
    return tuple(extents)


def written_slices(slices: Slices) -> bytes:
    """Return a ``TensorSliceProto``."""
    extents = [(field(1, start) if start else b"") + (field(2, n) if n >= 0 else b"") for start, n in slices]
    return b"".join(field(1, extent) for extent in extents)


# ---- Names of slices ------------------------------------------------------------------------------------------------


def slice_key(name: str, slices: Slices) -> bytes:
    """
    Return the key of a slice of a tensor in the index.

    Source: ``EncodeTensorNameSlice`` in tensorflow/core/util/saved_tensor_slice_util.cc, and ``OrderedCode``.
    """
    text = name.encode().replace(b"\0", b"\0\xff")  # and 0xff is in no UTF-8
    key = b"\0" + text + b"\0\1" + _ordered(len(slices))
    return key + b"".join(_ordered_signed(start) + _ordered_signed(length) for start, length in slices)


def _ordered(number: int) -> bytes:
    size = (number.bit_length() + 7) // 8
    return bytes([size]) + number.to_bytes(size, "big")


def _ordered_signed(number: int) -> bytes:
    size = (number if number >= 0 else ~number).bit_length() // 7 + 1
    raw = bytearray(number.to_bytes(10, "big", signed=True)[10 - size :])
    for k, bits in enumerate(_HEADS[size]):
        raw[k] ^= bits
    return bytes(raw)
