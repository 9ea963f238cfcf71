"""The three experiments: the loop as it is, with constant inputs, and without parts of the model. Times only."""

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

#: Experiments are cut into this many rounds; each round gives one value of every share, of which the median counts.
ROUNDS = 5
#: Batches that are kept to run the step on again, so that its rows are not all in the cache.
KEPT = 8


def wait(device: torch.device) -> None:
    """Wait for what the device has been asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Loop:
    """The loop as it is, by rounds: the mean wait for a batch (loaders often deliver in bursts), and the step."""

    rounds: list[tuple[float, float]] = field(default_factory=list)
    steps: int = 0
    kept: list[Any] = field(default_factory=list)
    """Some of the batches, to run the step on again."""

    def shares(self) -> list[float]:
        """Per round: of the loop's time, the wait."""
        return [waited / (waited + step) for waited, step in self.rounds if waited + step > 0]

    def wait_seconds(self) -> float:
        """The median round's wait for a batch."""
        return statistics.median(waited for waited, _ in self.rounds)

    def step_seconds(self) -> float:
        """The median round's step."""
        return statistics.median(step for _, step in self.rounds)

    def seconds(self) -> float:
        """A step with its wait."""
        return self.wait_seconds() + self.step_seconds()


def run_loop(loop: Loop, step: TrainingStep, batches: Batches, steps: int, drop: int, device: torch.device) -> None:
    """
    Run the loop as it is, and add its rounds to ``loop``.

    It runs in one piece: between pieces a loader that works ahead would fill its queue, and hide what it costs.

    Args:
        loop: gets the times.
        step: the training step.
        batches: what it is given.
        steps: how many to time, or fewer, if the batches end.
        drop: steps before those, in which queues come to their ordinary length.
        device: waited for at the end of every round.
    """
    dropped = Loop()
    _run_round(dropped, step, batches, drop, device)
    loop.kept = loop.kept or dropped.kept
    for _ in range(ROUNDS):
        _run_round(loop, step, batches, per_round(steps), device)
    if not loop.rounds:  # the batches ended early: what there is must do
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
    """Of so many steps, those of one round."""
    return max(2, -(-steps // ROUNDS))


def _seconds_of(times: list[float], device: torch.device) -> float:
    """Of one step: the lower quartile, or where the device works on by itself, the mean with what it is behind."""
    start = perf_counter()
    wait(device)
    behind = perf_counter() - start
    if device.type != "cpu":
        return (sum(times) + behind) / len(times)
    return sorted(times)[len(times) // 4]  # others on the machine's cores make steps longer, never shorter


@dataclass
class Side:
    """One way to run a step: on which batches in turn, what is different while it runs, and its seconds per round."""

    step: TrainingStep
    batches: list[Any]
    change: Callable[[], AbstractContextManager[Any]] = nullcontext
    rounds: list[float] = field(default_factory=list)
    problem: Exception | None = None
    """Why it cannot run, of a side that may fail."""
    may_fail: bool = True

    def seconds(self) -> float | None:
        """The median round; None if it could not run."""
        return statistics.median(self.rounds) if self.rounds and self.problem is None else None


def run_sides(sides: list[Side], steps: int, device: torch.device, recover: Callable[[], object]) -> None:
    """
    Run all sides in turns, and add the seconds of a step of each of :data:`ROUNDS` rounds.

    A side that raises is not run again. What the change of a side breaks is no error of the step's; ``recover`` then
    puts back what half of a step has left, such as a gradient scaler that waits for its update.
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
                recover()


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
