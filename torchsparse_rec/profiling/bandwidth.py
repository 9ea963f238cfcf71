"""Measure the bandwidth of this machine's memory, to compare lookups and updates with it."""

from __future__ import annotations

import functools
import statistics
from time import perf_counter

import torch

from ._experiments import wait

__all__ = ["copy_bytes_per_second"]

_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
_COPIES = 12


@functools.lru_cache(maxsize=8)
def copy_bytes_per_second(device: torch.device) -> float:
    """
    Return the bytes a second, read and written, of a copy between two buffers too large for the cache.

    It is measured once per device.

    Args:
        device: the device of the buffers, which have 64 MB each on the CPU, 512 MB on CUDA.

    Returns:
        Bytes a second.

    Example:
        >>> copy_bytes_per_second(torch.device("cpu")) > 1e8
        True
    """
    n = _ELEMENTS.get(device.type, _ELEMENTS["cpu"])
    source, target = torch.ones(n, device=device), torch.empty(n, device=device)  # ones: all pages of zeros may be one
    seconds = []
    for _ in range(_COPIES):
        wait(device)
        start = perf_counter()
        target.copy_(source)
        wait(device)
        seconds.append(perf_counter() - start)
    return 2 * n * source.element_size() / statistics.median(seconds)
