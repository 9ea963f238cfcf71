"""Let threads decode stored batches before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class ReadAhead:
    """
    Calls a function on each item of a sequence, a few items ahead of the consumer.

    Args:
        read: the function, which several threads call at once.
        order: the items, in order.
        threads: the number of threads; 0: the consumer calls the function itself, on demand.
    """

    def __init__(self, read: Callable[[int], Any], order: Iterable[int], threads: int) -> None:
        self._read, self._order = read, iter(order)
        self._pool = ThreadPoolExecutor(threads, "torchsparse_rec.data") if threads else None
        self._waiting: deque[Future] = deque()
        for _ in range(threads + 1 if threads else 0):
            self._submit()

    def _submit(self) -> None:
        item = next(self._order, None)
        if item is not None and self._pool is not None:
            self._waiting.append(self._pool.submit(self._read, item))

    def __iter__(self) -> Iterator[Any]:
        """Yield the results in order; an error of a call is raised in its turn."""
        if self._pool is None:
            yield from map(self._read, self._order)
        while self._waiting:
            future = self._waiting.popleft()
            self._submit()
            yield future.result()

    def close(self) -> None:
        """Start no more calls."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
