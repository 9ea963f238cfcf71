"""A lock file that one object of one process holds."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["release_lock", "take_lock"]


# The descriptors of the locks that this process holds, or waits for.
_held: set[int] = set()


def _after_fork() -> None:
    """
    Release, in a forked process, the files that its parent has locked: else the locks would outlive the parent.

    Their descriptors stay in use, for ``/dev/null``: code that has one here may still close it, and hits no other file.
    """
    if _held:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in _held:
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)
        _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def take_lock(path: Path, busy: Callable[[str], str] | None = None) -> int:
    """
    Lock a file until :func:`release_lock` or the end of the process; create it if it is missing.

    Processes that are forked meanwhile do not hold the lock.

    The file contains the process's id. A link, or anything but a regular file, under its name is refused.

    Args:
        path: the name of the file, which the holder of the lock may remove.
        busy: a function that makes the error's text from the id of the process that holds the lock. None: wait for it.

    Returns:
        The file's descriptor.

    Raises:
        BlockingIOError: the lock is held already, in this process or another one; the error names the folder.
        OSError: the file cannot be made, or is a link or no regular file; the error names the file.
    """
    import fcntl  # only on POSIX systems, as are these locks

    while True:
        descriptor = _opened(path)
        try:
            # The lock belongs to the open file, not to the process: two holders in one process exclude each other too.
            fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy is not None else 0))
            # The last holder may have removed the file before we locked it: then the lock guards nothing.
            if _is_at(path, descriptor):
                # The id only helps people: on a full disk the file stays empty.
                with suppress(OSError):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
        except BlockingIOError:
            assert busy is not None
            holder = os.pread(descriptor, 20, 0).rstrip(b"\0").decode(errors="replace") or "unknown"
            _close(descriptor)
            raise BlockingIOError(errno.EWOULDBLOCK, busy(holder), str(path.parent)) from None
        except BaseException:
            _close(descriptor)
            raise
        _close(descriptor)


def _close(descriptor: int) -> None:
    _held.discard(descriptor)
    os.close(descriptor)


def _opened(path: Path) -> int:
    text = "a lock must be a regular file, got a link or something else: remove it"
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise OSError(error.errno, text, str(path)) from None
        raise
    _held.add(descriptor)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        _close(descriptor)
        raise OSError(errno.EINVAL, text, str(path))
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def release_lock(descriptor: int) -> None:
    """Release a lock of :func:`take_lock`. Closing is not enough: a process forked by C code has the file open too."""
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_UN)
    _close(descriptor)
