"""How Ctrl-C ends a command of ours: files are whole, no process is left, one line says how to go on."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

__all__ = ["run_command"]

# The exit code of a shell for what SIGINT has ended.
_INTERRUPTED = 128 + signal.SIGINT
# Seconds that the end may take: a ``finally`` may wait for a thread or a worker process that does not end.
_GRACE = 2.0
# Seconds until Ctrl-C is tried again: longer than the hook that asks for it, which cannot raise either.
_AGAIN = 0.02


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """
    Run a command, and end the process with its exit code; after Ctrl-C, with a line and 130.

    Ctrl-C raises ``KeyboardInterrupt`` in the command, whose ``finally`` blocks remove files that are not whole. They
    have two seconds. Where SIGINT is ignored, as by background jobs, it stays so.

    Args:
        main: the command; it returns the exit code, None for 0.
    """
    came: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        if came:  # a second Ctrl-C disturbs nothing
            return
        came.append(number)
        timer = threading.Timer(_GRACE, _end)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    def interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
        # Python drops what a ``__del__`` or a weak reference's callback raises: the command has not seen it.
        if came and unraisable.exc_type is KeyboardInterrupt:
            came.clear()
            again = threading.Timer(_AGAIN, signal.raise_signal, (signal.SIGINT,))
            again.daemon = True  # a command that ends meanwhile has ended
            again.start()
        else:
            sys.__unraisablehook__(unraisable)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = interrupt_again
    try:
        code = main()
    except BaseException:
        if not came:  # else the error is a consequence: a worker is gone, a peer has hung up
            raise
    if came:
        sys.last_value = KeyboardInterrupt()  # as where Python prints it: DeviceLoader's threads are not waited for
        atexit._run_exitfuncs()
        _end()
    sys.exit(code)


def _end() -> NoReturn:
    """End the process and its workers. The interpreter's own end would wait for threads, or crash in torch's."""
    for process in multiprocessing.active_children():
        process.kill()
    spec = sys.modules["__main__"].__spec__
    name = sys.argv[0] if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
    with suppress(OSError, ValueError):  # nobody may be there to read
        sys.stdout.flush()
        if os.environ.get("RANK", "0") == "0":
            line = f"{name}: interrupted; the same command goes on from its last checkpoint, if it has written one"
            print(line, file=sys.stderr, flush=True)
    os._exit(_INTERRUPTED)
