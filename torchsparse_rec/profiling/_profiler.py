"""Run a few steps under torch.profiler, with the ranges that :mod:`._trace` reads."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module
from torch.profiler import ProfilerActivity, profile, record_function

from ..files import whole_file
from ._batches import Batches, Exhausted, TrainingStep
from ._experiments import wait
from ._modules import removing
from ._trace import DENSE, LOADER, LOOKUP, STEP, Profile, read_profile

__all__ = ["profile_steps"]

# The most events of a trace: a trace of several steps with thousands of small tensors takes longer to read than to run.
_MOST_EVENTS = 20_000


def profile_steps(
    step: TrainingStep,
    batches: Batches,
    again: Any,
    steps: int,
    device: torch.device,
    ranges: dict[str, list[Module]],
    trace_path: Path | None,
) -> Profile:
    """
    Run some steps under torch.profiler, and return their profile.

    Args:
        step: the training step.
        batches: the batches that the step is given.
        again: the batch that the step is given when ``batches`` end.
        steps: the number of steps; only one is profiled if more would make the trace too large.
        device: the device on which the step computes.
        ranges: the modules whose forward is recorded, by the kinds ``"lookup"`` and ``"dense"``.
        trace_path: the file that keeps the trace; None: the trace is not kept.

    Returns:
        The numbers that were read from the trace.
    """
    with tempfile.TemporaryDirectory(prefix="torchsparse_rec") as folder:
        path = Path(folder) / "trace.json"
        trace = _trace(step, batches, again, 1, device, ranges, path)
        if steps > 1 and steps * len(trace["traceEvents"]) <= _MOST_EVENTS:
            trace = _trace(step, batches, again, steps, device, ranges, path)
        if trace_path is not None:
            with path.open("rb") as written, whole_file(trace_path) as file:
                shutil.copyfileobj(written, file)
    return read_profile(trace)


def _trace(
    step: TrainingStep,
    batches: Batches,
    again: Any,
    steps: int,
    device: torch.device,
    ranges: dict[str, list[Module]],
    path: Path,
) -> dict[str, Any]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as profiler, _recorded(ranges):
        for _ in range(steps):
            batch = again
            with record_function(LOADER):
                try:
                    batch, _ = batches.next()
                except Exhausted:
                    pass
            batch = step.ready(batch)
            with record_function(STEP):
                step(batch)
        wait(device)
    profiler.export_chrome_trace(str(path))
    with path.open(encoding="utf-8", errors="replace") as file:
        return json.load(file)  # type: ignore[no-any-return]


def _recorded(ranges: dict[str, list[Module]]) -> AbstractContextManager[None]:
    """Record calls of modules as ranges of the trace, while a block lasts."""
    names = {"lookup": LOOKUP, "dense": DENSE}
    return removing(
        [handle for kind, modules in ranges.items() for module in modules for handle in _record(module, names[kind])]
    )


def _record(module: Module, name: str) -> list[Any]:
    running: list[Any] = []  # a module may call itself

    def begin(_module: Module, _arguments: Any) -> None:
        running.append(record_function(name))
        running[-1].__enter__()

    def end(_module: Module, _arguments: Any, _output: Any) -> None:
        if running:
            running.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)]
