"""Lookups beside training: a lock that many readers share and one writer has alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Condition, Lock, get_ident
from typing import Any

from ._fork import tell_of_forks

__all__ = ["Guard", "reading"]

_numbers = itertools.count()


class Guard:
    """
    The lock of one table's rows: a lookup sees rows wholly from before or after an update.

    A writer that waits goes before readers that come after it; when it has written, the readers that waited go before
    the next writer: neither starves. The thread that writes may write and read again inside; one that reads must not
    write or read again inside. Whoever takes several guards takes them in the order of their numbers.

    In a process that is forked there is but the thread that forked: what others read is free, what another one was
    writing is half written for ever, so nobody gets in.

    Raises:
        RuntimeError: in both methods, in such a process.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._begin()
        tell_of_forks(self)

    def _begin(self) -> None:
        self._lock = Lock()
        self._readers_go, self._writer_goes = Condition(self._lock), Condition(self._lock)
        self._readers = 0  # that read
        self._blocked = 0  # readers that wait
        self._turn = 0  # how often those have been let in
        self._writer: int | None = None  # the thread that writes
        self._depth = 0
        self._waiting = 0  # writers that wait
        self._is_torn = False
        # A small lookup takes some 20 us: so these are no generators, and made once.
        self._reading, self._writing = _Reading(self), _Writing(self)

    def after_fork(self) -> None:
        """In the process that was forked: let go of what its threads held that are none of its own."""
        writer, depth = self._writer, self._depth
        self._begin()
        if writer is not None:
            self._writer, self._depth = writer, depth
            self._is_torn = writer != get_ident()

    def reading(self) -> AbstractContextManager[None]:
        """Rows stay as they are in here."""
        return self._reading

    def writing(self) -> AbstractContextManager[None]:
        """Nobody else reads or writes in here."""
        return self._writing

    # ---- All of these with the lock taken ----------------------------------------------------------------------------

    def _wait_to_read(self) -> None:
        self._refuse_torn()
        turn = self._turn
        self._blocked += 1
        try:
            while self._turn == turn:
                self._readers_go.wait()
        except BaseException:  # as of Ctrl-C
            if self._turn == turn:
                self._blocked -= 1
            else:
                self._end_reading()
            raise

    def _end_reading(self) -> None:
        self._readers -= 1
        if self._waiting and not self._readers:
            self._writer_goes.notify()

    def _refuse_torn(self) -> None:
        if self._is_torn:
            raise RuntimeError(
                "a table was being written by another thread when this process was forked from its own: what it has "
                "here is half written. Fork when nobody trains, or use the start method 'spawn'"
            )

    def _wait_to_write(self) -> None:
        self._refuse_torn()
        self._waiting += 1
        try:
            while self._writer is not None or self._readers:
                self._writer_goes.wait()
        except BaseException:
            self._waiting -= 1
            if self._writer is None and not self._readers:
                self._let_others_go()
            elif self._writer is None and not self._waiting:
                self._let_readers_go()
            raise
        self._waiting -= 1

    def _let_others_go(self) -> None:
        if self._blocked:
            self._let_readers_go()
        elif self._waiting:
            self._writer_goes.notify()

    def _let_readers_go(self) -> None:
        self._readers += self._blocked
        self._blocked = 0
        self._turn += 1
        self._readers_go.notify_all()

    # ---- Copies ------------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies guard copies."""
        return Guard, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        return Guard()


class _Reading(AbstractContextManager[None]):
    """See :meth:`Guard.reading`."""

    __slots__ = ("_guard",)

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        guard = self._guard
        if guard._writer == get_ident():
            return
        with guard._lock:
            if guard._writer is None and not guard._waiting:
                guard._readers += 1
            else:
                guard._wait_to_read()

    def __exit__(self, *error: object) -> None:
        guard = self._guard
        if guard._writer == get_ident():  # as it was before
            return
        with guard._lock:
            guard._end_reading()


class _Writing(AbstractContextManager[None]):
    """See :meth:`Guard.writing`."""

    __slots__ = ("_guard",)

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def __enter__(self) -> None:
        guard, me = self._guard, get_ident()
        if guard._writer != me:
            with guard._lock:
                if guard._writer is not None or guard._readers:
                    guard._wait_to_write()
                guard._writer = me
        guard._depth += 1

    def __exit__(self, *error: object) -> None:
        guard = self._guard
        guard._depth -= 1
        if not guard._depth:
            with guard._lock:
                guard._writer = None
                guard._let_others_go()


@contextmanager
def reading(guards: Iterable[Guard]) -> Iterator[None]:
    """Several tables at once."""
    with ExitStack() as stack:
        # Each once: a writer that waits for it would otherwise be waited for.
        for guard in sorted(set(guards), key=lambda guard: guard.number):
            stack.enter_context(guard.reading())
        yield
