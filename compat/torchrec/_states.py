"""The states of TorchRec's optimizers: their names in checkpoints, and the states of ``optim`` that they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ... import optim
from ...optim.row_optimizer import RowOptimizer
from ..checkpoints.format import Piece
from ..checkpoints.slots import Slots
from ..checkpoints.sources import MOST_STEPS, Found, listed
from ._torch_files import whole_tensor

__all__ = ["bare", "check_steps", "find_states", "states_by_variable"]

# What wraps a model, with names that parameters may have or not.
_WRAPPERS = ("model", "module", "_dmp_wrapped_module", "_orig_mod")
# FBGEMM's fused optimizers that have one of these as their counterpart. All others have torch's names.
_FUSED = (optim.Adam, optim.AdamW, optim.Adagrad, optim.RowWiseAdagrad, optim.PartialRowWiseAdam, optim.LAMB)
_STEPS = ("step", "iter")
# More numbers of steps, one for each shard, are not read.
_MOST_SHARDS = 2**20


def bare(name: str) -> str:
    """Return the name of a parameter without the names of the model's wrappers."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        del parts[0]
    return ".".join(parts)


def states_by_variable(tensors: Mapping[str, Found]) -> dict[str, dict[str, Found]]:
    """
    Return the states of each variable by what stands after its name, as ``t1.momentum1`` or ``exp_avg``.

    Fused optimizers call a state ``state.<variable>.<table>.momentum1``. Torch's optimizers, which TorchRec uses for
    tables that are on all ranks, call it ``state.<variable>.exp_avg``. A ``CombinedOptimizer`` may have a key for each
    of its optimizers, which then is before the variable.
    """
    variables: dict[str, str] = {}
    for name in tensors:
        variables.setdefault(bare(name), name)
    result: dict[str, dict[str, Found]] = {}
    for name, found in tensors.items():
        _, state, rest = f".{name}".partition(".state.")
        parts = bare(rest).split(".") if state else []
        for begin, end in _ranges(len(parts)):
            owner = variables.get(".".join(parts[begin:end]))
            if owner is not None and owner != name:
                its, of = result.setdefault(owner, {}), ".".join(parts[end:])
                if of in its:
                    raise ValueError(f"{owner!r} must have one state {of!r}, got {its[of].name!r} and {name!r}")
                its[of] = found
                break
    return result


def _ranges(count: int) -> list[tuple[int, int]]:
    """Return which parts of a state's name may be the variable's: before them one may be an optimizer's key."""
    return [(begin, end) for begin in (0, 1) for end in range(begin + 1, count)]


def find_states(
    path: str,
    variable: Found,
    its: Mapping[str, Found],
    optimizer: RowOptimizer,
    group: dict[str, Any],
    steps: int | None,
    average_shards: bool,
) -> Slots:
    """
    Return the states of a variable, under whichever names they have.

    Args:
        path: the path of the checkpoint, for errors.
        variable: the table.
        its: its states, as of :func:`states_by_variable`.
        optimizer: our optimizer, which determines the wanted states.
        group: the parameter's group.
        steps: the number of steps that have been taken, where the checkpoint does not contain it.
        average_shards: whether one number for a row is made of those for each of its shards.

    Raises:
        ValueError: states are missing, or have no counterpart.
    """
    has = {name.rpartition(".")[2]: found for name, found in its.items()}
    if len(has) < len(its):
        raise ValueError(f"{path}: {variable.name!r} must have each state once, got {listed(its)}")
    wanted = optimizer.rule(group).states
    kind = type(optimizer).__name__
    if any("." in name for name in its) and not isinstance(optimizer, _FUSED):
        raise ValueError(
            f"{path}: {variable.name!r} has states of a fused optimizer, {listed(its)}, which are known of "
            f"{', '.join(x.__name__ for x in _FUSED)}, got {kind}"
        )
    # FBGEMM's states have torch's names but the first, which is momentum1; before 2023 the second was momentum2.
    names = {state: next((x for x in (state, f"momentum{k + 1}") if x in has), None) for k, state in enumerate(wanted)}
    more = has.keys() - set(names.values()) - set(_STEPS)
    if None in names.values() or more:
        raise ValueError(
            f"{path} must have the states of {kind} for {variable.name!r}, as its hyperparameters say: "
            f"{listed(wanted) or 'none'}, the first perhaps by the name momentum1; it has {listed(its) or 'none'}"
        )
    states = {}
    for state, name in names.items():
        found = has[str(name)]
        if state in optimizer.per_row:
            found = _by_row(path, variable, found, kind, average_shards)
        states[state] = (found, 1.0)
    counted = [_steps(path, has[name]) for name in _STEPS if name in has]
    if len(set(counted)) > 1:
        raise ValueError(f"{path}: step and iter of {variable.name!r} must be the same, got {counted[0]}, {counted[1]}")
    said = counted[0] if counted else None
    check_steps(path, variable.name, said, steps)
    return Slots(states, steps if said is None else said)


def check_steps(path: str, name: str, said: int | None, given: int | None) -> None:
    """Raise ``ValueError`` if a caller gives another number of steps than a file has."""
    if None not in (said, given) and said != given:
        raise ValueError(f"load_tables: steps must be None, or {said} as {path} says for {name!r}, got {given}")


def _steps(path: str, found: Found) -> int:
    """Return the number of steps, which may be there once for each shard."""
    values = found.read().reshape(-1) if 0 < math.prod(found.shape) <= _MOST_SHARDS else torch.tensor([-1])
    if not bool((values == values[0]).all()) or not 0 <= values[0] == values[0].floor() <= MOST_STEPS:
        got = values.unique().tolist()
        raise ValueError(
            f"{path}: {found.name!r} must be one number of steps for all shards, got {list(found.shape)} of {got}"
        )
    return int(values[0])


def _by_row(path: str, variable: Found, found: Found, kind: str, average_shards: bool) -> Found:
    """Return a state ``[V]`` of one number for each row, of ``[V, 1]`` or of numbers for each shard of columns."""
    rows = variable.shape[0]
    if found.shape == (rows, 1):

        def first() -> list[Piece]:
            return [piece._replace(place=piece.place[:1], shape=piece.shape[:1]) for piece in found.pieces()]

        return found._replace(shape=(rows,), pieces=first)
    if found.shape == (rows,):
        return found
    shards = sorted({(piece.place[1].start, piece.place[1].stop) for piece in variable.pieces()})
    if len(shards) == 1:
        return found
    by_columns = all(piece.shape[0] == rows for piece in variable.pieces())
    if not by_columns or found.shape != (rows * len(shards),):
        raise ValueError(
            f"{path}: {found.name!r} must have a number for each row of {variable.name!r}, [{rows}], or for each row "
            f"of each of its {len(shards)} shards of columns, got {list(found.shape)} in "
            f"{len(variable.pieces())} shards: of tables that are split by rows and by columns it is not read"
        )
    if not average_shards:
        raise ValueError(
            f"{path}: {variable.name!r} is split by columns, and {found.name!r} has a number for each row of each of "
            f"{len(shards)} shards, where {kind} has one for the whole row: with average_shards=True it gets their "
            "mean by the shards' widths, which it would have after the same gradients; steps then differ from "
            "TorchRec's. Or load the tables alone, without optimizer"
        )

    def mean() -> list[Piece]:
        by_shard = found.read().double().view(len(shards), rows)
        widths = torch.tensor([end - begin for begin, end in shards], dtype=torch.float64)
        joined = (widths @ by_shard / variable.shape[1]).to(found.dtype)
        return whole_tensor(path, found.name, joined).pieces()

    return found._replace(shape=(rows,), pieces=mean)
