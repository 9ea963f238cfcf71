"""Convert files from any format to any other, a batch at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from .._progress import progress_bar
from ..files import PathLike
from ..typing import FileFormat, RecordCompression
from ._arrow import arrow
from ._rows import path_list, rebatched
from ._text import COMPRESSIONS, plain_suffix
from ._types import arrow_types, leaf
from .criteo import read_criteo, write_criteo
from .csv import read_csv, write_csv
from .movielens import read_movielens, write_movielens
from .parquet import read_parquet, write_parquet
from .prebatched import read_prebatched, write_prebatched
from .tfrecord import FixedLenFeature, VarLenFeature, infer_features, read_tfrecord, write_tfrecord

#: The default number of rows of a batch.
BATCH_SIZE = 16_384


@dataclass(frozen=True)
class Options:
    """The options of a conversion."""

    batch_size: int = BATCH_SIZE
    #: The names of the columns to convert, in this order; None: all.
    columns: list[str] | None = None
    #: Arrow's types by column name, for formats that do not store types.
    types: Mapping[str, Any] = field(default_factory=dict)
    compression: str | None = None

    def all_have_types(self) -> bool:
        """Say whether the columns are named and all have types, so that no type must be inferred."""
        return self.columns is not None and all(name in self.types for name in self.columns)


@dataclass(frozen=True)
class Format:
    """A format of files: how to read and to write it, and the suffixes that name it."""

    read: Callable[[list[PathLike], Options], Iterator[Any]]
    write: Callable[[PathLike, Iterable[Any], Options], int]
    suffixes: tuple[str, ...]
    #: The suffixes of compressions that may follow.
    compressions: tuple[str, ...] = ()
    #: Whether files do not store types, so that ``Options.types`` may give them.
    takes_types: bool = False


def _refuse_compression(path: PathLike, options: Options) -> None:
    if options.compression is not None:
        raise ValueError(f"compression of {os.fspath(path)} is chosen by its suffix, .gz, got {options.compression!r}")


def _write_text(
    write: Callable[[PathLike, Iterable[Any]], int], path: PathLike, batches: Iterable[Any], options: Options
) -> int:
    _refuse_compression(path, options)
    return write(path, batches)


def _write_parquet(path: PathLike, batches: Iterable[Any], options: Options) -> int:
    return write_parquet(path, batches, compression=options.compression or "zstd")


def _write_prebatched(path: PathLike, batches: Iterable[Any], options: Options) -> int:
    batches = rebatched(batches, options.batch_size)
    compression: Any = options.compression  # which this checks
    return write_prebatched(path, batches, compression=compression, progress=False)


def _read_tfrecord(paths: list[PathLike], options: Options, prebatched: bool = False) -> Iterator[Any]:
    features = {} if options.all_have_types() else infer_features(paths[0], prebatched=prebatched)
    features.update({name: _feature(name, kind) for name, kind in options.types.items()})
    size, columns = options.batch_size, options.columns
    return read_tfrecord(paths, features, batch_size=size, columns=columns, prebatched=prebatched)


def _feature(name: str, kind: Any) -> Any:
    """Return the TFRecord feature for a column of an Arrow type; a row without the feature is a null."""
    pa = arrow("convert")
    value = leaf(kind)
    names = {pa.string(): "str", pa.binary(): "bytes", pa.large_string(): "str", pa.large_binary(): "bytes"}
    dtype = names.get(value, str(value).replace("float", "float32") if value == pa.float32() else str(value))
    try:
        if pa.types.is_fixed_size_list(kind):
            return FixedLenFeature((kind.list_size,), dtype, nullable=True)
        return FixedLenFeature((), dtype, nullable=True) if kind == value else VarLenFeature(dtype)
    except ValueError as error:
        raise ValueError(f"column {name!r} of a TFRecord file cannot be {kind}: {error}") from None


def _write_tfrecord(path: PathLike, batches: Iterable[Any], options: Options, prebatched: bool = False) -> int:
    _refuse_compression(path, options)
    compression: RecordCompression | None = "gzip" if os.fspath(path).endswith(".gz") else None
    batches = rebatched(batches, options.batch_size) if prebatched else batches
    return write_tfrecord(path, batches, compression=compression, prebatched=prebatched)


#: The formats by the names that ``--from`` and ``--to`` take.
FORMATS: dict[str, Format] = {
    "criteo": Format(
        lambda paths, o: read_criteo(paths, batch_size=o.batch_size, columns=o.columns),
        partial(_write_text, write_criteo),
        (".txt", ".criteo"),
        tuple(COMPRESSIONS),
    ),
    "csv": Format(
        lambda paths, o: read_csv(paths, batch_size=o.batch_size, columns=o.columns, types=o.types),
        partial(_write_text, write_csv),
        (".csv",),
        tuple(COMPRESSIONS),
        takes_types=True,
    ),
    "movielens": Format(
        lambda paths, o: read_movielens(paths, batch_size=o.batch_size, columns=o.columns),
        partial(_write_text, write_movielens),
        (".data", ".dat"),
        tuple(COMPRESSIONS),
    ),
    "parquet": Format(
        lambda paths, o: read_parquet(paths, batch_size=o.batch_size, columns=o.columns),
        _write_parquet,
        (".parquet", ".pq"),
    ),
    "prebatched": Format(
        lambda paths, o: read_prebatched(paths, batch_size=o.batch_size, columns=o.columns),
        _write_prebatched,
        (".prebatched", ".arrow"),
    ),
    # In "tfrecord" a record is an Example of one row; in "tfrecord-prebatched", which has no suffix, of a whole batch.
    "tfrecord": Format(_read_tfrecord, _write_tfrecord, (".tfrecord", ".tfrecords"), (".gz",), takes_types=True),
    "tfrecord-prebatched": Format(
        partial(_read_tfrecord, prebatched=True),
        partial(_write_tfrecord, prebatched=True),
        (),
        (".gz",),
        takes_types=True,
    ),
}


def format_of(path: PathLike, name: str | None = None) -> str:
    """
    Return the name of a file's format.

    Args:
        path: the file, whose suffix names the format; the suffix of a compression may follow it.
        name: the format, if it is known.

    Raises:
        ValueError: an unknown name or suffix, or the suffix of a compression that the format does not have.

    Example:
        >>> format_of("train.txt.gz"), format_of("rows.bin", "parquet")
        ('criteo', 'parquet')
    """
    if name is None:
        suffix = plain_suffix(path)
        name = next((candidate for candidate, of_it in FORMATS.items() if suffix in of_it.suffixes), None)
        if name is None:
            raise ValueError(
                f"the format of {os.fspath(path)} cannot be told from its suffix: name one of {', '.join(FORMATS)}"
            )
    if name not in FORMATS:
        raise ValueError(f"the format must be one of {', '.join(FORMATS)}, got {name!r}")
    suffix, known = os.path.splitext(os.fspath(path))[1], FORMATS[name].compressions
    if suffix in COMPRESSIONS and suffix not in known:
        raise ValueError(f"{os.fspath(path)} must end in {' or '.join(known) or 'no compression'}: it is {name}")
    return name


def read_format(
    sources: PathLike | Sequence[PathLike], options: Options, source_format: str | None = None
) -> Iterator[Any]:
    """
    Return an iterator over the record batches of files, all of one format.

    Raises:
        ValueError: files of several formats; types for a format that stores types itself.
    """
    paths = path_list(sources)
    if not paths:
        raise ValueError("sources must have at least one file, got none")
    names = [format_of(path, source_format) for path in paths]
    for path, name in zip(paths, names, strict=True):
        if name != names[0]:
            raise ValueError(f"sources must be of one format, got {names[0]} and, in {os.fspath(path)}, {name}")
    of_it = FORMATS[names[0]]
    if options.types and not of_it.takes_types:
        (column, kind), *_ = options.types.items()
        raise ValueError(f"types are for CSV and TFRecord files: {names[0]} has its own, got {kind} for {column!r}")
    return of_it.read(paths, options)


def convert(
    sources: PathLike | Sequence[PathLike],
    target: PathLike,
    *,
    source_format: FileFormat | None = None,
    target_format: FileFormat | None = None,
    batch_size: int = BATCH_SIZE,
    columns: Sequence[str] | None = None,
    types: Mapping[str, Any] | None = None,
    compression: str | None = None,
    prebatched_records: bool = False,
    progress: bool | None = None,
) -> int:
    r"""
    Read files of one format and write their rows as one file of another.

    One batch at a time is in memory (for Parquet one row group). The target bears its name only once it is complete.

    Args:
        sources: a file, or several with the same columns that are read in order.
        target: the file to be written.
        source_format, target_format: the names of the formats, as ``--from`` takes them. Default None: by the suffix.
            TFRecord files whose records are batches are ``"tfrecord-prebatched"``, which has no suffix.
        batch_size: rows of a batch, for prebatched files. Default 16,384.
        columns: the names of the columns to convert, in this order. Default None: all.
        types: Arrow's types or their names, by column, for the formats that do not store types: CSV and TFRecord.
        compression: the compression of the target: None or ``"zstd"`` for a prebatched file; any that Parquet has, by
            default ``"zstd"``, for a Parquet file. Text formats are compressed if the target ends in ``.gz``, ``.bz2``
            or ``.zst``, TFRecord if it ends in ``.gz``.
        prebatched_records: whether a record of a TFRecord target is a batch. Default False: a row.
        progress: whether to show a progress bar. Default None: if tqdm is installed and stderr is a terminal.

    Returns:
        The number of rows.

    Raises:
        ImportError: without pyarrow.
        ValueError: an argument that does not fit, columns that the target's format cannot hold.
        DataError: a source that is damaged or malformed.
        OSError: a file that cannot be read or written.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with open(f"{folder}/train.csv", "w") as file:
        ...     _ = file.write("id,price\n7,0.5\n8,1.5\n")
        >>> convert(f"{folder}/train.csv", f"{folder}/train.arrow")
        2
        >>> next(read_prebatched(f"{folder}/train.arrow")).to_pydict()
        {'id': [7, 8], 'price': [0.5, 1.5]}
    """
    arrow("convert")
    for path in path_list(sources):
        if Path(path).exists() and Path(target).exists() and Path(path).samefile(target):
            raise ValueError(f"target must not be one of the sources, got {os.fspath(target)}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    kinds = arrow_types("types", types)
    options = Options(batch_size, None if columns is None else list(columns), kinds, compression)
    to = format_of(target, target_format)
    if prebatched_records:
        if not to.startswith("tfrecord"):
            raise ValueError(f"prebatched_records is for a TFRecord target, got {to}")
        to = "tfrecord-prebatched"
    folder, write = Path(target).parent, FORMATS[to].write
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder to write into", os.fspath(folder))
    batches = read_format(sources, options, source_format)
    return write(target, progress_bar(batches, Path(target).name, "batch", progress), options)
