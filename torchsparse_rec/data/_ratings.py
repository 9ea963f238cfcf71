"""Read MovieLens rating files in their original layouts, 20 million lines in seconds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from ._text import whole_lines
from .errors import DataError

# The number of bytes parsed at once.
_CHUNK = 1 << 23
# No MovieLens release has larger ids; a larger number is a garbled one.
_MAX_ID = 10_000_000
_MAX_DIGITS = 12


@dataclass(frozen=True)
class LineLayout:
    """The layout of a line: the fields user, item, rating and timestamp between separators."""

    separator: bytes
    header: bytes | None
    example: str
    fractional: bool  # whether the original file writes ratings as 3.5

    def pattern(self) -> re.Pattern[bytes]:
        """Return the regular expression of a whole line without its end."""
        sep = re.escape(self.separator)
        return re.compile(rb"(\d{1,12})%b(\d{1,12})%b(\d{1,2}(?:\.\d{1,3})?)%b(\d{1,12})" % (sep, sep, sep))

    def breaks(self) -> bytes:
        """Return the bytes of a regular line that are no digits, in order."""
        point = b"." if self.fractional else b""
        return self.separator * 2 + point + self.separator + b"\n"


TAB_LAYOUT = LineLayout(b"\t", None, "user<TAB>item<TAB>rating<TAB>timestamp", fractional=False)
COLON_LAYOUT = LineLayout(b"::", None, "user::item::rating::timestamp", fractional=False)
CSV_LAYOUT = LineLayout(b",", b"userId,movieId,rating,timestamp", "user,item,rating,timestamp", fractional=True)


def read_ratings(stream: BinaryIO, name: str, layout: LineLayout) -> np.ndarray:
    r"""
    Read user, item and timestamp of every line of a rating file; the rating is checked and dropped.

    Args:
        stream: the file, opened for bytes.
        name: the file's name in error messages.
        layout: the layout of its lines.

    Returns:
        int64 ``[3, N]``: users, items (as written, from 1 up) and Unix times in seconds.

    Raises:
        DataError: a line that is not of this layout, with its number and text.

    Example:
        >>> import io
        >>> read_ratings(io.BytesIO(b"196\t242\t3\t881250949\n"), "u.data", TAB_LAYOUT)[:, 0].tolist()
        [196, 242, 881250949]
    """
    return np.concatenate(list(rating_blocks(stream, name, layout)), axis=1)[:3]


def rating_blocks(stream: BinaryIO, name: str, layout: LineLayout) -> Iterator[np.ndarray]:
    """
    Yield the fields of a rating file's lines, in blocks of some 8 MiB of text.

    Args:
        stream, name, layout: the arguments of :func:`read_ratings`.

    Yields:
        int64 ``[4, N]``: users, items, Unix times in seconds, and thousandths of ratings.

    Raises:
        DataError: a line that is not of this layout or too long, a file without lines, or a stream that cannot be read.
    """
    columns: np.ndarray | None = None
    times = _Times()
    line = 1
    for line, chunk in whole_lines(stream.read, name, _CHUNK):
        if line == 1 and layout.header is not None:
            header, _, chunk = chunk.partition(b"\n")
            if header.rstrip(b"\r") != layout.header:
                raise _bad_line(name, 1, header, f"the header {layout.header.decode()}")
            line = 2
        # A file cut between the two bytes of its last line's end still has that line whole.
        chunk = chunk[:-1] + b"\n" if chunk.endswith(b"\r") else chunk.replace(b"\r\n", b"\n")
        if not chunk:
            continue
        columns = _parse_regular(chunk, layout)
        if columns is None:
            columns = _parse_lines(chunk, layout, name, line)
        if not chunk.endswith(b"\n") and times.is_cut(columns[2]):
            last = chunk[chunk.rfind(b"\n") + 1 :]
            number = line + columns.shape[1] - 1
            raise _bad_line(name, number, last, f"{layout.example} and the end of the line")
        times.add(columns[2])
        yield columns
    if columns is None:
        raise DataError(name, line, f"the file ends here, expected lines {layout.example}", unit="line")


class _Times:
    """
    The range of a file's timestamps, to detect a file that was cut within its last one and still ends in a valid line.

    The last timestamp counts as cut if two things hold. It is below all others, and some longer number that begins with
    its digits lies between half the least and twice the greatest of them.
    """

    def __init__(self) -> None:
        self._least, self._most = 0, 0

    def add(self, times: np.ndarray) -> None:
        """Add the times of some lines to the range."""
        if times.size:
            least, most = int(times.min()), int(times.max())
            self._least = min(self._least, least) if self._most else least
            self._most = max(self._most, most)

    def is_cut(self, times: np.ndarray) -> bool:
        """Say whether the last of ``times`` is only the first digits of one; the others are added to the range."""
        self.add(times[:-1])
        last = int(times[-1])
        if last >= self._least:
            return False
        powers = (10**digits for digits in range(1, _MAX_DIGITS))
        return any((last + 1) * power > self._least // 2 and last * power <= 2 * self._most for power in powers)


def _parse_regular(chunk: bytes, layout: LineLayout) -> np.ndarray | None:
    """Return the chunk's fields ``[4, N]`` if every line is exactly as in the original files, else None."""
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
    rating = digits[ends[:, 2 * width] - 1].astype(np.int64) * 1000
    if layout.fractional:
        rating += digits[ends[:, 2 * width + 1] - 1].astype(np.int64) * 100
    values = np.stack([*columns, rating])
    return values if _ids_plausible(values) else None


def _to_integers(digits: np.ndarray, before: np.ndarray, end: np.ndarray) -> np.ndarray | None:
    """Return the decimal numbers strictly between ``before`` and ``end``, or None if one is empty or too long."""
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
    """Say whether all ids of users and items are in [1, _MAX_ID]."""
    return bool(values[:2].min() >= 1 and values[:2].max() <= _MAX_ID)


def _parse_lines(chunk: bytes, layout: LineLayout, name: str, line_number: int) -> np.ndarray:
    """Parse a chunk line by line, in any valid spelling; raise ``DataError`` for the first malformed line."""
    pattern = layout.pattern()
    rows = []
    for number, line in enumerate(chunk.removesuffix(b"\n").split(b"\n"), start=line_number):
        match = pattern.fullmatch(line)
        if match is None:
            raise _bad_line(name, number, line, layout.example)
        user, item, rating, time = match.groups()
        row = [int(user), int(item), int(time), round(1000 * float(rating))]
        if not (1 <= row[0] <= _MAX_ID and 1 <= row[1] <= _MAX_ID):
            raise _bad_line(name, number, line, f"{layout.example} with ids from 1 to {_MAX_ID:,}")
        rows.append(row)
    return np.array(rows, dtype=np.int64).T


def _bad_line(name: str, number: int, line: bytes, expected: str) -> DataError:
    text = line[:60].decode("utf-8", "backslashreplace")
    return DataError(name, number, f"expected {expected}, got {text!r}", unit="line")
