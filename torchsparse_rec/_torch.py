"""
All private names of torch that this library uses, each with its reason.

Where a torch lacks one, what stands here in its place is slower, or an error that says what cannot be done without it:
never a wrong number. The tests try each name and each substitute.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import reduce, wraps
from operator import attrgetter
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree

_Found = TypeVar("_Found")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _private(path: str, otherwise: _Found) -> _Found:
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
below_autograd: Callable[[], Any] = _private("_C._AutoDispatchBelowAutograd", torch.no_grad)

# A context in which no tensor's class has a say: for those who work on a table's storage, of which rows may be stale.
as_stored: Callable[[], Any] = _private("_C.DisableTorchFunctionSubclass", torch._C.DisableTorchFunction)

# Set whether gradients are recorded from now on. Torch's contexts that do so cost as much as a small operator.
set_grad_enabled: Callable[[bool], Any] = _private("_C._set_grad_enabled", torch.set_grad_enabled)

any_requires_grad: Callable[..., bool] = _private("_C._any_requires_grad", _any_requires_grad)

# Return or set a parameter's gradient at the cost of a plain one's, of whichever class it is: for loops over all
# tables, under as_stored.
grad_of: Callable[[Tensor], Tensor | None] = Tensor.grad.__get__  # type: ignore[union-attr]
set_grad: Callable[[Tensor, Tensor | None], None] = Tensor.grad.__set__  # type: ignore[union-attr]

_transforms: Callable[[], Any] = _private("_C._functorch.peek_interpreter_stack", lambda: True)
_modes: Callable[[], int] = _private("_C._len_torch_dispatch_stack", lambda: 1)


def is_transformed() -> bool:
    """
    Say whether torch.func or forward-mode derivatives are at work: a registered derivative suits neither.

    True where torch does not tell: what suits transforms suits eager calls, at a higher price.
    """
    return _transforms() is not None or getattr(forward_ad, "_current_level", -1) >= 0


def is_watched() -> bool:
    """
    Say whether a mode (tracing, fake tensors) wants to see the operators themselves.

    True where torch does not tell: operators that are seen give what eager calls give, at a higher price.
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


# Whether a tensor belongs to a transform, which may have ended: then only Function.apply finds what it stands for. True
# where torch does not tell.
is_wrapped: Callable[[Tensor], bool] = _private("_C._functorch.is_functorch_wrapped_tensor", lambda _: True)


# A context without the transforms of torch.func that are at work. Without this name they follow a table's flush.
_cleared = _private("_functorch.pyfunctorch.temporarily_clear_interpreter_stack", nullcontext)


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context in which no transform of torch.func is at work."""
    return nullcontext() if _transforms() is None else _cleared()  # type: ignore[no-any-return]


# The functions in C++ by which transforms wrap a tensor, where torch's own Python finds them.
_WRAPPING = (
    (_private("_functorch.eager_transforms", None), "_wrap_for_grad"),
    (_private("_functorch.eager_transforms", None), "_wrap_functional_tensor"),
    (_private("_functorch.vmap", None), "_add_batch_dim"),
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


_increment_versions: Callable[..., None] = _private("_C._increment_version", torch.autograd.graph.increment_version)


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
    except RuntimeError:  # what was made in inference mode counts nothing, also once .data has given it other values
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
is_traced: Callable[[], bool] = _private("_C._is_tracing", torch.jit.is_tracing)


def bare_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a Function's ``apply`` without the search for tensors of ended transforms among its arguments: 1.5 us."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def operator_names() -> Iterable[str]:
    """
    Return the names of all operators, with their namespaces, for those of this library to get a rule for vmap.

    None where torch does not tell: vmap then refuses the operators that have no rule of their own.
    """
    return _private("_C._dispatch_get_all_op_names", lambda: ())()


def arguments_of(operator: Any) -> list[Any]:
    """Return the arguments of an operator's schema, which say their names and whether they are written."""
    return operator._schema.arguments  # type: ignore[no-any-return]


# ---- Compilers -------------------------------------------------------------------------------------------------------

_frames: Any = _private("_C._dynamo.eval_frame", None)
# Return what looks at each of this thread's frames before it runs; None while nothing compiles. False where torch does
# not tell: then a function that is not to be traced always takes the long way round the compiler.
_compiles: Callable[[], Any] = getattr(_frames, "get_eval_frame_callback", lambda: False)


def _skip(code: Any) -> None:
    """Let the compiler leave a function's own frame alone. Where torch lacks a name, it looks at the frame in vain."""
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
_task: Callable[[], int] | None = _private("_C._current_graph_task_id", None)
_graph_task = _task or _missing("_C._current_graph_task_id", _NO_FUSED)
_will_execute = _private("_C._will_engine_execute_node", _missing("_C._will_engine_execute_node", _NO_FUSED))


# Return what is equal for the same backward, of those that run in this thread; where torch does not tell, never.
backward_number: Callable[[], object] = _task or object


def current_backward() -> int:
    """Return the number of the backward that runs in this thread; -1: none does."""
    return _graph_task()  # type: ignore[no-any-return]


def is_run_again() -> bool:
    """
    Say whether this forward runs within a backward: activation checkpointing runs it a second time.

    False where torch does not tell: what forwards count is then counted twice.
    """
    return _task is not None and _task() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have the backward that runs call ``callback`` when it has come to its end, unless it raises before."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def node_of(leaf: Tensor) -> Any:
    """Return the node of autograd's graphs that stands for a leaf: it is the same in all of them while it is held."""
    return get_gradient_edge(leaf).node


def is_reached(node: Any) -> bool:
    """Say whether the backward that runs goes as far as a leaf's node, or only to other tensors that are asked for."""
    try:
        return _will_execute(node)  # type: ignore[no-any-return]
    except RuntimeError:  # it says so of every leaf under torch.autograd.grad()
        return False


# ---- Containers ------------------------------------------------------------------------------------------------------

# Nested containers of tensors, which compilers and torch.func take apart alike. Torch has no public door to them.
pytree = _pytree


# ---- Gradients, hooks and modules ------------------------------------------------------------------------------------


# Mark a COO gradient as sorted, each row once, or not. Without the mark an optimizer sorts it again.
mark_coalesced: Callable[[Tensor, bool], Any] = _private("Tensor._coalesced_", lambda *_: None)


# Return the hooks on a tensor's gradient, and those after it has been added up: a mapping, or None, for each. Torch has
# no public way to ask.
gradient_hooks: Callable[[Tensor], tuple[Mapping[int, Any] | None, Mapping[int, Any] | None]]
gradient_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")


def all_hooks(weights: Iterable[Tensor]) -> list[Any]:
    """Return the hooks on the gradients of tensors, at the cost of a glance at each that has none."""
    found: list[Any] = []
    for weight in weights:
        for hooks in gradient_hooks(weight):
            if hooks:
                found += hooks.values()
    return found


def load_hooks(module: torch.nn.Module) -> dict[int, Any]:
    """Return the hooks that follow a module's ``load_state_dict``, to find one that is there already, or remove it."""
    return module._load_state_dict_post_hooks


def step_without_hooks(optimizer: torch.optim.Optimizer, step: Any) -> None:
    """Call an optimizer's ``step`` of a base class, but not the hooks around it, which torch puts on every class."""
    if getattr(step, "hooked", False):
        step.__wrapped__(optimizer)
    else:
        step()


# The module is no attribute of torch.optim. Where torch does not tell of hooks on all optimizers, there is one.
_of_optimizers = sys.modules[torch.optim.Optimizer.__module__]
_step_hooks = [getattr(_of_optimizers, f"_global_optimizer_{when}_hooks", {0: "unknown"}) for when in ("pre", "post")]
_profiler_runs: Callable[[], bool] = _private("_C._autograd._profiler_enabled", lambda: True)


def is_step_seen(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether somebody wants to know of an optimizer's steps: a hook on it or on all optimizers, or a profiler."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    return any(hooks) or any(_step_hooks) or _profiler_runs()


# Torch's kernels that step many parameters by one call, in place, for Adam and AdamW. None: torch calls them itself.
fused_adam: Callable[..., None] | None = _private("_fused_adam_", None)
fused_adamw: Callable[..., None] | None = _private("_fused_adamw_", None)


def is_made_by_zero() -> bool:
    """Say whether this is within a ZeroRedundancyOptimizer that makes an optimizer for some of its parameters."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_init_local_optimizer":
            return True
        frame = frame.f_back
    return False


def is_copied_to_average() -> bool:
    """Say whether this is within the ``copy.deepcopy`` by which an AveragedModel begins."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is AveragedModel.__init__.__code__:
            return True
        frame = frame.f_back
    return False


# Lightning's callback sets the average and the model in each other's place.
_AVERAGING = ("lightning.pytorch.callbacks.weight_averaging", "pytorch_lightning.callbacks.weight_averaging")


def is_averaging(frame: FrameType) -> bool:
    """Say whether a frame is of code that sets an AveragedModel's parameters beside those of its model."""
    return frame.f_code is AveragedModel.update_parameters.__code__ or frame.f_globals.get("__name__") in _AVERAGING


def is_in_ddp() -> bool:
    """Say whether this is within the forward of a DistributedDataParallel. False where torch does not tell."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


def parameters_of_active_ddp() -> Sequence[Tensor]:
    """
    Return the parameters of the DistributedDataParallel within whose forward this is, less those that it leaves out.

    Empty where there is none, or where torch does not tell.
    """
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return getattr(active, "_module_parameters", ())


def ignore_in_ddp(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Have a DistributedDataParallel that is given this module leave out these parameters too, besides others."""
    known = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    # DDP forms the names of the outermost module's own parameters in two ways, one of which begins with a dot.
    both = [form for name in names for form in ((name,) if "." in name else (name, f".{name}"))]
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, list(dict.fromkeys([*known, *both])))


def default_store() -> torch.distributed.Store:
    """Return the store by which the ranks of the job have found each other: any of them may read what one has set."""
    return torch.distributed.distributed_c10d._get_default_store()


def any_in_fsdp(modules: Iterable[torch.nn.Module]) -> bool:
    """Say whether :func:`is_in_fsdp` is true of one of the modules."""
    return any(["_is_fsdp_managed_module" in module.__dict__ for module in modules])


def is_in_fsdp(module: torch.nn.Module) -> bool:
    """Say whether ``fully_shard`` has dealt out a module's parameters. False where torch does not tell."""
    return "_is_fsdp_managed_module" in module.__dict__


def is_compiled(module: torch.nn.Module) -> bool:
    """Say whether ``torch.compile`` has been called of a module, or ``module.compile()``."""
    optimized = _private("_dynamo.eval_frame.OptimizedModule", ())
    return isinstance(module, optimized) or getattr(module, "_compiled_call_impl", None) is not None


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor has been written: autograd counts it for its own check of saved tensors."""
    return tensor._version


def is_alive(tensor: Tensor) -> Callable[[], bool]:
    """Return a function that says whether the tensor's memory is still held by anybody, without holding it."""
    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


# ---- Ranks -----------------------------------------------------------------------------------------------------------


def mesh_of(ranks: list[int], device: str) -> DeviceMesh:
    """
    Return a mesh that says which ranks have a tensor, and by which they do not speak.

    Torch's public ways make process groups, for which all ranks of the job, in this mesh or another, must call.
    """
    return DeviceMesh(device, ranks, _init_backend=False)


# ---- Devices ---------------------------------------------------------------------------------------------------------


def has_cuda_context(index: int) -> bool:
    """Say whether this process has used a GPU. To ask the GPU itself would make a context on it."""
    return _private("_C._cuda_hasPrimaryContext", lambda _: True)(index)  # type: ignore[no-any-return]
