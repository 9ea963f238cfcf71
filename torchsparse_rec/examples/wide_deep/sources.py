"""Where examples come from: generated as they are needed, or from files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ...data import PrebatchedDataset, write_prebatched
from ...data.criteo import read_criteo
from .data import HOTS, LABEL, NUMBERS, Batch, Generator

if TYPE_CHECKING:
    from .train import Settings


class Source(Protocol):
    """Examples to train on, the same in every epoch, and others that are held out."""

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """An epoch's batches, without so many at its beginning."""

    def epoch_length(self) -> int | None:
        """How many batches an epoch has, where it is known."""

    def held_out(self) -> list[Batch]:
        """Batches that are never trained on, at least one."""

    def fingerprint(self) -> str:
        """What tells these examples from others."""


class GeneratedSource:
    """
    Examples made when they are needed; no more than a batch of them is in memory, but for those held out.

    Args:
        generator: makes them.
        samples: of an epoch, rounded up to whole batches.
        held_out: examples, likewise.
    """

    def __init__(self, generator: Generator, samples: int, held_out: int) -> None:
        self.generator = generator
        self._length = -(-samples // generator.batch_size)
        self._held_out_length = -(-held_out // generator.batch_size)

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """Generated one by one."""
        return self.generator.batches(first, self._length)

    def epoch_length(self) -> int:
        """In batches."""
        return self._length

    def held_out(self) -> list[Batch]:
        """The batches after an epoch's."""
        return self._held_out

    @cached_property
    def _held_out(self) -> list[Batch]:
        return list(self.generator.batches(self._length, self._length + self._held_out_length))

    def fingerprint(self) -> str:
        """The generator's arguments and the length."""
        return f"{self._length} batches of {self.generator}"


class PrebatchedSource(GeneratedSource):
    """
    The same examples from a file, which is written first if it is not there. Held-out ones are generated.

    Args:
        path: of the file.
        generator, samples, held_out: as for :class:`GeneratedSource`.

    Raises:
        ImportError: without pyarrow.
        ValueError: a file of other examples, or one that is damaged.
    """

    def __init__(self, path: Path, generator: Generator, samples: int, held_out: int) -> None:
        super().__init__(generator, samples, held_out)
        if not path.exists():
            write_prebatched(path, map(_as_columns, super().batches()))
        self._dataset = PrebatchedDataset(path)
        self._check(path)

    def _check(self, path: Path) -> None:
        """Refuse a file that another generator made: each of its batches depends on all arguments."""
        wanted = _as_columns(self.generator.batch(0))
        stored = self._dataset.get_batch(0)
        same = len(self._dataset) == self._length and stored.keys() == wanted.keys()
        if not same or any(not torch.equal(stored[name].to(x.dtype), x) for name, x in wanted.items()):
            raise ValueError(
                f"{path} has {len(self._dataset)} batches of other examples than {self.fingerprint()}: give it another "
                "name, or remove it"
            )

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """Mapped from the file."""
        return (_as_batch(columns) for columns in islice(self._dataset, first, None))


def _as_columns(batch: Batch) -> dict[str, Any]:
    return {LABEL: batch.labels.to(torch.int8), **{name: batch.columns[name] for name in (*NUMBERS, *HOTS)}}


def _as_batch(columns: Mapping[str, Any]) -> Batch:
    return Batch(columns[LABEL].to(torch.float32), columns)


class CriteoSource:
    """
    The rows of a file of Criteo's, one in ten of which is held out, read anew in every epoch.

    Args:
        path: of the file.
        batch_size: rows that are trained on at a time. Some batches have one more, as rows are held out by their place
            in the file; the last may have fewer.
        held_out: how many rows are kept for the metrics, the first of those held out.

    Raises:
        ImportError: without pyarrow.
        OSError: a file that cannot be opened.
        ValueError: too few rows; a malformed line, while it is read.
    """

    EVERY = 10

    def __init__(self, path: Path, batch_size: int, held_out: int) -> None:
        self._path, self._batch_size = path, batch_size
        self._length: int | None = None
        self._held_out = []
        for batch in self._rows(held=True):
            self._held_out.append(_of_record_batch(batch.slice(0, held_out)))
            held_out -= batch.num_rows
            if held_out <= 0:
                break
        if not self._held_out:
            raise ValueError(f"{path} must have at least {self.EVERY} rows, one of which is held out")

    def _rows(self, held: bool) -> Iterator[Any]:
        """Record batches of the rows that are held out, or of the others."""
        begin = 0
        # So many that about the batch's size remain.
        for batch in read_criteo(self._path, batch_size=-(-self._batch_size * self.EVERY // (self.EVERY - 1))):
            rows = np.arange(batch.num_rows)
            chosen = rows[((begin + rows) % self.EVERY == self.EVERY - 1) == held]
            begin += batch.num_rows
            if len(chosen):
                yield batch.take(chosen)

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """Read from the file, past so many."""
        number = -1
        for number, batch in enumerate(self._rows(held=False)):
            if number >= first:
                yield _of_record_batch(batch)
        self._length = number + 1

    def epoch_length(self) -> int | None:
        """Known once an epoch was read."""
        return self._length

    def held_out(self) -> list[Batch]:
        """The first of the rows held out."""
        return self._held_out

    def fingerprint(self) -> str:
        """The file's name and size, and how it is cut."""
        return f"{self._path.name} of {self._path.stat().st_size:,} bytes in batches of {self._batch_size}"


def _of_record_batch(batch: Any) -> Batch:
    labels = torch.from_numpy(batch.column(LABEL).to_numpy(zero_copy_only=False).astype(np.float32))
    return Batch(labels, batch)


def make_source(settings: Settings, criteo: Path | None = None, prebatched: Path | None = None) -> Source:
    """Criteo's examples, or generated ones, which a file may keep."""
    if criteo is not None:
        return CriteoSource(criteo, settings.batch_size, settings.held_out)
    generator = Generator(settings.rows, settings.batch_size, settings.distribution, settings.seed)
    if prebatched is not None:
        return PrebatchedSource(prebatched, generator, settings.samples, settings.held_out)
    return GeneratedSource(generator, settings.samples, settings.held_out)
