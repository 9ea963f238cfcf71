"""
Parts of tables that are split over ranks, and the functions of torch that must not read their gradients.

Torch's clipping, its GradScaler and a few optimizers assume that a tensor is whole. On a part each rank would get
another number, and the ranks would silently diverge: these functions raise instead.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._torch import as_stored

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    *("Part", "PartGradient", "are_apart", "are_left_out", "mark_gradient", "part_state", "passed_on", "plain"),
    *("refuse_norm", "refuse_one_rank"),
]


# "parts" and "fixed": within part_state().
_has: ContextVar[str] = ContextVar("has", default="wholes")


@contextmanager
def part_state(fixed: bool = False) -> Iterator[None]:
    """
    Make ``state_dict()`` return this rank's parts of tables, without split ones that grow.

    Args:
        fixed: whether to leave out all tables that grow.
    """
    token = _has.set("fixed" if fixed else "parts")
    try:
        yield
    finally:
        _has.reset(token)


def are_apart() -> bool:
    """Say whether ``state_dict()`` returns this rank's parts of tables."""
    return _has.get() != "wholes"


def are_left_out(part: Part | None) -> bool:
    """Say whether ``state_dict()`` leaves out a table that grows; ``part`` is this rank's part of it, if any."""
    return _has.get() == "fixed" or (part is not None and are_apart())


class Part(NamedTuple):
    """The part that a rank's parameter is of a table that several ranks share."""

    group: ProcessGroup | None
    """The ranks that share the table; None: all of the job. Each has a parameter for it, without rows if need be."""
    replicated: bool
    """Whether every rank has the whole table, with the same gradient: it is counted once."""
    name: str
    """The table's name, for errors."""
    has: Callable[[Tensor], Tensor] | None = None
    """A function that returns which of some keys, ``[N]``, this rank has, ``[N]`` bool; None: the table does not
    grow."""
    look_up: Callable[[Sequence[Any], Any, Any, Any], list[Tensor]] | None = None
    """The implementation of ``nn.lookup_sparse`` where this is among the tables; None: there is none."""
    over_rows: Callable[..., Any] | None = None
    """A function that returns the way over all rows of the table, given this parameter, the caller's name, and what to
    do instead where the plan does not fit; None: there is none."""
    splits_rows: bool = True
    """Whether a rank may have some of the rows and not others."""
    splits_columns: bool = False
    """Whether a rank may have some of the columns and not others."""


_CLIPPING = torch.nn.utils.clip_grad_norm_.__module__
_SCALING = torch.amp.GradScaler.__module__
# By name, as importing it takes FSDP with it.
_SHARDED_SCALING = "torch.distributed.fsdp.sharded_grad_scaler"
# Each takes norms, means or products over all that a tensor holds.
_OF_WHOLE_TENSORS = {
    inspect.unwrap(each.step).__globals__["__name__"]: each.__name__
    for each in (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon)
}
_NORMS = [torch.nn.utils.clip_grad_norm_.__wrapped__, torch.nn.utils.get_total_norm.__wrapped__]  # type: ignore[attr-defined]
_TAKES_NORMS = [function.__code__ for function in _NORMS]


_ONE_NORM = "torch.nn.utils takes the norm of only this rank's rows: call torchsparse_rec.optim.clip_grad_norm_"


def _function_of(frame: FrameType) -> FrameType:
    """Return the frame of the function, where a list in it has a separate frame, as until Python 3.11."""
    return frame.f_back if frame.f_code.co_name == "<listcomp>" and frame.f_back is not None else frame


def _obstacle(reader: FrameType) -> str | None:
    """Return why the code that reads a part's gradient must not, or None if it may."""
    caller = _function_of(reader)
    name = caller.f_globals.get("__name__")
    if name == _CLIPPING and caller.f_code in _TAKES_NORMS:
        return _ONE_NORM
    if name == _SCALING:
        return (
            "torch.amp.GradScaler finds only this rank's infinities, and scales would differ between ranks: take "
            "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
        )
    if name == _SHARDED_SCALING and caller.f_back is not None and caller.f_back.f_globals.get("__name__") == _SCALING:
        return (
            "ShardedGradScaler.step() asks no other rank for infinities where torch's optimizer was made with "
            "fused=True: make it without"
        )
    if name in _OF_WHOLE_TENSORS:
        return (
            f"torch.optim.{_OF_WHOLE_TENSORS[name]} computes each step from all of a tensor, but sees only "
            "this rank's rows: take an optimizer of torchsparse_rec.optim"
        )
    return None


def refuse_one_rank(part: Part, reader: FrameType) -> None:
    """Raise ``RuntimeError`` if the code that reads a part's gradient would take it for the whole table's."""
    obstacle = _obstacle(reader)
    if obstacle is not None:
        raise RuntimeError(f"table {part.name!r} is split over ranks, but {obstacle}")


def passed_on(cls: type, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a call by the other classes among ``types`` or, if there are none, by torch."""
    others = tuple(other for other in types if other is not cls)
    for other in others:
        result = other.__torch_function__(func, others, args, kwargs)
        if result is not NotImplemented:
            return result
    if others:
        return NotImplemented
    with as_stored():
        return func(*args, **kwargs)


class PartGradient(Tensor):
    """A strided gradient of a part, in the hands of code of others. Results of functions, and copies, are plain."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` as for a plain tensor, unless it is torch that takes the norm of gradients."""
        if not torch.compiler.is_compiling():  # compilers cannot follow frames
            caller = _function_of(sys._getframe(1))
            if caller.f_code in _TAKES_NORMS:
                raise RuntimeError(f"a gradient is of a table that is split over ranks, but {_obstacle(caller)}")
        return passed_on(cls, func, types, args, {} if kwargs is None else kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the gradient for a file: as a plain tensor."""
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Return a deep copy, which is plain."""
        return memo.setdefault(id(self), copy.deepcopy(plain(self), memo))  # type: ignore[no-any-return]


def plain(grad: Tensor) -> Tensor:
    """Return a gradient as a plain tensor in the same memory."""
    if type(grad) is not PartGradient:
        return grad
    with as_stored():
        return grad.detach()


def mark_gradient(grad: Tensor) -> None:
    """
    Make a part's gradient a ``PartGradient``, if it is a plain strided tensor.

    A COO gradient keeps its class, as backwards add to it by functions that take no subclass, and gets a mark.
    """
    if type(grad) is Tensor and grad.layout is torch.strided:
        grad.__class__ = PartGradient  # type: ignore[assignment]
    elif grad.layout is torch.sparse_coo:
        grad.is_of_part = True  # type: ignore[attr-defined]


def refuse_norm(grad: Tensor) -> None:
    """Raise ``RuntimeError`` if a COO tensor, of which torch takes the norm, is a gradient of one rank's part."""
    if getattr(grad, "is_of_part", False):
        raise RuntimeError(f"a gradient is of a table that is split over ranks, but {_ONE_NORM}")
