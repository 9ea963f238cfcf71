"""
The timing of two calls against each other. This module does not depend on what the calls compute.

Blocks of one side alternate with blocks of the other. Within a block the same call runs many times in a row, and the
first times are dropped. Right after another framework's call its worker threads still spin on the cores, and the next
call would be charged for it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

# A call that takes longer than this, in milliseconds, is repeated less often. A GPU's times vary little.
SLOW_MS = {"cpu": 250.0, "cuda": 10.0}


@dataclass(frozen=True)
class Plan:
    """How often a side is called: ``blocks`` times ``calls`` in a row; the first ``drop`` of them do not count."""

    calls: int = 20
    drop: int = 5
    blocks: int = 4

    def kept(self) -> int:
        """Return the number of calls that count, over all blocks."""
        return self.blocks * (self.calls - self.drop)

    def __str__(self) -> str:
        return f"{self.blocks} blocks of {self.calls} calls, first {self.drop} dropped"


FULL = Plan()
SLOW = Plan(calls=5, drop=1)
QUICK = Plan(calls=3, drop=1, blocks=2)


def plan_for(call_ms: float, quick: bool, device: str = "cpu") -> Plan:
    """Return the plan for a side whose single call takes ``call_ms``."""
    if quick:
        return QUICK
    return SLOW if call_ms > SLOW_MS[device] else FULL


@dataclass(frozen=True)
class Pair:
    """Two sides timed in one window: medians in milliseconds, and how often each was called."""

    ours_ms: float
    peer_ms: float
    ours_plan: Plan
    peer_plan: Plan

    def ratio(self) -> float:
        """Return how many times faster the first side is than the second."""
        return self.peer_ms / self.ours_ms


def clock_block(call: Call, calls: int, device: str) -> list[float]:
    """Return the milliseconds of each of ``calls`` calls in a row. The release of a result does not count."""
    if device == "cuda":
        return _clock_block_cuda(call, calls)
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        result = call()
        times.append((time.perf_counter() - start) * 1e3)
        del result
    return times


def _clock_block_cuda(call: Call, calls: int) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in zip(events, events[1:], strict=False)]


def compare(ours: Call, peer: Call, device: str, quick: bool, clock: Callable[..., list[float]] = clock_block) -> Pair:
    """
    Time two calls in alternating blocks.

    Args:
        ours: the first side.
        peer: the second side.
        device: ``cpu`` or ``cuda``, where the calls' work happens.
        quick: whether to call each a few times only, which shows that everything runs, not how fast.
        clock: :func:`clock_block`, or its stand-in in a test.

    Returns:
        The medians over the calls that count.
    """
    plans = [plan_for(clock(call, 2, device)[1], quick, device) for call in (ours, peer)]
    kept: list[list[float]] = [[], []]
    gc.collect()
    for _ in range(plans[0].blocks):
        for side, call in enumerate((ours, peer)):
            kept[side] += clock(call, plans[side].calls, device)[plans[side].drop :]
    return Pair(statistics.median(kept[0]), statistics.median(kept[1]), plans[0], plans[1])


def copy_gb_per_second(device: str, quick: bool) -> float:
    """Measure the bandwidth of copies between buffers that no cache holds: reads plus writes, in 10^9 bytes/s."""
    n = (1 << 22) if quick else (1 << 29) if device == "cuda" else (1 << 26)
    source, target = torch.rand(n, device=device), torch.rand(n, device=device)
    times = clock_block(lambda: target.copy_(source), FULL.calls, device)[FULL.drop :]
    return 2 * n * source.element_size() / (statistics.median(times) * 1e-3) / 1e9
