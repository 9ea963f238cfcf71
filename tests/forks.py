"""Work in forked processes, while other threads of this one hold locks."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest

needs_fork = pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="the system has no forks")


def forked(work: Callable[[], Any]) -> str:
    """Return the result of ``work`` in a forked process, or the error's text; empty if that process hangs."""
    out, into = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads
        child = os.fork()
    if child == 0:
        try:
            os.write(into, str(work()).encode())
        except BaseException as error:
            os.write(into, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(into)
    for _ in range(2000):
        if os.waitpid(child, os.WNOHANG)[0]:
            break
        time.sleep(0.005)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    with open(out) as answer:
        return answer.read()


class Held:
    """A block during which another thread holds a lock."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._in, self._go = lock, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)

    def _hold(self) -> None:
        with self._lock:
            self._in.set()
            self._go.wait()

    def __enter__(self) -> None:
        self._thread.start()
        self._in.wait()

    def __exit__(self, *error: object) -> None:
        self._go.set()
        self._thread.join()
