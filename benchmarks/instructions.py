"""
An upper limit for the speed of hashing: the instructions that the GPU can issue over those that hashing executes.

Nsight Compute counts the instructions, where it is installed and allowed to; elsewhere there is no limit to print.
"""

from __future__ import annotations

import csv
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from torch import Tensor

METRIC = "smsp__inst_executed.sum"
IDS = 1 << 20
# Since compute capability 7.0: four schedulers; each issues one warp's instruction in a cycle.
ISSUED_PER_CYCLE = 4
_PROGRAM = "from benchmarks.hash import launch_all; launch_all()"


def read_counts(printed: str) -> list[int]:
    """Read the executed instructions of each kernel, in order, from ``ncu --csv --page raw --print-units base``."""
    table = list(csv.reader(line for line in printed.splitlines() if line.startswith('"')))
    if not table or METRIC not in table[0]:
        return []
    column = table[0].index(METRIC)
    return [round(float(row[column].replace(",", ""))) for row in table[2:]]  # The second row holds units.


def per_call(counts: list[int], calls: int) -> list[int]:
    """Return the instructions of each call if all launched equally many kernels, else an empty list."""
    kernels, rest = divmod(len(counts), calls)
    if kernels == 0 or rest:
        return []
    return [sum(counts[n * kernels : (n + 1) * kernels]) for n in range(calls)]


def limit(instructions: int, multiprocessors: int, clock_hz: float) -> float:
    """Return the ids per second of a GPU that does nothing but issue these instructions."""
    return multiprocessors * ISSUED_PER_CYCLE * clock_hz / (instructions / IDS)


def launch(draws: list[Callable[[int], Tensor]], function: Callable[[Tensor], Tensor]) -> None:
    """Call the function once for each kind of ids, while ncu watches."""
    for draw in draws:
        function(draw(IDS).to("cuda"))


@functools.cache
def counted(calls: int) -> tuple[int, ...]:
    """Return the instructions of each of that many calls; an empty tuple where they cannot be counted."""
    program = shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if program is None:
        return ()
    command = [program, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--kernel-name", "regex:hash", "--metrics", METRIC, sys.executable, "-c", _PROGRAM]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(per_call(read_counts(run.stdout), calls)) if run.returncode == 0 else ()


def highest_clock() -> float | None:
    """Return the highest clock rate of the multiprocessors, in Hz, or None."""
    command = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
        return float(printed.splitlines()[0]) * 1e6
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None
