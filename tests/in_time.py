"""
Runs tests as long as there is time, in several processes; results are written to files at once.

``python tests/in_time.py --workers N --until TIME --log FILE ...`` hands the other arguments to pytest, and this file
as a plugin. It stops at TIME (seconds since 1970). FILE gets a line whenever a test is ``collected``, has ``begun``,
and has ``passed``, ``failed`` or was ``skipped``; ``failures.txt`` beside it gets the failures, with their tracebacks.
A test that the logs in that folder list as begun is not run again. A test that hangs, or leaves a GPU behind that no
longer answers, ends its process; another process goes on with the next test.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

# Seconds for a test that still runs when the time is over, also if it hangs.
LAST_SECONDS = 10.0
# Bytes of tracebacks that are written whole: if all tests fail, the first ones say why.
MOST_BYTES = 8_000_000


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that say which tests to run, until when, and where to write."""
    parser.addoption("--part", default="0/1", help="K/N: of N tests one after another the one after K")
    parser.addoption("--until", type=float, required=True)
    parser.addoption("--log", type=Path, required=True)
    parser.addoption("--hanging", type=float, default=60.0, help="seconds that no test takes")
    parser.addoption("--last", default="", help="test functions whose cases come last, separated by commas")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that writes the log."""
    config.pluginmanager.register(_Writer(config))


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
    """Move some tests to the end, take this process's part, and leave out those that have begun before."""
    last, (part, parts) = set(config.option.last.split(",")), map(int, config.option.part.split("/"))
    items.sort(key=lambda item: item.nodeid.partition("[")[0].rpartition("::")[2] in last)
    lines = [line for log in config.option.log.parent.glob("*.log") for line in log.read_text().splitlines()]
    begun = {line.partition(" ")[2] for line in lines if line.startswith("begun ")}
    items[:] = [item for item in items[part::parts] if item.nodeid not in begun]


class _Writer:
    """Writes what happens, and watches the time. All processes write to the same files, each text in one piece."""

    def __init__(self, config: pytest.Config) -> None:
        path, flags = config.option.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.log, self.failures = (os.open(x, flags, 0o644) for x in (path, path.with_name("failures.txt")))
        self.until, self.hanging = config.option.until, config.option.hanging
        self.first = config.option.part.startswith("0/")

    def _write(self, *lines: str) -> None:
        os.write(self.log, "".join(f"{line}\n" for line in lines).encode())

    def _write_failure(self, test: str, text: str) -> None:
        self._write(f"failed {test}")
        text = text if os.fstat(self.failures).st_size < MOST_BYTES else text[-200:]
        os.write(self.failures, f"== {test}\n{text}\n\n".encode())

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Log a file that could not be collected, in one process alone."""
        if report.failed and self.first:
            self._write_failure(report.nodeid, report.longreprtext)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Log the tests that are to be run."""
        self._write(*(f"collected {item.nodeid}" for item in session.items))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run a test for no longer than it may, and none after it if the time is over or the GPU no longer answers."""
        self._write(f"begun {item.nodeid}")
        left = max(self.until - time.time(), 0.0)
        faulthandler.dump_traceback_later(min(self.hanging, left + LAST_SECONDS), exit=True, file=self.failures)
        try:
            done = yield
            if (error := _gpu_error()) is not None:
                self._write_failure(item.nodeid, f"after this test: {error}")
                os._exit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if time.time() > self.until:
            item.session.shouldstop = "the time is over"
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Log how a test ended. After a subtest that passed, its test may still fail or hang."""
        if report.failed:
            self._write_failure(report.nodeid, report.longreprtext)
        elif type(report) is pytest.TestReport and (report.when == "call" or report.skipped):
            self._write(f"{report.outcome} {report.nodeid}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Set the status OK if the process came to its end or stopped in time, to tell it from one that died."""
        if session.exitstatus in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            session.exitstatus = pytest.ExitCode.OK


def _gpu_error() -> RuntimeError | None:
    """Return the GPU's error, if any: after an illegal access every call fails, also in every later test."""
    try:
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return error
    return None


def main(arguments: list[str]) -> int:
    """Start the processes, and restart each that died. Return 0 if all tests that ran have passed."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--until", type=float, required=True)
    parser.add_argument("--log", type=Path, required=True)
    given, rest = parser.parse_known_args(arguments)
    command = [sys.executable, "-m", "pytest", "-p", "in_time", "--until", str(given.until), "--log", str(given.log)]
    in_order = {pytest.ExitCode.OK, *range(pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED + 1)}

    def work(part: int) -> int:
        while True:
            code = subprocess.run([*command, "--part", f"{part}/{given.workers}", *rest]).returncode
            if code in in_order or time.time() > given.until:
                return code

    with ThreadPoolExecutor(given.workers) as pool:
        codes = set(pool.map(work, range(given.workers)))
    words = {line.partition(" ")[0] for line in given.log.read_text().splitlines()} if given.log.exists() else set()
    codes -= {pytest.ExitCode.NO_TESTS_COLLECTED} if "passed" in words else set()
    return 1 if "failed" in words else int(max(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
