"""The trainer of Wide & Deep."""

from __future__ import annotations

from pathlib import Path

import torch

from .._checkpoints import Checkpoint
from .._clicks import Clicks
from .._job import ALONE, Job
from .._trainer import Trainer
from . import columns as features
from .data import Batch
from .settings import Settings
from .sources import make_source
from .steps import TorchStep, make_model


def make_columns(settings: Settings, criteo: Path | None = None) -> features.Columns:
    """Return the features of generated examples, or of Criteo's."""
    if criteo is not None:
        return features.criteo_columns(settings.rows, settings.embedding_dim)
    return features.generated_columns(settings.columns, settings.rows, settings.embedding_dim)


def make_trainer(
    settings: Settings,
    device: torch.device | str = "cpu",
    checkpoint: Checkpoint | None = None,
    criteo: Path | None = None,
    prebatched: Path | None = None,
    job: Job = ALONE,
) -> Trainer[Batch]:
    """Return a trainer of the network at its first weights, on Criteo's examples or generated ones."""
    source, columns = make_source(settings, criteo, prebatched), make_columns(settings, criteo)
    model = make_model(columns, settings.mlp, settings.grad_mode, settings.seed, device)
    step = TorchStep(columns, model, settings.optimizer, settings.learning_rate(), job)
    return Trainer(settings, source, step, Clicks, checkpoint)
