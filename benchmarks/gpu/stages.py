"""Stages: commands with time limits, each of which leaves what it found in a file, and how each of them ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Seconds from SIGTERM to SIGKILL.
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Stage:
    """A command, and the most seconds that it gets."""

    name: str
    seconds: float
    # Returns the command, given the seconds that it has from now on.
    command: Callable[[float], list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    # Whether it runs unless other stages are asked for.
    by_default: bool = True
    # Why it cannot run here.
    skip: str | None = None
    # A regular expression of the command's output where it cannot work on this machine.
    skip_if_printed: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How a stage ended: passed, failed, timed out or skipped."""

    name: str
    result: str
    seconds: float
    note: str


def run_stage(stage: Stage, limit: float, folder: Path, log: Path) -> Outcome:
    """
    Run a stage's command; print its output, and write it to a file line by line.

    Args:
        stage: the stage to run.
        limit: the seconds after which the command is ended, with everything it started.
        folder: the working folder of the command.
        log: the file to which output is appended.

    Returns:
        The outcome.
    """
    if stage.skip is not None:
        print(f"== {stage.name}: skipped, {stage.skip}", flush=True)
        return Outcome(stage.name, "skipped", 0.0, stage.skip)
    print(f"== {stage.name} (at most {limit:.0f} s)", flush=True)
    began, timed_out, unusable = time.monotonic(), threading.Event(), None
    process = subprocess.Popen(
        stage.command(limit),
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **stage.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    watch = threading.Thread(target=_end_after, args=(process, limit, timed_out), daemon=True)
    watch.start()
    assert process.stdout is not None
    try:
        with process.stdout, log.open("a") as file:
            file.write(f"== {stage.name}\n")
            for line in process.stdout:
                print(line, end="", flush=True)
                file.write(line)
                file.flush()
                if stage.skip_if_printed is not None:
                    unusable = unusable or re.search(stage.skip_if_printed, line)
        code = process.wait()
    finally:
        if process.poll() is None:
            _end(process)
    watch.join()
    seconds = time.monotonic() - began
    if timed_out.is_set():
        return Outcome(stage.name, "timed out", seconds, f"ended after {limit:.0f} s")
    if unusable is not None:
        return Outcome(stage.name, "skipped", seconds, f"cannot work here: {unusable[0]}")
    if code != 0:
        return Outcome(stage.name, "failed", seconds, f"exit status {code}")
    return Outcome(stage.name, "passed", seconds, "")


def _end_after(process: subprocess.Popen[str], limit: float, timed_out: threading.Event) -> None:
    """End a process that runs longer than the limit."""
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        timed_out.set()
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, if it runs, and the processes that it started and left: all of its session."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
