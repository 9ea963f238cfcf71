"""A file's content for each table of a model and its optimizer: its checks, and its way into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch import as_stored
from ...optim.row_optimizer import RowOptimizer
from ...tables.layouts import accumulator_dtype
from ...tables.table import table_if_any
from ...variable.optimizer_rows import new_zeros
from .format import Piece, copy_bytes
from .growing import GrowingRows, check_rows, insert_rows
from .names import Move, Target
from .slots import Slots
from .sources import Found

__all__ = ["Transfer", "carry_out", "check_arguments", "check_contents", "check_fit", "group_of", "moves_of"]


class Transfer(NamedTuple):
    """A table, and a file's content for it."""

    target: Target
    weight: Found | None
    growing: list[GrowingRows]
    slots: Slots

    def all(self) -> list[Found]:
        """Return all tensors of the file."""
        own = [] if self.weight is None else [self.weight]
        return [
            *own,
            *(found for found, _ in self.slots.states.values()),
            *(x for rows in self.growing for x in rows.all()),
        ]


def check_arguments(function: str, optimizer: Any, tables: Any) -> None:
    """Raise ``TypeError`` unless they are an optimizer of ours, or none, and a pattern or a mapping of names."""
    if optimizer is not None and not isinstance(optimizer, RowOptimizer):
        raise TypeError(
            f"{function}: optimizer must be one of torchsparse_rec.optim, got {type(optimizer).__name__}: those of "
            "compat.tensorflow.optimizers have import_slots and export_slots"
        )
    if not isinstance(tables, (str, Mapping, type(None))):
        raise TypeError(f"{function}: tables must be a pattern or a mapping of names, got {type(tables).__name__}")


def group_of(optimizer: RowOptimizer | None, parameter: Tensor) -> dict[str, Any] | None:
    """Return the optimizer's group that holds a parameter, if one does."""
    groups = [] if optimizer is None else optimizer.param_groups
    return next((group for group in groups if any(p is parameter for p in group["params"])), None)


def check_fit(
    path: str,
    transfer: Transfer,
    optimizer: RowOptimizer | None,
    where_steps: str,
    shape: tuple[int, ...] | None = None,
) -> None:
    """
    Raise ``ValueError`` unless a file's content for a table can be copied without loss.

    Args:
        path: the path of the file.
        transfer: the table, with the file's content for it.
        optimizer: the optimizer that takes over the states.
        where_steps: the names under which files have the number of steps that have been taken.
        shape: the shape of the whole table. Default: the parameter's.
    """
    target, slots = transfer.target, transfer.slots
    parameter, growing, group = target.parameter, target.growing, group_of(optimizer, target.parameter)
    if growing is not None:
        if growing.total_count():
            raise ValueError(f"{target.parameter_name!r} must have no rows yet, got {growing.total_count()}")
        if growing.cold is not None and transfer.growing[0].states:
            raise ValueError(f"{target.parameter_name!r} must have all rows in one tier to take over slots")
    wide, per_row = accumulator_dtype(parameter.dtype), frozenset() if optimizer is None else optimizer.per_row
    for part in transfer.growing:
        of_part = (part.values.shape[0], parameter.shape[1])
        _check_tensor(path, part.values, target, of_part, parameter.dtype)
        for name, (slot, _, _) in part.states.items():
            _check_tensor(path, slot, target, of_part[:1] if name in per_row else of_part, wide)
    whole = tuple(parameter.shape) if shape is None else shape
    if transfer.weight is not None:
        _check_tensor(path, transfer.weight, target, whole, parameter.dtype)
    for name, (slot, _) in slots.states.items():
        _check_tensor(path, slot, target, whole[:1] if name in per_row else whole, wide)
    has_slots = bool(slots.states) or any(part.states for part in transfer.growing)
    if has_slots and slots.steps is None and group is not None and ("betas" in group or group.get("lr_decay")):
        raise ValueError(
            f"{path} must say how many steps {type(optimizer).__name__} has taken, by {where_steps}: it does not"
        )


def check_contents(path: str, transfer: Transfer) -> None:
    """Raise ``ValueError`` unless a table that grows can take all rows that a file has: they are read for it."""
    if transfer.target.growing is not None:
        check_rows(transfer.target.growing, transfer.growing, path, transfer.target.parameter_name)


def _check_tensor(path: str, found: Found, target: Target, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ``ValueError`` unless a tensor can be copied without loss."""
    if found.shape != shape:
        raise ValueError(
            f"{path}: {found.name!r} must have the shape of {target.parameter_name!r}, {list(shape)}, got "
            f"{list(found.shape)}"
        )
    its = found.dtype
    is_float = its is not None and its.is_floating_point and its.itemsize > 1  # torch promotes no floats of 8 bits
    if its is None or not is_float or torch.promote_types(its, dtype) != dtype:
        raise ValueError(
            f"{path}: {found.name!r} must be of {dtype}, or of floats that it holds, for "
            f"{target.parameter_name!r}, got {found.dtype or 'a dtype that torch does not have'}"
        )


def moves_of(transfer: Transfer) -> list[Move]:
    """Return the moves: what goes where."""
    where = transfer.target.parameter_name
    pairs = [] if transfer.weight is None else [(transfer.weight, where)]
    if transfer.growing:
        for part in transfer.growing:
            fields = {"keys": part.keys, "values": part.values, "freqs": part.freqs, "versions": part.versions}
            pairs += [(found, f"{name} of {where}") for name, found in fields.items() if found is not None]
            pairs += [(its[0], f"state of {where}: {state}") for state, its in part.states.items()]
    else:
        pairs += [(found, f"state of {where}: {state}") for state, (found, _) in transfer.slots.states.items()]
    return [Move(found.name, to, found.shape, found.dtype, found.parts) for found, to in pairs]


@torch.no_grad()
def carry_out(
    transfer: Transfer, optimizer: RowOptimizer | None, copy: Callable[[Piece, Tensor], None] = copy_bytes
) -> Iterator[None]:
    """
    Write a file's content for a table into the model and its optimizer, a piece at a step.

    Args:
        transfer: the table, with the file's content for it, checked.
        optimizer: the optimizer that takes over the states.
        copy: a function that copies a piece to the table, or to a state of its rows; a rank may have a part of these.
    """
    target, steps = transfer.target, transfer.slots.steps or 0
    if target.growing is not None:
        insert_rows(target.growing, transfer.growing, optimizer, steps)
        return
    assert transfer.weight is not None
    parameter = target.parameter
    table = table_if_any(parameter)
    if table is not None:
        table.release()  # first: rows that are stale are of the past, which ends here
    with as_stored():
        weight = parameter.detach()
    yield from _copied(transfer.weight, weight, copy)
    group = group_of(optimizer, parameter)
    if optimizer is None or group is None or not weight.numel():
        return
    state: dict[str, Any] = {}
    if optimizer.counts_steps:
        on_device = group.get("capturable") or group.get("fused")
        state["step"] = torch.tensor(float(steps), device=weight.device if on_device else "cpu")
    before, dtype = optimizer.stored_state.get(parameter, {}), accumulator_dtype(weight.dtype)
    for name, (slot, factor) in transfer.slots.states.items():
        values, shape = before.get(name), weight.shape[: len(slot.shape)]
        if not isinstance(values, Tensor) or values.dtype != dtype or values.shape != shape:
            values = new_zeros(shape, dtype, weight.device)  # of huge pages, which are quicker to fill
        yield from _copied(slot, values, copy)
        state[name] = values if factor == 1 else values.mul_(factor)
    optimizer.wide_states.pop(parameter, None)
    optimizer.stored_state[parameter] = state


def _copied(found: Found, out: Tensor, copy: Callable[[Piece, Tensor], None]) -> Iterator[None]:
    for piece in found.pieces():
        copy(piece, out)
        yield
