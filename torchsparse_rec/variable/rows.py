"""All rows of a variable, in every tier: which of them stay, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .cold import ColdRows
from .coldness import Coldness, coldest
from .filters import CounterAdmission, SketchAdmission
from .keys import packed, unpacked
from .options import CacheStrategy, EmbeddingVariableOption, GlobalStepEvict, L2WeightEvict, LFUEvict, LRUEvict
from .records import RowPart
from .store import RowStore

__all__ = ["TableRows"]

# Where a table is full, this share of it is evicted at once: finding the coldest rows is a pass over all.
_SHARE = 32
# Rows that are read at once.
_CHUNK = 1 << 18
# Rows in one part; so many are copied at once while a table is saved.
_PART_ROWS = 1 << 19
# The most keys noted for a delta, unless the table has more rows.
_MOST_NOTED = 1 << 20


class TableRows:
    """
    The rows of all tiers: new rows find room, capacities are kept, rows are evicted by the options.

    Args:
        store: the first tier.
        option: the option of the variable.
        admission: the variable's filter.
    """

    def __init__(
        self, store: RowStore, option: EmbeddingVariableOption, admission: CounterAdmission | SketchAdmission | None
    ) -> None:
        self.store, self.admission = store, admission
        #: The tiers below the first; None where there is one tier.
        self.cold: ColdRows | None = None
        if len(option.storage_option.storage_type.tiers()) > 1:
            self.cold = ColdRows(store, option.storage_option)
        self._options, self._most = option.evictions, option.capacity
        limit = next((each for each in option.evictions if isinstance(each, LRUEvict)), None)
        self._goes_by_frequency = isinstance(limit, LFUEvict)
        self._demotes_by_frequency = option.storage_option.cache_strategy is CacheStrategy.LFU
        self.tell_keys()
        #: How many keys have been evicted.
        self.evicted = 0
        #: The step of the last lookup: the schedule of evictions continues from it.
        self.seen = 0
        self.note_saved(None)

    def __len__(self) -> int:
        """Return the number of rows of all tiers. On CUDA it waits for the device."""
        return len(self.store.keys) + (0 if self.cold is None else len(self.cold))

    def __bool__(self) -> bool:
        return True

    def tell_keys(self) -> None:
        """Tell the keys of the first tier whether it may always grow."""
        self.store.keys.may_grow = self._most is None and self.cold is None

    # ---- What the next delta holds -----------------------------------------------------------------------------------

    def note_saved(self, saved: tuple[int, str, int] | None) -> None:
        """Note the step, folder and version of a checkpoint, which the next delta is on top of; None: of none."""
        self.saved = saved
        self.erased: list[Tensor] = []
        self.written: list[Tensor] = []
        #: Whether all rows have changed since the checkpoint, or more keys than the table has rows.
        self.all_changed = False

    def note_erased(self, keys: Tensor) -> None:
        """Note keys that have lost their row."""
        self._note(self.erased, keys)

    def note_written(self, keys: Tensor) -> None:
        """Note keys that have changed although their version does not say so."""
        self._note(self.written, keys)

    def note_all(self) -> None:
        """Note that all rows have changed: a full version follows in the place of the next delta."""
        if self.saved is not None:
            self.erased, self.written, self.all_changed = [], [], True

    def _note(self, noted: list[Tensor], keys: Tensor) -> None:
        if self.saved is None or self.all_changed:
            return
        noted.append(keys.to("cpu", torch.int64, copy=True))
        if len(noted) > 256:
            noted[:] = [torch.cat(noted).unique()]
            rows = self.store.keys.capacity + (0 if self.cold is None else len(self.cold))
            if len(noted[0]) > max(rows, _MOST_NOTED):
                self.note_all()

    # ---- Room --------------------------------------------------------------------------------------------------------

    def find_room(self, wanted: int, protected: Tensor | None = None) -> None:
        """
        Make rows of the first tier free: grow, or where the capacity is reached, demote or evict other rows.

        Args:
            wanted: the least number of rows.
            protected: rows that must stay, beside the rows whose version is the current step.

        Raises:
            RuntimeError: the capacity is less than the ids of one step.
        """
        keys = self.store.keys
        self._grow_for(wanted)
        over = wanted - keys.room()
        if over <= 0:
            return
        if protected is not None:
            frequencies, _ = unpacked(keys.entries[protected, 1])
            keys.entries[protected, 1] = packed(frequencies, torch.full_like(frequencies, self.store.step))
        entries = keys.entries[: keys.used]
        if self.cold is None:
            assert self._most is not None
            gone = self._coldest_of(entries, over, self._most, self._goes_by_frequency)
            self.evicted += self._erase_first(keys.entries[gone, 0])
        else:
            gone = self._coldest_of(entries, over, keys.capacity, self._demotes_by_frequency)
            self.cold.demote(gone, keys.entries[gone, 0])

    def _grow_for(self, wanted: int) -> None:
        """Grow until ``wanted`` rows are free, or to the capacity."""
        keys = self.store.keys
        limits = [] if self._most is None else [self._most + keys.reserved]
        if self.cold is not None:
            limits.append(self.cold.most_rows())
        capacity = keys.capacity_for(wanted, min(limits) if limits else None)
        if capacity != keys.capacity:
            self.store.grow(capacity)

    def share_capacity(self, ranks: int) -> None:
        """Have an equal share of the capacity, rounded up: other ranks have the other keys."""
        self._most = None if self._most is None else -(-self._most // ranks)

    def keep_capacity(self, coming: Tensor | None = None) -> None:
        """
        Evict keys beyond the capacity, of all tiers together: the same keys as from a table in memory alone.

        Args:
            coming: distinct keys that are about to be inserted or overwritten. Default: none.

        Raises:
            RuntimeError: the capacity is less than the ids of one step.
        """
        keys, most, count = self.store.keys, self._most, 0 if coming is None else len(coming)
        if most is None or (self.cold is None and keys.capacity <= most + keys.reserved):
            return
        if len(self) + count <= most:
            return
        entries = self.all_entries()
        if coming is not None:
            entries = entries[~torch.isin(entries[:, 0], coming)]
        over = len(entries) + count - most
        if over > 0:
            gone = self._coldest_of(entries, over, most, self._goes_by_frequency)
            self.evicted += self.erase(entries[gone, 0])

    def shrink(self) -> None:
        """Evict keys beyond the capacity after a checkpoint is restored; rows of the last step are not protected."""
        over = 0 if self._most is None else len(self) - self._most
        if over > 0:
            entries = self.all_entries()
            self.erase(entries[~self._staying(entries, over), 0])

    def _staying(self, entries: Tensor, over: int) -> Tensor:
        """Return a mask of entries that is false for the ``over`` coldest; rows of the last step are not protected."""
        stays = torch.ones(len(entries), dtype=torch.bool, device=entries.device)
        stays[coldest(entries, over, self._goes_by_frequency)] = False
        return stays

    def _coldest_of(self, entries: Tensor, wanted: int, capacity: int, by_frequency: bool) -> Tensor:
        """Return the positions of entries to evict: ``wanted`` or, if that is more, a share of the capacity."""
        order = Coldness(entries, self.store.step, by_frequency)
        if order.rows < wanted:
            evict = "LFUEvict" if by_frequency else "LRUEvict"
            way = "give more storage_size" if self._most != capacity else f"give {evict} a larger capacity"
            raise RuntimeError(
                f"EmbeddingVariable {self.store.name!r}: a capacity of {capacity} rows must hold the ids of one step, "
                f"but {wanted - order.rows} have no room: {way}"
            )
        return order.coldest(min(order.rows, max(wanted, capacity // _SHARE)))

    def all_entries(self) -> Tensor:
        """Return the entries of all tiers, ``[N, 2]``."""
        entries = self.store.keys.entries[self.store.keys.rows()]
        return entries if self.cold is None else torch.cat([entries, self.cold.entries().to(entries.device)])

    # ---- Rows --------------------------------------------------------------------------------------------------------

    def first_tier(self, since: int | None = None) -> tuple[Tensor, Tensor]:
        """
        Return the rows of the first tier, ``[N]`` int64, ascending, and their keys.

        Args:
            since: the least version of the rows that are returned, besides the rows of :meth:`note_written`. Default:
                all.
        """
        keys = self.store.keys
        numbers = keys.entries[: keys.used, 1]
        mask = numbers != -1
        if since is not None:
            mask = mask & (unpacked(numbers)[1] >= since)
            if self.written:
                rows = keys.find(torch.cat(self.written).to(numbers.device))
                mask[rows[rows >= 0]] = True
        rows = mask.nonzero().flatten()
        return rows, keys.entries[rows, 0]

    def parts(self, since: int | None = None, order: Callable[[Tensor], Tensor] | None = None) -> Iterator[RowPart]:
        """
        Yield all rows in parts, the first tier's first.

        Args:
            since: the argument of :meth:`first_tier`.
            order: a function that returns the positions of some keys, ``[N]``, in the order in which the first tier's
                are wanted. Default: the order of rows.
        """
        rows, its_keys = self.first_tier(since)
        if order is not None:
            rows = rows[order(its_keys)]
        for some in rows.split(_PART_ROWS) if len(rows) else [rows]:
            yield self.store.read(some)
        if self.cold is not None:
            for part in self.cold.parts():
                if since is not None:
                    changed = part.versions >= since
                    if self.written:
                        changed |= torch.isin(part.keys, torch.cat(self.written).to(part.keys.device))
                    part = part.select(changed)
                yield part

    def insert(self, keys: Tensor, values: Tensor, frequencies: Tensor | int, versions: Tensor | int) -> Tensor:
        """
        Write rows whose optimizer state begins anew, and note them for the next delta.

        Args:
            keys: ``[N]`` int64; of a repeated one the last row counts.
            values: ``[N, D]``.
            frequencies: ``[N]``, or one number for all rows.
            versions: ``[N]``, or one number for all rows.

        Returns:
            ``[N]``: negative where a key had a row in the first tier before.
        """
        if self.cold is None:
            if not self.store.keys.insertions:
                self._grow_for(len(keys))  # all keys are new, except repeated ones
            return self.store.write(keys, values, frequencies, versions, {}, make_room=self.find_room)
        of_all = [torch.as_tensor(x, device=keys.device).expand(len(keys)) for x in (frequencies, versions)]
        backwards = torch.arange(len(keys) - 1, -1, -1, device=keys.device)
        firsts = torch.ops.torchsparse_rec.unique_rows.default(keys[backwards])[0]
        part = RowPart(keys, values, of_all[0], of_all[1], {}).select(backwards[firsts])
        self.keep_capacity(part.keys)
        self.erase(keys)
        self.put(part)
        return torch.zeros_like(keys)

    def put(self, part: RowPart) -> None:
        """Write rows, new or not; rows that do not fit in the first tier go to the next, or are evicted."""
        keys = self.store.keys
        if self.cold is not None:
            new = keys.find(part.keys) < 0
            self._grow_for(int(new.sum()))
            fits = ~new | (new.cumsum(0) <= keys.room())
            if not fits.all():
                self.cold.put(part.select(~fits))
            part = part.select(fits)
        elif self._most is not None:
            part = self._hottest(part, self._most)
        self.store.write(*part, make_room=self.find_room)

    def reserve(self, keys: Tensor) -> None:
        """Give keys rows of the first tier in their order, if all fit; the rows' content comes by :meth:`put`."""
        table = self.store.keys
        new = keys[table.find(keys) < 0]
        self._grow_for(len(new))
        room = table.room() if self._most is None else min(table.room(), self._most - len(table))
        if len(new) <= room:
            table.insert(new, version=self.store.step, make_room=self.find_room)

    def _hottest(self, part: RowPart, capacity: int) -> RowPart:
        """Return the rows that stay within a capacity, and evict here: the coldest go, of both together."""
        keys = self.store.keys
        new = keys.find(part.keys) < 0
        over = len(keys) + int(new.sum()) - capacity
        if over <= 0:
            return part
        here = keys.entries[keys.rows()]
        coming = torch.stack([part.keys, packed(part.frequencies, part.versions)], 1)[new]
        stay = self._staying(torch.cat([here, coming]), over)
        self._erase_first(here[~stay[: len(here)], 0])
        stays = torch.ones_like(new)
        stays[new] = stay[len(here) :]
        return part.select(stays)

    def erase(self, keys: Tensor) -> int:
        """Erase keys of all tiers, and return how many had a row."""
        return self._erase_first(keys) + self._erase_cold(keys)

    def _erase_first(self, keys: Tensor) -> int:
        """Erase keys of the first tier, and return how many had a row in it."""
        rows = self.store.keys.erase(keys)
        if len(rows):
            self.note_erased(keys)
        return len(rows)

    def _erase_cold(self, keys: Tensor) -> int:
        """Erase keys of the other tiers, and return how many had a record there."""
        if self.cold is None:
            return 0
        gone = self.cold.erase(keys)
        if len(gone):
            self.note_erased(gone)
        return len(gone)

    # ---- Eviction by options -----------------------------------------------------------------------------------------

    def evict_on_schedule(self) -> None:
        """Evict by the options that are due, before the first lookup of a step."""
        step, seen = self.store.step, self.seen
        for option in self._options:
            every = getattr(option, "every", 0)
            if every and step // every != seen // every:
                self._evict_by(option)

    def evict(self) -> int:
        """Evict by all options, and return how many keys were evicted."""
        return sum(self._evict_by(option) for option in self._options)

    def _evict_by(self, option: object) -> int:
        if isinstance(option, GlobalStepEvict):
            before = self.store.step - option.steps_to_live
            gone = self._evict(lambda rows, versions: versions < before, lambda part: part.versions < before)
            if self.admission is not None:
                self.note_erased(self.admission.expire(before))
        elif isinstance(option, L2WeightEvict):
            least = option.l2_weight_threshold
            gone = self._evict(
                lambda rows, versions: self._halves(rows) < least,
                lambda part: part.values.double().square().sum(1) / 2 < least,
            )
        else:
            return 0  # capacities are kept at each insertion
        self.evicted += gone
        return gone

    def _halves(self, rows: Tensor) -> Tensor:
        """Return half the sum of squares of each row, float64 ``[N]``."""
        parts = [self.store.states.current(part)[0].double().square().sum(1) / 2 for part in rows.split(_CHUNK)]
        return torch.cat(parts) if parts else rows.new_zeros(0, dtype=torch.float64)

    def _evict(self, goes: Callable[[Tensor, Tensor], Tensor], goes_cold: Callable[[RowPart], Tensor]) -> int:
        """
        Evict rows, except the first tier's rows of the current step.

        Args:
            goes: a function of rows of the first tier and their versions that returns which go.
            goes_cold: a function of rows of the other tiers that returns which go.

        Returns:
            How many keys were evicted.
        """
        keys = self.store.keys
        rows = keys.rows()
        versions = unpacked(keys.entries[rows, 1])[1]
        gone = rows[goes(rows, versions) & (versions < self.store.step)]
        count = self._erase_first(keys.entries[gone, 0]) if len(gone) else 0
        cold = [] if self.cold is None else [part.keys[goes_cold(part)] for part in self.cold.parts()]
        return count + (self._erase_cold(torch.cat(cold)) if cold else 0)
