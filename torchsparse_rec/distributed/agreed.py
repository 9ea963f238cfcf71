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
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1:
        if error is not None:
            raise error
        return [value]
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS), "RuntimeError")
    said: list[Any] = [None] * ranks
    dist.all_gather_object(said, (value, None if error is None else (kind, str(error))), group=group)
    for rank, (_, failed) in enumerate(said):
        if failed is not None:
            raise _KINDS[failed[0]](f"rank {rank}: {failed[1]}") from error
    return [each for each, _ in said]
