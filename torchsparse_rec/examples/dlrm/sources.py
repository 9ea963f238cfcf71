"""Where examples come from: generated as they are needed, or read from Criteo's files, as text or prebatched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...data.convert import FORMATS
from ...data.criteo import COLUMNS, read_criteo
from ...data.prebatched import read_prebatched
from .._sources import CriteoRows, GeneratedSource, SplitSource
from .data import Batch, Generator, as_batch
from .settings import Settings


def is_prebatched(path: Path) -> bool:
    """Say whether a file's suffix is one of those that :func:`torchsparse_rec.data.write_prebatched` takes."""
    return path.suffix in FORMATS["prebatched"].suffixes


def make_source(settings: Settings, paths: Sequence[Path] | None = None) -> SplitSource[Batch]:
    """
    Return the source of the files' rows, or of generated examples where no files are given.

    Raises:
        ImportError: if files are given and pyarrow is not installed.
        OSError: if a file cannot be opened.
        ValueError: for files of both kinds, too few rows, or columns that are not Criteo's.
    """
    if not paths:
        generator = Generator(settings.batch_size, settings.max_cardinality, settings.seed)
        return GeneratedSource(generator, settings.samples, settings.held_out)
    prebatched = [is_prebatched(path) for path in paths]
    if any(prebatched) != all(prebatched):
        raise ValueError(f"--data must be all prebatched or all text, got {', '.join(map(str, paths))}")

    def read(rows: int) -> Iterator[Any]:
        files: Sequence[Any] = list(paths)
        return (read_prebatched if prebatched[0] else read_criteo)(files, batch_size=rows, columns=COLUMNS)

    return CriteoRows(paths, read, settings.batch_size, settings.held_out, as_batch)
