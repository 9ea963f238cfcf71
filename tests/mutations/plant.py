"""
Does a fault turn the tests red? ``make mutate`` plants the faults of python.py, cpu.py and cuda.py, one at a time.

This happens in a copy of the repository, which keeps its object files: a fault costs the compilation of what includes
its file, and the tests of its family. Prints a table; the exit status is 1 if a fault was missed. Takes two or three
hours: it is run before a release, and is not part of CI. ``ARGS=python`` plants one table's alone (python, cpu, cuda).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutations import cuda  # noqa: E402
from mutations.mutation import ROOT, Mutation, Table, problems, tables  # noqa: E402

# Not copied: large files that are made from the others.
_LEFT_OUT = (".git", ".venv", ".cache", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "runs")
_SECONDS = 600
DAILY = "not slow and not full"


class Outcome(NamedTuple):
    """The outcome of a fault: ``noticed``, ``MISSED``, or why it is not known; and the test that noticed."""

    word: str
    by: str = ""


class Copy:
    """A copy of the repository at ``root`` in ``folder``, whose tests run with ``python``'s packages."""

    def __init__(self, root: Path, folder: Path, python: str = sys.executable, marker: str = DAILY) -> None:
        self.folder, self.python, self.marker = folder, python, marker
        shutil.copytree(root, folder, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True, dirs_exist_ok=True)
        # As after an install, only the package is on the path, and contains compat/ under its name.
        compat, self._installed = folder / "torchsparse_rec/compat", folder / "installed"
        if not compat.is_symlink():
            compat.symlink_to("../compat")
        self._installed.mkdir(exist_ok=True)
        if not (self._installed / "torchsparse_rec").is_symlink():
            (self._installed / "torchsparse_rec").symlink_to("../torchsparse_rec")

    def run(self, table: Table, *arguments: str, seconds: float | None = None) -> tuple[int, str]:
        """Return Python's exit status and output, both streams. Raise TimeoutExpired, and leave no process behind."""
        paths = os.pathsep.join([str(self._installed), str(self.folder / "tests")])
        with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as examples:
            # Examples that failed with one fault must not be tried first with the next, or without a fault.
            own = {"PYTHONPATH": paths, "HYPOTHESIS_STORAGE_DIRECTORY": examples}
            process = subprocess.Popen(
                [self.python, *arguments],
                cwd=self.folder,
                env={**os.environ, **table.environment, **own},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(seconds)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            return status, output.read().decode(errors="replace")

    def build(self, table: Table) -> bool:
        """Compile what has changed. Say whether that succeeded."""
        return not table.build or self.run(table, *table.build)[0] == 0

    def keep_built(self, table: Table) -> None:
        """Keep a copy of the objects: after a fault they are restored, and nothing is compiled again."""
        for name in table.built:
            _copy(self.folder / name, self.folder / "kept" / name)

    @contextmanager
    def planted(self, table: Table, mutation: Mutation) -> Iterator[bool]:
        """Plant the fault, and remove it at the end. Yield whether it compiles."""
        path = self.folder / table.folder / mutation.file
        text, status = path.read_text(), path.stat()
        path.write_text(text.replace(mutation.old, mutation.new))
        try:
            yield self.build(table)
        finally:
            path.write_text(text)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            for name in table.built:
                _copy(self.folder / "kept" / name, self.folder / name)

    def test(self, table: Table, arguments: list[str], seconds: float = _SECONDS) -> Outcome:
        """Run the chosen tests and return their outcome."""
        pytest = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", self.marker)
        try:
            status, output = self.run(table, *pytest, *arguments, seconds=seconds)
        except subprocess.TimeoutExpired:
            return Outcome("noticed" if table.endless else "TOO LONG")
        if status == 1 or status < 0:  # below 0: a signal ended the run
            return Outcome("noticed", _first_failure(output))
        return Outcome({0: "MISSED", 5: "NO TESTS"}.get(status, f"PYTEST {status}"))

    def outcome(self, table: Table, mutation: Mutation) -> Outcome:
        """Plant the fault and run its tests. A test that fails without the fault, too, has not noticed it."""
        with self.planted(table, mutation) as compiles:
            if not compiles:
                return Outcome("ILL-FORMED")
            result = Outcome("NO TESTS")
            left = time.monotonic() + _SECONDS
            for arguments in table.arguments_of(mutation, self.folder):
                found = self.test(table, arguments, max(left - time.monotonic(), 1))
                result = found if found.word != "NO TESTS" else result
                if found.word not in ("MISSED", "NO TESTS"):
                    break
        if result.by and self.test(table, [result.by]).word != "MISSED":
            return Outcome("ALWAYS RED", result.by)
        return result


def _copy(source: Path, target: Path) -> None:
    """Copy a file or folder with its times, which say what must be compiled again."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _first_failure(output: str) -> str:
    """Return the test that pytest reports as failed, or in which the process has crashed."""
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", output, re.MULTILINE)
    if failed:
        return failed[1].removesuffix(" ()")  # of a TestCase
    crashed = re.search(r'File "[^"]*/(tests/[^"]*test_[^"/]*\.py)", line \d+ in (test_\w+)', output)
    return f"{crashed[1]}::{crashed[2]}" if crashed else ""


def plant_all(copy: Copy, chosen: list[Table]) -> int:
    """Plant every fault of the chosen tables. Return how many were not noticed."""
    missed = 0
    for table in chosen:
        if not copy.build(table):
            raise RuntimeError(f"the sources of the table {table.name!r} do not compile")
        copy.keep_built(table)
        for mutation in table.mutations:
            start = time.monotonic()
            outcome = copy.outcome(table, mutation)
            missed += outcome.word != "noticed"
            old, new = (" ".join(text.split()) or "nothing" for text in (mutation.old, mutation.new))
            seconds = f"{time.monotonic() - start:3.0f} s"
            print(f"{outcome.word:10}  {seconds}  {mutation.file:22} {mutation.kind:5}  {old}  ->  {new}", flush=True)
            if outcome.by:
                print(f"{'':19}by {outcome.by}", flush=True)
    return missed


def main() -> int:
    """Check the tables, then plant their faults. Return the exit status."""
    everything = {table.name: table for table in tables()}
    parser = argparse.ArgumentParser(description="Plant faults, one at a time: each must turn the tests red.")
    parser.add_argument("tables", nargs="*", metavar="table", help=f"of {', '.join(everything)}; default: all")
    names = parser.parse_args().tables or list(everything)
    if unknown := set(names) - set(everything):
        parser.error(f"there is no table {', '.join(sorted(unknown))}")
    if wrong := [*problems(), *cuda.problems()]:
        print("the tables of tests/mutations do not fit the sources:", *wrong, sep="\n  ")
        return 1
    chosen = [everything[name] for name in names]
    with tempfile.TemporaryDirectory() as name:
        missed = plant_all(Copy(ROOT, Path(name)), chosen)
    print(f"{sum(len(table.mutations) for table in chosen)} faults, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
