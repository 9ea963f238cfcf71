"""The step of tables that backward updates, repeated: the findings of a complete step are compared, not found again."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor

from .._torch import grad_of, is_plain, see_operators
from .._torch_modules import gradient_hooks
from ..tables.table import Table
from .gradients import have_hooks
from .plan import Held

if TYPE_CHECKING:
    from ..optim.row_optimizer import RowOptimizer
    from ..tables.gradients import StepGroup
    from ._read import TableSet
    from .plan import Ids, LookupPlan

__all__ = ["Prepared"]


class Prepared:
    """
    A step of all tables of a lookup by one call of an operator, and its conditions.

    Before each use the caller asks whether the conditions still hold, and takes the complete way if not: that way has
    all checks. What is kept here changes no result: the complete way would find the same.

    Args:
        tables: the tables of the lookup.
        optimizer: the optimizer that holds all of them.
        group: the step that has just ended.
    """

    __slots__ = ("tables", "group", "_optimizer", "_held", "_changes")

    def __init__(self, tables: TableSet, optimizer: RowOptimizer, group: StepGroup) -> None:
        self.tables, self.group = tables, group
        self._optimizer = weakref.ref(optimizer)
        self._held: Held | None = None
        self._changes = Table.changes

    @classmethod
    def after(cls, tables: TableSet, optimizer: RowOptimizer, groups: list[StepGroup]) -> Prepared | None:
        """Return what the next step can use of one that has just ended; None: it was not of the usual kind."""
        usual = len(groups) == 1 and groups[0].writable and not groups[0].all_rows and not groups[0].grows
        usual = usual and not see_operators(tables.weights)
        if not usual or len(groups[0].parameters) < len(tables.weights):
            return None
        return cls(tables, optimizer, groups[0])

    def holds(self) -> bool:
        """Say whether a lookup finds the tables as that step did. Call it under ``as_stored``."""
        optimizer = self._optimizer()
        if self._changes != Table.changes or optimizer is None or not optimizer.in_backward:
            return False
        for weight in self.tables.weights:
            if not weight.requires_grad or grad_of(weight) is not None:
                return False
            if any(gradient_hooks(weight)) and have_hooks([weight]):
                return False
        return True

    def step(self, plan: LookupPlan, grad: Tensor, ids: Ids, argmax: Tensor | None) -> bool:
        """
        Step all tables, or return False with nothing done where the complete way is needed.

        The caller has checked that all tables require gradients, and that no other lookup's gradients are awaited.
        """
        optimizer, group = self._optimizer(), self.group
        if self._changes != Table.changes or optimizer is None or not optimizer.in_backward:
            return False
        weights = self.tables.weights
        if is_plain(ids.indices, weights[0]) and optimizer.begin_again(group):
            held = self._held
            if held is None:
                held = self._held = Held(plan, weights, group.states, group.last_steps, group)
            with group.clock:
                held.update(weights, group, grad, ids, argmax)
                group.clock.advance(group.hyperparameters, group.step)
            return True
        return False
