"""
``python -m benchmarks --table`` writes results/README.md, one row per benchmark, from the JSON files beside it.

The cell of a figure that was not measured is empty.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .report import behind
from .rows import Row

RESULTS = Path(__file__).resolve().parent / "results"
_HEAD = ["benchmark", "CPU: ms", "CPU: times as fast as", "GPU: sizes", "GPU: ms", "GPU: times as fast as"]
_HEAD += ["GPU: targets", "published by others, not measured here"]


def load(folder: Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return the latest results on a CPU and on a GPU. Quick runs are left out: they say nothing about speed."""
    latest: dict[bool, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        on_cpu = content["machine"]["device"] == "cpu"
        if content.get("quick") or not content.get("rows"):
            continue
        if on_cpu not in latest or content["machine"]["date"] > latest[on_cpu]["machine"]["date"]:
            latest[on_cpu] = {**content, "file": path.name}
    return latest.get(True), latest.get(False)


def _rows(content: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in content["rows"]} if content is not None else {}


def _time(content: dict[str, Any] | None, row: dict[str, Any] | None) -> str:
    """Return the milliseconds, with the bytes or ids per second."""
    if content is None or row is None:
        return ""
    if "failed" in row:
        return "failed"
    parts = [f"{row['ours_ms']:.3g}"]
    if row.get("gb_per_second") is not None:
        share = row["gb_per_second"] / content["copy_gb_per_second"]
        parts.append(f"{row['gb_per_second']:,.0f} GB/s, {100 * share:.0f} % of copy")
    if row.get("ids_per_second") is not None:
        parts.append(f"{row['ids_per_second'] / 1e9:.3g} G ids/s")
    return "; ".join(parts)


def _peers(row: dict[str, Any] | None) -> str:
    """Return the ratios to the peers that ran."""
    if row is None or "failed" in row:
        return ""
    ratios = [(peer["name"], peer["ratio"]) for peer in row["peers"] if "ratio" in peer]
    return ", ".join(f"{name} {ratio:{'.0f' if ratio >= 10 else '.2g'}}x" for name, ratio in ratios)


def _judged(row: dict[str, Any] | None) -> dict[str, str]:
    """Return the mark of each target that was judged."""
    if row is None:
        return {}
    return {target["what"].partition(",")[0]: "pass" if target["passed"] else "MISS" for target in row["targets"]}


def targets(row: Row, measured: dict[str, Any] | None = None) -> str:
    """Return a row's targets on a GPU, with the marks of a run if there was one."""
    marks = _judged(measured if measured is not None and "targets" in measured else None)
    wanted = []
    if row.cuda.copy_share is not None:
        wanted.append((f"{100 * row.cuda.copy_share:.0f} % of copy", "share of the copy bandwidth"))
    if row.cuda.fastest_peer is not None:
        wanted.append((f"{row.cuda.fastest_peer:g}x the fastest", "ratio to the fastest peer"))
    if row.cuda.ids_per_second is not None:
        wanted.append((f"{row.cuda.ids_per_second / 1e9:g} G ids/s", "10^9 ids a second"))
    return ", ".join(f"{text} {marks[what]}" if what in marks else text for text, what in wanted)


def table(rows: Iterable[Row], cpu: dict[str, Any] | None, gpu: dict[str, Any] | None) -> str:
    """Return the table as Markdown."""
    on_cpu, on_gpu = _rows(cpu), _rows(gpu)
    lines = [_HEAD, ["---"] * len(_HEAD)]
    for row in rows:
        here, there = on_cpu.get(row.name), on_gpu.get(row.name)
        sizes = there.get("sizes", "") if there is not None else ""
        cells = [f"`{row.name}`: {row.what}", _time(cpu, here), _peers(here), sizes, _time(gpu, there), _peers(there)]
        lines.append([*cells, targets(row, there), row.published])
    return "".join(f"| {' | '.join(cell.replace('|', ' ') for cell in line)} |\n" for line in lines)


def about(content: dict[str, Any]) -> str:
    """Return where, and with which versions, figures were taken, in a line."""
    machine = content["machine"]
    names = ["device", "processor", "cores", "driver", "torch", "torch CUDA", "tensorflow", "fbgemm-gpu-cpu", "commit"]
    facts = [f"{name} {machine[name]}" for name in (*names, "date") if name in machine]
    return f"{', '.join(facts)}; copy bandwidth {content['copy_gb_per_second']:,.1f} GB/s"


def faster_peers(where: str, content: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the list with which the page begins: where a peer is faster on a device, the slowest first."""
    slower = behind(content["rows"])
    count = sum("ratio" in peer for row in content["rows"] for peer in row.get("peers", []))
    yield f"On a {where} a peer is faster in {len(slower)} of {count} pairs" + (":\n" if slower else ".\n")
    for ratio, name, peer in slower:
        yield f"* {ratio:.2f}x: `{name}`, beside {peer}"
    if slower:
        yield ""


def text(rows: Iterable[Row], folder: Path) -> str:
    """Return the whole page."""
    cpu, gpu = load(folder)
    page = ["# Benchmark results\n"]
    for where, content in (("CPU", cpu), ("GPU", gpu)):
        page += [] if content is None else faster_peers(where, content)
    page += [
        "Written by `python -m benchmarks --table` from the JSON files in this folder; `make bench` and `make gpu`",
        "take the figures. A ratio is how many times as fast ours was in the same window. % of copy is bytes counted",
        "by formula over the time, as a share of what a plain copy reached in the same run. The last column quotes",
        "what others have published of their own programs, as shares of peak bandwidth: not measured here.\n",
        f"CPU, `{cpu['file']}`: {about(cpu)}." if cpu is not None else "CPU: no results.",
        "",
    ]
    if gpu is not None:
        page.append(f"GPU, `{gpu['file']}`: {about(gpu)}.")
    else:
        page.append("GPU: no GPU was at hand. Its columns are empty, and nothing in them is estimated.")
    return "\n".join([*page, "", table(rows, cpu, gpu)])


def write(rows: Iterable[Row]) -> Path:
    """Write the page; return its path."""
    path = RESULTS / "README.md"
    path.write_text(text(rows, RESULTS))
    return path
