"""The training loop: epochs, figures, checkpoints."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import _training
from .data import Interactions
from .evaluate import Evaluator, Metrics
from .sampling import Split, TrainingSampler, evaluation_candidates, leave_one_out
from .steps import LEARNING_RATES, Batch, TorchStep, build_step

CHECKPOINT_FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """Settings that determine a run's bits, beside its data. The command's flags explain them."""

    factors: int = 8
    layers: tuple[int, ...] = (32, 16, 8)
    grad_mode: str = "auto"
    optimizer: str = "adam"
    lr: float | None = None
    batch_size: int = 1024
    negatives: int = 4
    exclude_held_out: bool = False
    seed: int = 0

    def learning_rate(self) -> float:
        """Return ``lr``, or the optimizer's default."""
        return LEARNING_RATES[self.optimizer] if self.lr is None else self.lr

    def make_sampler(self, split: Split, device: torch.device | str = "cpu") -> TrainingSampler:
        """Return the sampler of the run's epochs."""
        return TrainingSampler(split, self.negatives, self.seed, device, self.exclude_held_out)

    def step_arguments(self) -> dict[str, Any]:
        """Return the arguments of :func:`build_step`."""
        names = ("factors", "layers", "grad_mode", "optimizer", "seed")
        return {**{name: getattr(self, name) for name in names}, "lr": self.learning_rate()}


@dataclass(frozen=True)
class Record:
    """One epoch's figures: mean training loss, metrics at its end, and training samples per second."""

    epoch: int
    loss: float
    metrics: Metrics
    samples_per_second: float

    def line(self, epochs: int) -> str:
        """Return the line that is printed for the epoch."""
        m = self.metrics
        return (
            f"epoch {self.epoch:>{len(str(epochs))}}/{epochs}  HR@10 {m.hr:.4f} NDCG@10 {m.ndcg:.4f} "
            f"full-HR@10 {m.full_hr:.4f} full-NDCG@10 {m.full_ndcg:.4f} "
            f"loss {self.loss:.4f} {self.samples_per_second:,.0f} samples/s"
        )


@dataclass
class Trainer:
    """
    A network in training, with everything that decides how it goes on.

    Args:
        settings: the run's settings.
        interactions: the data set.
        device: where everything lives, default the CPU.
        history: the epochs so far.
    """

    settings: Settings
    interactions: Interactions
    device: torch.device | str = "cpu"
    history: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        split = leave_one_out(self.interactions)
        self.evaluator = Evaluator(split, evaluation_candidates(split, seed=self.settings.seed), self.device)
        self.sampler = self.settings.make_sampler(split, self.device)
        arguments = self.settings.step_arguments()
        step = build_step("ours", split.num_users, split.num_items, device=self.device, **arguments)
        assert isinstance(step, TorchStep)
        self.step = step

    def run_epoch(self) -> Record:
        """Draw an epoch's samples, train on them and evaluate."""
        number = len(self.history) + 1
        started = time.perf_counter()
        batches = self.step.prepare(self.sampler.draw().batches(self.settings.batch_size))
        loss = mean_loss(run_batches(self.step, batches, f"epoch {number}"), batches)
        seconds = time.perf_counter() - started
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of epoch {number} is {loss}: a smaller learning rate may help")
        record = Record(number, loss, self.evaluator(self.step.network()), self.sampler.samples / seconds)
        self.history.append(record)
        return record

    def save(self, path: Path) -> None:
        """Write a checkpoint. Only a complete file replaces one of that name."""
        content = {
            "format": CHECKPOINT_FORMAT,
            "settings": {**asdict(self.settings), "layers": list(self.settings.layers)},
            "data": {"name": self.interactions.name, "checksum": self.interactions.checksum()},
            "device": torch.device(self.device).type,
            "model": self.step.model.state_dict(),
            "optimizer": self.step.optimizer.state_dict(),
            "generator": self.sampler.generator.get_state(),
            "history": [asdict(record) for record in self.history],
        }
        _training.write_checkpoint(path, content)

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Go on from a checkpoint of the same settings and data, bit for bit on the same kind of device."""
        if checkpoint["data"]["checksum"] != self.interactions.checksum():
            raise ValueError(
                f"the checkpoint was trained on other data ({checkpoint['data']['name']}) "
                f"than this {self.interactions.name}"
            )
        _training.check_device(checkpoint, self.device)
        self.step.model.load_state_dict(checkpoint["model"])
        self.step.optimizer.load_state_dict(checkpoint["optimizer"])
        self.sampler.generator.set_state(checkpoint["generator"])
        self.history = [Record(**{**each, "metrics": Metrics(**each["metrics"])}) for each in checkpoint["history"]]


def read_checkpoint(path: Path) -> tuple[Settings, dict[str, Any]]:
    """Return a checkpoint's settings, and its content for :meth:`Trainer.load`."""
    content = _training.read_checkpoint(path, CHECKPOINT_FORMAT)
    settings = content["settings"]
    return Settings(**{**settings, "layers": tuple(settings["layers"])}), content


def run_batches(step: Any, batches: list[Batch], title: str) -> list[Any]:
    """Train on every batch, with a progress bar on a terminal; return the losses without waiting for them."""
    return [step(users, items, labels) for users, items, labels in _training.progress(batches, title, len(batches))]


def mean_loss(losses: list[Any], batches: list[Batch]) -> float:
    """Return the mean loss of a sample. The last batch may be smaller than the others."""
    total = (
        torch.stack(losses).double() @ torch.tensor([float(len(b[2])) for b in batches]).to(losses[0].device).double()
    )
    return total.item() / sum(len(batch[2]) for batch in batches)
