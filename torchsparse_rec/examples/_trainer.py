"""The training loop: steps, epochs, records, checkpoints."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from ..data.device import DeviceLoader
from ._checkpoints import Checkpoint
from ._records import Interval, Metrics, Record
from ._sources import Source
from ._step import B, Step

T = TypeVar("T")


@dataclass
class Trainer(Generic[B]):
    """
    A network in training, with everything that decides how it goes on.

    Args:
        settings: the run's settings.
        source: yields the examples.
        train_on: trains the network on a batch.
        metrics: the metrics of a record.
        checkpoint: where checkpoints go. Default None: none are written.
        history: the records so far.
        interval: the steps since the last record.
        epoch, batch, step: finished epochs, batches done in the epoch that has begun, and steps in all.
    """

    settings: Any
    source: Source[B]
    train_on: Step[B]
    metrics: type[Metrics]
    checkpoint: Checkpoint | None = None
    history: list[Record] = field(default_factory=list)
    interval: Interval = field(default_factory=Interval)
    epoch: int = 0
    batch: int = 0
    step: int = 0

    def run(self, epochs: int, steps: int | None = None, every: int | None = None) -> Iterator[Record]:
        """
        Train, record each epoch's end and the last step, and write checkpoints when they are due.

        Args:
            epochs: their number in all, with those before a checkpoint.
            steps: end after so many in all, with those before a checkpoint.
            every: record also after so many steps.

        Raises:
            FloatingPointError: if the loss is no finite number any more.
            ValueError: if there are fewer examples than before, or malformed ones.
            OSError: if a checkpoint cannot be written.
        """
        self._restart_clock()
        while not self.is_over(epochs, steps):
            step = self.step
            for (batch, size), following in _with_next(self._batches()):
                if following is not None:
                    self.train_on.prefetch(following[0])
                self.interval.add(self.train_on(batch), size)
                self.batch, self.step = self.batch + 1, self.step + 1
                if following is None:
                    self.epoch, self.batch = self.epoch + 1, 0
                over = self.is_over(epochs, steps)
                recorded = over or following is None or (every is not None and self.step % every == 0)
                if recorded:
                    yield self._record()
                if self.checkpoint is not None and self.checkpoint.due(self.step, recorded, over):
                    self.checkpoint.write(self._content(), self.train_on)
                self._restart_clock()
                if over:
                    return
            if self.step == step:
                raise ValueError(f"{self.source.fingerprint()}: there is no batch {self.batch} any more")

    def is_over(self, epochs: int, steps: int | None) -> bool:
        """Say whether as many epochs or steps have been made."""
        return self.epoch >= epochs or (steps is not None and self.step >= steps)

    def _restart_clock(self) -> None:
        """Leave the time for a record and its checkpoint out of the next interval."""
        if not self.interval:
            self.interval = Interval()

    def _batches(self) -> Iterator[tuple[B, int]]:
        """Yield this rank's part of each batch, and the whole batch's size."""
        job = self.train_on.job
        batches: Iterable[tuple[B, int]] = ((job.part(each), each.size) for each in self.source.batches(self.batch))
        if self.train_on.device.type != "cpu":
            batches = DeviceLoader(batches, self.train_on.device)
        if not job.is_first:
            return iter(batches)
        return iter(progress(batches, f"epoch {self.epoch + 1}", self.source.epoch_length(), self.batch))

    def _record(self) -> Record:
        loss, speed = self.interval.close()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss up to step {self.step} is {loss}: a smaller learning rate may help")
        # Within an epoch this is its number. After its last batch ``self.epoch`` counts it already.
        epoch = self.epoch + (self.batch > 0)
        record = Record(epoch, self.step, loss, self.metrics.of(self.train_on, self.source), speed)
        self.history.append(record)
        self.interval = Interval()
        return record

    def _content(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "source": self.source.fingerprint(),
            "source_state": self.source.state(),
            "position": {"epoch": self.epoch, "batch": self.batch, "step": self.step},
            "interval": self.interval.state(),
            "history": [asdict(record) for record in self.history],
        }

    def resume(self, content: dict[str, Any], checkpoint: Checkpoint) -> None:
        """
        Go on from a checkpoint and what was read from it, bit for bit on the same kind of device.

        The resumed run equals the run that wrote the checkpoint, if both write later ones at the same steps.

        Raises:
            ValueError: if it is one of other data, or of another kind of device.
        """
        if content["source"] != self.source.fingerprint():
            raise ValueError(
                f"the checkpoint was trained on other data, {content['source']}, got {self.source.fingerprint()}"
            )
        checkpoint.load(content, self.train_on)
        self.source.load(content["source_state"])
        for name, value in content["position"].items():
            setattr(self, name, value)
        self.interval = Interval.of_state(content["interval"], self.train_on.device)
        self.history = [Record(**{**each, "metrics": self.metrics(**each["metrics"])}) for each in content["history"]]


def _with_next(batches: Iterator[T]) -> Iterator[tuple[T, T | None]]:
    """Yield each batch with the one after it, None after the last."""
    batch = next(batches, None)
    while batch is not None:
        following = next(batches, None)
        yield batch, following
        batch = following


def progress(batches: Iterable[T], title: str, total: int | None, done: int = 0) -> Iterable[T]:
    """
    Yield the batches, and show a bar of their progress on a terminal: tqdm's if it is installed.

    Args:
        batches: those to come.
        title: printed beside the bar.
        total: how many there are with those done, where it is known; without, there is a bar only by tqdm.
        done: how many are done.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        return batches
    try:
        from tqdm import tqdm
    except ImportError:
        return batches if total is None else _plain_progress(batches, title, total, done)
    return tqdm(batches, desc=title, total=total, initial=done, leave=False, mininterval=0.2)


def _plain_progress(batches: Iterable[T], title: str, total: int, done: int) -> Iterator[T]:
    every = max(1, total // 100)
    for number, batch in enumerate(batches, done):
        if number % every == 0:
            print(f"\r{title}: {100 * number // total:3d} %", end="", file=sys.stderr, flush=True)
        yield batch
    print(f"\r{' ' * (len(title) + 8)}\r", end="", file=sys.stderr, flush=True)
