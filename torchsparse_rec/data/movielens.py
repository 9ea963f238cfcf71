"""MovieLens's rating files in their three layouts."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..files import PathLike, whole_file
from ..typing import RatingsLayout
from ._arrow import arrow
from ._ratings import COLON_LAYOUT, CSV_LAYOUT, TAB_LAYOUT, LineLayout, rating_blocks
from ._ratings import read_ratings as read_ratings
from ._rows import BATCH_SIZE, check_known, check_reader, path_list, rebatched
from ._text import check_texts, open_text, plain_suffix, write_text
from ._types import is_number

if TYPE_CHECKING:
    import pyarrow

COLUMNS = ("user", "item", "rating", "timestamp")
#: The layouts of rating files, by the names of the releases that have them.
LAYOUTS = {"ml-100k": TAB_LAYOUT, "ml-1m": COLON_LAYOUT, "ml-20m": CSV_LAYOUT}
_BY_SUFFIX = {".data": "ml-100k", ".tsv": "ml-100k", ".dat": "ml-1m", ".csv": "ml-20m"}


def read_movielens(
    paths: PathLike | Sequence[PathLike],
    *,
    batch_size: int = BATCH_SIZE,
    columns: Sequence[str] | None = None,
    layout: RatingsLayout | None = None,
) -> Iterator[pyarrow.RecordBatch]:
    r"""
    Read rating files: ``u.data`` of MovieLens 100K, ``ratings.dat`` of 1M and 10M, ``ratings.csv`` of 20M and later.

    Args:
        paths: a file, or several that are read in order; ``.gz``, ``.bz2`` and ``.zst`` are decompressed in reading.
        batch_size: rows of a batch; the last may have fewer. Default 65,536.
        columns: the columns to yield, in this order, of ``user``, ``item``, ``rating`` and ``timestamp``. Default None:
            all.
        layout: ``"ml-100k"`` (tabs), ``"ml-1m"`` (``::``) or ``"ml-20m"`` (commas, a header). Default None: by the
            suffix, ``.data``, ``.dat`` or ``.csv``.

    Yields:
        ``pyarrow.RecordBatch``: ``user`` and ``item`` int32, as written, from 1 up; ``rating`` float32; ``timestamp``
        int64, Unix time in seconds.

    Raises:
        ImportError: without pyarrow.
        ValueError: an unknown column or layout.
        DataError: a malformed line, with its number, or one of more than 64 MiB; a file without ratings.
        OSError: a file that cannot be opened.

    Source: https://grouplens.org/datasets/movielens

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/u.data"
        >>> with open(path, "w") as file:
        ...     _ = file.write("196\t242\t3\t881250949\n")
        >>> next(read_movielens(path)).to_pylist()
        [{'user': 196, 'item': 242, 'rating': 3.0, 'timestamp': 881250949}]
    """
    arrow("read_movielens")
    files = path_list(paths)
    check_reader("read_movielens", files, batch_size, columns)
    check_known("read_movielens", columns, COLUMNS)
    layouts = [_layout("read_movielens", path, layout) for path in files]
    check_texts(files)
    batches = (batch for path, of_it in zip(files, layouts, strict=True) for batch in _read(path, of_it))
    chosen = (batch if columns is None else batch.select(list(columns)) for batch in batches)
    return rebatched(chosen, batch_size)


def _layout(function: str, path: PathLike, layout: str | None) -> LineLayout:
    name = layout or _BY_SUFFIX.get(plain_suffix(path))
    if name is None:
        raise ValueError(f"{function}: layout must be given for {os.fspath(path)}: one of {', '.join(LAYOUTS)}")
    if name not in LAYOUTS:
        raise ValueError(f"{function}: layout must be one of {', '.join(LAYOUTS)}, got {name!r}")
    return LAYOUTS[name]


def _read(path: PathLike, layout: LineLayout) -> Iterator[Any]:
    pa = arrow("read_movielens")
    with open_text(path) as stream:
        for users, items, times, thousandths in rating_blocks(io.BufferedReader(stream), os.fspath(path), layout):
            rating = pa.array(thousandths / 1000.0).cast(pa.float32(), safe=False)
            columns = [pa.array(users).cast(pa.int32()), pa.array(items).cast(pa.int32()), rating, pa.array(times)]
            yield pa.RecordBatch.from_arrays(columns, names=list(COLUMNS))


def write_movielens(
    path: PathLike, batches: Iterable[pyarrow.RecordBatch], *, layout: RatingsLayout | None = None
) -> int:
    """
    Write a file that :func:`read_movielens` reads.

    Args:
        path: the file, which bears its name only once it is complete.
        batches: record batches of at least one row together, with the columns ``user``, ``item``, ``rating`` and
            ``timestamp``, without nulls. Ratings must be whole numbers; in ``"ml-20m"`` they may have three decimals.
        layout: the argument of :func:`read_movielens`. Default None: by the suffix.

    Returns:
        The number of rows.

    Raises:
        ImportError: without pyarrow.
        ValueError: no rows, other columns, nulls, or values that the layout cannot hold.
        OSError: the file cannot be written.

    Example:
        >>> import pyarrow as pa, tempfile
        >>> batch = pa.record_batch({"user": [196], "item": [242], "rating": [3.0], "timestamp": [881250949]})
        >>> write_movielens(f"{tempfile.mkdtemp()}/u.data", [batch])
        1
    """
    pa = arrow("write_movielens")
    form, rows = _layout("write_movielens", path, layout), 0
    with whole_file(path) as file, write_text(path, file) as stream:
        if form.header is not None:
            stream.write(form.header + b"\n")
        for batch in batches:
            if sorted(batch.schema.names) != sorted(COLUMNS):
                raise ValueError(f"write_movielens: columns must be {', '.join(COLUMNS)}, got {batch.schema.names}")
            fields = [_field(pa, form, batch, name, rows) for name in COLUMNS]
            lines = pa.compute.binary_join_element_wise(*fields, form.separator.decode())
            stream.write("".join(f"{line}\n" for line in lines.to_pylist()).encode())
            rows += batch.num_rows
        if not rows:
            raise ValueError("write_movielens: batches must have at least one row, got none")
    return rows


def _field(pa: Any, form: LineLayout, batch: Any, name: str, rows: int) -> Any:
    """Return a column as strings, or raise ``ValueError`` for a value that the layout cannot hold."""
    compute, column = pa.compute, batch.column(name)
    if not (is_number(column.type) or pa.types.is_decimal(column.type) or pa.types.is_null(column.type)):
        # A cast would make numbers of times, in whatever unit, and of text such as 007.
        raise ValueError(f"write_movielens: column {name!r} must hold numbers, got {column.type}: cast it first")
    whole = name != "rating" or not form.fractional
    try:
        if whole:
            values = column.cast(pa.int64())
        else:
            # Adding zero turns -0.0, which the reader refuses, into 0.0.
            values = compute.add(compute.round(column.cast(pa.float64()), 3), 0.0)
        text = values.cast(pa.string())
    except pa.ArrowException as error:
        raise ValueError(f"write_movielens: column {name!r} cannot be written: {error}") from None
    least, most = {"rating": (0, 99), "timestamp": (0, 10**12 - 1)}.get(name, (1, 10_000_000))
    good = compute.fill_null(
        compute.and_(compute.greater_equal(values, least), compute.less_equal(values, most)), False
    )
    if not compute.all(good, min_count=0).as_py():
        row = good.index(False).as_py()
        raise ValueError(
            f"write_movielens: column {name!r} must be in [{least}, {most}] without nulls, got {column[row].as_py()} "
            f"in row {rows + row}"
        )
    if not whole:
        _check_decimals(pa, column, values, rows)
        # With a decimal point, as in the original files, which the reader parses faster.
        text = compute.if_else(
            compute.match_substring(text, "."), text, compute.binary_join_element_wise(text, "0", ".")
        )
    return text


def _check_decimals(pa: Any, column: Any, rounded: Any, rows: int) -> None:
    """Raise ``ValueError`` for a rating that is another float32 once it is rounded."""
    expected, found = (values.cast(pa.float32(), safe=False) for values in (column, rounded))
    same = pa.compute.equal(expected, found)
    if not pa.compute.all(same, min_count=0).as_py():
        row = same.index(False).as_py()
        raise ValueError(
            f"write_movielens: column 'rating' must have at most three decimals, got {column[row].as_py()} in row "
            f"{rows + row}"
        )
