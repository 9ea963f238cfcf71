"""Derivatives of operators: registered for torch's compilers and transforms, and short-cut for eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _library as _library  # loads the schemas


def differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None]
) -> Callable[..., Any]:
    """
    Register an operator's derivative, and return the operator as the public functions should call it.

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

    members = {
        "forward": staticmethod(operator),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
        "generate_vmap_rule": True,
    }
    function: Any = type(f"{name}_eager", (torch.autograd.Function,), members)

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return operator(*arguments)
        # torch.func wraps its tensors: they do not say that they require a gradient.
        if torch._C._functorch.peek_interpreter_stack() is None and not (
            torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)
        ):
            return operator(*arguments)
        return function.apply(*arguments)

    return call
