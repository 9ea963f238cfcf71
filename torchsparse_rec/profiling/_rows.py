"""
Find out whether a loader works row by row: which lines of Python run once for each example, and how long they take.

A loader that is slow because of its disk, its network or one large computation runs each line a few times a batch. A
loader that parses, collates or converts records runs some lines at least once for every example of the batch, and
spends its time there.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ._batches import Batches, Exhausted, examples_in, parts_of
from .thresholds import PER_ROW_CALLS

__all__ = ["RowWork", "find_row_work"]

_WATCHED = 3


@dataclass(frozen=True)
class RowWork:
    """The part of a loader's work that is done row by row."""

    share: float
    """The share of a batch's time that lines take that run for each example."""
    runs_per_example: float
    """How often the slowest of these lines runs for each example."""
    place: str
    """The file, number and function of the slowest of these lines."""


class _LineClock:
    """Counts how often each line runs, and adds up its seconds, without the counting's."""

    def __init__(self) -> None:
        self.lines: dict[tuple[CodeType, int], list[float]] = {}
        self._at: list[float] | None = None
        self._since = 0.0

    def trace(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        """Count one event, as the trace function that ``sys.settrace`` takes."""
        now = perf_counter()
        if self._at is not None:
            self._at[1] += now - self._since
        at = frame.f_back if event == "return" else frame
        if at is None:
            self._at = None
        else:
            place = self.lines.setdefault((at.f_code, at.f_lineno), [0, 0.0])
            place[0] += event == "line"
            self._at = place
        self._since = perf_counter()
        return self.trace


def find_row_work(batches: Batches, loader: Any, batch: Any) -> RowWork | None:
    """
    Watch which lines run while a loader makes some batches; if a DataLoader has workers, make the batches here instead.

    Args:
        batches: the batches of the loader; a few are taken, unless it has workers.
        loader: the loader itself.
        batch: a batch of the loader, from which the numbers of examples and columns are read.

    Returns:
        The median batch's work by rows; None if there are no more batches, or the number of examples is unknown.
    """
    examples = examples_in(batch)
    if not examples:
        return None
    if isinstance(loader, DataLoader) and loader.num_workers:
        batches = _in_process(loader)
    found = []
    for _ in range(_WATCHED):
        clock, before = _LineClock(), sys.gettrace()
        sys.settrace(clock.trace)
        try:
            batches.next()
        except Exhausted:
            break
        finally:
            sys.settrace(before)
        found.append(_judge(clock, examples, parts_of(batch)))
    found.sort(key=lambda work: work.share)
    return found[len(found) // 2] if found else None


def _in_process(loader: DataLoader) -> Batches:
    """
    Return batches that this process makes as a worker of the loader would, so that their lines can be watched.

    The dataset is a shallow copy: files that it opens and counters that it keeps are not the loader's.
    """
    dataset = copy.copy(loader.dataset)
    if isinstance(dataset, IterableDataset):
        how: dict[str, Any] = {"batch_size": loader.batch_size}
    elif loader.batch_sampler is not None:
        how = {"batch_sampler": loader.batch_sampler}
    else:
        how = {"batch_size": None, "sampler": loader.sampler}
    return Batches(DataLoader(dataset, collate_fn=loader.collate_fn, **how))


def _judge(clock: _LineClock, examples: int, parts: int) -> RowWork:
    total = sum(seconds for _, seconds in clock.lines.values())
    # A loop over columns must not count as one over examples where there are few examples.
    least = max(PER_ROW_CALLS * examples, 2 * parts + 1)
    by_row = {place: line for place, line in clock.lines.items() if line[0] >= least}
    if not by_row or total == 0:
        return RowWork(0.0, 0.0, "")
    (code, number), (count, _) = max(by_row.items(), key=lambda item: item[1][1])
    share = sum(seconds for _, seconds in by_row.values()) / total
    name = getattr(code, "co_qualname", code.co_name)
    return RowWork(share, count / examples, f"{Path(code.co_filename).name}:{number} ({name})")
