"""Time the experiments: the unchanged loop, the loop with constant inputs, and without parts of the model."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from ._batches import Batches, Exhausted, TrainingStep

__all__ = ["Loop", "Side", "run_loop", "run_sides", "wait"]

#: The number of rounds into which an experiment is cut: each gives one value of every share, and the median counts.
ROUNDS = 5
#: The number of batches that are kept to run the step on again: several, so that not all rows are in the cache.
KEPT = 8


def wait(device: torch.device) -> None:
    """Wait until a CUDA device has finished all work that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Loop:
    """
    The times of the unchanged loop.

    ``rounds`` has for each round the mean wait for a batch, since loaders often deliver in bursts, and the time of a
    step, in seconds. ``steps`` is the number of timed steps.
    """

    rounds: list[tuple[float, float]] = field(default_factory=list)
    steps: int = 0
    kept: list[Any] = field(default_factory=list)
    """Some of the batches, to run the step on again."""

    def shares(self) -> list[float]:
        """Return for each round the wait's share of the loop's time."""
        return [waited / (waited + step) for waited, step in self.rounds if waited + step > 0]

    def wait_seconds(self) -> float:
        """Return the median of the rounds' waits for a batch."""
        return statistics.median(waited for waited, _ in self.rounds)

    def step_seconds(self) -> float:
        """Return the median of the rounds' times of a step."""
        return statistics.median(step for _, step in self.rounds)

    def seconds(self) -> float:
        """Return the time of a step with its wait for the batch."""
        return self.wait_seconds() + self.step_seconds()


def run_loop(loop: Loop, step: TrainingStep, batches: Batches, steps: int, drop: int, device: torch.device) -> None:
    """
    Run the unchanged loop, and add its rounds to ``loop``.

    The loop runs without pauses: in a pause, a loader that works ahead would fill its queue, and hide its cost.

    Args:
        loop: the object to which the times are added.
        step: the training step.
        batches: the batches that the step is given.
        steps: the number of steps to time; fewer if the batches end.
        drop: the number of untimed steps before them, until queues have their ordinary length.
        device: the device, which is waited for at the end of every round.
    """
    dropped = Loop()
    _run_round(dropped, step, batches, drop, device)
    loop.kept = loop.kept or dropped.kept
    for _ in range(ROUNDS):
        _run_round(loop, step, batches, per_round(steps), device)
    if not loop.rounds:  # the batches ended early: the untimed steps have to do
        loop.rounds, loop.steps = dropped.rounds, dropped.steps


def _run_round(loop: Loop, step: TrainingStep, batches: Batches, steps: int, device: torch.device) -> None:
    waits: list[float] = []
    times: list[float] = []
    anew = 0
    try:
        while len(times) < steps and anew < 2:
            batch, waited = batches.next()
            if len(loop.kept) < KEPT:
                loop.kept.append(batch)
            batch = step.ready(batch)
            start = perf_counter()
            step(batch)
            seconds = perf_counter() - start
            anew = anew + 1 if waited is None else 0  # twice in a row: the loader has one batch
            if waited is not None:
                waits.append(waited)
                times.append(seconds)
    except Exhausted:
        pass
    if times:
        loop.rounds.append((statistics.fmean(waits), _seconds_of(times, device)))
        loop.steps += len(times)


def per_round(steps: int) -> int:
    """Return the number of steps of one round of an experiment of ``steps`` steps."""
    return max(2, -(-steps // ROUNDS))


def _seconds_of(times: list[float], device: torch.device) -> float:
    """
    Return the seconds of one step, from the seconds of each.

    On the CPU that is the lower quartile; on CUDA the mean, the wait for the device at the end included.
    """
    start = perf_counter()
    wait(device)
    behind = perf_counter() - start
    if device.type != "cpu":
        return (sum(times) + behind) / len(times)
    return sorted(times)[len(times) // 4]  # other processes on the machine make steps longer, never shorter


@dataclass
class Side:
    """
    One side of an experiment: a step, the batches that it is given in turn, and a change that lasts while it runs.

    ``rounds`` has the seconds of a step in each round.
    """

    step: TrainingStep
    batches: list[Any]
    change: Callable[[], AbstractContextManager[Any]] = nullcontext
    rounds: list[float] = field(default_factory=list)
    problem: Exception | None = None
    """The error with which this side failed, if it may fail; None: it has not failed."""
    may_fail: bool = True

    def seconds(self) -> float | None:
        """Return the median of the rounds' seconds of a step, or None if the side could not run."""
        return statistics.median(self.rounds) if self.rounds and self.problem is None else None


def run_sides(sides: list[Side], steps: int, device: torch.device, end_step: Callable[[], object]) -> None:
    """
    Run all sides in turns, and add to each the seconds of a step in each of :data:`ROUNDS` rounds.

    A side that may fail and raises is not run again: its change broke the step, not an error of the step. ``end_step``
    is then called, to end the step that raised.
    """
    for _ in range(ROUNDS):
        for side in sides:
            if side.problem is not None:
                continue
            try:
                with side.change():
                    side.rounds.append(_round(side.step, side.batches, per_round(steps), device))
            except Exception as error:
                if not side.may_fail:
                    raise
                side.problem = error
                end_step()


def _round(step: TrainingStep, batches: list[Any], steps: int, device: torch.device) -> float:
    step(step.ready(batches[0]))
    wait(device)
    times = []
    for k in range(1, steps + 1):
        again = step.ready(batches[k % len(batches)])
        start = perf_counter()
        step(again)
        times.append(perf_counter() - start)
    return _seconds_of(times, device)
