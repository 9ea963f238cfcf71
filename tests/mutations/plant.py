"""
Which tests does a fault turn red? ``make mutate`` plants the faults of python.py, cpu.py and cuda.py, one at a time.

This happens in a copy of the repository, which keeps its object files: a fault costs the compilation of what includes
its file, and the tests of its family. ``noticed.txt`` beside this file gets the tests that notice each fault, of which
the cheapest is daily (tests/tiers.py): of each test function the cheapest case, and its seconds. Daily tests run first;
the others only if no daily one has noticed. All faults take a night: ``ARGS=python`` plants those of one table
(python, cpu, cuda), ``ARGS=nn`` those of one family, and ``--missing`` those without a test in ``noticed.txt`` that is
still there. The exit status is 1 if a fault was not noticed.
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

import tiers  # noqa: E402

from mutations import cuda  # noqa: E402
from mutations.mutation import FAMILIES, ROOT, Mutation, Table, problems, tables  # noqa: E402

# Not copied: large files that are made from the others.
_LEFT_OUT = (".git", ".venv", ".cache", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "runs")
_SECONDS = 1200
DAILY = "daily and not full"
LONGER = "not daily and not full"
# Tests of a fault that are noted.
_MOST = 12


class Outcome(NamedTuple):
    """The outcome of a fault: ``noticed``, ``MISSED``, or why it is not known; and who noticed, the cheapest first."""

    word: str
    by: dict[str, float] = {}


class Copy:
    """A copy of the repository at ``root`` in ``folder``, whose tests run with ``python``'s packages."""

    def __init__(self, root: Path, folder: Path, python: str = sys.executable) -> None:
        self.folder, self.python = folder, python
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
        """Run the chosen tests, also after one has failed, and return their outcome."""
        with tempfile.TemporaryDirectory() as folder:
            costs = Path(folder, "costs.txt")
            pytest = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "--costs", str(costs))
            try:
                status, output = self.run(table, *pytest, *arguments, seconds=seconds)
            except subprocess.TimeoutExpired:
                return Outcome("noticed" if table.endless else "TOO LONG")
            failed = tiers.read(costs.with_suffix(".failed"))
        if status == 1 or status < 0:  # below 0: a signal ended the run
            return Outcome("noticed", failed or _crashed(output))
        return Outcome({0: "MISSED", 5: "NO TESTS"}.get(status, f"PYTEST {status}"))

    def outcome(self, table: Table, mutation: Mutation) -> Outcome:
        """Plant the fault and run its tests. A test that fails without the fault, too, has not noticed it."""
        with self.planted(table, mutation) as compiles:
            if not compiles:
                return Outcome("ILL-FORMED")
            result = self._noticed(table, mutation)
        by = dict(sorted(_cheapest_cases(result.by).items(), key=lambda x: x[1])[:_MOST])
        if by:
            red = self.test(table, list(by)).by
            by = {test: seconds for test, seconds in by.items() if test not in red}
            return Outcome("noticed", by) if by else Outcome("ALWAYS RED", red)
        return result

    def _noticed(self, table: Table, mutation: Mutation) -> Outcome:
        """Run the tests of a planted fault: those of every day, and where none has noticed the others."""
        result, left = Outcome("NO TESTS"), time.monotonic() + _SECONDS
        for marker in (DAILY, LONGER):
            for arguments in table.arguments_of(mutation, self.folder):
                found = self.test(table, ["-m", marker, *arguments], max(left - time.monotonic(), 1))
                if found.word == "noticed":
                    result = Outcome("noticed", {**result.by, **found.by})
                elif result.word != "noticed" and found.word != "NO TESTS":
                    result = found
            if result.word not in ("MISSED", "NO TESTS"):
                break
        return result


def _copy(source: Path, target: Path) -> None:
    """Copy a file or folder with its times, which say what must be compiled again."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _crashed(output: str) -> dict[str, float]:
    """Return the test in which the process has crashed: pytest has printed no result of it. Its cost is not known."""
    line = r"^(tests/\S+\.py::.+?)(?: SUBFAILED\[.*)?(?: *Fatal Python error: .*)? *$"
    *_, last = ["", *re.findall(line, output, re.M)]
    return {last: 0.0} if last and not re.search(r" [A-Z]+ +\[ *\d+%\]$", last) else {}


def _cheapest_cases(tests: dict[str, float]) -> dict[str, float]:
    """Return of each test function the cheapest case."""
    cases: dict[str, str] = {}
    for test in sorted(tests, key=lambda x: (tests[x], x)):
        cases.setdefault(tiers.function_of(test), test)
    return {test: tests[test] for test in cases.values()}


# ---- What is known of faults ----------------------------------------------------------------------------------------


def name_of(table: Table, mutation: Mutation) -> str:
    """Return a fault's line in ``noticed.txt``."""
    old, new = (" ".join(text.split()) or "nothing" for text in (mutation.old, mutation.new))
    return f"{table.name} {mutation.file}: {old} -> {new}"


def note(faults: dict[str, dict[str, float]]) -> None:
    """Write ``noticed.txt``: a block for each fault that there is, in the tables' order."""
    names = [name_of(table, mutation) for table in tables() for mutation in table.mutations]
    blocks = [[name, *(f"{faults[name][x]:8.3f}  {x}" for x in faults[name])] for name in names if name in faults]
    tiers.NOTICED.write_text("\n\n".join("\n".join(block) for block in blocks) + "\n")


def plant_all(copy: Copy, chosen: dict[str, tuple[Table, Mutation]]) -> int:
    """Plant the chosen faults, and note of each at once who has noticed it. Return how many were not noticed."""
    missed, built = 0, ""
    for name, (table, mutation) in chosen.items():
        if table.name != built:
            if not copy.build(table):
                raise RuntimeError(f"the sources of the table {table.name!r} do not compile")
            copy.keep_built(table)
            built = table.name
        start = time.monotonic()
        outcome = copy.outcome(table, mutation)
        missed += outcome.word != "noticed"
        print(f"{outcome.word:10}  {time.monotonic() - start:3.0f} s  {name}", *outcome.by, sep="\n    ", flush=True)
        if outcome.word in ("noticed", "MISSED"):
            note({**tiers.noticed(), name: outcome.by})
    return missed


def main() -> int:
    """Check the tables, then plant their faults. Return the exit status."""
    parser = argparse.ArgumentParser(description="Plant faults, one at a time: each must turn tests red.")
    parser.add_argument("parts", nargs="*", metavar="part", help="a table or a family of tests; default: all")
    parser.add_argument("--missing", action="store_true", help="those alone of which no test is known that is there")
    given = parser.parse_args()
    names = {table.name for table in tables()} | {*FAMILIES}
    if unknown := set(given.parts) - names:
        parser.error(f"there is no table or family {', '.join(sorted(unknown))}: there are {', '.join(sorted(names))}")
    if wrong := [*problems(), *cuda.problems()]:
        print("the tables of tests/mutations do not fit the sources:", *wrong, sep="\n  ")
        return 1
    chosen = {
        name_of(table, mutation): (table, mutation)
        for table in tables()
        for mutation in table.mutations
        if not given.parts or {table.name, mutation.tests} & set(given.parts)
    }
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(ROOT, Path(folder))
        if given.missing:
            there = set(copy.run(tables()[0], "-m", "pytest", "--collect-only", "-q")[1].splitlines())
            found = tiers.noticed()
            chosen = {x: fault for x, fault in chosen.items() if not there & {*found.get(x, {})}}
        missed = plant_all(copy, chosen)
    print(f"{len(chosen)} faults, {missed} not noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
