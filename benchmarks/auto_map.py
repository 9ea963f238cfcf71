"""
``python -m benchmarks.auto_map --json map.json --png map.png``: does ``grad_mode="auto"`` choose the fastest mode?

It times a training step in each fixed mode and in ``auto``, over tables of up to 1 GB, batches and optimizers. The
order of these points is random and always the same, so that a run of any length is a sample of them all. Points that
the file has already are not measured again: a run that was stopped, by hand or by ``--minutes``, goes on where it was.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import torchsparse_rec
from torchsparse_rec.files import whole_file
from torchsparse_rec.typing import GradMode

from .ids import SPREADS
from .interrupt import run_command
from .machine import machine
from .rows import Call
from .timing import clock_block

ROWS = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
DIMS = (1, 4, 16, 64, 256, 512)
BATCHES = (256, 1_024, 4_096, 16_384, 65_536)
OPTIMIZERS = ("SGD", "Adagrad", "Adam")
FIXED: tuple[GradMode, ...] = ("dense", "sparse", "fused")
MODES: tuple[GradMode, ...] = (*FIXED, "auto")
LARGEST_TABLE = 1 << 30
# What auto's choice may cost beyond the fastest mode's time: this share of it or this many milliseconds, but never
# NEVER times it or more.
SHARE, MILLISECONDS, NEVER = 1.1, 0.1, 1.5
# Seconds for each mode of a point: until its steps no longer become faster, and in each of the blocks.
WARM_UP_SECONDS, WARM_UP_STEPS, BLOCK_MS = 0.3, 110, 60.0

Point = dict[str, Any]


def grid() -> list[Point]:
    """Return all points, shuffled."""
    points = [
        {"rows": rows, "dim": dim, "batch": batch, "optimizer": optimizer}
        for rows, dim, batch, optimizer in itertools.product(ROWS, DIMS, BATCHES, OPTIMIZERS)
        if rows * dim * 4 <= LARGEST_TABLE
    ]
    random.Random(0).shuffle(points)
    return points


# ---- One point ------------------------------------------------------------------------------------------------------


def make_step(point: Point, mode: GradMode, spread: str, device: str) -> tuple[torchsparse_rec.nn.Embedding, Call]:
    """Make a table and a step on it, and run the step until the optimizer's state exists and auto has chosen."""
    rows, dim, batch = point["rows"], point["dim"], point["batch"]
    table = torch.empty(rows, dim, device=device).uniform_(-0.05, 0.05)
    module = torchsparse_rec.nn.Embedding(rows, dim, _weight=table, grad_mode=mode)
    optimizer = getattr(torchsparse_rec.optim, point["optimizer"])(module.parameters(), lr=0.01, in_backward=True)
    ids = itertools.cycle(SPREADS[spread](batch * 16, rows, device).split(batch))
    gradient = torch.randn(batch, dim, device=device)

    def step() -> None:
        module(next(ids)).backward(gradient)
        optimizer.step()
        optimizer.zero_grad()

    step()
    for value in itertools.chain(*(state.values() for state in optimizer.state.values())):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0:
            value.add_(1e-3)  # A page that was never written to would otherwise be made at a row's first step.
    began = time.perf_counter()
    for _ in range(WARM_UP_STEPS):
        step()
        if time.perf_counter() - began > WARM_UP_SECONDS:
            break
    return module, step


def measure(point: Point, spread: str, device: str, blocks: int = 4) -> Point:
    """Time a point in each mode, in alternating blocks; return it with each mode's milliseconds and auto's choice."""
    made = {mode: make_step(point, mode, spread, device) for mode in MODES}
    calls = {}
    for mode, (_, step) in made.items():
        once = clock_block(step, 2, device)[1]
        calls[mode] = max(4, min(20, round(BLOCK_MS / max(once, 1e-3))))
    kept: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(blocks):
        for mode, (_, step) in made.items():
            kept[mode] += clock_block(step, calls[mode], device)[calls[mode] // 4 :]
    return {**point, "ms": {mode: statistics.median(times) for mode, times in kept.items()}, "choice": choice(made)}


def choice(made: dict[GradMode, tuple[torchsparse_rec.nn.Embedding, Call]]) -> str:
    """Return the mode that auto says it has chosen."""
    found = re.search(r"-> (\w+)", made["auto"][0].explain())
    assert found is not None
    return found[1]


# ---- What the points say --------------------------------------------------------------------------------------------


def excess(point: Point) -> tuple[float, float]:
    """Return the time of auto's mode over the fastest mode's, and the difference in milliseconds."""
    best = min(point["ms"][mode] for mode in FIXED)
    chosen = point["ms"][point["choice"]]
    return chosen / best, chosen - best


def good(point: Point) -> bool:
    """Say whether auto's choice is close enough to the fastest mode."""
    ratio, more = excess(point)
    return ratio <= SHARE or more <= MILLISECONDS


def summary(points: list[Point]) -> Iterator[str]:
    """Return the verdict in words, and the worst points."""
    if not points:
        return
    share = sum(map(good, points)) / len(points)
    worst = sorted(points, key=lambda point: -excess(point)[0])
    far = sum(excess(point)[0] > NEVER for point in points)
    yield (
        f"{len(points)} points: auto's choice within {100 * (SHARE - 1):.0f} % or {MILLISECONDS} ms of the fastest at "
        f"{100 * share:.1f} %; beyond {NEVER} x at {far}"
    )
    slower = statistics.median(point["ms"]["auto"] / point["ms"][point["choice"]] for point in points)
    yield f"auto itself takes {slower:.3f} x the time of the mode that it chooses (median)"
    for point in worst[:10]:
        yield f"  {excess(point)[0]:.2f} x  {describe(point)}"


def describe(point: Point) -> str:
    """Describe a point in a line."""
    times = ", ".join(f"{mode} {point['ms'][mode]:.3f}" for mode in MODES)
    size = f"{point['rows']:>10,} x {point['dim']:<4} batch {point['batch']:>6,} {point['optimizer']:<8}"
    return f"{size} {times} ms; auto chose {point['choice']}"


def draw(points: list[Point], path: Path) -> None:
    """
    Draw the map: optimizers below each other, batches side by side; in each, rows to the right and columns upwards.

    The colour is the fastest mode's, the letter auto's choice. The number beneath is how much slower auto's choice is,
    if it is slower; it is red if that is too much.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(FIXED, ("#9ecae1", "#fdd0a2", "#a1d99b"), strict=True))
    figure, panels = plt.subplots(len(OPTIMIZERS), len(BATCHES), figsize=(17, 10), sharex=True, sharey=True)
    for (y, optimizer), (x, batch) in itertools.product(enumerate(OPTIMIZERS), enumerate(BATCHES)):
        panel = panels[y, x]
        for point in points:
            if (point["optimizer"], point["batch"]) != (optimizer, batch):
                continue
            place = (ROWS.index(point["rows"]), DIMS.index(point["dim"]))
            fastest = min(FIXED, key=lambda mode: point["ms"][mode])
            panel.add_patch(plt.Rectangle((place[0] - 0.5, place[1] - 0.5), 1, 1, color=colours[fastest]))
            ratio = excess(point)[0]
            text = point["choice"][0].upper() + (f"\n{ratio:.2f}" if ratio > 1.005 else "")
            colour = "black" if good(point) else "red"
            panel.text(*place, text, ha="center", va="center", fontsize=7, color=colour)
        panel.set_title(f"{optimizer}, batch {batch:,}", fontsize=9)
        panel.set_xlim(-0.5, len(ROWS) - 0.5)
        panel.set_ylim(-0.5, len(DIMS) - 0.5)
        panel.set_xticks(range(len(ROWS)), [f"{rows:.0e}".replace("e+0", "e") for rows in ROWS], fontsize=7)
        panel.set_yticks(range(len(DIMS)), [str(dim) for dim in DIMS], fontsize=7)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, [f"{mode} is fastest" for mode in FIXED], loc="lower center", ncol=3, fontsize=9)
    head = next(summary(points), "no points")
    figure.suptitle(
        f"grad_mode='auto': rows to the right, columns upwards; letters: auto's choice\n{head}", fontsize=10
    )
    figure.tight_layout(rect=(0, 0.03, 1, 0.97))
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---- The command ----------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto_map", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file of the points, rewritten after each")
    parser.add_argument("--png", type=Path, help="file for the map, drawn at the end; needs matplotlib")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="start no point after this time; 0: only draw (default: 10)"
    )
    parser.add_argument(
        "--spread", choices=list(SPREADS), default="uniform", help="spread of the ids (default: uniform)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--most-rows", type=int, default=ROWS[-1], help="rows of the largest table measured")
    return parser.parse_args(arguments)


def load(path: Path) -> list[Point]:
    """Read the points that the file has already."""
    return json.loads(path.read_text())["points"] if path.is_file() else []


def store(path: Path, points: list[Point], about: dict[str, str]) -> None:
    """Write the file, whole or not at all."""
    with whole_file(path) as file:
        file.write((json.dumps({"machine": about, "points": points}, indent=1) + "\n").encode())


def key(point: Point) -> tuple[Any, ...]:
    """Return what identifies a point."""
    return point["rows"], point["dim"], point["batch"], point["optimizer"]


def main(arguments: list[str] | None = None) -> int:
    """Measure points until the time is over, then print the summary."""
    given = parse(arguments)
    torch.set_num_threads(given.threads)
    about = {**machine(given.device, given.threads), "ids": given.spread}
    points = load(given.json)
    done, until = {key(point) for point in points}, time.monotonic() + 60 * given.minutes
    for point in grid():
        if time.monotonic() >= until:
            break
        if key(point) in done or point["rows"] > given.most_rows:
            continue
        points.append(measure(point, given.spread, given.device))
        print(describe(points[-1]), flush=True)
        store(given.json, points, about)
        gc.collect()
    for line in summary(points):
        print(line)
    if given.png is not None:
        draw(points, given.png)
        print(f"written: {given.png}")
    return 0


if __name__ == "__main__":
    run_command(main)
