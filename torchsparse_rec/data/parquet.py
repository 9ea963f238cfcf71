"""Read and write Parquet files, a row group at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..files import PathLike, whole_file
from ._arrow import arrow
from ._lists import with_lists
from ._rows import BATCH_SIZE, check_names, check_reader, common_schema, path_list, rebatched, repeated
from ._types import nullable
from .errors import DataError

if TYPE_CHECKING:
    import pyarrow

# The longest string and list that the footer may hold: a damaged one may claim any length.
_LARGEST_STRING, _LARGEST_LIST = 1 << 26, 1 << 22
# Pyarrow's messages about files that may be whole, and that it cannot read.
_LACKS = re.compile(r"not (yet )?(implemented|support)|unsupported|crypt", re.IGNORECASE)


def read_parquet(
    paths: PathLike | Sequence[PathLike],
    *,
    batch_size: int = BATCH_SIZE,
    columns: Sequence[str] | None = None,
    split: Mapping[str, str] | None = None,
    unify: bool = False,
) -> Iterator[pyarrow.RecordBatch]:
    """
    Read Parquet files, a row group at a time.

    Checksums of pages are compared if the file has them, as files of :func:`write_parquet` do. Parquet has no checksums
    of its footer and of its pages' headers: damage there is an error only if the reader notices it.

    Args:
        paths: a file, or several with the same columns that are read in order.
        batch_size: rows of a batch; the last may have fewer. Default 65,536.
        columns: the names of the columns to read, in this order. Default None: all.
        split: a mapping from columns of text to what is between the items of their lists: ``{"tags": "|"}`` makes lists
            of strings of ``tags``; an empty text is an empty list. Default None: text stays.
        unify: whether files may differ in the width of a column's type, such as ``int32`` and ``int64``, ``string`` and
            ``large_string``, or hold nulls alone. All are read as the widest, for which every footer is read first.
            Default False: such a difference is an error.

    Yields:
        ``pyarrow.RecordBatch``, with the types of the file; all columns may hold nulls, also columns that the file
        declares without.

    Raises:
        ImportError: without pyarrow.
        ValueError: an unknown column, or one of ``split`` that holds no text.
        DataError: a damaged file, or one that pyarrow does not support, with the byte where the row group begins; a
            file with other columns than the first, or with types that differ in more than ``unify`` allows.
        OSError: a file that cannot be opened.

    Example:
        >>> import pyarrow as pa, tempfile
        >>> path = f"{tempfile.mkdtemp()}/train.parquet"
        >>> write_parquet(path, [pa.record_batch({"id": [7, 8, 9], "price": [0.5, 1.5, None]})])
        3
        >>> [batch.to_pydict() for batch in read_parquet(path, batch_size=2, columns=["id"])]
        [{'id': [7, 8]}, {'id': [9]}]
    """
    arrow("read_parquet")
    files = path_list(paths)
    check_reader("read_parquet", files, batch_size, columns)
    for path in files:  # before anything is read
        with open(path, "rb"):
            pass
    batches = with_lists(_read_all(files, columns, batch_size, unify), "read_parquet", split)
    return rebatched(batches, batch_size)


def _read_all(files: list[PathLike], columns: Sequence[str] | None, batch_size: int, unify: bool) -> Iterator[Any]:
    pa, common = arrow("read_parquet"), None
    for path in files if unify else ():
        with pa.OSFile(os.fsdecode(path)) as opened:
            schema = _schema(path, _open(path, opened))
        common = schema if common is None else common_schema(path, schema, (files[0], common), True)
    for path in files:
        # Not Python's open(): pyarrow's threads would need the interpreter's lock to read, even while it exits.
        with pa.OSFile(os.fsdecode(path)) as opened:
            file = _open(path, opened)
            schema = _schema(path, file)
            common = schema if common is None else common_schema(path, schema, (files[0], common), unify)
            names = list(common.names) if columns is None else list(columns)
            for name in names:
                if name not in common.names:
                    raise ValueError(f"read_parquet: columns must be among {common.names} of {path}, got {name!r}")
            kinds = [common.field(name).type for name in names]
            for group in range(file.metadata.num_row_groups):
                for batch in _read_group(path, file, group, names, batch_size):
                    # Files may differ in nullability and names of list items; batches that are joined must not.
                    columns_of_it = [batch.column(name).cast(kind) for name, kind in zip(names, kinds, strict=True)]
                    yield pa.RecordBatch.from_arrays(columns_of_it, names=names)


def _open(path: PathLike, opened: Any) -> Any:
    pa = arrow("read_parquet")
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(
            opened,
            page_checksum_verification=True,
            thrift_string_size_limit=_LARGEST_STRING,
            thrift_container_size_limit=_LARGEST_LIST,
        )
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise _error(path, max(0, opened.size() - 8), "Parquet's footer, which ends here,", error) from error


def _error(path: PathLike, offset: int, part: str, error: Exception) -> DataError:
    """Return the error for a part of a file that pyarrow did not read: only pyarrow's text has the reason."""
    lacks = isinstance(error, arrow("read_parquet").ArrowNotImplementedError) or _LACKS.search(str(error))
    return DataError(path, offset, f"{part} {'cannot be read by pyarrow' if lacks else 'is damaged'}: {error}")


def _schema(path: PathLike, file: Any) -> Any:
    """Return the schema of a file, with nulls allowed in all columns."""
    pa, schema = arrow("read_parquet"), file.schema_arrow
    twice = repeated(schema.names)
    if twice is not None:
        raise DataError(path, None, f"column {twice!r} is there twice")
    return pa.schema([pa.field(field.name, nullable(field.type)) for field in schema])


def _read_group(path: PathLike, file: Any, group: int, names: list[str], batch_size: int) -> Iterator[Any]:
    pa = arrow("read_parquet")
    try:
        batches = file.iter_batches(batch_size=batch_size, row_groups=[group], columns=names)
        for batch in batches:
            batch.validate(full=True)
            yield batch
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        raise _error(path, _group_offset(file, group), f"row group {group}", error) from error


def _group_offset(file: Any, group: int) -> int:
    """Return the byte at which a row group begins, or 0 if the footer does not contain it."""
    try:
        found = file.metadata.row_group(group).column(0)
        return int(found.dictionary_page_offset or found.data_page_offset)
    except Exception:
        return 0


def write_parquet(
    path: PathLike,
    batches: Iterable[pyarrow.RecordBatch],
    *,
    compression: str = "zstd",
    row_group_size: int = 1 << 20,
) -> int:
    """
    Write a Parquet file with checksums of its pages.

    Args:
        path: the file, which bears its name only once it is complete.
        batches: the batches, at least one, all of one schema.
        compression: any compression that pyarrow has, or ``"none"``. Default ``"zstd"``.
        row_group_size: the most rows of a row group, which are held in memory. Default 1,048,576.

    Returns:
        The number of rows.

    Raises:
        ImportError: without pyarrow.
        ValueError: no batches, batches of different schemas, an unknown compression, fixed-size lists of no items.
        OSError: the file cannot be written.

    Example: see :func:`read_parquet`.
        >>> import pyarrow as pa, tempfile
        >>> write_parquet(f"{tempfile.mkdtemp()}/train.parquet", [pa.record_batch({"id": [7]})], compression="none")
        1
    """
    pa = arrow("write_parquet")
    from pyarrow import parquet

    if row_group_size < 1:
        raise ValueError(f"write_parquet: row_group_size must be at least 1, got {row_group_size}")
    writer, rows = None, 0
    with whole_file(path) as file:
        try:
            for batch in rebatched(_of_one_schema(batches), row_group_size):
                if writer is None:
                    writer = _writer(parquet, file, batch.schema, compression)
                writer.write_batch(batch, row_group_size=row_group_size)
                rows += batch.num_rows
            if writer is None:
                raise ValueError("write_parquet: batches must have at least one row, got none")
        except pa.ArrowNotImplementedError as error:
            raise ValueError(f"write_parquet: {error}") from None
        finally:
            if writer is not None:
                writer.close()
    return rows


def _writer(parquet: Any, file: Any, schema: Any, compression: str) -> Any:
    pa = arrow("write_parquet")
    try:
        return parquet.ParquetWriter(file, schema, compression=compression, write_page_checksum=True)
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(f"write_parquet: compression must be one of pyarrow's, got {compression!r}: {error}") from None


def _of_one_schema(batches: Iterable[Any]) -> Iterator[Any]:
    first = None
    for i, batch in enumerate(batches):
        if first is None:
            check_names("write_parquet", batch.schema.names)
            first = batch.schema
            for field in first:
                if _holds_lists_of_no_items(field.type):
                    raise ValueError(
                        f"write_parquet: column {field.name!r} of {field.type} cannot be written: its fixed-size lists "
                        "have no items, which Parquet's reader takes for damage"
                    )
        if not batch.schema.equals(first):
            raise ValueError(
                f"write_parquet: batches[{i}] must have the schema of the first:\n{first}\ngot\n{batch.schema}"
            )
        yield batch


def _holds_lists_of_no_items(kind: Any) -> bool:
    types = arrow("write_parquet").types
    while types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if types.is_fixed_size_list(kind) and kind.list_size == 0:
            return True
        kind = kind.value_type
    return False
