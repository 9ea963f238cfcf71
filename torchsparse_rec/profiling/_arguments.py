"""Check the arguments of a diagnosis."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

__all__ = ["check_numbers", "check_training"]


def check_training(step: Any, loader: Any, model: Any, optimizer: Any, step_without_dense: Any) -> None:
    """Raise ``TypeError`` unless these are a training step, its loader, its model and its optimizers."""
    steps = {"step": step, "step_without_dense": step if step_without_dense is None else step_without_dense}
    for name, each in steps.items():
        if not callable(each):
            raise TypeError(f"diagnose: {name} must be a function of model, optimizer and batch, got {_type(each)}")
    if not isinstance(loader, Iterable):
        raise TypeError(f"diagnose: loader must be an iterable of batches, got {_type(loader)}")
    if model is None or optimizer is None or not all(map(_takes_three, steps.values())):
        raise TypeError(
            "diagnose: the call must be diagnose(step, loader, model, optimizer), with a function step(model, "
            "optimizer, batch) that trains the model it is called with. For a function of the batch only, call "
            "diagnose(lambda model, optimizer, batch: step(batch), loader, model, optimizer, in_place=True); "
            "training then goes on from a changed state"
        )
    if not isinstance(model, Module):
        raise TypeError(f"diagnose: model must be a torch.nn.Module, got {_type(model)}")
    for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        if not isinstance(each, Optimizer):
            raise TypeError(f"diagnose: optimizer must be a torch.optim.Optimizer or a list of them, got {_type(each)}")


def _type(value: Any) -> str:
    return type(value).__name__


def _takes_three(step: Callable[..., Any]) -> bool:
    """Say whether a function can be called with three arguments; True if its signature is unknown."""
    try:
        signature = inspect.signature(step)
    except ValueError:
        return True
    try:
        return bool(signature.bind(None, None, None))
    except TypeError:
        return False


def check_numbers(steps: Any, warmup: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless these are numbers of steps."""
    for name, value, least in (("steps", 2 if steps is None else steps, 2), ("warmup", warmup, 1)):
        if not isinstance(value, int):
            raise TypeError(f"diagnose: {name} must be an integer, got {value!r}")
        if value < least:
            raise ValueError(f"diagnose: {name} must be at least {least}, got {value}")
