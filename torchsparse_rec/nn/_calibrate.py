"""Measuring the constants of ``auto`` on the machine at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import optim
from .auto import MODES, Constants, constants
from .embedding import Embedding

_SMALL, _IDS = (16, 4), 16
_LARGE = (262_144, 64)


def _median_microseconds(step: Callable[[], Any], device: torch.device, calls: int) -> float:
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times[calls // 4 :])


def _step(make: type, mode: str, sizes: tuple[int, int], ids: int, device: torch.device) -> Callable[[], None]:
    """A training step of one table."""
    table = Embedding(*sizes, grad_mode=mode, apply="backward", device=device)
    optimizer = make(table.parameters(), lr=0.01)
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
    """The constants of this machine, in some seconds."""
    shipped = constants()
    fixed = dict(shipped.fixed)
    for name in ("SGD", "Adagrad", "Adam"):
        sides = [_step(getattr(optim, name), mode, _SMALL, _IDS, device) for mode in MODES]
        fixed[name] = tuple(_median_microseconds(side, device, 100) for side in sides)
    fixed["ours"] = fixed["Adam"]
    dense = _median_microseconds(_step(optim.Adam, "dense", _LARGE, _IDS, device), device, 12) - fixed["Adam"][0]
    rate = shipped.passes["Adam"][0] * _LARGE[0] * _LARGE[1] * 4 / max(dense, 1.0)
    rows = 8192
    moved = shipped.passes["Adam"][2] * rows * _LARGE[1] * 4 / rate
    fused = _median_microseconds(_step(optim.Adam, "fused", _LARGE, rows, device), device, 40) - fixed["Adam"][2]
    return Constants(fixed, shipped.passes, rate, max((fused - moved) / rows, 0.0))
