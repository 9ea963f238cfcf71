"""Checks of a ``state_dict`` of a table that grows, before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._torch import as_stored
from ..variable.rows import TableRows
from .growing import checks_of, seen_of
from .manifest import CheckpointError

__all__ = ["check_state", "counts_of", "problem_of_keys"]

_FORMS = {"entries": (torch.int64, 2), "counters": (torch.int64, 1), "free_rows": (torch.int32, 1)}


def counts_of(state: Any) -> list[int] | None:
    """Return the ``global_step``, ``evicted`` and ``seen`` of an extra state, a dict in older versions; or None."""
    if isinstance(state, Tensor):
        found = state.tolist() if state.dtype == torch.int64 and state.shape == (3,) else []
    elif isinstance(state, Mapping) and type(state.get("global_step")) is int:
        found = [state["global_step"], state.get("evicted"), seen_of(state)]
    else:
        return None
    return found if found and all(type(count) is int and count >= 0 for count in found) else None


def problem_of_keys(state: Mapping[str, Any], prefix: str, reserved: int, rows: int | None = None) -> str | None:
    """
    Return why :class:`KeyRows` cannot have a state, or None: operators that read a wrong one may read other memory.

    Args:
        state: a state with the tensors of the keys.
        prefix: the prefix of their names.
        reserved: the argument of :class:`KeyRows`.
        rows: the number of rows that the keys must have. Default: any number.
    """
    # Safetensors keeps one of several empty tensors: there may be no free_rows.
    lacks_free = f"{prefix}free_rows" not in state
    for name, (dtype, dims) in _FORMS.items():
        x = state.get(prefix + name)
        if name == "free_rows" and lacks_free:
            continue
        if not isinstance(x, Tensor) or x.dtype != dtype or x.dim() != dims:
            return f"{prefix}{name} must be a tensor of {dtype} with {dims} dimensions, got {_form(x)}"
    entries, counters = (state[prefix + name].detach() for name in ("entries", "counters"))
    free = entries.new_empty(0) if lacks_free else state[f"{prefix}free_rows"].detach()
    if entries.shape[1] != 2 or len(counters) != 8 or (rows is not None and len(entries) != rows):
        wanted = "rows" if rows is None else rows
        return f"{prefix}entries must be [{wanted}, 2], and counters [8], got {_form(entries)} and {_form(counters)}"
    if entries.is_meta:
        return None
    used, reused, _, inserted, *_ = counters.tolist()
    numbers, listed = entries[:, 1], free[max(reused, 0) :].long()
    has = numbers != -1
    count = int(has.sum())
    if not reserved <= used <= len(entries) or (not lacks_free and not 0 <= reused <= len(free)) or inserted < count:
        return f"{prefix}counters must be of {count} keys in {len(entries)} rows, got {counters.tolist()}"
    if bool((numbers < -1).any()) or bool(has[:reserved].any()) or bool(has[used:].any()):
        return f"{prefix}entries must have keys in rows {reserved} to {used} alone, and no negative frequencies"
    if len(ops.unique(entries[has, 0]).values) != count:
        return f"{prefix}entries must have distinct keys"
    if bool(((listed < reserved) | (listed >= used)).any()) or bool(has[listed.to(has.device)].any()):
        return f"{prefix}free_rows must be rows without a key"
    if len(listed.unique()) != len(listed):
        return f"{prefix}free_rows must be distinct"
    return None


def check_state(rows: TableRows, state: Mapping[str, Any], prefix: str) -> None:
    """
    Raise ``RuntimeError`` if a table that grows cannot have a state, which has its weight.

    Args:
        rows: the rows of the table.
        state: the state of its module, and perhaps others.
        prefix: the prefix of the module's names.
    """
    method, name = "EmbeddingVariable.load_state_dict", rows.store.name
    filtered = any(name.startswith(f"{prefix}admission.") for name in state)
    if state[f"{prefix}weight"] is not None and filtered != (rows.admission is not None):
        has, wants = ("a filter", "none") if filtered else ("no filter", "one")
        raise RuntimeError(
            f"{method}: the state_dict of {name!r} has {has}, the variable {wants}: the rows of their keys differ; use "
            "save() and restore()"
        )
    with as_stored():
        problem = _problem_of_state(rows, state, prefix)
    if problem is not None:
        raise RuntimeError(f"{method}: of {name!r}: {problem}")


def _problem_of_state(rows: TableRows, state: Mapping[str, Any], prefix: str) -> str | None:
    weight, extra, dim = state[f"{prefix}weight"], f"{prefix}_extra_state", rows.store.weight.shape[1]
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[1] != dim:
        return f"{prefix}weight must be [rows, {dim}], got {_form(weight)}"
    if problem := problem_of_keys(state, f"{prefix}keys.", rows.store.keys.reserved, len(weight)):
        return problem
    if extra in state and counts_of(state[extra]) is None:
        return f"{extra} must have counts of global_step, evicted, seen, got {repr(state[extra]):.100}"
    sketch, given = getattr(rows.admission, "sketch", None), state.get(f"{prefix}admission.sketch")
    if sketch is not None and given is not None:
        if not isinstance(given, Tensor) or given.shape != sketch.shape or given.dtype != sketch.dtype:
            return f"{prefix}admission.sketch must be {_form(sketch)}, got {_form(given)}"
    candidates = f"{prefix}admission.candidates."
    if any(name.startswith(candidates) for name in state) and (problem := problem_of_keys(state, candidates, 0)):
        return problem
    cold = {name.removeprefix(f"{prefix}cold."): x for name, x in state.items() if name.startswith(f"{prefix}cold.")}
    if cold:
        if not all(isinstance(x, Tensor) for x in cold.values()):
            return f"{prefix}cold must be tensors"
        try:
            checks_of(rows).check_shard(f"{prefix}cold", "rows", cold)
        except CheckpointError as error:
            return str(error)
        if rows.cold is None and len(cold.get("keys", ())):
            return "some rows are of other tiers, which this variable does not have: use save() and restore()"
    return None


def _form(x: Any) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, Tensor) else f"{repr(x):.100}"
