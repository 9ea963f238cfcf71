"""Check the arguments of PrebatchedDataset; a ValueError names the argument, its value and the expected one."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch


def check_integer(name: str, value: Any, least: int) -> int:
    """Return ``value`` as an int, or raise ``ValueError`` unless it is an integer of at least ``least``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"PrebatchedDataset: {name} must be an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"PrebatchedDataset: {name} must be at least {least}, got {value}")
    return number


def check_state(state: Any) -> Mapping[str, Any]:
    """Check a ``PrebatchedDataset``'s state, and return its entry ``"of"``: the settings and size of the dataset."""
    least = {"epoch": 0, "start": 0, "position": 0, "workers": 1}
    if not isinstance(state, Mapping) or not isinstance(state.get("of"), Mapping) or not least.keys() <= state.keys():
        raise ValueError(f"PrebatchedDataset: state must be one of state_dict(), got {state!r}")
    for name, value in least.items():
        check_integer(f"state[{name!r}]", state[name], value)
    return state["of"]


def check_place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """
    Return a rank and the number of ranks, after checking them.

    If they are None, return the ones of ``torch.distributed`` if it is initialised, else 0 and 1.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"PrebatchedDataset: rank and world_size must be given together, got {rank} and {world_size}")
    if rank is None or world_size is None:
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return 0, 1
        return distributed.get_rank(), distributed.get_world_size()
    if not 0 <= rank < world_size:
        raise ValueError(f"PrebatchedDataset: rank must be in [0, world_size = {world_size}), got {rank}")
    return rank, world_size
