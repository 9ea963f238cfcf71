"""Derivatives of operators: registered for torch's compilers and transforms, and short-cut for eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _library as _library  # loads the schemas
from .._torch import any_requires_grad, below_autograd, is_transformed, is_watched


def differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None]
) -> Callable[..., Any]:
    """
    Register an operator's derivative, and return the operator as the public functions should call it.

    ``torch.library.register_autograd`` serves compilation and export. Its way through an eager call takes some 20 us,
    more than a small lookup itself, and it refuses torch.func. The returned function takes an ``autograd.Function``
    with the same two functions instead, where nothing is traced, and goes straight to the kernel where no gradient is
    asked for.

    Args:
        name: the operator's, in csrc/library.cpp; its arguments must hold no lists of tensors.
        backward: as for ``torch.library.register_autograd``.
        setup_context: likewise; ``inputs`` holds every argument of the schema.
    """
    torch.library.register_autograd(f"torchsparse_rec::{name}", backward, setup_context=setup_context)
    operator = getattr(torch.ops.torchsparse_rec, name).default

    def forward_at_once(ctx: Any, *arguments: Any) -> Any:
        with below_autograd():
            output = operator(*arguments)
        setup_context(ctx, arguments, output)
        return output

    eager: Any = type(
        f"{name}_eager",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward_at_once), "backward": staticmethod(backward)},
    )
    # torch.func wants the two steps of the forward apart, which costs more.
    transformed: Any = type(
        f"{name}_transformed",
        (torch.autograd.Function,),
        {
            "forward": staticmethod(operator),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
            "generate_vmap_rule": True,
        },
    )

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*arguments)
        if is_transformed():
            return transformed.apply(*arguments)
        if is_watched():
            return operator(*arguments)
        if torch.is_grad_enabled() and any_requires_grad(*arguments):
            return eager.apply(*arguments)
        with below_autograd():
            return operator(*arguments)

    return call


def no_second_derivative(name: str) -> RuntimeError:
    """Return the error for a gradient that is differentiated again: torch's bags have no second derivative either."""
    return RuntimeError(
        f"{name}: weighted bags, maxima and collections have no second derivatives: look rows up with ops.embedding"
        " and pool them with ops.segment_sum, ops.segment_max and their like"
    )


def only_once(name: str) -> tuple[Callable[..., Any], Callable[[Any, Any, Any], None]]:
    """Return ``backward`` and ``setup_context`` of a gradient without derivative: it must not be taken for zero."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise no_second_derivative(name)

    return backward, lambda ctx, inputs, output: None


class _Final(torch.autograd.Function):
    """The identity on a gradient that has no derivative of its own: a backward through it raises."""

    @staticmethod
    def forward(ctx, name, gradient, *_):
        """Return the gradient, which from here on depends on the other tensors."""
        ctx.name = name
        return gradient.detach()

    @staticmethod
    def backward(ctx, *_):
        """Raise: the derivative must not be taken for zero."""
        raise no_second_derivative(ctx.name)


def final(name: str, gradient: Tensor, *of: Tensor) -> Tensor:
    """Return a gradient, computed without a graph from the tensors ``of``, whose derivative is refused by name."""
    return _Final.apply(name, gradient, *of) if torch.is_grad_enabled() else gradient  # type: ignore[no-any-return]
