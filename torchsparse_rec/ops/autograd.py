"""Derivatives of operators: registered for torch's compilers, and other ways for eager calls and for torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _library as _library  # loads the schemas
from .._torch import any_requires_grad, below_autograd, is_seen, is_transformed, is_wrapped, pytree

_AUTOGRAD = torch.library.Library("torchsparse_rec", "IMPL", "Autograd")
_TRANSFORMED: dict[str, Any] = {}


def is_bare(weight: Tensor, other: Tensor | None = None) -> bool:
    """Say whether a call records a gradient of ``weight`` only, not of ``other``, and only autograd sees it."""
    return (
        not is_seen()
        and torch.is_grad_enabled()
        and any_requires_grad(weight)
        and (other is None or not any_requires_grad(other))
        and not torch.jit.is_tracing()
        and not is_wrapped(weight)
    )


def operator_of(name: str) -> Any:
    """Return an operator by its name, or of another library than the kernels' by that and ``::`` before it."""
    library, _, own = name.rpartition("::")
    return getattr(getattr(torch.ops, library or "torchsparse_rec"), own).default


def not_differentiable(*names: str) -> None:
    """Register operators as such: calls pass the autograd keys by, at no cost, and results have no gradient."""
    for name in names:
        _AUTOGRAD.impl(name, torch.library.fallthrough_kernel)


def differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None]
) -> Callable[..., Any]:
    """
    Register an operator's derivative, and return the operator as the public functions should call it.

    ``torch.library.register_autograd`` serves compilation and export. Its way through an eager call takes some 20 us,
    more than a small lookup itself, and it refuses torch.func. Where nothing is traced, the returned function takes an
    ``autograd.Function`` with the same two functions instead. Where no gradient is asked for, it goes straight to the
    kernel.

    Args:
        name: the name of the operator in csrc/library.cpp, or of one of Python with its library's name before ``::``;
            its arguments must hold no lists of tensors.
        backward: the argument of ``torch.library.register_autograd``.
        setup_context: the argument of the same function; ``inputs`` holds every argument of the schema.
    """
    register(name, backward, setup_context)
    operator = operator_of(name)

    def forward_at_once(ctx: Any, *arguments: Any) -> Any:
        with below_autograd():
            output = operator(*arguments)
        setup_context(ctx, arguments, output)
        return output

    eager: Any = type(
        f"{operator._opname}_eager",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward_at_once), "backward": staticmethod(backward)},
    )

    def shortest(*arguments: Any) -> Any:
        if is_seen():
            return call(name, *arguments)
        if torch.is_grad_enabled() and any_requires_grad(*arguments):
            return eager.apply(*arguments)
        with below_autograd():
            return operator(*arguments)

    return shortest


# ---- torch.func ------------------------------------------------------------------------------------------------------


def register(name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None]) -> None:
    """
    Register a derivative as ``torch.library.register_autograd`` does, and for :func:`call` too.

    torch.func's gradients refuse derivatives of ``torch.library.register_autograd``, and forward-mode derivatives see
    no tensors in lists: they would be zero. Within a transform an operator is an ``autograd.Function`` of all its
    tensors, one by one.
    """
    qualified = name if "::" in name else f"torchsparse_rec::{name}"
    torch.library.register_autograd(qualified, backward, setup_context=setup_context)
    _TRANSFORMED[name] = _transformed(name, backward, setup_context)


def call(name: str, *arguments: Any) -> Any:
    """Call an operator that was given to :func:`register`, within a transform of torch.func or without."""
    if is_transformed() and not torch.compiler.is_compiling():
        layout = _CallLayout(arguments)
        return layout.of_outputs(_TRANSFORMED[name].apply(layout, *pytree.tree_leaves(arguments)))
    return operator_of(name)(*arguments)


class _CallLayout:
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

    def __init__(self, ctx: Any, layout: _CallLayout) -> None:
        vars(self).update(ctx=ctx, layout=layout)

    @property
    def needs_input_grad(self) -> tuple:
        return self.layout.of_arguments(self.ctx.needs_input_grad[1:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


def _transformed(name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None]) -> Any:
    operator = operator_of(name)

    def forward(layout: _CallLayout, *leaves: Any) -> tuple:
        outputs, layout.outputs = pytree.tree_flatten(operator(*layout.of_arguments(leaves)))
        return tuple(outputs)

    def set_up(ctx: Any, inputs: tuple, outputs: tuple) -> None:
        layout, *leaves = inputs
        ctx.layout = layout
        setup_context(_Context(ctx, layout), layout.of_arguments(leaves), layout.of_outputs(outputs))

    def gradients(ctx: Any, *grads: Any) -> tuple:
        layout = ctx.layout
        given = layout.of_outputs(grads)
        # The backward of several results takes a gradient for each. The backward of one result, which may be a list,
        # takes one.
        results = backward(_Context(ctx, layout), *(given if isinstance(given, tuple) else (given,)))
        flat: list = [None]  # of layout
        for leaves, grad in zip(layout.leaves, results, strict=True):
            flat += [None] * leaves if grad is None else pytree.tree_leaves(grad)
        return tuple(flat)

    members: dict[str, Any] = {"forward": forward, "setup_context": set_up, "backward": gradients}
    return type(
        f"{operator._opname}_transformed",
        (torch.autograd.Function,),
        {key: staticmethod(member) for key, member in members.items()} | {"generate_vmap_rule": True},
    )


# ---- Second derivatives ----------------------------------------------------------------------------------------------


_OF_BAGS = (
    "weighted bags, extremes and collections have no second derivatives: look rows up with ops.embedding and pool them"
    " with ops.segment_sum, ops.segment_max and their like"
)


def no_second_derivative(name: str, why: str = _OF_BAGS) -> RuntimeError:
    """Return the error for a gradient that is differentiated again: torch's bags have no second derivative either."""
    return RuntimeError(f"{name}: {why}")


def only_once(name: str, why: str = _OF_BAGS) -> tuple[Callable[..., Any], Callable[[Any, Any, Any], None]]:
    """Return ``backward`` and ``setup_context`` of a gradient without derivative: it must not be taken for zero."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise no_second_derivative(name, why)

    return backward, lambda ctx, inputs, output: None


class _Final(torch.autograd.Function):
    """The identity on a gradient that has no derivative: a backward through it raises."""

    @staticmethod
    def forward(ctx, refusal, gradient, *_):
        """Return the gradient, which from here on depends on the other tensors."""
        ctx.refusal = refusal
        return gradient.detach()

    @staticmethod
    def backward(ctx, *_):
        """Raise: the derivative must not be taken for zero."""
        raise no_second_derivative(*ctx.refusal)


def final(name: str, gradient: Tensor, *of: Tensor, why: str = _OF_BAGS) -> Tensor:
    """Return a gradient, computed without a graph from the tensors ``of``, whose derivative is refused by name."""
    return _Final.apply((name, why), gradient, *of) if torch.is_grad_enabled() else gradient  # type: ignore[no-any-return]
