"""What concerns every table of a model at once: conversion from torch's modules, the optimizer, the explanations."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from .embedding import Embedding
from .embedding_bag import EmbeddingBag
from .grad_mode import GradModeMixin, HasGradMode

__all__ = ["convert", "explain", "use_optimizer"]

_CONVERTED: dict[type, type[GradModeMixin]] = {torch.nn.Embedding: Embedding, torch.nn.EmbeddingBag: EmbeddingBag}


def convert(model: torch.nn.Module, *, grad_mode: str | None = None, apply: str = "step") -> torch.nn.Module:
    """
    Turn every ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` of a model into ours, in place.

    The module objects stay and change their class, so everything that refers to them or that they hold stays as it was:
    Parameter objects (an optimizer made before goes on), buffers, hooks, training flags, modules shared between places.

    Subclasses of torch's two classes are left alone, since what they override is unknown, and so are tables already
    converted.

    Args:
        model: the model, or a table itself.
        grad_mode: of the converted tables, see :class:`Embedding`. Default None: each follows its ``sparse``.
        apply: of the converted tables, see :class:`Embedding`.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: an unknown grad_mode or apply; nothing is converted.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 3), torch.nn.Linear(3, 1))
        >>> convert(model, grad_mode="sparse")[0]
        Embedding(10, 3, grad_mode='sparse')
    """
    _check_model("convert", model)
    Embedding(1, 1, grad_mode=grad_mode, apply=apply)  # raises before anything is changed
    for module in model.modules():
        converted = _CONVERTED.get(type(module))
        if converted is not None:
            module.__class__ = converted
            module._init_grad_mode(grad_mode, apply)  # type: ignore[operator]
    return model


def use_optimizer(model: torch.nn.Module, *optimizers: Optimizer) -> None:
    """
    Announce optimizers of torch to every table of a model that one of them holds: :meth:`Embedding.use_optimizer`.

    Args:
        model: the model, or a table itself.
        optimizers: the optimizers that update it.

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
            of_module = {id(weight): held.get(id(weight)) for weight in module._stored_weights()}
            for optimizer in {id(x): x for x in of_module.values() if x is not None}.values():
                module.use_optimizer(optimizer)  # type: ignore[operator]


def explain(model: torch.nn.Module) -> str:
    """
    Say of every table of a model which layout its gradient has, and why: :meth:`Embedding.explain` for all.

    Args:
        model: the model, or a table itself.

    Returns:
        The tables' explanations, each after its name in the model.

    Raises:
        TypeError: ``model`` is not a module.

    Example:
        >>> print(explain(torch.nn.Sequential(Embedding(10, 3))))
        0: Embedding: grad_mode=None -> dense (follows sparse=False)
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
        raise TypeError(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}")
