"""CSV files; lists are text with bars between their items."""

from __future__ import annotations

import csv as python_csv
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arrow_memory import decoded
from ..files import PathLike, whole_file
from ._arrow import arrow
from ._lists import BAR, checked_split, join_items, split_text
from ._rows import BATCH_SIZE, check_names, check_reader, path_list, rebatched, repeated
from ._text import blocks, check_texts, line_error, parse_block, part_size, reader_of, with_names, write_text
from ._types import arrow_types, is_number, is_text, leaf, way_to_numbers

if TYPE_CHECKING:
    import pyarrow

#: The most names of a header; pyarrow takes some 10 KB for each column.
MOST_COLUMNS = 1 << 18
# The most names of a header that an error shows.
_SHOWN = 100
# Fields that pyarrow takes for numbers, but that are text: 007, 0x1F. And the one integer that only a float holds.
_ODD, _MINUS_ZERO = r"^[ \t]*[+-]?0[0-9xX]", r"^[ \t]*-0[ \t]*$"
_WHOLE = r"^[ \t]*[+-]?[0-9]+(\.0*)?[ \t]*$"
# What stands at the beginning of quoted fields while types are inferred, so that none is taken for a number.
_MARK = "\x01"


def read_csv(
    paths: PathLike | Sequence[PathLike],
    *,
    batch_size: int = BATCH_SIZE,
    columns: Sequence[str] | None = None,
    types: Mapping[str, pyarrow.DataType | str] | None = None,
    delimiter: str = ",",
    names: Sequence[str] | None = None,
    null_values: Sequence[str] = (),
    split: Mapping[str, str] | None = None,
) -> Iterator[pyarrow.RecordBatch]:
    r"""
    Read CSV files.

    An empty field is a null, ``""`` an empty string. Types that are not given are inferred from the first 16 MiB:
    int64, float64, booleans or strings. A later value that does not fit its column's type is an error. A column with a
    quoted value, or with one such as ``007`` or ``0x1F``, holds strings. A quoted value must not hold a line end. An
    empty line is skipped, except in a file of one column, where it is a null.

    Args:
        paths: a file, or several with the same columns, in any order; ``.gz``, ``.bz2`` and ``.zst`` are decompressed
            in reading.
        batch_size: rows of a batch; the last may have fewer. Default 65,536.
        columns: the names of the columns to yield, in this order. Default None: all.
        types: a mapping from column names to Arrow's types, or their names: ``"float32"``, ``"int64[]"`` for lists,
            ``"string[3]"`` for lists of three. Lists of numbers or strings are read from text such as ``3|1|4``; an
            empty string is an empty list.
        delimiter: one ASCII character. Default ``","``.
        names: the names of the columns of files that have no header. Default None: the first line is the header.
        null_values: fields without quotes that are nulls besides empty ones, such as ``["NA", "\N"]``.
        split: a mapping from columns of lists to the text between their items, instead of ``|``. A column without a
            type becomes lists of strings.

    Yields:
        ``pyarrow.RecordBatch``.

    Raises:
        ImportError: without pyarrow.
        ValueError: a delimiter of several characters, a name of no type, names that are there twice, a column that
            ``names`` lacks, a null value that is no text, or ``split`` of a column whose type is no list.
        DataError: a malformed line, with its number; a line of more than 64 MiB; a header of more than 262,144 names.
            Also a quote that is not closed on its line, an unknown column, and a file with other columns than the
            first. Also a number beyond the range of its float type. In a column without a given type: an integer beyond
            int64, one that float64 would round, or a late ``007`` or ``0x1F``.
        OSError: a file that cannot be opened.

    Example:
        >>> import pyarrow as pa, tempfile
        >>> path = f"{tempfile.mkdtemp()}/train.csv"
        >>> with open(path, "w") as file:
        ...     _ = file.write('id,price,seen\n7,0.5,3|1|4\n8,,""\n')
        >>> next(read_csv(path, types={"seen": pa.list_(pa.int64())})).to_pylist()
        [{'id': 7, 'price': 0.5, 'seen': [3, 1, 4]}, {'id': 8, 'price': None, 'seen': []}]
    """
    arrow("read_csv")
    files = path_list(paths)
    check_reader("read_csv", files, batch_size, columns)
    _check_delimiter("read_csv", delimiter)
    if names is not None and (isinstance(names, str) or not names or repeated(names) is not None):
        raise ValueError(f"read_csv: names must be distinct names, at least one, got {names!r}")
    if isinstance(null_values, str) or not all(isinstance(text, str) for text in null_values):
        raise ValueError(f"read_csv: null_values must be texts in a list, got {null_values!r}")
    check_texts(files)
    kinds, separators = arrow_types("read_csv: types", types), checked_split("read_csv", split)
    reader = _Reader(kinds, columns, delimiter, names, ["", *null_values], separators)
    return rebatched((batch for path in files for batch in reader.read(path)), batch_size)


def _check_delimiter(function: str, delimiter: str) -> None:
    if len(delimiter) != 1 or delimiter in '\r\n"' or not delimiter.isascii():
        raise ValueError(f"{function}: delimiter must be one ASCII character, got {delimiter!r}")


class _Reader:
    """Reads files in order; the first file's columns and types hold for all."""

    def __init__(
        self,
        types: dict[str, Any],
        columns: Sequence[str] | None,
        delimiter: str,
        names: Sequence[str] | None,
        nulls: list[str],
        split: dict[str, str],
    ) -> None:
        from pyarrow import csv

        self.pa, self.csv = arrow("read_csv"), csv
        self.types = {**{name: self.pa.list_(self.pa.string()) for name in split}, **types}
        for name in split:
            if self.types[name] == leaf(self.types[name]):
                raise ValueError(f"read_csv: column {name!r} of split must be lists, got types of {self.types[name]}")
        for name in [*(columns or ()), *self.types]:
            if names is not None and name not in names:
                raise ValueError(f"read_csv: names must have every column, got none named {name!r}: {list(names)}")
        self.columns, self.delimiter, self.names, self.nulls, self.split = columns, delimiter, names, nulls, split
        self.first: tuple[PathLike, list[str]] | None = None
        # The columns whose types are inferred and not strings; None before they are.
        self.inferred: set[str] | None = None

    def read(self, path: PathLike) -> Iterator[Any]:
        names = [] if self.names is None else self._known(path, list(self.names))
        for line, block in blocks(path):
            if line == 1 and self.names is not None:
                block = block.removeprefix(BOM_UTF8)
            elif line == 1:
                end = block.index(b"\n") + 1
                names = self._header(path, block[:end])
                line, block = 2, block[end:]
            if self.inferred is None and block:
                self._find_types(path, line, block, names)
            if block:
                yield from parse_block(partial(self._table, names), path, line, block).to_batches()
        if not names:
            raise line_error(path, 1, "the file is empty, expected a header")

    def _header(self, path: PathLike, line: bytes) -> list[str]:
        count = line.count(self.delimiter.encode()) + 1
        if count > MOST_COLUMNS:
            raise line_error(path, 1, f"expected a header of at most {MOST_COLUMNS:,} names, got {count:,}")
        try:
            (names,) = python_csv.reader(
                [line.decode("utf-8-sig").rstrip("\r\n")], delimiter=self.delimiter, strict=True
            )
        except (UnicodeDecodeError, ValueError, python_csv.Error) as error:
            raise line_error(path, 1, f"expected a header of names: {error}") from None
        twice = repeated(names)
        if twice is not None:
            raise line_error(path, 1, f"column {twice!r} is there twice")
        return self._known(path, names)

    def _known(self, path: PathLike, names: list[str]) -> list[str]:
        """Return the names of a file's columns, which must be those of the first file."""
        there = set(names)
        if self.first is None:
            for name in [*(self.columns or ()), *self.types]:
                if name not in there:
                    shown = ", ".join([*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])
                    raise line_error(path, 1, f"column {name!r} is missing: the header has {shown}")
            self.first = (path, names)
        if there != set(self.first[1]):
            (name, *_) = sorted(there ^ set(self.first[1]))
            problem = "is not in" if name in there else "is missing, unlike in"
            raise line_error(path, 1, f"column {name!r} {problem} {self.first[0]}")
        return names

    def _find_types(self, path: PathLike, line: int, block: bytes, names: list[str]) -> None:
        """Set the types of the columns that have none yet, by inference from a block."""
        found = parse_block(partial(self._infer, names), path, line, block)
        self.types.update(found)
        self.inferred = {name for name, kind in found.items() if kind != self.pa.string()}

    def _infer(self, names: list[str], block: bytes) -> dict[str, Any]:
        """Return the types of a block's columns that have none yet: strings, unless all fields are plain numbers."""
        pa, matches = self.pa, self.pa.compute.match_substring_regex
        table = self._parse(names, _marked(block, self.delimiter), dict.fromkeys(self.types, pa.binary()))
        kinds = {field.name: field.type for field in table.schema if field.name not in self.types}
        kinds = {name: kind if is_number(kind) else pa.string() for name, kind in kinds.items()}
        numbers = [name for name, kind in kinds.items() if kind != pa.string()]
        if numbers and _may_be_odd(block, self.delimiter):
            for name, text in self._texts(names, block, numbers).items():
                if pa.compute.any(matches(text, _ODD)).as_py():
                    kinds[name] = pa.string()
                elif pa.compute.any(matches(text, _MINUS_ZERO)).as_py():
                    kinds[name] = pa.float64()
        return kinds

    def _texts(self, names: list[str], block: bytes, chosen: list[str]) -> dict[str, Any]:
        """Return some columns of a block as text."""
        table = self._parse(names, block, dict.fromkeys(chosen, self.pa.string()), chosen)
        return {name: table.column(name) for name in chosen}

    def _check_numbers(self, names: list[str], block: bytes, table: Any, chosen: Sequence[str]) -> None:
        """Raise ``ValueError`` for a number that its column's type would change in more than its last digits."""
        inferred = self.inferred or set()
        odd: Collection[str] = inferred if inferred and _may_be_odd(block, self.delimiter) else ()
        suspects = [name for name in chosen if name in odd or self._is_large(table.column(name), name in inferred)]
        if suspects:
            for name, text in self._texts(names, block, suspects).items():
                if name in inferred:
                    self._check_inferred(name, text, table.column(name))
                check_range(name, text, table.column(name))

    def _is_large(self, column: Any, inferred: bool) -> bool:
        """Say whether a column has floats that integers may have been rounded to, or that are infinite."""
        compute, limit = self.pa.compute, 2.0**53 if inferred else float("inf")
        return (
            self.pa.types.is_floating(column.type)
            and compute.any(compute.greater_equal(compute.abs(column), limit)).as_py() is True
        )

    def _check_inferred(self, name: str, text: Any, column: Any) -> None:
        """Raise ``ValueError`` for a field that the inferred type of its column turns into another number."""
        compute, floats = self.pa.compute, self.pa.types.is_floating(column.type)
        found = text.filter(compute.match_substring_regex(text, _ODD if floats else f"{_ODD}|{_MINUS_ZERO}"))
        if len(found):
            raise ValueError(
                f"column {name!r} has {found[0]}, and holds {column.type} in the lines before: {_say(name, 'string')}"
            )
        if not floats:
            return
        large = compute.greater_equal(compute.abs(column), 2.0**53)
        large = compute.and_(large, compute.match_substring_regex(text, _WHOLE))
        for given, value in zip(text.filter(large).to_pylist(), column.filter(large).to_pylist(), strict=True):
            whole = Decimal(given.strip(" \t"))
            if "." not in given and not -(2**63) <= whole < 2**63:
                kind = "uint64" if 0 <= whole < 2**64 else "string"
                raise ValueError(f"column {name!r} has {given}, beyond int64: {_say(name, kind)}")
            if whole != Decimal(value):
                raise ValueError(
                    f"column {name!r} has {given}, which float64, the type of its other numbers, would round: "
                    f"{_say(name, 'int64')}; float64 rounds it, string keeps any text"
                )

    def _parse(self, names: list[str], block: bytes, types: Mapping[str, Any], chosen: list[str] | None = None) -> Any:
        """Return a block, or chosen columns, as the table that pyarrow parses: its lists are still strings."""
        kinds = {**self.types, **types}
        text = {name: self.pa.string() if kind != leaf(kind) else kind for name, kind in kinds.items()}
        # If there is one column only, an empty line is a null.
        skip = len(names) > 1
        if not block.strip(b"\r\n") if skip else not block:  # pyarrow refuses a block without rows
            return self.pa.table({name: self.pa.array([], text.get(name, self.pa.null())) for name in names})
        try:
            table = self.csv.read_csv(
                reader_of(block),
                self.csv.ReadOptions(column_names=names, block_size=part_size(block)),
                self.csv.ParseOptions(delimiter=self.delimiter, ignore_empty_lines=skip),
                self.csv.ConvertOptions(
                    column_types=text,
                    include_columns=chosen,
                    null_values=self.nulls,
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                    true_values=["true", "True", "TRUE"],
                    false_values=["false", "False", "FALSE"],
                ),
            )
        except self.pa.ArrowException as error:
            problem = with_names(error, names).replace(_MARK, "")
            if " conversion error to " in problem and " error to string" not in problem:
                problem += " (a type of 'string' in types= takes it)"
            raise ValueError(problem) from None
        if b'"' in block:
            for column in table.columns:
                self._check_quotes(column)
        return table

    def _check_quotes(self, column: Any) -> None:
        """Raise ``ValueError`` if a quoted value of a column has a line end in it."""
        types = self.pa.types
        kind = column.type.value_type if types.is_dictionary(column.type) else column.type
        if not is_text(kind):
            return
        for chunk in column.chunks:
            values = chunk.dictionary if types.is_dictionary(column.type) else chunk
            data = values.buffers()[2]
            whole = b"" if data is None else data.to_pybytes()
            if b"\n" in whole or b"\r" in whole:
                raise ValueError("a quoted value has no end on this line")

    def _table(self, names: list[str], block: bytes) -> Any:
        assert self.first is not None
        table = self._parse(names, block, {})
        chosen = list(self.columns) if self.columns is not None else self.first[1]
        self._check_numbers(names, block, table, chosen)
        return self.pa.table({name: self._column(name, table.column(name)) for name in chosen})

    def _column(self, name: str, column: Any) -> Any:
        kind = self.types[name]
        if kind == leaf(kind):
            return column
        text = column.combine_chunks()
        items = split_text(text, self.split.get(name, BAR))
        try:
            lists = items.cast(kind)
        except self.pa.ArrowException as error:
            raise ValueError(f"column {name!r}: {error}") from None
        check_range(name, items.flatten(), lists.flatten())
        return lists


def check_range(name: str, text: Any, values: Any) -> None:
    """Raise ``ValueError`` if a float made of text is infinite and the text is a number."""
    pa = arrow("read_csv")
    if pa.types.is_floating(values.type):
        infinite = pa.compute.equal(pa.compute.abs(values.cast(pa.float64())), float("inf"))
        found = text.filter(pa.compute.and_(infinite, pa.compute.match_substring_regex(text, "[0-9]")))
        if len(found):
            raise ValueError(f"column {name!r} has {found[0]}, beyond the range of {values.type}")


def _say(name: str, kind: str) -> str:
    return f"say its type, types={{{name!r}: pa.{kind}()}} or --columns {name}:{kind}"


def _marked(block: bytes, delimiter: str) -> bytes:
    """Return a block in which each quoted field that is not empty begins with the mark."""
    data = np.frombuffer(block, np.uint8)
    quotes, border = np.flatnonzero(data == ord('"')), _bytes_table(delimiter.encode() + b"\n")
    # The byte before the first one is taken to be the last, a line end. Within a quoted field no quote stands between
    # a border and another byte, since its quotes are doubled.
    opens = border[data[quotes - 1]] & ~(border | _bytes_table(b'\r"'))[data[quotes + 1]]
    return np.insert(data, quotes[opens] + 1, ord(_MARK)).tobytes()


def _may_be_odd(block: bytes, delimiter: str) -> bool:
    """Say whether a field may match ``_ODD`` or ``_MINUS_ZERO``, at a fraction of a parser's cost."""
    data = np.frombuffer(b"\n\n" + block, np.uint8)
    before, zero, after = data[1:-2], data[2:-1], data[3:]
    border, lead = _bytes_table(delimiter.encode() + b"\n"), _bytes_table(b' \t+-"')
    # Zeros that begin a number, and are not the zero of 0.5: few are left to be looked up in tables.
    begins = (zero == ord("0")) & (before - np.uint8(ord("0")) > 9) & (before != ord(".")) & (after != ord("."))
    places = np.flatnonzero(begins)
    places = places[border[before[places]] | (lead[before[places]] & (border | lead)[data[places]])]
    digits = _bytes_table(b"0123456789xX")[after[places]]
    return bool((digits | (before[places] == ord("-"))).any())


def _bytes_table(these: bytes) -> np.ndarray:
    """Return a table with True for each of these bytes."""
    table = np.zeros(256, bool)
    table[list(these)] = True
    return table


def write_csv(path: PathLike, batches: Iterable[pyarrow.RecordBatch], *, delimiter: str = ",") -> int:
    """
    Write a CSV file that :func:`read_csv` reads.

    Args:
        path: the file, which bears its name only once it is complete; compressed if its name ends in ``.gz``, ``.bz2``
            or ``.zst``.
        batches: the batches, at least one, all with the columns of the first. Columns are numbers, booleans, strings,
            binaries that are UTF-8, and lists of them without nulls among the items. A list of one empty string would
            be read back as an empty list, and is an error.
        delimiter: one ASCII character. Default ``","``.

    Returns:
        The number of rows.

    Raises:
        ImportError: without pyarrow.
        ValueError: no batches, batches with different columns, a column or a value that CSV cannot hold.
        OSError: the file cannot be written.

    Example:
        >>> import pathlib, pyarrow as pa, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "train.csv")
        >>> write_csv(path, [pa.record_batch({"id": [7, 8], "seen": [[3, 1, 4], []]})])
        2
        >>> print(path.read_text(), end="")
        "id","seen"
        7,"3|1|4"
        8,""
    """
    pa = arrow("write_csv")
    from pyarrow import csv

    _check_delimiter("write_csv", delimiter)
    rows, names = 0, None
    with whole_file(path) as file, write_text(path, file) as stream:
        for batch in batches:
            check_names("write_csv", batch.schema.names)
            if names is not None and batch.schema.names != names:
                raise ValueError(f"write_csv: columns must be {names} in all batches, got {batch.schema.names}")
            columns = [_text(pa, name, batch.column(name)) for name in batch.schema.names]
            options = csv.WriteOptions(include_header=names is None, delimiter=delimiter)
            names = batch.schema.names
            csv.write_csv(pa.RecordBatch.from_arrays(columns, names=names), stream, options)
            rows += batch.num_rows
        if names is None:
            raise ValueError("write_csv: batches must have at least one batch, got none")
    return rows


def _text(pa: Any, name: str, column: Any) -> Any:
    """Return a column as values that CSV can hold, lists joined to text; raise ``ValueError`` if it cannot."""
    types = pa.types
    column = decoded(column)
    value = leaf(column.type)
    inner = value.value_type if types.is_dictionary(value) else value
    text = is_text(inner) or types.is_fixed_size_binary(inner) or str(inner) in ("string_view", "binary_view")
    # Others would be read back as text, or as numbers: a decimal as a float, a duration as an integer.
    if not (text or is_number(inner) or types.is_null(inner)):
        raise ValueError(
            f"write_csv: column {name!r} must hold numbers, strings or lists of them, got {inner}: "
            f"{way_to_numbers(name, inner)}"
        )
    try:
        if column.type != value:
            depth = column.type.value_type
            if depth != value:
                raise ValueError(f"write_csv: column {name!r} must not hold lists of lists, got {column.type}")
            column = join_items(name, column)
        elif text and not types.is_string(value):
            column = column.cast(pa.large_string())
    except pa.ArrowException as error:
        raise ValueError(f"write_csv: column {name!r} of {column.type} cannot be written: {error}") from None
    if types.is_string(column.type) or types.is_large_string(column.type):
        broken = pa.compute.match_substring_regex(column, "[\r\n]")
        if pa.compute.any(broken).as_py():
            row = broken.index(True).as_py()
            raise ValueError(f"write_csv: column {name!r} must have no line ends, got {column[row].as_py()!r}")
    return column
