"""The same network in TensorFlow: same weights, same batches, side by side in one run."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._comparison import NAMES, largest_difference, verdict
from .._sources import SplitSource
from .columns import Columns
from .data import Batch
from .settings import Settings
from .steps import TorchStep, make_model
from .tensorflow_step import FORMS, Form, TensorflowStep

TOLERANCE = 1e-4
COMPARED_STEPS = 50
# How many batches are kept in memory. They are trained on in turn.
KEPT_BATCHES = 16
# Steps of a block, and how many at its beginning are not timed: the other framework's threads may still be spinning.
BLOCK, DROPPED = 10, 3


@dataclass
class Comparison:
    """Every step's loss, and the seconds of the timed steps, of both frameworks."""

    batch_size: int
    losses: dict[str, list[float]]
    seconds: dict[str, list[float]]

    def largest_difference(self) -> float:
        """Return the largest difference between both sides' first COMPARED_STEPS losses; inf if one is not finite."""
        ours, theirs = (self.losses[side][:COMPARED_STEPS] for side in NAMES)
        return largest_difference(ours, theirs)

    def speed_ratio(self) -> float:
        """Return how many times faster ours is, by the medians."""
        return statistics.median(self.seconds["tensorflow"]) / statistics.median(self.seconds["ours"])


def compare(
    settings: Settings, source: SplitSource, columns: Columns, steps: int, print_line: Callable[[str], None] = print
) -> Comparison:
    """
    Train in both frameworks on the same batches, in blocks that alternate, and print both sides' losses and speeds.

    Raw columns are in memory on both sides; what is timed begins with them and ends with the updated weights.

    Args:
        settings: the run's settings; the optimizer is gradient descent.
        source: yields the batches, all of one size.
        columns: the features.
        steps: the number of steps.
        print_line: called with each line.

    Returns:
        Both sides' losses and times.
    """
    batches = list(itertools.islice(source.batches(), min(KEPT_BATCHES, steps)))
    form = fastest_form(settings, columns, batches[:4], print_line)
    model = make_model(columns, settings.mlp, settings.grad_mode, settings.seed)
    theirs = TensorflowStep(columns, model, settings.learning_rate(), settings.batch_size, form)
    ours = TorchStep(columns, model, settings.optimizer, settings.learning_rate())
    prepared = [theirs.prepare(batch) for batch in batches]
    sides = {
        "ours": lambda number: ours(batches[number % len(batches)]),
        "tensorflow": lambda number: theirs(*prepared[number % len(batches)]),
    }
    found = Comparison(settings.batch_size, {side: [] for side in NAMES}, {side: [] for side in NAMES})
    for number, first in enumerate(range(0, steps, BLOCK)):
        # The side that goes first alternates, because the second one finds the machine in another state.
        for side in list(NAMES) if number % 2 else list(NAMES)[::-1]:
            _run_block(found, side, sides[side], range(first, min(first + BLOCK, steps)))
        _print_block(found, first, min(first + BLOCK, steps), print_line)
    _print_summary(found, form, print_line)
    return found


def fastest_form(
    settings: Settings, columns: Columns, batches: list[Batch], print_line: Callable[[str], None] = print
) -> Form:
    """Time each way of TensorFlow to look up, and return the one with which it trains fastest."""
    times = {}
    for form in FORMS:
        model = make_model(columns, settings.mlp, "dense", settings.seed)
        step = TensorflowStep(columns, model, settings.learning_rate(), settings.batch_size, form)
        prepared = [step.prepare(batch) for batch in batches]
        times[form] = statistics.median(_timed(step, *prepared[number % len(prepared)]) for number in range(8))
        print_line(f"TensorFlow with {form}: {settings.batch_size / times[form]:,.0f} samples/s")
    return min(times, key=lambda form: times[form])


def _timed(call: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    float(call(*arguments))
    return time.perf_counter() - began


def _run_block(found: Comparison, side: str, step: Callable[[int], Any], numbers: range) -> None:
    for place, number in enumerate(numbers):
        began = time.perf_counter()
        found.losses[side].append(float(step(number)))
        # Of a run with fewer steps than would be dropped, the last step is timed.
        if place >= min(DROPPED, len(numbers) - 1):
            found.seconds[side].append(time.perf_counter() - began)


def _print_block(found: Comparison, first: int, last: int, print_line: Callable[[str], None]) -> None:
    kept = last - first - min(DROPPED, last - first - 1)
    parts = []
    for side, name in NAMES.items():
        speed = found.batch_size / statistics.median(found.seconds[side][-kept:])
        parts.append(f"{name} loss {found.losses[side][-1]:.6f} {speed:>9,.0f} samples/s")
    print_line(f"steps {first + 1:>4}-{last:<4}  {'   '.join(parts)}")


def _print_summary(found: Comparison, form: Form, print_line: Callable[[str], None]) -> None:
    for side, name in NAMES.items():
        median = statistics.median(found.seconds[side])
        print_line(f"{name}: {1e3 * median:.1f} ms a step, {found.batch_size / median:,.0f} samples/s (medians)")
    print_line(verdict(found.largest_difference(), found.losses["ours"][:COMPARED_STEPS], TOLERANCE))
    print_line(f"TensorFlow's fastest form: {form}")
    print_line(f"speed: {found.speed_ratio():.2f}x TensorFlow")
