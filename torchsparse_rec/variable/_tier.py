"""The contract of all tiers, and the checks of their arguments."""

from __future__ import annotations

import operator
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .._fork import tell_of_forks


class Tier(ABC):
    """
    A store of records of one width by key: the contract of all tiers.

    Keys are int64 ``[N]`` on the CPU, of any value, each at most once in a call; records are uint8
    ``[N, record_bytes]`` on the CPU. Any thread may call at any time: a lock runs one call at a time. A tier
    cannot be pickled or copied.

    Args:
        record_bytes: bytes of a record, at least 1.

    Raises:
        ValueError: wrong arguments, here and in all methods.
    """

    #: The tier's word in the names of storage types, without ``_``.
    kind: ClassVar[str]
    #: Whether rows lie in a folder: options must have a ``storage_path``, and a table with such rows cannot be copied.
    on_disk: ClassVar[bool] = False
    #: The id of the only process that may use the tier; None: forked processes have copies of their own.
    _process: int | None = None

    @classmethod
    def of_table(cls, record_bytes: int, folder: str | None, pin_memory: bool) -> Tier:
        """
        Make a tier of a table.

        Args:
            record_bytes: bytes of a record.
            folder: a folder for this tier alone, in the options' ``storage_path``; None unless it is :attr:`on_disk`.
            pin_memory: whether a GPU is to copy from the records that :meth:`get` returns.
        """
        return cls(record_bytes)

    def __init__(self, record_bytes: int):
        self._name = type(self).__name__
        self.record_bytes = at_least_one(f"{self._name}: record_bytes", record_bytes)
        self._lock = threading.RLock()
        self._is_open = True
        tell_of_forks(self)

    def after_fork(self) -> None:
        """Make a new lock in a forked process, which lacks the thread that may have held the old one."""
        self._lock = threading.RLock()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"{self._name} cannot be pickled or copied: it is scratch space of one process; save the table")

    def __len__(self) -> int:
        """Return the number of records."""
        with self._opened("len"):
            return self._count()

    def nbytes(self) -> int:
        """Return how many bytes of memory and disk the tier takes."""
        with self._opened("nbytes"):
            return self._bytes()

    def get(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """
        Read the records of keys.

        Args:
            keys: int64 ``[N]``, distinct.

        Returns:
            ``found``, bool ``[N]``, and the records, uint8 ``[N, record_bytes]``: zeros where the key is missing.
        """
        checked = self._checked_keys("get", keys)
        with self._opened("get"):
            return self._get(checked)

    def put(self, keys: Tensor, records: Tensor) -> None:
        """
        Write records; records of present keys are replaced. If it raises, each key has its new or its old record.

        Args:
            keys: int64 ``[N]``, distinct.
            records: uint8 ``[N, record_bytes]``.
        """
        checked = self._checked_keys("put", keys)
        self._check_tensor("put", "records", records, torch.uint8, (len(keys), self.record_bytes))
        with self._opened("put"):
            if len(keys) > 0:
                self._put(checked, records.contiguous())

    def erase(self, keys: Tensor) -> int:
        """
        Remove the records of keys.

        Args:
            keys: int64 ``[N]``, distinct; missing ones are no error.

        Returns:
            How many of the keys had a record.
        """
        checked = self._checked_keys("erase", keys)
        with self._opened("erase"):
            return self._erase(checked)

    def items(self, batch: int = 65536) -> Iterator[tuple[Tensor, Tensor]]:
        """
        Iterate over all records, in ascending order of their keys.

        Args:
            batch: the number of records at a time, at least 1.

        Yields:
            Keys, int64 ``[M]``, and records, uint8 ``[M, record_bytes]``. Each batch is read in one locked
            call. Keys inserted while the iterator lives may be left out; those erased before their batch are left out.
        """
        size = at_least_one(f"{self._name}.items: batch", batch)
        with self._opened("items"):
            return self._items(size)

    def _items(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        with self._opened("items"):
            keys = self._sorted_keys()
        for begin in range(0, len(keys), size):
            batch = keys[begin : begin + size]
            with self._opened("items"):
                found, records = self._get(batch)
            if found.any():
                yield torch.from_numpy(batch)[found], records[found]

    def clear(self) -> None:
        """Remove all records, and free their memory and disk space."""
        with self._opened("clear"):
            self._clear()

    def close(self) -> None:
        """Release the tier's memory and files; it cannot be used afterwards. Closing twice is no error."""
        self._check_process("close")
        with self._lock:
            if self._is_open:
                self._is_open = False
                self._close()

    @contextmanager
    def _opened(self, method: str) -> Iterator[None]:
        """Hold the lock for one call; raise ``RuntimeError`` if the tier is closed or another process's."""
        self._check_process(method)
        with self._lock:
            if not self._is_open:
                raise RuntimeError(f"{self._name}.{method}: the tier is closed")
            yield

    def _check_process(self, method: str) -> None:
        """Raise ``RuntimeError`` in a forked process, before it waits for a lock that may never be released."""
        if self._process not in (None, os.getpid()):
            text = f"the tier belongs to process {self._process}, and this one is forked from it"
            raise RuntimeError(f"{self._name}.{method}: {text}")

    def _checked_keys(self, method: str, keys: Tensor) -> np.ndarray:
        self._check_tensor(method, "keys", keys, torch.int64, (keys.numel(),) if isinstance(keys, Tensor) else ())
        array = keys.contiguous().numpy()
        # numpy's sort: torch's uses several threads, and waits for cores that other threads keep busy.
        ordered = np.sort(array)
        if (repeated := ordered[1:] == ordered[:-1]).any():
            key = int(ordered[:-1][repeated][0])
            first, second = np.flatnonzero(array == key)[:2]
            raise ValueError(
                f"{self._name}.{method}: keys must be distinct, got {key} at positions {first} and {second}"
            )
        return array

    def _check_tensor(self, method: str, argument: str, x: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        wanted = f"{self._name}.{method}: {argument} must be {str(dtype).removeprefix('torch.')}"
        wanted += f" {list(shape) if argument == 'records' else '[N]'} on the CPU"
        if not isinstance(x, Tensor):
            raise ValueError(f"{wanted}, got {x!r}")
        if x.dtype != dtype or x.shape != shape or x.device.type != "cpu":
            raise ValueError(f"{wanted}, got {str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}")

    @abstractmethod
    def _count(self) -> int: ...
    @abstractmethod
    def _bytes(self) -> int: ...
    @abstractmethod
    def _get(self, keys: np.ndarray) -> tuple[Tensor, Tensor]: ...
    @abstractmethod
    def _put(self, keys: np.ndarray, records: Tensor) -> None: ...
    @abstractmethod
    def _erase(self, keys: np.ndarray) -> int: ...
    @abstractmethod
    def _sorted_keys(self) -> np.ndarray: ...
    @abstractmethod
    def _clear(self) -> None: ...
    @abstractmethod
    def _close(self) -> None: ...


def at_least_one(what: str, value: Any) -> int:
    """Return the value as an integer; raise ``ValueError`` unless it is one of at least 1."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{what} must be an integer of at least 1, got {value!r}")
    return number
