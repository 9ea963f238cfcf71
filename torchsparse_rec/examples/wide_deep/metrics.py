"""AUC and log loss of held-out examples."""

from __future__ import annotations

from collections.abc import Iterable

from .. import _figures
from .._figures import Metrics
from .._figures import torchmetrics as torchmetrics
from .data import Batch
from .steps import TorchStep


def evaluate(step: TorchStep, batches: Iterable[Batch]) -> Metrics:
    """
    Return the metrics of a network on held-out batches, without training it.

    Args:
        step: has the network.
        batches: held-out ones, at least one.

    Raises:
        ImportError: if torchmetrics is not installed.
    """
    return _figures.evaluate(lambda batch: step.logits(batch.columns), batches, step.device)
