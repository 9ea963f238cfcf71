"""How Ctrl-C ends a command of ours: within two seconds, with one line, exit code 130 and no process left behind."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

__all__ = ["INTERRUPTED", "run_command"]

#: The exit code of a shell for what SIGINT has ended.
INTERRUPTED = 128 + signal.SIGINT
# Seconds for the work before the end: incomplete files are removed, worker processes ended.
_GRACE = 1.5


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """
    Run a command, and end the process with its exit code; after Ctrl-C, with a line and 130.

    Ctrl-C raises ``KeyboardInterrupt`` in the command, which may still remove files and end processes. After a second
    and a half the process ends whatever still runs: a batch that a thread is taking, or a long kernel, which no
    exception reaches. Only code in C++ that keeps Python's lock delays it, until it returns.

    Where SIGINT is ignored, as by the background jobs of a shell, it stays so.

    Args:
        main: the command; it returns the exit code, None for 0.

    Example:
        >>> try:
        ...     run_command(lambda: 3)
        ... except SystemExit as end:
        ...     print(end.code)
        3
    """
    interrupt = _Interrupt()
    code: int | None = INTERRUPTED
    try:
        with interrupt:
            code = main()
    except BaseException:
        # After Ctrl-C the command was asked to end, and its error is a consequence: a worker is gone, a queue is
        # closed.
        if not interrupt.came:
            raise
    if interrupt.came:
        interrupt.end()
    sys.exit(code)


class _Interrupt:
    """
    What Ctrl-C does within a ``with`` block of the main thread: it raises ``KeyboardInterrupt``, once.

    Besides Python's handler, which runs between two of the main thread's bytecodes, the signal wakes a thread, which
    ends the process if the main thread has not.
    """

    def __init__(self) -> None:
        self.came = False
        self._hears = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        self._ending = threading.Lock()

    def __enter__(self) -> None:
        global _heard
        if not self._hears:
            return
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        threading.Thread(target=self._watch, args=(read,), daemon=True, name="Ctrl-C").start()
        self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        _heard = self
        signal.signal(signal.SIGINT, self._interrupt)

    def __exit__(self, *error: object) -> None:
        if self._hears and not self.came:
            self.forget(signal.default_int_handler)
            os.close(self._write)

    def forget(self, handler: Any) -> None:
        """Let SIGINT do something else."""
        global _heard
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(self._before)
        _heard = None

    def _interrupt(self, number: int, frame: object) -> None:
        if not self.came:
            self.came = True
            # An exception within a destructor or another thread would be printed, with its traceback.
            sys.unraisablehook = lambda error: None
            threading.excepthook = lambda error: None
            raise KeyboardInterrupt

    def _watch(self, read: int) -> None:
        """End the process some time after a SIGINT; until then, wait, as a thread's body."""
        while (number := os.read(read, 1)) != bytes([signal.SIGINT]):
            if not number:  # the block has ended
                os.close(read)
                return
        time.sleep(_GRACE)
        self._leave()

    def end(self) -> NoReturn:
        """End the process, after the functions that are registered for its exit."""
        sys.last_value = KeyboardInterrupt()  # as where Python prints it: DeviceLoader's threads are not waited for
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        atexit._run_exitfuncs()
        self._leave()

    def _leave(self) -> NoReturn:
        """
        End the process at once, with its worker processes, by whichever thread comes first.

        The interpreter's own end would wait for threads, or end one within torch, which aborts the process.
        """
        with self._ending:
            for process in multiprocessing.active_children():
                process.kill()
            with suppress(OSError):  # nobody may be there to read it
                os.write(2, f"{_command()}: interrupted\n".encode())
            os._exit(INTERRUPTED)


_heard: _Interrupt | None = None


def _ignore_in_child() -> None:
    """Ignore SIGINT in a forked worker process, which the command ends; the signal's pipe is the command's alone."""
    if _heard is not None:
        _heard.forget(signal.SIG_IGN)


os.register_at_fork(after_in_child=_ignore_in_child)


def _command() -> str:
    """Return how the command that this process runs is typed."""
    spec = sys.modules["__main__"].__spec__
    return sys.argv[0] if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
