"""Runs rows and turns what they measured into text and JSON."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import torchsparse_rec

from .rows import Case, Fact, Options, Row, UnavailableError
from .timing import Pair, clock_block, compare

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Result:
    """A row's measurements."""

    row: Row
    case: Case
    pairs: dict[str, Pair] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    # Where no peer could be timed.
    alone_ms: float | None = None
    # Whether the targets, which are for two cores and the full sizes, apply.
    judged: bool = True

    def ours_ms(self) -> float:
        """The median of our medians, one per peer."""
        times = [pair.ours_ms for pair in self.pairs.values()]
        return statistics.median(times) if times else float(self.alone_ms or 0.0)

    def gb_per_second(self) -> float | None:
        """What the row must move, over our time."""
        moved = self.case.bytes_moved
        return None if moved is None else moved / (self.ours_ms() * 1e-3) / 1e9

    def passed(self, peer: str) -> bool | None:
        """Whether the ratio to a peer reaches its target; None without one, or where it is not judged."""
        target = self.row.targets.get(peer)
        if target is None or peer not in self.pairs or not self.judged:
            return None
        return self.pairs[peer].ratio() >= target


def run_row(row: Row, options: Options) -> Result:
    """
    Check a row's candidate, then time it beside each peer.

    Each peer has a window of its own with the candidate: what a ratio compares ran side by side, and only two tables
    are in memory at a time.

    Raises:
        AssertionError: if the check fails; nothing is timed then.
    """
    case = row.build(options)
    case.check()
    result = Result(row, case, judged=options.device == "cpu" and not options.quick)
    for name, make in case.peers.items():
        try:
            peer = make()
        except UnavailableError as error:
            result.unavailable[name] = str(error)
            continue
        ours = case.ours()
        result.pairs[name] = compare(ours, peer, options.device, options.quick)
        del peer, ours
        gc.collect()
    if not result.pairs:
        times = clock_block(case.ours(), 20, options.device)[5:]
        result.alone_ms = statistics.median(times)
    result.facts = case.facts()
    return result


def mark(passed: bool | None) -> str:
    """One word for a target."""
    return {None: "", True: "pass", False: "MISS"}[passed]


def lines(result: Result, copy_gb: float) -> list[str]:
    """A row as it is printed."""
    case, ours_ms = result.case, result.ours_ms()
    rate = result.gb_per_second()
    text = f"  {'ours':<26}{ours_ms:>10.3f} ms"
    if rate is not None:
        text += f"   {rate:.1f} GB/s, {100 * rate / copy_gb:.0f} % of copy"
    if case.samples:
        text += f"   {case.samples / ours_ms * 1e3:,.0f} samples/s"
    printed = [f"{result.row.name}: {result.row.what}", text]
    for name in case.peers:
        if name in result.unavailable:
            printed.append(f"  {name:<26}{'':>10}      {result.unavailable[name]}")
            continue
        pair = result.pairs[name]
        text = f"  {name:<26}{pair.peer_ms:>10.3f} ms   {pair.ratio():>7.2f} x"
        if result.passed(name) is not None:
            text += f"   target >= {result.row.targets[name]:g} x   {mark(result.passed(name))}"
        if case.samples:
            text += f"   {case.samples / pair.peer_ms * 1e3:,.0f} samples/s"
        if pair.ours_plan != pair.peer_plan:
            text += f"   ({pair.peer_plan})"
        printed.append(text)
    for fact in result.facts:
        limit = "" if fact.limit is None else f"   target < {fact.limit:g} {fact.unit}   {mark(fact.passed())}"
        printed.append(f"  {fact.name:<26}{fact.value:>10.1f} {fact.unit}{limit}")
    return printed


def as_json(result: Result) -> dict[str, Any]:
    """A row for the file."""
    peers = []
    for name in result.case.peers:
        entry: dict[str, Any] = {"name": name, "target": result.row.targets.get(name)}
        if name in result.unavailable:
            entry["unavailable"] = result.unavailable[name]
        else:
            pair = result.pairs[name]
            entry.update(ms=pair.peer_ms, ours_ms=pair.ours_ms, ratio=pair.ratio(), passed=result.passed(name))
            entry.update(plan=str(pair.peer_plan), ours_plan=str(pair.ours_plan))
        peers.append(entry)
    return {
        "name": result.row.name,
        "what": result.row.what,
        "ours_ms": result.ours_ms(),
        "bytes_moved": result.case.bytes_moved,
        "gb_per_second": result.gb_per_second(),
        "samples": result.case.samples,
        "peers": peers,
        "facts": [{**fact.__dict__, "passed": fact.passed()} for fact in result.facts],
    }


def machine(options: Options) -> dict[str, str]:
    """Where and with what the figures were taken."""
    versions = {}
    for package in ("tensorflow", "keras", "fbgemm-gpu-cpu", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    config = torchsparse_rec.config()
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "threads": str(options.threads),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "instruction set": config["instruction set"],
        "python": platform.python_version(),
        "torchsparse_rec": config["torchsparse_rec"],
        "torch": torch.__version__,
        **versions,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run(rows: list[Row], options: Options, copy_gb: float, emit: Callable[[str], None]) -> list[Result]:
    """Run rows one after another, printing each as it is done."""
    results = []
    for row in rows:
        try:
            result = run_row(row, options)
        except AssertionError as error:
            raise AssertionError(f"{row.name}: the result differs from the reference: {error}") from error
        for line in lines(result, copy_gb):
            emit(line)
        results.append(result)
    return results
