"""The training loop: epochs, figures, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...data.device import DeviceLoader
from .. import _figures, _training
from .._figures import Interval, Record, as_record
from .._sources import Source
from .checkpoints import Checkpoints
from .data import Batch
from .steps import TorchStep
from .tables import Placement


@dataclass(frozen=True)
class Settings:
    """Settings that determine a run's bits, beside the files of examples. The command's flags explain them."""

    tables: str = "dynamic"
    buckets: int = 100_000
    embedding_dim: int = 16
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)
    filter: int | None = None
    evict: int | None = None
    evict_every: int | None = None
    max_cardinality: int | None = None
    samples: int = 1 << 20
    held_out: int = 1 << 16
    batch_size: int = 2048
    lr: float = 0.01
    seed: int = 0

    def learning_rate(self) -> float:
        """Return the learning rate, ``lr``."""
        return self.lr


@dataclass
class Trainer:
    """
    A network in training, with everything that decides how it goes on.

    Args:
        settings: the run's settings.
        source: yields the examples.
        placement: where the rows are, default all in memory.
        device: where the network is, default the CPU.
        checkpoints: the folder for checkpoints. Default None: none are written.
        history: the records so far.
        interval: the steps since the last record.
        epoch, batch, step: finished epochs, batches done in the epoch that has begun, and steps in all.
    """

    settings: Settings
    source: Source[Batch]
    placement: Placement = Placement()
    device: torch.device | str = "cpu"
    checkpoints: Checkpoints | None = None
    history: list[Record] = field(default_factory=list)
    interval: Interval = field(default_factory=Interval)
    epoch: int = 0
    batch: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        self.train_on = TorchStep(self.settings, self.placement, self.device)
        self._saved: int | None = None

    def run(self, epochs: int, steps: int | None = None, every: int | None = None) -> Iterator[Record]:
        """
        Train, record each epoch's end, and write checkpoints when they are due and at the end.

        Args:
            epochs: their number in all, with those before a checkpoint.
            steps: end after so many in all, with those before a checkpoint.
            every: record also after so many steps.

        Raises:
            FloatingPointError: if the loss is no finite number any more.
            ValueError: if there are fewer examples than before, or malformed ones.
            OSError: if a checkpoint cannot be written.
        """
        if not self.interval:  # Time that passed before is not counted.
            self.interval = Interval()
        while not self.is_over(epochs, steps):
            step = self.step
            for batch, following in _with_next(self._batches()):
                if following is not None:
                    self.train_on.prefetch(following)
                self.interval.add(self.train_on(batch), batch.size)
                self.batch, self.step = self.batch + 1, self.step + 1
                if following is None:
                    self.epoch, self.batch = self.epoch + 1, 0
                over = self.is_over(epochs, steps)
                if over or following is None or (every is not None and self.step % every == 0):
                    yield self._record()
                self._save(over)
                if over:
                    return
            if self.step == step:
                raise ValueError(f"{self.source.fingerprint()}: there is no batch {self.batch} any more")

    def is_over(self, epochs: int, steps: int | None) -> bool:
        """Say whether as many epochs or steps have been made."""
        return self.epoch >= epochs or (steps is not None and self.step >= steps)

    def _batches(self) -> Iterator[Batch]:
        batches: Iterable[Batch] = self.source.batches(self.batch)
        if torch.device(self.device).type != "cpu":
            batches = DeviceLoader(batches, self.device)
        length = self.source.epoch_length()
        return iter(_training.progress(batches, f"epoch {self.epoch + 1}", length, self.batch))

    def _record(self) -> Record:
        loss, speed = self.interval.close()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss up to step {self.step} is {loss}: a smaller learning rate may help")
        # Within an epoch this is its number. After its last batch ``self.epoch`` counts it already.
        epoch, model = self.epoch + (self.batch > 0), self.train_on.model
        model.eval()
        metrics = _figures.evaluate(self.train_on.logits, self.source.held_out(), self.device)
        model.train()
        record = Record(epoch, self.step, loss, metrics, speed)
        self.history.append(record)
        self.interval = Interval()
        return record

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, over: bool) -> None:
        if self.checkpoints is None:
            return
        kind = self.checkpoints.due(self.step) or ("full" if over else None)
        if kind is not None:
            self.checkpoints.write(self._content(), self.train_on, self.step, kind)

    def _content(self) -> dict[str, Any]:
        settings = asdict(self.settings)
        return {
            "settings": {**settings, "bottom": list(self.settings.bottom), "top": list(self.settings.top)},
            "source": self.source.fingerprint(),
            "position": {"epoch": self.epoch, "batch": self.batch, "step": self.step},
            "interval": self.interval.state(),
            "history": [asdict(record) for record in self.history],
        }

    def resume(self, content: dict[str, Any]) -> None:
        """
        Go on from a checkpoint of the same settings and data, bit for bit on the same kind of device.

        Raises:
            ValueError: if it is one of other data, or of another kind of device.
        """
        assert self.checkpoints is not None
        if content["source"] != self.source.fingerprint():
            raise ValueError(
                f"{self.checkpoints.path} was trained on other data, {content['source']}, got "
                f"{self.source.fingerprint()}"
            )
        self.checkpoints.load(content, self.train_on)
        for name, value in content["position"].items():
            setattr(self, name, value)
        self.interval = Interval.of_state(content["interval"], self.device)
        self.history = [as_record(each) for each in content["history"]]


def saved_settings(content: dict[str, Any]) -> Settings:
    """Return the settings with which a checkpoint was trained."""
    settings = content["settings"]
    return Settings(**{**settings, "bottom": tuple(settings["bottom"]), "top": tuple(settings["top"])})


def _with_next(batches: Iterator[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
    """Yield each batch with the one after it, None after the last."""
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch, following
        batch = following
