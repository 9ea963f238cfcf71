"""Where examples come from: generated as they are needed, or read from Criteo's files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from ._generated import Generator

T = TypeVar("T")


class Source(ABC, Generic[T]):
    """Examples to train on, the same in every epoch unless the source has a state."""

    @abstractmethod
    def batches(self, first: int = 0) -> Iterator[T]:
        """Yield an epoch's batches from number ``first`` on."""

    @abstractmethod
    def epoch_length(self) -> int | None:
        """Return the number of batches in an epoch, or None where it is not known yet."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a text that differs between sources of different examples."""

    def state(self) -> dict[str, Any]:
        """Return what decides the examples of the epochs to come, for a checkpoint."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""


class SplitSource(Source[T]):
    """A source some of whose examples are held out."""

    @abstractmethod
    def held_out(self) -> Sequence[T]:
        """Return batches that are never trained on, at least one."""


class GeneratedSource(SplitSource[T]):
    """
    Generated examples. Beside the held-out ones no more than a batch of them is in memory.

    Args:
        generator: makes the examples.
        samples: how many an epoch has, rounded up to whole batches.
        held_out: how many are held out, rounded up likewise.
    """

    def __init__(self, generator: Generator[T], samples: int, held_out: int) -> None:
        self.generator = generator
        self._length = -(-samples // generator.batch_size)
        self._held_out_length = -(-held_out // generator.batch_size)

    def batches(self, first: int = 0) -> Iterator[T]:
        """Yield the epoch's batches from number ``first`` on, each generated when it is needed."""
        return self.generator.batches(first, self._length)

    def epoch_length(self) -> int:
        """Return the number of batches in an epoch."""
        return self._length

    def held_out(self) -> list[T]:
        """Return the batches whose numbers follow the epoch's."""
        return self._held_out

    @cached_property
    def _held_out(self) -> list[T]:
        return list(self.generator.batches(self._length, self._length + self._held_out_length))

    def fingerprint(self) -> str:
        """Return the generator's arguments and the epoch's length, as text."""
        return f"{self._length} batches of {self.generator}"


class CriteoRows(SplitSource[T]):
    """
    Rows of Criteo's files, read anew in every epoch. Every tenth row is held out.

    Args:
        paths: of the files, for messages and the fingerprint.
        read: yields the files' record batches, of as many rows as its argument says.
        batch_size: rows that are trained on at a time. Some batches have one more, as rows are held out by their place
            in the files; the last may have fewer.
        held_out: how many rows are kept for the metrics, the first of those held out.
        as_batch: converts a record batch to a training batch.

    Raises:
        OSError: if a file cannot be opened.
        ValueError: if there are too few rows; when a malformed line is read.
    """

    EVERY = 10

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[int], Iterator[Any]],
        batch_size: int,
        held_out: int,
        as_batch: Callable[[Any], T],
    ) -> None:
        self._paths, self._read, self._batch_size, self._as_batch = paths, read, batch_size, as_batch
        self._length: int | None = None
        self._held_out: list[T] = []
        for batch in self._rows(held=True):
            self._held_out.append(as_batch(batch.slice(0, held_out)))
            held_out -= batch.num_rows
            if held_out <= 0:
                break
        if not self._held_out:
            raise ValueError(f"{self._names()} must have at least {self.EVERY} rows, one of which is held out")

    def _names(self) -> str:
        return ", ".join(map(str, self._paths))

    def _rows(self, held: bool) -> Iterator[Any]:
        """Yield record batches of the rows that are held out, or of the others."""
        begin = 0
        # So many rows are read at a time that about a batch's remain without those held out.
        for batch in self._read(-(-self._batch_size * self.EVERY // (self.EVERY - 1))):
            rows = np.arange(batch.num_rows)
            chosen = rows[((begin + rows) % self.EVERY == self.EVERY - 1) == held]
            begin += batch.num_rows
            if len(chosen):
                yield batch.take(chosen)

    def batches(self, first: int = 0) -> Iterator[T]:
        """Read the files' rows from batch ``first`` on, without those held out, and yield them as batches."""
        number = -1
        for number, batch in enumerate(self._rows(held=False)):
            if number >= first:
                yield self._as_batch(batch)
        self._length = number + 1

    def epoch_length(self) -> int | None:
        """Return the number of batches in an epoch, or None before one has been read to its end."""
        return self._length

    def held_out(self) -> list[T]:
        """Return batches of the first of the held-out rows."""
        return self._held_out

    def fingerprint(self) -> str:
        """Return the files' names and sizes and the size of a batch, as text."""
        files = ", ".join(f"{path.name} of {path.stat().st_size:,} bytes" for path in self._paths)
        return f"{files} in batches of {self._batch_size}"
