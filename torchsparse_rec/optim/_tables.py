"""
What modules and optimizers share of a table: whether rows may lag behind, what they lag behind, and how to catch up.

A row without gradient still moves under Adam, momentum or decay. A table that one of our modules owns is read through
that module only, so its idle rows can be left as they are until they are read or stepped: they are *behind*.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._clock import Clock
    from ._row_optimizer import RowOptimizer

__all__ = [
    "Collected",
    "Gradient",
    "Rows",
    "Table",
    "are_same",
    "changes",
    "forget_collected",
    "Growing",
    "growing_among",
    "is_growing_behind",
    "note_change",
    "table_if_any",
    "table_of",
    "writing",
]

# By the id of their parameter, whose death removes them. Not among its attributes: those go into files, which
# torch.load then refuses.
_tables: dict[int, Table] = {}

# Tables of which a backward has collected something.
_collecting: weakref.WeakSet[Table] = weakref.WeakSet()

# The optimizers that exist, in the order in which they were made: a table made after its optimizer finds it here.
_optimizers: weakref.WeakKeyDictionary[RowOptimizer, None] = weakref.WeakKeyDictionary()

_changes = 0


def note_change() -> None:
    """Say that a table has another optimizer, clock or states: what was gathered from tables must be gathered anew."""
    global _changes
    _changes += 1


def changes() -> int:
    """How many of those there have been."""
    return _changes


class Gradient(NamedTuple):
    """A table's gradient: values in the given rows."""

    rows: Tensor | None
    """``[U]`` int64, strictly increasing; None: all rows."""
    values: Tensor
    """``[U, D]``, or ``[V, D]`` for all rows."""


class Collected(NamedTuple):
    """What one backward, by its number, has brought of a table's gradient: it updates the table when it ends."""

    backward: int
    parts: list[Gradient]


class Growing(Protocol):
    """What a table that grows, and is read while it trains, wants to know of its optimizer's doings."""

    def writing(self) -> AbstractContextManager[None]:
        """Rows are written in here: nobody reads."""

    def lock_number(self) -> int:
        """Whoever writes several tables begins with the one of the lowest number."""

    def steps(self) -> None:
        """A step of the optimizer begins, of which nothing has been written."""

    def stepped(self) -> None:
        """A step of the optimizer has ended."""

    def history_ends(self) -> None:
        """What the steps so far did to idle rows is about to be forgotten: rows elsewhere must follow them now."""


class Rows:
    """
    What an optimizer keeps of a table, row by row.

    It lies with the table, not with the optimizer, so that rows can be caught up after the optimizer is gone.
    """

    __slots__ = ("optimizer", "state", "states", "last_step", "clock", "current", "seed", "place")

    def __init__(self, optimizer: RowOptimizer, state: dict, clock: Clock, place: tuple, seed: int) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.state = state  # the optimizer's own, as state_dict() has it
        self.states: list[Tensor] = []  # its tensors, [V, D] or [V], as the operators take them
        self.last_step: Tensor | None = None  # [V] int32, from the clock's base; None: no row is ever behind
        self.clock = clock
        self.current = 0  # the last step as of which all rows are known to be current
        self.place = place  # dtype and device of the weight
        self.seed = seed  # of stochastic rounding


class Table:
    """A parameter whose gradients come by rows: made by :func:`table_of`."""

    __slots__ = ("_parameter", "owned", "collected", "growing", "_optimizer", "_rows", "__weakref__")

    def __init__(self, parameter: Tensor) -> None:
        tables, key = _tables, id(parameter)
        self._parameter: Callable[[], Tensor | None] = weakref.ref(parameter, lambda _: tables.pop(key, None))
        self.owned = False
        self.collected: Collected | None = None
        self.growing: weakref.ref[Growing] | None = None
        self._rows: Rows | None = None
        self._optimizer: weakref.ref[RowOptimizer] | None = None
        for optimizer in list(_optimizers):
            if optimizer.holds(parameter):
                self.optimizer = optimizer

    @property
    def parameter(self) -> Tensor:
        """The parameter itself."""
        parameter = self._parameter()
        assert parameter is not None
        return parameter

    @property
    def num_embeddings(self) -> int:
        """The number of rows."""
        return self.parameter.shape[0]

    @property
    def optimizer(self) -> RowOptimizer | None:
        """The optimizer that holds the parameter, if it is one of ours and still exists."""
        return self._optimizer() if self._optimizer is not None else None

    @optimizer.setter
    def optimizer(self, optimizer: RowOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        note_change()

    @property
    def optimizer_reference(self) -> weakref.ref[RowOptimizer] | None:
        """The same, kept weakly."""
        return self._optimizer

    @property
    def rows(self) -> Rows | None:
        """What its optimizer keeps of it, after its first step."""
        return self._rows

    @rows.setter
    def rows(self, rows: Rows | None) -> None:
        self._rows = rows
        note_change()

    def mark_owned(self) -> None:
        """Say that a module of ours owns the parameter and asks for current rows at every lookup."""
        if not self.owned:
            self.release()
            self.owned = True

    def disown(self) -> None:
        """Say that lookups of the parameter no longer ask for current rows: all of them must be so where they lie."""
        self.release()
        self.owned = False

    def is_behind(self) -> bool:
        """Whether a lookup must bring rows of the weight up to date."""
        rows = self.rows
        return rows is not None and rows.clock.moves_weights and rows.current != rows.clock.step

    def make_current(self) -> None:
        """Bring the weight up to date, in place. It keeps no graph and costs nothing where no row is behind."""
        rows = self.rows
        if rows is not None and rows.clock.moves_weights:
            rows.clock.make_current([self])

    def release(self) -> None:
        """Bring everything up to date and part from the clock; the optimizer's state stays what it is."""
        if self.rows is not None:
            for growing in growing_among([self.parameter]):
                growing.history_ends()
            self.rows.clock.make_current([self])
            self.rows.clock.part_from(self)
            state = self.rows.state
            if "step" in state:
                state["step"] = state["step"].clone()  # it is a view of the clock's, which may go on
            self.rows = None

    def forget(self) -> None:
        """Let go of the parameter, which torch is about to swap: only one that nobody refers to weakly can be."""
        self.release()
        _tables.pop(id(self.parameter), None)
        self._parameter = _nothing
        note_change()

    def is_collecting(self, backward: int) -> bool:
        """Whether this backward has brought something that the table is still to be updated with."""
        return self.collected is not None and self.collected.backward == backward

    def collect(self, backward: int, gradient: Gradient) -> bool:
        """Keep what a backward has brought; False if another one's is here."""
        if self.collected is None:
            self.collected = Collected(backward, [])
            _collecting.add(self)
        if self.collected.backward != backward:
            return False
        self.collected.parts.append(gradient)
        return True

    def take_collected(self) -> list[Gradient]:
        """What a backward has brought; it is collected no longer."""
        collected, self.collected = self.collected, None
        _collecting.discard(self)
        return collected.parts if collected is not None else []

    def weight(self) -> Tensor:
        """The parameter's storage as it is, ``[V, D]``."""
        return flat(self.parameter)


def _nothing() -> None:
    """What a weak reference to something that is gone gives."""


def growing_among(parameters: Iterable[Tensor]) -> list[Growing]:
    """The tables that grow among the parameters, in the order in which they are to be locked."""
    tables = [_tables.get(id(parameter)) for parameter in parameters]
    references = [table.growing for table in tables if table is not None and table.growing is not None]
    found = [growing for reference in references if (growing := reference()) is not None]
    return sorted(found, key=lambda growing: growing.lock_number()) if len(found) > 1 else found


def is_growing_behind(growing: Growing) -> bool:
    """Whether rows of a table that grows are behind, whatever stands for its parameter while a program is traced."""
    tables = [table for table in list(_tables.values()) if table.growing is not None and table.growing() is growing]
    return any(table.is_behind() for table in tables)


@contextmanager
def writing(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Rows of these tables are written in here."""
    found = growing_among(parameters)
    if not found:
        yield
        return
    with ExitStack() as stack:
        for growing in found:
            stack.enter_context(growing.writing())
        yield


def table_if_any(parameter: Tensor) -> Table | None:
    """The table of a parameter that has one."""
    return _tables.get(id(parameter))


def table_of(parameter: Tensor) -> Table:
    """The table of a parameter, made at the first call. Copies of the parameter start without."""
    table = _tables.get(id(parameter))
    # Two threads may make one each; one of them is kept.
    return _tables.setdefault(id(parameter), Table(parameter)) if table is None else table


def forget_collected(parameters: Iterable[Tensor]) -> None:
    """Forget what backwards that have raised had brought of gradients of tables among the parameters."""
    if _collecting:  # asked of all parameters at every step
        for table in [_tables.get(id(parameter)) for parameter in parameters]:
            if table is not None:
                table.take_collected()


def are_same(a: Collection[object], b: Collection[object]) -> bool:
    """Whether these are the same objects."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def flat(x: Tensor) -> Tensor:
    """``[V, ...]`` as ``[V, D]``, without a copy."""
    x = x.detach()
    return x if x.dim() == 2 else x.view(x.shape[0], -1)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the states of a table of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32
