"""The training samples of NCF with what they are evaluated on, and the trainer over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .._checkpoints import Checkpoint
from .._job import ALONE, Job
from .._sources import Source
from .._trainer import Trainer
from .data import Interactions
from .evaluate import Evaluator, Metrics
from .sampling import Batch, TrainingSampler, evaluation_candidates, leave_one_out
from .settings import Settings
from .steps import TorchStep, build_step


class Samples(Source[Batch]):
    """
    The samples of a data set, drawn anew in every epoch.

    Args:
        settings: the run's settings.
        interactions: the data set.
        device: where the samples are.
    """

    def __init__(self, settings: Settings, interactions: Interactions, device: torch.device | str = "cpu") -> None:
        self.split = split = leave_one_out(interactions)
        self.evaluator = Evaluator(split, evaluation_candidates(split, seed=settings.seed), device)
        self.sampler = TrainingSampler(split, settings.negatives, settings.seed, device, settings.exclude_held_out)
        self._interactions, self._batch_size = interactions, settings.batch_size

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """Draw an epoch, and yield its batches from number ``first`` on."""
        return iter(self.sampler.draw().split(self._batch_size)[first:])

    def epoch_length(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-self.sampler.samples // self._batch_size)

    def fingerprint(self) -> str:
        """Return the data set's name and checksum."""
        return f"{self._interactions.name} of checksum {self._interactions.checksum():08x}"

    def state(self) -> dict[str, Any]:
        """Return the state of the generator that draws the epochs to come."""
        return {"generator": self.sampler.generator.get_state()}

    def load(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state` returned."""
        self.sampler.generator.set_state(state["generator"])


def make_trainer(
    settings: Settings,
    interactions: Interactions,
    device: torch.device | str = "cpu",
    checkpoint: Checkpoint | None = None,
    job: Job = ALONE,
) -> Trainer[Batch]:
    """Return a trainer of our network at its first weights."""
    samples = Samples(settings, interactions, device)
    step = build_step("ours", samples.split.num_users, samples.split.num_items, settings, device, job=job)
    assert isinstance(step, TorchStep)
    return Trainer(settings, samples, step, Metrics, checkpoint)
