"""Checkpoints of a run: the dense part in one file, which names the version of every table that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _training
from .steps import TorchStep

FORMAT = "dlrm 1"
# Versions of a table that are kept: that of the checkpoint, and the one which the next checkpoint will name.
KEPT = 2


@dataclass
class Checkpoints:
    """
    A folder with ``checkpoint.pt``, and versions of each dynamic table under ``tables/``.

    Tables are saved first. Writing ``checkpoint.pt``, whole or not at all, makes them the checkpoint: after a kill at
    any moment there is a checkpoint of one step.

    Args:
        folder: is made if it is not there.
        save_every: steps between full checkpoints. Default None: none but the last.
        delta_every: steps between those whose tables have the rows alone that changed. Default None: none.
    """

    folder: Path
    save_every: int | None = None
    delta_every: int | None = None

    @property
    def path(self) -> Path:
        """Of the dense part."""
        return self.folder / "checkpoint.pt"

    def due(self, step: int) -> str | None:
        """``"full"``, ``"delta"`` or None: what is to be written after that step."""
        if self.save_every is not None and step % self.save_every == 0:
            return "full"
        return "delta" if self.delta_every is not None and step % self.delta_every == 0 else None

    def write(self, content: dict[str, Any], step: TorchStep, kind: str) -> None:
        """Write a checkpoint: ``content``, and the network with its optimizers."""
        model = step.model
        content = {
            "format": FORMAT,
            **content,
            "device": step.device.type,
            "layers": model.layers.state_dict(),
            "of_layers": step.of_layers.state_dict(),
        }
        if step.settings.tables == "hashed":
            content["tables"] = {"bags": model.bags.state_dict(), "of_tables": step.of_tables.state_dict()}
        _training.write_checkpoint(self.path, content)

    def load(self, content: dict[str, Any], step: TorchStep) -> None:
        """Bring a network and its optimizers to where a checkpoint was written."""
        _training.check_device(content, step.device)
        step.model.layers.load_state_dict(content["layers"])
        step.of_layers.load_state_dict(content["of_layers"])
        if step.settings.tables == "hashed":
            step.model.bags.load_state_dict(content["tables"]["bags"])
            step.of_tables.load_state_dict(content["tables"]["of_tables"])

    def read(self) -> dict[str, Any] | None:
        """The content of the checkpoint; None if there is none."""
        return _training.read_checkpoint(self.path, FORMAT) if self.path.exists() else None
