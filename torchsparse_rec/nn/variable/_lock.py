"""A file that one object of one process has locked."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["release_lock", "take_lock"]


def take_lock(path: Path, busy: Callable[[str], str]) -> int:
    """
    Lock a file, made if it is not there, until :func:`release_lock` or the end of the process.

    Its content is the number of the process: whatever else is there under its name is neither followed nor written.

    Args:
        path: of the file. Who holds the lock may remove it.
        busy: the error's text, given the process that holds the lock.

    Returns:
        The file's descriptor.

    Raises:
        BlockingIOError: somebody else holds it, in this process or another one; it names the folder.
        OSError: it cannot be made, or is a link or no regular file; it names the file.
    """
    import fcntl  # POSIX's alone, as are these locks

    while True:
        descriptor = _opened(path)
        try:
            # Of the open file, not of the process: two of one process exclude each other too.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it may have removed it before we had it: then it locks nothing.
            if _is_at(path, descriptor):
                # Who it is only helps a person: on a full disk it is not said.
                with suppress(OSError):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace") or "unknown"
            os.close(descriptor)
            raise BlockingIOError(errno.EWOULDBLOCK, busy(holder), str(path.parent)) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _opened(path: Path) -> int:
    text = "a lock must be a file of its own, got a link or what is no file: remove it"
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise OSError(error.errno, text, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, text, str(path))
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def release_lock(descriptor: int) -> None:
    """Let go of it. Not only closed: a process that was forked meanwhile has it open too."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
