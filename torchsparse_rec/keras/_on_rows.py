"""Rules under which rows without a gradient do not move: Keras's own step, on the batch's rows only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ._by_rows import ByRows, TableStep, torch_class

__all__ = ["OnRows"]


# The changes of a table's factor after which all its rows are brought up to date: each costs a power per row.
_MOST_FACTORS = 64


class _Fading:
    """The factors by which steps fade the slots of a table, and the step up to which each row's slots have faded."""

    def __init__(self, variable: Any, names: list[str]) -> None:
        table = variable._value
        self.variable, self.names = variable, names
        self.steps = 0
        # Each factor, with the number of steps before the first one that had it.
        self.factors: list[tuple[int, float]] = []
        self.last_step = torch.zeros(table.shape[0], dtype=torch.int32, device=table.device)

    def is_full_for(self, factor: float) -> bool:
        """Say whether a step with this factor is one change too many."""
        return len(self.factors) == _MOST_FACTORS and self.factors[-1][1] != factor

    def step(self, factor: float, rows: Tensor) -> Tensor:
        """Count a step with this factor, made by ``rows``; return the factors by which they fade before, ``[U, 1]``."""
        missed = self.missed(self.last_step.index_select(0, rows))
        if not self.factors or self.factors[-1][1] != factor:
            self.factors.append((self.steps, factor))
        self.steps += 1
        self.last_step.index_fill_(0, rows, self.steps)
        return missed

    def missed(self, last_step: Tensor) -> Tensor:
        """Return the product of the factors of the steps that rows have missed, as float64, ``[U, 1]``."""
        product = torch.ones(last_step.shape, dtype=torch.float64, device=last_step.device)
        ends = [*(begin for begin, _ in self.factors[1:]), self.steps]
        for (begin, factor), end in zip(self.factors, ends, strict=False):
            product *= factor ** (end - last_step.clamp(min=begin)).clamp(min=0).double()
        return product[:, None]

    def catch_up(self) -> None:
        """Take note that all rows are up to date."""
        self.last_step.fill_(self.steps)
        self.factors.clear()


class OnRows(ByRows):
    """
    The part of an optimizer whose step does not change rows without a gradient, except slots that fade.

    A step of the optimizer's class runs on copies of the batch's rows, which are then put back.
    """

    # The lists of slots, and the hyperparameter by which a step multiplies the slots of rows without a gradient, if
    # any.
    _slots: ClassVar[tuple[str, ...]] = ()
    _factor: ClassVar[str | None] = None
    # By the index of the variable; for rules whose slots fade.
    _tables: dict[int, _Fading] = {}

    def _step_tables(self, steps: list[TableStep], learning_rate: Any) -> None:
        optimizer: Any = self
        names = self._slot_names()
        faded = self._fade(steps, names)
        tables = [step.variable._value.detach() for step in steps]
        slots = {name: [self._slot_storage(name, step.variable) for step in steps] for name in names}
        indices = [step.rows for step in steps]
        rows = [table.index_select(0, index) for table, index in zip(tables, indices, strict=True)]
        slot_rows = {
            name: [slot.index_select(0, index) for slot, index in zip(slots[name], indices, strict=True)]
            for name in names
        }
        for name in names if faded else ():
            for slot, by in zip(slot_rows[name], faded, strict=True):
                slot.mul_(by)

        # The optimizer again, with variables and slots that are the batch's rows.
        variables = [SimpleNamespace(value=each) for each in rows]
        on_rows: Any = object.__new__(torch_class(self.keras_class))
        on_rows.__dict__.update(optimizer.__dict__)
        on_rows.__dict__["_trainable_variables_indices"] = {id(each): k for k, each in enumerate(variables)}
        for name in names:
            on_rows.__dict__[name] = [SimpleNamespace(value=each) for each in slot_rows[name]]
        on_rows._backend_update_step([step.values for step in steps], variables, learning_rate)

        for k, index in enumerate(indices):
            tables[k].index_copy_(0, index, rows[k])
            for name in names:
                slots[name][k].index_copy_(0, index, slot_rows[name][k])

    def _slot_names(self) -> list[str]:
        """Return the lists of slots that a step with the present arguments reads and writes."""
        return [name for name in self._slots if getattr(self, name, None)]

    def _fade(self, steps: list[TableStep], names: list[str]) -> list[Tensor]:
        """Count a step of slots that fade; return the factors by which the batch rows' slots fade before it."""
        if self._factor is None:
            return []
        factor = float(getattr(self, self._factor))
        numbers = [self._get_variable_index(step.variable) for step in steps]  # type: ignore[attr-defined]
        known = [self._tables[number] for number in numbers if number in self._tables]
        if any(fading.names != names or fading.is_full_for(factor) for fading in known):
            self._bring_up_to_date()
        for number, step in zip(numbers, steps, strict=True):
            if number not in self._tables:
                self.__dict__["_tables"] = {**self._tables, number: _Fading(step.variable, names)}
            self._tables[number].names = names
        return [self._tables[number].step(factor, step.rows) for number, step in zip(numbers, steps, strict=True)]

    def _bring_up_to_date(self) -> None:
        with torch.no_grad():
            for fading in self._tables.values():
                if bool((fading.last_step == fading.steps).all()):
                    continue
                missed = fading.missed(fading.last_step)
                for name in fading.names:
                    self._slot_storage(name, fading.variable).mul_(missed)
                fading.catch_up()
