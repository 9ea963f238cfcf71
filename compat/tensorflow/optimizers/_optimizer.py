"""The base of all optimizers: parameter groups, gradients, slots, learning rates that are functions, the step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ._gradients import Gradient, as_gradient

#: One parameter, its gradient and its group.
Update = tuple[Tensor, Gradient, dict[str, Any]]


class Optimizer(torch.optim.Optimizer):
    """
    A torch optimizer with a rule of TensorFlow's.

    Its groups have ``lr``, which torch's schedulers change, the hyperparameters under TensorFlow's names, and
    ``iterations``, the number of steps done.
    """

    #: The names of the slots that a parameter may have, in the order in which TensorFlow makes them.
    slot_names: ClassVar[tuple[str, ...]] = ()
    #: The keys in a group of the numbers that fill slots at first, by slot; the others begin with 0.
    _initial: ClassVar[dict[str, str]] = {}
    #: Whether gradients may have other floating dtypes than their parameters.
    _any_float: ClassVar[bool] = False
    #: The attributes that copies and pickles keep beside torch's.
    _kept: ClassVar[tuple[str, ...]] = ("name", "_schedule")

    def __init__(self, params: Any, learning_rate: Any, name: str, hyperparameters: dict[str, Any]) -> None:
        self.name = name
        self._schedule = learning_rate if callable(learning_rate) else None
        lr = self._scheduled(0) if self._schedule else learning_rate
        _check_number("learning_rate", lr)
        super().__init__(params, {"lr": lr, **hyperparameters, "iterations": 0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch's optimizers do; the new group continues the count of steps."""
        if self.param_groups:
            param_group.setdefault("iterations", self.iterations)
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles."""
        return super().__getstate__() | {name: getattr(self, name) for name in self._kept}

    @property
    def slot_scopes(self) -> tuple[str, ...]:
        """The name of each slot that TensorFlow puts behind the variable's."""
        return (self.name,) * len(self.slot_names)

    @property
    def iterations(self) -> int:
        """The number of steps done."""
        return self.param_groups[0]["iterations"]

    @iterations.setter
    def iterations(self, value: int) -> None:
        for group in self.param_groups:
            group["iterations"] = int(value)

    # ---- Steps -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """
        Take a step with the gradients in ``grad``: strided, or sparse COO, whose indices may repeat.

        Args:
            closure: a function that computes the loss and its gradients once more.

        Returns:
            The loss if there is a closure.

        Raises:
            ValueError, IndexError: for a gradient that does not fit its parameter; then nothing has been written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(p.grad, p) for group in self.param_groups for p in group["params"]]
        if any(gradient is not None for gradient, _ in pairs):
            self._step(pairs)
        return loss

    @torch.no_grad()
    def _apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Tensor]]) -> None:
        pairs = list(grads_and_vars)
        if all(gradient is None for gradient, _ in pairs):
            raise ValueError("grads_and_vars must have a gradient, got none")
        self._step(pairs)

    def _step(self, pairs: list[tuple[Any, Tensor]]) -> None:
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        updates: list[Update] = []
        for position, (gradient, parameter) in enumerate(pairs):
            if id(parameter) not in groups:
                raise ValueError(f"grads_and_vars[{position}]: the tensor is no parameter of this optimizer")
            if gradient is not None:
                converted = as_gradient(gradient, parameter, position, self._any_float)
                updates.append((parameter, converted, groups[id(parameter)]))
        if self._schedule:
            lr = self._scheduled(self.iterations)
            for group in self.param_groups:
                group["lr"] = lr
        self._update_all(updates)
        for group in self.param_groups:
            group["iterations"] += 1

    def _scheduled(self, iterations: int) -> float:
        """Return the learning rate of a function of the number of steps done, or of nothing."""
        assert self._schedule is not None
        takes_steps = any(
            p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
            for p in inspect.signature(self._schedule).parameters.values()
        )
        return float(self._schedule(iterations) if takes_steps else self._schedule())

    # ---- Rules -------------------------------------------------------------------------------------------------------

    def _update_all(self, updates: list[Update]) -> None:
        """Take the whole step, after the gradients have been checked."""
        for parameter, gradient, group in updates:
            self._update(parameter, gradient, group)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        """Take the step of one parameter."""
        raise NotImplementedError

    def _slots(self, group: dict[str, Any]) -> dict[str, float]:
        """Return the slots that a parameter of this group has, with the value that fills each at first."""
        return dict.fromkeys(self.slot_names, 0.0) | {slot: group[key] for slot, key in self._initial.items()}

    def slots_of(self, parameter: Tensor, group: dict[str, Any]) -> list[Tensor]:
        """Return the slots of a parameter, which are made when they are first needed."""
        state = self.state[parameter]
        return [
            state[name] if name in state else state.setdefault(name, full(parameter, value))
            for name, value in self._slots(group).items()
        ]


def full(parameter: Tensor, value: float) -> Tensor:
    """Make a slot: contiguous, with the shape, dtype and device of a parameter."""
    return torch.full_like(parameter, value, memory_format=torch.contiguous_format, requires_grad=False)


def _check_number(name: str, value: Any) -> None:
    try:
        float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a number or a function, got {value!r}") from error


def checked_ftrl(
    learning_rate_power: float, initial: float, l1: float, l2: float, shrinkage: float
) -> dict[str, float]:
    """Return the hyperparameters of FTRL by name: ``learning_rate_power`` is <= 0, the others are >= 0."""
    numbers = {
        "initial_accumulator_value": initial,
        "l1_regularization_strength": l1,
        "l2_regularization_strength": l2,
        "l2_shrinkage_regularization_strength": shrinkage,
    }
    for name, value in numbers.items():
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if learning_rate_power > 0:
        raise ValueError(f"learning_rate_power must not be positive, got {learning_rate_power}")
    return {**numbers, "learning_rate_power": learning_rate_power}


def check_positive(name: str, value: float) -> None:
    """Raise ``ValueError`` for a number that is not positive."""
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
