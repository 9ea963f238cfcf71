"""The count of steps that tables take together, as their readers know it, and the lock of whoever writes rows."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._fork import HALF_WRITTEN, tell_of_forks

__all__ = ["ALL_ROWS", "ITS_ROWS", "LATER", "ClockKind", "Steps"]

T = TypeVar("T")

# The effect of a step on rows without gradient: nothing, moves them later, or moves them at once.
ITS_ROWS = "nothing"
LATER = "they are flushed later"
ALL_ROWS = "they are stepped too"


class ClockKind(NamedTuple):
    """How a clock's tables are stepped: the part of it that may change only while no row is stale."""

    rule: int
    states: tuple[str, ...]
    others: str  # what happens to rows without gradient: ITS_ROWS, LATER or ALL_ROWS
    moves_weights: bool  # whether, with LATER, rows' weights become stale too, not only their states
    eps: tuple  # eps, and whether it stands where TensorFlow adds it


class _HalfWritten:
    """The lock, in a forked process, of tables that another thread of its parent was writing."""

    def __enter__(self) -> None:
        raise RuntimeError(HALF_WRITTEN)

    def __exit__(self, *error: object) -> None:
        """Do nothing: entering always raises."""


class Steps(ABC, Generic[T]):
    """
    The count and the history of the steps of tables in one parameter group that have always stepped together.

    ``history`` has the effect of every step since ``base`` on rows without gradient. ``RowStates.last_step`` has, for
    every row, the step up to which these effects have been applied.
    """

    def __init__(self, group: int, owned: bool, step: int, on_cuda: bool = False) -> None:
        self.on_cuda = on_cuda
        self.group = group  # the group's id: the group itself would keep its parameters alive
        self.owned = owned
        self.random_rounding = False
        self.step = step
        self.base = step
        self.kind: ClockKind | None = None  # None: not started
        self.rule = 0
        self.hyperparameters: list[float] = []
        self.moves_weights = False
        self.history: Tensor | None = None
        self.steps: Tensor | None = None  # [tables]: what state["step"] of each is a view of, if states have one
        # Held while rows are written, by a step or by the first reader. Tables that grow have a lock of their own too.
        self.lock: AbstractContextManager = threading.RLock()
        self._writer: int | None = None  # the thread that writes rows, and how many contexts of its writing are open
        self._depth = 0
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Make a new lock in a forked process, unless its only thread writes: one that it lacks may hold the old."""
        if self._writer is None:
            self.lock = threading.RLock()
        elif self._writer != threading.get_ident():
            self.lock = _HalfWritten()

    def __enter__(self) -> None:
        """Hold the lock, as one who writes rows: a process forked meanwhile by another thread refuses the tables."""
        self.lock.__enter__()
        self._writer, self._depth = threading.get_ident(), self._depth + 1

    def __exit__(self, *error: object) -> None:
        """Release the lock."""
        self._depth -= 1
        if not self._depth:
            self._writer = None
        self.lock.__exit__(None, None, None)

    def refuse_capture(self) -> None:
        """Raise ``RuntimeError`` while a CUDA graph is captured by what needs the number of the present step."""
        if self.on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph must not capture a step or a lookup of a table that depends on the number of the step: "
                "each replay would take that number again. Use an optimizer without momentum or other memory of the "
                "steps, such as SGD or Adagrad, or leave the table out of the graph"
            )

    def check_capture(self, kind: ClockKind | None, numbered: bool) -> None:
        """
        Raise ``RuntimeError`` if a CUDA graph captures a step that its replays would not take rightly.

        Args:
            kind: the kind of the step; another one than the last step's begins with new states.
            numbered: whether the step depends on its number.
        """
        if numbered:
            self.refuse_capture()
        if kind != self.kind and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph must not capture the first step of a table, which makes the optimizer's states: replays "
                "would make them anew. Take a step before the capture"
            )

    @abstractmethod
    def tables(self) -> list[T]:
        """Return the tables that still exist."""

    @abstractmethod
    def part_from(self, table: T) -> None:
        """Remove a table, all rows of which are up to date."""

    @abstractmethod
    def flush(self, tables: list[T]) -> None:
        """Bring the weights and states of the given tables up to date."""

    @abstractmethod
    def restart(self, step: int | None = None) -> None:
        """Flush all rows and begin the history anew, at ``step`` if it is given, else at the present count."""
