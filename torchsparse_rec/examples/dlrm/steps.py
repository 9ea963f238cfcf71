"""One training step: conversion of raw ids to the tables' ids, forward, backward, update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import torchsparse_rec

from ...data.criteo import CATEGORIES, INTEGERS
from .._job import ALONE, Job
from .._optimizers import OPTIMIZERS
from .._step import Step
from .data import Batch
from .model import DLRM
from .settings import Settings
from .tables import Placement, table_configs, table_ids, variables

KERAS_SUM = 0.1


def make_model(settings: Settings, placement: Placement, device: torch.device | str = "cpu") -> DLRM:
    """Make a network whose weights depend on the seed alone. torch's global generator keeps its state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        tables = table_configs(settings, placement)
        return DLRM(tables, len(INTEGERS), settings.bottom, settings.top, settings.grad_mode).to(device)


class TorchStep(Step[Batch]):
    """
    Forward, backward and update of tables and dense layers.

    Args:
        settings: the run's settings.
        placement: where the rows are.
        device: where the network is, default the CPU.
        job: over whose ranks the tables are split.
        keras_rule: whether Adagrad's sums begin at Keras's 0.1 and not at 0, from where it amplifies rounding.
    """

    def __init__(
        self,
        settings: Settings,
        placement: Placement,
        device: torch.device | str = "cpu",
        job: Job = ALONE,
        keras_rule: bool = False,
    ) -> None:
        model = make_model(settings, placement, device)
        make: Callable[..., Optimizer] = partial(OPTIMIZERS[settings.optimizer], lr=settings.learning_rate())
        if keras_rule and settings.optimizer == "adagrad":
            make = partial(make, initial_accumulator_value=KERAS_SUM)
        job.split(model)
        if job.is_alone:
            # There are two optimizers because dynamic tables have checkpoints of their own.
            self.of_tables = make(model.bags.parameters(), in_backward=True)
            self.of_layers = make(model.layers.parameters())
            super().__init__(model, self.of_tables, self.of_layers, job=job)
        else:
            super().__init__(model, make(model.parameters(), in_backward=True), job=job)
        self.settings = settings
        self._cold = list(variables(model.bags).values()) if "_" in placement.tiers else []
        self._offsets = torch.zeros(1, dtype=torch.int64)

    def logits(self, batch: Batch) -> Tensor:
        """Return the logits ``[B]`` of a batch."""
        return self.model(batch.numbers.to(self.device), self._features(batch))

    def _features(self, batch: Batch) -> torchsparse_rec.KeyedJaggedTensor:
        ids = table_ids(self.settings, batch.ids.to(self.device)).flatten()
        if len(self._offsets) != len(ids) + 1:
            self._offsets = torch.arange(len(ids) + 1, device=self.device)
        counts = [batch.size] * len(CATEGORIES)
        return torchsparse_rec.KeyedJaggedTensor(CATEGORIES, ids, offsets=self._offsets, length_per_key=counts)

    def prefetch(self, batch: Batch) -> None:
        """Begin to read those rows of a coming batch that are in tiers below the first."""
        if self._cold:
            for table, ids in zip(self._cold, batch.ids.to(self.device), strict=True):
                table.prefetch(ids)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, without that of dynamic tables."""
        if self.settings.tables == "hashed":
            return super().state()
        return {"layers": self.model.layers.state_dict(), "of_layers": self.of_layers.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""
        if self.settings.tables == "hashed":
            super().load(state)
        else:
            self.model.layers.load_state_dict(state["layers"])
            self.of_layers.load_state_dict(state["of_layers"])
