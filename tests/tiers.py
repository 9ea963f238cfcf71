"""
Which tests run every day, chosen by their cost.

``make test-full`` runs all tests and measures each test's processor time in seconds, its child processes included;
then ``make tiers`` lists the tests above DAILY_SECONDS in tests/slow.txt, where tests that were not measured stay as
they are: ``make test ARGS="--costs .cache/costs.txt"`` does for daily ones. Daily tests leave these out, so that they
end within minutes; CI runs them where they have been touched. A test with the mark ``full`` takes minutes by
itself: nothing but ``make test-full`` runs it. Of each test function the cheapest case stays daily, if it takes no
more than CHEAPEST_SECONDS; and the tests in tests/always.txt stay daily whatever they take.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
SLOW = FOLDER / "slow.txt"
ALWAYS = FOLDER / "always.txt"
DAILY_SECONDS = 0.5
CHEAPEST_SECONDS = 3.0
# The names of all tests that were collected, those that are left out too.
COLLECTED = pytest.StashKey[list[str]]()


def function_of(test: str) -> str:
    """Return the test's name without the case in brackets."""
    return test.partition("[")[0]


def listed(path: Path) -> set[str]:
    """Return the tests of a list: a line is one case, or a test function with all its cases; # begins a comment."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line for line in (line.partition("  #")[0].strip() for line in lines) if line and line[0] != "#"}


def is_listed(test: str, lines: set[str]) -> bool:
    """Say whether a list has the test, or the function of which the test is a case."""
    return test in lines or function_of(test) in lines


def unknown(tests: Iterable[str]) -> list[str]:
    """Return the lines of both lists that name neither a test nor the function of one."""
    known = set(tests)
    return sorted((listed(SLOW) | listed(ALWAYS)) - known - {function_of(test) for test in known})


def mark(items: list[pytest.Item], touched: str) -> None:
    """Mark tests ``slow`` as tests/slow.txt says, and ``touched`` if their file is in the comma-separated list."""
    slow, files = listed(SLOW), set(touched.split(","))
    for item in items:
        if is_listed(item.nodeid, slow):
            item.add_marker("slow")
        if touched == "everything" or item.nodeid.partition("::")[0] in files:
            item.add_marker("touched")


def put_off(items: list[pytest.Item], sample: bool, seed: int) -> None:
    """
    Move tests that may be left out when the time is over to the end, with the mark ``put_off``.

    Args:
        items: the tests, which are moved in place.
        sample: whether all but those with the mark ``representative`` are put off; else those that are slow.
        seed: of the order of the files of these tests, the same in all of a run's processes.
    """

    def place(item: pytest.Item) -> int:
        if (item.get_closest_marker("representative" if sample else "slow") is None) != sample:
            return 0
        item.add_marker("put_off")
        return 1 + zlib.crc32(f"{seed} {item.nodeid.partition('::')[0]}".encode())

    items.sort(key=place)


def chosen(costs: dict[str, float], always: set[str], before: set[str]) -> list[str]:
    """Choose the lines of tests/slow.txt from the cost of each test, and keep those of tests without a cost."""
    cases: dict[str, list[str]] = defaultdict(list)
    for test in sorted(costs, key=lambda test: (costs[test], test)):
        cases[function_of(test)].append(test)
    lines = [line for line in before if line not in costs and line not in cases]
    for function, tests in cases.items():
        kept = tests[0] if costs[tests[0]] <= CHEAPEST_SECONDS else None
        out = [x for x in tests if costs[x] > DAILY_SECONDS and x != kept and not is_listed(x, always)]
        lines += [function] if out and len(out) == len(tests) else out
    return sorted(lines)


class Costs:
    """A pytest plugin: the processor time of every test in seconds, in whichever process it has run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._left_out: set[str] = set()
        self._begin = 0.0
        # Imports happen once: they must not count as costs of the test that happens to be the first.
        for name in ("torch._dynamo", "torch._inductor", "tensorflow"):
            if importlib.util.find_spec(name) is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    importlib.import_module(name)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> object:
        """Read the clock before fixtures are made."""
        self._begin = sum(os.times()[:4])
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> object:
        """Note the test's cost in the property that xdist sends to the reporting process."""
        try:
            return (yield)
        finally:
            item.user_properties.append(("processor_seconds", sum(os.times()[:4]) - self._begin))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the costs that were noted; a test that was left out has none."""
        if report.skipped:
            self._left_out.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._left_out:
            self.seconds[report.nodeid] = dict(report.user_properties)["processor_seconds"]

    def write(self, path: Path) -> None:
        """Write a line for each test, the most expensive first."""
        tests: Iterable[str] = sorted(self.seconds, key=lambda test: -self.seconds[test])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{self.seconds[test]:8.3f}  {test}\n" for test in tests))


def read(path: Path) -> dict[str, float]:
    """Return the seconds that :meth:`Costs.write` has written, by test."""
    lines = (line.split(maxsplit=1) for line in path.read_text().splitlines())
    return {test: float(seconds) for seconds, test in lines}


def main(path: Path) -> None:
    """Write tests/slow.txt from a file of costs, and print what daily and slow tests take."""
    costs, always = read(path), listed(ALWAYS)
    SLOW.write_text("".join(f"{line}\n" for line in chosen(costs, always, listed(SLOW))))
    slow = listed(SLOW)
    for name, out in (("every day", False), ("only if touched", True)):
        tests = [test for test in costs if is_listed(test, slow) == out]
        print(f"{len(tests):6} tests  {sum(costs[test] for test in tests):6.0f} processor-seconds  {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
