"""Checkpoints of a run: one file for the dense part, which names the version of every table that belongs to it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from .._checkpoints import Checkpoint
from .._step import Step
from .tables import variables


class Checkpoints(Checkpoint):
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

    def __init__(self, folder: Path, save_every: int | None = None, delta_every: int | None = None) -> None:
        super().__init__(folder / "checkpoint.pt", "dlrm 2")
        self._tables, self._save_every, self._delta_every = folder / "tables", save_every, delta_every
        self._chain: str | None = None  # the folder of the tables' versions since the last full one

    def due(self, step: int, recorded: bool, over: bool) -> bool:
        """Say whether to write after a step, the last one or not."""
        return over or _divides(self._save_every, step) or _divides(self._delta_every, step)

    def is_delta(self, step: int) -> bool:
        """Say whether tables need only what has changed after a step, if there is a full version."""
        return _divides(self._delta_every, step) and not _divides(self._save_every, step)

    def write(self, content: dict[str, Any], train_on: Step) -> None:
        """Write the content, the network and its optimizers."""
        content = {**content, "tables": self._save_tables(train_on, content["position"]["step"])}
        super().write(content, train_on)
        self._remove_other_chains()

    def _save_tables(self, train_on: Step, step: int) -> dict[str, Any]:
        tables = variables(train_on.model.bags)
        if not tables:
            return {}
        if self._chain is None or not self.is_delta(step):
            chain = f"{step:09d}"
            shutil.rmtree(self._tables / chain, ignore_errors=True)  # from a run killed before it wrote checkpoint.pt
            versions = {name: table.save(self._tables / chain / name) for name, table in tables.items()}
            self._chain = chain
        else:
            versions = {name: table.save_delta(self._tables / self._chain / name) for name, table in tables.items()}
        return {"chain": self._chain, "versions": versions}

    def _remove_other_chains(self) -> None:
        if self._chain is not None:
            for folder in self._tables.iterdir():
                if folder.name != self._chain and folder.name.isdecimal():
                    shutil.rmtree(folder, ignore_errors=True)

    def load(self, content: dict[str, Any], train_on: Step) -> None:
        """Load a checkpoint's content into a network and its optimizers."""
        super().load(content, train_on)
        tables = content["tables"]
        self._chain = tables.get("chain")
        for name, table in variables(train_on.model.bags).items():
            table.restore(self._tables / tables["chain"] / name, version=tables["versions"][name])


def _divides(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
