"""Files that appear whole or not at all, and that survive a loss of power once they are written."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeAlias

__all__ = ["PathLike", "make_folder", "naming", "new_file", "sync_folder", "whole_file"]

#: A file's name.
PathLike: TypeAlias = str | os.PathLike[str]


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
        The file, for bytes. A library that opens files itself may write to its ``name``.

    Raises:
        OSError: the file cannot be written, or ``path`` is a folder, a pipe or a device.
        ValueError: ``path`` is empty.

    Example:
        >>> import tempfile, pathlib
        >>> from torchsparse_rec.files import whole_file
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
        with new_file(partial) as file:
            yield file
        if mode is not None:
            os.chmod(partial, mode)
        os.replace(partial, target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    with suppress(OSError):  # the file has its name, and not all systems open folders
        sync_folder(target.parent)


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


@contextmanager
def new_file(path: PathLike) -> Iterator[BinaryIO]:
    """Open a file for writing bytes that is not there yet, and sync it to the disk when the block ends."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def naming(path: PathLike) -> Iterator[None]:
    """Add the file's name to an ``OSError`` of reading or writing that lacks it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, and sync them to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    if missing:
        os.makedirs(path, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def sync_folder(path: PathLike) -> None:
    """Sync the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync folders, and need not.
        if error.errno != errno.EINVAL:
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)
