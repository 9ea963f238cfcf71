"""
Rows outside of the first tier: they are demoted when it is full, and promoted again when training looks them up.

A row is in one tier only. Outside of the first tier it is a record of bytes: values, optimizer states, frequency and
version, and the optimizer step up to which it is up to date.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._fork import tell_of_forks
from ..tables.steps import ALL_ROWS
from .coldness import coldest
from .keys import unpacked
from .optimizer_rows import BEFORE_HISTORY, flush_rows
from .options import CacheStrategy, StorageOption, tiers_below
from .records import Field, RecordLayout, Records, RowPart
from .store import RowStore
from .tiers import Tier

__all__ = ["ColdRows"]

# The most bytes of rows outside of the first tier that a state_dict holds.
STATE_DICT_BYTES = 2**31

# The bytes of a row in memory beside its values and states: key, index, frequency and version.
_KEY_BYTES = 24
# Where a tier is full, this share of it is spilled at once.
_SHARE = 32
_LEAST_ROWS = 16


class ColdRows:
    """
    The rows of one variable that are outside of the first tier.

    Args:
        store: the first tier.
        option: the option of the variable, with two tiers or more.
    """

    def __init__(self, store: RowStore, option: StorageOption) -> None:
        self._store, self._option = store, option
        self._kinds = tiers_below(option.storage_type)
        self._layout = RecordLayout(store.weight.dtype, store.weight.shape[1], ())
        self._layout = self._layout_now()
        self._made = 0
        self._tiers = [self._new_tier(kind) for kind in self._kinds]
        self._hits = [0] * len(self._tiers)  # ids that training looked up, by the tier that had them
        self._reader: ThreadPoolExecutor | None = None
        self._read_ahead: tuple[Tensor, Future] | None = None  # keys, ascending, and their records
        self._changed: list[Tensor] = []  # keys that have changed since the reading ahead began
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Drop records read ahead, in a forked process, which lacks the thread that reads."""
        self._reader, self._read_ahead = None, None

    def __getstate__(self) -> dict[str, Any]:
        """
        Return the state for copies and pickles.

        Raises:
            TypeError: rows are on disk.
        """
        if any(kind.on_disk for kind in self._kinds):
            raise TypeError(
                f"EmbeddingVariable {self._store.name!r}: a table with rows on disk cannot be copied or pickled: "
                "save() it, and restore() it where it is used or served"
            )
        return {"store": self._store, "option": self._option, "rows": self.tensors()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the result of :meth:`__getstate__`."""
        self.__init__(state["store"], state["option"])  # type: ignore[misc]
        if state["rows"]:
            self.put(RowPart.of_tensors(state["rows"], self._store.weight.device))

    # ---- Records -----------------------------------------------------------------------------------------------------

    def _layout_now(self, states: Mapping[str, Tensor] | None = None) -> RecordLayout:
        """Return the layout with the optimizer's states; if it has none, with those given or of the records."""
        columns = self._store.states.columns()
        fields = {name: Field(name, x.dtype, tuple(x.shape[1:]), initial) for name, x, initial in columns}
        if not fields:
            given = {name: Field(name, x.dtype, tuple(x.shape[1:]), 0.0) for name, x in (states or {}).items()}
            fields = {field.name: field for field in self._layout.states} | given
        return self._layout._replace(
            dtype=self._store.weight.dtype, states=tuple(fields[name] for name in sorted(fields))
        )

    def _caught_up(self, records: Records) -> RowPart:
        """Return the rows of records brought up to date with the steps that they have missed."""
        part, steps = records
        rows = self._store.states.table.rows
        clock = None if rows is None else rows.clock
        if clock is None or clock.history is None or clock.kind is None or not len(part.keys):
            return part
        device = self._store.weight.device
        states = {name: x.to(device) for name, x in part.states.items()}
        values = part.values.to(device)
        flush_rows(clock, values, states, (steps - clock.base).clamp_min(0).int().to(device))
        return part._replace(values=values, states=states)

    # ---- Tiers -------------------------------------------------------------------------------------------------------

    def _new_tier(self, kind: type[Tier]) -> Tier:
        self._made += 1
        folder = None
        if kind.on_disk:
            assert self._option.storage_path is not None
            # A name may have slashes; the folder must lie directly in storage_path.
            name = re.sub("[/%\0]", lambda found: f"%{ord(found[0]):02X}", self._store.name)
            folder = os.path.join(self._option.storage_path, f"{name}-{self._made}")
        return kind.of_table(self._layout.record_bytes(), folder, self._store.weight.is_cuda)

    def _see_layout(self, states: Mapping[str, Tensor] | None = None) -> None:
        """Rewrite all records with another layout if the optimizer's states have no room in theirs."""
        layout = self._layout_now(states)
        if layout == self._layout:
            return
        self._forget_read_ahead()
        old, tiers = self._layout, self._tiers
        self._layout = layout
        self._tiers = [self._new_tier(kind) for kind in self._kinds]
        for before, after in zip(tiers, self._tiers, strict=True):
            for keys, records in before.items():
                after.put(keys, layout.pack(*old.unpack(keys, records)))
            before.close()

    def _find(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the tiers that have distinct keys, int64 ``[N]``, -1 where none, and the records."""
        found, records = self._tiers[0].get(keys)
        numbers = found.long() - 1
        for number, tier in enumerate(self._tiers[1:], 1):
            rest = (numbers < 0).nonzero().flatten()
            if len(rest):
                found, more = tier.get(keys[rest])
                numbers[rest[found]] = number
                records[rest[found]] = more[found]
        return numbers, records

    def _put(self, keys: Tensor, records: Tensor) -> None:
        self._note_changed(keys)
        self._tiers[0].put(keys, records)
        for (tier, below), size in zip(pairwise(self._tiers), self._option.storage_size[1:], strict=False):
            most = size // (self._layout.record_bytes() + _KEY_BYTES)
            over = len(tier) - max(most, _LEAST_ROWS)
            if over > 0:
                self._spill(tier, below, max(over, most // _SHARE))

    def _note_changed(self, keys: Tensor) -> None:
        if self._read_ahead is not None:
            self._changed.append(keys)

    def _spill(self, tier: Tier, below: Tier, count: int) -> None:
        """Move the ``count`` coldest records of a tier to the one below it."""
        often = self._option.cache_strategy is CacheStrategy.LFU
        entries = self._entries_of(tier)
        gone = entries[coldest(entries, min(count, len(entries)), often), 0]
        try:
            below.put(gone, tier.get(gone)[1])
        except BaseException:
            below.erase(gone)  # the faster tier still has them
            raise
        tier.erase(gone)

    # ---- Between the tiers -------------------------------------------------------------------------------------------

    def most_rows(self) -> int:
        """Return how many rows the first tier may have."""
        each = self._layout_now().row_bytes() + _KEY_BYTES
        return max(self._option.storage_size[0] // each, _LEAST_ROWS)

    def promote(self, ids: Tensor, make_room: Callable[..., None]) -> int:
        """
        Promote the rows of a training step's ids to the first tier.

        Args:
            ids: ``[N]``.
            make_room: a function that makes room for some rows; rows given as ``protected`` stay.

        Returns:
            How many of the ids had a record here.
        """
        self._see_layout()
        if len(self):
            self._check_optimizer()
        rows = self._store.keys.find(ids)
        absent = ids[rows < 0]
        if not len(absent) or not len(self):
            self._forget_read_ahead()
            return 0
        keys, counts = ops.unique_with_counts(absent.long().cpu())[::2]
        numbers, records = self._take_read_ahead(keys)
        found = numbers >= 0
        here = keys[found]
        if not len(here):
            return 0
        part, steps = self._layout.unpack(here, records[found])
        # Rows of this step's other ids must not be demoted to make room for these.
        make_room = partial(make_room, protected=rows[rows >= 0])
        part = part._replace(versions=torch.full_like(here, self._store.step))
        self._store.write(*part, steps, make_room=make_room)
        for tier in self._tiers:
            tier.erase(here)
        self._note_changed(here)
        hits = [int(counts[numbers == number].sum()) for number in range(len(self._tiers))]
        self._hits = [before + more for before, more in zip(self._hits, hits, strict=True)]
        return sum(hits)

    def _check_optimizer(self) -> None:
        rows = self._store.states.table.rows
        if rows is not None and rows.clock.kind is not None and rows.clock.kind[2] == ALL_ROWS:
            raise RuntimeError(
                f"EmbeddingVariable {self._store.name!r}: rows in other tiers cannot follow an optimizer that updates "
                "all rows at every step: use lazy=True, decay='seen', or decoupled weight decay (AdamW)"
            )

    def demote(self, rows: Tensor, keys: Tensor) -> None:
        """Move rows of the first tier to the next one, as records."""
        self._see_layout()
        self._check_optimizer()
        # Stale rows are not flushed: once promoted, they catch up at once with the steps they missed, as in the first
        # tier.
        values, states, steps = self._store.states.stored(rows)
        part = RowPart(keys, values, *unpacked(self._store.keys.entries[rows, 1]), states)
        try:
            self._put(keys.cpu(), self._layout.pack(part, steps))
        except BaseException:
            for tier in self._tiers:
                tier.erase(keys.cpu())  # the first tier still has them
            raise
        self._store.keys.erase(keys)

    def read(self, ids: Tensor, rows: Tensor, values: Tensor) -> None:
        """Write the values of ids with a record here into ``values``, where ``rows``, of the first tier, is -1."""
        where = (rows < 0).nonzero().flatten()
        if not len(where) or not len(self):
            return
        keys, inverse = ops.unique(ids[where].long().cpu())
        numbers, records = self._find(keys)
        found = numbers >= 0
        place = torch.where(found, found.cumsum(0) - 1, -1)[inverse]
        part = self._caught_up(self._layout.unpack(keys[found], records[found]))
        there = place >= 0
        values[where[there.to(where.device)]] = part.values.to(values.device)[place[there].to(values.device)]

    # ---- Reading ahead -----------------------------------------------------------------------------------------------

    def prefetch(self, ids: Tensor) -> None:
        """Begin to read the records of the next step's ids in the background."""
        self._see_layout()
        self._forget_read_ahead()
        if self._reader is None:
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="EmbeddingVariable")
        absent = ids[self._store.keys.find(ids) < 0]
        keys = ops.unique(absent.long().cpu()).values.sort().values
        self._changed = []
        self._read_ahead = keys, self._reader.submit(self._find, keys)

    def _take_read_ahead(self, keys: Tensor) -> tuple[Tensor, Tensor]:
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
        numbers, records = (x[place] for x in its)
        rest = (~fresh).nonzero().flatten()
        if len(rest):
            numbers[rest], records[rest] = self._find(keys[rest])
        return numbers, records

    def _forget_read_ahead(self) -> None:
        if self._read_ahead is not None:
            self._read_ahead[1].result()
            self._read_ahead = None

    # ---- All rows ----------------------------------------------------------------------------------------------------

    def parts(self) -> Iterator[RowPart]:
        """Yield all rows outside of the first tier, up to date."""
        self._see_layout()
        device = self._store.weight.device
        for tier in self._tiers:
            for keys, records in tier.items():
                part = self._caught_up(self._layout.unpack(keys, records))
                states = {name: x.to(device) for name, x in part.states.items()}
                keys, values, frequencies, versions = (x.to(device) for x in part[:4])  # type: ignore[union-attr]
                yield RowPart(keys, values, frequencies, versions, states)

    def put(self, part: RowPart) -> None:
        """Write rows that are up to date."""
        self._see_layout(part.states)
        steps = torch.full((len(part.keys),), self._store.states.current_step())
        self._put(part.keys.cpu(), self._layout.pack(part, steps))

    def erase(self, keys: Tensor) -> Tensor:
        """Erase keys, and return the keys that had a record here."""
        keys = ops.unique(keys.long().cpu()).values
        if not len(self) or not len(keys):
            return keys[:0]
        here = keys[self._find(keys)[0] >= 0]
        for tier in self._tiers:
            tier.erase(here)
        self._note_changed(here)
        return here

    def entries(self) -> Tensor:
        """Return the entries of all rows, as in :class:`KeyRows`, on the host: ``[N, 2]`` int64."""
        return torch.cat([self._entries_of(tier) for tier in self._tiers])

    def _entries_of(self, tier: Tier) -> Tensor:
        pairs = [torch.stack([keys, self._layout.numbers(records)], 1) for keys, records in tier.items()]
        return torch.cat([torch.empty(0, 2, dtype=torch.int64), *pairs])

    def flush(self) -> None:
        """Flush all records, before the history of idle rows is dropped."""
        self._forget_read_ahead()
        rows = self._store.states.table.rows
        if rows is None or rows.clock.history is None:
            return
        for tier in self._tiers:
            for keys, records in tier.items():
                part = self._caught_up(self._layout.unpack(keys, records))
                tier.put(keys, self._layout.pack(part, torch.full((len(keys),), BEFORE_HISTORY)))

    def state_dict(self) -> dict[str, Tensor]:
        """
        Return :meth:`tensors` for a state_dict.

        Raises:
            RuntimeError: they are too many.
        """
        if self.nbytes() > STATE_DICT_BYTES:
            raise RuntimeError(
                f"EmbeddingVariable.state_dict: {self.nbytes():,} bytes of rows are outside of the first tier, more "
                f"than the {STATE_DICT_BYTES:,} that a state_dict takes: use save()"
            )
        return self.tensors()

    def tensors(self) -> dict[str, Tensor]:
        """Return all rows as tensors on the host, by the names of :meth:`RowPart.tensors`."""
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

    def nbytes(self) -> int:
        """Return how many bytes of memory and disk the tiers take."""
        return sum(tier.nbytes() for tier in self._tiers)

    def stats(self, looked_up: int) -> dict[str, Any]:
        """Return rows, bytes and hit rate of each tier, as :meth:`EmbeddingVariable.stats` names them."""
        numbers: dict[str, Any] = {}
        for tier, hits in zip(self._tiers, self._hits, strict=True):
            name = tier.kind.lower()
            numbers[f"rows_{name}"], numbers[f"bytes_{name}"] = len(tier), tier.nbytes()
            numbers[f"hit_rate_{name}"] = hits / looked_up
        return numbers
