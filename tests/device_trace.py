"""Reads a torch profiler's trace: the copies of a step between host and device, and its waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_RUNTIME = ("cuda_runtime", "cuda_driver")


@dataclass
class Step:
    """What happened inside a named range of the host."""

    launches: int = 0
    copies: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)


def read_step(trace: dict[str, Any], name: str = "step") -> Step:
    """
    Find what the host asked of the device during ``record_function(name)``, on any of its threads.

    Args:
        trace: what ``export_chrome_trace`` writes.
        name: the name of the range; there must be exactly one such range.

    Returns:
        How many kernels were launched, the copies to and from the host (also those that ran on the device only after
        the range), and the calls that waited.

    Raises:
        ValueError: the trace has no such range, or several.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == name]
    if len(ranges) != 1:
        raise ValueError(f"the trace must have one range {name!r}, got {len(ranges)}")
    begin = float(ranges[0]["ts"])
    end = begin + float(ranges[0]["dur"])
    step, asked = Step(), set()
    for event in events:
        if event.get("cat") not in _RUNTIME or not begin <= float(event["ts"]) < end:
            continue
        asked.add(event.get("args", {}).get("correlation"))
        step.launches += "LaunchKernel" in event["name"]
        if "Synchronize" in event["name"]:
            step.waits.append(event["name"])
    for event in events:
        between = "HtoD" in event["name"] or "DtoH" in event["name"]
        if event.get("cat") == "gpu_memcpy" and between and event.get("args", {}).get("correlation") in asked:
            step.copies.append(event["name"])
    return step
