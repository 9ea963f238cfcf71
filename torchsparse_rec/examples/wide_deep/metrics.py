"""AUC and log loss of held-out examples, by torchmetrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .data import Batch
from .steps import TorchStep


@dataclass(frozen=True)
class Metrics:
    """Area under the ROC curve, None if all labels are equal, and mean binary cross-entropy, of held-out examples."""

    auc: float | None
    log_loss: float

    def __str__(self) -> str:
        """As they are printed."""
        auc = "n/a" if self.auc is None else f"{self.auc:.4f}"
        return f"AUC {auc} log loss {self.log_loss:.4f}"


def torchmetrics() -> Any:
    """The package. ImportError that names the extra, if it is missing."""
    try:
        import torchmetrics
        import torchmetrics.classification
    except ImportError as error:
        raise ImportError(
            f"AUC and log loss need torchmetrics: pip install 'torchsparse-rec[examples]' ({error})"
        ) from None
    return torchmetrics


@torch.no_grad()
def evaluate(step: TorchStep, batches: Iterable[Batch]) -> Metrics:
    """
    The metrics of a network, whose parameters stay as they are.

    Args:
        step: has the network.
        batches: held-out ones, at least one.

    Raises:
        ImportError: if torchmetrics is not installed.
    """
    package = torchmetrics()
    auc = package.classification.BinaryAUROC().to(step.device)
    log_loss = package.MeanMetric().to(step.device)
    classes: set[bool] = set()
    for batch in batches:
        classes.update((batch.labels > 0.5).unique().tolist())
        logits, labels = step.logits(batch.columns), batch.labels.to(step.device)
        # As probabilities: numbers outside [0, 1] would be taken for logits, batch by batch.
        auc.update(logits.sigmoid(), labels.int())
        log_loss.update(nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none"))
    # Of one class torchmetrics gives 0, as if everything were in the wrong order.
    return Metrics(float(auc.compute()) if len(classes) == 2 else None, float(log_loss.compute()))
