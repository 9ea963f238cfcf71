"""The training loop: epochs, figures, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...data.device import DeviceLoader
from .. import _training
from .._figures import Interval, Record, as_record
from .columns import Columns
from .data import Batch
from .metrics import evaluate
from .sources import Source
from .steps import LEARNING_RATES, TorchStep, make_model

CHECKPOINT_FORMAT = "wide_deep 1"


@dataclass(frozen=True)
class Settings:
    """
    Settings that determine a run's bits, beside Criteo's file. The command's flags explain them.

    Sparse and fused steps of Adam, AdamW, RMSprop and Adadelta leave rows stale and flush them later. With these
    optimizers the steps at which checkpoints are written count as well: each checkpoint flushes all rows.
    """

    columns: str = "identity"
    rows: int = 20_000
    samples: int = 262_144
    held_out: int = 32_768
    batch_size: int = 4096
    distribution: str = "uniform"
    embedding_dim: int = 16
    mlp: tuple[int, ...] = (256, 128)
    grad_mode: str = "fused"
    optimizer: str = "sgd"
    lr: float | None = None
    seed: int = 0

    def learning_rate(self) -> float:
        """Return ``lr``, or the optimizer's default."""
        return LEARNING_RATES[self.optimizer] if self.lr is None else self.lr


@dataclass
class Trainer:
    """
    A network in training, with everything that decides how it goes on.

    Args:
        settings: the run's settings.
        source: yields the examples.
        columns: the examples' features.
        device: where the network is, default the CPU.
        history: the records so far.
        epoch, batch, step: finished epochs, batches done in the epoch that has begun, and steps in all.
    """

    settings: Settings
    source: Source
    columns: Columns
    device: torch.device | str = "cpu"
    history: list[Record] = field(default_factory=list)
    epoch: int = 0
    batch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        settings = self.settings
        model = make_model(self.columns, settings.mlp, settings.grad_mode, settings.seed, self.device)
        self.train_on = TorchStep(self.columns, model, settings.optimizer, settings.learning_rate())

    def run(self, epochs: int, steps: int | None = None, every: int | None = None) -> Iterator[Record]:
        """
        Train, and record each epoch's end.

        Args:
            epochs: their number in all, with those before a checkpoint.
            steps: end after so many in all, with those before a checkpoint.
            every: record also after so many steps.

        Raises:
            FloatingPointError: if the loss is no finite number any more.
        """
        while self.epoch < epochs and not self._is_over(steps):
            interval = Interval()
            batches: Iterable[Batch] = self.source.batches(self.batch)
            if torch.device(self.device).type != "cpu":
                batches = DeviceLoader(batches, self.device)
            title, total = f"epoch {self.epoch + 1}", self.source.epoch_length()
            for batch in _training.progress(batches, title, total, self.batch):
                interval.add(self.train_on(batch), batch.size)
                self.batch, self.step = self.batch + 1, self.step + 1
                if self._is_over(steps) and self.batch != self.source.epoch_length():
                    break
                if every is not None and self.step % every == 0 and self.batch != self.source.epoch_length():
                    yield self._record(interval)
                    interval = Interval()
            else:
                self.epoch, self.batch = self.epoch + 1, 0
            if len(interval):
                yield self._record(interval)

    def _is_over(self, steps: int | None) -> bool:
        return steps is not None and self.step >= steps

    def _record(self, interval: Interval) -> Record:
        loss, speed = interval.close()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss up to step {self.step} is {loss}: a smaller learning rate may help")
        # Within an epoch this is its number. After its last batch ``self.epoch`` counts it already.
        epoch = self.epoch + (self.batch > 0)
        record = Record(epoch, self.step, loss, evaluate(self.train_on, self.source.held_out()), speed)
        self.history.append(record)
        return record

    def save(self, path: Path) -> None:
        """
        Write a checkpoint. Only a complete file replaces one of that name.

        All rows of the tables are flushed for it, which may move later results within rounding.
        """
        content = {
            "format": CHECKPOINT_FORMAT,
            "settings": {**asdict(self.settings), "mlp": list(self.settings.mlp)},
            "source": self.source.fingerprint(),
            "device": torch.device(self.device).type,
            "model": self.train_on.model.state_dict(),
            "optimizer": self.train_on.optimizer.state_dict(),
            "position": {"epoch": self.epoch, "batch": self.batch, "step": self.step},
            "history": [asdict(record) for record in self.history],
        }
        _training.write_checkpoint(path, content)

    def load(self, checkpoint: dict[str, Any]) -> None:
        """
        Go on from a checkpoint of the same settings and data, bit for bit on the same kind of device.

        The resumed run equals the run that wrote this checkpoint, if both write later ones at the same steps.
        """
        if checkpoint["source"] != self.source.fingerprint():
            raise ValueError(
                f"the checkpoint was trained on other data, {checkpoint['source']}, got {self.source.fingerprint()}"
            )
        _training.check_device(checkpoint, self.device)
        self.train_on.model.load_state_dict(checkpoint["model"])
        self.train_on.optimizer.load_state_dict(checkpoint["optimizer"])
        for name, value in checkpoint["position"].items():
            setattr(self, name, value)
        self.history = [as_record(each) for each in checkpoint["history"]]


def read_checkpoint(path: Path) -> tuple[Settings, dict[str, Any]]:
    """Return a checkpoint's settings, and its content for :meth:`Trainer.load`."""
    content = _training.read_checkpoint(path, CHECKPOINT_FORMAT)
    settings = content["settings"]
    return Settings(**{**settings, "mlp": tuple(settings["mlp"])}), content
