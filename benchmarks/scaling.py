"""
``python -m benchmarks scaling``: how the cost of lookups and steps grows, along one axis at a time.

A point of an axis differs from the base in one value: rows, ids of a call, tables, columns, threads, or how skewed the
ids are. Each point is a separate process, so that its peak of memory is its own. Beside it, in alternating blocks,
torch gathers the same rows. Rounds over all points follow each other in random order until ``--minutes`` are over, and
a point's figure is the median of its rounds. A cost that changes more than 1.5 times from one point to the next is a
knee. :data:`AXES` explains it; a knee without a sentence there is printed as unexplained.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchsparse_rec
from torchsparse_rec import nn, optim, variable

from .ids import uniform_ids, zipf_ids
from .interrupt import run_command
from .machine import ROOT, begin_peak_anew, machine, memory
from .timing import Call, clock_block, compare, copy_gb_per_second

# Ids in each bag.
HOT = 10
# A change of the cost that needs an explanation.
KNEE = 1.5
# The share of the free memory that a point may need.
SHARE = 0.8
# Ids that are drawn for a point, so that a small batch does not find its rows in the caches because it had them before.
DRAWN = 1 << 20


@dataclass(frozen=True)
class Point:
    """The lookups of one call: ``rows`` and ``ids`` count all tables together."""

    rows: int = 1_000_000
    ids: int = 100_000
    tables: int = 1
    dim: int = 16
    threads: int = os.cpu_count() or 1
    # The exponent of Zipf's law; 0: uniform ids.
    skew: float = 0.0


QUICK = Point(rows=1_000, ids=200, dim=4, threads=1)

WORKLOADS = {
    "lookup": "pooled lookup, without gradients",
    "fused": "lookup, backward, SGD within backward",
    "sparse": "lookup, backward to COO gradients, our SGD",
    "dynamic": "the fused step of tables that grow, all keys present",
}


@dataclass(frozen=True)
class Knee:
    """Why the cost changes somewhere between two values of an axis: in all workloads, or in those named."""

    since: float
    until: float
    why: str
    workloads: tuple[str, ...] = tuple(WORKLOADS)


@dataclass(frozen=True)
class Axis:
    """Values of one size, the unit in which the cost is counted, and the known knees."""

    values: tuple[float, ...]
    quick: tuple[float, ...]
    unit: str
    # How many of the unit a call has.
    units: Callable[[Point], float]
    knees: tuple[Knee, ...] = field(default=())


# What the sentences say of caches and pages holds for the base's 16 columns, 64 bytes a row. The EPYCs have half a MB
# or 1 MB of second-level cache, 32 MB of third-level cache and pages of 4 KB.
AXES = {
    "rows": Axis(
        (10**3, 10**4, 10**5, 10**6, 10**7, 10**8),
        (100, 1_000),
        "id",
        lambda point: point.ids,
        (
            Knee(
                10**4,
                10**5,
                "The table outgrows the second-level cache, and a batch has six times as many different rows, each of "
                "which a step merges and writes.",
            ),
            Knee(10**5, 10**6, "The table, 64 MB, outgrows the third-level cache: rows come from memory."),
            Knee(
                10**6,
                10**7,
                "The translations of 640 MB do not fit the TLB, and their page tables do not fit the second-level "
                "cache. A row costs a page walk beside its read.",
            ),
            Knee(
                10**7,
                10**8,
                "The page tables, 13 MB and on a virtual machine the host's as well, leave the third-level cache too. "
                "A row costs several reads of memory, each of which waits for the one before.",
            ),
        ),
    ),
    "ids": Axis(
        (10, 100, 10**3, 10**4, 10**5, 10**6, 10**7),
        (20, 200),
        "id",
        lambda point: point.ids,
        (
            Knee(
                10,
                10**4,
                "More ids share the costs of a call that do not depend on its size (Python, autograd, checks, the "
                "optimizer's step).",
            ),
            Knee(
                10**4,
                10**5,
                "The same, for the last time. Besides, from 16,384 ids on a lookup has work for a second thread: each "
                "thread gets 131,072 elements or more.",
            ),
            Knee(
                10**5,
                10**6,
                "Rows begin to occur several times in a batch, and a step updates each once for all its ids.",
                ("fused", "sparse", "dynamic"),
            ),
        ),
    ),
    "tables": Axis(
        (1, 10, 100, 1_000),
        (1, 2),
        "id",
        lambda point: point.ids,
        (
            Knee(
                10,
                1_000,
                "Only 1,000 and 100 ids share the work that is done once for each table: its part in the arguments of "
                "a lookup, its COO gradient and the optimizer's step on it, and the search and insertion of its keys.",
            ),
        ),
    ),
    "dim": Axis(
        (1, 4, 16, 64, 256, 1_024),
        (1, 4),
        "byte of a row",
        lambda point: 4 * point.dim * point.ids,
        (
            Knee(1, 16, "A row of less than 64 bytes costs a cache line all the same."),
            Knee(
                1,
                256,
                "More bytes share the costs of an id beside its row (grouping by rows, the search for a key).",
                ("fused", "sparse", "dynamic"),
            ),
            Knee(
                16,
                1_024,
                "The processor notices that a row of several lines is read in sequence, and fetches ahead. The row "
                "needs one or two translations for all its bytes.",
                ("lookup",),
            ),
        ),
    ),
    "threads": Axis(
        tuple(sorted({1, 2, os.cpu_count() or 1})), (1,), "id, times threads", lambda point: point.ids / point.threads
    ),
    "skew": Axis(
        (0.0, 0.5, 0.8, 1.0, 1.2, 1.5),
        (0.0, 1.0),
        "id",
        lambda point: point.ids,
        (
            Knee(
                0.0,
                1.5,
                "The more skewed the ids, the fewer different rows a batch has, and the more of them the caches hold.",
            ),
        ),
    ),
}


def at(axis: str, value: float, quick: bool) -> Point:
    """Return the point of an axis."""
    sizes: dict[str, Any] = {axis: value}
    return replace(QUICK if quick else Point(), **sizes)


# ---- One point, in a process of its own ------------------------------------------------------------------------------


def batches(point: Point) -> list[Tensor]:
    """Draw the ids of several calls, table after table in each, all below the rows of one table."""
    count, rows = max(2, DRAWN // point.ids), point.rows // point.tables
    if point.skew == 0:
        return list(uniform_ids(count * point.ids, rows, "cpu").split(point.ids))
    return list(zipf_ids(count * point.ids, rows, "cpu", exponent=point.skew).split(point.ids))


def keys_of(ids: Tensor) -> Tensor:
    """Return different keys of 63 bits for different ids: products with an odd number, modulo 2**63."""
    return (ids * 0x1E3779B97F4A7C15) & (2**63 - 1)


def make(workload: str, point: Point, drawn: list[Tensor]) -> tuple[Call, Callable[[], Tensor]]:
    """Make tables; return the call, and a function that returns a table of as many rows as all of them have."""
    rows, features = point.rows // point.tables, [f"f{n}" for n in range(point.tables)]
    grows = workload == "dynamic"
    configs = [
        nn.EmbeddingBagConfig(
            rows,
            point.dim,
            key,
            feature_names=[key],
            ev_option=variable.EmbeddingVariableOption() if grows else None,
            init_fn=None if grows else lambda table: table.fill_(0.01),
        )
        for key in features
    ]
    collection = nn.EmbeddingBagCollection(configs, grad_mode="sparse" if workload == "sparse" else "fused")
    tables: Any = collection.embedding_bags
    if grows:
        for key, some in itertools.product(features, torch.arange(rows).split(1 << 20)):
            tables[key].insert(keys_of(some), torch.full((len(some), point.dim), 0.01))
    optimizer = optim.SGD(collection.parameters(), lr=0.01, in_backward=workload != "sparse")
    offsets = torch.arange(0, point.ids + 1, HOT)
    inputs = itertools.cycle(
        torchsparse_rec.KeyedJaggedTensor(features, keys_of(ids) if grows else ids, offsets=offsets).sync()
        for ids in drawn
    )
    gradient = torch.ones(point.ids // HOT // point.tables, point.tables * point.dim)

    @torch.no_grad()
    def lookup() -> Tensor:
        return collection(next(inputs)).values()

    def step() -> None:
        collection(next(inputs)).values().backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    def table() -> Tensor:
        if point.tables > 1:
            return torch.full((point.rows, point.dim), 0.01)
        return tables[features[0]].weight.detach()

    return lookup if workload == "lookup" else step, table


def gather(table: Tensor, point: Point, drawn: list[Tensor]) -> Call:
    """Make a call in which torch reads the rows of a batch, into memory that is kept and fits a last-level cache."""
    rows = max(1, (8 << 20) // (point.dim * table.element_size()))
    starts = torch.arange(0, point.rows, point.rows // point.tables).repeat_interleave(point.ids // point.tables)
    kept = torch.empty(min(rows, point.ids), point.dim)
    inputs = itertools.cycle([ids + starts for ids in drawn])

    def run() -> None:
        for ids in next(inputs).split(rows):
            torch.index_select(table, 0, ids, out=kept[: len(ids)])

    return run


def measure(workload: str, point: Point, quick: bool) -> dict[str, float]:
    """Return the milliseconds of a call and of the gather beside it, and the bytes that are needed beyond the rows."""
    torch.set_num_threads(point.threads)
    drawn = batches(point)
    before = memory("VmRSS")
    call, table = make(workload, point, drawn)
    begin_peak_anew()
    for _ in range(3):
        call()
    beyond = memory("VmHWM") - before - 4 * point.rows * point.dim
    pair = compare(call, gather(table(), point, drawn), "cpu", quick)
    return {"ms": pair.ours_ms, "gather_ms": pair.peer_ms, "beyond_bytes": beyond}


def needed(workload: str, point: Point) -> int:
    """Return about how many bytes a point needs: of a table that grows, also an index, while that is made anew."""
    rows = point.rows * (4 * point.dim + (48 if workload == "dynamic" else 0))
    drawn = 8 * max(2 * point.ids, DRAWN) * (4 if workload == "dynamic" else 3)
    return rows + drawn + (16 * point.rows if point.skew else 0) + 12 * point.ids * point.dim


def free_memory() -> int:
    """Return the bytes of memory that is free, or can be made so."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def apart(workload: str, point: Point, quick: bool, seconds: float) -> dict[str, Any]:
    """Measure in a separate process; return its figures, or why there are none."""
    if needed(workload, point) > SHARE * free_memory():
        return {"skipped": f"needs {needed(workload, point) / 1e9:.0f} GB, of {free_memory() / 1e9:.0f} free"}
    given = json.dumps({"workload": workload, "point": asdict(point), "quick": quick})
    command = [sys.executable, "-m", "benchmarks.scaling", "--point", given]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"skipped": "the time was over"}
    if ended.returncode != 0:
        return {"skipped": (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1]}
    return json.loads(ended.stdout.splitlines()[-1])


# ---- Rounds ----------------------------------------------------------------------------------------------------------


@dataclass
class Figures:
    """The measurements of the rounds at one point."""

    workload: str
    point: Point
    rounds: list[dict[str, float]] = field(default_factory=list)
    skipped: str = ""

    def median(self, name: str) -> float | None:
        """Return the median of one figure over the rounds."""
        return statistics.median(each[name] for each in self.rounds) if self.rounds else None


def rounds(
    axes: list[str], quick: bool, minutes: float, keep: Callable[[list[Figures]], None], run: Callable[..., Any] = apart
) -> list[Figures]:
    """
    Measure all points of the axes, round after round, until the time is over.

    Args:
        axes: the names of the axes.
        quick: whether to run one round of small sizes only.
        minutes: the time after which no point is begun, and one that runs is ended.
        keep: a function that is called after each point with all figures so far.
        run: :func:`apart`, or its stand-in in a test.
    """
    points = {at(name, value, quick) for name in axes for value in (AXES[name].quick if quick else AXES[name].values)}
    found = [Figures(workload, point) for point, workload in itertools.product(sorted(points, key=repr), WORKLOADS)]
    until, order = time.monotonic() + 60 * minutes, random.Random(0)
    for turn in itertools.count():
        for each in order.sample(found, len(found)):
            left = until - time.monotonic()
            if left <= 0:
                break
            if each.skipped:
                continue
            got = run(each.workload, each.point, quick, left)
            if "skipped" not in got:
                each.rounds.append(got)
            elif not each.rounds:
                each.skipped = got["skipped"]
            keep(found)
        if quick or until <= time.monotonic() or all(each.skipped for each in found):
            break
        print(f"round {turn + 1} is done", file=sys.stderr, flush=True)
    for each in found:
        each.skipped = each.skipped or ("" if each.rounds else "the time was over")
    return found


# ---- What the figures say --------------------------------------------------------------------------------------------


def curve(axis: str, workload: str, figures: list[Figures], quick: bool) -> Iterator[tuple[float, Figures]]:
    """Yield the values of an axis with the figures of a workload."""
    found = {each.point: each for each in figures if each.workload == workload}
    for value in AXES[axis].quick if quick else AXES[axis].values:
        if at(axis, value, quick) in found:
            yield value, found[at(axis, value, quick)]


def cost(axis: str, each: Figures, name: str = "ms") -> float | None:
    """Return nanoseconds per unit of an axis."""
    ms = each.median(name)
    return None if ms is None else ms * 1e6 / AXES[axis].units(each.point)


def knees(axis: str, figures: list[Figures], quick: bool = False) -> list[dict[str, Any]]:
    """Return each change of the cost by more than 1.5 times between neighbours, with its explanation or None."""
    found = []
    for workload in WORKLOADS:
        costs = [(value, cost(axis, each)) for value, each in curve(axis, workload, figures, quick)]
        for (low, before), (high, after) in itertools.pairwise((x, y) for x, y in costs if y is not None):
            assert before is not None and after is not None
            change = after / before
            if max(change, 1 / change) <= KNEE:
                continue
            here = [k.why for k in AXES[axis].knees if k.since <= low and high <= k.until and workload in k.workloads]
            found.append({"axis": axis, "workload": workload, "from": low, "to": high, "change": change, "why": here})
    return found


def floors(quick: bool) -> dict[str, float]:
    """Measure this machine: copies, in GB/s, and the cost of a page at its first write, in nanoseconds of a byte."""
    copy_gb, size = copy_gb_per_second("cpu", quick), (1 << 20) if quick else (1 << 26)
    kept = torch.zeros(size)
    fresh = statistics.median(clock_block(lambda: torch.zeros(size), 5, "cpu")[1:])
    warm = statistics.median(clock_block(kept.zero_, 5, "cpu")[1:])
    return {"copy_gb_per_second": copy_gb, "fault_ns_per_byte": max(0.0, fresh - warm) * 1e6 / (4 * size)}


def lookup_bytes(point: Point) -> float:
    """Return the bytes of a pooled lookup: ids, the cache lines of a row for each, offsets and results."""
    return point.ids * (8 + 64 * math.ceil(4 * point.dim / 64) + (8 + 4 * point.dim) / HOT)


def lines_of_floors(axis: str, figures: list[Figures], machine_floors: dict[str, float], quick: bool) -> dict[str, Any]:
    """Return the machine's floors of a lookup along an axis, in nanoseconds per unit: values and costs of each."""
    copied, gathered, faults = [], [], []
    for value, each in curve(axis, "lookup", figures, quick):
        point, units = each.point, AXES[axis].units(each.point)
        copied.append((value, lookup_bytes(point) / machine_floors["copy_gb_per_second"] / units))
        faults.append((value, machine_floors["fault_ns_per_byte"] * 4 * point.dim * point.ids / HOT / units))
        peer = cost(axis, each, "gather_ms")
        gathered += [] if peer is None else [(value, peer)]
    return {
        "rows gathered by torch's index_select": gathered,
        "a lookup's cache lines at the bandwidth of memory": copied,
        "page faults of a lookup's result, if it is fresh": faults,
    }


# ---- Output ----------------------------------------------------------------------------------------------------------


def page(content: dict[str, Any], figures: list[Figures]) -> str:
    """Return the page: a table for each axis, its picture, and a sentence for each knee."""
    about, quick = content["machine"], content["quick"]
    base = ", ".join(f"{value:,} {name}" for name, value in asdict(QUICK if quick else Point()).items())
    parts = [
        "# How cost grows\n",
        f"Written by `python -m benchmarks scaling` on {about['processor']}, {about['cores']} cores, at commit "
        f"{about['commit']}, {about['date']}, load {about['load']} at the end. One size varies, and the others are "
        f"those of the base: {base}. Skew is the exponent of Zipf's law; 0 is uniform. Rows and ids count all tables "
        f"together, and bags have {HOT} ids. Cells have nanoseconds per unit. In brackets they have megabytes beyond "
        f"the tables' own rows: the index of tables that grow, results, gradients, scratch. Figures are medians of "
        f"{content['rounds']} rounds. In the pictures broken lines are the machine's floors for a lookup whose rows "
        f"are in no cache. Copies reach {content['floors']['copy_gb_per_second']:.1f} GB/s, and first writes to fresh "
        f"pages take {content['floors']['fault_ns_per_byte']:.2f} ns a byte. Torch's gather is a program, so ours can "
        "be faster.\n",
    ]
    parts += ["Quick: small sizes and few calls, the figures say nothing about speed.\n"] if quick else []
    parts += [f"* {name}: {what}" for name, what in WORKLOADS.items()]
    unexplained = [each for each in content["knees"] if not each["why"]]
    parts.append(f"\nChanges over {KNEE:g}x from one point to the next that this page does not explain: ")
    parts[-1] += "none." if not unexplained else "; ".join(words(each) for each in unexplained) + "."
    for axis in content["axes"]:
        parts.append(f"\n## {axis}\n\nns per {AXES[axis].unit}.\n")
        curves = {name: list(curve(axis, name, figures, quick)) for name in WORKLOADS}
        head = [axis, *WORKLOADS, "torch's gather"]
        parts += [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
        for n, (value, each) in enumerate(curves["lookup"]):
            peer = cost(axis, each, "gather_ms")
            cells = [_cell(axis, curves[name][n][1]) for name in WORKLOADS] + ["" if peer is None else f"{peer:.3g}"]
            parts.append(f"| {value:,} | {' | '.join(cells)} |")
        parts.append(f"\n![Cost by {axis}]({axis}.png)\n")
        for knee in AXES[axis].knees:
            where = ", ".join(knee.workloads) if len(knee.workloads) < len(WORKLOADS) else "all"
            parts.append(f"* {knee.since:,} to {knee.until:,} ({where}): {knee.why}")
    return "\n".join(parts) + "\n"


def _cell(axis: str, each: Figures) -> str:
    spent, beyond = cost(axis, each), each.median("beyond_bytes")
    return each.skipped if spent is None or beyond is None else f"{spent:.3g} [{beyond / 1e6:,.0f}]"


def words(knee: dict[str, Any]) -> str:
    """Return a knee in words."""
    return f"{knee['workload']}, {knee['axis']} {knee['from']:,} to {knee['to']:,}: {knee['change']:.2f}x"


def draw(axis: str, figures: list[Figures], machine_floors: dict[str, float], quick: bool, path: Path) -> None:
    """Draw an axis, both scales logarithmic: workloads as lines with points, the machine's floors broken."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(10, 5))
    for name in WORKLOADS:
        pairs = [(value, cost(axis, each) or 0.0) for value, each in curve(axis, name, figures, quick) if each.rounds]
        panel.plot([x for x, _ in pairs], [y for _, y in pairs], "o-", label=name)
    for name, pairs in lines_of_floors(axis, figures, machine_floors, quick).items():
        panel.plot([x for x, _ in pairs], [y for _, y in pairs], "--", linewidth=1, label=name)
    # Uniform ids have the exponent 0, which has no logarithm.
    panel.set_xscale("linear" if axis == "skew" else "log")
    panel.set_yscale("log")
    panel.set_xlabel(axis)
    panel.set_ylabel(f"ns per {AXES[axis].unit}")
    panel.grid(True, which="both", alpha=0.3)
    panel.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="rounds end after this time (default: 30)")
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES), help="default: all")
    parser.add_argument("--out", type=Path, help="folder for README.md, scaling.json and pictures (needs matplotlib)")
    parser.add_argument("--quick", action="store_true", help="one round of small sizes: show that all of it runs")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)  # what a process of its own measures
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print or write the page. Return 1 if a knee is not explained, else 0."""
    given = parse(arguments)
    if given.point is not None:
        print(json.dumps(measure(given.point["workload"], Point(**given.point["point"]), given.point["quick"])))
        return 0
    if given.out is not None:
        import matplotlib  # noqa: F401  # Missing, it is missed before half an hour has gone.

        given.out.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"quick": given.quick, "minutes": given.minutes, "axes": given.axes}
    content["floors"] = floors(given.quick)

    def keep(figures: list[Figures]) -> None:
        content["machine"] = machine("cpu", (QUICK if given.quick else Point()).threads)
        content["rounds"] = max(len(each.rounds) for each in figures)
        content["knees"] = [] if given.quick else [knee for axis in given.axes for knee in knees(axis, figures)]
        content["points"] = [asdict(each) for each in figures]
        if given.out is not None:
            (given.out / "scaling.json").write_text(json.dumps(content, indent=1) + "\n")

    figures = rounds(given.axes, given.quick, given.minutes, keep)
    keep(figures)
    if given.out is not None:
        (given.out / "README.md").write_text(page(content, figures))
        for axis in given.axes:
            draw(axis, figures, content["floors"], given.quick, given.out / f"{axis}.png")
    print(page(content, figures))
    for each in content["knees"]:
        if not each["why"]:
            print(f"UNEXPLAINED: {words(each)}", file=sys.stderr)
    return 1 if any(not each["why"] for each in content["knees"]) else 0


if __name__ == "__main__":
    run_command(main)
