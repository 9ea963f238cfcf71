"""A picture of a run: metrics and loss over the epochs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .._training import picture
from .train import Record


def plot_curves(history: Sequence[Record], title: str, path: Path) -> None:
    """
    Draw metrics and loss over the epochs into a PNG.

    Args:
        history: the epochs, at least one.
        title: text above the picture.
        path: the picture's path; only a complete file replaces one that is there.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    with picture(title, path) as (quality, loss):
        epochs = [record.epoch for record in history]
        for field, label in (
            ("hr", "HR@10"),
            ("ndcg", "NDCG@10"),
            ("full_hr", "full-HR@10"),
            ("full_ndcg", "full-NDCG@10"),
        ):
            quality.plot(epochs, [getattr(record.metrics, field) for record in history], label=label, marker=".")
        quality.set(xlabel="epoch", ylim=(0.0, None), title="held-out items")
        quality.legend()
        loss.plot(epochs, [record.loss for record in history], marker=".", color="black")
        loss.set(xlabel="epoch", ylabel="binary cross-entropy", title="training loss")
