"""Records of intervals of steps, with metrics of held-out examples: printed, compared and drawn."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..files import whole_file


class Metrics(ABC):
    """Metrics of held-out examples: the base of frozen dataclasses of numbers, whose text stands in the last line."""

    @classmethod
    @abstractmethod
    def of(cls, train_on: Any, source: Any) -> Metrics:
        """Return the metrics of a network, without training it, on what its source holds out."""

    @abstractmethod
    def line(self, record: Record) -> str:
        """Return what a record's line has between the epoch's number and the speed."""

    @abstractmethod
    def place(self, record: Record) -> str:
        """Return how the last line names a record's place."""

    @abstractmethod
    def rank(self) -> Any:
        """Return what is greater for better metrics of a run."""

    @staticmethod
    @abstractmethod
    def draw(history: Sequence[Record], left: Any, right: Any) -> None:
        """Draw the curves of a run on matplotlib's axes."""


@dataclass(frozen=True)
class Record:
    """Figures of the steps since the last record: mean training loss, metrics at their end, samples per second."""

    epoch: int
    step: int
    loss: float
    metrics: Any  # of an example's class of Metrics
    samples_per_second: float

    def line(self, epochs: int) -> str:
        """Return the line that is printed for the record."""
        place = f"epoch {self.epoch:>{len(str(epochs))}}/{epochs}"
        return f"{place}{self.metrics.line(self)} {self.samples_per_second:,.0f} samples/s"


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
    def of_state(cls, state: dict[str, Any], device: torch.device) -> Interval:
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
    """Return a run's last line: the last record's metrics, and the best."""
    last, best = history[-1], max(history, key=lambda record: record.metrics.rank())
    return f"last {last.metrics.place(last)}: {last.metrics}, best {best.metrics.place(best)}: {best.metrics}"


def plot_curves(history: Sequence[Record], title: str, path: Path) -> None:
    """
    Draw the curves of a run into a PNG.

    Args:
        history: the records, at least one.
        title: text above the picture.
        path: the picture's path; only a complete file replaces one that is there.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    history[-1].metrics.draw(history, *figure.subplots(1, 2))
    figure.suptitle(title)
    with whole_file(path) as file:
        figure.savefig(file, format="png", dpi=120)
