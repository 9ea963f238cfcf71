"""A training step: forward, backward and update of a network that learns binary labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Batch(Protocol):
    """A batch of examples with labels, float32 ``[B]`` of 0 and 1."""

    @property
    def labels(self) -> Tensor:
        """The labels."""

    @property
    def size(self) -> int:
        """The number of examples."""


B = TypeVar("B", bound=Batch)


class Step(ABC, Generic[B]):
    """
    Forward, backward and update. Subclasses say how a batch gives logits.

    Args:
        model: the network.
        optimizers: hold all of its parameters.
    """

    def __init__(self, model: Any, *optimizers: Optimizer) -> None:
        self.model, self.optimizers = model, optimizers
        self.device: torch.device = next(model.parameters()).device
        self._loss = nn.BCEWithLogitsLoss()

    @abstractmethod
    def logits(self, batch: B) -> Tensor:
        """Return the logits ``[B]`` of a batch."""

    def prefetch(self, batch: B) -> None:
        """Begin to read what a coming batch needs."""

    def __call__(self, batch: B) -> Tensor:
        """Train on one batch; return its mean loss, a scalar without a graph, without waiting for it."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self._loss(self.logits(batch), batch.labels.to(self.device))
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"model": self.model.state_dict(), "optimizers": [each.state_dict() for each in self.optimizers]}

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
