"""A scratch folder that one object of one process has for itself, and that is removed after use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ._lock import release_lock, take_lock

# The lock names the process that holds it; beside it lies the one file of rows.
LOCK, ROWS = "cold_rows.lock", "cold_rows.mdb"


class ScratchFolder:
    """
    A locked folder, created if it is missing, and cleared of the rows that a process that died has left in it.

    Only files named ``LOCK`` or ``ROWS`` are ever removed; the folder itself only if this object created it.

    Args:
        owner: who uses the folder, for errors.
        path: the folder.

    Raises:
        BlockingIOError: the folder is in use by this process or another live one.
        OSError: the folder cannot be made or written.
    """

    def __init__(self, owner: str, path: str | os.PathLike[str]):
        self.path = Path(os.path.realpath(os.fsdecode(path)))
        self.rows = self.path / ROWS
        self._owner = owner
        self._made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        self._descriptor = take_lock(self.path / LOCK, self._busy)
        self.rows.unlink(missing_ok=True)

    def _busy(self, holder: str) -> str:
        return f"{self._owner}: path is in use by process {holder}; each tier needs a folder of its own"

    def reserve(self, begin: int, end: int) -> None:
        """
        Reserve disk space for bytes ``begin`` to ``end`` of the file of rows.

        Raises:
            OSError: the disk has no room; the file stays as it is.
        """
        with open(self.rows, "r+b") as file:
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), begin, end - begin)
                else:
                    file.seek(begin)
                    for place in range(begin, end, 1 << 20):
                        file.write(bytes(min(1 << 20, end - place)))
                    file.flush()
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), begin)
                text = f"{self._owner}: path has no room for {end - begin} bytes more: {error.strerror}"
                raise OSError(error.errno, text, str(self.path)) from None

    def disk_bytes(self) -> int:
        """Return how many bytes the file of rows takes on the disk."""
        return self.rows.stat().st_blocks * 512

    def release(self) -> None:
        """Remove the rows, release the lock, and remove the folder if it was created here and is empty."""
        self.rows.unlink(missing_ok=True)
        (self.path / LOCK).unlink(missing_ok=True)
        release_lock(self._descriptor)
        if self._made:
            with suppress(OSError):  # other files are in the folder
                self.path.rmdir()
