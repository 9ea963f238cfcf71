"""Text formats: blocks of whole lines from files that may be compressed, parsed by pyarrow, and the line at fault."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from ._arrow import arrow
from ._files import DataError, PathLike

#: Bytes that are parsed at once.
BLOCK = 1 << 24
#: What is longer is no line of text.
LONGEST_LINE = 1 << 26

#: Bytes that pyarrow parses at once, each part by another thread; a line must fit.
_PART = 1 << 20

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


def line_error(path: PathLike, line: int, problem: str) -> DataError:
    """The error for a line, counted from 1."""
    return DataError(path, line, problem, unit="line")


def plain_suffix(path: PathLike) -> str:
    """The suffix that tells the format, without that of a compression."""
    name = os.fspath(path)
    stem, suffix = os.path.splitext(name)
    return os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix


def open_text(path: PathLike) -> Any:
    """A text file for reading bytes; ``.gz``, ``.bz2`` and ``.zst`` are decompressed on the way."""
    pa = arrow("a text format")
    kind = COMPRESSIONS.get(os.path.splitext(os.fspath(path))[1])
    return pa.input_stream(os.fspath(path), compression=kind)


def write_text(path: PathLike, file: Any) -> Any:
    """A stream into an open file, compressed if the final name says so; closing it does not close the file."""
    pa = arrow("a text format")
    kind = COMPRESSIONS.get(os.path.splitext(os.fspath(path))[1])
    return pa.output_stream(_Open(file), compression=kind)


class _Open:
    """A file that only its owner closes."""

    closed = False

    def __init__(self, file: Any) -> None:
        self.write, self.flush, self.tell = file.write, file.flush, file.tell

    def close(self) -> None:
        """Leave that to the owner."""


def whole_lines(read: Callable[[int], Any], path: PathLike, size: int) -> Iterator[tuple[int, bytes]]:
    """
    Text in pieces of about ``size`` bytes that end where a line ends, each with the number of its first line.

    The last line may have no end. Line ends are as in the file. No more is held than a piece and a line.

    Args:
        read: gives the next bytes, at most so many.
        path: what errors call it.
        size: of a piece.

    Raises:
        DataError: if it cannot be read or decompressed, or a line is longer than :data:`LONGEST_LINE`.
    """
    line, rest = 1, b""
    while True:
        try:
            data = read(size)
        except (OSError, ValueError) as error:
            raise line_error(path, line, f"the file is damaged from here on: {error}") from error
        if not len(data):
            break
        block = b"".join([rest, data])
        end = block.rfind(b"\n") + 1
        rest = block[end:]
        if end:
            yield line, block[:end]
            line += block.count(b"\n", 0, end)
        if len(rest) > LONGEST_LINE:
            raise line_error(path, line, f"a line has more than {LONGEST_LINE} bytes: no text file")
    if rest:
        yield line, rest


def blocks(path: PathLike, size: int = BLOCK) -> Iterator[tuple[int, bytes]]:
    """The :func:`whole_lines` of a file; the last gets an end if it has none."""
    with open_text(path) as stream:
        # Not read(), which leaks its memory where decompression fails.
        for line, block in whole_lines(stream.read_buffer, path, size):
            yield line, block if block.endswith(b"\n") else block + b"\n"


def reader_of(block: bytes) -> Any:
    """
    A block for pyarrow's parsers to read, copied into memory that pyarrow owns.

    Its threads may be the last to let go of what they parse, which for a Python object takes the interpreter's lock;
    where the interpreter ends in that moment, the process would abort.
    """
    pa = arrow("a text format")
    memory = pa.allocate_buffer(len(block))
    memoryview(memory).cast("B")[:] = block
    return pa.BufferReader(memory)


def part_size(block: bytes) -> int:
    """What pyarrow's option ``block_size`` must be, for the longest line to fit."""
    size, start = _PART, 0
    while start < len(block):
        end = block.rfind(b"\n", start, start + _PART) + 1
        if not end:
            end = block.index(b"\n", start) + 1
            size = max(size, end - start)
        start = end
    return size


def parse_block(parse: Callable[[bytes], Any], path: PathLike, line: int, block: bytes) -> Any:
    """
    What ``parse`` makes of a block; if it raises, the block is halved until the first line at fault is left.

    Raises:
        DataError: with the number of that line and what pyarrow says of it.
    """
    pa = arrow("a text format")
    try:
        return parse(block)
    except (pa.ArrowException, ValueError, UnicodeError) as error:
        problem = error
    lines = [text + b"\n" for text in block[:-1].split(b"\n")]
    while len(lines) > 1:
        half = len(lines) // 2
        try:
            parse(b"".join(lines[:half]))
        except (pa.ArrowException, ValueError, UnicodeError) as error:
            problem, lines = error, lines[:half]
        else:
            lines, line = lines[half:], line + half
            try:
                parse(b"".join(lines))
            except (pa.ArrowException, ValueError, UnicodeError) as error:
                problem = error
    shown = lines[0].rstrip(b"\r\n")[:60].decode("utf-8", "backslashreplace")
    raise line_error(path, line, f"{str(problem).splitlines()[0]}, got {shown!r}") from None
