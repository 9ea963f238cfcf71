"""Rules under which rows without a gradient stay where they are: Keras's own step, on the batch's rows alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ._by_rows import ByRows, TableStep, torch_class

__all__ = ["OnRows"]


class _Fading:
    """How many steps a table has taken, and up to which of them the slots of each row have faded."""

    def __init__(self, table: Tensor) -> None:
        self.steps = 0
        self.last_step = torch.zeros(table.shape[0], dtype=torch.int32, device=table.device)

    def missed(self, last_step: Tensor) -> Tensor:
        """Return how many steps rows have missed, as float64, ``[U, 1]``."""
        return (self.steps - last_step).double()[:, None]


class OnRows(ByRows):
    """
    The part of an optimizer whose step leaves rows without a gradient alone, but for slots that fade.

    A step of the optimizer's class runs on copies of the batch's rows, which are then put back.
    """

    # The lists of slots, and the hyperparameter by which a step multiplies those of rows without a gradient.
    _fading: ClassVar[dict[str, str | None]] = {}
    # By the index of the variable; for rules that let slots fade.
    _tables: dict[int, tuple[Any, _Fading]] = {}

    def _step_tables(self, steps: list[TableStep], learning_rate: Any) -> None:
        optimizer: Any = self
        names = self._slot_names()
        tables = [step.variable._value.detach() for step in steps]
        slots = {name: [self._slot_storage(name, step.variable) for step in steps] for name in names}
        indices = [step.rows for step in steps]
        rows = [table.index_select(0, index) for table, index in zip(tables, indices, strict=True)]
        slot_rows = {
            name: [slot.index_select(0, index) for slot, index in zip(slots[name], indices, strict=True)]
            for name in names
        }
        self._fade(steps, slot_rows)

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
        return [name for name in self._fading if getattr(self, name, None)]

    def _fade(self, steps: list[TableStep], slot_rows: dict[str, list[Tensor]]) -> None:
        """Let the slots of the batch's rows fade by the steps that they have missed, and count this step."""
        optimizer: Any = self
        factors = {name: getattr(self, factor) for name, factor in self._fading.items() if factor is not None}
        if not factors:
            return
        for k, (variable, index, _) in enumerate(steps):
            number = optimizer._get_variable_index(variable)
            if number not in self._tables:
                self.__dict__["_tables"] = {**self._tables, number: (variable, _Fading(variable._value))}
            fading = self._tables[number][1]
            missed = fading.missed(fading.last_step.index_select(0, index))
            for name, factor in factors.items():
                if name in slot_rows:
                    slot_rows[name][k].mul_(factor**missed)
            fading.steps += 1
            fading.last_step.index_fill_(0, index, fading.steps)

    def _bring_up_to_date(self) -> None:
        with torch.no_grad():
            for variable, fading in self._tables.values():
                missed = fading.missed(fading.last_step)
                if not missed.any():
                    continue
                for name in self._slot_names():
                    factor = self._fading[name]
                    if factor is not None:
                        self._slot_storage(name, variable).mul_(getattr(self, factor) ** missed)
                fading.last_step.fill_(fading.steps)
