"""Text formats: read blocks of whole lines from files that may be compressed, and find the line that is malformed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..files import PathLike
from ._arrow import arrow
from .errors import DataError

#: The number of bytes read at once.
BLOCK = 1 << 24
#: The most bytes of a line: a file with longer ones is no text file.
LONGEST_LINE = 1 << 26

#: The bytes of a part; each of pyarrow's threads parses one part at a time, and a line must fit into one.
_PART = 1 << 20

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}

#: The first bytes of files that are no text in ASCII or UTF-8, and the names of their formats.
_OTHERS = {
    b"\x1f\x8b": "compressed by gzip: its name must end in .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: its name must end in .zst",
    b"BZh": "compressed by bzip2: its name must end in .bz2",
    b"\xfd7zXZ\0": "compressed by xz: decompress it first",
    b"PK\3\4": "a zip archive: unpack it first",
    b"\xff\xfe": "text in UTF-16 or UTF-32: write it as UTF-8 first",
    b"\xfe\xff": "text in UTF-16: write it as UTF-8 first",
    b"\0\0\xfe\xff": "text in UTF-32: write it as UTF-8 first",
    b"PAR1": "a Parquet file: read_parquet reads it",
    b"ARROW1\0\0": "an Arrow file: if write_prebatched wrote it, read_prebatched reads it",
}


def line_error(path: PathLike, line: int, problem: str) -> DataError:
    """Return the error for a malformed line; lines are counted from 1."""
    return DataError(path, line, problem, unit="line")


def plain_suffix(path: PathLike) -> str:
    """Return the suffix of a file's name that names the format, without a compression's suffix."""
    name = os.fspath(path)
    stem, suffix = os.path.splitext(name)
    return os.path.splitext(stem)[1] if suffix in COMPRESSIONS else suffix


def open_text(path: PathLike) -> Any:
    """Open a text file for reading bytes; ``.gz``, ``.bz2`` and ``.zst`` are decompressed in reading."""
    pa = arrow("a text format")
    kind = COMPRESSIONS.get(os.path.splitext(os.fspath(path))[1])
    return pa.input_stream(os.fspath(path), compression=kind)


def check_texts(paths: Sequence[PathLike]) -> None:
    """Raise ``OSError`` unless text files can be opened: before anything of them is read."""
    for path in paths:
        open_text(path).close()


def write_text(path: PathLike, file: Any) -> Any:
    """Return a stream that writes to an open file, compressed by ``path``'s suffix; closing it keeps the file open."""
    pa = arrow("a text format")
    kind = COMPRESSIONS.get(os.path.splitext(os.fspath(path))[1])
    return pa.output_stream(_Open(file), compression=kind)


class _Open:
    """An open file whose ``close()`` does nothing, since only its owner closes it."""

    closed = False

    def __init__(self, file: Any) -> None:
        self.write, self.flush, self.tell = file.write, file.flush, file.tell

    def close(self) -> None:
        """Do nothing: the owner closes the file."""


def whole_lines(read: Callable[[int], Any], path: PathLike, size: int) -> Iterator[tuple[int, bytes]]:
    """
    Yield text in blocks of about ``size`` bytes that end where a line ends, each with the number of its first line.

    The last line may have no end. Line ends are as in the file. No more than a block and a line are held in memory.

    Args:
        read: a function that takes a number, and returns the next bytes of the file, at most that number.
        path: the file's name in error messages.
        size: the bytes of a block.

    Raises:
        DataError: the file cannot be read or decompressed, or a line is longer than :data:`LONGEST_LINE`.
    """
    line, rest, begun = 1, b"", False
    while True:
        try:
            data = read(size)
        except (OSError, ValueError) as error:
            kind = COMPRESSIONS.get(os.path.splitext(os.fspath(path))[1])
            problem = "is damaged from here on" if begun or kind is None else f"is damaged, or not compressed by {kind}"
            raise line_error(path, line, f"the file {problem}: {error}") from error
        if not len(data):
            break
        if not begun:
            _check_text(path, bytes(data[:200]))
        begun = True
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


def _check_text(path: PathLike, first: bytes) -> None:
    """Raise ``DataError`` if a file begins like a compressed file, or like text that is not UTF-8."""
    kind = next((kind for magic, kind in _OTHERS.items() if first.startswith(magic)), None)
    if first.startswith(b"BZh") and first[4:10] != b"1AY&SY":  # as of a column named BZh
        kind = None
    if kind is None and first[:2].count(b"\0") == 1:
        kind = "text in UTF-16: write it as UTF-8 first"
    if kind is not None:
        raise line_error(path, 1, f"the file is {kind}")


def blocks(path: PathLike, size: int = BLOCK) -> Iterator[tuple[int, bytes]]:
    """Yield the :func:`whole_lines` of a file; if the last line has no end, one is added."""
    with open_text(path) as stream:
        # Not read(), which leaks its memory where decompression fails.
        for line, block in whole_lines(stream.read_buffer, path, size):
            yield line, block if block.endswith(b"\n") else block + b"\n"


def reader_of(block: bytes) -> Any:
    """
    Copy a block into memory that pyarrow owns, and return a reader of it for pyarrow's parsers.

    pyarrow's threads may be the last to release the memory that they parse. Releasing a Python object takes the
    interpreter's lock, and if the interpreter ends in that moment, the process aborts.
    """
    pa = arrow("a text format")
    memory = pa.allocate_buffer(len(block))
    memoryview(memory).cast("B")[:] = block
    return pa.BufferReader(memory)


def part_size(block: bytes) -> int:
    """Return the ``block_size`` that pyarrow's parsers need for the block's longest line to fit."""
    size, start = _PART, 0
    while start < len(block):
        end = block.rfind(b"\n", start, start + _PART) + 1
        if not end:
            end = block.index(b"\n", start) + 1
            size = max(size, end - start)
        start = end
    return size


def with_names(error: Exception, names: Sequence[str]) -> str:
    """Return the text of a parser's error with the name of the column for which pyarrow gives a number."""
    return re.sub(r"In CSV column #(\d+)", lambda found: f"column {names[int(found[1])]!r}", str(error))


def parse_block(parse: Callable[[bytes], Any], path: PathLike, line: int, block: bytes) -> Any:
    """
    Return ``parse(block)``; if it raises, halve the block until only the first malformed line is left.

    Raises:
        DataError: a malformed line, with its number and the parser's message.
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
