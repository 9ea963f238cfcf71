"""Reads MovieLens rating files in their original layouts, 20 million lines in seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

# Bytes parsed at once.
_CHUNK = 1 << 23
# No MovieLens release has larger ids; a larger number is a garbled one.
_MAX_ID = 10_000_000
_MAX_DIGITS = 12


@dataclass(frozen=True)
class Layout:
    """How a line looks: fields user, item, rating, timestamp between separators."""

    separator: bytes
    header: bytes | None
    example: str
    fractional: bool  # whether the original file writes ratings as 3.5

    def pattern(self) -> re.Pattern[bytes]:
        """A whole line without its end."""
        sep = re.escape(self.separator)
        return re.compile(rb"(\d{1,12})%b(\d{1,12})%b\d{1,2}(?:\.\d{1,3})?%b(\d{1,12})" % (sep, sep, sep))

    def breaks(self) -> bytes:
        """The non-digits of a regular line, in order."""
        point = b"." if self.fractional else b""
        return self.separator * 2 + point + self.separator + b"\n"


TAB_LAYOUT = Layout(b"\t", None, "user<TAB>item<TAB>rating<TAB>timestamp", fractional=False)
COLON_LAYOUT = Layout(b"::", None, "user::item::rating::timestamp", fractional=False)
CSV_LAYOUT = Layout(b",", b"userId,movieId,rating,timestamp", "user,item,rating,timestamp", fractional=True)


def read_ratings(stream: BinaryIO, name: str, layout: Layout) -> np.ndarray:
    r"""
    Read user, item and timestamp of every line; the rating is checked and dropped.

    Args:
        stream: the file, opened for bytes.
        name: what errors call it.
        layout: of its lines.

    Returns:
        int64 ``[3, N]``: users, items (as written, from 1 up) and Unix times in seconds.

    Raises:
        ValueError: if a line is not as expected, with its number and text.

    Example:
        >>> import io
        >>> read_ratings(io.BytesIO(b"196\t242\t3\t881250949\n"), "u.data", TAB_LAYOUT)[:, 0].tolist()
        [196, 242, 881250949]
    """
    line_number = 1
    if layout.header is not None:
        header = stream.readline().rstrip(b"\r\n")
        if header != layout.header:
            raise _bad_line(name, 1, header, f"the header {layout.header.decode()}")
        line_number = 2
    parts = []
    for chunk in _whole_lines(stream):
        parsed = _parse_regular(chunk, layout)
        if parsed is None:
            parsed = _parse_lines(chunk, layout, name, line_number)
        parts.append(parsed)
        line_number += parsed.shape[1]
    if not parts:
        raise ValueError(f"{name}, line {line_number}: the file ends here, expected lines {layout.example}")
    columns = np.concatenate(parts, axis=1)
    # A file cut inside its last timestamp still matches: that number is shorter than its neighbour's.
    if not chunk.endswith(b"\n") and len(str(columns[2, -1])) < len(str(columns[2, max(0, columns.shape[1] - 2)])):
        raise _bad_line(name, line_number - 1, chunk, f"{layout.example} and the end of the line")
    return columns


def _whole_lines(stream: BinaryIO) -> Iterator[bytes]:
    """The stream in pieces of about _CHUNK bytes that end where a line ends (or the file does)."""
    rest = b""
    while block := stream.read(_CHUNK):
        block = rest + block
        end = block.rfind(b"\n") + 1
        rest = block[end:]
        if end:
            yield block[:end].replace(b"\r\n", b"\n")
    if rest:
        yield rest


def _parse_regular(chunk: bytes, layout: Layout) -> np.ndarray | None:
    """The chunk's fields if every line is exactly as in the original files, else None."""
    data = np.frombuffer(chunk, dtype=np.uint8)
    digits = data - np.uint8(ord("0"))  # wraps: other bytes become 10 or more
    ends: np.ndarray = np.flatnonzero(digits >= 10)
    breaks = np.frombuffer(layout.breaks(), dtype=np.uint8)
    if len(ends) % len(breaks) or data[-1] != ord("\n"):
        return None
    ends = ends.reshape((-1, len(breaks)))
    if not (data[ends] == breaks).all():
        return None
    # Positions of the breaks around user, item and timestamp; the separator may have two bytes.
    width = len(layout.separator)
    line_start = np.concatenate([[-1], ends[:-1, -1]])
    fields = ((line_start, ends[:, 0]), (ends[:, width - 1], ends[:, width]), (ends[:, -2], ends[:, -1]))
    lengths = np.diff(ends, axis=1)
    for byte in range(1, width):  # nothing may stand between the two bytes of a separator
        if (lengths[:, [byte - 1, byte - 1 + width, len(breaks) - 2 - byte]] != 1).any():
            return None
    if (lengths[:, 2 * width - 1 : len(breaks) - 1 - width] != 2).any():  # the rating: one digit before each break
        return None
    columns = [column for begin, end in fields if (column := _to_integers(digits, begin, end)) is not None]
    if len(columns) < len(fields):
        return None
    values = np.stack(columns)
    return values if _ids_plausible(values) else None


def _to_integers(digits: np.ndarray, before: np.ndarray, end: np.ndarray) -> np.ndarray | None:
    """The decimal numbers strictly between ``before`` and ``end``; None if one is empty or too long."""
    length = end - before - 1
    longest = int(length.max())
    if length.min() < 1 or longest > _MAX_DIGITS:
        return None
    value = np.zeros(len(end), dtype=np.int64)
    power = 1
    for place in range(longest):
        digit = digits[np.maximum(end - 1 - place, 0)].astype(np.int64)
        value += np.where(place < length, digit, 0) * power
        power *= 10
    return value


def _ids_plausible(values: np.ndarray) -> bool:
    """Whether users and items are numbered from 1 to _MAX_ID."""
    return bool(values[:2].min() >= 1 and values[:2].max() <= _MAX_ID)


def _parse_lines(chunk: bytes, layout: Layout, name: str, line_number: int) -> np.ndarray:
    """The chunk's fields line by line: takes every valid spelling, and names the first line that has none."""
    pattern = layout.pattern()
    rows = []
    for number, line in enumerate(chunk.removesuffix(b"\n").split(b"\n"), start=line_number):
        match = pattern.fullmatch(line)
        if match is None:
            raise _bad_line(name, number, line, layout.example)
        row = [int(field) for field in match.groups()]
        if not (1 <= row[0] <= _MAX_ID and 1 <= row[1] <= _MAX_ID):
            raise _bad_line(name, number, line, f"{layout.example} with ids from 1 to {_MAX_ID:,}")
        rows.append(row)
    return np.array(rows, dtype=np.int64).T


def _bad_line(name: str, number: int, line: bytes, expected: str) -> ValueError:
    text = line[:60].decode("utf-8", "backslashreplace")
    return ValueError(f"{name}, line {number:,}: expected {expected}, got {text!r}")
