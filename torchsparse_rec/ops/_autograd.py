"""Derivatives of operators: registered for torch's compilers and transforms, and short-cut for eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from .. import _library as _library  # loads the schemas

below_autograd = torch._C._AutoDispatchBelowAutograd

# No tensor's class has a say: for code that works on a table's storage, some rows of which may be stale.
as_stored = torch._C.DisableTorchFunctionSubclass

# Says whether one of its arguments is a tensor that requires a gradient.
any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad

# Reads a parameter's gradient, whatever its class, at the cost of a plain one's: for loops over all tables, under
# as_stored.
grad_of: Callable[[Tensor], Tensor | None] = Tensor.grad.__get__  # type: ignore[union-attr]


def is_transformed() -> bool:
    """Say whether torch.func or forward-mode derivatives are at work: a registered derivative suits neither."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_watched() -> bool:
    """Say whether a mode (tracing, fake tensors) wants to see the operators themselves."""
    return torch._C._len_torch_dispatch_stack() > 0


def current_backward() -> int:
    """Return the number of the backward that runs in this thread; -1: none does."""
    return torch._C._current_graph_task_id()  # type: ignore[no-any-return]


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have the running backward call ``callback`` when it ends, unless it raises before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def is_reached(leaf: Tensor) -> bool:
    """Say whether the running backward reaches a leaf, or only other tensors that its ``inputs`` name."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)  # type: ignore[no-any-return]
    except RuntimeError:  # it says so of every leaf under torch.autograd.grad()
        return False


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
