"""Checkpoints of a run: one file for the dense part, which names the version of every table that belongs to it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _training
from .steps import TorchStep
from .tables import variables

FORMAT = "dlrm 1"


@dataclass
class Checkpoints:
    """
    A folder with ``checkpoint.pt``, and versions of each dynamic table in ``tables/<step of the full one>/<name>``.

    Tables are saved first. Writing ``checkpoint.pt``, whole or not at all, makes them the checkpoint, and only then
    older versions are removed: after a kill at any moment there is a checkpoint of one step.

    Args:
        folder: made if it is not there.
        save_every: steps between full checkpoints. Default None: only the last step has one.
        delta_every: steps between checkpoints whose tables hold only the rows that changed; the first one is full.
            Default None: there are none.
    """

    folder: Path
    save_every: int | None = None
    delta_every: int | None = None

    def __post_init__(self) -> None:
        self._chain: str | None = None  # the folder of the tables' versions since the last full one

    @property
    def path(self) -> Path:
        """The file of the dense part."""
        return self.folder / "checkpoint.pt"

    def due(self, step: int) -> str | None:
        """Return ``"full"``, ``"delta"`` or None: the kind of checkpoint to write after a step."""
        if self.save_every is not None and step % self.save_every == 0:
            return "full"
        return "delta" if self.delta_every is not None and step % self.delta_every == 0 else None

    def write(self, content: dict[str, Any], step: TorchStep, number: int, kind: str) -> None:
        """
        Write a checkpoint: ``content``, and the network with its optimizers.

        Args:
            content: the training loop's part of it.
            step: holds the network and its optimizers.
            number: the step's number.
            kind: what :meth:`due` returned.
        """
        model = step.model
        if step.settings.tables == "hashed":
            tables: dict[str, Any] = {"bags": model.bags.state_dict(), "of_tables": step.of_tables.state_dict()}
        else:
            tables = self._save_tables(step, number, kind)
        content = {
            "format": FORMAT,
            **content,
            "device": step.device.type,
            "layers": model.layers.state_dict(),
            "of_layers": step.of_layers.state_dict(),
            "tables": tables,
        }
        _training.write_checkpoint(self.path, content)
        self._remove_other_chains()

    def _save_tables(self, step: TorchStep, number: int, kind: str) -> dict[str, Any]:
        tables = variables(step.model.bags)
        if kind == "full" or self._chain is None:
            chain = f"{number:09d}"
            shutil.rmtree(self._folder(chain), ignore_errors=True)  # from a run killed before it wrote checkpoint.pt
            versions = {name: table.save(self._folder(chain) / name) for name, table in tables.items()}
            self._chain = chain
        else:
            versions = {name: table.save_delta(self._folder(self._chain) / name) for name, table in tables.items()}
        return {"chain": self._chain, "versions": versions}

    def _folder(self, chain: str) -> Path:
        return self.folder / "tables" / chain

    def _remove_other_chains(self) -> None:
        if self._chain is not None:
            for folder in self._folder(self._chain).parent.iterdir():
                if folder.name != self._chain and folder.name.isdecimal():
                    shutil.rmtree(folder, ignore_errors=True)

    def load(self, content: dict[str, Any], step: TorchStep) -> None:
        """Load a checkpoint's content into a network and its optimizers."""
        _training.check_device(content, step.device)
        step.model.layers.load_state_dict(content["layers"])
        step.of_layers.load_state_dict(content["of_layers"])
        tables = content["tables"]
        if step.settings.tables == "hashed":
            step.model.bags.load_state_dict(tables["bags"])
            step.of_tables.load_state_dict(tables["of_tables"])
            return
        self._chain = tables["chain"]
        for name, table in variables(step.model.bags).items():
            table.restore(self._folder(tables["chain"]) / name, version=tables["versions"][name])

    def read(self) -> dict[str, Any] | None:
        """Return the content of the checkpoint; None if there is none."""
        return _training.read_checkpoint(self.path, FORMAT) if self.path.exists() else None
