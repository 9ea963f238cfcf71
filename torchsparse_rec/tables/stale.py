"""
The class of parameters that have stale rows: the rows are flushed before code outside this package sees them.

Modules and optimizers of this package know which rows are stale, and work on the stored tables
(:data:`~torchsparse_rec.ops.autograd.as_stored`). When other code calls a function of torch on such a parameter, torch
calls :meth:`StaleParameter.__torch_function__` first. Some functions of torch do not call it: for them the property
``weight`` of modules (:func:`flush_read`) and transforms of torch.func (``_watch_transforms``) flush.

Parameters that are one rank's part of a table always have the class too: it sees which code reads their gradient.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import as_stored, grad_of, outside_transforms, see_transformed, untraced
from .growing import Places, by_place, is_stepping, refuse_states_by_row
from .part import Part, mark_gradient, passed_on, refuse_one_rank
from .table import split_part, table_if_any, table_of

__all__ = [
    "StaleParameter",
    "are_trained",
    "can_be_stale",
    "flush_read",
    "is_parameter",
    "mark_fresh",
    "mark_growing",
    "mark_stale",
    "mark_stepped",
    "set_part",
]

# Attributes and methods that read and write no element: they need no flush.
_READ = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "_version"),
    *("requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "output_nr"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
    *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_nested"),
)
_SET = ("requires_grad", "grad", "_backward_hooks")
_CALLED = (
    *("size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__len__", "__hash__"),
)
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _READ),
    *(getattr(Tensor, name).__set__ for name in _SET),
    *(getattr(Tensor, name) for name in _CALLED),
}
# The same by the instructions of Python with which a module's reader goes on.
_ASKING = {("LOAD_ATTR", name) for name in (*_READ, *_CALLED)} | {("LOAD_METHOD", name) for name in _CALLED}
_ASKING |= {("STORE_ATTR", name) for name in _SET}

# The beginning of the names of this package's modules.
_PACKAGE = __name__.partition(".")[0] + "."
# The file of torch's clipping functions, which silently skip parameters without a gradient.
_CLIPPING = torch.nn.utils.clip_grad_norm_.__wrapped__.__code__.co_filename  # type: ignore[attr-defined]


class StaleParameter(Parameter):
    """
    A table's parameter while an optimizer of this package may leave rows of it stale, or other ranks have parts of it.

    A table that a backward steps has it too: code that reads its gradient to clip it gets an error, as it comes too
    late.

    A table that grows always has it: foreign code does not know which key a row has, see ``growing.py``.

    Copies are plain Parameters. A flush does not change the class back: compilers recompile whenever a parameter's
    class changes.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Flush the parameter's stale rows, then call ``func`` as for a plain Parameter."""
        kwargs = {} if kwargs is None else kwargs
        if func not in _METADATA or any(other is not cls for other in types):
            if not torch.compiler.is_compiling():
                reader = sys._getframe(1)
                places = _places_among([args, kwargs], reader)
                _flush_among([args, kwargs])
                if places and not (func is Tensor.detach and reader.f_code is Parameter.__new__.__code__):
                    return by_place(cls, func, types, args, kwargs, places)
            elif not torch.compiler.is_exporting():
                _flush_untraced([args, kwargs])
        result = passed_on(cls, func, types, args, kwargs)
        if func is Tensor.detach and not torch.compiler.is_compiling():
            if sys._getframe(1).f_code is Parameter.__new__.__code__:  # it checks that detach() keeps the class
                result.__class__ = type(args[0])  # which the flush has given back if the optimizer is gone
        return result

    @property
    def grad(self) -> Tensor | None:
        """
        The gradient, as of every parameter, without a flush.

        Raises:
            RuntimeError: torch is clipping gradients, and a backward has already stepped the table. Or a function of
                torch reads it that would take one rank's part for the whole table.
        """
        with as_stored():
            grad = grad_of(self)
        if not torch.compiler.is_compiling():  # compilers cannot follow frames
            _check_reader(self, grad, sys._getframe(1))
        return grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with as_stored():
            Parameter.grad.__set__(self, value)  # type: ignore[union-attr]

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the ``repr`` of a plain Parameter with the same values."""
        _flush_among(self)
        with as_stored():
            return repr(Parameter(self.detach(), self.requires_grad))

    def __deepcopy__(self, memo: Any) -> Any:
        """Return a deep copy, which is a plain Parameter."""
        _flush_among(self)
        if id(self) not in memo:
            with as_stored():
                values = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = Parameter(values, self.requires_grad)
        return memo[id(self)]


def _check_reader(parameter: Tensor, grad: Tensor | None, reader: FrameType) -> None:
    """Raise ``RuntimeError`` if the code that reads a gradient would take it for something else."""
    part = split_part(parameter)
    if part is not None:
        refuse_one_rank(part, reader)
        if grad is not None and not reader.f_globals.get("__name__", "").startswith("torch."):
            mark_gradient(grad)  # it may come to torch.nn.utils.get_total_norm, which sees no parameter
    if grad is not None:
        table = table_if_any(parameter)
        growing = None if table is None or table.growing is None else table.growing()
        if growing is not None:
            refuse_states_by_row(growing.name, reader)
    else:
        table = table_if_any(parameter) if reader.f_code.co_filename == _CLIPPING else None
        if table is not None and table.optimizer is not None:
            table.optimizer.refuse_stepped("torch.nn.utils: gradients are to be clipped", [parameter])


def can_be_stale(parameter: Tensor) -> bool:
    """Say whether the parameter's class may be changed to ``StaleParameter`` and back: a user's own class may not."""
    return type(parameter) in (Parameter, StaleParameter)


def is_parameter(x: Tensor) -> bool:
    """Say whether ``x`` is a Parameter of any class; ``isinstance()`` is slow for other classes than Parameter."""
    return can_be_stale(x) or isinstance(x, Parameter)


def are_trained(weights: Sequence[Tensor]) -> bool:
    """Say whether all tensors are parameters that require gradients: not frozen, and not computed."""
    if not all([weight.requires_grad for weight in weights]):  # a list, as of 100 tables a generator is slower
        return False
    return {type(weight) for weight in weights} <= {Parameter, StaleParameter} or all(map(is_parameter, weights))


def mark_stale(parameters: Iterable[Tensor]) -> None:
    """Make the parameters that have stale rows ``StaleParameter``."""
    for parameter in parameters:
        if type(parameter) is Parameter:
            table = table_if_any(parameter)
            if table is not None and table.is_stale():
                _give_class(parameter)


def mark_stepped(parameters: Iterable[Tensor]) -> None:
    """Make parameters that a backward steps ``StaleParameter``: who clips gradients is to hear that it is too late."""
    for parameter in parameters:
        if type(parameter) is Parameter:
            _give_class(parameter)


def mark_growing(parameter: Tensor) -> None:
    """Make the parameter of a table that grows ``StaleParameter``, unless it has a class of the user's."""
    if type(parameter) is Parameter:
        _give_class(parameter)


def _give_class(parameter: Tensor) -> None:
    parameter.__class__ = StaleParameter  # type: ignore[assignment]
    _watch_transforms()


def mark_fresh(parameter: Tensor) -> None:
    """Make a parameter that has no stale rows a plain Parameter again, unless it is a part."""
    table = table_if_any(parameter)
    if type(parameter) is StaleParameter and (table is None or (table.growing is None and table.part is None)):
        parameter.__class__ = Parameter  # type: ignore[assignment]


def set_part(parameter: Tensor, part: Part) -> None:
    """
    Note that a parameter is one rank's part of a table, so that clipping sees all ranks, and torch's functions raise.

    Args:
        parameter: the part, also where it has no rows. It may have been noted before.
        part: the description of the part.

    Raises:
        TypeError: the table is split, and its parameter has a class of the user's: torch's functions could not raise.
    """
    if not part.replicated:
        if not can_be_stale(parameter):
            raise TypeError(
                f"table {part.name!r}: to be split over ranks its parameter must be a torch.nn.Parameter, got "
                f"{type(parameter).__name__}"
            )
        _give_class(parameter)
    table_of(parameter).part = part


def flush_read(parameter: Tensor, reader: FrameType) -> None:
    """
    Flush a table's stale rows before ``reader`` gets its parameter as the attribute of a module.

    What takes the parameter next may be a function that torch does not dispatch, such as ``torch.tensor`` or one of
    TorchScript. Where the reader goes on to read only a shape, a dtype, ``.grad`` or similar, nothing is flushed.
    """
    if _goes_on(reader.f_code, reader.f_lasti) not in _ASKING:
        _flush_among(parameter)


@lru_cache(maxsize=4096)
def _goes_on(code: CodeType, at: int) -> tuple[str, Any] | None:
    """Return what code does next with the attribute that it reads at an offset; None: it reads none by itself."""
    instructions = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
    for this, following in zip(instructions, instructions[1:], strict=False):
        if this.offset <= at < following.offset:
            return (following.opname, following.argval) if this.opname == "LOAD_ATTR" else None
    return None


@cache
def _watch_transforms() -> None:
    """From now on, have the transforms of torch.func flush the stale rows of tables that they are given."""
    see_transformed(_flush_transformed)


def _flush_transformed(x: Any) -> None:
    if type(x) is StaleParameter:
        (_flush_untraced if torch.compiler.is_compiling() else _flush_among)(x)


def _places_among(arguments: Any, reader: FrameType) -> dict[int, Places]:
    """Return the places of the whole tables that grow among a function's arguments, unless this package calls it."""
    if reader.f_globals.get("__name__") == "torch._ops" and reader.f_back is not None:  # an operator's Python
        reader = reader.f_back
    if reader.f_globals.get("__name__", "").startswith(_PACKAGE) or is_stepping(reader):
        return {}
    found = {}
    for parameter in _stale_among(arguments):
        table = table_if_any(parameter)
        growing = None if table is None or table.growing is None else table.growing()
        if growing is not None:
            with outside_transforms():
                found[id(parameter)] = growing.places(reader)
    return found


def _flush_among(arguments: Any) -> None:
    stale = list(_stale_among(arguments))
    if stale:
        with outside_transforms():
            _flush_all(stale)


def _flush_all(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        table = table_if_any(parameter)
        if table is None or table.rows is None:  # torch.utils.swap_tensors gave it this class
            mark_fresh(parameter)
        elif table.rows.optimizer() is None:
            table.release()
        else:
            table.flush()


@untraced(
    reason="stale rows are flushed before a table is read, which cannot be part of a graph: use grad_mode='dense' for "
    "the table, or compile without fullgraph"
)
def _flush_untraced(arguments: Any) -> None:
    _flush_among(arguments)


def _stale_among(x: Any) -> Iterator[Tensor]:
    if type(x) is StaleParameter:
        yield x
    elif isinstance(x, (list, tuple)):
        for each in x:
            yield from _stale_among(each)
    elif isinstance(x, dict):
        for each in x.values():
            yield from _stale_among(each)
