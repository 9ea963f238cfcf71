"""Filters: a key is admitted, and gets a row, once it has occurred often enough."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from .keys import KeyRows, unpacked
from .options import CBFFilter, CounterFilter
from .own_tensors import OwnTensors

__all__ = ["CounterAdmission", "SketchAdmission", "admission_of"]


class CounterAdmission(torch.nn.Module):
    """
    Admission by exact counts of the keys that have no row yet.

    Args:
        name: the name of the owner, for errors.
        option: an option with the number of occurrences after which a key is admitted.
        device: the device of the counts.
    """

    #: How many ids were looked up in training before they were admitted.
    filtered: Tensor

    def __init__(self, name: str, option: CounterFilter, device: torch.device | str | None) -> None:
        super().__init__()
        self.register_buffer("filtered", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        self.filter_freq = option.filter_freq
        self.candidates = KeyRows(name, 1024, device=device)

    def count(self, ids: Tensor, absent: Tensor, version: int) -> tuple[Tensor, Tensor]:
        """
        Count the keys that have no row.

        Args:
            ids: ``[N]``.
            absent: ``[N]`` bool: which keys have no row.
            version: the step.

        Returns:
            ``[N]`` bool: which of these keys are admitted now; ``[N]`` int32: how often each has occurred.
        """
        candidates = self.candidates
        rows, _ = candidates.insert(ids, allowed=absent, version=version, count=True)
        counts = unpacked(candidates.entries[rows.clamp_min(0), 1])[0]
        counts = torch.where(absent, counts, 0).int()
        return absent & (counts >= self.filter_freq), counts

    def admitted(self, ids: Tensor, inserted: Tensor) -> None:
        """Forget the keys that have got a row: those at positions where ``inserted`` is not negative."""
        self.candidates.erase_soon(ids, inserted >= 0)

    def counts_of(self, ids: Tensor) -> Tensor:
        """Return how often keys have occurred, ``[N]`` int64, without counting them."""
        rows = self.candidates.find(ids)
        return torch.where(rows < 0, 0, unpacked(self.candidates.entries[rows.clamp_min(0), 1])[0])

    def expire(self, before: int) -> Tensor:
        """Forget the keys whose last occurrence was before a step, and return them."""
        rows = self.candidates.rows()
        _, versions = unpacked(self.candidates.entries[rows, 1])
        gone = self.candidates.entries[rows[versions < before], 0]
        self.candidates.erase(gone)
        return gone

    def nbytes(self) -> int:
        """Return the bytes of memory that the counts take."""
        return self.candidates.nbytes()

    def __len__(self) -> int:
        """Return how many keys are counted."""
        return len(self.candidates)

    def __bool__(self) -> bool:
        return True


class SketchAdmission(OwnTensors):
    """
    Admission by a counting Bloom filter of the keys that have no row yet.

    Args:
        option: an option with the number of occurrences after which a key is admitted, and the filter's sizes.
        device: the device of the filter.
    """

    tensors = saved = ("sketch",)
    filtered: Tensor

    def __init__(self, option: CBFFilter, device: torch.device | str | None) -> None:
        super().__init__()
        self.register_buffer("filtered", torch.zeros((), dtype=torch.int64, device=device), persistent=False)
        self.filter_freq, self.num_hashes = option.filter_freq, option.num_hashes
        self.sketch = torch.zeros(option.counters, dtype=option.counter_type, device=device)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if prefix + "sketch" in state_dict:
            self.sketch.copy_(state_dict[prefix + "sketch"])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def count(self, ids: Tensor, absent: Tensor, version: int) -> tuple[Tensor, Tensor]:
        """Count keys, see :meth:`CounterAdmission.count`; ``version`` is ignored."""
        counts = ops.count_min_sketch_(self.sketch, ids, mask=absent, num_hashes=self.num_hashes)
        return absent & (counts >= self.filter_freq), counts

    def admitted(self, ids: Tensor, inserted: Tensor) -> None:
        """Do nothing: a Bloom filter cannot forget the keys that have got a row."""

    def counts_of(self, ids: Tensor) -> Tensor:
        """Return how often keys have occurred by the filter, ``[N]`` int64, without counting them."""
        return ops.count_min_sketch_(self.sketch, ids, num_hashes=self.num_hashes, count=False).long()

    def expire(self, before: int) -> Tensor:
        """Return no keys: a Bloom filter has no steps, and forgets nothing."""
        return torch.empty(0, dtype=torch.int64, device=self.sketch.device)

    def nbytes(self) -> int:
        """Return the bytes of memory that the counts take."""
        return self.sketch.numel() * self.sketch.element_size()


def admission_of(
    name: str, option: CounterFilter | CBFFilter | None, device: torch.device | str | None
) -> CounterAdmission | SketchAdmission | None:
    """Return the admission that an option asks for; None where all keys are admitted."""
    if option is None or option.filter_freq < 1:
        return None
    if isinstance(option, CounterFilter):
        return CounterAdmission(name, option, device)
    return SketchAdmission(option, device)
