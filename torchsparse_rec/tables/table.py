"""
Records of tables that modules and optimizers share: whether rows may be stale, which steps they miss, how to flush.

A row without gradient still moves under Adam, momentum or decay. A table that a module of this package owns is read
through that module only. So such a row can wait until it is read or stepped: until then it is *stale*.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .._torch import as_stored, grad_of, see_swapped
from .layouts import accumulator_dtype, flat

if TYPE_CHECKING:
    from .growing import Places
    from .optimizer import TableOptimizer
    from .part import Part
    from .steps import Steps

__all__ = [
    "Collected",
    "Gradient",
    "RowStates",
    "SECOND_BACKWARD",
    "Table",
    "announce",
    "any_grad",
    "are_same",
    "collecting",
    "forget_collected",
    "StepListener",
    "growing_among",
    "is_growing_stale",
    "no_gradient",
    "note_change",
    "reached",
    "split_part",
    "table_if_any",
    "table_of",
    "writing",
    "zeroed",
]

SECOND_BACKWARD = (
    "grad_mode='fused': a second backward() reached a table before its optimizer's step(), but the first backward() "
    "(in this thread or another, or one that raised) has already updated the table. Add up the losses and call "
    "backward() once, call step() after each backward(), or choose grad_mode='sparse', in which gradients accumulate"
)

# Tables by the id of their parameter; when the parameter dies, its table is removed. A table is no attribute of the
# parameter, as attributes go into files, which torch.load would then refuse.
_tables: dict[int, Table] = {}

# Tables for which a backward has collected gradients that wait for its end, by id.
collecting: dict[int, weakref.ref[Table]] = {}

# The parameters, by id, that backwards have stepped since their gradients were last set to None: in every other mode
# they would have a gradient now. And those of them to which zero_grad(set_to_none=False) has given zeros.
reached: set[int] = set()
zeroed: set[int] = set()

# The optimizers that exist, in the order of their making: a table made after its optimizer finds the optimizer here.
_optimizers: weakref.WeakKeyDictionary[TableOptimizer, None] = weakref.WeakKeyDictionary()

_NONE = {None}


def announce(optimizer: TableOptimizer) -> None:
    """Make an optimizer known to the tables of its parameters: to tables that have none yet, and to later ones."""
    _optimizers[optimizer] = None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            table = table_if_any(parameter)
            if table is not None and table.optimizer is None:
                table.optimizer = optimizer


def note_change() -> None:
    """Count a change of a table's optimizer, clock or states: lists gathered from tables before it are out of date."""
    Table.changes += 1


class Gradient(NamedTuple):
    """A table's gradient: values in the given rows."""

    rows: Tensor | None
    """``[U]`` int64, strictly increasing; None: all rows."""
    values: Tensor
    """``[U, D]``, or ``[V, D]`` for all rows."""


def no_gradient(parameter: Tensor) -> Gradient:
    """Return the gradient of a table none of whose rows has been looked up."""
    values = flat(parameter)[:0]
    return Gradient(torch.zeros(0, dtype=torch.int64, device=values.device), values.to(accumulator_dtype(values.dtype)))


class Collected(NamedTuple):
    """The parts of a table's gradient that one backward, named by its number, has brought; its end applies them."""

    backward: int
    parts: list[Gradient | Any]
    """Gradients of lookups, and losses over all rows, whose gradient is made block by block (``nn/streamed.py``)."""


class StepListener(Protocol):
    """
    The calls by which an optimizer announces its steps to tables that grow, and are read while it trains.

    The calls of every step are for several tables at once.
    """

    name: str

    @staticmethod
    def all_writing(tables: Sequence[Any]) -> AbstractContextManager[None]:
        """Return a context to write the stored rows of some tables in, without readers."""

    @staticmethod
    def all_step(tables: Sequence[Any]) -> None:
        """Take note that a step of some tables begins and has written nothing yet."""

    @staticmethod
    def all_stepped(tables: Sequence[Any]) -> None:
        """Take note that a step of some tables has ended."""

    def places(self, reader: FrameType) -> Places:
        """Bring all rows up to date, and return the row of each key: code of others is about to read or write them."""

    def history_ends(self) -> None:
        """Bring rows kept elsewhere up to date: the history of the steps so far is about to be dropped."""


class RowStates:
    """
    The states that an optimizer keeps for a table, and the last step of each row.

    They belong to the table, not to the optimizer, so that rows can be flushed after the optimizer is gone.
    """

    __slots__ = ("optimizer", "state", "states", "last_step", "clock", "current", "seed", "place")

    def __init__(self, optimizer: TableOptimizer, state: dict, clock: Steps[Table], place: tuple, seed: int) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.state = state  # the optimizer's own, as state_dict() has it
        self.states: list[Tensor] = []  # the tensors of state, [V, D] or [V], as the operators take them
        self.last_step: Tensor | None = None  # [V] int32, from the clock's base; None: no row is ever stale
        self.clock = clock
        self.current = 0  # the last step as of which all rows are known to be up to date
        self.place = place  # dtype and device of the weight
        self.seed = seed  # for stochastic rounding


class Table:
    """A parameter whose gradients come by rows: made by :func:`table_of`."""

    __slots__ = (
        "_parameter",
        "owned",
        "collected",
        "awaited",
        "_growing",
        "part",
        "_optimizer",
        "_rows",
        "__weakref__",
    )

    # The number of changes of tables that note_change() has counted: code that caches facts about tables compares it.
    changes = 0
    # Whether any table of this process has ever grown: most have none, and each of their steps asks several times.
    some_grow = False

    def __init__(self, parameter: Tensor) -> None:
        self._parameter: Callable[[], Tensor | None] = weakref.ref(parameter, partial(_forget, id(parameter)))
        self.owned = False
        self.collected: Collected | None = None
        # The fused lookups whose backward can still come, by number, each with a function that says whether it can.
        self.awaited: dict[int, Callable[[], Any]] = {}
        self._growing: weakref.ref[StepListener] | None = None
        self.part: Part | None = None  # None: of no other rank; set by tables.stale.set_part()
        self._rows: RowStates | None = None
        self._optimizer: weakref.ref[TableOptimizer] | None = None
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
    def optimizer(self) -> TableOptimizer | None:
        """The optimizer that holds the parameter, if it is one of this package and still exists."""
        return self._optimizer() if self._optimizer is not None else None

    @optimizer.setter
    def optimizer(self, optimizer: TableOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        note_change()

    @property
    def optimizer_reference(self) -> weakref.ref[TableOptimizer] | None:
        """A weak reference to :attr:`optimizer`."""
        return self._optimizer

    @property
    def growing(self) -> weakref.ref[StepListener] | None:
        """The listener to the table's steps, if it grows."""
        return self._growing

    @growing.setter
    def growing(self, growing: weakref.ref[StepListener]) -> None:
        Table.some_grow = True
        self._growing = growing
        note_change()

    @property
    def rows(self) -> RowStates | None:
        """The optimizer's record of the table after its first step; None before."""
        return self._rows

    @rows.setter
    def rows(self, rows: RowStates | None) -> None:
        self._rows = rows
        note_change()

    def mark_owned(self) -> None:
        """Declare that a module of this package owns the parameter, whose lookups bring stale rows up to date."""
        if not self.owned:
            self.release()
            self.owned = True

    def disown(self) -> None:
        """Declare that lookups read only the storage: flush all rows now, and leave none stale from now on."""
        self.release()
        self.owned = False

    def is_stale(self) -> bool:
        """Say whether a lookup must bring rows of the weight up to date."""
        rows = self.rows
        return rows is not None and rows.clock.moves_weights and rows.current != rows.clock.step

    def flush(self) -> None:
        """Bring the weight up to date, in place and without a graph, at no cost where no row is stale."""
        rows = self.rows
        if rows is not None and rows.clock.moves_weights:
            rows.clock.flush([self])

    def release(self) -> None:
        """Bring weight and states up to date and leave the clock; the optimizer keeps the table's state."""
        if self.rows is not None:
            for growing in growing_among([self.parameter]):
                growing.history_ends()
            self.rows.clock.flush([self])
            self.rows.clock.part_from(self)
            state = self.rows.state
            if "step" in state:
                state["step"] = state["step"].clone()  # it is a view of the clock's steps, which may go on
            self.rows = None

    def forget(self) -> None:
        """Drop the parameter, which torch is about to swap: torch swaps only tensors without weak references."""
        if self.growing is not None:
            raise RuntimeError(
                f"torch cannot swap a table that grows, of shape {list(self.parameter.shape)}: its module finds rows "
                "by the parameter: call its insert() and erase(), or load_state_dict()"
            )
        if self.part is not None:
            raise RuntimeError(
                f"table {self.part.name!r} is shared over ranks, which its parameter would forget when torch swaps it: "
                "call torch.__future__.set_swap_module_params_on_conversion(False) before"
            )
        self.release()
        _forget(id(self.parameter))
        self._parameter = _nothing
        note_change()

    def is_collecting(self, backward: int) -> bool:
        """Say whether this backward has brought gradients by which the table has not been updated yet."""
        return self.collected is not None and self.collected.backward == backward

    def collect(self, backward: int, part: Gradient | Any) -> bool:
        """Keep what a backward has brought; return False if something of another backward is still kept."""
        if self.collected is None:
            self.collected = Collected(backward, [])
            key = id(self)
            collecting[key] = weakref.ref(self, lambda _: collecting.pop(key, None))
        if self.collected.backward != backward:
            return False
        self.collected.parts.append(part)
        return True

    def take_collected(self) -> list[Gradient | Any]:
        """Return what a backward has brought, and keep it no longer."""
        collected, self.collected = self.collected, None
        collecting.pop(id(self), None)
        return collected.parts if collected is not None else []

    def weight(self) -> Tensor:
        """Return the parameter's stored values, ``[V, D]``, without a flush."""
        return flat(self.parameter)


def _forget_swapped(x: Tensor) -> None:
    table = table_if_any(x)
    if table is not None:
        table.forget()


see_swapped(_forget_swapped)


def _forget(key: int, _: Any = None, tables=_tables, ids=(reached, zeroed)) -> None:  # type: ignore[no-untyped-def]
    """Forget what is known of the parameter with the id ``key``, also at Python's end, when globals are gone."""
    tables.pop(key, None)
    for each in ids:
        each.discard(key)


def _nothing() -> None:
    """Return None, as a weak reference to something that is gone does."""


def growing_among(parameters: Iterable[Tensor]) -> list[StepListener]:
    """Return the tables that grow among the parameters' tables."""
    if not Table.some_grow:
        return []
    tables = [_tables.get(id(parameter)) for parameter in parameters]
    references = [table._growing for table in tables if table is not None and table._growing is not None]
    return [growing for reference in references if (growing := reference()) is not None]


def is_growing_stale(growing: StepListener) -> bool:
    """Say whether rows of a table that grows are stale, even while a trace puts another tensor for its parameter."""
    tables = [table for table in list(_tables.values()) if table.growing is not None and table.growing() is growing]
    return any(table.is_stale() for table in tables)


def writing(parameters: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Return a context to write stored tables in; tables that grow have no readers meanwhile."""
    found = growing_among(parameters) if Table.some_grow else []
    return found[0].all_writing(found) if found else as_stored()  # type: ignore[no-any-return]


def table_if_any(parameter: Tensor) -> Table | None:
    """Return the table of a parameter, or None if it has none."""
    return _tables.get(id(parameter))


def table_of(parameter: Tensor) -> Table:
    """Return the table of a parameter, made at the first call. Copies of the parameter start without one."""
    table = _tables.get(id(parameter))
    # Two threads may make a table each: setdefault keeps one of them.
    return _tables.setdefault(id(parameter), Table(parameter)) if table is None else table


def split_part(parameter: Tensor) -> Part | None:
    """Return a parameter's part of a table, where other ranks have other parts; None for all other parameters."""
    table = _tables.get(id(parameter))
    return table.part if table is not None and table.part is not None and not table.part.replicated else None


def forget_collected(parameters: Iterable[Tensor]) -> None:
    """Drop the gradients of the parameters' tables that were collected by backwards which then raised."""
    if collecting:  # first, as every step calls this with all parameters
        for table in [_tables.get(id(parameter)) for parameter in parameters]:
            if table is not None:
                table.take_collected()


def any_grad(parameters: Iterable[Tensor]) -> bool:
    """Say whether one of the parameters has a gradient. Call it under ``as_stored``."""
    return not _NONE.issuperset(map(grad_of, parameters))


def are_same(a: Collection[object], b: Collection[object]) -> bool:
    """Say whether both collections hold the same objects in the same order."""
    return len(a) == len(b) and all(map(operator.is_, a, b))
