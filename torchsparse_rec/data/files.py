"""The error that names file and place, and files that appear whole or not at all: all formats share them."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeAlias

#: A file's name.
PathLike: TypeAlias = str | os.PathLike[str]


class DataError(ValueError):
    """
    An error in a file: at some place its content is wrong.

    Args:
        path: the file's name.
        offset: the place in the file: a byte, counted from 0, or for text formats a line, counted from 1. None: the
            file as a whole.
        problem: the fault that was found there, and what was expected.
        unit: ``"byte"``, or ``"line"`` for text formats.

    Example:
        >>> from torchsparse_rec.data import DataError
        >>> print(DataError("train.txt", 3, "expected 40 fields, got 39", unit="line"))
        train.txt: line 3: expected 40 fields, got 39
    """

    def __init__(self, path: PathLike, offset: int | None, problem: str, *, unit: str = "byte"):
        self.path = os.fsdecode(path)
        self.offset = offset
        self.problem = problem
        self.unit = unit
        place = "" if offset is None else f" {unit} {offset}:"
        super().__init__(f"{self.path}:{place} {problem}")

    def __reduce__(self) -> tuple:
        """Pickle the error as its arguments, so that a worker process can hand it to the main one."""
        return _data_error, (self.path, self.offset, self.problem, self.unit)


def _data_error(path: str, offset: int | None, problem: str, unit: str) -> DataError:
    return DataError(path, offset, problem, unit=unit)


@contextmanager
def whole_file(path: PathLike) -> Iterator[BinaryIO]:
    """
    Open a file for writing that bears its name only once it is complete.

    The file is written under a temporary name in the same folder, synced to the disk, and renamed when the block ends.
    If the block raises, or the disk is full, it is removed, and an earlier file of that name is untouched. A file that
    replaces another takes over its permissions. Where ``path`` is a symbolic link, the file behind it is replaced.

    Args:
        path: the final name.

    Yields:
        The file, for bytes.

    Raises:
        OSError: the file cannot be written, or ``path`` is a folder, a pipe or a device.
        ValueError: ``path`` is empty.

    Example:
        >>> import tempfile, pathlib
        >>> from torchsparse_rec.data.files import whole_file
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with whole_file(folder / "rows.bin") as file:
        ...     _ = file.write(b"abc")
        >>> (folder / "rows.bin").read_bytes(), len(list(folder.iterdir()))
        (b'abc', 1)
    """
    if not os.fspath(path):
        raise ValueError("path must name a file, got an empty name")
    target = Path(os.path.realpath(os.fsdecode(path)))
    mode = _mode_to_keep(target)
    # The temporary name does not contain the final one, which may be as long as names can be.
    partial = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            os.chmod(partial, mode)
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    _sync_folder(target.parent)


def _mode_to_keep(target: Path) -> int | None:
    """Return the permissions of the file that will be replaced, or None if there is none."""
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if not stat.S_ISREG(status.st_mode):
        raise FileExistsError(errno.EEXIST, "it is no regular file, and is not replaced", str(target))
    return stat.S_IMODE(status.st_mode)


def _sync_folder(folder: Path) -> None:
    """Sync a folder's new name to the disk, where folders can be opened."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
