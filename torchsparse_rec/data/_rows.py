"""Helpers that all readers and writers share: checks of their arguments, and batches of a given size."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from ..files import PathLike
from ._arrow import arrow
from ._types import unified
from .errors import DataError

#: The default number of rows of a batch.
BATCH_SIZE = 65536


def path_list(paths: PathLike | Sequence[PathLike]) -> list[PathLike]:
    """Return one path, or several, as a list."""
    return [paths] if isinstance(paths, (str, bytes)) or hasattr(paths, "__fspath__") else list(paths)


def check_reader(name: str, paths: list[PathLike], batch_size: int, columns: Sequence[str] | None) -> None:
    """Raise ValueError for no paths, a batch size below 1, or columns that are no distinct names."""
    if not paths:
        raise ValueError(f"{name}: paths must have at least one file, got none")
    if batch_size < 1:
        raise ValueError(f"{name}: batch_size must be at least 1, got {batch_size}")
    check_columns(name, columns)


def check_columns(name: str, columns: Sequence[str] | None) -> None:
    """Raise ValueError unless ``columns`` is None or a non-empty sequence of distinct names."""
    if columns is not None and (isinstance(columns, str) or not len(columns) or len(set(columns)) < len(columns)):
        raise ValueError(f"{name}: columns must be distinct names, at least one, got {columns!r}")


def check_known(name: str, columns: Sequence[str] | None, known: Collection[str]) -> None:
    """Raise ValueError unless ``columns`` is None or names columns that are known."""
    for column in columns or ():
        if column not in known:
            raise ValueError(f"{name}: columns must be among {', '.join(known)}, got {column!r}")


def repeated(names: Iterable[str]) -> str | None:
    """Return the first name that repeats an earlier one, or None if all are distinct."""
    there: set[str] = set()
    for name in names:
        if name in there:
            return name
        there.add(name)
    return None


def check_names(function: str, names: Sequence[str]) -> None:
    """Raise ValueError unless the columns to be written have distinct names."""
    if repeated(names) is not None:
        raise ValueError(f"{function}: columns must have distinct names, got {list(names)}")


def rebatched(batches: Iterable[Any], batch_size: int) -> Iterator[Any]:
    """
    Yield the rows of record batches of one schema in batches of ``batch_size`` rows; the last may have fewer.

    A batch whose rows all lie in one given batch is a slice of it, without a copy.
    """
    pa = arrow("a reader")
    waiting: list[Any] = []
    rows = 0
    for batch in batches:
        while rows + batch.num_rows >= batch_size:
            taken = batch.slice(0, batch_size - rows)
            yield pa.concat_batches([*waiting, taken]) if waiting else taken
            batch, waiting, rows = batch.slice(taken.num_rows), [], 0
        if batch.num_rows:
            waiting.append(batch)
            rows += batch.num_rows
    if waiting:
        yield pa.concat_batches(waiting) if len(waiting) > 1 else waiting[0]


def common_schema(path: PathLike, schema: Any, first: tuple[PathLike, Any], unify: bool) -> Any:
    """
    Return the schema that the files have together, which must have the same columns.

    Args:
        path: a file.
        schema: its schema.
        first: the first file, and the schema of those before this one.
        unify: whether types may differ in width, and columns of nulls alone have any type.

    Raises:
        DataError: a column that is missing, is not in the first file or has another type there; the message names it.
    """
    pa = arrow("a reader")
    first_path, expected = first
    there, wanted = set(schema.names), set(expected.names)
    for name in expected.names:
        if name not in there:
            raise DataError(path, None, f"column {name!r} is missing, which {first_path} has")
    types = {}
    for field in schema:
        if field.name not in wanted:
            raise DataError(path, None, f"column {field.name!r} is not in {first_path}")
        kind = expected.field(field.name).type
        found = unified(field.type, kind) if unify else kind if field.type == kind else None
        if found is None:
            way = "" if unified(field.type, kind) is None else ": unify=True takes both"
            problem = f"column {field.name!r} is {field.type}, expected {kind} as in {first_path}{way}"
            raise DataError(path, None, problem)
        types[field.name] = found
    return pa.schema([pa.field(name, types[name]) for name in expected.names])
