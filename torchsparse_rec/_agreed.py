"""Agreement of ranks: the value of each, and the error of one as the error of all."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

__all__ = ["agreed", "agreeing", "together"]

# The seconds after which ranks at work signal it to each other, so that none waits longer than its group allows.
_ROUND = 10.0

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(ValueError, IndexError, TypeError, RuntimeError, ImportError),
        *(BlockingIOError, FileNotFoundError, OSError),
    )
}


def agreed(group: dist.ProcessGroup | None, value: Any, error: Exception | None = None) -> list[Any]:
    """
    Return each rank's value, or raise the error of the first rank that has one, on all.

    Args:
        group: the group of the ranks, which all call this. None: only this process.
        value: this rank's value; it can be pickled.
        error: the error of this rank.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    if ranks == 1:
        if error is not None:
            raise error
        return [value]
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS), "RuntimeError")
    said: list[Any] = [None] * ranks
    failed = None if error is None else (kind, str(error), getattr(error, "errno", None))
    dist.all_gather_object(said, (value, failed), group=group)
    for rank, (_, failed) in enumerate(said):
        if failed is not None:
            raised = _KINDS[failed[0]](f"rank {rank}: {failed[1]}")
            if isinstance(raised, OSError):
                raised.errno = failed[2]
            raise raised from error
    return [each for each, _ in said]


@contextmanager
def agreeing(group: dist.ProcessGroup | None) -> Iterator[list[Any]]:
    """
    Yield a list for this rank's values; when the block ends it holds the list of each rank.

    Args:
        group: the group of the ranks, which all call this. None: only this process.

    Raises:
        The error in the block of the first rank that has one, on all.
    """
    said: list[Any] = []
    error = None
    try:
        yield said
    except Exception as raised:
        error = raised
    said[:] = agreed(group, [*said], error)


def together(group: dist.ProcessGroup | None, steps: Generator[object, None, None]) -> None:
    """
    Do the steps of this rank's work, however long it takes, while the others do theirs.

    Args:
        group: the group of the ranks, which all call this. None: only this process.
        steps: the steps, an iterable whose items are not used.

    Raises:
        The error of the first rank that has one, on all, soon after.
    """
    over, error = False, None
    try:
        while True:
            end = time.monotonic() + _ROUND
            try:
                while not over and time.monotonic() < end:
                    over = next(steps, steps) is steps
            except Exception as raised:
                error = raised
            if all(agreed(group, over, error)):
                return
    finally:
        steps.close()  # it may hold a lock where another rank has failed
