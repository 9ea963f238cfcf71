"""Functions for all tables of a model at once: conversion from torch's modules and back, optimizers, explanations."""

from __future__ import annotations

import dis
import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, overload

import torch
from torch.optim import Optimizer

from ..typing import GradMode
from ._owner import TableOwner
from .auto import AutoChoice
from .embedding import Embedding
from .embedding_bag import EmbeddingBag
from .grad_mode import GradModeMixin, HasGradMode

__all__ = ["convert", "explain", "revert", "use_optimizer"]

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)

_PACKAGE = f"{__name__.partition('.')[0]}."
_MODES_OF_TORCH = ("sum", "mean", "max")
_LOOKUPS = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)
_FUNCTIONS = ("embedding", "embedding_bag")

_CONVERTED: dict[type, type[GradModeMixin]] = {torch.nn.Embedding: Embedding, torch.nn.EmbeddingBag: EmbeddingBag}


def convert(model: ModuleT, *, grad_mode: GradMode | None = None) -> ModuleT:
    """
    Turn every ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` of a model into this package's class, in place.

    The module objects stay and change their class. Everything that refers to them or that they hold stays the same:
    Parameter objects (an optimizer made before goes on), buffers, hooks, training flags, modules shared between places.

    A module whose class extends one of torch's two gets a class that extends both its old one and this package's.
    Modules whose class overrides ``forward`` or computes ``weight`` stay unchanged, and a warning names them. So do
    modules that give parameters of theirs to ``torch.nn.functional.embedding`` or ``embedding_bag``. A warning also
    says if nothing was changed, and names layers of Keras, which :mod:`torchsparse_rec.keras` converts. Tables already
    converted keep their grad_mode.

    Args:
        model: the model, or a table itself.
        grad_mode: the mode of the converted tables, see :class:`Embedding`. Default None: each follows its ``sparse``.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: an unknown grad_mode; nothing is converted.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 3), torch.nn.Linear(3, 1))
        >>> convert(model, grad_mode="sparse")[0]
        Embedding(10, 3, grad_mode='sparse', 120 bytes)
    """
    _check_model("convert", model)
    # Raises before anything is changed. On meta it draws no number: a run goes on as it would have without.
    Embedding(1, 1, grad_mode=grad_mode, device="meta")

    def change(module: torch.nn.Module) -> None:
        cls: Any = type(module)
        module.__class__ = _ours(cls)
        module._init_grad_mode(grad_mode)  # type: ignore[operator]

    theirs = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, tuple(_CONVERTED)) and not isinstance(module, TableOwner)
    ]
    theirs += _tables_of_keras(model)
    theirs += [(name, module) for name, module in model.named_modules() if _bare_tables(module)]
    _change_all("convert", "torch.nn's Embedding or EmbeddingBag", theirs, _why_not_converted, change)
    return model


@overload
def revert(model: Embedding) -> torch.nn.Embedding: ...  # type: ignore[overload-overlap]
@overload
def revert(model: EmbeddingBag) -> torch.nn.EmbeddingBag: ...  # type: ignore[overload-overlap]
@overload
def revert(model: ModuleT) -> ModuleT: ...
def revert(model: torch.nn.Module) -> torch.nn.Module:
    """
    Turn every :class:`Embedding` and :class:`EmbeddingBag` of a model into torch's, in place, for exporters.

    All rows are brought up to date first; the conversion changes no bit of them. What :func:`convert` keeps is kept
    here too; gradients then follow ``sparse``. Tables for which torch has no module stay unchanged, and a warning names
    them: collections, tables that grow, modes that torch lacks. A warning also says if nothing was changed.

    Args:
        model: the model, or a table itself.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> revert(torch.nn.Sequential(Embedding(10, 3, grad_mode="auto")))[0]
        Embedding(10, 3)
    """
    _check_model("revert", model)

    def change(module: torch.nn.Module) -> None:
        module._end_grad_mode()  # type: ignore[operator]
        module.__class__ = _theirs(type(module))  # type: ignore[assignment]

    ours = [(name, module) for name, module in model.named_modules() if isinstance(module, HasGradMode)]
    _change_all("revert", "torchsparse_rec.nn's Embedding or EmbeddingBag", ours, _why_not_reverted, change)
    return model


def _change_all(
    function: str,
    what: str,
    modules: Sequence[tuple[str, Any]],
    why_not: Callable[[Any], str | None],
    change: Callable[[torch.nn.Module], None],
) -> None:
    """Change the modules for which ``why_not`` gives no reason; warn of the others, or that there are no modules."""
    left = []
    for name, module in modules:
        why = why_not(module)
        if why is None:
            change(module)
        else:
            left.append(f"{name or 'the model itself'} ({type(module).__name__}: {why})")
    if left:
        warnings.warn(f"{function}: left unchanged: {', '.join(left)}", stacklevel=3)
    elif not modules:
        warnings.warn(f"{function}: nothing was changed: the model has no module of {what}", stacklevel=3)


def _is_of_keras(module: object, *names: str) -> bool:
    """Say whether a module is a layer of Keras, or extends its class of one of the names; Keras is not imported."""
    classes = [cls for cls in type(module).__mro__ if cls.__module__.startswith("keras.")]
    return any(cls.__name__ in names for cls in classes) if names else bool(classes)


def _tables_of_keras(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return the embedding layers of Keras's in a model on its torch backend: torch does not see a model's layers."""
    found = {}
    for _, module in model.named_modules():
        for layer in module._flatten_layers() if _is_of_keras(module, "Layer") else ():  # type: ignore[operator]
            if _is_of_keras(layer, "Embedding") and not type(layer).__module__.startswith(_PACKAGE):
                found[id(layer)] = layer.name, layer
    return list(found.values())


def _bare_tables(module: torch.nn.Module) -> str:
    """Name the matrices among a module's own parameters if its ``forward`` looks rows up by a function of torch's."""
    forward = inspect.unwrap(type(module).forward)
    tables = ", ".join(name for name, x in module._parameters.items() if x is not None and x.dim() == 2)
    if not tables or isinstance(module, tuple(_CONVERTED)) or not inspect.isfunction(forward):
        return ""
    code = [(step.opname, step.argval) for step in dis.get_instructions(forward) if step.opname.startswith("LOAD_")]
    for (_, before), (how, name) in zip([("", ""), *code], code, strict=False):
        is_lookup = forward.__globals__.get(name) in _LOOKUPS if how == "LOAD_GLOBAL" else name in _FUNCTIONS
        if is_lookup and (how == "LOAD_GLOBAL" or before in ("F", "functional", "torch")):
            return tables
    return ""


def _why_not_converted(module: torch.nn.Module) -> str | None:
    bare = _bare_tables(module)
    if bare:
        return f"it looks {bare} up by a function of torch's: keep each in a torch.nn.Embedding or EmbeddingBag"
    if _is_of_keras(module, "Embedding"):
        return "a layer of Keras: torchsparse_rec.keras.convert(model) converts it"
    if "forward" in module.__dict__:
        return "its forward has been replaced"
    base: Any = next(base for base in _CONVERTED if isinstance(module, base))
    if type(module).forward is not base.forward:
        return "its class overrides forward"
    return "its weight is computed" if hasattr(type(module), "weight") else None


def _why_not_reverted(module: torch.nn.Module) -> str | None:
    if _theirs(type(module)) is None:
        return "torch has no such module" if type(module).__module__.startswith(_PACKAGE) else "a class of its own"
    mode = getattr(module, "mode", "sum")
    return None if mode in _MODES_OF_TORCH else f"torch has no mode {mode!r}"


@cache
def _ours(theirs: Any) -> type:
    """Return this package's class for one of torch's, or for a class that extends one."""
    if theirs in _CONVERTED:
        return _CONVERTED[theirs]
    ours = next(ours for base, ours in _CONVERTED.items() if issubclass(theirs, base))
    names = {name: getattr(theirs, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(theirs.__name__, (ours, theirs), {**names, "_extends": theirs, "__reduce_ex__": _reduced})


def _theirs(ours: type) -> type | None:
    """Return the class from which :func:`_ours` gave ``ours``, or None."""
    return ours.__dict__.get("_extends") or {ours: theirs for theirs, ours in _CONVERTED.items()}.get(ours)


def _reduced(module: torch.nn.Module, protocol: object) -> tuple:
    """Return how copies and pickles make the module again: they cannot find its class by name."""
    return _remade, (_theirs(type(module)),), module.__getstate__()  # type: ignore[misc]


def _remade(theirs: type) -> torch.nn.Module:
    ours: Any = _ours(theirs)
    return ours.__new__(ours)  # type: ignore[no-any-return]


def use_optimizer(model: torch.nn.Module, *optimizers: Optimizer) -> None:
    """
    Announce optimizers of torch to the tables of a model that they hold, by :meth:`Embedding.use_optimizer`.

    Args:
        model: the model, or a table itself.
        optimizers: the optimizers that update the model.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> model = torch.nn.Sequential(Embedding(1_000_000, 8, grad_mode="auto"))
        >>> use_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    """
    _check_model("use_optimizer", model)
    held = {
        id(parameter): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for module in model.modules():
        if isinstance(module, HasGradMode):
            of_module = {id(weight): held.get(id(weight)) for weight in module.stored_weights()}
            for optimizer in {id(x): x for x in of_module.values() if x is not None}.values():
                module.use_optimizer(optimizer)  # type: ignore[operator]


def announced_optimizers(model: torch.nn.Module) -> list[Optimizer]:
    """Return the optimizers of torch that were announced to tables of a model: copies of the model forget them."""
    choices = [getattr(module, "_auto", None) for module in model.modules()]
    announced = [choice.announced for choice in choices if isinstance(choice, AutoChoice)]
    return [optimizer for each in announced if each is not None and (optimizer := each.optimizer()) is not None]


def explain(model: torch.nn.Module) -> str:
    """
    Say for every table of a model which layout its gradient has, and why, by :meth:`Embedding.explain`.

    Args:
        model: the model, or a table itself.

    Returns:
        The tables' explanations, each after its name in the model.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> print(explain(torch.nn.Sequential(Embedding(10, 3))))
        0: Embedding: grad_mode=None -> dense (follows sparse=False)
          route: plain: forward embedding, gradient embedding_dense_backward
          table: 10 rows x 3, 4 bytes an element, 120 bytes
    """
    _check_model("explain", model)
    return "\n".join(
        f"{name}: {module.explain()}" if name else module.explain()  # type: ignore[operator]
        for name, module in model.named_modules()
        if isinstance(module, HasGradMode)
    )


def _check_model(function: str, model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        where = ""
        if _is_of_keras(model):
            where = ": for Keras on its torch backend there is torchsparse_rec.keras.convert"
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}{where}")
