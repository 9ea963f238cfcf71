"""
A pytest plugin for runs that may be ended at any moment, as those of ``make gpu``: what is known is in files at once.

``-p in_time --until TIME --log FILE``: the run stops by itself at TIME (seconds since 1970). FILE gets a line whenever
a test is ``collected``, has ``begun``, and has ``passed``, ``failed`` or was ``skipped``; ``failures.txt`` beside it
gets what failed, with its traceback. A test that hangs, or leaves a GPU behind that no longer answers, takes its
process along: pytest-xdist names it and goes on in another.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# For what still runs when the time is over, a hanging test too.
LAST_SECONDS = 5.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say when to stop and where to write, what to leave out and what to put off."""
    parser.addoption("--until", type=float, required=True)
    parser.addoption("--log", type=Path, required=True)
    parser.addoption("--hanging", type=float, default=60.0, help="seconds that no test takes")
    parser.addoption("--leave-out", type=Path, help="a file that names tests, one in a line")
    parser.addoption("--last", default="", help="test functions whose cases come last, separated by commas")


def pytest_configure(config: pytest.Config) -> None:
    """Write from one process; a hanging test's traceback comes from its own."""
    config.pluginmanager.register(_Limit(config))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Log(config.option.log))


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> list[pytest.Item] | None:
    """Make no cases of a function that the command line does not name, where it names others of the file."""
    parts = [argument.split("::") for argument in collector.config.args]
    named = {rest[0].partition("[")[0] for file, *rest in parts if rest and Path(file).resolve() == collector.path}
    return [] if named and name not in named else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Leave out a file that imports a library which is not installed."""
    report = yield
    absent = re.search(r"ModuleNotFoundError: (No module named '(hypothesis|pyarrow)\b.*)", str(report.longrepr))
    if report.failed and absent is not None:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, absent[1])
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave some out, and put others to the end."""
    left_out, last = config.option.leave_out, set(config.option.last.split(","))
    names = set(left_out.read_text().splitlines()) if left_out is not None else set()
    items[:] = [item for item in items if item.nodeid not in names]
    items.sort(key=lambda item: item.nodeid.partition("[")[0].rpartition("::")[2] in last)


class _Limit:
    """In the process of the tests: ends the run, or the process."""

    def __init__(self, config: pytest.Config) -> None:
        self.until: float = config.option.until
        self.hanging: float = config.option.hanging
        self.failures = config.option.log.with_name("failures.txt").open("a")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test for no longer than it may, and no other after the end or on a GPU that no longer answers."""
        failed, left = item.session.testsfailed, max(self.until - time.time(), 0.0)
        faulthandler.dump_traceback_later(min(self.hanging, left + LAST_SECONDS), exit=True, file=self.failures)
        try:
            done = yield
            if item.session.testsfailed > failed and _gpu_is_broken():
                if hasattr(item.config, "workerinput"):
                    os._exit(1)
                item.session.shouldstop = "the GPU no longer answers this process"
        finally:
            faulthandler.cancel_dump_traceback_later()
        if time.time() > self.until:
            item.session.shouldstop = "the time is over"
        return done


def _gpu_is_broken() -> bool:
    """After an illegal access every call of this process fails, and would say so of every test that follows."""
    try:
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class _Log:
    """In the process that hears of all tests: writes what it hears."""

    def __init__(self, path: Path) -> None:
        self.lines, self.failures = path.open("w"), path.with_name("failures.txt").open("a")
        self.collected = False

    def _write(self, *lines: str) -> None:
        self.lines.write("".join(f"{line}\n" for line in lines))
        self.lines.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what is to be run."""
        self._write(*(f"collected {item.nodeid}" for item in session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Note what is to be run, as the first of the processes says."""
        if not self.collected:
            self.collected = True
            self._write(*(f"collected {test}" for test in ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test begins: it may be the last thing that is known of it."""
        self._write(f"begun {nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test ended."""
        if report.when == "call" or not report.passed:
            self._write(f"{report.outcome} {report.nodeid}")
        self._write_failure(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that could not be collected."""
        if report.failed:
            self._write(f"failed {report.nodeid}")
            self._write_failure(report)

    def _write_failure(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self.failures.write(f"== {report.nodeid}\n{report.longreprtext}\n\n")
            self.failures.flush()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell a run that stopped in time from one that failed."""
        if session.shouldstop or session.exitstatus == pytest.ExitCode.INTERRUPTED:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK
