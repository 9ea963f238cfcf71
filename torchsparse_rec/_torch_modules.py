"""
Private names of torch that concern gradients, modules, optimizers and ranks.

As in ``_torch.py``, which has all others, each has its reason, and what stands in its place where a torch lacks it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ._torch import private

# ---- Gradients and hooks ---------------------------------------------------------------------------------------------


# Mark a COO gradient as sorted, each row once, or not. Without the mark an optimizer sorts it again.
mark_coalesced: Callable[[Tensor, bool], Any] = private("Tensor._coalesced_", lambda *_: None)


# Return the hooks on a tensor's gradient, and those after it has been added up: a mapping, or None, for each. Torch has
# no public function for it.
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


# The module is no attribute of torch.optim. If torch's list of hooks on all optimizers is unknown, there is one.
_of_optimizers = sys.modules[torch.optim.Optimizer.__module__]
_step_hooks = [getattr(_of_optimizers, f"_global_optimizer_{when}_hooks", {0: "unknown"}) for when in ("pre", "post")]
_profiler_runs: Callable[[], bool] = private("_C._autograd._profiler_enabled", lambda: True)


def is_step_seen(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether an optimizer's steps are watched: by a hook on it or on all optimizers, or by a profiler."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
    return any(hooks) or any(_step_hooks) or _profiler_runs()


# Torch's kernels that step many parameters by one call, in place, for Adam and AdamW. None: torch calls them itself.
fused_adam: Callable[..., None] | None = private("_fused_adam_", None)
fused_adamw: Callable[..., None] | None = private("_fused_adamw_", None)


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
    """Say whether a frame's code sets an AveragedModel's parameters beside its model's."""
    return frame.f_code is AveragedModel.update_parameters.__code__ or frame.f_globals.get("__name__") in _AVERAGING


def is_in_ddp() -> bool:
    """Say whether this is within the forward of a DistributedDataParallel. False where torch does not tell."""
    return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None


def parameters_of_active_ddp() -> Sequence[Tensor]:
    """
    Return the parameters of the DistributedDataParallel within whose forward this is, without the ones that it ignores.

    Empty where there is none, or if torch does not have the list.
    """
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return getattr(active, "_module_parameters", ())


def ignore_in_ddp(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Have a DistributedDataParallel that is given this module leave out these parameters too, besides others."""
    known = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    # DDP forms the names of the outermost module's own parameters in two ways; one begins with a dot.
    both = [form for name in names for form in ((name,) if "." in name else (name, f".{name}"))]
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(module, list(dict.fromkeys([*known, *both])))


def default_store() -> torch.distributed.Store:
    """
    Return the store by which the ranks of the job have found each other: each of them may read values that another has
    set.
    """
    return torch.distributed.distributed_c10d._get_default_store()


def any_in_fsdp(modules: Iterable[torch.nn.Module]) -> bool:
    """Say whether :func:`is_in_fsdp` is true of one of the modules."""
    return any(["_is_fsdp_managed_module" in module.__dict__ for module in modules])


def is_in_fsdp(module: torch.nn.Module) -> bool:
    """Say whether ``fully_shard`` has dealt out a module's parameters. False where torch does not tell."""
    return "_is_fsdp_managed_module" in module.__dict__


def is_compiled(module: torch.nn.Module) -> bool:
    """Say whether ``torch.compile`` has been called of a module, or ``module.compile()``."""
    optimized = private("_dynamo.eval_frame.OptimizedModule", ())
    return isinstance(module, optimized) or getattr(module, "_compiled_call_impl", None) is not None


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor has been written: autograd counts it to check saved tensors."""
    return tensor._version


def is_alive(tensor: Tensor) -> Callable[[], bool]:
    """Return a function that checks whether the tensor's memory is still held, without holding it."""
    reference = StorageWeakRef(tensor.untyped_storage())
    return lambda: not reference.expired()


# ---- Ranks -----------------------------------------------------------------------------------------------------------


def mesh_of(ranks: list[int], device: str) -> DeviceMesh:
    """
    Return a mesh that lists the ranks that have a tensor, and cannot be used to communicate.

    Torch's public functions make process groups: all ranks of the job, in this mesh or another, would have to call.
    """
    return DeviceMesh(device, ranks, _init_backend=False)
