"""Where examples come from: generated as they are needed, or the rows of Criteo's files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

T = TypeVar("T")
B_co = TypeVar("B_co", covariant=True)


class Source(Protocol[B_co]):
    """Examples to train on, the same in every epoch, and others that are held out."""

    def batches(self, first: int = 0) -> Iterator[B_co]:
        """An epoch's batches, without so many at its beginning."""

    def epoch_length(self) -> int | None:
        """How many batches an epoch has, where it is known."""

    def held_out(self) -> Sequence[B_co]:
        """Batches that are never trained on, at least one."""

    def fingerprint(self) -> str:
        """What tells these examples from others."""


class Generates(Protocol[B_co]):
    """Makes examples by number of their batch. Its ``repr`` tells it from others."""

    @property
    def batch_size(self) -> int:
        """Examples in a batch."""

    def batch(self, number: int) -> B_co:
        """The batch of a number, at least 0."""

    def batches(self, first: int, last: int) -> Iterator[B_co]:
        """Those of the numbers from ``first`` up to, without, ``last``."""


class GeneratedSource(Generic[T]):
    """
    Examples made when they are needed; no more than a batch of them is in memory, but for those held out.

    Args:
        generator: makes them.
        samples: of an epoch, rounded up to whole batches.
        held_out: examples, likewise.
    """

    def __init__(self, generator: Generates[T], samples: int, held_out: int) -> None:
        self.generator = generator
        self._length = -(-samples // generator.batch_size)
        self._held_out_length = -(-held_out // generator.batch_size)

    def batches(self, first: int = 0) -> Iterator[T]:
        """Generated one by one."""
        return self.generator.batches(first, self._length)

    def epoch_length(self) -> int:
        """In batches."""
        return self._length

    def held_out(self) -> list[T]:
        """The batches after an epoch's."""
        return self._held_out

    @cached_property
    def _held_out(self) -> list[T]:
        return list(self.generator.batches(self._length, self._length + self._held_out_length))

    def fingerprint(self) -> str:
        """The generator's arguments and the length."""
        return f"{self._length} batches of {self.generator}"


class CriteoRows(Generic[T]):
    """
    The rows of Criteo's files, one in ten of which is held out, read anew in every epoch.

    Args:
        paths: of the files, for messages and the fingerprint.
        read: gives their record batches, of so many rows each.
        batch_size: rows that are trained on at a time. Some batches have one more, as rows are held out by their place
            in the files; the last may have fewer.
        held_out: how many rows are kept for the metrics, the first of those held out.
        as_batch: makes a training batch of a record batch.

    Raises:
        OSError: a file that cannot be opened.
        ValueError: too few rows; a malformed line, while it is read.
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
        """Record batches of the rows that are held out, or of the others."""
        begin = 0
        # So many that about the batch's size remain.
        for batch in self._read(-(-self._batch_size * self.EVERY // (self.EVERY - 1))):
            rows = np.arange(batch.num_rows)
            chosen = rows[((begin + rows) % self.EVERY == self.EVERY - 1) == held]
            begin += batch.num_rows
            if len(chosen):
                yield batch.take(chosen)

    def batches(self, first: int = 0) -> Iterator[T]:
        """Read from the files, past so many."""
        number = -1
        for number, batch in enumerate(self._rows(held=False)):
            if number >= first:
                yield self._as_batch(batch)
        self._length = number + 1

    def epoch_length(self) -> int | None:
        """Known once an epoch was read."""
        return self._length

    def held_out(self) -> list[T]:
        """The first of the rows held out."""
        return self._held_out

    def fingerprint(self) -> str:
        """The files' names and sizes, and how they are cut."""
        files = ", ".join(f"{path.name} of {path.stat().st_size:,} bytes" for path in self._paths)
        return f"{files} in batches of {self._batch_size}"
