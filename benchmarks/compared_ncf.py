"""NCF beside TensorFlow and PyTorch: the same weights, the same batches, the same Adam."""

from __future__ import annotations

import importlib
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchsparse_rec._progress import progress_bar
from torchsparse_rec.data.releases import Interactions
from torchsparse_rec.distributed.torchrun import Ranks
from torchsparse_rec.examples import _common, ncf

from .compared import NAMES, largest_difference, verdict

TOLERANCE = 1e-5
COMPARED_STEPS = 100
KERAS_EPS = 1e-7  # Keras's Adam adds this to sqrt(v), before the correction of the bias.
_PRINTED_STEPS = (1, 2, 5, 10, 20, 50, 100)


class TorchStep:
    """
    Forward, backward and update in PyTorch.

    Args:
        model: the network, which is trained.
        optimizer: an optimizer of its parameters.
    """

    def __init__(self, model: ncf.NeuMF, optimizer: Any) -> None:
        self._model, self._optimizer, self._ranks = model, optimizer, Ranks()

    def __call__(self, batch: ncf.Batch) -> torch.Tensor:
        """Train on a batch, and return its mean loss."""
        logits = self._model(batch.users, batch.items)
        return _common.train(self._model, self._optimizer, logits, batch.labels, self._ranks)

    def prepare(self, batches: list[ncf.Batch]) -> list[ncf.Batch]:
        """Return the batches themselves, which TensorFlow's step converts."""
        return batches

    def network(self) -> ncf.NeuMF:
        """Return the trained network itself, which TensorFlow's step makes."""
        return self._model


def build_step(
    kind: str, num_users: int, num_items: int, settings: Namespace, device: str = "cpu", keras_rule: bool = False
) -> Any:
    """
    Return a training step of NeuMF. All kinds with the same seed start from the same weights.

    Args:
        kind: ``ours`` (tables of ``torchsparse_rec.nn``), ``torch`` (``torch.nn.Embedding``, dense gradients) or
            ``tensorflow`` (a ``tf.function``, gradients made dense; always Keras's Adam).
        num_users, num_items: the rows of the tables.
        settings: the run's settings.
        device: the device of the PyTorch kinds.
        keras_rule: whether Adam has Keras's place of eps.
    """
    model = ncf.make_model(num_users, num_items, settings, None if kind == "ours" else torch.nn.Embedding)
    if kind == "tensorflow":
        return importlib.import_module("benchmarks.ncf_tensorflow").TensorflowStep(model, settings)
    model.to(device)
    if kind == "torch":
        return TorchStep(model, torch.optim.Adam(model.parameters(), lr=settings.lr, fused=True))
    rule = {"eps": KERAS_EPS, "tensorflow_eps": True} if keras_rule and settings.optimizer == "adam" else {}
    return TorchStep(model, ncf.make_optimizer(model, settings, **rule))


@dataclass(frozen=True)
class Side:
    """One framework's epoch: the loss of every step, the metrics at its end, training samples per second."""

    losses: list[float]
    loss: float
    metrics: dict[str, float]
    samples_per_second: float

    def line(self, title: str, name: str) -> str:
        """Return the line that is printed for the epoch."""
        m = self.metrics
        return (
            f"{title}  {name:<15}  {ncf.text(m)} {ncf.text(m, 'full-')} loss {self.loss:.6f} "
            f"{self.samples_per_second:,.0f} samples/s"
        )


@dataclass
class Comparison:
    """The losses of the first steps, and the figures of every epoch, of both frameworks."""

    first_losses: dict[str, list[float]]
    epochs: list[dict[str, Side]]

    def largest_difference(self) -> float:
        """Return the largest difference between both sides' first COMPARED_STEPS losses; inf if one is not finite."""
        return largest_difference(self.first_losses["ours"], self.first_losses["tensorflow"])

    def agrees(self) -> bool:
        """Say whether these losses differ by no more than the tolerance."""
        return self.largest_difference() <= TOLERANCE

    def speed_ratio(self) -> float:
        """Return our samples per second over TensorFlow's, the median over the epochs."""
        return statistics.median(e["ours"].samples_per_second / e["tensorflow"].samples_per_second for e in self.epochs)


def compare(
    settings: Namespace, interactions: Interactions, epochs: int, print_line: Callable[[str], None] = print
) -> Comparison:
    """
    Train in both frameworks, epoch by epoch on the same batches, and print both sides' figures.

    Only the training itself is timed: drawing and converting the batches is left out on both sides.

    Args:
        settings: the run's settings; Adam has Keras's place of eps on both sides.
        interactions: the data set.
        epochs: the number of epochs.
        print_line: a function that is called with each line.
    """
    split = ncf.leave_one_out(interactions)
    candidates = ncf.candidates_of(split, settings.seed)
    draw, _ = ncf.batches(split, settings, torch.Generator().manual_seed(settings.seed))
    steps = {kind: build_step(kind, split.num_users, split.num_items, settings, keras_rule=True) for kind in NAMES}
    found = Comparison({kind: [] for kind in NAMES}, [])
    for epoch in range(1, epochs + 1):
        batches = list(draw(0))
        # The side that goes first alternates, because the second one finds the machine in another state.
        sides: dict[str, Side] = {}
        for kind in list(NAMES) if epoch % 2 else list(NAMES)[::-1]:
            sides[kind] = _run_side(steps[kind], batches, split, candidates, f"epoch {epoch} {NAMES[kind]}")
        found.epochs.append(sides)
        for kind in NAMES:
            first = found.first_losses[kind]
            first += sides[kind].losses[: COMPARED_STEPS - len(first)]
        if epoch == 1:
            _print_steps(sides, print_line)
        title = f"epoch {epoch:>{len(str(epochs))}}/{epochs}"
        for kind, side in sides.items() if epoch % 2 else reversed(sides.items()):
            print_line(side.line(title if kind == "ours" else " " * len(title), NAMES[kind]))
    print_line(verdict(found.largest_difference(), found.first_losses["ours"], TOLERANCE))
    print_line(f"samples/s: {found.speed_ratio():.2f} times TensorFlow's (median over the epochs)")
    return found


def _run_side(step: Any, batches: list[ncf.Batch], split: ncf.Split, candidates: torch.Tensor, title: str) -> Side:
    sizes = [batch.size for batch in batches]
    prepared = step.prepare(batches)
    started = time.perf_counter()
    scalars = [step(batch) for batch in progress_bar(prepared, title, "batches", leave=False)]
    float(scalars[-1])  # Wait for what may still be running.
    seconds = time.perf_counter() - started
    losses = [float(loss) for loss in scalars]
    mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
    return Side(losses, mean, ncf.evaluate(step.network(), split, candidates, Ranks()), sum(sizes) / seconds)


def _print_steps(sides: dict[str, Side], print_line: Callable[[str], None]) -> None:
    print_line(f"{'step':>4}  {'torchsparse_rec':>15}  {'TensorFlow':>15}  difference")
    for number in _PRINTED_STEPS:
        if number <= len(sides["ours"].losses):
            ours, theirs = sides["ours"].losses[number - 1], sides["tensorflow"].losses[number - 1]
            print_line(f"{number:>4}  {ours:>15.8f}  {theirs:>15.8f}  {abs(ours - theirs):.1e}")
