"""Threads that decode stored batches before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any


def read_ahead(read: Callable[[int], Any], order: Iterable[int], threads: int) -> Generator[Any]:
    """
    Yield a function's result for each item of a sequence, in order; it is called a few items ahead of the consumer.

    An error of a call is raised in its turn. Once this generator is closed, no more calls begin.

    Args:
        read: the function, which several threads call at once.
        order: the items, in order.
        threads: the number of threads; 0: the consumer calls the function itself, on demand.
    """
    if not threads:
        yield from map(read, order)
        return
    pool, items = ThreadPoolExecutor(threads, "torchsparse_rec.data"), iter(order)
    waiting = deque(pool.submit(read, item) for item in islice(items, threads + 1))
    try:
        while waiting:
            future = waiting.popleft()
            waiting.extend(pool.submit(read, item) for item in islice(items, 1))
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
