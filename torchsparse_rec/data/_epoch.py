"""The order in which an epoch gives the rows of stored batches, computed only from the batches' numbers of rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# The purposes for which random numbers are drawn; each has its own seed, so that no draw repeats another's.
_ORDER, _ROWS = 0, 1


@dataclass(frozen=True)
class Piece:
    """The rows ``[begin, end)`` of a window, counted from the window's beginning, in the window's order."""

    window: int
    begin: int
    end: int


@dataclass(frozen=True)
class Epoch:
    """
    The batches of one epoch for one rank.

    Stored batches, in their order or shuffled, form windows; rows are shuffled within a window, or not. The rows of all
    windows, joined in order, are cut into batches of ``batch_size`` rows, or of the stored batches' sizes. A rank takes
    a run of batches without gaps; all ranks take equally many.
    """

    #: The number of rows of each stored batch, int64.
    rows: np.ndarray
    batch_size: int | None
    shuffle: bool
    #: The number of stored batches in a window; 0: rows are not shuffled.
    rows_window: int
    drop_last: bool
    seed: int
    epoch: int
    rank: int
    world_size: int

    def _generator(self, *purpose: int) -> torch.Generator:
        # SeedSequence is numpy's promise of the same numbers in every release.
        seeds = np.random.SeedSequence([self.seed, self.epoch, *purpose]).generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(seeds[0] >> np.uint64(1)))

    @cached_property
    def order(self) -> np.ndarray:
        """The numbers of the stored batches, in the order in which they are read."""
        if not self.shuffle:
            return np.arange(len(self.rows))
        return torch.randperm(len(self.rows), generator=self._generator(_ORDER)).numpy()

    @cached_property
    def _ends(self) -> np.ndarray:
        """The number of rows up to the end of each stored batch, in order, after a leading 0."""
        return np.concatenate([[0], np.cumsum(self.rows[self.order])]).astype(np.int64)

    @cached_property
    def _windows(self) -> np.ndarray:
        """The position of each window's first stored batch, followed by the number of stored batches."""
        size = max(1, self.rows_window)
        return np.append(np.arange(0, len(self.rows), size), len(self.rows))

    @cached_property
    def _count(self) -> int:
        """The number of batches of all ranks together, without repetition."""
        if self.batch_size is None:
            return len(self.rows)
        total = int(self._ends[-1])
        return total // self.batch_size if self.drop_last else -(-total // self.batch_size)

    def _cut(self, k: int) -> int:
        """Return the number of rows before batch k, among the rows of all ranks."""
        return int(self._ends[k]) if self.batch_size is None else min(k * self.batch_size, int(self._ends[-1]))

    @cached_property
    def _share(self) -> int:
        return self._count // self.world_size if self.drop_last else -(-self._count // self.world_size)

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        return self._share

    def pieces(self, i: int) -> list[Piece]:
        """Return the pieces of windows that make up batch i of this rank; at least one."""
        k = (self.rank * self._share + i) % self._count
        begin, end = self._cut(k), self._cut(k + 1)
        if self.batch_size is None and self.rows_window == 0:
            return [Piece(k, 0, end - begin)]
        bounds = self._ends[self._windows]
        first = int(np.searchsorted(bounds, begin, side="right")) - 1
        last = int(np.searchsorted(bounds, end, side="left"))
        pieces = [
            Piece(w, max(begin - int(bounds[w]), 0), min(end, int(bounds[w + 1])) - int(bounds[w]))
            for w in range(min(first, len(bounds) - 2), max(last, first + 1))
            if w < len(bounds) - 1
        ]
        return [piece for piece in pieces if piece.end > piece.begin] or pieces[:1]

    def window(self, w: int) -> list[int]:
        """Return the numbers of the stored batches in a window."""
        return self.order[self._windows[w] : self._windows[w + 1]].tolist()

    def permutation(self, w: int) -> Tensor | None:
        """Return the order of a window's rows, or None if they are not shuffled."""
        if self.rows_window == 0:
            return None
        rows = int(self._ends[self._windows[w + 1]] - self._ends[self._windows[w]])
        return torch.randperm(rows, generator=self._generator(_ROWS, w))
