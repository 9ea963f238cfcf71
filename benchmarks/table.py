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
_HEAD = ["benchmark", "CPU: ms", "CPU: times as fast as", "CPU with AVX2: ms", "CPU with AVX2: times as fast as"]
_HEAD += ["GPU: sizes", "GPU: ms", "GPU: times as fast as", "GPU: targets", "published by others, not measured here"]
# A CPU whose instruction set is AVX2 at most has separate results.
_AVX2 = "CPU with AVX2"


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the latest results of each kind of device. Quick runs are left out: they say nothing about speed."""
    latest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        machine = content["machine"]
        where = "GPU" if machine["device"] != "cpu" else _AVX2 if machine.get("instruction set") == "avx2" else "CPU"
        if content.get("quick") or not content.get("rows"):
            continue
        if where not in latest or machine["date"] > latest[where]["machine"]["date"]:
            latest[where] = {**content, "file": path.name}
    return latest


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


def table(rows: Iterable[Row], results: dict[str, dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    lines = [_HEAD, ["---"] * len(_HEAD)]
    measured = {where: _rows(results.get(where)) for where in ("CPU", _AVX2, "GPU")}
    for row in rows:
        its = {where: there.get(row.name) for where, there in measured.items()}
        times = {where: [_time(results.get(where), figures), _peers(figures)] for where, figures in its.items()}
        sizes = its["GPU"].get("sizes", "") if its["GPU"] is not None else ""
        cells = [f"`{row.name}`: {row.what}", *times["CPU"], *times[_AVX2], sizes, *times["GPU"]]
        lines.append([*cells, targets(row, its["GPU"]), row.published])
    return "".join(f"| {' | '.join(cell.replace('|', ' ') for cell in line)} |\n" for line in lines)


def about(content: dict[str, Any]) -> str:
    """Return where, and with which versions, figures were taken, in a line."""
    machine = content["machine"]
    names = ["device", "processor", "cores", "instruction set", "driver", "torch", "torch CUDA", "tensorflow"]
    facts = [f"{name} {machine[name]}" for name in (*names, "fbgemm-gpu-cpu", "commit", "date") if name in machine]
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
    results = load(folder)
    page = ["# Benchmark results\n"]
    for where in ("CPU", _AVX2, "GPU"):
        page += faster_peers(where, results[where]) if where in results else []
    page += [
        "`python -m benchmarks --table` writes this page from the JSON files in this folder. The figures are from",
        "`make bench` and `make gpu`. A ratio is how many times as fast ours was in the same window. % of copy",
        "compares two bandwidths of the same run: bytes, counted by formula, over the time; and that of a plain copy.",
        "The last column quotes what others have published of their own programs, as shares of peak bandwidth. It was",
        "not measured here.\n",
    ]
    page += [f"{where}, `{content['file']}`: {about(content)}.\n" for where, content in sorted(results.items())]
    if "CPU" not in results:
        page.append("CPU: no results.\n")
    if "GPU" not in results:
        page.append("GPU: no GPU was at hand. Its columns are empty, and nothing in them is estimated.\n")
    return "\n".join([*page, table(rows, results)])


def write(rows: Iterable[Row]) -> Path:
    """Write the page; return its path."""
    path = RESULTS / "README.md"
    path.write_text(text(rows, RESULTS))
    return path
