"""Private mappings of parts of a file. They hold no file descriptors: a process may have only few."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from typing import Any

import numpy as np

# Linux's MADV_POPULATE_READ, which Python has no name for: it maps all pages at once, instead of by many page faults.
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
    """A private mapping of a part of a file, unmapped with this object; the arrays in it keep the object alive."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        # Python's own mmap duplicates the descriptor (before 3.13 always): a thousand batches would use up all.
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
    Map ``size`` bytes of a file from ``start`` on as a private uint8 array: writing to it does not change the file.

    ``start`` must be a multiple of ``mmap.ALLOCATIONGRANULARITY``.

    Raises:
        OSError: the process may have no more mappings.
    """
    return np.asarray(_Mapping(descriptor, start, size))


def populate(address: int, size: int) -> None:
    """Map the pages of a range of memory before they are first touched, where the system can."""
    first = address - address % mmap.PAGESIZE
    _libc().madvise(first, size + address - first, _POPULATE_READ)
