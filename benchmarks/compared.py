"""What the comparisons with TensorFlow share: blocks of steps that alternate, and the verdict on the losses."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

NAMES = {"ours": "torchsparse_rec", "tensorflow": "TensorFlow"}
# How many of the first losses are compared.
COMPARED_LOSSES = 50
# How many batches are kept in memory. They are trained on in turn.
KEPT_BATCHES = 16
# Steps of a block, and how many at its beginning are not timed: the other framework's threads may still be spinning.
BLOCK, DROPPED = 10, 3


def largest_difference(losses: Iterable[float], others: Iterable[float]) -> float:
    """
    Return the largest difference between two runs' losses, as many of each; infinite if a loss is not finite.

    Example:
        >>> largest_difference([0.5, 0.25], [0.5, 0.375])
        0.125
        >>> largest_difference([0.5, float("nan"), 0.25], [0.5, 0.375, 0.25])
        inf
    """
    differences = [abs(one - other) for one, other in zip(losses, others, strict=True)]
    # max would pass over a NaN, which is not larger than anything.
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def verdict(difference: float, losses: Sequence[float], tolerance: float) -> str:
    """Return the line that says whether the first losses differ by no more than the tolerance."""
    within = "within" if difference <= tolerance else "NOT within"
    return f"first {len(losses)} losses: largest difference {difference:.2e} ({within} {tolerance:g})"


@dataclass
class Comparison:
    """Every step's loss, and the seconds of the timed steps, of both frameworks."""

    batch_size: int
    losses: dict[str, list[float]]
    seconds: dict[str, list[float]]
    tolerance: float = 1e-4

    def agrees(self) -> bool:
        """Say whether both sides' first losses differ by no more than the tolerance."""
        return self.largest_difference() <= self.tolerance

    def largest_difference(self) -> float:
        """Return the largest difference between both sides' first losses; inf if one is not finite."""
        ours, theirs = (self.losses[side][:COMPARED_LOSSES] for side in NAMES)
        return largest_difference(ours, theirs)

    def speed_ratio(self) -> float:
        """Return how many times faster ours is, by the medians."""
        return statistics.median(self.seconds["tensorflow"]) / statistics.median(self.seconds["ours"])

    def run_block(self, side: str, step: Callable[[int], Any], numbers: range) -> None:
        """Run the steps of these numbers, and time all but the first ones."""
        for place, number in enumerate(numbers):
            began = time.perf_counter()
            self.losses[side].append(float(step(number)))
            # Of a run with fewer steps than would be dropped, the last step is timed.
            if place >= min(DROPPED, len(numbers) - 1):
                self.seconds[side].append(time.perf_counter() - began)

    def block_line(self, numbers: range) -> str:
        """Return the line of both sides' block of these steps."""
        kept, parts = len(numbers) - min(DROPPED, len(numbers) - 1), []
        for side, name in NAMES.items():
            speed = self.batch_size / statistics.median(self.seconds[side][-kept:])
            parts.append(f"{name} loss {self.losses[side][-1]:.6f} {speed:>9,.0f} samples/s")
        return f"steps {numbers[0] + 1:>4}-{numbers[-1] + 1:<4}  {'   '.join(parts)}"

    def summary(self, form: Any) -> list[str]:
        """Return the last lines: medians, the verdict on the losses, TensorFlow's form, and the ratio."""
        medians = {name: statistics.median(self.seconds[side]) for side, name in NAMES.items()}
        return [
            *(
                f"{name}: {1e3 * x:.1f} ms a step, {self.batch_size / x:,.0f} samples/s (medians)"
                for name, x in medians.items()
            ),
            verdict(self.largest_difference(), self.losses["ours"][:COMPARED_LOSSES], self.tolerance),
            f"TensorFlow's fastest form: {form}",
            f"speed: {self.speed_ratio():.2f}x TensorFlow",
        ]


def compare_steps(
    ours: Callable[[Any], Any],
    make_theirs: Callable[[Any], Any],
    forms: Iterable[Any],
    source: Any,
    steps: int,
    print_line: Callable[[str], None] = print,
) -> Comparison:
    """
    Train in both frameworks on the same batches, in blocks that alternate, and print both sides' losses and speeds.

    Batches are in memory on both sides; what is timed begins with them and ends with the updated weights.

    Args:
        ours: our training step, at the first weights: a function of a batch that returns its loss.
        make_theirs: a function that makes TensorFlow's step of a form, with its own copy of these weights.
        forms: TensorFlow's ways to the same result, of which the fastest is compared.
        source: a source of batches, all of one size.
        steps: the number of steps.
        print_line: a function that is called with each line.
    """
    batches = list(itertools.islice(source.batches(0), min(KEPT_BATCHES, steps)))
    found = Comparison(batches[0].size, {side: [] for side in NAMES}, {side: [] for side in NAMES})
    times = {}
    for form in forms:
        times[form] = _median_seconds(make_theirs(form), batches[:4])
        print_line(f"TensorFlow with {form}: {found.batch_size / times[form]:,.0f} samples/s")
    form = min(times, key=lambda form: times[form])
    theirs = make_theirs(form)
    prepared = [theirs.prepare(batch) for batch in batches]
    sides = {
        "ours": lambda number: ours(batches[number % len(batches)]),
        "tensorflow": lambda number: theirs(prepared[number % len(batches)]),
    }
    for number, first in enumerate(range(0, steps, BLOCK)):
        numbers = range(first, min(first + BLOCK, steps))
        # The side that goes first alternates, because the second one finds the machine in another state.
        for side in list(NAMES) if number % 2 else list(NAMES)[::-1]:
            found.run_block(side, sides[side], numbers)
        print_line(found.block_line(numbers))
    for line in found.summary(form):
        print_line(line)
    return found


def _median_seconds(step: Any, batches: list[Any]) -> float:
    prepared, seconds = [step.prepare(batch) for batch in batches], []
    for number in range(8):
        began = time.perf_counter()
        float(step(prepared[number % len(prepared)]))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
