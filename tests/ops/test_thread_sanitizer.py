"""The CPU loops of tables under ThreadSanitizer: no races, and the same bits for every number of threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++17", "-O2", "-g1", "-fsanitize=thread", "-Wall", "-Wextra", "-Werror"]
# The error on systems that put memory where ThreadSanitizer needs its own.
NO_PLACE = "unexpected memory mapping"


def _compile(source: Path, to: Path) -> None:
    includes = [f"-I{ROOT / 'csrc'}", "-isystem", str(Path(torch.__file__).parent / "include")]
    target = "-DTORCH_TARGET_VERSION=0x020a000000000000"
    run = subprocess.run(
        [COMPILER, *FLAGS, target, *includes, str(source), "-o", str(to)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def _run(*command: str) -> subprocess.CompletedProcess:
    run = subprocess.run(command, capture_output=True, text=True)
    fixed = shutil.which("setarch")
    if NO_PLACE in run.stderr and fixed is not None:
        run = subprocess.run([fixed, "-R", *command], capture_output=True, text=True)
    return run


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile the program and return its path."""
    folder = tmp_path_factory.mktemp("thread_sanitizer")
    empty = folder / "empty.cpp"
    empty.write_text("int main() {}\n")
    try:
        _compile(empty, folder / "empty")
        runs = _run(str(folder / "empty")).returncode == 0
    except (AssertionError, OSError):
        runs = False
    if not runs:
        pytest.skip(f"{COMPILER} has no ThreadSanitizer that runs here")
    _compile(ROOT / "tests/ops/thread_sanitizer/table.cpp", folder / "table")
    return str(folder / "table")


@pytest.mark.always("the only one that sees races in C++")
def test_tables_have_no_races_and_the_same_bits_for_every_number_of_threads(table: str) -> None:
    run = _run(table)
    assert "ThreadSanitizer" not in run.stderr, run.stderr[:5000]
    assert run.returncode == 0, run.stdout + run.stderr[:5000]
    assert run.stdout == "10 programs\n"


def test_a_race_is_reported(table: str) -> None:
    run = _run(table, "race")
    assert run.returncode != 0
    assert "ThreadSanitizer: data race" in run.stderr
