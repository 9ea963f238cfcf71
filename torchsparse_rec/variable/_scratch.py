"""A scratch file that one object of one process has for itself, in a folder, and that is removed after use."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._lock import release_lock, take_lock

ROWS = "cold_rows"
# The file is its own lock: its first page names the process that holds it, and is not counted in positions and sizes.
_HEAD = 4096


class ScratchFile:
    """
    The file ``ROWS``, locked, in a folder that is created if it is missing; a dead process's leftovers are lost.

    It is read by a map of memory and written by calls: a call can report that a disk is full, a map would end the
    process. The folder is removed with the file if this object created it.

    Args:
        owner: who uses the file, for errors.
        path: the folder.

    Raises:
        BlockingIOError: the folder is in use by this process or another live one.
        OSError: the folder or the file cannot be made.
    """

    def __init__(self, owner: str, path: str | os.PathLike[str]):
        self._folder = Path(os.path.realpath(os.fsdecode(path)))
        self._owner = owner
        self._made = not self._folder.exists()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = take_lock(self._folder / ROWS, self._busy)

    def _busy(self, holder: str) -> str:
        return f"{self._owner}: path is in use by process {holder}; each tier needs a folder of its own"

    def grow(self, begin: int, end: int) -> Tensor:
        """
        Reserve disk space from ``begin``, where the file ends, to ``end``, and map the whole file, as uint8 ``[end]``.

        Raises:
            OSError: the disk has no room; the file stays unchanged.
        """
        try:
            if hasattr(os, "posix_fallocate"):
                with self._room_for(end - begin):
                    os.posix_fallocate(self._descriptor, _HEAD + begin, end - begin)
            else:
                self.write(begin, np.zeros(end - begin, np.uint8))
        except OSError:
            self.cut(begin)
            raise
        mapped = mmap.mmap(self._descriptor, _HEAD + end)
        mapped.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=_HEAD)

    def write(self, begin: int, data: np.ndarray) -> None:
        """
        Write bytes from ``begin`` on.

        Raises:
            OSError: the disk has no room, even where it was reserved: some file systems never write in place.
        """
        rest, place = data.reshape(-1).data, _HEAD + begin
        with self._room_for(len(rest)):
            while len(rest):
                count = os.pwrite(self._descriptor, rest, place)
                rest, place = rest[count:], place + count

    @contextmanager
    def _room_for(self, count: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"{self._owner}: path has no room for {count} bytes more: {error.strerror}"
            raise OSError(error.errno, text, str(self._folder)) from None

    def cut(self, end: int) -> None:
        """Make the file end at ``end``."""
        with suppress(OSError):
            os.ftruncate(self._descriptor, _HEAD + end)

    def disk_bytes(self) -> int:
        """Return how many bytes the file takes on the disk."""
        return os.fstat(self._descriptor).st_blocks * 512

    def release(self) -> None:
        """Remove the file, release its lock, and remove the folder if it was created here and is empty."""
        (self._folder / ROWS).unlink(missing_ok=True)
        release_lock(self._descriptor)
        if self._made:
            with suppress(OSError):  # other files are in the folder
                self._folder.rmdir()
