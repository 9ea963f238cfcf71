"""A training step: forward, backward and update of a network that learns binary labels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ._job import ALONE, Job


class Batch(Protocol):
    """A batch of examples with labels, float32 ``[B]`` of 0 and 1."""

    @property
    def labels(self) -> Tensor:
        """The labels."""

    @property
    def size(self) -> int:
        """The number of examples."""

    def rows(self, begin: int, end: int) -> Any:
        """Return the batch of the examples from ``begin`` up to, without, ``end``."""


B = TypeVar("B", bound=Batch)


class Step(ABC, Generic[B]):
    """
    Forward, backward and update. Subclasses say how a batch gives logits.

    Args:
        model: the network.
        optimizers: hold all of its parameters.
        job: of which this process is a rank; it has split the network's tables. Default: there is one process.
    """

    def __init__(self, model: Any, *optimizers: Optimizer, job: Job = ALONE) -> None:
        self.model, self.optimizers, self.job = model, optimizers, job
        self.device: torch.device = next(model.parameters()).device

    @abstractmethod
    def logits(self, batch: B) -> Tensor:
        """Return the logits ``[B]`` of a batch, or of this rank's part of it, where all ranks do so."""

    def prefetch(self, batch: B) -> None:
        """Begin to read what a coming batch needs."""

    def __call__(self, batch: B) -> Tensor:
        """Train on this rank's part of a batch; return the batch's mean loss, without a graph and without waiting."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.job.loss(self.logits(batch), batch.labels.to(self.device))
        loss.backward()
        self.job.average(self.model)
        for optimizer in self.optimizers:
            optimizer.step()
        return self.job.mean(loss)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"model": self.model.state_dict(), "optimizers": [each.state_dict() for each in self.optimizers]}

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
