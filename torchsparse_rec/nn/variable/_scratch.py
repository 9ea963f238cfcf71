"""A folder that one object of one process has for itself, and that leaves nothing behind."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ._lock import release_lock, take_lock

# The lock names the process that holds it; beside it lies the one file of rows.
LOCK, ROWS = "cold_rows.lock", "cold_rows.mdb"


class ScratchFolder:
    """
    Take a folder, made if it is not there, and clear what a process that died has left in it.

    Only files of the names above are ever removed; the folder itself only if it was made here.

    Args:
        owner: for whom, named in errors.
        path: the folder.

    Raises:
        BlockingIOError: it is taken, by this process or another one that lives.
        OSError: it cannot be made or written.
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
        Have room on the disk for bytes ``begin`` to ``end`` of the rows.

        Raises:
            OSError: there is none; what is there stays as it is.
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
        """What the rows take on the disk."""
        return self.rows.stat().st_blocks * 512

    def release(self) -> None:
        """Give the folder back, without the rows."""
        self.rows.unlink(missing_ok=True)
        (self.path / LOCK).unlink(missing_ok=True)
        release_lock(self._descriptor)
        if self._made:
            with suppress(OSError):  # somebody else's files are in it
                self.path.rmdir()
