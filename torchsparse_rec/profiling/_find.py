"""Find the models, optimizers and other state that a step refers to, which a diagnosis must restore."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

__all__ = ["Found", "find"]

# The depth of the search, and the largest containers that it looks into.
_DEPTH = 5
_LARGEST = 256


@dataclass
class Found:
    """The models, optimizers and other objects with state that were given, or that a step refers to."""

    models: list[Module] = field(default_factory=list)
    """All models that must be restored, the given one among them."""
    given: Module | None = None
    optimizers: list[Optimizer] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    """Schedulers and gradient scalers, which have ``state_dict()`` and ``load_state_dict()``."""
    generators: list[torch.Generator] = field(default_factory=list)

    @property
    def analysed(self) -> list[Module]:
        """The models whose tables and layers are analysed: the given one, else all."""
        return self.models if self.given is None else [self.given]


def find(step: Any, model: Module | None, optimizer: Optimizer | None) -> Found:
    """
    Look for models, optimizers, schedulers, scalers and generators among the names that ``step`` uses.

    These names are those of its closure, defaults and bound arguments, and the globals that its code names; likewise
    for functions found there; and the attributes of objects. If a model is given, it alone is analysed; others that are
    found, such as a teacher or an average of the weights, change as well and have to be restored.
    """
    found, seen = Found(), set[int]()
    pending: list[tuple[Any, int]] = [(step, 0)]
    while pending:
        value, depth = pending.pop()
        if id(value) in seen or depth > _DEPTH:
            continue
        seen.add(id(value))
        if not _add(found, value):
            pending += [(each, depth + 1) for each in _referred(value)]
    if model is not None:
        found.given, found.models = model, [model, *(other for other in found.models if other is not model)]
    if optimizer is not None and all(other is not optimizer for other in found.optimizers):
        found.optimizers.insert(0, optimizer)
    found.models = list(_outermost(found.models))
    found.generators += _generators_within(found.models)
    found.optimizers += _hidden_optimizers(found)
    return found


def _hidden_optimizers(found: Found) -> list[Optimizer]:
    """Return the optimizers of the models' parameters that the step does not refer to: they must be restored too."""
    held = {id(p) for optimizer in found.optimizers for p in _parameters_of(optimizer)}
    free = {id(p) for model in found.models for p in model.parameters() if p.requires_grad} - held
    if not free:
        return []
    return [
        optimizer
        for optimizer in gc.get_objects()
        if issubclass(type(optimizer), Optimizer) and any(id(p) in free for p in _parameters_of(optimizer))
    ]


def _parameters_of(optimizer: Optimizer) -> Iterator[Any]:
    """Yield the parameters of an optimizer, or none if its ``__init__`` has failed: a traceback may still hold it."""
    return (p for group in getattr(optimizer, "param_groups", ()) for p in group.get("params", ()))


def _add(found: Found, value: Any) -> bool:
    """Add a model, optimizer, generator, scheduler or scaler to ``found``, and say whether ``value`` is one."""
    if isinstance(value, Module):
        found.models.append(value)
    elif isinstance(value, Optimizer):
        found.optimizers += [value] if hasattr(value, "param_groups") else []
    elif isinstance(value, torch.Generator):
        found.generators.append(value)
    elif isinstance(value, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
        found.others.append(value)
    else:
        return False
    return True


def _generators_within(models: list[Module]) -> list[torch.Generator]:
    """Return the random generators that the models' modules have as attributes, or in small containers."""
    found = []
    for value in (each for model in models for part in model.modules() for each in vars(part).values()):
        if isinstance(value, (Mapping, list, tuple)) and len(value) <= _LARGEST:
            found += list(value.values() if isinstance(value, Mapping) else value)
        else:
            found.append(value)
    return [value for value in found if isinstance(value, torch.Generator)]


def _outermost(models: Iterable[Module]) -> Iterator[Module]:
    models = list(models)
    inner = {id(part) for model in models for part in model.modules() if part is not model}
    return (model for model in models if id(model) not in inner)


def _referred(value: Any) -> Iterator[Any]:
    """Yield the objects to which a function, a method, a partial, a small container or another object refers."""
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, (Mapping, list, tuple)):
        if len(value) <= _LARGEST:
            yield from value.values() if isinstance(value, Mapping) else value
    elif not isinstance(value, (type, types.ModuleType, torch.Tensor)) and hasattr(value, "__dict__"):
        yield from vars(value).values()
        yield type(value).__dict__.get("__call__")


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the name has no value yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    if getattr(function, "__wrapped__", None) is not None:
        yield function.__wrapped__  # type: ignore[attr-defined]
    for name in _names_of(function.__code__):
        if name in function.__globals__ and not isinstance(function.__globals__[name], types.ModuleType):
            yield function.__globals__[name]


def _names_of(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code uses, and those of functions, lambdas and comprehensions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_of(constant)
