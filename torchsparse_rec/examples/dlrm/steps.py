"""One training step: conversion of raw ids to the tables' ids, forward, backward, update."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import torchsparse_rec

from ...data.criteo import CATEGORIES
from .data import Batch
from .model import DLRM
from .tables import Placement, table_configs, table_ids, variables

if TYPE_CHECKING:
    from .train import Settings


def make_model(settings: Settings, placement: Placement, device: torch.device | str = "cpu") -> DLRM:
    """Make a network whose weights depend on the seed alone. torch's global generator keeps its state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return DLRM(table_configs(settings, placement), bottom=settings.bottom, top=settings.top).to(device)


class TorchStep:
    """
    Forward, backward and Adagrad's update of tables and dense layers.

    Args:
        settings: the run's settings.
        placement: where the rows are.
        device: where the network is, default the CPU.
    """

    def __init__(self, settings: Settings, placement: Placement, device: torch.device | str = "cpu") -> None:
        self.settings, self.device = settings, torch.device(device)
        self.model = make_model(settings, placement, device)
        make = torchsparse_rec.optim.Adagrad
        # There are two optimizers because dynamic tables have checkpoints of their own.
        self.of_tables = make(self.model.bags.parameters(), lr=settings.lr, in_backward=True)
        self.of_layers = make(self.model.layers.parameters(), lr=settings.lr)
        self._cold = list(variables(self.model.bags).values()) if "_" in placement.tiers else []
        self._loss = nn.BCEWithLogitsLoss()
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

    def __call__(self, batch: Batch) -> Tensor:
        """Train on one batch; return its mean loss, a scalar without a graph, without waiting for it."""
        for optimizer in (self.of_tables, self.of_layers):
            optimizer.zero_grad()
        loss = self._loss(self.logits(batch), batch.labels.to(self.device))
        loss.backward()
        for optimizer in (self.of_tables, self.of_layers):
            optimizer.step()
        return loss.detach()
