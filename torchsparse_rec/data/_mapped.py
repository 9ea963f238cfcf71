"""Private mappings of parts of a file that hold no file descriptor, of which a process may have few."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from typing import Any

import numpy as np

# Linux's MADV_POPULATE_READ, which Python has no name for: all pages at once in place of one fault for each few.
_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, number]
    return libc


class _Mapping:
    """Memory that is given back with this object, which the arrays on it keep."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        # Python's own mmap duplicates the descriptor (before 3.13 always): a thousand batches would be too many.
        self._libc = _libc()
        address = self._libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, start)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._address, self._size = address, size
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if getattr(self, "_address", None) is not None:
            self._libc.munmap(self._address, self._size)


def mapped(descriptor: int, start: int, size: int) -> np.ndarray:
    """
    The bytes of a file from ``start`` on, a multiple of ``mmap.ALLOCATIONGRANULARITY``: written to, they are copied.

    Raises:
        OSError: if the process may have no more mappings.
    """
    return np.asarray(_Mapping(descriptor, start, size))


def populate(address: int, size: int) -> None:
    """Have pages in the process before they are touched, where the system can."""
    first = address - address % mmap.PAGESIZE
    _libc().madvise(first, size + address - first, _POPULATE_READ)
