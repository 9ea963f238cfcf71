"""Derivatives of operators: registered for torch's compilers, and short-cut for eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from .. import _library as _library  # loads the schemas

_below_autograd = torch._C._AutoDispatchBelowAutograd


def _is_plain() -> bool:
    """Whether nothing looks on: no transform of torch.func, no dispatch mode, no forward-mode derivative."""
    return not (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or forward_ad._current_level >= 0
    )


def differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None]
) -> Callable[..., Any]:
    """
    Register an operator's derivative, and return the operator as public functions and derivatives should call it.

    ``torch.library.register_autograd`` serves compilation and export. Its way through an eager call takes some 20 us,
    more than a small lookup itself, and it refuses torch.func. What is returned takes an ``autograd.Function`` with
    the same two functions instead, where a gradient is asked for and nothing is traced.

    Args:
        name: of the operator, in csrc/library.cpp.
        backward: as for ``torch.library.register_autograd``.
        setup_context: likewise; ``inputs`` holds every argument of the schema.
    """
    torch.library.register_autograd(f"torchsparse_rec::{name}", backward, setup_context=setup_context)
    operator = getattr(torch.ops.torchsparse_rec, name).default

    def forward(*arguments: Any) -> Any:
        if not _is_plain():
            return operator(*arguments)
        with _below_autograd():
            return operator(*arguments)

    members = {
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
        "generate_vmap_rule": True,
    }
    function: Any = type(f"{name}_eager", (torch.autograd.Function,), members)

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*arguments)
        # torch.func wraps its tensors: they do not say that they require a gradient.
        if torch._C._are_functorch_transforms_active() or (
            torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        ):
            return function.apply(*arguments)
        return forward(*arguments)

    return call
