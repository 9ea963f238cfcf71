"""Measuring the constants of ``auto`` on the machine at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import optim
from .auto import MODES, SHIPPED, Constants
from .embedding import Embedding

_SMALL, _IDS = (16, 4), 16
_LARGE, _ROWS = (262_144, 64), 8192
# Microseconds that the large steps below took on the machine where the shipped constants were measured.
_DENSE_THERE, _FUSED_THERE = 28_000.0, 1_250.0


def _microseconds(step: Callable[[], Any], device: torch.device, calls: int) -> float:
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - started) * 1e6)
    # The lower quartile, not the median: if the system has to find memory for large gradients, most calls may wait.
    return statistics.quantiles(times[calls // 4 :], n=4)[0]


def _step(make: type, mode: str, sizes: tuple[int, int], ids: int, device: torch.device) -> Callable[[], None]:
    """Return a function that takes one training step of a new table."""
    table = Embedding(*sizes, grad_mode=mode, device=device)
    optimizer = make(table.parameters(), lr=0.01, in_backward=True)
    batches = [torch.randint(0, sizes[0], (ids,), device=device) for _ in range(16)]
    grad = torch.randn(ids, sizes[1], device=device)
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        optimizer.zero_grad()
        table(batches[number % len(batches)]).backward(grad)
        optimizer.step()

    return step


def measure(device: torch.device) -> Constants:
    """Measure the constants of this machine, which takes some seconds."""
    fixed = dict(SHIPPED.fixed)
    for name in ("SGD", "Adagrad", "Adam"):
        sides = [_step(getattr(optim, name), mode, _SMALL, _IDS, device) for mode in MODES]
        fixed[name] = tuple(_microseconds(side, device, 100) for side in sides)
    fixed["ours"] = fixed.pop("Adam")
    dense = _microseconds(_step(optim.Adam, "dense", _LARGE, _IDS, device), device, 20) - fixed["ours"][0]
    fused = _microseconds(_step(optim.Adam, "fused", _LARGE, _ROWS, device), device, 40) - fixed["ours"][2]
    faster, slower = _DENSE_THERE / max(dense, 1.0), max(fused, 0.0) / _FUSED_THERE
    rates = {whose: faster * value for whose, value in SHIPPED.bytes_per_microsecond.items()}
    waiting = {name: tuple(slower * x for x in values) for name, values in SHIPPED.row_microseconds.items()}
    return Constants(fixed, SHIPPED.passes, waiting, rates)
