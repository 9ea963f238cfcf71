"""The steps that tables take together, and what those steps do to rows without gradient."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..ops._autograd import as_stored
from ..ops.row_optimizer import new_history, row_optimizer_advance_, row_optimizer_make_current_
from ._lagging import mark_current
from ._tables import accumulator_dtype, growing_among, note_change, writing

if TYPE_CHECKING:
    from ._tables import Rows, Table

__all__ = ["ALL_ROWS", "HISTORY_STEPS", "ITS_ROWS", "LATER", "Clock", "Plan"]

# Steps after which all rows are made current and the history begins anew: 8 MB.
HISTORY_STEPS = 2**16
_FIRST_STEPS = 64

# What happens at a step to rows without gradient.
ITS_ROWS = "nothing"
LATER = "they are caught up later"
ALL_ROWS = "they are stepped too"


class Plan(NamedTuple):
    """How a parameter group steps its tables."""

    rule: int
    hyperparameters: list[float]
    states: tuple[str, ...]
    others: str  # ITS_ROWS, LATER or ALL_ROWS
    moves_weights: bool  # whether, with LATER, weights move too, not only states
    eps: tuple  # and its place

    @property
    def kind(self) -> tuple:
        """What may change only when no row is behind."""
        return self.rule, self.states, self.others, self.moves_weights, self.eps


class Clock:
    """
    The steps of tables of one parameter group that have always stepped together.

    ``history`` has, for every step since ``base``, what it did to idle rows; ``Rows.last_step`` says from where on a
    row needs it.
    """

    def __init__(self, group: int, owned: bool, step: int) -> None:
        self.group = group  # its id: the group itself holds parameters, which would then hold themselves
        self.owned = owned
        self.random_rounding = False
        self.step = step
        self.base = step
        self.kind: tuple | None = None  # None: not started
        self.rule = 0
        self.hyperparameters: list[float] = []
        self.moves_weights = False
        self.history: Tensor | None = None
        self.steps = torch.empty(0)  # [tables]: what state["step"] of each is a view of
        self._tables: list[weakref.ref[Table]] = []
        # Held while rows are written, by a step or by whoever reads them first. Tables that grow have their own.
        self.lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._tables)

    def tables(self) -> list[Table]:
        """Those that still exist. Their parameters, not the clock, keep them alive."""
        tables = [table for reference in self._tables if (table := reference()) is not None]
        if len(tables) != len(self._tables):
            self._tables = [weakref.ref(table) for table in tables]
        return tables

    def add(self, table: Table) -> None:
        """Let a table step with the others."""
        self._tables.append(weakref.ref(table))

    def part_from(self, table: Table) -> None:
        """Let a table go that is current."""
        self._remove(table)
        mark_current(table.parameter)

    def _remove(self, table: Table) -> None:
        self._tables = [reference for reference in self._tables if reference() is not table]

    def start(self, plan: Plan) -> None:
        """Begin a history: of tables that are current, with their states in place."""
        self.kind = plan.kind
        self.rule = plan.rule
        self.hyperparameters = plan.hyperparameters
        self.moves_weights = plan.moves_weights
        self.base = self.step
        tables = self.tables()
        device = tables[0].parameter.device
        self.history = new_history(_FIRST_STEPS, device) if plan.others == LATER else None
        for table in tables:
            rows, weight = table.rows, table.parameter
            assert rows is not None
            rows.current = self.step
            later = plan.others == LATER
            rows.last_step = torch.zeros(weight.shape[0], dtype=torch.int32, device=device) if later else None
            if not plan.moves_weights:
                mark_current(weight)
        self._share_steps()
        note_change()

    def _share_steps(self) -> None:
        # One write a step for all tables, whose state["step"] are views of it.
        tables = self.tables()
        self.steps = torch.full((len(tables),), float(self.step), dtype=torch.float32)
        for table, step in zip(tables, self.steps, strict=True):
            assert table.rows is not None
            if "step" in table.rows.state:
                table.rows.state["step"] = step

    def split(self, tables: list[Table]) -> Clock:
        """A clock of their own, with the past they share with the others, for tables that go on without those."""
        other = Clock(self.group, self.owned, self.step)
        other.base, other.kind, other.random_rounding = self.base, self.kind, self.random_rounding
        other.rule, other.hyperparameters, other.moves_weights = self.rule, self.hyperparameters, self.moves_weights
        other.history = self.history.clone() if self.history is not None else None
        for table in tables:
            assert table.rows is not None
            self._remove(table)
            other.add(table)
            table.rows.clock = other
        other._share_steps()
        note_change()
        return other

    def make_room(self) -> None:
        """See that the history has room for one more step."""
        if self.history is None:
            return
        taken = self.step - self.base
        capacity = self.history.shape[0] // 2
        if taken < capacity:
            return
        if taken >= HISTORY_STEPS:
            self.restart()
            return
        longer = new_history(2 * capacity, self.history.device)
        longer[: 2 * capacity].copy_(self.history)
        self.history = longer

    def restart(self, step: int | None = None) -> None:
        """Make all rows current and begin the history anew; ``step``: with another count of the steps."""
        tables = self.tables()
        for growing in growing_among(table.parameter for table in tables):
            growing.history_ends()
        self.make_current(tables)
        self.step = self.base = self.step if step is None else step
        for table in tables:
            assert table.rows is not None
            table.rows.current = self.step
            if table.rows.last_step is not None:
                table.rows.last_step.zero_()

    @torch.no_grad()
    def make_current(self, tables: list[Table]) -> None:
        """Bring weights and states of some of its tables up to date."""
        if not self._behind(tables):
            return
        with writing(table.parameter for table in tables), self.lock, as_stored():
            behind = self._behind(tables)  # another thread may have done it
            if not behind:
                return
            assert self.history is not None
            row_optimizer_make_current_(
                [t.weight() for t, _ in behind],
                [state for _, r in behind for state in r.states],
                [r.last_step for _, r in behind if r.last_step is not None],
                self.history,
                rule=self.rule,
                hyperparameters=self.hyperparameters,
                step=self.step,
                base=self.base,
                rounding_seeds=self.rounding_seeds([t for t, _ in behind]),
            )
            for _, rows in behind:
                rows.current = self.step

    def _behind(self, tables: list[Table]) -> list[tuple[Table, Rows]]:
        """Those among the tables of which a row may be behind."""
        if self.history is None:
            return []
        return [(t, r) for t in tables if (r := t.rows) is not None and r.current != self.step]

    def advance(self, hyperparameters: list[float], step: int) -> None:
        """End a step: write down what it does to the rows that it left alone."""
        if self.history is not None:
            row_optimizer_advance_(
                self.history, rule=self.rule, hyperparameters=hyperparameters, step=step, base=self.base
            )
        self.hyperparameters = hyperparameters
        self.step = step
        self.steps.fill_(step)

    def rounding_seeds(self, tables: list[Table]) -> list[int]:
        """One for each of its tables, if their half weights are rounded at random; none to round to nearest."""
        dtype = tables[0].parameter.dtype
        if not self.random_rounding or accumulator_dtype(dtype) == dtype:
            return []
        return [table.rows.seed for table in tables if table.rows is not None]
