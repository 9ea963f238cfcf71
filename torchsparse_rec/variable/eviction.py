"""Eviction: which keys lose their row, and when."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..tables.table import table_of
from .keys import packed, unpacked
from .options import CacheStrategy, GlobalStepEvict, L2WeightEvict, LFUEvict, LRUEvict

if TYPE_CHECKING:
    from ..nn.embedding_variable import EmbeddingVariable

__all__ = ["Eviction", "coldest"]

# Where a table is full, this share of it is evicted at once: finding the coldest rows is a pass over all.
_SHARE = 32
# Rows that are read at once.
_CHUNK = 1 << 18
# On a CPU torch leaves so few rows to one thread: waiting for a second thread, part by part, could take longer.
_PART = 1 << 15
# Bits of a rank that one histogram counts.
_BITS = 11


class Eviction:
    """
    Evicts keys of one variable by its evict options.

    Args:
        owner: the variable.
    """

    def __init__(self, owner: EmbeddingVariable) -> None:
        self._owner = weakref.ref(owner)
        self._options = owner.ev_option.evictions
        self.seen = 0
        """The step of the last lookup, from which the schedule of evictions continues."""
        capacity = next((option for option in self._options if isinstance(option, LRUEvict)), None)
        self._most = 0 if capacity is None else capacity.capacity
        self._goes_by_frequency = isinstance(capacity, LFUEvict)

    @property
    def owner(self) -> EmbeddingVariable:
        """The variable."""
        owner = self._owner()
        assert owner is not None
        return owner

    def on_schedule(self) -> None:
        """Evict by the options that are due, before the first lookup of a step."""
        step, seen = self.owner.global_step, self.seen
        self.seen = step
        for option in self._options:
            every = getattr(option, "every", 0)
            if every and step // every != seen // every:
                self._run(option)

    def run(self) -> int:
        """Evict by all options, and return how many keys were evicted."""
        return sum(self._run(option) for option in self._options)

    def _run(self, option: object) -> int:
        owner = self.owner
        if isinstance(option, GlobalStepEvict):
            before = owner.global_step - option.steps_to_live
            gone = self._evict(lambda rows, versions: versions < before)
            if owner.cold is not None:
                gone += owner.cold.evict(lambda part: part.versions < before)
            if owner.admission is not None:
                owner._note_erased(owner.admission.expire(before))
        elif isinstance(option, L2WeightEvict):
            table_of(owner._stored_weight()).flush()
            threshold = option.l2_weight_threshold
            gone = self._evict(lambda rows, versions: self._halves(rows) < threshold)
            if owner.cold is not None:
                gone += owner.cold.evict(lambda part: part.values.double().square().sum(1) / 2 < threshold)
        else:
            return 0  # capacities are kept at each insertion
        owner._evicted += gone
        return gone

    def _halves(self, rows: Tensor) -> Tensor:
        """Return half the sum of squares of each row, float64 ``[N]``."""
        weight = self.owner._stored_weight().detach()
        parts = [weight.index_select(0, part).double().square().sum(1) / 2 for part in rows.split(_CHUNK)]
        return torch.cat(parts) if parts else weight.new_zeros(0, dtype=torch.float64)

    def _evict(self, goes) -> int:
        """Evict rows of the first tier for which ``goes(rows, versions)`` is true, except those of the current step."""
        owner = self.owner
        rows = owner.keys.rows()
        versions = unpacked(owner.keys.entries[rows, 1])[1]
        gone = rows[goes(rows, versions) & (versions < owner.global_step)]
        return owner._erase(owner.keys.entries[gone, 0]) if len(gone) else 0

    # ---- Capacities --------------------------------------------------------------------------------------------------

    def make_room(self, wanted: int, protected: Tensor | None) -> None:
        """
        Free rows of the first tier: demote them to the next tier, or evict them where there is none.

        Args:
            wanted: how many rows at least.
            protected: rows that must stay, beside those whose version is the current step.

        Raises:
            RuntimeError: the capacity is less than the ids of one step.
        """
        owner = self.owner
        keys = owner.keys
        if protected is not None:
            frequencies, _ = unpacked(keys.entries[protected, 1])
            keys.entries[protected, 1] = packed(frequencies, torch.full_like(frequencies, owner.global_step))
        entries = keys.entries[: keys.used]
        if owner.cold is None:
            victims = self._coldest_of(entries, wanted, self._most, self._goes_by_frequency)
            owner._evicted += owner._erase(keys.entries[victims, 0])
        else:
            by_frequency = owner.ev_option.storage_option.cache_strategy is CacheStrategy.LFU
            victims = self._coldest_of(entries, wanted, keys.capacity, by_frequency)
            owner.cold.demote(victims, keys.entries[victims, 0])

    def keep_capacity(self, coming: Tensor | None = None) -> None:
        """
        Evict keys beyond the capacity, of all tiers together: the same keys as from a table in memory alone.

        Args:
            coming: distinct keys that are about to be inserted or overwritten. Default: none.

        Raises:
            RuntimeError: the capacity is less than the ids of one step.
        """
        owner = self.owner
        if owner.total_count() + (0 if coming is None else len(coming)) <= self._most:
            return
        entries, over = self._all_entries(), -self._most
        if coming is not None:
            entries = entries[~torch.isin(entries[:, 0], coming)]
            over += len(coming)
        over += len(entries)
        if over > 0:
            gone = self._coldest_of(entries, over, self._most, self._goes_by_frequency)
            owner._evicted += self._erase(entries[gone, 0])

    def shrink(self) -> None:
        """Evict keys beyond the capacity after a checkpoint is restored; rows of the last step are not protected."""
        over = self.owner.total_count() - self._most
        if over > 0:
            entries = self._all_entries()
            self._erase(entries[~self.staying(entries, over), 0])

    def staying(self, entries: Tensor, over: int) -> Tensor:
        """Return a mask of entries that is false for the ``over`` coldest; rows of the last step are not protected."""
        stays = torch.ones(len(entries), dtype=torch.bool, device=entries.device)
        stays[coldest(entries, over, self._goes_by_frequency)] = False
        return stays

    def _coldest_of(self, entries: Tensor, wanted: int, capacity: int, by_frequency: bool) -> Tensor:
        """Return the positions of entries to evict: ``wanted`` or, if that is more, a share of the capacity."""
        order = _Coldness(entries, self.owner.global_step, by_frequency)
        if order.rows < wanted:
            raise RuntimeError(
                f"EmbeddingVariable {self.owner.name!r}: a capacity of {capacity} rows must hold the ids of one step, "
                f"of which {wanted - order.rows} have no room"
            )
        return order.coldest(min(order.rows, max(wanted, capacity // _SHARE)))

    def _all_entries(self) -> Tensor:
        """Return the entries of all tiers, ``[N, 2]``."""
        keys, cold = self.owner.keys, self.owner.cold
        entries = keys.entries[keys.rows()]
        return entries if cold is None else torch.cat([entries, cold.entries().to(entries.device)])

    def _erase(self, keys: Tensor) -> int:
        """Erase keys of all tiers, and return how many had a row."""
        cold = self.owner.cold
        return self.owner._erase(keys) + (0 if cold is None else cold.erase(keys))


def coldest(entries: Tensor, count: int, by_frequency: bool) -> Tensor:
    """
    Return the positions of the ``count`` entries that have been used least often, or least recently, ascending.

    Args:
        entries: ``[N, 2]``, as in :class:`KeyRows`. Of equally cold entries, those of the lowest keys are returned.
        count: how many.
        by_frequency: whether the least often used are coldest, and of these the least recently used; else only the
            least recently used.
    """
    return _Coldness(entries, int((entries[:, 1] >> 32).max()), by_frequency).coldest(count)


class _Coldness:
    """
    The order in which rows are evicted: see :func:`coldest`.

    Entries are read in parts, so that no temporary has the table's size.

    Args:
        entries: as for :func:`coldest`; those of free rows are skipped.
        step: rows of this or a later version stay.
        by_frequency: as for :func:`coldest`.
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
        """Count the rows by the given digit of their rank, of those whose higher digits are ``above``."""
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
