"""Infer the features of a TFRecord file from its first records."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ._tfrecord_features import Feature, FixedLenFeature, VarLenFeature
from ._tfrecord_prebatched import ROW_LENGTHS

_DTYPES = {1: "bytes", 2: "float32", 3: "int64"}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class MalformedError(ValueError):
    """An error in the bytes of an Example, at byte ``offset``."""

    def __init__(self, offset: int, problem: str) -> None:
        super().__init__(problem)
        self.offset = offset


@dataclass
class Seen:
    """The dtypes and the numbers of values with which one feature has occurred."""

    dtypes: set[str] = field(default_factory=set)
    counts: list[int] = field(default_factory=list)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for i in range(10):
        if at + i >= end:
            break
        value |= (data[at + i] & 0x7F) << (7 * i)
        if data[at + i] < 0x80:
            return value, at + i + 1
    raise MalformedError(at, "the message ends within a varint, or it has more than 10 bytes")


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield ``(field number, wire type, begin, end)`` of each field's value in a protobuf message."""
    while at < end:
        tag_at = at
        tag, at = _varint(data, at, end)
        kind, size = tag & 7, {_FIXED64: 8, _FIXED32: 4}.get(tag & 7, 0)
        if kind == _VARINT:
            size = _varint(data, at, end)[1] - at
        elif kind == _BYTES:
            size, at = _varint(data, at, end)
        if tag >> 3 == 0 or kind not in (_VARINT, _FIXED64, _BYTES, _FIXED32):
            raise MalformedError(tag_at, "there is no field of an Example")
        if at + size > end:
            raise MalformedError(at, f"a value of {size} bytes goes beyond the end of its container")
        yield tag >> 3, kind, at, at + size
        at += size


def features_of(data: bytes) -> dict[str, tuple[str, int]]:
    """Return the dtype and the number of values of each feature of an Example; features without a list are left out."""
    found: dict[str, tuple[str, int]] = {}
    for number, kind, begin, end in _fields(data, 0, len(data)):
        if (number, kind) != (1, _BYTES):
            continue
        for entry, entry_kind, entry_begin, entry_end in _fields(data, begin, end):
            if (entry, entry_kind) == (1, _BYTES):
                name, of_it = _entry(data, entry_begin, entry_end)
                found.pop(name, None)
                if of_it is not None:
                    found[name] = of_it
    return found


def _entry(data: bytes, begin: int, end: int) -> tuple[str, tuple[str, int] | None]:
    name, of_it = "", None
    for number, kind, at, stop in _fields(data, begin, end):
        if (number, kind) == (1, _BYTES):
            name = _name(data, at, stop)
        elif (number, kind) == (2, _BYTES):
            of_it = None
            for field_number, field_kind, list_at, list_stop in _fields(data, at, stop):
                if field_number in _DTYPES and field_kind == _BYTES:
                    before = of_it[1] if of_it is not None else 0
                    of_it = (_DTYPES[field_number], before + _count(data, field_number, list_at, list_stop))
    return name, of_it


def _name(data: bytes, begin: int, end: int) -> str:
    try:
        return data[begin:end].decode()
    except UnicodeDecodeError as error:
        problem = f"the name of a feature must be UTF-8, got {data[begin:end][:40]!r}"
        raise MalformedError(begin, problem) from error


def _count(data: bytes, list_field: int, begin: int, end: int) -> int:
    count = 0
    for number, kind, at, stop in _fields(data, begin, end):
        if number != 1:
            continue
        if kind != _BYTES or list_field == 1:
            count += 1
        elif list_field == 2:
            count += (stop - at) // 4
        else:
            count += sum(byte < 0x80 for byte in data[at:stop])
    return count


def infer(records: list[dict[str, tuple[str, int]]]) -> dict[str, Feature]:
    """
    Return the features of records that hold one row each.

    Raises:
        ValueError: a feature that has values of different dtypes.
    """
    seen: dict[str, Seen] = {}
    for record in records:
        for name, (dtype, count) in record.items():
            of_it = seen.setdefault(name, Seen())
            of_it.dtypes.add(dtype)
            of_it.counts.append(count)
    return {name: _feature(name, of_it, len(records)) for name, of_it in sorted(seen.items())}


def _feature(name: str, seen: Seen, records: int) -> Feature:
    if len(seen.dtypes) > 1:
        raise ValueError(f"feature {name!r} has values of {' and of '.join(sorted(seen.dtypes))}")
    (dtype,) = seen.dtypes
    count = seen.counts[0]
    if count == 0 or any(other != count for other in seen.counts):
        return VarLenFeature(dtype)
    return FixedLenFeature(() if count == 1 else (count,), dtype, nullable=len(seen.counts) < records)


def infer_prebatched(record: dict[str, tuple[str, int]]) -> dict[str, Feature]:
    """
    Return the features of a record that holds a batch.

    Its number of rows is its number of row lengths or, without them, the greatest common divisor of all counts.
    """
    lists = {name.removesuffix(ROW_LENGTHS) for name in record if name.endswith(ROW_LENGTHS)} & set(record)
    lengths = [record[name + ROW_LENGTHS][1] for name in lists]
    plain = {
        name: of_it
        for name, of_it in record.items()
        if name not in lists and name.removesuffix(ROW_LENGTHS) not in lists
    }
    rows = lengths[0] if lengths else math.gcd(*(count for _, count in plain.values()))
    features: dict[str, Feature] = {name: VarLenFeature(record[name][0]) for name in lists}
    for name, (dtype, count) in plain.items():
        k = count // rows if rows else 1
        features[name] = FixedLenFeature(() if k == 1 else (k,), dtype)
    return dict(sorted(features.items()))
