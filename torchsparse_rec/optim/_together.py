"""Tables that step together, and the lists of their tensors, which are kept until a table changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..tables.clock import Clock, ClockKind
from ..tables.table import Table, accumulator_dtype, are_same, changes, flat, has_whole_rows

if TYPE_CHECKING:
    from .row_optimizer import Rule

__all__ = ["LEAST_WHOLE_ROWS", "Together", "WHOLE"]

# A table with at most so many times the rows that have a gradient is stepped whole: so many rows cost less in one walk
# than few that are caught up with when they are read, and again when they are stepped. Of a table with fewer rows than
# these a step names either all rows or too few.
WHOLE, LEAST_WHOLE_ROWS = 5, 512


def _most_whole(table: Table) -> int:
    """
    Return up to how many times its rows with a gradient a table is stepped whole, if at all.

    Half-precision rows would be rounded at each step, tables that grow have rows without a key, and the ranks that have
    parts of a table's rows would each come to their own answer.
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
        self.changes = changes()
        self.parameters = [table.parameter for table in tables]
        self.states = [state for rows in all_rows for state in rows.states]
        self.last_steps = [rows.last_step for rows in all_rows if rows.last_step is not None]
        self._as_they_are = all(parameter.dim() == 2 for parameter in self.parameters)
        self.writable = all(map(has_whole_rows, self.parameters))
        self.whole = [_most_whole(table) for table in tables] if self.last_steps else []

    def weights(self) -> list[Tensor]:
        """Return the tables' weights, each as ``[V, D]``."""
        return self.parameters if self._as_they_are else [flat(parameter) for parameter in self.parameters]


class Together:
    """Parameters that were stepped together, by clock; the next step uses the same lists if :meth:`is_of` says so."""

    def __init__(
        self, parameters: list[Tensor], state: dict[Tensor, Any], tables: list[tuple[Clock, list[Table]]]
    ) -> None:
        self._parameters, self.tables = parameters, tables
        self.kinds: dict[int, tuple[tuple[Rule, bool], ClockKind]] = {}  # by clock, what its last step was taken for
        self._changes = changes()
        self._states = list(state.values())
        self._places = [parameter.dtype for parameter in parameters], [parameter.device for parameter in parameters]
        self._lists: dict[int, Lists] = {}

    def is_of(self, parameters: list[Tensor], state: dict[Tensor, Any]) -> bool:
        """Say whether these are the same parameters, and neither they nor their states have been replaced or moved."""
        return (
            self._changes == changes()
            and are_same(self._parameters, parameters)
            and are_same(self._states, state.values())
            and self._places == ([p.dtype for p in parameters], [p.device for p in parameters])
        )

    def lists(self, number: int) -> Lists:
        """Return the lists of tensors of ``tables[number]``, made anew if a table has changed."""
        known = self._lists.get(number)
        if known is None or known.changes != changes():
            known = self._lists[number] = Lists(self.tables[number][1])
        return known
