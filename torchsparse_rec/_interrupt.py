"""How Ctrl-C ends a command of ours: files are whole, no process is left, one line says how to go on."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

__all__ = ["command_line", "run_command"]

# The exit code of a shell for what SIGINT has ended.
_INTERRUPTED = 128 + signal.SIGINT
# Seconds that the end may take: an example draws its curves, and a ``finally`` may wait for what does not end.
_GRACE = 5.0
# Seconds until Ctrl-C is tried again: longer than the hook that asks for it, which cannot raise either.
_AGAIN = 0.02


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """
    Run a command, and end the process with its exit code; after Ctrl-C, with a line and 130.

    Ctrl-C raises ``KeyboardInterrupt`` in the command, whose ``finally`` blocks remove files that are not whole. They
    have five seconds. A ``KeyboardInterrupt`` with a text, raised anew by the command, adds the text to the line. Where
    SIGINT is ignored, as by background jobs, it stays so.

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
    said = ""
    try:
        code = main()
    except BaseException as error:
        if not came:  # else the error is a consequence: a worker is gone, a peer has hung up
            raise
        said = str(error) if isinstance(error, KeyboardInterrupt) else ""
    if came:
        sys.last_value = KeyboardInterrupt()  # as where Python prints it: DeviceLoader's threads are not waited for
        atexit._run_exitfuncs()
        _end(said)
    sys.exit(code)


def command_line(flag: str | None = None, value: object = None) -> str:
    """Return the command that runs in this process, as a shell takes it, perhaps with another value of a flag."""
    python, arguments = sys.executable, sys.argv[1:]
    if shutil.which("python") == python:
        python = "python"
    elif python.startswith(f"{os.getcwd()}/"):
        python = os.path.relpath(python)
    if flag in arguments:
        after = arguments.index(flag) + 1
        has_value = after < len(arguments) and not arguments[after].startswith("-")
        del arguments[after - 1 : after + has_value]
    return shlex.join([python, *_program(), *arguments, *([flag, str(value)] if flag else [])])


def _program() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]


def _end(said: str = "") -> NoReturn:
    """End the process and its workers. The interpreter's own end would wait for threads, or crash in torch's."""
    for process in multiprocessing.active_children():
        process.kill()
    with suppress(OSError, ValueError):  # nobody may be there to read
        sys.stdout.flush()
        if os.environ.get("RANK", "0") == "0":
            name = shlex.join(["python", *_program()])
            print(f"{name}: interrupted{said and f'; {said}'}", file=sys.stderr, flush=True)
    os._exit(_INTERRUPTED)
