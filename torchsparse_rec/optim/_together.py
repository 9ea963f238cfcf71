"""Tables that step together, and the record of their last step until something in it changes."""

from __future__ import annotations

from operator import is_

from torch import Tensor

from ..tables.clock import Clock
from ..tables.gradients import StepGroup
from ..tables.layouts import accumulator_dtype, flat, has_whole_rows
from ..tables.steps import ClockKind
from ..tables.table import Table, growing_among
from ._groups import Groups
from ._rule import Rule

__all__ = ["LEAST_WHOLE_ROWS", "SteppedTogether", "WHOLE"]

# A table with at most so many times the rows that have a gradient is stepped whole. So many rows cost less in one walk
# than few rows that are brought up to date in reading, and again in stepping. In a table with fewer rows than
# LEAST_WHOLE_ROWS a step names either all rows or too few.
WHOLE, LEAST_WHOLE_ROWS = 5, 512


def _most_whole(table: Table) -> int:
    """
    Return up to how many times its rows with a gradient a table is stepped whole, if at all.

    Half-precision rows would be rounded at each step, and tables that grow have rows without a key. Ranks that have
    parts of a table's rows would each find another answer.
    """
    weight, part = table.parameter, table.part
    wide = accumulator_dtype(weight.dtype) == weight.dtype
    splits_rows = part is not None and part.splits_rows
    may = weight.shape[0] >= LEAST_WHOLE_ROWS and wide and table.growing is None and not splits_rows
    return WHOLE if may else 0


class Lists:
    """The tensors of a clock's tables, in the lists that the operators take."""

    def __init__(self, tables: list[Table]) -> None:
        all_rows = [table.rows for table in tables if table.rows is not None]
        self.changes = Table.changes
        self.parameters = [table.parameter for table in tables]
        self.states = [state for rows in all_rows for state in rows.states]
        self.last_steps = [rows.last_step for rows in all_rows if rows.last_step is not None]
        self._as_they_are = all(parameter.dim() == 2 for parameter in self.parameters)
        self.writable = all(map(has_whole_rows, self.parameters))
        self.whole = [_most_whole(table) for table in tables] if self.last_steps else []

    def weights(self) -> list[Tensor]:
        """Return the tables' weights, each as ``[V, D]``."""
        return self.parameters if self._as_they_are else [flat(parameter) for parameter in self.parameters]


class SteppedTogether:
    """
    Parameters that were stepped together, and what their next step reuses if :meth:`is_of` is True.

    Args:
        given: the parameters.
        optimizer: the optimizer that steps them.
        tables: the tables among those that a parameter group lists, by their clocks.
    """

    def __init__(self, given: list[Tensor], optimizer: Groups, tables: list[tuple[Clock, list[Table]]]) -> None:
        self.given, self.tables = given, tables
        self.listed = [table.parameter for _, its in tables for table in its]
        self.grows = bool(growing_among(self.listed))
        self.kinds: dict[int, tuple[tuple[Rule, bool], ClockKind]] = {}  # by clock, what its last step was taken for
        self.begun: dict[int, StepGroup] = {}  # by clock, its last step
        self._changes = Table.changes
        self._states = list(optimizer.stored_state.values())
        self._groups = [(group, list(group["params"])) for group in optimizer.param_groups]
        self._places = [(parameter.dtype, parameter.device) for parameter in given]
        self._lists: dict[int, Lists] = {}

    def is_of(self, given: list[Tensor], optimizer: Groups) -> bool:
        """Say whether these are the same parameters, in the same groups, and no state has been replaced or moved."""
        # One call for each step of each small table: a loop costs less here than a generator.
        now, states = optimizer.param_groups, optimizer.__dict__["state"]
        if self._changes != Table.changes or len(now) != len(self._groups) or len(states) != len(self._states):
            return False
        if given is not self.given and not (len(given) == len(self.given) and all(map(is_, given, self.given))):
            return False
        for group, (known, parameters) in zip(now, self._groups, strict=True):
            listed = group["params"]
            if group is not known or len(listed) != len(parameters) or not all(map(is_, listed, parameters)):
                return False
        for parameter, (dtype, device) in zip(given, self._places, strict=True):
            if parameter.dtype is not dtype or parameter.device != device:
                return False
        return all(map(is_, states.values(), self._states))

    def lists(self, number: int) -> Lists:
        """Return the lists of tensors of ``tables[number]``, made anew if a table has changed."""
        known = self._lists.get(number)
        if known is None or known.changes != Table.changes:
            known = self._lists[number] = Lists(self.tables[number][1])
        return known
