"""Calls in a forked process, whose objects have copies of locks but none of the threads that held them."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["HALF_WRITTEN", "tell_of_forks"]

HALF_WRITTEN = (
    "another thread was writing a table when this process was forked: the table is half written here. Fork while no "
    "thread trains, or use the start method 'spawn'"
)


class _Forked(Protocol):
    def after_fork(self) -> None:
        """Put the object in order in the forked process, which has no thread but the one that forked."""


_known: weakref.WeakSet[_Forked] = weakref.WeakSet()


def tell_of_forks(known: _Forked) -> None:
    """Register an object whose ``after_fork`` is called in every process that is forked from this one."""
    _known.add(known)


def _after_fork() -> None:
    for known in list(_known):
        known.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
