"""Facts that hold for the trainers of all examples whose epochs have 8 batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def check_records_within_epochs(trainer_of: Callable[[], Any]) -> None:
    """Check that records come at the steps asked for, and that training ends after so many steps."""
    trainer = trainer_of()
    found = [(record.epoch, record.step) for record in trainer.run(epochs=5, steps=19, every=3)]
    # Epochs have 8 batches; every third step, every epoch's end, and the last step.
    assert found == [(1, 3), (1, 6), (1, 8), (2, 9), (2, 12), (2, 15), (2, 16), (3, 18), (3, 19)]
    assert (trainer.epoch, trainer.batch, trainer.step) == (2, 3, 19)
    assert [record.step for record in trainer.run(epochs=3)] == [24]
    trainer = trainer_of()
    assert [record.step for record in trainer.run(epochs=5, steps=8)] == [8] and trainer.epoch == 1
