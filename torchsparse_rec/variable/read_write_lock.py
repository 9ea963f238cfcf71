"""A reader-writer lock, for lookups in other threads while one thread trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Condition, Lock, get_ident
from typing import Any

from .._fork import HALF_WRITTEN, tell_of_forks

__all__ = ["ReadWriteLock", "reading", "writing"]

_numbers = itertools.count()


class ReadWriteLock:
    """
    The reader-writer lock of rows: a lookup sees each row wholly from before or after an update.

    A table has its own, or, in a collection, all that grow have one: a step takes it once for all of them.

    A waiting writer goes before readers that come after it; once it has written, the readers that waited go before the
    next writer, so neither starves. The thread that holds the lock for writing may take it again, to write or to read;
    a thread that holds it for reading must not. A thread that takes several locks takes them in the order of their
    numbers.

    A forked process has only the thread that forked. Locks that other threads held for reading are released. A table
    that another thread was writing stays half written, so its lock cannot be taken.

    Raises:
        RuntimeError: when the lock is taken in a forked process whose copy of the table is half written.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._begin()
        tell_of_forks(self)

    def _begin(self) -> None:
        self._mutex = Lock()
        self._readers_go, self._writer_goes = Condition(self._mutex), Condition(self._mutex)
        self._readers = 0  # readers that hold the lock
        self._blocked = 0  # readers that wait
        self._turn = 0  # how often blocked readers have been let in
        self._writer: int | None = None  # the thread that holds the lock for writing
        self._depth = 0
        self._waiting = 0  # writers that wait
        self._is_torn = False
        # Neither generators nor made at each call, for speed: a small lookup takes some 20 us.
        self._reading, self._writing = _Reading(self), _Writing(self)

    def after_fork(self) -> None:
        """Release, in the forked process, what threads held that it does not have."""
        writer, depth = self._writer, self._depth
        self._begin()
        if writer is not None:
            self._writer, self._depth = writer, depth
            self._is_torn = writer != get_ident()

    def reading(self) -> AbstractContextManager[None]:
        """Return the context manager that holds the lock for reading: rows do not change inside."""
        return self._reading

    def writing(self) -> AbstractContextManager[None]:
        """Return the context manager that holds the lock for writing: no other thread reads or writes inside."""
        return self._writing

    # ---- To be called with self._mutex held --------------------------------------------------------------------------

    def _wait_to_read(self) -> None:
        self._refuse_torn()
        turn = self._turn
        self._blocked += 1
        try:
            while self._turn == turn:
                self._readers_go.wait()
        except BaseException:  # such as KeyboardInterrupt
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
            raise RuntimeError(HALF_WRITTEN)

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
        """Pickle as a new lock: a copy of a table has a lock of its own."""
        return ReadWriteLock, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadWriteLock:
        return ReadWriteLock()


class _Reading(AbstractContextManager[None]):
    """The context manager of :meth:`ReadWriteLock.reading`."""

    __slots__ = ("_lock",)

    def __init__(self, lock: ReadWriteLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        lock = self._lock
        if lock._writer == get_ident():
            return
        with lock._mutex:
            if lock._writer is None and not lock._waiting:
                lock._readers += 1
            else:
                lock._wait_to_read()

    def __exit__(self, *error: object) -> None:
        lock = self._lock
        if lock._writer == get_ident():  # __enter__ did nothing either
            return
        with lock._mutex:
            lock._end_reading()


class _Writing(AbstractContextManager[None]):
    """The context manager of :meth:`ReadWriteLock.writing`."""

    __slots__ = ("_lock",)

    def __init__(self, lock: ReadWriteLock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        lock, me = self._lock, get_ident()
        if lock._writer != me:
            with lock._mutex:
                if lock._writer is not None or lock._readers:
                    lock._wait_to_write()
                lock._writer = me
        lock._depth += 1

    def __exit__(self, *error: object) -> None:
        lock = self._lock
        lock._depth -= 1
        if not lock._depth:
            with lock._mutex:
                lock._writer = None
                lock._let_others_go()


def reading(locks: Iterable[ReadWriteLock]) -> AbstractContextManager[None]:
    """Return the context manager that holds the locks of several tables for reading."""
    return _together(locks, ReadWriteLock.reading)


def writing(locks: Iterable[ReadWriteLock]) -> AbstractContextManager[None]:
    """Return the context manager that holds the locks of several tables for writing."""
    return _together(locks, ReadWriteLock.writing)


def _together(
    locks: Iterable[ReadWriteLock], hold: Callable[[ReadWriteLock], AbstractContextManager[None]]
) -> AbstractContextManager[None]:
    # Each lock once: taken again, it would wait for a waiting writer, which waits for this thread.
    each = set(locks)
    return hold(each.pop()) if len(each) == 1 else _one_by_one(each, hold)


@contextmanager
def _one_by_one(
    locks: Iterable[ReadWriteLock], hold: Callable[[ReadWriteLock], AbstractContextManager[None]]
) -> Iterator[None]:
    with ExitStack() as stack:
        for lock in sorted(locks, key=lambda lock: lock.number):
            stack.enter_context(hold(lock))
        yield
