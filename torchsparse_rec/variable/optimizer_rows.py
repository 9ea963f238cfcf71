"""The optimizer's state of a table that grows: it grows, is reset, and moves between tiers with the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from .. import ops
from ..ops.row_optimizer import row_optimizer_make_current_
from ..optim.row_optimizer import RowOptimizer
from ..tables.layouts import accumulator_dtype
from ..tables.steps import ITS_ROWS, Steps
from ..tables.table import Table, note_change, table_of

__all__ = ["BEFORE_HISTORY", "Column", "OptimizerRows", "flush_rows", "new_zeros"]

# The step of rows that are up to date as of the step at which the optimizer's history begins.
BEFORE_HISTORY = -1
# The bytes of a cache line.
_LINE = 64


class Column(NamedTuple):
    """One of the optimizer's states of a table."""

    name: str
    values: Tensor
    """``[R, D]`` or ``[R]``."""
    initial: float


class OptimizerRows:
    """
    The states that the optimizer keeps of a table's rows; none without an optimizer of ``torchsparse_rec.optim``.

    Args:
        weight: the table.
    """

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight
        self.table = table_of(weight)

    @property
    def optimizer(self) -> RowOptimizer | None:
        """The optimizer of ``torchsparse_rec.optim`` that holds the table, if there is one."""
        optimizer = self.table.optimizer
        return optimizer if isinstance(optimizer, RowOptimizer) else None

    def _state(self) -> dict[str, Any]:
        if self.table.rows is not None:
            return self.table.rows.state  # the state outlives its optimizer
        optimizer = self.optimizer
        if optimizer is None:
            return {}
        # The loaded states of float16 and bfloat16 tables follow the rows from now on.
        for name, values in optimizer.wide_states.pop(self.weight, {}).items():
            optimizer.stored_state[self.weight][name] = values.to(self.weight.device)
        return optimizer.stored_state.get(self.weight, {})

    def columns(self, rows: int | None = None) -> list[Column]:
        """Return the states of the table, which have ``rows`` rows, by default as many as the weight."""
        optimizer, rows = self.optimizer, self.weight.shape[0] if rows is None else rows
        return [
            Column(name, values, 0.0 if optimizer is None else optimizer.initial_value(name))
            for name, values in sorted(self._state().items())
            if isinstance(values, Tensor) and values.dim() >= 1 and values.shape[0] == rows
        ]

    def known_states(self) -> dict[str, bool]:
        """Return, for each state of the optimizer's rule by name, whether it has one number for each row."""
        optimizer = self.optimizer
        return {} if optimizer is None else {name: name in optimizer.per_row for name in self._rule_states(optimizer)}

    def _rule_states(self, optimizer: RowOptimizer) -> tuple[str, ...]:
        group = next(group for group in optimizer.param_groups if any(p is self.weight for p in group["params"]))
        return optimizer.rule(group).states

    def steps(self) -> int:
        """Return how many steps the optimizer has taken."""
        rows = self.table.rows
        if rows is not None:
            return rows.clock.step
        return int(self._state().get("step", 0))

    def current_step(self) -> int:
        """Return the step that marks a row as up to date now; BEFORE_HISTORY without a history."""
        rows = self.table.rows
        return BEFORE_HISTORY if rows is None or rows.last_step is None else rows.clock.step

    def replace(self, columns: dict[str, Tensor]) -> None:
        """Replace states by other tensors, perhaps with another number of rows."""
        state, optimizer, rows = self._state(), self.optimizer, self.table.rows
        state.update(columns)
        if rows is not None and rows.clock.kind is not None and optimizer is not None:
            rows.states = [optimizer.state_of(self.weight, name, state) for name in rows.clock.kind[1]]
        note_change()

    def grown(self, before: int, after: int) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return states for ``after`` rows, and the step up to which each row is up to date, for :meth:`take`."""
        longer = {}
        for name, values, initial in self.columns(before):
            if initial == 0:
                longer[name] = new_zeros((after, *values.shape[1:]), values.dtype, values.device)
            else:
                longer[name] = values.new_full((after, *values.shape[1:]), initial)
            longer[name][:before] = values
        rows = self.table.rows
        if rows is None or rows.last_step is None:
            return longer, None
        last_step = rows.last_step.new_full((after,), rows.clock.step - rows.clock.base)
        last_step[:before] = rows.last_step
        return longer, last_step

    def take(self, longer: dict[str, Tensor], last_step: Tensor | None) -> None:
        """Take over the result of :meth:`grown`."""
        if last_step is not None:
            self.table.rows.last_step = last_step  # type: ignore[union-attr]
        self.replace(longer)

    def begin(self, rows: Tensor) -> None:
        """
        Reset the states of new rows: leftovers of a row's last key, or of a gradient of all rows, are overwritten.

        Args:
            rows: the rows; negative ones are left out.
        """
        for _, values, initial in self.columns():
            of_rows = values if values.dim() > 1 else values.unsqueeze(1)
            ops.table_initialize_(of_rows, rows, rows, kind="constant", parameters=(float(initial),))
        self._note_current(rows, None)

    def put(self, rows: Tensor, states: Mapping[str, Tensor], steps: Tensor | None = None) -> None:
        """
        Write the states of rows that have been inserted with their states.

        Args:
            rows: the rows; none is negative.
            states: the states by name; missing ones get their initial value.
            steps: the step up to which each row is up to date. Default: the last one.
        """
        if not states and steps is None:
            self.begin(rows)
            return
        for name, values, initial in self.columns():
            if name in states:
                values.index_copy_(0, rows, states[name].to(values.device, values.dtype))
            else:
                values.index_fill_(0, rows, initial)
        self._note_current(rows, steps)

    def _note_current(self, rows: Tensor, steps: Tensor | None) -> None:
        """Note the step up to which rows are up to date, by default the last one; negative rows are left out."""
        last_step = None if self.table.rows is None else self.table.rows.last_step
        if last_step is None:
            return
        clock = self.table.rows.clock  # type: ignore[union-attr]
        if steps is None:
            values = torch.full_like(rows, clock.step - clock.base, dtype=torch.int32)
        else:
            values = (steps - clock.base).clamp_min(0).int()
        bytes_of = last_step.view(torch.uint8).view(-1, 4)
        ops.table_assign_(bytes_of, rows, values.view(torch.uint8).view(-1, 4))
        if steps is not None:
            self.table.rows.current = -1  # type: ignore[union-attr]

    def stored(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return some stored rows, perhaps stale, their states, and the step up to which each is up to date."""
        values = self.weight.detach().index_select(0, rows)
        states = {column.name: column.values.index_select(0, rows) for column in self.columns()}
        its = self.table.rows
        if its is None or its.last_step is None:
            return values, states, torch.full_like(rows, BEFORE_HISTORY)
        steps = its.last_step.index_select(0, rows).long() + its.clock.base
        return values, states, steps.clamp_min(its.current)

    def current(self, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return copies of some rows, ``[N, D]``, and of their states, brought up to date."""
        values = self.weight.detach().index_select(0, rows)
        states = {column.name: column.values.index_select(0, rows) for column in self.columns()}
        its = self.table.rows
        if its is not None and its.last_step is not None and its.current != its.clock.step:
            flush_rows(its.clock, values, states, its.last_step.index_select(0, rows))
        return values, states

    def moves_all_rows(self) -> bool:
        """Say whether the optimizer's steps also move rows without a gradient."""
        rows = self.table.rows
        return rows is not None and rows.clock.kind is not None and rows.clock.kind[2] != ITS_ROWS

    def start_over(self, names: Sequence[str], steps: int, keep: bool = False) -> None:
        """
        Make initial states for all rows, with as many rows as the table has now.

        Args:
            names: the names of the states to make, where the optimizer has none yet.
            steps: the number of steps that the optimizer has taken.
            keep: whether states that have the table's size already stay.
        """
        self.table.release()
        optimizer = self.optimizer
        if optimizer is None:
            return
        self._state()
        state = optimizer.stored_state[self.weight]
        there = [name for name, x in state.items() if isinstance(x, Tensor) and x.dim() >= 1]
        dtype = accumulator_dtype(self.weight.dtype)
        # States of another optimizer are of no use to this one.
        known = self._rule_states(optimizer)
        kept = [name for name in names if name in known]
        if names and not kept:
            steps = 0
        for name in there or kept:
            if keep and name in state and state[name].shape[0] == self.weight.shape[0]:
                continue
            state[name] = optimizer.new_state(self.weight, name, dtype, {})
        if optimizer.counts_steps and (steps or "step" in state):
            state["step"] = torch.tensor(float(steps))
        note_change()

    def flush(self) -> None:
        """Flush all rows and states, and forget the history of past steps, as before a checkpoint."""
        if self.table.rows is not None:
            self.table.rows.clock.restart()


def flush_rows(clock: Steps[Table], values: Tensor, states: Mapping[str, Tensor], last_step: Tensor) -> None:
    """
    Bring copies of rows up to date, in place.

    Args:
        clock: the clock of the table, with a history.
        values: ``[N, D]``.
        states: the optimizer's states of these rows, by name.
        last_step: ``[N]`` int32, on the device of the values: the position in the history from which each row needs it.
    """
    assert clock.history is not None and clock.kind is not None
    row_optimizer_make_current_(
        [values],
        [x if x.dim() == 1 else x.flatten(1) for x in (states[name] for name in clock.kind[1])],
        [last_step],
        clock.history,
        rule=clock.rule,
        hyperparameters=clock.hyperparameters,
        step=clock.step,
        base=clock.base,
        rounding_seeds=[],
    )


@torch.inference_mode(False)  # a table may grow in inference mode, and be trained after it
def new_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """
    Return zeros; on the host, memory pages that the system allocates only when they are first written.

    A table that has just doubled is half empty. numpy asks for huge pages, so that random reads need few pages. The
    first row begins with a cache line, as in torch's own memory.
    """
    where = torch.get_default_device() if device is None else torch.device(device)
    if where.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    memory = np.zeros(size + _LINE, np.uint8)
    begin = -memory.ctypes.data % _LINE
    return torch.from_numpy(memory[begin : begin + size]).view(dtype).view(tuple(shape))
