"""Lookups beside training: a lock that many readers share and one writer has alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

__all__ = ["Guard", "reading"]

_numbers = itertools.count()


class Guard:
    """
    The lock of one table's rows: a lookup sees rows wholly from before or after an update.

    A writer that waits goes before readers that come after it. The thread that writes may write and read again
    inside. Whoever takes several guards takes them in the order of their numbers.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._changed = threading.Condition(threading.Lock())
        self._readers = 0
        self._writer: int | None = None
        self._depth = 0
        self._waiting = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Rows stay as they are in here."""
        if self._writer == threading.get_ident():
            yield
            return
        with self._changed:
            while self._writer is not None or self._waiting:
                self._changed.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                if not self._readers:
                    self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Nobody else reads or writes in here."""
        me = threading.get_ident()
        if self._writer != me:
            with self._changed:
                self._waiting += 1
                while self._writer is not None or self._readers:
                    self._changed.wait()
                self._waiting -= 1
                self._writer = me
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                with self._changed:
                    self._writer = None
                    self._changed.notify_all()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies guard copies."""
        return Guard, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        return Guard()


@contextmanager
def reading(guards: Iterable[Guard]) -> Iterator[None]:
    """Several tables at once."""
    with ExitStack() as stack:
        for guard in sorted(guards, key=lambda guard: guard.number):
            stack.enter_context(guard.reading())
        yield
