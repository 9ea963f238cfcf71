"""
A slow, obvious reference of an EmbeddingVariable: a dictionary of keys, beside a dense table that torch.optim steps.

The dense table has a row for every key that a test uses. A key that has no row in the variable has no gradient; when it
gets a row, its dense row and that row's optimizer states begin anew. The dictionary holds each key's frequency and the
step of its last lookup.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

MOST = 2**31 - 1


@dataclass
class Known:
    """A key that has a row, or waits for admission: its number of training lookups, and the step of the last one."""

    frequency: int
    version: int


@dataclass
class Snapshot:
    """The contents of a checkpoint."""

    present: dict[int, Known]
    waiting: dict[int, Known]
    step: int
    seen: int
    weight: Tensor
    optimizer: dict | None
    evicted: int


@dataclass
class ReferenceVariable:
    """
    A reference of an EmbeddingVariable that works key by key.

    Args:
        keys: all keys that may be looked up.
        initial: a function that returns the initial row of a key, ``[D]``.
        optimizer: a function that makes the torch optimizer. None: nothing is trained, and every lookup in training is
            a step.
        sparse: whether the optimizer gets sparse gradients, of only the rows that were looked up.
        filter_freq: the number of a key's occurrences in training until it is admitted, the last included; 0: there is
            no filter.
        forgets: whether a key's count ends with its admission, erasure and expiry: not so with a Bloom filter.
        no_permission: the value of every element of the row of a key that is not admitted.
        steps_to_live: keys whose last lookup is more than so many steps ago are evicted. None: they are not.
        every: the number of steps between such evictions; 0: only on request.
        threshold: keys are evicted if half the sum of their row's squares is below it. None: they are not.
    """

    keys: Sequence[int]
    initial: Callable[[int], Tensor]
    optimizer: Callable[[list], torch.optim.Optimizer] | None = None
    sparse: bool = False
    filter_freq: int = 0
    forgets: bool = True
    no_permission: float = 0.0
    steps_to_live: int | None = None
    every: int = 0
    threshold: float | None = None
    present: dict[int, Known] = field(default_factory=dict)
    waiting: dict[int, Known] = field(default_factory=dict)
    step: int = 0
    evicted: int = 0

    def __post_init__(self) -> None:
        self.places = {key: place for place, key in enumerate(self.keys)}
        self.weight = torch.nn.Parameter(torch.stack([self.initial(key) for key in self.keys]))
        self.optimizing = None if self.optimizer is None else self.optimizer([self.weight])
        self.seen = 0

    # ---- Rows ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _begin(self, key: int, values: Tensor | None = None) -> None:
        """Give a key's row its initial values, and its optimizer states theirs."""
        place = self.places[key]
        self.weight[place] = self.initial(key) if values is None else values
        state = {} if self.optimizing is None else self.optimizing.state.get(self.weight, {})
        initial = 0.0 if self.optimizing is None else self.optimizing.defaults.get("initial_accumulator_value", 0.0)
        for x in state.values():
            if isinstance(x, Tensor) and x.shape == self.weight.shape:
                x[place] = initial

    def row(self, key: int) -> Tensor:
        return self.weight.detach()[self.places[key]]

    # ---- Lookups -------------------------------------------------------------------------------------------------

    def evaluated(self, ids: Sequence[int]) -> Tensor:
        """Return the rows that a lookup without training gives."""
        absent = torch.full((self.weight.shape[1],), self.no_permission, dtype=self.weight.dtype)
        filtered = self.filter_freq > 0
        rows = [self.row(key) if key in self.present else absent if filtered else self.initial(key) for key in ids]
        return torch.stack(rows) if rows else self.weight.detach()[:0]

    def looked_up(self, ids: Sequence[int]) -> Tensor:
        """Return the rows that a lookup in training gives, with a gradient for keys that have a row."""
        if self.optimizing is None:
            self.step += 1
        self._evict_on_schedule()
        absent = [key for key in ids if key not in self.present]
        for key in absent if self.filter_freq > 0 else ():
            known = self.waiting.setdefault(key, Known(0, 0))
            known.frequency, known.version = min(known.frequency + 1, MOST), self.step
        for key in absent:
            if key in self.present or (self.filter_freq > 0 and self.waiting[key].frequency < self.filter_freq):
                continue
            self._begin(key)
            self.present[key] = Known(self.waiting[key].frequency if self.filter_freq > 0 else 0, self.step)
            if self.filter_freq > 0 and self.forgets:
                del self.waiting[key]
        new = set(absent) if self.filter_freq > 0 else set()
        for key in ids:
            if key in self.present:
                known = self.present[key]
                known.version = self.step
                if key not in new:  # the frequency of new keys is what the filter has counted
                    known.frequency = min(known.frequency + 1, MOST)
        places = torch.tensor([self.places[key] for key in ids], dtype=torch.int64)
        has_row = torch.tensor([key in self.present for key in ids], dtype=torch.bool)[:, None]
        values = torch.nn.functional.embedding(places, self.weight, sparse=self.sparse)
        is_served = has_row & torch.tensor([key not in new for key in ids], dtype=torch.bool)[:, None]
        # Keys that are admitted in this step read no_permission, but have a gradient already.
        return torch.where(is_served, values, self.no_permission + torch.where(has_row, values - values.detach(), 0.0))

    def trained(self, ids: Sequence[int], target: Tensor) -> Tensor:
        """Take a step on the sum of the looked-up rows times ``target``; return the rows."""
        values = self.looked_up(ids)
        if self.optimizing is not None:
            self.optimizing.zero_grad()
            (values * target).sum().backward()
            self.optimizing.step()
            self.step += 1
        return values.detach()

    # ---- Insertion and eviction -----------------------------------------------------------------------------------

    def inserted(self, keys: Sequence[int], values: Tensor) -> None:
        for key, row in zip(keys, values, strict=True):
            least = self.filter_freq if self.filter_freq > 0 else 0
            self.present[key] = Known(least, max(self.step - 1, -1))
            if self.forgets:
                self.waiting.pop(key, None)
            self._begin(key, row)

    def erased(self, keys: Sequence[int]) -> int:
        for key in keys if self.forgets else ():
            self.waiting.pop(key, None)
        return sum(self.present.pop(key, None) is not None for key in keys)

    def _evict_idle(self) -> int:
        before = self.step - (self.steps_to_live or 0)
        gone = [key for key, known in self.present.items() if known.version < before]
        for key in gone:
            del self.present[key]
        if self.forgets:
            self.waiting = {key: known for key, known in self.waiting.items() if known.version >= before}
        return len(gone)

    def _evict_small(self) -> int:
        """Evict keys with small rows, except keys looked up in the present step; return how many."""
        small = [key for key in self.present if self.row(key).double().square().sum() / 2 < (self.threshold or 0)]
        gone = [key for key in small if self.present[key].version < self.step]
        for key in gone:
            del self.present[key]
        return len(gone)

    def evict(self) -> int:
        gone = (0 if self.steps_to_live is None else self._evict_idle()) + (
            0 if self.threshold is None else self._evict_small()
        )
        self.evicted += gone
        return gone

    def _evict_on_schedule(self) -> None:
        if self.every and self.step // self.every != self.seen // self.every:
            self.evict()
        self.seen = self.step

    # ---- Checkpoints ----------------------------------------------------------------------------------------------

    def saved(self) -> Snapshot:
        optimizer = None if self.optimizing is None else copy.deepcopy(self.optimizing.state_dict())
        weight = self.weight.detach().clone()
        known = copy.deepcopy((self.present, self.waiting))
        return Snapshot(*known, self.step, self.seen, weight, optimizer, self.evicted)

    def restored(self, saved: Snapshot) -> None:
        self.present, self.waiting = copy.deepcopy((saved.present, saved.waiting))
        self.step, self.seen, self.evicted = saved.step, saved.seen, saved.evicted
        self.weight.detach().copy_(saved.weight)
        if self.optimizing is not None and saved.optimizer is not None:
            self.optimizing.load_state_dict(copy.deepcopy(saved.optimizer))
