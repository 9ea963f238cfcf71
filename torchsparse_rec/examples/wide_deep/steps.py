"""One training step in PyTorch: conversion of columns to ids, forward, backward, update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...typing import GradMode
from .._job import ALONE, Job
from .._optimizers import OPTIMIZERS
from .._step import Step
from .columns import Columns
from .data import Batch
from .model import WideDeep


def make_model(
    columns: Columns, mlp: Sequence[int], grad_mode: GradMode, seed: int, device: torch.device | str = "cpu"
) -> WideDeep:
    """Make a network whose weights depend on the seed alone. torch's global generator keeps its state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tables = columns.transform.embedding_bag_configs()
        return WideDeep(tables, columns.hots, len(columns.numbers), mlp, grad_mode).to(device)


class TorchStep(Step[Batch]):
    """
    Conversion of columns to ids, forward, backward and update.

    Args:
        columns: the features of the batches.
        model: the network.
        optimizer: the name of one of OPTIMIZERS; it gets all parameters.
        lr: its learning rate.
        job: over whose ranks the tables are split.
    """

    def __init__(self, columns: Columns, model: WideDeep, optimizer: str, lr: float, job: Job = ALONE) -> None:
        job.split(model)
        super().__init__(model, OPTIMIZERS[optimizer](model.parameters(), lr=lr, in_backward=True), job=job)
        self.transform = columns.transform.to(self.device)

    def logits(self, batch: Batch) -> Tensor:
        """Return the logits ``[B]`` of a batch's raw columns."""
        features = self.transform(batch.columns)
        return self.model(features.dense, features.sparse)
