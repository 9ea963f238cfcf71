"""
Which cases run every day: as many as fit in a budget of the processor's time.

``tests/costs.txt`` says of each test function how many seconds of a processor all its cases take, their child processes
included; ``make test-full`` measures it, in the seconds of the machine that measured first. From it collection gives
the mark ``daily``: a cheap function is daily as a whole, of a dearer one as many cases as its share buys. Daily at
any cost are tests with the mark ``always``, and of the tests that notice a planted fault the cheapest
(``tests/mutations/noticed.txt``). A test with the mark ``slow`` is never daily, nor run under sanitizers; one with the
mark ``full`` takes minutes: only ``make test-full`` runs it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import sys
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import pytest
from emulation.build import build

FOLDER = Path(__file__).resolve().parent
COSTS = FOLDER / "costs.txt"
NOTICED = FOLDER / "mutations/noticed.txt"
# Processor-seconds: for all daily tests, with what the processes import and collect; and for that alone, as measured.
BUDGET = 400.0
OVERHEAD = 45.0
# What a function may take of it. One that takes less is daily as a whole.
SHARE = 0.37
# A function of which a case costs more has no daily one.
DEAREST = 1.0
# What a function costs that has not been measured.
UNMEASURED = 1.0
# The seconds of the daily tests in each file that this process, or one of its own, has collected.
DAILY = pytest.StashKey[dict[str, float]]()


def function_of(test: str) -> str:
    """Return the test's name without the case in brackets."""
    return test.partition("[")[0]


def read(path: Path) -> dict[str, float]:
    """Return the seconds of each test or function, a line for each."""
    lines = (line.split(maxsplit=1) for line in (path.read_text().splitlines() if path.exists() else ()))
    return {name: float(seconds) for seconds, name in lines}


def write(path: Path, seconds: Mapping[str, float]) -> None:
    """Write a line for each name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{value:8.3f}  {name}\n" for name, value in seconds.items()))


def noticed() -> dict[str, dict[str, float]]:
    """Return of each planted fault the tests that notice it, the cheapest first, and their seconds."""
    blocks = NOTICED.read_text().rstrip().split("\n\n") if NOTICED.exists() else []
    lines = [block.splitlines() for block in blocks]
    return {fault: {x.split(maxsplit=1)[1]: float(x.split(maxsplit=1)[0]) for x in tests} for fault, *tests in lines}


def daily(tests: Iterable[str], costs: Mapping[str, float], always: Mapping[str, float | None]) -> dict[str, float]:
    """
    Return the daily tests, and the seconds that each takes.

    Args:
        tests: the names of all tests.
        costs: the seconds of all cases of each function.
        always: tests that are daily whatever they cost, and their seconds; None for the mean of the function's cases.
    """
    cases: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        cases[function_of(test)].append(test)
    chosen: dict[str, float] = {}
    for function, its in cases.items():
        cost = costs.get(function, UNMEASURED)
        mean = cost / len(its)
        room = len(its) if cost <= SHARE else max(1, int(SHARE / mean)) if mean <= DEAREST else 0
        # The same cases in every run and process, and some of each kind.
        drawn = sorted(its, key=lambda test: (test not in always, zlib.crc32(test.encode())))
        for test in drawn[: max(room, sum(test in always for test in its))]:
            given = always.get(test)
            chosen[test] = mean if given is None else given
    return chosen


def mark(config: pytest.Config, items: Sequence[pytest.Item], touched: str) -> None:
    """Mark the tests that are ``daily``, and those ``touched`` whose file is in the comma-separated list."""
    marks = {x.nodeid: {mark.name for mark in x.iter_markers()} for x in items}
    # Cases in other files than tests' run in a test, which chooses among them.
    names = [x.nodeid for x in items if x.path.name.startswith("test_") and not {"slow", "full"} & marks[x.nodeid]]
    always: dict[str, float | None] = {test: None for test in names if "always" in marks[test]}
    for tests in noticed().values():
        always |= list(tests.items())[:1]
    chosen, files = daily(names, read(COSTS), always), set(touched.split(","))
    config.stash[DAILY] = dict.fromkeys((x.partition("::")[0] for x in names), 0.0)
    for test, seconds in chosen.items():
        config.stash[DAILY][test.partition("::")[0]] += seconds
    for item in items:
        if item.nodeid in chosen:
            item.add_marker("daily")
        if touched == "everything" or item.nodeid.partition("::")[0] in files:
            item.add_marker("touched")


def over_budget(seconds: Mapping[str, float]) -> tuple[str, bool] | None:
    """Return in words what daily tests cost, and whether it is too much; None unless all rooms were collected."""
    rooms = {path.parent.name for path in FOLDER.rglob("test_*.py")}
    if {Path(file).parent.name for file in seconds} != rooms:
        return None
    total = OVERHEAD + sum(seconds.values())
    words = f"daily tests: {total:.0f} of {BUDGET:.0f} processor-seconds, as tests/costs.txt says"
    return words if total <= BUDGET else f"{words}: mend the dearest", total > BUDGET


# ---- Several processes ----------------------------------------------------------------------------------------------


def parts_of_files(parts: int, touched: str) -> list[list[str]]:
    """Return the test files of each of several processes: all take the same time, as far as costs.txt knows."""
    texts = {str(path.relative_to(FOLDER)): path.read_text() for path in FOLDER.rglob("test_*.py")}
    whole = {x for x in texts if touched == "everything" or f"tests/{x}" in touched.split(",")}
    whole |= {x for x in texts if "mark.always" in texts[x]}
    loads = Counter(dict.fromkeys(texts, 0.1))
    for function, seconds in read(COSTS).items():
        if (file := function.partition("::")[0].removeprefix("tests/")) in texts:
            loads[file] += seconds if file in whole else min(seconds, SHARE)
    # One process imports TensorFlow: no test takes longer than that.
    lump = [x for x in texts if re.search(r'\btensorflow"?[,:)]|import tensorflow', texts[x])]
    others = sorted(texts.keys() - lump, key=lambda x: (-loads[x], x))
    found: list[list[str]] = [[] for _ in range(parts)]
    for files in (lump, *([x] for x in others)):
        min(found, key=lambda part: sum(loads[x] for x in part)).extend(files)
    return found


def processor_seconds() -> float:
    """Return what this process has used of a processor, and all that it has started: ranks of a pool live on."""
    own = sum(os.times()[:4])
    if not _has_children():
        return own
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for process in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = process.read_text().rpartition(")")[2].split()
            ticks[int(process.parent.name)] = sum(map(int, fields[11:15]))
            children[int(fields[1])].append(int(process.parent.name))
    found = children[os.getpid()]
    for pid in found:  # the list grows by the children of each
        found += children[pid]
    return own + sum(ticks[pid] for pid in found) / os.sysconf("SC_CLK_TCK")


def _has_children() -> bool:
    """Say so without a look at all processes, which most tests need not pay for."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "children").read_text():
                return True
    return False


class Costs:
    """A pytest plugin: the processor time of every test in seconds, in whichever process it has run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self._left_out: set[str] = set()
        self._begin = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Do what happens once, and must not count as a cost of the test that happens to be the first."""
        wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
        if {"device", "kernels", "emulated"} & wanted:
            build()
        for name in ("torch._dynamo", "torch._inductor", *({"tensorflow"} & wanted)):
            if importlib.util.find_spec(name) is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    importlib.import_module(name)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        """Read the clock before fixtures are made."""
        self._begin = processor_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Note the test's cost in the property that xdist sends to the reporting process."""
        try:
            return (yield)
        finally:
            item.user_properties.append(("processor_seconds", processor_seconds() - self._begin))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the costs that were noted; a test that was left out has none."""
        if report.skipped:
            self._left_out.add(report.nodeid)
        elif report.failed:
            self.failed.add(report.nodeid)
        if report.when == "teardown" and report.nodeid not in self._left_out:
            self.seconds[report.nodeid] = dict(report.user_properties)["processor_seconds"]

    def write(self, path: Path) -> None:
        """Write the seconds of each test, and in a file beside it, ``.failed``, those of tests that have failed."""
        write(path, self.seconds)
        write(path.with_suffix(".failed"), {test: self.seconds.get(test, 0.0) for test in sorted(self.failed)})


def main(path: Path) -> None:
    """
    Write tests/costs.txt from a file of the costs of all tests: the sum of each function.

    The budget is of one machine's seconds, whatever the hour. So a machine that takes longer as a whole, by the median
    function that the file has with a tenth of a second or more, has its costs divided by that.
    """
    sums: Counter[str] = Counter()
    for test, seconds in read(path).items():
        sums[function_of(test)] += seconds
    before = read(COSTS)
    ratios = [seconds / before[name] for name, seconds in sums.items() if before.get(name, 0.0) >= 0.1]
    slower = median(ratios) if ratios else 1.0
    write(COSTS, {name: sums[name] / slower for name in sorted(sums)})
    print(f"{len(sums)} functions, {sum(sums.values()):.0f} processor-seconds, {slower:.2f} times the file's before")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
