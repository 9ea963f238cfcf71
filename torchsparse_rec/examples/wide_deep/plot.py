"""A picture of a run: loss and AUC over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from .._training import picture
from .train import Record


def plot_curves(history: Sequence[Record], title: str, path: Path) -> None:
    """
    Draw the curves into a PNG.

    Args:
        history: what was recorded, at least one.
        title: printed above.
        path: of the file, replaced only by a complete one.

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
