"""Figures of a run that learns a binary label: AUC and log loss by torchmetrics, records of intervals, curves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ._training import picture


class Labelled(Protocol):
    """A batch that has labels, float32 ``[B]``."""

    @property
    def labels(self) -> Tensor:
        """The labels, 0 or 1."""


B = TypeVar("B", bound=Labelled)


@dataclass(frozen=True)
class Metrics:
    """Area under the ROC curve (None if all labels are equal) and mean binary cross-entropy of held-out examples."""

    auc: float | None
    log_loss: float

    def __str__(self) -> str:
        """Return the text that is printed."""
        auc = "n/a" if self.auc is None else f"{self.auc:.4f}"
        return f"AUC {auc} log loss {self.log_loss:.4f}"


def torchmetrics() -> Any:
    """Return the package torchmetrics. Raise an ``ImportError`` that names the extra if it is missing."""
    try:
        import torchmetrics
        import torchmetrics.classification
    except ImportError as error:
        raise ImportError(
            f"AUC and log loss need torchmetrics: pip install 'torchsparse-rec[examples]' ({error})"
        ) from None
    return torchmetrics


@torch.no_grad()
def evaluate(logits_of: Callable[[B], Tensor], batches: Iterable[B], device: torch.device | str) -> Metrics:
    """
    Return the metrics of a network on held-out batches, without training it.

    Args:
        logits_of: gives the logits ``[B]`` of a batch.
        batches: held-out ones, at least one.
        device: where the logits are.

    Raises:
        ImportError: if torchmetrics is not installed.
    """
    package = torchmetrics()
    auc = package.classification.BinaryAUROC().to(device)
    log_loss = package.MeanMetric().to(device)
    classes: set[bool] = set()
    for batch in batches:
        classes.update((batch.labels > 0.5).unique().tolist())
        logits, labels = logits_of(batch), batch.labels.to(device)
        # Logits become probabilities here: torchmetrics takes a batch for logits only where one lies outside [0, 1].
        auc.update(logits.sigmoid(), labels.int())
        log_loss.update(nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none"))
    # Where all labels are of one class torchmetrics returns 0, as if everything were in the wrong order.
    return Metrics(float(auc.compute()) if len(classes) == 2 else None, float(log_loss.compute()))


@dataclass(frozen=True)
class Record:
    """Figures of the steps since the last record: mean training loss, metrics at their end, samples per second."""

    epoch: int
    step: int
    loss: float
    metrics: Metrics
    samples_per_second: float

    def line(self, epochs: int) -> str:
        """Return the line that is printed for the record."""
        return (
            f"epoch {self.epoch:>{len(str(epochs))}}/{epochs} step {self.step:,}  loss {self.loss:.4f}  "
            f"held out: {self.metrics}  "
            f"{self.samples_per_second:,.0f} samples/s"
        )


def as_record(saved: dict[str, Any]) -> Record:
    """Return the record of which :func:`dataclasses.asdict` made ``saved``."""
    return Record(**{**saved, "metrics": Metrics(**saved["metrics"])})


class Interval:
    """The losses and times of the steps since the last record. Only the mean waits for the losses to be computed."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._sizes: list[int] = []
        self._began = time.perf_counter()

    def add(self, loss: Tensor, size: int) -> None:
        """Add a step's mean loss and its number of samples."""
        self._losses.append(loss)
        self._sizes.append(size)

    def __len__(self) -> int:
        return len(self._losses)

    def state(self) -> dict[str, Any]:
        """Return numbers from which :meth:`of_state` makes the interval again. Wait for the losses."""
        losses = torch.stack(self._losses).tolist() if self._losses else []
        return {"losses": losses, "sizes": list(self._sizes), "seconds": time.perf_counter() - self._began}

    @classmethod
    def of_state(cls, state: dict[str, Any], device: torch.device | str) -> Interval:
        """Return an interval that goes on from what :meth:`state` returned, with losses on ``device``."""
        interval = cls()
        interval._losses = list(torch.tensor(state["losses"], device=device).unbind())
        interval._sizes = list(state["sizes"])
        interval._began -= state["seconds"]
        return interval

    def close(self) -> tuple[float, float]:
        """Return the mean loss of a sample, and samples per second."""
        losses = torch.stack(self._losses).double().tolist()
        seconds, samples = time.perf_counter() - self._began, sum(self._sizes)
        return sum(loss * size for loss, size in zip(losses, self._sizes, strict=True)) / samples, samples / seconds


def summary(history: Sequence[Record]) -> str:
    """Return a run's last line: the last record's metrics, and the best by AUC, or by log loss where AUC is None."""
    last = history[-1]
    if last.metrics.auc is None:
        best = min(history, key=lambda record: record.metrics.log_loss)
    else:
        best = max(history, key=lambda record: record.metrics.auc or 0.0)
    return f"last step {last.step:,}: {last.metrics}, best step {best.step:,}: {best.metrics}"


def plot_curves(history: Sequence[Record], title: str, path: Path) -> None:
    """
    Draw loss and AUC over the steps into a PNG.

    Args:
        history: the records, at least one.
        title: text above the picture.
        path: the picture's path; only a complete file replaces one that is there.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    with picture(title, path) as (loss, auc):
        steps = [record.step for record in history]
        loss.plot(steps, [record.loss for record in history], marker=".", label="training")
        loss.plot(steps, [record.metrics.log_loss for record in history], marker=".", label="held out")
        loss.set(xlabel="step", ylabel="binary cross-entropy", title="log loss")
        loss.legend()
        areas = [math.nan if record.metrics.auc is None else record.metrics.auc for record in history]
        auc.plot(steps, areas, marker=".", color="black")
        auc.axhline(0.5, color="gray", linewidth=0.8, linestyle="--")
        auc.set(xlabel="step", title="AUC of held-out examples")
