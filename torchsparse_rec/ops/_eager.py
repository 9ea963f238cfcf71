"""
A short way for eager calls: what :func:`torch.library.register_autograd` does around an operator costs more than a
small lookup. The registration stays, for everything that traces or transforms calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

_below_autograd = torch._C._AutoDispatchBelowAutograd


def _is_plain() -> bool:
    """Whether nothing looks on: no tracing, no transform, no mode, no forward-mode derivatives."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    )


def short_way(operator: Callable, setup_context: Callable, backward: Callable) -> Callable:
    """``operator``, whose derivative is registered as ``setup_context`` and ``backward``, with less around it."""

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:  # type: ignore[override]
            with _below_autograd():
                output = operator(*arguments)
            setup_context(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled():  # the gradient is to be differentiated too
                return backward(ctx, *grads)
            with _below_autograd():
                return backward(ctx, *grads)

    def call(*arguments: Any) -> Any:
        if not _is_plain():
            return operator(*arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return Eager.apply(*arguments)
        with _below_autograd():
            return operator(*arguments)

    return call
