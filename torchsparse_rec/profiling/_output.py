"""Make the parts of a diagnosis beside its findings, and write its files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import Module

from ..files import whole_file
from ..nn.convert import explain
from ._tables import TableUse
from ._trace import Profile
from .bandwidth import copy_bytes_per_second
from .diagnosis import Diagnosis
from .timeline import draw_timeline

__all__ = ["bandwidth", "table_lines", "write"]


def bandwidth(tables: list[TableUse], profile: Profile, device: torch.device) -> dict[str, float | None]:
    """Return the bytes a second of a copy, of lookups and of updates: the bytes that they must move over their time."""
    times, count = profile.device_ms or profile.host_ms, max(profile.steps, 1)

    def rate(size: int, ms: float) -> float | None:
        return size * count / (ms * 1e-3) if size and ms > 0 else None

    update_ms = times.get("lookup backward", 0.0) + times.get("optimizer", 0.0)
    return {
        "memory": copy_bytes_per_second(device),
        "lookup": rate(sum(table.looked_up_bytes() for table in tables), times.get("lookup", 0.0)),
        "update": rate(sum(table.updated_bytes() for table in tables if table.gradient != "none"), update_ms),
    }


def table_lines(tables: list[TableUse], model: Module) -> list[str]:
    """Return a line for each table, the largest first, and the reasons for the choices of ``grad_mode="auto"``."""
    lines = [
        f"{table.describe()}: {table.gradient} gradient, {table.ids:,} ids, {table.touched:,} rows a batch"
        for table in sorted(tables, key=lambda table: -table.bytes)
    ]
    return lines + [line for line in explain(model).splitlines() if "why:" in line]


def write(diagnosis: Diagnosis, profile: Profile, out: Path) -> None:
    """Write the timeline, the report and the JSON into a folder, and set the diagnosis's path of the timeline."""
    try:
        draw_timeline(profile, out / "timeline.png", f"verdict: {diagnosis.verdict}")
        diagnosis.timeline = out / "timeline.png"
    except ImportError as error:
        diagnosis.notes.append(f"no timeline: {error}")
    for name, text in (("report.txt", diagnosis.report()), ("diagnosis.json", diagnosis.to_json())):
        with whole_file(out / name) as file:
            file.write(f"{text}\n".encode())
