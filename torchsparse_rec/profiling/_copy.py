"""Copy a model and its optimizers for a diagnosis, and refuse a step that trains the given ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch.nn import Module
from torch.optim import Optimizer

from ..nn import use_optimizer
from ..nn.convert import announced_optimizers
from ._modules import has_compiled, removing

__all__ = ["Optimizers", "as_list", "copied_training", "spared"]

#: One optimizer, or several.
Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]

_IN_PLACE = "in_place=True makes no copy, but training then goes on from a changed state"


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    """Return one optimizer or several as a list."""
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def copied_training(model: Module, optimizers: Optimizers) -> tuple[Module, Optimizers]:
    """
    Return deep copies of a model and of the optimizers that update it.

    Raises:
        RuntimeError: there is no copy, or it would not train as the model does.
    """
    try:
        copied, copies = copy.deepcopy((model, optimizers))
    except Exception as error:  # whatever a module, an optimizer or a full memory raises
        raise RuntimeError(f"diagnose: model and optimizer cannot be copied ({error}): {_IN_PLACE}") from error
    if has_compiled(model) and not has_compiled(copied):
        raise RuntimeError(f"diagnose: a copy is not compiled, as module.compile() has compiled model: {_IN_PLACE}")
    announced = announced_optimizers(model)
    pairs = zip(as_list(optimizers), as_list(copies), strict=True)
    use_optimizer(copied, *(twin for optimizer, twin in pairs if optimizer in announced))
    return copied, copies


def spared(model: Module, optimizers: list[Optimizer]) -> AbstractContextManager[None]:
    """Raise ``RuntimeError``, while a block lasts, before any use of the model or a step of the optimizers."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            "diagnose: step must use the copies that it is called with, step(model, optimizer, batch), but it uses the "
            f"given model or optimizer: {_IN_PLACE}"
        )

    handles: list[Any] = [part.register_forward_pre_hook(refuse) for part in model.modules()]
    return removing([*handles, *(optimizer.register_step_pre_hook(refuse) for optimizer in optimizers)])
