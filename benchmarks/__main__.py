"""
``python -m benchmarks``: times every operator, the embeddings and NCF beside their peers.

``python -m benchmarks scaling`` measures how cost grows; it has other options.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from torchsparse_rec.files import whole_file

from . import (
    adam,
    distributed,
    dlrm,
    embedding,
    embedding_gradients,
    embedding_lookup,
    embedding_variable,
    features,
    keras_report,
    ncf,
    overhead,
    prebatched,
    quantized,
    record,
    route,
    row_update,
    scaling,
    scores,
    segment,
    sok,
    sparse_segment,
    sparse_tensor,
    table,
    unique,
    wide_deep,
    wide_deep_training,
)
from . import hash as hash_rows
from .beside import Beside
from .interrupt import run_command
from .machine import machine
from .report import Result, as_json, behind, run
from .rows import Options, Row
from .timing import FULL, SLOW_MS, copy_gb_per_second

ROWS: list[Row] = [
    *keras_report.ROWS,
    *wide_deep.ROWS,
    *wide_deep_training.ROWS,
    *dlrm.ROWS,
    *features.ROWS,
    *sok.ROWS,
    *adam.ROWS,
    *embedding.ROWS,
    *embedding_gradients.ROWS,
    *embedding_lookup.ROWS,
    *quantized.ROWS,
    *scores.ROWS,
    *overhead.ROWS,
    *sparse_segment.ROWS,
    *segment.ROWS,
    *unique.ROWS,
    *route.ROWS,
    *distributed.ROWS,
    *hash_rows.ROWS,
    *record.ROWS,
    *row_update.ROWS,
    *sparse_tensor.ROWS,
    *ncf.ROWS,
    *prebatched.ROWS,
    *embedding_variable.ROWS,
]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="rows, or beginnings of their names such as 'segment' (default: all)")
    parser.add_argument(
        "--json", "--output", type=Path, metavar="PATH", help="write the figures there; in a folder: as <device>.json"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few calls: show that all of it runs, not how fast"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--threads", type=int, default=2, help="threads of every framework (default: 2)")
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="FOLDER",
        help="time the rows beside those of another checkout, which is built, in place of their peers",
    )
    parser.add_argument("--table", action="store_true", help="only write results/README.md from the results there")
    parser.add_argument("--list", action="store_true", help="print the rows' names and stop")
    return parser.parse_args(arguments)


def choose(names: list[str], device: str) -> list[Row]:
    """Return a device's rows whose names begin with the given names, in their order; without names all of them."""
    rows = [row for row in ROWS if device in row.devices]
    for name in names:
        if not any(row.name.startswith(name) for row in rows):
            raise ValueError(f"no row for {device} begins with {name!r}; --list prints them all")
    chosen = {row.name: row for name in names or [""] for row in rows if row.name.startswith(name)}
    return list(chosen.values())


def place(path: Path, device: str) -> Path:
    """Return the path of a JSON file: ``path`` itself, or a file named after the device if ``path`` is a folder."""
    return path / f"{device}.json" if path.is_dir() else path


def write_json(path: Path, device: str, content: dict) -> Path:
    """Write a JSON file, whole or not at all; return its path."""
    path = place(path, device)
    with whole_file(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
    return path


def refusal(given: argparse.Namespace) -> str | None:
    """Return the fault of the command line beside the rows' names, or None."""
    if given.threads < 1:
        return f"--threads must be at least 1, got {given.threads}"
    if given.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda needs an NVIDIA GPU and a torch with CUDA"
    if given.json is not None and not given.json.parent.is_dir():
        return f"--json: there is no folder {given.json.parent}"
    if given.beside is not None and not (given.beside / "benchmarks").is_dir():
        return f"--beside: {given.beside} is no checkout of this repository"
    return None


def measure(rows: list[Row], options: Options, json_path: Path | None) -> list[Result]:
    """
    Run the rows, then print where a peer is faster, and all rows after that.

    Meanwhile stderr says how far they are, and the JSON file is written again after each, so that a stopped run keeps
    its results.
    """
    torch.set_num_threads(options.threads)
    copy_gb = copy_gb_per_second(options.device, options.quick)
    print(f"copy bandwidth {copy_gb:.1f} GB/s (reads plus writes)")
    if options.quick:
        print("quick: small sizes and few calls, the figures say nothing about speed")
    else:
        slow = SLOW_MS[options.device]
        print(f"medians of {FULL} on each side, alternating; fewer calls where one takes more than {slow:g} ms")
    about = machine(options.device, options.threads)
    results: list[Result] = []
    printed: list[str] = []

    def emit(line: str) -> None:
        printed.append(line)
        if not line.startswith("  ") or "FAILED" in line:
            print(line, file=sys.stderr, flush=True)

    def keep(so_far: list[Result]) -> None:
        results[:] = so_far
        if json_path is not None:
            content = {"machine": about, "quick": options.quick, "copy_gb_per_second": copy_gb}
            write_json(json_path, options.device, {**content, "rows": [as_json(each, copy_gb) for each in results]})

    try:
        run(rows, options, copy_gb, emit, keep)
    finally:  # An interrupted run has a report on its finished rows.
        slower = behind(as_json(each, copy_gb) for each in results)
        print(f"a peer is faster in {len(slower)} of {sum(len(each.pairs) for each in results)} pairs")
        for ratio, name, peer in slower:
            print(f"  {ratio:.2f} x  {name:<38} {peer}")
        print(*printed, sep="\n", flush=True)
    for name, value in about.items():
        print(f"{name}: {value}")
    return results


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen rows. Return 1 if a row fails or an argument is wrong, else 0, whatever the times are."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["scaling"]:
        return scaling.main(arguments[1:])
    given = parse(arguments)
    try:
        rows = choose(given.names, given.device)
    except ValueError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    if (wrong := refusal(given)) is not None:
        print(f"benchmarks: {wrong}", file=sys.stderr)
        return 1
    if given.list:
        for row in rows:
            print(f"{row.name:<38} {row.what}")
        return 0
    if given.table:
        print(f"written: {table.write(ROWS)}")
        return 0
    options = Options(given.device, given.quick, given.threads)
    with Beside(given.beside, options) if given.beside is not None else nullcontext() as beside:
        results = measure([beside.row(row) for row in rows] if beside is not None else rows, options, given.json)
    if given.json is not None:
        print(f"written: {place(given.json, given.device)}")
    failed = [result for result in results if result.failed is not None]
    for result in failed:
        print(f"benchmarks: {result.row.name}: {result.failed}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    # So that a run whose time is over, which `make gpu` ends, has its report too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_command(main)
