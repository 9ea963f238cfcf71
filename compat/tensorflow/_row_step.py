"""Results, argument checks and the step on copies, shared by the functions of _row_update.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ._arguments import as_tensor

Result = TypeVar("Result", bound=tuple)


class WithAccumulator(NamedTuple):
    """A variable and its slot, after the step."""

    var: Tensor
    accum: Tensor


class WithAdagradDA(NamedTuple):
    """A variable and its slots of Adagrad with dual averaging, after the step."""

    var: Tensor
    gradient_accumulator: Tensor
    gradient_squared_accumulator: Tensor


class WithAdadelta(NamedTuple):
    """A variable and its slots of Adadelta, after the step."""

    var: Tensor
    accum: Tensor
    accum_update: Tensor


class WithFtrl(NamedTuple):
    """A variable and its slots of FTRL, after the step."""

    var: Tensor
    accum: Tensor
    linear: Tensor


class WithRMSProp(NamedTuple):
    """A variable and its slots of RMSProp, after the step."""

    var: Tensor
    ms: Tensor
    mom: Tensor


class WithCenteredRMSProp(NamedTuple):
    """A variable and its slots of centered RMSProp, after the step."""

    var: Tensor
    mg: Tensor
    ms: Tensor
    mom: Tensor


def _number(argument: str, value: Any, var: Tensor) -> float:
    """Return a hyperparameter rounded to the dtype of ``var``, as TensorFlow's scalars are."""
    if isinstance(value, Tensor) and (value.dim() != 0 or value.dtype != var.dtype):
        raise ValueError(
            f"{argument} must be a number or a scalar of the dtype of var, {var.dtype}, got {value.dtype} of shape"
            f" {list(value.shape)}"
        )
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument} must be a number, got {value!r}") from error
    half = var.dtype in (torch.float16, torch.bfloat16)
    return torch.tensor(number, dtype=var.dtype).item() if half else number


def _as_var(argument: str, value: Any, var: Tensor) -> Tensor:
    """Convert a value to a tensor on the device of ``var``; a value without a dtype takes that of ``var``."""
    tensor = as_tensor(argument, value, device=var.device).detach()
    return tensor if isinstance(value, (Tensor, np.ndarray)) else tensor.to(var.dtype)


def _slot(argument: str, value: Any, var: Tensor) -> Tensor:
    """Return a copy of a slot, checked to have the shape and dtype of ``var``."""
    slot = _as_var(argument, value, var)
    if slot.shape != var.shape or slot.dtype != var.dtype:
        raise ValueError(
            f"{argument} must have the shape and dtype of var, {list(var.shape)} and {var.dtype}, got"
            f" {list(slot.shape)} and {slot.dtype}"
        )
    return slot.clone(memory_format=torch.contiguous_format)


def step(
    update: Callable[..., Tensor],
    result: Callable[..., Result],
    var: Any,
    slots: dict[str, Any],
    grad: Any,
    indices: Any,
    numbers: dict[str, tuple[str, Any]],
    **choices: Any,
) -> Result:
    """Run ``update`` on copies. ``numbers``: TensorFlow's name and value of each hyperparameter, by our name."""
    table = as_tensor("var", var).detach().clone(memory_format=torch.contiguous_format)
    states = [_slot(name, slot, table) for name, slot in slots.items()]
    rows = as_tensor("indices", indices, empty=torch.int32, device=table.device)
    hyperparameters = {ours: _number(name, value, table) for ours, (name, value) in numbers.items()}
    update(table, *states, _as_var("grad", grad, table), rows, **hyperparameters, **choices)
    return result(table, *states)
