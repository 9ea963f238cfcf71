"""
All private names of torch that this library uses, each with its reason: here what concerns a call.

What concerns gradients, modules, optimizers and ranks is in ``_torch_modules.py``.

Where a torch lacks one, its replacement here is slower, or raises an error that names what cannot be done without it:
never a wrong number. The tests try each name and each substitute.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import reduce, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree

_Found = TypeVar("_Found")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def private(path: str, otherwise: _Found) -> _Found:
    """Return ``torch.<path>``, or ``otherwise`` where this torch has no such name."""
    try:
        return reduce(getattr, path.split("."), torch)  # type: ignore[return-value, arg-type]
    except AttributeError:
        return otherwise


def _missing(path: str, what: str) -> Callable[..., Any]:
    """Return a function that raises: ``what`` cannot be done without ``torch.<path>``."""

    def refuse(*arguments: Any) -> Any:
        raise AttributeError(f"{what}, as torch {torch.__version__} has no torch.{path}: take a torch that has it")

    return refuse


# ---- Dispatch --------------------------------------------------------------------------------------------------------


def _any_requires_grad(*arguments: Any) -> bool:
    """Say whether one of the arguments, or an item of a list among them, is a tensor with a gradient."""
    return any(
        isinstance(x, Tensor) and x.requires_grad
        for argument in arguments
        for x in (argument if isinstance(argument, (list, tuple)) else (argument,))
    )


# A context in which operators go straight to their kernels. An autograd.Function has recorded the gradient already, so
# that without this name they only pass through autograd's layer for nothing.
below_autograd: Callable[[], Any] = private("_C._AutoDispatchBelowAutograd", torch.no_grad)

# A context in which no tensor's class is consulted, for code that works on a table's storage, where rows may be stale.
as_stored: Callable[[], Any] = private("_C.DisableTorchFunctionSubclass", torch._C.DisableTorchFunction)

# Set whether gradients are recorded from now on. Torch's contexts for it cost as much as a small operator.
set_grad_enabled: Callable[[bool], Any] = private("_C._set_grad_enabled", torch.set_grad_enabled)

any_requires_grad: Callable[..., bool] = private("_C._any_requires_grad", _any_requires_grad)

# Return or set a parameter's gradient at the cost of a plain one's, of whichever class it is: for loops over all
# tables, under as_stored.
grad_of: Callable[[Tensor], Tensor | None] = Tensor.grad.__get__  # type: ignore[union-attr]
set_grad: Callable[[Tensor, Tensor | None], None] = Tensor.grad.__set__  # type: ignore[union-attr]

# Whether an operator has an implementation for a dispatch key.
has_kernel: Callable[[str, str], bool] = private("_C._dispatch_has_kernel_for_dispatch_key", lambda *_: True)

# A context in which no mode, as that of fake tensors, has a say.
below_modes: Callable[[], Any] = private("_C._DisableTorchDispatch", nullcontext)

_transforms: Callable[[], Any] = private("_C._functorch.peek_interpreter_stack", lambda: True)
_modes: Callable[[], int] = private("_C._len_torch_dispatch_stack", lambda: 1)


def is_transformed() -> bool:
    """
    Say whether torch.func or forward-mode derivatives are at work: a registered derivative suits neither.

    True if it is unknown: what suits transforms suits eager calls, at a higher price.
    """
    return _transforms() is not None or getattr(forward_ad, "_current_level", -1) >= 0


def is_watched() -> bool:
    """
    Say whether a mode (tracing, fake tensors) wants to see the operators themselves.

    True if it is unknown: operators that are seen give what eager calls give, at a higher price.
    """
    return _modes() > 0


def is_seen() -> bool:
    """Say whether a compiler, a transform or a mode sees the operators that are called, besides autograd."""
    # is_transformed() and is_watched() without their calls: every lookup asks.
    if torch.compiler.is_compiling() or _transforms() is not None or _modes() > 0:
        return True
    return getattr(forward_ad, "_current_level", -1) >= 0


def see_operators(tensors: Sequence[Tensor]) -> bool:
    """Say whether one of the tensors is of a class that sees the operators which are called with it."""
    for x in tensors:  # a loop: there may be a hundred
        if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return True
    return False


def is_plain(ids: Tensor, weight: Tensor) -> bool:
    """Say whether a lookup that no compiler traces goes to the kernels of CPU or CUDA, seen by autograd at most."""
    if type(ids) is not Tensor or _transforms() is not None or _modes() > 0:
        return False
    return not weight.is_meta and getattr(forward_ad, "_current_level", -1) < 0


# Whether a tensor belongs to a transform, which may have ended: then only Function.apply finds its value. True if it is
# unknown.
is_wrapped: Callable[[Tensor], bool] = private("_C._functorch.is_functorch_wrapped_tensor", lambda _: True)


# A context without the transforms of torch.func that are at work. Without this name they follow a table's flush.
_cleared = private("_functorch.pyfunctorch.temporarily_clear_interpreter_stack", nullcontext)


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context in which no transform of torch.func is at work."""
    return nullcontext() if _transforms() is None else _cleared()  # type: ignore[no-any-return]


# The functions in C++ by which transforms wrap a tensor, where torch's own Python finds them.
_WRAPPING = (
    (private("_functorch.eager_transforms", None), "_wrap_for_grad"),
    (private("_functorch.eager_transforms", None), "_wrap_functional_tensor"),
    (private("_functorch.vmap", None), "_add_batch_dim"),
)


def see_transformed(see: Callable[[Any], None]) -> None:
    """
    Call ``see`` of each tensor that a transform of torch.func is given, before it wraps it in C++.

    Torch has no hook there. Where it lacks a name, a warning says that rows that are stale stay so.
    """
    for module, name in _WRAPPING:
        wrap = getattr(module, name, None)
        if wrap is None:
            warnings.warn(
                f"torch {torch.__version__} has no {name} of torch._functorch: before you give a table's parameter to "
                "torch.func, call optimizer.flush()",
                stacklevel=2,
            )
        else:
            setattr(module, name, _seeing(see, wrap))


def _seeing(see: Callable[[Any], None], wrap: Callable[..., Any]) -> Callable[..., Any]:
    def seeing(x: Any, *args: Any) -> Any:
        see(x)
        return wrap(x, *args)

    return seeing


_increment_versions: Callable[..., None] = private("_C._increment_version", torch.autograd.graph.increment_version)


def tell_autograd(written: Sequence[Tensor]) -> None:
    """Tell autograd of writes, so that a graph that has saved a written tensor notices, as with torch's operators."""
    if not torch.compiler.is_compiling():
        count_writes(written)


def count_writes(written: Sequence[Tensor]) -> None:
    """Do what :func:`tell_autograd` does, where nothing compiles."""
    try:
        for x in written:
            if x.is_inference():
                written = [x for x in written if not x.is_inference()]
                break
        _increment_versions(written)
    except RuntimeError:  # made in inference mode: it counts nothing, even after .data has given it other values
        for x in written:
            with suppress(RuntimeError):
                torch.autograd.graph.increment_version(x)


def see_swapped(see: Callable[[Tensor], None]) -> None:
    """Call ``see`` of each tensor that ``torch.utils.swap_tensors`` is given: it takes none with weak references."""
    swap = torch.utils.swap_tensors

    @wraps(swap)
    def seeing(t1: Tensor, t2: Tensor) -> None:
        see(t1)
        see(t2)
        swap(t1, t2)

    torch.utils.swap_tensors = seeing  # type: ignore[assignment]


def entry_of(operator: Any) -> Callable[..., Any]:
    """Return the function in C++ by which an operator's own call goes to the dispatcher."""
    return getattr(operator, "_op", operator)


def call_kernel(operator: Any, x: Tensor, *arguments: Any) -> Any:
    """Call an operator's kernel for the device of ``x``, its first argument, whoever wants to see operators now."""
    keys = torch._C.DispatchKey
    key = keys.CUDA if torch._C._dispatch_keys(x).has(keys.CUDA) else keys.CPU
    return operator.redispatch(torch._C.DispatchKeySet(key), x, *arguments)


# Say whether torch.jit.trace runs, by one call.
is_traced: Callable[[], bool] = private("_C._is_tracing", torch.jit.is_tracing)


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a Function's ``apply`` without the search for tensors of ended transforms among its arguments: 1.5 us."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def operator_names() -> Iterable[str]:
    """
    Return the names of all operators, with their namespaces, so that this library's get a rule for vmap. None if they
    are unknown: vmap then refuses the operators that have no own rule.
    """
    return private("_C._dispatch_get_all_op_names", lambda: ())()


def arguments_of(operator: Any) -> list[Any]:
    """Return the arguments of an operator's schema, which say their names and whether they are written."""
    return operator._schema.arguments  # type: ignore[no-any-return]


# ---- Compilers -------------------------------------------------------------------------------------------------------

_frames: Any = private("_C._dynamo.eval_frame", None)
# Return what looks at each of this thread's frames before it runs; None while nothing compiles. False where torch does
# not tell: then a function that is not to be traced always takes the long way round the compiler.
_compiles: Callable[[], Any] = getattr(_frames, "get_eval_frame_callback", lambda: False)


def _skip(code: Any) -> None:
    """Make the compiler skip a function's own frame. Where torch lacks a name, it looks at the frame in vain."""
    with suppress(AttributeError):
        skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
        _frames.set_code_exec_strategy(code, skip)


def untraced(reason: str | None = None) -> Callable[[_Function], _Function]:
    """Decorate as ``torch.compiler.disable`` does, without its import of the compiler, which takes 0.8 s and 70 MB."""

    def decorate(function: _Function) -> _Function:
        disabled: list[Callable[..., Any]] = []

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _compiles() is None or "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            if not disabled:
                disabled.append(torch.compiler.disable(function, reason=reason))
            return disabled[0](*args, **kwargs)

        call._torchdynamo_disable = True  # type: ignore[attr-defined]
        call._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        _skip(call.__code__)  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def constant_in_graphs(function: _Function) -> _Function:
    """Decorate as ``torch.compiler.assume_constant_result`` does, without its import of the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# ---- Backward --------------------------------------------------------------------------------------------------------

_NO_FUSED = "grad_mode='fused' cannot tell one backward from another"
_task: Callable[[], int] | None = private("_C._current_graph_task_id", None)
_graph_task = _task or _missing("_C._current_graph_task_id", _NO_FUSED)
_will_execute = private("_C._will_engine_execute_node", _missing("_C._will_engine_execute_node", _NO_FUSED))


# Return an id of the running backward, unique within this thread; a fresh one if torch has none.
backward_number: Callable[[], object] = _task or object


def current_backward() -> int:
    """Return the number of the backward that runs in this thread; -1: none does."""
    return _graph_task()  # type: ignore[no-any-return]


def is_run_again() -> bool:
    """
    Say whether this forward runs within a backward: activation checkpointing runs it a second time.

    False if it is unknown: what forwards count is then counted twice.
    """
    return _task is not None and _task() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have the backward that runs call ``callback`` when it has come to its end, unless it raises before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def node_of(leaf: Tensor) -> Any:
    """Return the node of autograd's graphs that stands for a leaf: it is the same in all of them while it is held."""
    return get_gradient_edge(leaf).node


def is_reached(node: Any) -> bool:
    """Say whether the backward that runs reaches a leaf's node, or only goes to other tensors that are asked for."""
    try:
        return _will_execute(node)  # type: ignore[no-any-return]
    except RuntimeError:  # it says so of every leaf under torch.autograd.grad()
        return False


# ---- Containers ------------------------------------------------------------------------------------------------------

# Nested containers of tensors, which compilers and torch.func take apart alike. Torch has no public door to them.
pytree = _pytree


# ---- Devices ---------------------------------------------------------------------------------------------------------


def has_cuda_context(index: int) -> bool:
    """Say whether this process has used a GPU. To ask the GPU itself would make a context on it."""
    return private("_C._cuda_hasPrimaryContext", lambda _: True)(index)  # type: ignore[no-any-return]
