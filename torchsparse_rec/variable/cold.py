"""
Rows outside of the first tier: they are demoted when it is full, and promoted again when training looks them up.

A row is in one tier only. Outside of the first tier it is a record of bytes: values, optimizer states, frequency and
version, and the optimizer step as of which it is up to date.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import ops
from ..tables.clock import ALL_ROWS
from ._fork import tell_of_forks
from .eviction import coldest
from .keys import packed, unpacked
from .optimizer_rows import BEFORE_HISTORY, OptimizerRows, flush_rows
from .options import CacheStrategy
from .parts import Part, select
from .records import Field, Layout, Records
from .tiers import DramTier, SsdTier, Tier

if TYPE_CHECKING:
    from ..nn.embedding_variable import EmbeddingVariable

__all__ = ["STATE_DICT_BYTES", "ColdRows", "cold_rows_of"]

# The most bytes of rows outside of the first tier that a state_dict holds.
STATE_DICT_BYTES = 2**31

# What a row takes in memory beside its values and states: key, index, frequency and version.
_KEY_BYTES = 24
# Where a tier is full, this share of it is spilled at once.
_SHARE = 32
_LEAST_ROWS = 16


def cold_rows_of(owner: EmbeddingVariable) -> ColdRows | None:
    """Return the tiers below the first that a variable's options ask for; None where there is one tier."""
    tiers = owner.ev_option.storage_option.storage_type.tiers()
    return ColdRows(owner, tiers[1:]) if len(tiers) > 1 else None


class ColdRows:
    """
    The rows of one variable that are outside of the first tier.

    Args:
        owner: the variable.
        names: of the tiers, ``"DRAM"`` or ``"SSD"``, the faster one first.
    """

    def __init__(self, owner: EmbeddingVariable, names: list[str]) -> None:
        self._owner = weakref.ref(owner)
        self._option = owner.ev_option.storage_option
        self._names = names
        self._layout = Layout(owner._stored_weight().dtype, owner.embedding_dim, ())
        self._layout = self._layout_now()
        self._made = 0
        self._tiers = [self._new_tier(name) for name in names]
        self._hits = dict.fromkeys(names, 0)  # ids that training looked up, by the tier that had them
        self._reader: ThreadPoolExecutor | None = None
        self._read_ahead: tuple[Tensor, Future] | None = None  # keys, ascending, and their records
        self._changed: list[Tensor] = []  # keys that have changed since the reading ahead began
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Forget what is read ahead, in a forked process, which lacks the thread that reads."""
        self._reader, self._read_ahead = None, None

    @property
    def owner(self) -> EmbeddingVariable:
        """The variable."""
        owner = self._owner()
        assert owner is not None
        return owner

    # ---- Records -----------------------------------------------------------------------------------------------------

    def _layout_now(self, states: Mapping[str, Tensor] | None = None) -> Layout:
        """Return the layout with the optimizer's states; if it has none, with those given or of the records."""
        columns = OptimizerRows(self.owner._stored_weight()).columns()
        fields = {name: Field(name, x.dtype, tuple(x.shape[1:]), initial) for name, x, initial in columns}
        if not fields:
            given = {name: Field(name, x.dtype, tuple(x.shape[1:]), 0.0) for name, x in (states or {}).items()}
            fields = {field.name: field for field in self._layout.states} | given
        return self._layout._replace(
            dtype=self.owner._stored_weight().dtype, states=tuple(fields[name] for name in sorted(fields))
        )

    def _caught_up(self, records: Records) -> Part:
        """Return the rows of records brought up to date with the steps that they have missed."""
        part, steps = records
        weight = self.owner._stored_weight()
        rows = OptimizerRows(weight).table.rows
        clock = None if rows is None else rows.clock
        if clock is None or clock.history is None or clock.kind is None or not len(part.keys):
            return part
        device = weight.device
        states = {name: x.to(device) for name, x in part.states.items()}
        values = part.values.to(device)
        flush_rows(clock, values, states, (steps - clock.base).clamp_min(0).int().to(device))
        return part._replace(values=values, states=states)

    # ---- Tiers -------------------------------------------------------------------------------------------------------

    def _new_tier(self, name: str) -> Tier:
        self._made += 1
        if name == "DRAM":
            return DramTier(self._layout.record_bytes(), pin_memory=self.owner._stored_weight().is_cuda)
        assert self._option.storage_path is not None
        # A name may have slashes; the folder must lie directly in storage_path.
        name = re.sub("[/%\0]", lambda found: f"%{ord(found[0]):02X}", self.owner.name)
        folder = os.path.join(self._option.storage_path, f"{name}-{self._made}")
        return SsdTier(folder, self._layout.record_bytes())

    def _see_layout(self, states: Mapping[str, Tensor] | None = None) -> None:
        """Rewrite all records with another layout if the optimizer's states have no room in theirs."""
        layout = self._layout_now(states)
        if layout == self._layout:
            return
        self._forget_read_ahead()
        old, tiers = self._layout, self._tiers
        self._layout = layout
        self._tiers = [self._new_tier(name) for name in self._names]
        for before, after in zip(tiers, self._tiers, strict=True):
            for keys, records in before.items():
                after.put(keys, layout.pack(*old.unpack(keys, records)))
            before.close()

    def _get(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of distinct keys have a record, bool ``[N]``, and their records."""
        return self._find(keys)[:2]

    def _find(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return which of distinct keys have a record, the records, and which are in the faster of these tiers."""
        found, records = self._tiers[0].get(keys)
        first = found.clone()
        if len(self._tiers) > 1:
            rest = (~found).nonzero().flatten()
            if len(rest):
                also, more = self._tiers[1].get(keys[rest])
                found[rest] = also
                records[rest[also]] = more[also]
        return found, records, first

    def _put(self, keys: Tensor, records: Tensor) -> None:
        self._note_changed(keys)
        self._tiers[0].put(keys, records)
        if len(self._tiers) == 1:
            return
        most = self._option.storage_size[1] // (self._layout.record_bytes() + _KEY_BYTES)
        over = len(self._tiers[0]) - max(most, _LEAST_ROWS)
        if over > 0:
            self._spill(max(over, most // _SHARE))

    def _note_changed(self, keys: Tensor) -> None:
        if self._read_ahead is not None:
            self._changed.append(keys)

    def _spill(self, count: int) -> None:
        """Move the ``count`` coldest records to the last tier."""
        often = self._option.cache_strategy is CacheStrategy.LFU
        entries = self._entries_of(self._tiers[0])
        gone = entries[coldest(entries, min(count, len(entries)), often), 0]
        try:
            self._tiers[1].put(gone, self._tiers[0].get(gone)[1])
        except BaseException:
            self._tiers[1].erase(gone)  # the faster tier still has them
            raise
        self._tiers[0].erase(gone)

    # ---- Between the tiers -------------------------------------------------------------------------------------------

    def most_rows(self) -> int:
        """Return how many rows the first tier may have."""
        each = self._layout_now().row_bytes() + _KEY_BYTES
        return max(self._option.storage_size[0] // each, _LEAST_ROWS)

    def promote(self, ids: Tensor) -> int:
        """Promote the rows of a training step's ids to the first tier; return how many of the ids had a record here."""
        owner = self.owner
        self._see_layout()
        if len(self):
            self._check_optimizer(OptimizerRows(owner._stored_weight()))
        rows = owner.keys.find(ids)
        absent = ids[rows < 0]
        if not len(absent) or not len(self):
            self._forget_read_ahead()
            return 0
        keys, counts = ops.unique_with_counts(absent.long().cpu())[::2]
        found, records, first = self._take_read_ahead(keys)
        here = keys[found]
        if not len(here):
            return 0
        part, steps = self._layout.unpack(here, records[found])
        # Rows of this step's other ids must not be demoted to make room for these.
        make_room = partial(owner._find_room, protected=rows[rows >= 0])
        self._write(part, steps, torch.full_like(here, owner.global_step), make_room)
        for tier in self._tiers:
            tier.erase(here)
        self._note_changed(here)
        hits = int(counts[found].sum())
        self._hits[self._names[0]] += int(counts[first].sum())
        self._hits[self._names[-1]] += int(counts[found & ~first].sum())
        return hits

    def _write(self, part: Part, steps: Tensor, versions: Tensor, make_room: Callable[[int], None]) -> None:
        """Write rows to the first tier, each up to date as of its optimizer step in ``steps``."""
        owner = self.owner
        weight = owner._stored_weight()
        device = weight.device
        # With this step as version, so that none of these rows is evicted to make room for the others.
        rows, _ = owner.keys.insert(part.keys.to(device), version=owner.global_step, make_room=make_room)
        owner.keys.entries[rows, 1] = packed(part.frequencies, versions).to(device)
        owner._inserted_before = -1
        weight.data.index_copy_(0, rows, part.values.to(device))
        OptimizerRows(weight).put(rows, part.states, steps.to(device))

    def _check_optimizer(self, optimizer: OptimizerRows) -> None:
        rows = optimizer.table.rows
        if rows is not None and rows.clock.kind is not None and rows.clock.kind[2] == ALL_ROWS:
            raise RuntimeError(
                f"EmbeddingVariable {self.owner.name!r}: rows in other tiers cannot follow an optimizer that updates "
                "all rows at every step: use lazy=True, or decoupled weight decay (AdamW)"
            )

    def demote(self, rows: Tensor, keys: Tensor) -> None:
        """Move rows of the first tier to the next one, as records."""
        owner = self.owner
        self._see_layout()
        optimizer = OptimizerRows(owner._stored_weight())
        self._check_optimizer(optimizer)
        # Stale rows are not flushed: once promoted, they catch up at once with what they missed, as in the first tier.
        values, states, steps = optimizer.stored(rows)
        part = Part(keys, values, *unpacked(owner.keys.entries[rows, 1]), states)
        try:
            self._put(keys.cpu(), self._layout.pack(part, steps))
        except BaseException:
            for tier in self._tiers:
                tier.erase(keys.cpu())  # the first tier still has them
            raise
        owner.keys.erase(keys)

    def read(self, ids: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write the values of ids with a record here into ``values``, where ``rows``, of the first tier, is -1."""
        where = (rows < 0).nonzero().flatten()
        if not len(where) or not len(self):
            return
        keys, inverse = ops.unique(ids[where].long().cpu())
        found, records = self._get(keys)
        place = torch.where(found, found.cumsum(0) - 1, -1)[inverse]
        part = self._caught_up(self._layout.unpack(keys[found], records[found]))
        there = place >= 0
        values[where[there.to(where.device)]] = part.values.to(values.device)[place[there].to(values.device)]

    # ---- Reading ahead -----------------------------------------------------------------------------------------------

    def prefetch(self, ids: Tensor) -> None:
        """Begin to read the records of the next step's ids in the background."""
        with self.owner._guard.writing():
            self._see_layout()
            self._forget_read_ahead()
            if self._reader is None:
                self._reader = ThreadPoolExecutor(1, thread_name_prefix="EmbeddingVariable")
            absent = ids[self.owner.keys.find(ids) < 0]
            keys = ops.unique(absent.long().cpu()).values.sort().values
            self._changed = []
            self._read_ahead = keys, self._reader.submit(self._find, keys)

    def _take_read_ahead(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Do as :meth:`_find`, taking the records that have been read ahead if they have not changed since."""
        if self._read_ahead is None:
            return self._find(keys)
        known, reading = self._read_ahead
        self._read_ahead = None
        its = reading.result()
        if not len(known):
            return self._find(keys)
        place = torch.searchsorted(known, keys).clamp_max(len(known) - 1)
        fresh = known[place] == keys
        if self._changed:
            fresh &= ~torch.isin(keys, torch.cat(self._changed).to(keys.device))
            self._changed = []
        found, records, first = (x[place] for x in its)
        rest = (~fresh).nonzero().flatten()
        if len(rest):
            found[rest], records[rest], first[rest] = self._find(keys[rest])
        return found, records, first

    def _forget_read_ahead(self) -> None:
        if self._read_ahead is not None:
            self._read_ahead[1].result()
            self._read_ahead = None

    # ---- All rows ----------------------------------------------------------------------------------------------------

    def parts(self) -> Iterator[Part]:
        """Yield all rows outside of the first tier, up to date."""
        self._see_layout()
        device = self.owner._stored_weight().device
        for tier in self._tiers:
            for keys, records in tier.items():
                part = self._caught_up(self._layout.unpack(keys, records))
                states = {name: x.to(device) for name, x in part.states.items()}
                keys, values, frequencies, versions = (x.to(device) for x in part[:4])  # type: ignore[union-attr]
                yield Part(keys, values, frequencies, versions, states)

    def put(self, part: Part) -> None:
        """Write rows that are up to date."""
        self._see_layout(part.states)
        steps = torch.full((len(part.keys),), OptimizerRows(self.owner._stored_weight()).current_step())
        self._put(part.keys.cpu(), self._layout.pack(part, steps))

    def put_what_does_not_fit(self, part: Part) -> Part:
        """Write the rows for which the first tier has no room, and return the others."""
        keys = self.owner.keys
        new = keys.find(part.keys) < 0
        self.owner._grow_for(int(new.sum()))
        fits = ~new | (new.cumsum(0) <= keys.room())
        if not fits.all():
            self.put(select(part, ~fits))
        return select(part, fits)

    def erase(self, keys: Tensor) -> int:
        """Erase keys, and return how many had a record here."""
        keys = ops.unique(keys.long().cpu()).values
        if not len(self) or not len(keys):
            return 0
        found = self._get(keys)[0]
        here = keys[found]
        for tier in self._tiers:
            tier.erase(here)
        self._note_changed(here)
        self.owner._note_erased(here)
        return len(here)

    def evict(self, goes: Callable[[Part], Tensor]) -> int:
        """Erase the keys for which ``goes(part)`` is true, and return how many they were."""
        gone = [part.keys[goes(part)] for part in self.parts()]
        return self.erase(torch.cat(gone)) if gone else 0

    def entries(self) -> Tensor:
        """Return the entries of all rows, as in :class:`KeyRows`, on the host: ``[N, 2]`` int64."""
        return torch.cat([self._entries_of(tier) for tier in self._tiers])

    def _entries_of(self, tier: Tier) -> Tensor:
        pairs = [torch.stack([keys, self._layout.numbers(records)], 1) for keys, records in tier.items()]
        return torch.cat([torch.empty(0, 2, dtype=torch.int64), *pairs])

    def flush(self) -> None:
        """Flush all records, before what the steps so far did to idle rows is forgotten."""
        self._forget_read_ahead()
        rows = OptimizerRows(self.owner._stored_weight()).table.rows
        if rows is None or rows.clock.history is None:
            return
        for tier in self._tiers:
            for keys, records in tier.items():
                part = self._caught_up(self._layout.unpack(keys, records))
                tier.put(keys, self._layout.pack(part, torch.full((len(keys),), BEFORE_HISTORY)))

    def tensors(self) -> dict[str, Tensor]:
        """Return all rows as tensors on the host, by the names of :meth:`Part.tensors`."""
        parts = [part.tensors() for part in self.parts()]
        if not parts:
            return {}
        return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}

    def clear(self) -> None:
        """Erase all records."""
        self._forget_read_ahead()
        for tier in self._tiers:
            tier.clear()

    def __len__(self) -> int:
        return sum(len(tier) for tier in self._tiers)

    def __bool__(self) -> bool:
        return True

    def has_files(self) -> bool:
        """Say whether a tier is on disk."""
        return "SSD" in self._names

    def nbytes(self) -> int:
        """Return how many bytes of memory and disk the tiers take."""
        return sum(tier.nbytes() for tier in self._tiers)

    def stats(self, looked_up: int) -> dict[str, Any]:
        """Return rows, bytes and hit rate of each tier, as :meth:`EmbeddingVariable.stats` names them."""
        numbers: dict[str, Any] = {}
        for name, tier in zip(self._names, self._tiers, strict=True):
            name = name.lower()
            numbers[f"rows_{name}"], numbers[f"bytes_{name}"] = len(tier), tier.nbytes()
            numbers[f"hit_rate_{name}"] = self._hits[name.upper()] / looked_up
        return numbers

    def close(self) -> None:
        """Close files and threads."""
        self._forget_read_ahead()
        if self._reader is not None:
            self._reader.shutdown()
        for tier in self._tiers:
            tier.close()
