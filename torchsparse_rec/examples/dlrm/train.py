"""The trainer of DLRM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .._checkpoints import Checkpoint
from .._clicks import Clicks
from .._job import ALONE, Job
from .._trainer import Trainer
from .data import Batch
from .settings import Settings
from .sources import make_source
from .steps import TorchStep
from .tables import Placement


def make_trainer(
    settings: Settings,
    placement: Placement,
    device: torch.device | str = "cpu",
    checkpoints: Checkpoint | None = None,
    paths: Sequence[Path] | None = None,
    job: Job = ALONE,
) -> Trainer[Batch]:
    """Return a trainer of the network at its first weights, on the files' examples or generated ones."""
    step = TorchStep(settings, placement, device, job)
    return Trainer(settings, make_source(settings, paths), step, Clicks, checkpoints)
