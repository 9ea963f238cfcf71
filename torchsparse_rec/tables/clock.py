"""The count of steps that tables take together, and the history of their effects on rows without gradient."""

from __future__ import annotations

import weakref

import torch

from ..ops.row_optimizer import new_history, row_optimizer_make_current_
from .layouts import accumulator_dtype, writable
from .stale import mark_fresh
from .steps import LATER, ClockKind, Steps
from .table import RowStates, Table, growing_among, note_change, writing

__all__ = ["HISTORY_STEPS", "Clock"]

# Steps after which all rows are flushed and the history begins anew: 8 MB.
HISTORY_STEPS = 2**16
_FIRST_STEPS = 64

_ops = torch.ops.torchsparse_rec


class Clock(Steps[Table]):
    """The steps, and the history, of tables in one parameter group that have always stepped together."""

    def __init__(self, group: int, owned: bool, step: int, on_cuda: bool = False) -> None:
        super().__init__(group, owned, step, on_cuda)
        self._tables: list[weakref.ref[Table]] = []

    def __len__(self) -> int:
        return len(self._tables)

    def tables(self) -> list[Table]:
        """Return the clock's tables that still exist: their parameters, not the clock, keep them alive."""
        tables = [table for reference in self._tables if (table := reference()) is not None]
        if len(tables) != len(self._tables):
            self._tables = [weakref.ref(table) for table in tables]
        return tables

    def add(self, table: Table) -> None:
        """Add a table, which from now on steps with the others."""
        self._tables.append(weakref.ref(table))

    def part_from(self, table: Table) -> None:
        """Remove a table whose rows are all up to date."""
        self._remove(table)
        mark_fresh(table.parameter)

    def _remove(self, table: Table) -> None:
        self._tables = [reference for reference in self._tables if reference() is not table]

    def start(self, kind: ClockKind, hyperparameters: list[float]) -> None:
        """Begin a history for the clock's tables, whose rows are all up to date and whose states exist."""
        self.kind = kind
        self.rule = kind.rule
        self.hyperparameters = hyperparameters
        self.moves_weights = kind.moves_weights
        self.base = self.step
        tables = self.tables()
        device = tables[0].parameter.device
        self.history = new_history(_FIRST_STEPS, device) if kind.others == LATER else None
        for table in tables:
            rows, weight = table.rows, table.parameter
            assert rows is not None
            rows.current = self.step
            later = kind.others == LATER
            rows.last_step = torch.zeros(weight.shape[0], dtype=torch.int32, device=device) if later else None
            if not kind.moves_weights:
                mark_fresh(weight)
        self._share_steps()
        note_change()

    @torch.inference_mode(False)  # what inference mode makes, no other mode may write
    def _share_steps(self) -> None:
        # Each table's state["step"] is a view of self.steps: one write a step counts for all of them.
        all_rows = [rows for table in self.tables() if (rows := table.rows) is not None and "step" in rows.state]
        self.steps = torch.full((len(all_rows),), float(self.step), dtype=torch.float32) if all_rows else None
        for rows, step in zip(all_rows, () if self.steps is None else self.steps, strict=True):
            rows.state["step"] = step

    def split(self, tables: list[Table]) -> Clock:
        """Move tables that step without the others to a new clock, with the same history; return that clock."""
        other = Clock(self.group, self.owned, self.step, self.on_cuda)
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
        """Make room for one more step in the history: double it, or begin it anew."""
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
        """Flush all rows and begin the history anew, at ``step`` if it is given, else at the present count."""
        tables = self.tables()
        for growing in growing_among(table.parameter for table in tables):
            growing.history_ends()
        self.flush(tables)
        self.step = self.base = self.step if step is None else step
        for table in tables:
            assert table.rows is not None
            table.rows.current = self.step
            if table.rows.last_step is not None:
                table.rows.last_step.zero_()

    @torch.no_grad()
    def flush(self, tables: list[Table]) -> None:
        """Bring the weights and states of the given tables up to date."""
        if not self._stale(tables):
            return
        with writing(table.parameter for table in tables), self:
            stale = self._stale(tables)  # again: another thread may have brought them up to date
            if not stale:
                return
            assert self.history is not None
            self.refuse_capture()
            # A table may have been converted or moved since, and its states not yet.
            given = [t.weight().to(dtype=r.place[0], device=r.place[1]) for t, r in stale]
            with writable(given, [True] * len(stale)) as weights:
                row_optimizer_make_current_(
                    weights,
                    [state for _, r in stale for state in r.states],
                    [r.last_step for _, r in stale if r.last_step is not None],
                    self.history,
                    rule=self.rule,
                    hyperparameters=self.hyperparameters,
                    step=self.step,
                    base=self.base,
                    rounding_seeds=self.rounding_seeds([t for t, _ in stale]),
                )
            for (table, rows), weight in zip(stale, given, strict=True):
                if self.moves_weights and rows.place != (table.parameter.dtype, table.parameter.device):
                    table.weight().copy_(weight)
                rows.current = self.step

    def _stale(self, tables: list[Table]) -> list[tuple[Table, RowStates]]:
        """Return the tables that may have stale rows, each with its ``RowStates``."""
        if self.history is None:
            return []
        return [(t, r) for t in tables if (r := t.rows) is not None and r.current != self.step]

    def advance(self, hyperparameters: list[float], step: int) -> None:
        """End a step: add its effect on rows without gradient to the history."""
        if self.history is not None:
            # The operator itself: no graph can have saved the history.
            _ops.row_optimizer_advance_.default(self.history, self.rule, hyperparameters, step, self.base)
        self.hyperparameters = hyperparameters
        self.step = step
        if self.steps is not None:
            self.steps.fill_(step)

    def rounding_seeds(self, tables: list[Table]) -> list[int]:
        """Return a seed for each table whose half-precision weights are rounded at random; no seeds otherwise."""
        dtype = tables[0].parameter.dtype
        if not self.random_rounding or accumulator_dtype(dtype) == dtype:
            return []
        return [table.rows.seed for table in tables if table.rows is not None]
