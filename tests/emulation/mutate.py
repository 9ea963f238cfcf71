"""
Does a fault in a CUDA kernel turn the emulated tests red? ``make mutate`` plants those of mutations.py one at a time.

In a copy of the sources, whose object files are kept from one fault to the next: each costs one file's compilation and
the tests of that part. Prints a table; the exit status is 1 if a fault was missed. Takes minutes: not part of CI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "tests"))

from emulation.mutations import MUTATIONS, Mutation, problems  # noqa: E402

_FILES = (
    "emulated",
    "emulated_collection",
    "emulated_errors",
    "emulated_row_optimizer",
    "emulated_shards",
    "emulated_table",
    "emulated_unique",
    "operators",
    "pooling",
    "row_optimizer",
    "row_update",
    "segment_rows",
    "sparse_tensor",
    "unique_rows",
)
_TESTS = tuple(f"tests/test_{name}.py" for name in _FILES)
_SECONDS = 300  # a loop that no longer ends is a fault noticed


def _run(folder: Path, *command: str) -> int:
    # The package is production's own; only kernels and tests are copies. A fault may leave something unused.
    paths = os.pathsep.join([str(_ROOT), str(folder / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "CXX": f"{os.environ.get('CXX', 'g++')} -w"}
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_SECONDS,
    )
    return result.returncode


def _build(folder: Path) -> bool:
    return _run(folder, "-c", "from emulation.build import build; build()") == 0


def _test(folder: Path, tests: str) -> str:
    """What the chosen tests say of the fault: ``noticed``, ``MISSED``, or that there are none, or not in order."""
    chosen = f"emulated and not compiles and ({tests})"
    try:
        status = _run(folder, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *_TESTS, "-k", chosen)
    except subprocess.TimeoutExpired:
        return "noticed"
    if status == 1 or status < 0:  # below 0: a signal ended the run
        return "noticed"
    return {0: "MISSED", 5: "NO TESTS"}.get(status, f"PYTEST {status}")


def _plant(folder: Path, mutation: Mutation) -> str:
    """What became of the fault: as _test says, or ``ILL-FORMED`` where it does not compile. The fault is taken back."""
    path = folder / "csrc/cuda" / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        if not _build(folder):
            return "ILL-FORMED"
        return _test(folder, mutation.tests)
    finally:
        path.write_text(text)


def _plant_all(folder: Path) -> int:
    """Plant every fault. Returns how many were not noticed."""
    if not _build(folder):
        raise RuntimeError("the emulated kernels do not compile")
    if _test(folder, " or ".join(sorted({f"({m.tests})" for m in MUTATIONS}))) != "MISSED":
        raise RuntimeError("the tests fail without a fault")
    missed = 0
    for mutation in MUTATIONS:
        start = time.monotonic()
        outcome = _plant(folder, mutation)
        missed += outcome != "noticed"
        old, new = (" ".join(text.split()) or "nothing" for text in (mutation.old, mutation.new))
        seconds = f"{time.monotonic() - start:3.0f} s"
        print(f"{outcome:10}  {seconds}  {mutation.file:22} {mutation.kind:5}  {old}  ->  {new}", flush=True)
    return missed


def main() -> int:
    """Check the table, then plant. Returns the exit status."""
    if wrong := problems():
        print("tests/emulation/mutations.py does not fit csrc/cuda:", *wrong, sep="\n  ")
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("csrc", "tests"):
            shutil.copytree(_ROOT / part, folder / part)
        shutil.copy(_ROOT / "pyproject.toml", folder)
        missed = _plant_all(folder)
    print(f"{len(MUTATIONS)} faults, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
