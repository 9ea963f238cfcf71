"""The part that a rank keeps of a variable that is split over ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .filters import CounterAdmission
from .records import RowPart
from .rows import TableRows

__all__ = ["keep"]

_LEAST_CAPACITY = 2


def keep(rows: TableRows, has: Callable[[Tensor], Tensor], share: int | None) -> None:
    """
    Drop all keys but some, from all tiers and from a filter's exact counts, and free the others' room.

    Args:
        rows: the rows of a variable, whose optimizer has no states yet.
        has: a function that returns which of some keys, ``[N]``, stay, ``[N]`` bool.
        share: the number by which capacities are divided, rounded up. None: no key stays, and none will come.
    """
    store, admission = rows.store, rows.admission
    device = store.weight.device
    parts = [part.select(has(part.keys)) for part in rows.parts()]
    capacity = _LEAST_CAPACITY
    if share is not None:
        rows.share_capacity(share)
        capacity = max(capacity, -(-store.keys.capacity // share))
    if rows.cold is not None:
        rows.cold.clear()
        capacity = min(capacity, rows.cold.most_rows())
    store.resize(capacity)
    store.keys.clear(capacity, device)
    for part in parts:
        rows.put(RowPart.of_tensors(part.tensors(), device))
    if isinstance(admission, CounterAdmission):
        candidates = admission.candidates
        entries = candidates.entries[candidates.rows()]
        entries = entries[has(entries[:, 0].contiguous())]
        candidates.clear(1024, device)
        places, _ = candidates.insert(entries[:, 0].contiguous())
        candidates.entries[places, 1] = entries[:, 1]
    rows.note_saved(None)
