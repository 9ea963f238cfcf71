"""The order in which rows leave a full tier, or a full table."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Coldness", "coldest"]

# Rows that are read at once.
_CHUNK = 1 << 18
# On a CPU torch leaves so few rows to one thread: waiting for a second thread, part by part, could take longer.
_PART = 1 << 15
# Bits of a rank that one histogram counts.
_BITS = 11


def coldest(entries: Tensor, count: int, by_frequency: bool) -> Tensor:
    """
    Return the positions of the ``count`` entries that have been used least often, or least recently, ascending.

    Args:
        entries: ``[N, 2]``, as in :class:`KeyRows`. Among equally cold entries, the ones of the lowest keys are
            returned.
        count: the number of rows.
        by_frequency: whether the least often used are coldest, and of these the least recently used; else only the
            least recently used.
    """
    return Coldness(entries, int((entries[:, 1] >> 32).max()), by_frequency).coldest(count)


class Coldness:
    """
    The order in which rows are evicted: see :func:`coldest`.

    Entries are read in parts, so that no temporary has the table's size.

    Args:
        entries: the argument of :func:`coldest`; free rows' entries are skipped.
        step: rows of this or a later version stay.
        by_frequency: the argument of :func:`coldest`.
    """

    def __init__(self, entries: Tensor, step: int, by_frequency: bool) -> None:
        self._part = _CHUNK if entries.is_cuda else _PART
        self._keys, numbers = entries.unbind(1)
        self._parts, self._step, self._by_frequency = numbers.split(self._part), step, by_frequency
        self._device = entries.device
        # Versions, plus one, are no higher than the step; a frequency has 31 bits.
        self._bits = step.bit_length()
        self._digits = -(-(self._bits + (31 if by_frequency else 1)) // _BITS)
        self._histogram = self._count(self._digits - 1, 0)
        self.rows = int(self._histogram.sum())
        """How many rows may be evicted."""

    def _ranks(self, numbers: Tensor) -> Tensor:
        """Return ranks of at least 0, lower ones colder; -1 for rows that are free or must stay."""
        versions = numbers >> 32  # plus one; where the row is free -1
        ranks = ((numbers & 0xFFFFFFFF) << self._bits) + versions if self._by_frequency else versions.clone()
        return ranks.masked_fill_((versions < 0) | (versions > self._step), -1)

    def _count(self, digit: int, above: int) -> Tensor:
        """Count the rows whose rank has the higher digits ``above``, by the given digit."""
        counts = torch.zeros(1 << _BITS, dtype=torch.int64, device=self._device)
        for part in self._parts:
            ranks = self._ranks(part) >> digit * _BITS
            ranks = ranks[(ranks >> _BITS) == above]
            counts += torch.bincount(ranks & (1 << _BITS) - 1, minlength=1 << _BITS)
        return counts.cpu()

    def coldest(self, count: int) -> Tensor:
        """Return the positions of the ``count`` coldest rows, ascending."""
        limit, rest, counts = 0, count, self._histogram
        for digit in reversed(range(self._digits)):
            up_to = counts.cumsum(0)
            its = int(torch.searchsorted(up_to, rest))
            rest -= int(up_to[its] - counts[its])
            limit = limit << _BITS | its
            if digit:
                counts = self._count(digit - 1, limit)
        positions, ties = [], []
        for k, part in enumerate(self._parts):
            ranks = self._ranks(part)
            positions.append(((ranks < limit) & (ranks >= 0)).nonzero().flatten() + k * self._part)
            ties.append((ranks == limit).nonzero().flatten() + k * self._part)
        equal = torch.cat(ties)
        lowest = self._keys[equal].topk(rest, largest=False, sorted=False).indices
        return torch.cat([*positions, equal[lowest]]).sort().values
