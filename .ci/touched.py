"""
Print the test files that a change has touched, separated by commas: CI runs these whole, of the others daily tests.

The change is everything since the commit that .ci/full names, on which `make test-full` has passed. It prints
"everything" where that commit is not in the history, or where something has changed that all tests stand on.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parent.parent
FULL = ".ci/full"
EVERYTHING = "everything"

# Every test depends on these files and folders. The paths of folders end with a slash.
_GROUND = (
    *("csrc/abi.h", "csrc/dispatch.h", "csrc/library.cpp", "setup.py", "pyproject.toml", "Makefile", "requirements/"),
    *(".ci/run", ".ci/touched.py"),
)
# For each part of the package, the folders of tests that would see a fault in it.
_ROOMS = {
    "torchsparse_rec/ops/": ("ops",),
    "torchsparse_rec/jagged/": ("jagged", "nn", "features"),
    "torchsparse_rec/optim/": ("optim", "nn", "variable", "clients", "distributed"),
    "torchsparse_rec/tables/": ("nn", "optim", "variable", "clients", "distributed"),
    "torchsparse_rec/variable/": ("variable",),
    "torchsparse_rec/nn/": ("nn", "optim", "variable", "clients", "distributed"),
    "torchsparse_rec/features/": ("features",),
    "torchsparse_rec/distributed/": ("distributed",),
    "torchsparse_rec/data/": ("data",),
    "torchsparse_rec/profiling/": ("profiling",),
    "torchsparse_rec/examples/": ("examples",),
    "torchsparse_rec/keras/": ("keras",),
    "torchsparse_rec/serving/": ("serving",),
    "torchsparse_rec/": ("project", "ops", "nn"),
    "compat/_parity/reference/": ("compat", "ops", "emulation", "data", "optim", "variable"),
    "compat/": ("compat", "features"),
    ".ci/": ("project",),
    "tests/goldens/": ("compat",),
    "tests/mutations/": ("project",),
    "tests/samples/": ("ops", "emulation", "cuda"),
    "tests/emulation/": ("ops", "emulation"),
    "benchmarks/": ("benchmarks",),
    "docs/": ("project", "clients"),
}
# Families of operators. The names of a family's files begin with the family's name.
_FAMILIES = (
    *("bucketize", "embedding", "embedding_collection", "hash", "quantized", "record", "row_optimizer", "row_update"),
    *("route", "segment", "sparse_segment", "sparse_tensor", "table", "unique", "unique_rows"),
)
_OPERATORS = ("csrc/", "torchsparse_rec/ops/")
_OPERATOR_ROOMS = ("ops", "emulation")


def changed_since(commit: str) -> list[str] | None:
    """Return the files that differ from a commit, uncommitted ones included; None where there is no such commit."""
    known = subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, capture_output=True)
    if known.returncode != 0:
        return None
    commands = (["git", "diff", "--name-only", commit], ["git", "ls-files", "--others", "--exclude-standard"])
    outputs = [subprocess.run(x, cwd=ROOT, capture_output=True, text=True, check=True).stdout for x in commands]
    return sorted({line for output in outputs for line in output.splitlines()})


def _family(stem: str) -> str | None:
    """Return the longest name of a family with which a file's stem begins, or None."""
    return max((x for x in _FAMILIES if f"{stem}_".startswith(f"{x}_")), key=len, default=None)


def _families(path: PurePath) -> set[str]:
    """Return the families that compile a C++ file. Those of a header compile files that include it, directly or not."""
    reached = {path.name}
    if path.suffix in (".h", ".cuh"):
        files = [x for x in (ROOT / "csrc").rglob("*.*") if x.suffix in (".h", ".cuh", ".cpp", ".cu")]
        includes = {x.name: set(re.findall(r'#include "(?:.*/)?([^"/]+)"', x.read_text())) for x in files}
        while more := {x for x in includes if includes[x] & reached} - reached:
            reached |= more
    return {family for name in reached if (family := _family(PurePath(name).stem))}


def _tested(test: str) -> str | None:
    return _family(PurePath(test).stem.removeprefix("test_"))


def touched_by(path: str, tests: list[str]) -> set[str] | None:
    """Return the test files that a changed file touches; None if it touches all of them."""
    if any(path == x or (x.endswith("/") and path.startswith(x)) for x in _GROUND):
        return None
    operators = [x for x in tests if x.split("/")[1] in _OPERATOR_ROOMS]
    if path in tests:
        return {path}
    if path.startswith("tests/") and path.count("/") == 1:
        # All tests share these files; but the .txt lists only choose among tests, and change none.
        return set() if path.endswith(".txt") else None
    if path.startswith(_OPERATORS):
        families = _families(PurePath(path))
        # A file of no family serves all families, and a test of no family tests all of them.
        return {x for x in operators if not families or _tested(x) is None or _tested(x) in families}
    for folder, rooms in _ROOMS.items():
        if path.startswith(folder):
            return {x for x in tests if x.split("/")[1] in rooms}
    return {x for x in tests if path.startswith(f"tests/{x.split('/')[1]}/")}


def touched(paths: Iterable[str], tests: list[str]) -> set[str] | None:
    """Return the test files that a change of these files touches; None if it touches all of them."""
    found: set[str] = set()
    for path in paths:
        more = touched_by(path, tests)
        if more is None:
            return None
        found |= more
    return found


def main() -> int:
    """Print the test files that the change has touched, and return the exit status."""
    named = ROOT / FULL
    commit = named.read_text().strip() if named.exists() else ""
    paths = changed_since(commit) if commit else None
    tests = sorted(str(x.relative_to(ROOT)) for x in (ROOT / "tests").rglob("test_*.py"))
    found = None if paths is None else touched(paths, tests)
    print(EVERYTHING if found is None else ",".join(sorted(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
