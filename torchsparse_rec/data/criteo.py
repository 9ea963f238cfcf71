"""Criteo's Display Advertising files: a label, 13 integers and 26 categories, between tabs, with many fields empty."""

from __future__ import annotations

import binascii
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._arrow_memory import decoded
from ..files import PathLike, whole_file
from ._arrow import arrow
from ._rows import BATCH_SIZE, check_known, check_reader, path_list, rebatched
from ._text import blocks, check_texts, parse_block, part_size, reader_of, with_names, write_text
from ._types import is_number, is_text

if TYPE_CHECKING:
    import pyarrow

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *INTEGERS, *CATEGORIES)

#: The raw id of an empty field: beyond the 32 bits of the others.
MISSING = -1

_TAB, _NEWLINE = ord("\t"), ord("\n")


def read_criteo(
    paths: PathLike | Sequence[PathLike],
    *,
    batch_size: int = BATCH_SIZE,
    columns: Sequence[str] | None = None,
    label: bool = True,
) -> Iterator[pyarrow.RecordBatch]:
    r"""
    Read files of Kaggle's Display Advertising Challenge, or of Criteo's Terabyte logs, which look the same.

    Empty fields are nulls, as are the last fields of a line that ends before them. The last line need not end in a
    newline. Files named ``.gz``, ``.bz2`` and ``.zst`` are decompressed in reading.

    Args:
        paths: a file, or several that are read in order.
        batch_size: rows of a batch; the last may have fewer. Default 65,536.
        columns: the columns to yield, in this order, of ``label``, ``I1`` to ``I13`` and ``C1`` to ``C26``. Default
            None: all.
        label: whether lines begin with a label; lines of the test set do not. Default True.

    Yields:
        ``pyarrow.RecordBatch``: ``label`` int8, 0 or 1; the integers int64; the categories strings, as in the file.

    Raises:
        ImportError: without pyarrow.
        ValueError: an unknown column.
        DataError: a malformed line, with its number: too many fields, no label, text instead of an integer.
        OSError: a file that cannot be opened.

    Source: https://www.kaggle.com/c/criteo-display-ad-challenge/data

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/train.txt"
        >>> with open(path, "w") as file:
        ...     _ = file.write("1\t5\t\t7" + "\t" * 10 + "\t68fd1e64\n0\t2")
        >>> (batch,) = read_criteo(path, columns=["label", "I1", "I2", "C1"])
        >>> batch.to_pylist()
        [{'label': 1, 'I1': 5, 'I2': None, 'C1': '68fd1e64'}, {'label': 0, 'I1': 2, 'I2': None, 'C1': None}]
    """
    files = path_list(paths)
    check_reader("read_criteo", files, batch_size, columns)
    names = COLUMNS if label else COLUMNS[1:]
    check_known("read_criteo", columns, names)
    parse = _Parser(names, columns)
    check_texts(files)
    return rebatched((batch for path in files for batch in _read(path, parse)), batch_size)


def _read(path: PathLike, parse: _Parser) -> Iterator[Any]:
    for line, block in blocks(path):
        yield from parse_block(parse, path, line, block).to_batches()


class _Parser:
    """Turns a block of lines into a table."""

    def __init__(self, names: Sequence[str], columns: Sequence[str] | None) -> None:
        pa = arrow("read_criteo")
        from pyarrow import csv

        self.csv, self.names = csv, names
        self.parse = csv.ParseOptions(delimiter="\t", quote_char=False, ignore_empty_lines=False)
        types = {name: pa.int64() if name in INTEGERS else pa.string() for name in names}
        types["label"] = pa.int8()
        self.convert = csv.ConvertOptions(
            column_types={name: types[name] for name in names}, null_values=[""], strings_can_be_null=True
        )
        self.columns, self.pa = columns, pa

    def __call__(self, block: bytes) -> Any:
        """Return a block of lines as a table, or raise ``ValueError`` if a line is malformed."""
        lines = _with_all_fields(block, len(self.names))
        read = self.csv.ReadOptions(column_names=list(self.names), block_size=part_size(lines))
        try:
            table = self.csv.read_csv(reader_of(lines), read, self.parse, self.convert)
        except self.pa.ArrowException as error:
            raise ValueError(with_names(error, self.names)) from None
        if "label" in self.names:
            label = table.column("label")
            if label.null_count or self.pa.compute.any(self.pa.compute.greater(label, 1)).as_py():
                raise ValueError("the label must be 0 or 1")
            if self.pa.compute.any(self.pa.compute.less(label, 0)).as_py():
                raise ValueError("the label must be 0 or 1")
        return table if self.columns is None else table.select(list(self.columns))


def _with_all_fields(block: bytes, fields: int) -> bytes:
    """Return the block with tabs added to the lines that end before their last fields."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
        if b"\r" in block:
            raise ValueError("there is a carriage return within the line")
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == _NEWLINE)
    missing = fields - 1 - np.diff(np.searchsorted(np.flatnonzero(data == _TAB), ends), prepend=0)
    if missing.min() < 0:
        raise ValueError(f"expected at most {fields} fields, found {fields - missing.min()}")
    return np.insert(data, np.repeat(ends, missing), _TAB).tobytes() if missing.any() else block


def write_criteo(path: PathLike, batches: Iterable[pyarrow.RecordBatch]) -> int:
    """
    Write a file that :func:`read_criteo` reads.

    Args:
        path: the file, which bears its name only once it is complete; compressed if its name ends in ``.gz``, ``.bz2``
            or ``.zst``.
        batches: record batches of the columns ``label``, 0 or 1, which may be missing; ``I1`` to ``I13``, whole
            numbers; and ``C1`` to ``C26``, strings or integers. Nulls become empty fields.

    Returns:
        The number of rows.

    Raises:
        ImportError: without pyarrow.
        ValueError: other columns, a label that is neither 0 nor 1, or a number that is not whole or beyond int64. Also
            a string that is empty or contains a tab, a quote or a line end.
        OSError: the file cannot be written.

    Example:
        >>> import pyarrow as pa, tempfile
        >>> numbers = {name: pa.array([1], pa.int64()) for name in ("label", *INTEGERS)}
        >>> batch = pa.record_batch({**numbers, **{name: ["68fd1e64"] for name in CATEGORIES}})
        >>> write_criteo(f"{tempfile.mkdtemp()}/train.txt", [batch])
        1
    """
    pa = arrow("write_criteo")
    from pyarrow import csv

    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    rows, first = 0, None
    with whole_file(path) as file, write_text(path, file) as stream:
        for batch in batches:
            names = COLUMNS if "label" in batch.schema.names else COLUMNS[1:]
            if sorted(batch.schema.names) != sorted(names) or names != (first or names):
                raise ValueError(
                    f"write_criteo: columns must be {', '.join(names[:2])}, ..., C26, got {batch.schema.names}"
                )
            first = names
            columns = [_column(pa, name, batch.column(name), rows) for name in names]
            try:
                csv.write_csv(pa.RecordBatch.from_arrays(columns, names=list(names)), stream, options)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise ValueError(f"write_criteo: row {rows} or one after it cannot be written: {error}") from None
            rows += batch.num_rows
    return rows


def _column(pa: Any, name: str, column: Any, rows: int) -> Any:
    """
    Return a column as strings or int64, or raise ``ValueError`` for a value that would be read back as another.

    ``rows`` is the number of rows before the column's first one, for the error message.
    """
    compute, types = pa.compute, pa.types
    column = decoded(column)
    if name in CATEGORIES:
        if not (is_text(column.type) or types.is_integer(column.type) or types.is_null(column.type)):
            raise ValueError(f"write_criteo: column {name!r} must hold strings or integers, got {column.type}")
    elif not (is_number(column.type) or types.is_decimal(column.type) or types.is_null(column.type)):
        # A cast would make numbers of times, in whatever unit, and of text such as 007.
        raise ValueError(f"write_criteo: column {name!r} must hold numbers, got {column.type}: cast it first")
    try:
        values = column.cast(pa.string() if name in CATEGORIES else pa.int64())
    except pa.ArrowException as error:
        raise ValueError(f"write_criteo: column {name!r} of {column.type} cannot be written: {error}") from None
    if name == "label":
        good, expected = compute.is_in(values, pa.array([0, 1])), "0 or 1"
    elif name in CATEGORIES:
        # The empty string would be read back as a null.
        good, expected = compute.fill_null(compute.not_equal(values, ""), True), "a null or not empty"
    else:
        return values
    if not compute.all(good, min_count=0).as_py():
        row = good.index(False).as_py()
        raise ValueError(
            f"write_criteo: column {name!r} must be {expected}, got {column[row].as_py()!r} in row {rows + row}"
        )
    return values


# ---- Tensors ---------------------------------------------------------------------------------------------------------


def kept_rows(batches: Iterable[Any], every: int = 10) -> Iterator[Any]:
    """
    Yield those rows of record batches that are trained on: all but the last of each ``every``.

    Example:
        >>> import pyarrow as pa
        >>> rows = [pa.record_batch({"label": list(range(4))}), pa.record_batch({"label": [4, 5]})]
        >>> [batch["label"].to_pylist() for batch in kept_rows(rows, every=3)]
        [[0, 1, 3], [4]]
    """
    return _chosen_rows(batches, every, held_out=False)


def held_out_rows(batches: Iterable[Any], count: int, every: int = 10) -> Iterator[Any]:
    """
    Yield the first ``count`` of the rows that :func:`kept_rows` leaves out.

    Raises:
        ValueError: there are none.
    """
    left = count
    for batch in _chosen_rows(batches, every, held_out=True):
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left <= 0:
            return
    if left == count:
        raise ValueError(f"there must be at least {every} rows, one of which is held out")


def _chosen_rows(batches: Iterable[Any], every: int, held_out: bool) -> Iterator[Any]:
    begin = 0
    for batch in batches:
        rows = np.arange(batch.num_rows)
        chosen = rows[((begin + rows) % every == every - 1) == held_out]
        begin += batch.num_rows
        if len(chosen):
            yield batch.take(chosen)


def as_tensors(rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    """
    Convert a ``pyarrow.RecordBatch`` to tensors of labels, numbers and raw ids.

    Args:
        rows: a record batch with the columns ``label``, ``I1`` to ``I13`` and ``C1`` to ``C26``. Categories are
            hexadecimal strings, as in Criteo's files, or integers.

    Returns:
        Labels, float32 ``[B]``; numbers, float32 ``[B, 13]``, ``log(1 + x)`` or 0 where they are missing or negative;
        raw ids, int64 ``[26, B]``, :data:`MISSING` where there is none.

    Raises:
        ImportError: without pyarrow.
        ValueError: a column is missing, or a string is not hexadecimal of up to 8 digits.

    Example:
        >>> import pyarrow as pa
        >>> columns = {"label": [1], **{name: [1] for name in INTEGERS}, **{name: ["68fd1e64"] for name in CATEGORIES}}
        >>> labels, numbers, ids = as_tensors(pa.record_batch(columns))
        >>> labels, numbers[0, :2], ids[:2, 0]
        (tensor([1.]), tensor([0.6931, 0.6931]), tensor([1761418852, 1761418852]))
    """
    pa = arrow("as_tensors")
    for name in COLUMNS:
        if name not in rows.schema.names:
            raise ValueError(f"there must be a column {name!r}, got {', '.join(rows.schema.names)}")
    labels = _numpy(rows.column("label"), pa.float32(), 0.0)
    numbers = np.stack([_numpy(rows.column(name), pa.float32(), 0.0) for name in INTEGERS], 1)
    ids = np.stack([_raw_ids(pa, name, rows.column(name)) for name in CATEGORIES])
    numbers = np.log1p(np.maximum(numbers, np.float32(0.0)))
    return torch.tensor(labels), torch.from_numpy(numbers), torch.from_numpy(ids)


def _numpy(column: Any, kind: Any, missing: float) -> np.ndarray:
    return column.cast(kind, safe=False).fill_null(missing).to_numpy(zero_copy_only=False)


def _raw_ids(pa: Any, name: str, column: Any) -> np.ndarray:
    from pyarrow import compute

    column = decoded(column)
    if pa.types.is_integer(column.type) or pa.types.is_null(column.type):
        return _numpy(column, pa.int64(), MISSING)
    strings = column.cast(pa.string())
    hexadecimal = compute.utf8_lpad(compute.fill_null(strings, ""), 8, "0")
    try:
        if compute.any(compute.not_equal(compute.binary_length(hexadecimal), 8)).as_py():
            raise ValueError
        # What utf8_lpad returns begins at its buffer's beginning. There is no buffer without strings.
        content = memoryview(hexadecimal.buffers()[2] or b"")[: 8 * len(hexadecimal)]
        ids = np.frombuffer(binascii.unhexlify(content), ">u4")
    except ValueError:  # That of binascii does not say which.
        wrong = next(text for text in strings.to_pylist() if text is not None and not _is_hexadecimal(text))
        raise ValueError(f"column {name!r} must hold hexadecimal ids of up to 8 digits, got {wrong!r}") from None
    present = compute.fill_null(compute.not_equal(strings, ""), False)
    return np.where(present.to_numpy(zero_copy_only=False), ids.astype(np.int64), MISSING)


def _is_hexadecimal(text: str) -> bool:
    return len(text) <= 8 and set(text) <= set(string.hexdigits)
