"""
Slow, obvious references of the operators of the family ``record``: checksums, byte planes, frames and examples.

They follow csrc/record.h and csrc/record_example.h, a byte at a time, on Python's ``bytes``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

# ---- Checksums, planes and frames -----------------------------------------------------------------------------------


def crc32c(data: bytes) -> int:
    """Compute CRC-32C, a bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """Return the masked CRC-32C that TFRecord files store."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def byte_planes(data: bytes, size: int) -> list[bytes]:
    """Return, for every k, byte k of every element of ``size`` bytes."""
    return [data[k::size] for k in range(size)]


def packed(values: bytes, bits: int) -> bytes:
    """Pack bytes below ``2 ** bits`` as ``join_byte_planes_`` takes them."""
    data = b""
    for begin in range(0, len(values), 1024):
        block = values[begin : begin + 1024]
        stride = (len(block) + 7) // 8
        stored = bytearray(bits * stride)
        for i, value in enumerate(block):
            for q in range(bits):
                stored[q * stride + i % stride] |= (value >> q & 1) << (i // stride)
        data += bytes(stored)
    return data


def join_byte_planes(sources: list[bytes], planes: list[tuple[int, int, int]], parts: list[tuple[int, int]]) -> bytes:
    """Return the elements of every part, padded to 64 bytes."""
    rest, out = iter(planes), b""
    for width, count in parts:
        found = []
        for source, start, bits in (next(rest) for _ in range(width)):
            data = sources[source][start:]
            if bits == 8:
                found.append(data[:count])
            elif bits == 0:
                found.append(data[:1] * count)
            else:
                found.append(unpacked(data, bits, count))
        out += b"".join(bytes(element) for element in zip(*found, strict=True))
        out += bytes(-len(out) % 64)
    return out


def unpacked(data: bytes, bits: int, count: int) -> bytes:
    """Return the bytes that :func:`packed` has packed."""
    values = []
    for begin in range(0, count, 1024):
        size = min(1024, count - begin)
        stride = (size + 7) // 8
        for i in range(size):
            at = begin // 8 * bits + i % stride
            values.append(sum((data[at + q * stride] >> (i // stride) & 1) << q for q in range(bits)))
    return bytes(values)


def framed(records: list[bytes]) -> bytes:
    """Return a TFRecord file of these records."""
    parts = []
    for data in records:
        length = struct.pack("<Q", len(data))
        parts += [length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))]
    return b"".join(parts)


def frames(data: bytes, verify: bool = True) -> tuple[list[list[int]], tuple[str | None, int, int]]:
    """Return the ranges of the records in a TFRecord file, and ``(fault, end, needed)``."""
    ranges: list[list[int]] = []
    end = 0
    while end < len(data):
        if len(data) - end < 12:
            return ranges, ("incomplete", end, 16)
        (length,) = struct.unpack_from("<Q", data, end)
        if verify and struct.unpack_from("<I", data, end + 8)[0] != masked_crc32c(data[end : end + 8]):
            return ranges, ("length_crc", end, 16)
        needed = min(length + 16, 2**63 - 1)
        if len(data) - end < needed:
            return ranges, ("incomplete", end, needed)
        body = data[end + 12 : end + 12 + length]
        if verify and struct.unpack_from("<I", data, end + 12 + length)[0] != masked_crc32c(body):
            return ranges, ("data_crc", end, needed)
        ranges.append([end + 12, end + 12 + length])
        end += needed
    return ranges, (None, end, 0)


# ---- Examples -------------------------------------------------------------------------------------------------------

LISTS = {"bytes": 1, "float32": 2, "int64": 3, "int32": 3}


class Fault(Exception):
    """An error in a message; the one argument names its kind, as ExampleFault does."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the value of the varint at a position, and where it ends."""
    value = 0
    for i in range(10):
        if at + i == len(data):
            raise Fault("truncated")
        value |= (data[at + i] & 0x7F) << (7 * i)
        if data[at + i] < 0x80:
            return value % 2**64, at + i + 1
    raise Fault("varint")


def fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield ``(field number, wire type, value's bytes)`` for each field of a message."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        if tag >= 2**32 or tag >> 3 == 0:
            raise Fault("tag")
        begin = at
        if tag & 7 == 0:
            at = varint(data, at)[1]
        elif tag & 7 in (1, 5):
            at += 8 if tag & 7 == 1 else 4
            if at > len(data):
                raise Fault("truncated")
        elif tag & 7 == 2:
            size, begin = varint(data, at)
            at = begin + size
            if at > len(data):
                raise Fault("length")
        else:
            raise Fault("tag")
        yield tag >> 3, tag & 7, data[begin:at]


def features(message: bytes) -> dict[bytes, list[bytes]]:
    """Return the Feature messages of each name."""
    found: dict[bytes, list[bytes]] = {}
    for number, kind, value in fields(message):
        if (number, kind) == (1, 2):
            for entry_number, entry_kind, entry in fields(value):
                if (entry_number, entry_kind) == (1, 2):
                    name, feature = b"", b""
                    for part, part_kind, content in fields(entry):
                        if (part, part_kind) == (1, 2):
                            name = content
                        if (part, part_kind) == (2, 2):
                            feature = content
                    found.setdefault(name, []).append(feature)
    return found


def integers(run: bytes) -> list[int]:
    """Return packed varints as int64."""
    values, at = [], 0
    if run and run[-1] >= 0x80:
        raise Fault("truncated")
    while at < len(run):
        value, at = varint(run, at)
        values.append(value - 2**64 if value >= 2**63 else value)
    return values


def list_values(feature: bytes, dtype: str) -> list[Any] | None:
    """Return the values of a Feature; None if it has no list."""
    values: list[Any] | None = None
    for number, kind, content in fields(feature):
        if kind != 2 or number > 3:
            continue
        if number != LISTS[dtype]:
            raise Fault("kind")
        values = [] if values is None else values
        for part, part_kind, run in fields(content):
            if part != 1:
                continue
            if dtype == "bytes" and part_kind == 2:
                values.append(run)
            if dtype == "float32" and part_kind in (2, 5):
                if len(run) % 4:
                    raise Fault("floats")
                values += struct.unpack(f"<{len(run) // 4}f", run)
            if LISTS[dtype] == 3 and part_kind in (0, 2):
                values += integers(run)
    return values


def parse(message: bytes, columns: dict[str, Any]) -> dict[str, list[Any] | None]:
    """Return the values of each :class:`ExampleColumn` in one message; None for an absent one that is nullable."""
    found, row = features(message), {}
    for name, column in columns.items():
        given = found.get(name.encode(), [])
        # For a fixed number of values, empty Feature messages do not count.
        counted = given if column.size is None else [feature for feature in given if feature]
        feature = counted[-1] if counted else None
        values = None if feature is None else list_values(feature, column.dtype)
        if values is None:
            if column.size is not None and column.default is None and not column.nullable:
                raise Fault("absent")
            absent: list[Any] | None = None if column.nullable else []
            values = absent if column.default is None else list(column.default)
        elif column.size is not None and len(values) != column.size:
            raise Fault("count")
        if column.dtype == "int32" and any(not -(2**31) <= value < 2**31 for value in values or []):
            raise Fault("int32")
        row[name] = values
    return row


# ---- Messages of any form -------------------------------------------------------------------------------------------


def varint_bytes(value: int) -> bytes:
    """Return the shortest encoding of a value as a varint."""
    value %= 2**64
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, data: bytes) -> bytes:
    """Return a field that holds bytes."""
    return varint_bytes(number << 3 | 2) + varint_bytes(len(data)) + data


def list_of(dtype: str, values: list[Any], packed: bool = True) -> bytes:
    """Return a Feature with these values."""
    number = LISTS[dtype]
    if dtype == "bytes":
        content = b"".join(field(1, value) for value in values)
    elif dtype == "float32":
        one = [struct.pack("<f", value) for value in values]
        content = field(1, b"".join(one)) if packed else b"".join(b"\x0d" + value for value in one)
    else:
        one = [varint_bytes(value) for value in values]
        content = field(1, b"".join(one)) if packed else b"".join(b"\x08" + value for value in one)
    return field(number, content)


def entry(name: bytes, feature: bytes) -> bytes:
    """Return one entry of the map of features."""
    return field(1, field(1, name) + field(2, feature))


def example(entries: list[bytes]) -> bytes:
    """Return an Example message with these entries."""
    return field(1, b"".join(entries))
