"""Words among ranks: what each has to say, and the error of one as the error of all."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["agreed"]

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, IndexError, TypeError, RuntimeError, OSError)
}


def agreed(group: dist.ProcessGroup | None, value: Any, error: Exception | None = None) -> list[Any]:
    """
    Return what each rank says, or raise the error of the first rank that has one, on all.

    Args:
        group: of the ranks, which all call this. None: this process alone.
        value: what this rank says; it can be pickled.
        error: of this rank.
    """
    if error is not None and group is None:
        raise error
    if group is None:
        return [value]
    kind = None
    if error is not None:
        kind = next(
            name for name in (base.__name__ for base in type(error).__mro__) if name in _KINDS or name == "object"
        )
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, (value, kind, None if error is None else str(error)), group=group)
    if error is not None:
        raise error
    for rank, (_, its, text) in enumerate(said):
        if its is not None:
            raise _KINDS.get(its, RuntimeError)(f"rank {rank}: {text}")
    return [each for each, _, _ in said]
