"""Threads that are ahead of who asks: one that takes items, several that make something of each."""

from __future__ import annotations

import atexit
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
#: Seconds that the thread of an abandoned iterator may take for what it has begun; a pipe may never answer.
_PATIENCE = 5.0
_NAME = "torchsparse_rec.data.tfrecord"


def ahead(items: Iterator[T]) -> Iterator[T]:
    """
    The same items, each of which a thread has taken while the one before was in use.

    The thread begins with the first item that is asked for. One item waits, another one is being made: that is all
    the memory that it takes. What ``items`` raises is raised in its turn. Once this iterator is closed, or nobody
    holds it, the thread closes ``items`` and ends.

    Args:
        items: what the thread takes; a generator, whose code runs in the thread, on one core.

    Example:
        >>> list(ahead(iter([1, 2, 3])))
        [1, 2, 3]
    """
    ready: queue.Queue = queue.Queue(1)
    stop, begun = threading.Event(), threading.Event()
    thread = threading.Thread(target=_produce, args=(items, ready, stop, begun), daemon=True, name=_NAME)

    def end() -> None:
        stop.set()
        while thread.is_alive() and not ready.empty():  # it may be waiting for room
            ready.get_nowait()
        thread.join(_PATIENCE)

    # A thread that the interpreter ends within torch takes the process down.
    atexit.register(end)
    thread.start()
    begun.wait()
    _keep_threads_of_others()
    try:
        while True:
            item, error, more = ready.get()
            if error is not None:
                raise error
            if not more:
                return
            yield item
            # Nothing of it is held here while the next one is waited for.
            del item
    finally:
        end()
        atexit.unregister(end)


def mapped(function: Callable[[T], R], items: Iterator[T], threads: int) -> Iterator[R]:
    """
    What a function makes of each item, in order, by several threads, each of which computes on one core.

    That needs no meeting of threads within an operator, where the wait for a busy core costs more than the work. As
    many items as there are threads are begun before they are asked for. What ``items`` or the function raises is raised
    in its turn.

    Args:
        function: called by any of the threads.
        items: taken by the thread that asks.
        threads: how many; 1: whoever asks computes, on demand.

    Example:
        >>> list(mapped(abs, iter([-1, 2, -3]), 2))
        [1, 2, 3]
    """
    if threads == 1:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(threads, _NAME, _compute_on_one_core)
    begun = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(begun.wait)
    begun.wait()
    _keep_threads_of_others()
    waiting: deque[Future[R]] = deque()
    error: Exception | None = None
    try:
        while True:
            try:
                while error is None and len(waiting) < threads:
                    waiting.append(pool.submit(function, next(items)))
            except Exception as caught:
                error = caught
            if waiting:
                yield waiting.popleft().result()
            elif isinstance(error, StopIteration):
                return
            elif error is not None:
                raise error
    finally:
        pool.shutdown(cancel_futures=True)
        if isinstance(items, Generator):
            items.close()


def _compute_on_one_core() -> None:
    """The operators that this thread calls."""
    torch.get_num_threads()  # the first question of a thread would undo what it has set before
    torch.set_num_threads(1)


def _keep_threads_of_others() -> None:
    """What a thread has set for itself torch gives to all new ones too, unless it is set again."""
    torch.set_num_threads(torch.get_num_threads())


def _produce(items: Iterator[Any], ready: queue.Queue, stop: threading.Event, begun: threading.Event) -> None:
    """The thread: hands over until the items end, fail, or nobody wants more."""
    _compute_on_one_core()
    begun.set()
    try:
        for item in items:
            if stop.is_set():
                break
            ready.put((item, None, True))
            del item
            if stop.is_set():
                break
        if isinstance(items, Generator):
            items.close()
        end: tuple[None, BaseException | None, bool] = (None, None, False)
    except BaseException as error:
        end = (None, error, False)
    if not stop.is_set():
        ready.put(end)
