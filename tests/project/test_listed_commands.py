"""What lists commands lists all that exist: the library's overview, that of the examples, docs/developing.md."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path

import pytest

import torchsparse_rec
from torchsparse_rec import __main__ as overview
from torchsparse_rec import _extras
from torchsparse_rec.examples import __main__ as examples

ROOT = Path(__file__).resolve().parents[2]
# What is listed by the others, or records the tests' golden vectors.
UNLISTED = {"torchsparse_rec", "torchsparse_rec.compat.goldens"}


def programs() -> set[str]:
    """Return the library's modules that run as programs."""
    found = set()
    for path in [*(ROOT / "torchsparse_rec").rglob("*.py"), *(ROOT / "compat").rglob("*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[:2] != ("torchsparse_rec", "compat") and 'if __name__ == "__main__":' in path.read_text():
            name = ".".join(("torchsparse_rec", *parts) if parts[0] == "compat" else parts)
            found.add(name.removesuffix(".__main__"))
    return found


def commands(printed: str) -> dict[str, str]:
    """Return the listed commands' modules, and what is said of each."""
    return dict(re.findall(r"^ *python -m (\S+)  +(\S.*)$", printed, flags=re.MULTILINE))


def test_the_overview_has_all_commands_what_show_config_says_and_the_extras(capsys: pytest.CaptureFixture[str]) -> None:
    torchsparse_rec.show_config()
    shown = capsys.readouterr().out
    assert overview.main() == 0
    printed = capsys.readouterr().out
    assert printed.startswith(shown)
    listed = commands(printed)
    assert listed.keys() - {"benchmarks"} == programs() - UNLISTED - {"torchsparse_rec.examples"}
    assert all(importlib.util.find_spec(name) for name in listed.keys() - {"benchmarks"})
    assert ("benchmarks" in listed) == (ROOT / "benchmarks/__main__.py").exists()
    named = set(metadata.metadata("torchsparse_rec").get_all("Provides-Extra") or [])
    lines = dict(re.findall(r"^  (\w+) +(\S.*)$", printed.partition("Extras:\n")[2].partition("\n\n")[0], re.MULTILINE))
    assert lines.keys() == named


def test_a_package_that_is_missing_or_too_old_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"old": "1.9.1+cpu", "new": "10.0rc1"}

    def version(package: str) -> str:
        if package not in there:
            raise metadata.PackageNotFoundError(package)
        return there[package]

    monkeypatch.setattr(metadata, "version", version)
    required = ["torch>=2.10", "old>=1.10; extra == 'a'", 'new>=9; extra == "a"', "gone; extra == 'b'"]
    monkeypatch.setattr(metadata, "requires", lambda name: [*required, "new>=10; extra == 'c'"])
    assert _extras.extras() == {
        "a": "old 1.9.1+cpu (at least 1.10 is needed), new 10.0rc1: pip install 'torchsparse_rec[a]'",
        "b": "no gone: pip install 'torchsparse_rec[b]'",
        "c": "new 10.0rc1",
    }
    monkeypatch.setattr(metadata, "requires", version)  # raises: the package itself is not installed
    assert _extras.extras() == {}


def test_the_examples_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert examples.main() == 0
    listed = commands(capsys.readouterr().out)
    assert listed.keys() == {name for name in programs() if name.startswith("torchsparse_rec.examples.")}
    assert listed["torchsparse_rec.examples.ncf"] == "Neural collaborative filtering on MovieLens"


def test_the_table_has_the_commands_that_make_describes() -> None:
    makefiles = "".join(path.read_text() for path in (ROOT / "Makefile", *(ROOT / ".ci").glob("*.mk")))
    described = set(re.findall(r"^## .*\n([a-z-]+):", makefiles, flags=re.MULTILINE)) - {"help"}
    commands = (ROOT / "docs/developing.md").read_text().partition("\n## Commands\n")[2].partition("\n## ")[0]
    table = "".join(line for line in commands.splitlines() if line.startswith("|"))
    assert described and described - set(re.findall(r"`make ([a-z-]+)`", table)) == set()
