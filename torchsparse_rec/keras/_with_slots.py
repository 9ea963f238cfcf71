"""Rules under which rows without a gradient move: an optimizer of ours, whose states are Keras's slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..optim.row_optimizer import RowOptimizer
from ..tables.table import Gradient, table_if_any, table_of
from ._by_rows import ByRows, TableStep

__all__ = ["WithSlots"]


class WithSlots(ByRows):
    """The part of an optimizer that steps tables by an optimizer of :mod:`torchsparse_rec.optim`."""

    # Whether the rule needs the number of steps that have been taken.
    counts_steps = True
    _ours: RowOptimizer | None = None

    # Each rule has an optimizer of ours for groups of tables, and Keras's list of slots for each state of it. It also
    # has a group's hyperparameters by the learning rate, the number of the step, the dtype, and whether the tables
    # decay.
    _new_optimizer: Callable[[list[dict[str, Any]]], RowOptimizer]
    _slots_by_state: Callable[[], dict[str, str]]
    _settings: Callable[[float, int, torch.dtype, bool], dict[str, Any]]

    def _step_tables(self, steps: list[TableStep], learning_rate: Any) -> None:
        done = int(self.iterations)  # type: ignore[attr-defined]
        ours = self._optimizer_of([step.variable for step in steps], done)
        for group in ours.param_groups:
            group.update(self._settings(float(learning_rate), done + 1, steps[0].values.dtype, group["decays"]))
        ours.step_tables([(step.variable._value, Gradient(step.rows, step.values)) for step in steps])

    def _optimizer_of(self, variables: list[Any], done: int) -> RowOptimizer:
        """Return our optimizer, which holds these tables and the number of steps that have been done."""
        ours = self._ours
        known = set() if ours is None else {id(p) for group in ours.param_groups for p in group["params"]}
        for decays in (False, True):
            new = [v for v in variables if id(v._value) not in known and self._decays(v) is decays]
            if not new:
                continue
            group = {"params": [v._value for v in new], "decays": decays}
            if ours is None:
                self.__dict__["_ours"] = ours = self._new_optimizer([group])
            else:
                ours.add_param_group(group)
            for variable in new:
                ours.state[variable._value].update(self._states_of(variable))
        assert ours is not None
        for variable in variables:
            parameter = variable._value
            table = table_of(parameter)
            rows = table.rows
            if rows is not None and (rows.optimizer() is not ours or (self.counts_steps and rows.clock.step != done)):
                table.release()  # another optimizer's; or there were steps without this table, or it was loaded
            if self.counts_steps and table.rows is None:
                ours.state[parameter]["step"] = torch.tensor(float(done))
        return ours

    def _decays(self, variable: Any) -> bool:
        """Say whether weight decay, whether there is any now or not, concerns a table."""
        return self._use_weight_decay(variable)  # type: ignore[attr-defined,no-any-return]

    def _states_of(self, variable: Any) -> dict[str, Tensor]:
        return {state: self._slot_storage(slot, variable) for state, slot in self._slots_by_state().items()}

    def _bring_up_to_date(self) -> None:
        if self._ours is not None:
            self._ours.flush()

    def _forget_rows(self) -> None:
        self._bring_up_to_date()
        ours = self.__dict__.pop("_ours", None)
        for group in ours.param_groups if ours is not None else ():
            for parameter in group["params"]:
                table = table_if_any(parameter)
                if table is not None:
                    table.release()
