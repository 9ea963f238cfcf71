"""The same network in TensorFlow: same weights, same batches, same Adam, side by side in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._comparison import NAMES, largest_difference, verdict
from .._trainer import progress
from .data import Interactions
from .evaluate import Evaluator, Metrics
from .sampling import Batch
from .settings import Settings
from .steps import build_step
from .train import Samples

TOLERANCE = 1e-5
COMPARED_STEPS = 100
_PRINTED_STEPS = (1, 2, 5, 10, 20, 50, 100)


@dataclass(frozen=True)
class Side:
    """One framework's epoch: the loss of every step, the metrics at its end, training samples per second."""

    losses: list[float]
    loss: float
    metrics: Metrics
    samples_per_second: float

    def line(self, title: str, name: str) -> str:
        """Return the line that is printed for the epoch."""
        m = self.metrics
        return (
            f"{title}  {name:<15}  HR@10 {m.hr:.4f} NDCG@10 {m.ndcg:.4f} full-HR@10 {m.full_hr:.4f} "
            f"full-NDCG@10 {m.full_ndcg:.4f} loss {self.loss:.6f} {self.samples_per_second:,.0f} samples/s"
        )


@dataclass
class Comparison:
    """The losses of the first steps, and the figures of every epoch, of both frameworks."""

    first_losses: dict[str, list[float]]
    epochs: list[dict[str, Side]]

    def largest_difference(self) -> float:
        """Return the largest difference between both sides' first COMPARED_STEPS losses; inf if one is not finite."""
        return largest_difference(self.first_losses["ours"], self.first_losses["tensorflow"])

    def speed_ratio(self) -> float:
        """Return our samples per second over TensorFlow's, the median over the epochs."""
        return statistics.median(e["ours"].samples_per_second / e["tensorflow"].samples_per_second for e in self.epochs)


def compare(
    settings: Settings, interactions: Interactions, epochs: int, print_line: Callable[[str], None] = print
) -> Comparison:
    """
    Train in both frameworks, epoch by epoch on the same batches, and print both sides' figures.

    Only the training itself is timed: drawing and converting the batches is left out on both sides.

    Args:
        settings: the run's settings; Adam has Keras's place of eps on both sides.
        interactions: the data set.
        epochs: the number of epochs.
        print_line: called with each line.

    Returns:
        Both sides' losses, metrics and speeds.

    Raises:
        ImportError: if TensorFlow is not installed.
    """
    samples = Samples(settings, interactions)
    sizes = interactions.num_users, interactions.num_items
    steps = {kind: build_step(kind, *sizes, settings, keras_rule=True) for kind in NAMES}
    found = Comparison({kind: [] for kind in NAMES}, [])
    for epoch in range(1, epochs + 1):
        batches = list(samples.batches())
        # The side that goes first alternates, because the second one finds the machine in another state.
        kinds = list(NAMES) if epoch % 2 else list(NAMES)[::-1]
        sides = {
            kind: _run_side(steps[kind], batches, samples.evaluator, f"epoch {epoch} {NAMES[kind]}") for kind in kinds
        }
        found.epochs.append(sides)
        for kind in NAMES:
            first = found.first_losses[kind]
            first += sides[kind].losses[: COMPARED_STEPS - len(first)]
        if epoch == 1:
            _print_steps(sides, print_line)
        title = f"epoch {epoch:>{len(str(epochs))}}/{epochs}"
        for kind, side in sides.items() if epoch % 2 else reversed(sides.items()):
            print_line(side.line(title if kind == "ours" else " " * len(title), NAMES[kind]))
    _print_summary(found, print_line)
    return found


def _run_side(step: Any, batches: list[Batch], evaluator: Evaluator, title: str) -> Side:
    sizes = [batch.size for batch in batches]
    prepared = step.prepare(batches)
    started = time.perf_counter()
    scalars = [step(batch) for batch in progress(prepared, title, len(prepared))]
    float(scalars[-1])  # Wait for what may still be running.
    seconds = time.perf_counter() - started
    losses = [float(loss) for loss in scalars]
    mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    return Side(losses, mean, evaluator(step.network()), sum(sizes) / seconds)


def _print_steps(sides: dict[str, Side], print_line: Callable[[str], None]) -> None:
    print_line(f"{'step':>4}  {'torchsparse_rec':>15}  {'TensorFlow':>15}  difference")
    for number in _PRINTED_STEPS:
        if number <= len(sides["ours"].losses):
            ours, theirs = sides["ours"].losses[number - 1], sides["tensorflow"].losses[number - 1]
            print_line(f"{number:>4}  {ours:>15.8f}  {theirs:>15.8f}  {abs(ours - theirs):.1e}")


def _print_summary(found: Comparison, print_line: Callable[[str], None]) -> None:
    print_line(verdict(found.largest_difference(), found.first_losses["ours"], TOLERANCE))
    print_line(f"samples/s: {found.speed_ratio():.2f} times TensorFlow's (median over the epochs)")
