"""AUC and log loss of held-out examples with a label of 0 or 1, by torchmetrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ._records import Metrics, Record
from ._sources import SplitSource
from ._step import Step


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


@dataclass(frozen=True)
class Clicks(Metrics):
    """Area under the ROC curve (None if all labels are equal) and mean binary cross-entropy of held-out examples."""

    auc: float | None
    log_loss: float

    @classmethod
    @torch.no_grad()
    def of(cls, train_on: Step, source: SplitSource) -> Clicks:
        """Return the metrics of a network in ``eval()`` on its source's held-out batches."""
        package = torchmetrics()
        auc = package.classification.BinaryAUROC().to(train_on.device)
        log_loss = package.MeanMetric().to(train_on.device)
        classes: set[bool] = set()
        train_on.model.eval()
        for batch in source.held_out():
            classes.update((batch.labels > 0.5).unique().tolist())
            labels = batch.labels.to(train_on.device)
            logits = train_on.job.joined(train_on.logits(train_on.job.part(batch)), batch.size)
            # torchmetrics takes a batch for logits only where one lies outside [0, 1], so they become probabilities.
            auc.update(logits.sigmoid(), labels.int())
            log_loss.update(nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none"))
        train_on.model.train()
        # Where all labels are of one class torchmetrics returns 0, as if everything were in the wrong order.
        return cls(float(auc.compute()) if len(classes) == 2 else None, float(log_loss.compute()))

    def __str__(self) -> str:
        """Return the text that is printed."""
        auc = "n/a" if self.auc is None else f"{self.auc:.4f}"
        return f"AUC {auc} log loss {self.log_loss:.4f}"

    def line(self, record: Record) -> str:
        """Return the step, the loss and the metrics."""
        return f" step {record.step:,}  loss {record.loss:.4f}  held out: {self} "

    def place(self, record: Record) -> str:
        """Return the step."""
        return f"step {record.step:,}"

    def rank(self) -> float:
        """Return the AUC, or minus the log loss where there is none, as in all records of such a run."""
        return -self.log_loss if self.auc is None else self.auc

    @staticmethod
    def draw(history: Sequence[Record], left: Any, right: Any) -> None:
        """Draw loss and AUC over the steps."""
        steps = [record.step for record in history]
        left.plot(steps, [record.loss for record in history], marker=".", label="training")
        left.plot(steps, [record.metrics.log_loss for record in history], marker=".", label="held out")
        left.set(xlabel="step", ylabel="binary cross-entropy", title="log loss")
        left.legend()
        areas = [math.nan if record.metrics.auc is None else record.metrics.auc for record in history]
        right.plot(steps, areas, marker=".", color="black")
        right.axhline(0.5, color="gray", linewidth=0.8, linestyle="--")
        right.set(xlabel="step", title="AUC of held-out examples")
