"""The result of a diagnosis, as data, text and JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ._trace import PHASES, Copies

__all__ = ["HEALTHY", "Diagnosis", "Finding"]

#: The verdict where no cause is named.
HEALTHY = "healthy"

# The most tables that the report names.
_TABLES = 8
_WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """
    One cause of slowness.

    Attributes:
        cause: its name: ``slow_loader``, ``per_row_records``, ``dense_gradient``, ``needless_copies``, ``heavy_mlp``,
            ``unfused_lookups`` or ``host_sync``.
        share: the share of the loop's time that it costs, 0 to 1.
        explanation: the observations, in words.
        setting: what to change.

    Example:
        >>> Finding("slow_loader", 0.5, "half of the time passes in the loader", "DeviceLoader").cause
        'slow_loader'
    """

    cause: str
    share: float
    explanation: str
    setting: str


@dataclass
class Diagnosis:
    """
    Where the time of a training loop goes, and what to change.

    Attributes:
        findings: the causes, the most expensive first; none for a healthy loop.
        times_ms: milliseconds of one step: ``loop`` (wait and step), ``wait``, ``step``, ``constant_inputs``,
            ``without_dense``, ``without_table_gradients``; None for an experiment that could not be run.
        shares: shares of the loop's time, 0 to 1: ``loader``, ``inputs`` (what constant inputs save), ``dense``,
            ``table_gradients``, ``copies``; None for an experiment that could not be run.
        phases_ms: milliseconds of one profiled step by phase, on the GPU if there is one, else on the host.
        copies: count, bytes and ms of one profiled step, by place: ``step``, ``loader``, ``HtoD``, ``DtoH``.
        waits: operators and calls that made the host wait for the device, and how often in a step.
        reads: operators that read values back, which would wait on a GPU, and how often in a step.
        bandwidth: bytes a second: ``memory`` (a copy, measured), ``lookup`` and ``update`` (the bytes that must be
            moved, over the time taken). None where there is no lookup or no profile of one.
        tables: one line of text for each table.
        notes: the missing measurements, and why they are missing.
        device: the device on which the step ran.
        steps: the number of timed steps of the loop.
        trace: the path of the Chrome trace, if one was written.
        timeline: the path of the picture, if one was drawn.

    Example:
        >>> found = Diagnosis(findings=[Finding("slow_loader", 0.6, "the loader", "use a DeviceLoader")])
        >>> found.verdict
        'slow_loader'
        >>> Diagnosis(findings=[]).verdict
        'healthy'
    """

    findings: list[Finding]
    times_ms: dict[str, float | None] = field(default_factory=dict)
    shares: dict[str, float | None] = field(default_factory=dict)
    phases_ms: dict[str, float] = field(default_factory=dict)
    copies: dict[str, Copies] = field(default_factory=dict)
    waits: dict[str, float] = field(default_factory=dict)
    reads: dict[str, float] = field(default_factory=dict)
    bandwidth: dict[str, float | None] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    device: str = "cpu"
    steps: int = 0
    trace: Path | None = None
    timeline: Path | None = None

    @property
    def verdict(self) -> str:
        """The cause with the largest share, or ``"healthy"``."""
        return self.findings[0].cause if self.findings else HEALTHY

    def to_json(self) -> str:
        """
        Return the diagnosis as the text of a JSON object, with ``verdict`` beside the attributes.

        Returns:
            The text, indented.
        """
        content: dict[str, Any] = {"verdict": self.verdict, **asdict(self)}
        return json.dumps(content, indent=2, default=str)

    def report(self) -> str:
        """
        Return the diagnosis as text for people.

        Returns:
            Several lines: the verdict first, then the other causes, the experiments, and the profiler's results.
        """
        lines = [*self._verdict_lines(), "", *self._experiment_lines()]
        for title, rows in (
            ("of one profiled step", self._phase_lines()),
            ("copies of one profiled step", self._copy_lines()),
            ("memory", self._bandwidth_lines()),
            ("tables", self._table_lines()),
            ("notes", [f"  {line}" for line in self.notes]),
        ):
            lines += [title, *rows] if rows else []
        lines += [f"{name}: {path}" for name, path in (("trace", self.trace), ("timeline", self.timeline)) if path]
        return "\n".join(lines)

    def _verdict_lines(self) -> list[str]:
        if not self.findings:
            return ["verdict: healthy: no cause costs enough to be named"]
        lines = []
        for number, finding in enumerate(self.findings):
            title = "verdict" if number == 0 else "also"
            lines += [
                f"{title}: {finding.cause}, {finding.share:.0%} of the loop's time",
                *_wrapped(finding.explanation),
                *_wrapped(f"change: {finding.setting}"),
            ]
        return lines

    def _experiment_lines(self) -> list[str]:
        labels = {
            "loop": ("a step with its wait for the batch", None),
            "wait": ("  waiting in the loader", "loader"),
            "step": ("  the step itself", None),
            "constant_inputs": ("with constant inputs", "inputs"),
            "without_dense": ("  and without the dense layers", "dense"),
            "without_table_gradients": ("  and without the dense gradients of tables", "table_gradients"),
        }
        lines = [f"experiments, {self.steps} steps on {self.device}{'ms':>18}   share"]
        for name, (label, share) in labels.items():
            value, part = self.times_ms.get(name), self.shares.get(share) if share else None
            if value is not None:
                lines.append(f"  {label:<46}{value:>9.3f}{'' if part is None else f'   {part:5.1%}'}")
        return lines

    def _phase_lines(self) -> list[str]:
        total = sum(ms for phase, ms in self.phases_ms.items() if phase != "loader")
        if not total:
            return []
        return [
            f"  {phase:<46}{self.phases_ms.get(phase, 0.0):>9.3f}   {self.phases_ms.get(phase, 0.0) / total:5.1%}"
            for phase in PHASES
            if phase != "loader"
        ]

    def _copy_lines(self) -> list[str]:
        names = {"step": "host, in the step", "loader": "host, in the loader"}
        names |= {"HtoD": "host to device", "DtoH": "device to host"}
        lines = [
            f"  {names.get(where, where):<28}{c.count:>7} x{c.bytes / 1e6:>10.2f} MB{c.ms:>9.3f} ms"
            for where, c in self.copies.items()
        ]
        lines += [f"  waited for the device: {name}, {count:g} times" for name, count in self.waits.items()]
        return lines + [f"  would wait on a GPU: {name}, {count:g} times" for name, count in self.reads.items()]

    def _table_lines(self) -> list[str]:
        lines = [f"  {line}" for line in self.tables[:_TABLES]]
        more = len(self.tables) - _TABLES
        return [*lines, f"  and {more} more"] if more > 0 else lines

    def _bandwidth_lines(self) -> list[str]:
        memory = self.bandwidth.get("memory")
        if not memory:
            return []
        lines = [f"  a copy reaches {memory / 1e9:.1f} GB/s"]
        for name in ("lookup", "update"):
            value = self.bandwidth.get(name)
            if value:
                lines.append(f"  {name}: {value / 1e9:.2f} GB/s of what must be moved, {value / memory:.0%} of that")
        return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
