"""Parts of Keras's optimizers that step tables by rows: gradients as values and rows, and slots that may be behind."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import keras
import torch
from torch import Tensor

from ..tables.gradients import coalesced

__all__ = [
    "ByRows",
    "Slot",
    "TableStep",
    "announced_optimizer",
    "is_stored",
    "revert_optimizer",
    "steps_rows",
    "torch_class",
]

# The optimizers of ours that have been built, the last one at the end.
_built: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

# Arguments with which Keras's own SGD reads gradients in ways that torch does not have for COO tensors.
_READS_GRADIENTS = ("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor", "gradient_accumulation_steps")


class TableStep(NamedTuple):
    """A table and its gradient in one step."""

    variable: Any
    rows: Tensor
    """``[U]`` int64, strictly increasing."""
    values: Tensor
    """``[U, D]``."""


class Slot(keras.Variable):  # type: ignore[misc]
    """A variable of an optimizer with rows that may be behind: whoever reads it finds all rows up to date."""

    _bring_up_to_date: Any = None

    @property
    def value(self) -> Any:
        """The tensor, as of every variable."""
        self._catch_up()
        return super().value

    def __repr__(self) -> str:
        """Return the text of every variable, which Keras makes from the storage."""
        self._catch_up()
        return super().__repr__()  # type: ignore[no-any-return]

    def _catch_up(self) -> None:
        if self._bring_up_to_date is not None:
            self._bring_up_to_date()


def is_stored(variable: Any) -> bool:
    """Say whether reading a variable gives its storage: not within a symbolic call or a stateless scope."""
    return variable._value is not None and keras.Variable.value.fget(variable) is variable._value


def announced_optimizer(variable: Any) -> Any:
    """Return the optimizer of ours that was built last with a variable, or None."""
    return next((optimizer for optimizer in reversed(list(_built)) if optimizer.holds(variable)), None)


def steps_rows(optimizer: Any, variable: Any) -> bool:
    """Say whether an optimizer of Keras or of ours takes a COO gradient of a variable, exactly and at less cost."""
    if isinstance(optimizer, ByRows):
        return optimizer.steps_rows(variable)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _looks_at_values(optimizer) and steps_rows(optimizer.inner_optimizer, variable)
    plain = torch_class(keras.optimizers.SGD)
    return (
        type(optimizer) is plain
        and optimizer.momentum == 0
        and all(getattr(optimizer, name) is None for name in _READS_GRADIENTS)
    )


def _looks_at_values(optimizer: Any) -> bool:
    return getattr(optimizer, "looks_at_values", False)


@cache
def torch_class(optimizer: Any) -> Any:
    """Return the class that Keras uses for an optimizer on torch: its rule is written for lists of tensors."""
    return type(optimizer.__new__(optimizer))


class ByRows:
    """
    The part of an optimizer that steps tables by rows; it stands before Keras's class among the bases.

    Keras's code sees the values of a COO gradient instead of the gradient. Before a step it changes gradients element
    by element, or by the sum of their squares only. The step itself then gets the rows too.
    """

    # The rows of each COO gradient in the step that runs, by the variable's id.
    _step_rows: dict[int, Tensor] = {}
    # Whether the rule applies weight decay to rows too.
    _decays_rows = False
    # Keras's own class.
    keras_class: Any
    # Step tables by the rows of their gradients, at a learning rate.
    _step_tables: Callable[[list[TableStep], Any], None]

    def steps_rows(self, variable: Any) -> bool:
        """Say whether the optimizer can step this variable by rows, with its present arguments."""
        optimizer: Any = self
        return (
            optimizer.gradient_accumulation_steps is None
            and (self._decays_rows or optimizer.weight_decay is None or not optimizer._use_weight_decay(variable))
            and variable.dtype in ("float32", "float64")
            and is_stored(variable)
            and self._has_rule()
        )

    def holds(self, variable: Any) -> bool:
        """Say whether the optimizer was built with this variable."""
        return id(variable) in self._trainable_variables_indices  # type: ignore[attr-defined]

    def _has_rule(self) -> bool:
        """Say whether there is a rule by rows for the present hyperparameters."""
        return True

    def _bring_up_to_date(self) -> None:
        """Bring all rows of tables and slots up to date."""

    def _forget_rows(self) -> None:
        """Bring all rows up to date, and keep nothing about them: Keras's class goes on."""
        self._bring_up_to_date()

    # ---- What Keras calls --------------------------------------------------------------------------------------------

    def build(self, variables: Sequence[Any]) -> None:
        """Make the slots, and announce to layers that this optimizer takes rows."""
        super().build(variables)  # type: ignore[misc]
        _built[self] = None

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Take a step, as Keras's optimizers do; a COO gradient steps rows, or all rows where there is no such rule."""
        optimizer: Any = self
        given = None if trainable_variables is None else list(trainable_variables)
        variables = optimizer._trainable_variables if given is None else given
        rows: dict[int, Tensor] = {}
        values = list(grads)
        for k, (grad, variable) in enumerate(zip(values, variables, strict=False)):  # Keras checks their number
            if not isinstance(grad, Tensor) or grad.layout is not torch.sparse_coo:
                continue
            if not self.steps_rows(variable):
                values[k] = grad.to_dense()
                continue
            merged = coalesced(grad)
            rows[id(variable)], values[k] = merged._indices()[0], merged._values()
        self.__dict__["_step_rows"] = rows  # not by Keras's __setattr__, which keeps track of what is set
        try:
            super().apply(values, given)  # type: ignore[misc]
        finally:
            self.__dict__["_step_rows"] = {}

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        others = [variable for variable in variables if id(variable) not in self._step_rows]
        if others:
            super()._apply_weight_decay(others)  # type: ignore[misc]

    def _backend_update_step(self, grads: Sequence[Tensor], trainable_variables: Sequence[Any], lr: Any) -> None:
        rows = self._step_rows
        pairs = list(zip(grads, trainable_variables, strict=True))
        others = [pair for pair in pairs if id(pair[1]) not in rows]
        if others:
            super()._backend_update_step(*map(list, zip(*others, strict=True)), lr)  # type: ignore[misc]
        steps = [TableStep(variable, rows[id(variable)], grad) for grad, variable in pairs if id(variable) in rows]
        if steps:
            with torch.no_grad():
                self._step_tables(steps, lr)

    # ---- Slots -------------------------------------------------------------------------------------------------------

    def _slot_storage(self, name: str, variable: Any) -> Tensor:
        """Return the storage of a slot of a table; its rows may be behind from now on."""
        slot = getattr(self, name)[self._get_variable_index(variable)]  # type: ignore[attr-defined]
        if type(slot) is not Slot:
            slot.__class__ = Slot
            slot._bring_up_to_date = self._bring_up_to_date
        return slot._value.detach()  # type: ignore[no-any-return]


def revert_optimizer(optimizer: Any) -> None:
    """Turn an optimizer of ours into Keras's, in place, with all rows up to date; leave others unchanged."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        revert_optimizer(inner)
    if _looks_at_values(optimizer):
        object.__setattr__(optimizer, "__class__", keras.optimizers.LossScaleOptimizer)
    if isinstance(optimizer, ByRows):
        optimizer._forget_rows()
        _built.pop(optimizer, None)
        for variable in optimizer.variables:  # type: ignore[attr-defined]
            if type(variable) is Slot:
                variable._bring_up_to_date = None
                variable.__class__ = keras.Variable
        object.__setattr__(optimizer, "__class__", torch_class(optimizer.keras_class))
