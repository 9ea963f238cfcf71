"""Where examples come from: generated as they are needed, or read from files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...data import PrebatchedDataset, write_prebatched
from ...data.criteo import read_criteo
from .._sources import CriteoRows, GeneratedSource, SplitSource
from .data import HOTS, LABEL, NUMBERS, Batch, Generator
from .settings import Settings


class PrebatchedSource(GeneratedSource[Batch]):
    """
    Generated examples that are read from a file, written first if it is not there. Held-out ones are generated.

    Args:
        path: the file's path.
        generator, samples, held_out: as for :class:`GeneratedSource`.

    Raises:
        ImportError: if pyarrow is not installed.
        ValueError: if the file has other examples, or is damaged.
    """

    def __init__(self, path: Path, generator: Generator, samples: int, held_out: int) -> None:
        super().__init__(generator, samples, held_out)
        if not path.exists():
            write_prebatched(path, map(_as_columns, super().batches()))
        self._dataset = PrebatchedDataset(path)
        self._check(path)

    def _check(self, path: Path) -> None:
        """Raise ``ValueError`` if another generator made the file: each of its batches depends on all arguments."""
        wanted = _as_columns(self.generator.batch(0))
        stored = self._dataset.get_batch(0)
        same = len(self._dataset) == self._length and stored.keys() == wanted.keys()
        if not same or any(not torch.equal(stored[name].to(x.dtype), x) for name, x in wanted.items()):
            raise ValueError(
                f"{path} has {len(self._dataset)} batches of other examples than {self.fingerprint()}: give it another "
                "name, or remove it"
            )

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """Yield the file's batches from number ``first`` on."""
        return (_as_batch(columns) for columns in islice(self._dataset, first, None))


def _as_columns(batch: Batch) -> dict[str, Any]:
    return {LABEL: batch.labels.to(torch.int8), **{name: batch.columns[name] for name in (*NUMBERS, *HOTS)}}


def _as_batch(columns: Mapping[str, Any]) -> Batch:
    return Batch(columns[LABEL].to(torch.float32), columns)


def _of_record_batch(batch: Any) -> Batch:
    labels = torch.from_numpy(batch.column(LABEL).to_numpy(zero_copy_only=False).astype(np.float32))
    return Batch(labels, batch)


def make_source(settings: Settings, criteo: Path | None = None, prebatched: Path | None = None) -> SplitSource[Batch]:
    """
    Return the source of Criteo's examples, or of generated ones, which a file may keep.

    Raises:
        ImportError: if there is a file and pyarrow is not installed.
        OSError, ValueError: as for :class:`CriteoRows` and :class:`PrebatchedSource`.
    """
    if criteo is not None:

        def read(rows: int) -> Iterator[Any]:
            return read_criteo(criteo, batch_size=rows)

        return CriteoRows([criteo], read, settings.batch_size, settings.held_out, _of_record_batch)
    generator = Generator(settings.rows, settings.batch_size, settings.distribution, settings.seed)
    if prebatched is not None:
        return PrebatchedSource(prebatched, generator, settings.samples, settings.held_out)
    return GeneratedSource(generator, settings.samples, settings.held_out)
