"""
``python -m benchmarks --beside FOLDER``: rows beside the same rows of another checkout, instead of their peers.

Both checkouts must be built, for this Python's torch. Each runs in its own process, as a process can have the operators
of only one. The blocks of the two alternate.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from .machine import ROOT
from .rows import Call, Case, Options, Row, UnavailableError
from .timing import Pair, compare

# The least ratio to the other checkout, so that no row becomes slower unseen.
TARGET = 0.95


class _Side:
    """A process of ``beside_side.py``, which times rows of one checkout."""

    def __init__(self, folder: Path, options: Options) -> None:
        self._folder = folder
        # By -c, so that the folder comes first on Python's path, and by its path, as the folder may not have it.
        run = f"import runpy; runpy.run_path({str(Path(__file__).with_name('beside_side.py'))!r})"
        what = json.dumps([options.device, options.quick, options.threads])
        self._process = subprocess.Popen(
            [sys.executable, "-c", run, what], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, wanted: str | int) -> list[float]:
        """Make the call of a row, given its name, or return the milliseconds of so many calls."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(wanted), file=self._process.stdin, flush=True)
            answer = json.loads(self._process.stdout.readline() or '"its process has ended"')
        except BrokenPipeError:
            answer = "its process has ended"
        if isinstance(answer, str):
            raise UnavailableError(f"{self._folder}: {answer}")
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


class Beside:
    """
    This checkout and another one, whose rows are timed beside each other. Use it as a context.

    Args:
        folder: the other checkout.
        options: the options of all rows.
    """

    def __init__(self, folder: Path, options: Options) -> None:
        self._options, self._name = options, folder.resolve().name
        self._sides = [_Side(ROOT, options), _Side(folder, options)]

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *error: Any) -> None:
        for side in self._sides:
            side.end()

    def row(self, row: Row) -> Row:
        """Return a row with the other checkout as its only peer."""

        def build(options: Options) -> Case:
            case = row.build(options)
            return replace(case, peers={self._name: _no_call}, pair=lambda _: self._pair(row.name))

        return replace(row, build=build, targets={self._name: TARGET})

    def _pair(self, name: str) -> Pair:
        for side in self._sides:
            side.ask(name)

        def clock(side: Any, calls: int, _: str) -> list[float]:
            return side.ask(calls)  # type: ignore[no-any-return]

        here, there = self._sides
        return compare(here, there, self._options.device, self._options.quick, clock)  # type: ignore[arg-type]


def _no_call() -> Call:
    raise AssertionError("the pair is timed by Case.pair")
