"""Threads that work ahead of a consumer: one that takes items, or several that call a function on each."""

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
#: Seconds that an abandoned iterator waits for its thread to finish the item it has begun; a pipe may never answer.
_PATIENCE = 5.0
_NAME = "torchsparse_rec.data.tfrecord"


def ahead(items: Iterator[T]) -> Iterator[T]:
    """
    Yield the items of an iterator; a thread takes each one while the one before is in use.

    The thread begins when the first item is asked for. While one item waits, another is being made: no more are in
    memory. An error of ``items`` is raised in its turn. Once this iterator is closed or deleted, the thread closes
    ``items`` and ends.

    Args:
        items: the iterator; if it is a generator, its code runs in the thread, on one core.

    Example:
        >>> list(ahead(iter([1, 2, 3])))
        [1, 2, 3]
    """
    ready: queue.Queue = queue.Queue(1)
    stop, begun = threading.Event(), threading.Event()
    thread = threading.Thread(target=_produce, args=(items, ready, stop, begun), daemon=True, name=_NAME)

    def end() -> None:
        stop.set()
        while thread.is_alive() and not ready.empty():  # the thread may be waiting for room
            ready.get_nowait()
        thread.join(_PATIENCE)

    # If the interpreter ends a thread that is within torch, the process crashes.
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
            # The consumer may free the item while this waits for the next one.
            del item
    finally:
        end()
        atexit.unregister(end)


def mapped(function: Callable[[T], R], items: Iterator[T], threads: int) -> Iterator[R]:
    """
    Yield a function's result for each item, in order; several threads call it, each computing on one core.

    On one core, no operator synchronises threads: waiting for a busy core would cost more than the work. As many calls
    as there are threads begin before their results are asked for. An error of ``items`` or of the function is raised in
    its turn.

    Args:
        function: the function, which any of the threads may call.
        items: the items, which the consumer's thread takes.
        threads: the number of threads; 1: the consumer calls the function itself, on demand.

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
    """Make the operators that this thread calls use one core."""
    torch.get_num_threads()  # a thread's first call of it would undo an earlier set_num_threads
    torch.set_num_threads(1)


def _keep_threads_of_others() -> None:
    """Set this thread's number of cores again: else torch would give new threads the number another thread has set."""
    torch.set_num_threads(torch.get_num_threads())


def _produce(items: Iterator[Any], ready: queue.Queue, stop: threading.Event, begun: threading.Event) -> None:
    """Put items into a queue, as a thread's body, until they end or fail, or ``stop`` is set."""
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
