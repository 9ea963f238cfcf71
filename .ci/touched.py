"""
Print the test files that a change touches, separated by commas: CI runs these whole, of others their daily tests. On a
second line the same of its changed kernels alone, which sanitizers run; on a third the sources that reach these.

The change is everything since the commit in .ci/passed, which has passed CI. A file touches the tests that reach it
(.ci/reach.py) and answer for its room. ``everything`` stands for all tests. ``--base`` prints that commit instead.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from reach import ROOT, Reach, schemas  # noqa: E402

PASSED = ".ci/passed"
EVERYTHING = "everything"
LIBRARY = "csrc/library.cpp"
# All tests stand on these files, and on the emulation but for its own tests.
_GROUND = ("csrc/abi.h", "csrc/dispatch.h", "tests/conftest.py")
_EMULATION = "tests/emulation/"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def base() -> str | None:
    """
    Return the commit that .ci/passed names; None in a shallow clone that has it not.

    Raises:
        ValueError: it is no ancestor, or was not written by one commit that changes nothing else and follows it.
    """
    named = (ROOT / PASSED).read_text().strip()
    ancestor = _git("merge-base", named, "HEAD") == named
    if not ancestor and _git("rev-parse", "--is-shallow-repository") == "true":
        return None
    since = _git("rev-list", f"{named}..HEAD", "--", PASSED).split() if ancestor else []
    if len(since) != 1 or _git("diff", "--name-only", "HEAD", "--", PASSED):
        why = "must name an ancestor of HEAD, and one commit after it must write that"
    elif _git("rev-list", "--parents", "-1", since[0]).split()[1:] != [named]:
        why = f"must name the parent of the commit that writes it, {since[0][:12]}"
    elif _git("diff", "--name-only", named, since[0]).split() != [PASSED]:
        why = f"must be all that its commit changes, {since[0][:12]}"
    else:
        return named
    raise ValueError(f"{PASSED} {why}, got {named!r}: docs/developing.md says how a piece of work begins")


def changed_since(commit: str) -> list[str]:
    """Return the files that differ from a commit, uncommitted and new ones too."""
    texts = (_git("diff", "--name-only", commit), _git("ls-files", "--others", "--exclude-standard"))
    return sorted({line for text in texts for line in text.splitlines()} - {PASSED})


def _room(path: str) -> str:
    """Return the room of a file: a package's name, which the folder of its tests has too."""
    parts = path.split("/")
    if parts[0] in ("torchsparse_rec", "tests"):
        return parts[1] if len(parts) > 2 else ""
    return "project" if parts[0] in (".ci", "docs") else parts[0]


class Tests:
    """The test files, what each reaches, and the rooms that each answers for."""

    def __init__(self) -> None:
        self.reach = Reach()
        texts = self.reach.texts
        self.files = sorted(x for x in texts if x.startswith("tests/") and Path(x).name.startswith("test_"))
        self.reached = {test: self.reach.closure(test) for test in self.files}
        # A test answers for its own room, for those that it names, and for those without tests of their own; a test of
        # operators for their kernels.
        alone = {_room(x) for x in texts} - {_room(test) for test in self.files} - {"csrc"}
        self.rooms = {x: {_room(x), *map(_room, self.reach.needs(x)), *alone} for x in self.files}
        for test, rooms in self.rooms.items():
            rooms |= {"csrc"} if _room(test) == "ops" else set()

    def of_file(self, path: str) -> set[str] | None:
        """Return the tests that a changed file touches; None if all."""
        if path in _GROUND or (path.startswith(_EMULATION) and path not in self.files):
            return None
        if path not in self.reach.texts:
            return {test for test in self.files if _names(self.reach.texts[test], path)}
        return {x for x in self.files if path == x or (path in self.reached[x] and _room(path) in self.rooms[x])}

    def of_schemas(self, before: str) -> set[str]:
        """Return the tests that a changed csrc/library.cpp touches: those of operators whose schema has changed."""
        old, new = schemas(before), schemas(self.reach.texts[LIBRARY])
        changed = {x for name in new if old.get(name) != new[name] for x in self.reach.operators[name]}
        return {test for path in changed for test in self.of_file(path) or ()}

    def of_files(self, paths: Iterable[str], before: str = "") -> set[str] | None:
        """Return the tests that changed files touch; None if all. ``before``: csrc/library.cpp as it was."""
        found: set[str] = set()
        for path in paths:
            more = self.of_schemas(before) if path == LIBRARY and before else self.of_file(path)
            if more is None:
                return None
            found |= more
        return found


def _names(text: str, path: str) -> bool:
    """Say whether a test's text names a file that is no source, or its folder below the root."""
    folders = [str(x) for x in Path(path).parents if str(x) != "."]
    return any(f'"{name}"' in text or f'/{name}"' in text for name in (path, Path(path).name, *folders))


def main(arguments: list[str]) -> int:
    """Print what the arguments ask for, and return the exit status."""
    try:
        commit = base()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if "--base" in arguments:
        print(commit or f"{PASSED} names a commit that this shallow clone has not: everything counts as touched")
    elif commit is None:
        print(*[EVERYTHING] * 3, sep="\n")
    else:
        tests, paths, before = Tests(), changed_since(commit), _git("show", f"{commit}:{LIBRARY}")
        kernels = [x for x in paths if x.startswith(("csrc/", _EMULATION))]
        for part in (paths, kernels):
            found = tests.of_files(part, before)
            print(EVERYTHING if found is None else ",".join(sorted(found)))
        print(EVERYTHING if found is None else " ".join(tests.reach.sources_of(kernels)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
