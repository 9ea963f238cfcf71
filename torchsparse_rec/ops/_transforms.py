"""
``torch.func`` for operators whose arguments hold lists of tensors.

torch.func's gradients refuse what ``torch.library.register_autograd`` makes, and forward-mode derivatives see no
tensors in lists: they would be zero. Within a transform an operator is an ``autograd.Function`` of all its tensors, one
by one, as in :func:`._autograd.differentiable`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _library as _library  # loads the schemas
from .._torch import is_transformed, pytree

_ops = torch.ops.torchsparse_rec
_TRANSFORMED: dict[str, Any] = {}


def register(name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None]) -> None:
    """Register a derivative as ``torch.library.register_autograd`` does, and for :func:`call` too."""
    torch.library.register_autograd(f"torchsparse_rec::{name}", backward, setup_context=setup_context)
    _TRANSFORMED[name] = _transformed(name, backward, setup_context)


def call(name: str, *arguments: Any) -> Any:
    """Call an operator that :func:`register` knows, within a transform of torch.func or without."""
    if is_transformed() and not torch.compiler.is_compiling():
        layout = _Layout(arguments)
        return layout.of_outputs(_TRANSFORMED[name].apply(layout, *pytree.tree_leaves(arguments)))
    return getattr(_ops, name).default(*arguments)


class _Layout:
    """The layout of one call's arguments and results, which its Function takes and gives as a flat list of tensors."""

    outputs: pytree.TreeSpec

    def __init__(self, arguments: tuple) -> None:
        self.arguments = pytree.tree_structure(arguments)
        self.leaves = [len(pytree.tree_leaves(argument)) for argument in arguments]

    def of_arguments(self, leaves: Any) -> tuple:
        return pytree.tree_unflatten(list(leaves), self.arguments)

    def of_outputs(self, leaves: Any) -> Any:
        return pytree.tree_unflatten(list(leaves), self.outputs)


class _Context:
    """The context of a Function, as the operator's ``backward`` and ``setup_context`` expect it."""

    def __init__(self, ctx: Any, layout: _Layout) -> None:
        vars(self).update(ctx=ctx, layout=layout)

    @property
    def needs_input_grad(self) -> tuple:
        return self.layout.of_arguments(self.ctx.needs_input_grad[1:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


def _transformed(name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None]) -> Any:
    operator = getattr(_ops, name).default

    def forward(layout: _Layout, *leaves: Any) -> tuple:
        outputs, layout.outputs = pytree.tree_flatten(operator(*layout.of_arguments(leaves)))
        return tuple(outputs)

    def set_up(ctx: Any, inputs: tuple, outputs: tuple) -> None:
        layout, *leaves = inputs
        ctx.layout = layout
        setup_context(_Context(ctx, layout), layout.of_arguments(leaves), layout.of_outputs(outputs))

    def gradients(ctx: Any, *grads: Any) -> tuple:
        layout = ctx.layout
        given = layout.of_outputs(grads)
        # The backward of several results takes a gradient for each; that of one result, which may be a list, takes one.
        results = backward(_Context(ctx, layout), *(given if isinstance(given, tuple) else (given,)))
        flat: list = [None]  # of layout
        for leaves, grad in zip(layout.leaves, results, strict=True):
            flat += [None] * leaves if grad is None else pytree.tree_leaves(grad)
        return tuple(flat)

    members: dict[str, Any] = {"forward": forward, "setup_context": set_up, "backward": gradients}
    return type(
        f"{name}_transformed",
        (torch.autograd.Function,),
        {key: staticmethod(member) for key, member in members.items()} | {"generate_vmap_rule": True},
    )
