"""Checkpoints: files of all that decides how a run goes on, each there whole or not at all."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..files import whole_file
from ._step import Step


@dataclass
class Checkpoint:
    """
    A run's checkpoint, written after every record. Only a complete file replaces the one before it.

    Args:
        path: the file's path.
        form: a text that only checkpoints of this example have.
    """

    path: Path
    form: str

    def due(self, step: int, recorded: bool, over: bool) -> bool:
        """Say whether to write after a step, after a record of it or not, the last one or not."""
        return recorded

    def is_delta(self, step: int) -> bool:
        """Say whether what is written after a step may have only what has changed of tables that grow."""
        return False

    def exists(self) -> bool:
        """Say whether there is a checkpoint. Raise ``ValueError`` if there is one that ranks have written."""
        ranks = self.path.with_suffix("")
        if ranks.is_dir() and not self.path.exists():
            raise ValueError(f"{ranks} is a checkpoint of ranks: go on under torchrun, or choose another folder")
        return self.path.exists()

    def write(self, content: dict[str, Any], train_on: Step) -> None:
        """Write the content with the network's and the optimizers' state. Raise ``OSError`` if it cannot be written."""
        content = {"format": self.form, "device": train_on.device.type, **content, "network": train_on.state()}
        with whole_file(self.path) as file:
            try:
                torch.save(content, file)
            except RuntimeError as error:
                # torch cannot close its archive after a failed write, and raises an error that does not tell why.
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise

    def read(self) -> dict[str, Any]:
        """
        Return the file's content, on the CPU.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is no checkpoint of this form.
        """
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no checkpoint {self.path}") from None
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            # torch's message is a paragraph on unpickling, so it is replaced.
            reason = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
            raise ValueError(f"{self.path} is not a checkpoint of this program, or is truncated{reason}") from None
        if not isinstance(content, dict) or content.get("format") != self.form:
            raise ValueError(f"{self.path} is not a checkpoint of this program")
        return content

    def load(self, content: dict[str, Any], train_on: Step) -> None:
        """Load what :meth:`read` returned into a network and its optimizers. Raise ``ValueError`` on another device."""
        if content["device"] != train_on.device.type:
            raise ValueError(f"the checkpoint was trained on {content['device']}, got device {train_on.device.type}")
        train_on.load(content["network"])
