"""Checkpoints of a table of rows by key: in folders, and its state_dict."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import as_stored
from ..checkpoint.growing import checked, checks_of, restore, save
from ..checkpoint.loaded import counts_of, problem_of_state
from ..tables.growing import marked, plain_rows
from ..tables.part import are_left_out
from ..tables.table import split_part
from ..variable.arguments import LOAD_INSTEAD, SAVE_INSTEAD, check_whole
from ..variable.records import RowPart
from ._keyed_table import KeyedTable

__all__ = ["KeyedCheckpoints"]


class KeyedCheckpoints(KeyedTable):
    """A :class:`KeyedTable` that can be saved and restored. Where it is split over ranks, that takes all of them."""

    # ---- Checkpoints in folders --------------------------------------------------------------------------------------

    @torch.no_grad()
    def save(
        self, path: str | os.PathLike[str], *, keep: int | None = None, on_phase: Callable[[str], None] | None = None
    ) -> int:
        """
        Write a full checkpoint: all rows of all tiers, optimizer states, filters.

        One rename at the end makes it the next numbered version under ``path``: whenever the process is killed, and
        whatever fails, earlier versions stay whole. Evict options are applied first.

        Args:
            path: a folder that is only for this variable.
            keep: the number of restorable versions that stay, the last ones. Default: all.
            on_phase: a function that is called with the name of each phase.

        Returns:
            The version's number.

        Raises:
            ImportError: safetensors is missing (the extra ``checkpoint``).
            OSError: the disk is full or fails; the error names the file.

        Source: DeepRec's full checkpoints. The files are safetensors.

        Example:
            >>> import tempfile
            >>> from torchsparse_rec.nn import EmbeddingVariable
            >>> folder = tempfile.mkdtemp()
            >>> table = EmbeddingVariable(2)
            >>> table.insert([7, 8], [[1.0, 2.0], [3.0, 4.0]])
            >>> table.save(folder)
            1
            >>> table.insert([8, 9], [[5.0, 6.0], [7.0, 8.0]])
            >>> table.save_delta(folder)
            2
            >>> other = EmbeddingVariable(2)
            >>> other.restore(folder)
            >>> other.export().values
            tensor([[1., 2.],
                    [5., 6.],
                    [7., 8.]])
        """
        check_whole(self.stored_weight(), "EmbeddingVariable.save", SAVE_INSTEAD)
        with self.settled():
            return save(self._rows, "full", path, keep, on_phase)

    @torch.no_grad()
    def save_delta(
        self, path: str | os.PathLike[str], *, keep: int | None = None, on_phase: Callable[[str], None] | None = None
    ) -> int:
        """
        Write the changes since the last :meth:`save` or delta: rows looked up in training, keys erased or evicted.

        If the optimizer also moves rows without a gradient (Adam, momentum, decay, unless ``lazy=True``), all rows have
        changed. If more keys have gone, or were written by :meth:`insert`, than the table has rows, and more than 2^20,
        a full version may be written.

        Args:
            path: the folder of the last :meth:`save`, :meth:`save_delta` or :meth:`restore`.
            keep: the argument of :meth:`save`.
            on_phase: the argument of :meth:`save`.

        Returns:
            The version's number.

        Raises:
            ValueError: the last checkpoint is in another folder, there is none, or a state_dict has been loaded since.
            OSError: the disk is full or fails; the error names the file.

        Source: DeepRec's incremental checkpoints.

        Example:
            See :meth:`save`.
        """
        check_whole(self.stored_weight(), "EmbeddingVariable.save_delta", SAVE_INSTEAD)
        saved = self._rows.saved
        if saved is None or saved[1] != os.path.abspath(path):
            last = "there is none" if saved is None else f"the last one is in {saved[1]}"
            raise ValueError(f"EmbeddingVariable.save_delta: path must be the last checkpoint's, but {last}: save()")
        with self.settled():
            return save(self._rows, "delta", path, keep, on_phase)

    @torch.no_grad()
    def restore(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        version: int | None = None,
        shard: int = 0,
        num_shards: int = 1,
    ) -> None:
        """
        Restore the variable from a checkpoint, which may come from other tiers, another capacity or device.

        The states of the optimizer that holds ``weight`` are restored too. So make the optimizer before; if it has
        other parameters too, also load its state_dict before.

        Args:
            path: a folder of :meth:`save`; or several, of the shards of one table.
            version: the checkpoint's number. Default: the newest.
            shard: the number of this shard: only keys with ``key mod num_shards == shard`` are restored. Default 0.
            num_shards: the number of shards. Default 1: all keys are restored.

        Raises:
            FileNotFoundError: there is no checkpoint.
            OSError: a file cannot be read. If it disappears while rows are written, the rows read until then stay.
            ValueError: the checkpoint is of a table of another embedding_dim or key_dtype. Or it is damaged, or not a
                variable's checkpoint; then the error names the file. The variable is unchanged then: everything is read
                and checked first.

        Example:
            See :meth:`save`.
        """
        check_whole(self.stored_weight(), "EmbeddingVariable.restore", LOAD_INSTEAD)
        if not 0 <= shard < num_shards:
            raise ValueError(f"EmbeddingVariable.restore: shard must be in [0, {num_shards}), got {shard}")
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        if not paths:
            raise ValueError("EmbeddingVariable.restore: path must be a folder or several, got none")
        chains = checked(self._rows, paths, version)
        with self.replacing():
            restore(self._rows, chains, shard, num_shards)

    # ---- state_dict --------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """
        Return the state as :meth:`torch.nn.Module.state_dict` does, with copies of the rows in other tiers.

        All of it is of one moment, even if another thread trains. The rows of the first tier are the table's own, and
        training changes them later: copy them, or use :meth:`save`.

        Raises:
            RuntimeError: the table is split over ranks: tensors of one rank under one name would lose the others' keys.
        """
        with self.settled():
            return super().state_dict(*args, **kwargs)

    def get_extra_state(self) -> Tensor:
        """Return the state that is not in tensors, for ``state_dict()``, as a tensor: much code takes only these."""
        return torch.tensor([self.global_step, self._rows.evicted, self._rows.seen], device="cpu")

    def set_extra_state(self, state: Tensor | dict[str, int]) -> None:
        """Take over the result of :meth:`get_extra_state`, which was a dict in older versions."""
        counts = counts_of(state)
        if counts is None:
            raise ValueError(f"EmbeddingVariable {self.name!r}: the extra state must have three counts, got {state!r}")
        self.global_step, self._rows.evicted, self._rows.seen = counts

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if are_left_out(split_part(self.stored_weight())):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            for name in ("weight", "_extra_state"):
                del destination[f"{prefix}{name}"]
            return
        check_whole(self.stored_weight(), "state_dict", SAVE_INSTEAD)
        if self.cold is not None:
            for name, values in self.cold.state_dict().items():
                destination[f"{prefix}cold.{name}"] = values
        self._flush()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars and f"{prefix}weight" in destination and not self.keys.counters.is_meta:
            marked(destination[f"{prefix}weight"], (self.keys.places(),))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None:
            check_whole(self.stored_weight(), "load_state_dict", LOAD_INSTEAD)
        filtered = any(name.startswith(f"{prefix}admission.") for name in state_dict)
        if weight is not None and filtered != (self.admission is not None):
            has, wants = ("a filter", "none") if filtered else ("no filter", "one")
            raise RuntimeError(
                f"EmbeddingVariable.load_state_dict: the state_dict of {self.name!r} has {has}, the variable "
                f"{wants}: the rows of their keys differ; use save() and restore()"
            )
        if f"{prefix}weight" in state_dict:  # rows, keys and what belongs to them load together or not at all
            sketch, reserved = getattr(self.admission, "sketch", None), self.keys.reserved
            with as_stored():
                problem = problem_of_state(
                    state_dict, prefix, checks_of(self._rows), self.embedding_dim, sketch, reserved
                )
            if problem is None and self.cold is None and len(state_dict.get(f"{prefix}cold.keys", ())):
                problem = "some rows are of other tiers, which this variable does not have: use save() and restore()"
            if problem is not None:
                raise RuntimeError(f"EmbeddingVariable.load_state_dict: of {self.name!r}: {problem}")
        self._flush()
        stored = self.stored_weight()
        if weight is not None:
            state_dict[f"{prefix}weight"] = weight = plain_rows(weight)
        cold = {
            name.removeprefix(f"{prefix}cold."): state_dict.pop(name)
            for name in list(state_dict)
            if name.startswith(f"{prefix}cold.")
        }
        if weight is not None and weight.shape[0] != stored.shape[0] and weight.shape[1:] == stored.shape[1:]:
            self._store.resize(weight.shape[0])
        with as_stored():
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._store.tend(self)  # the Parameter may be another
        self._training.forget()
        if weight is None:
            return
        self._rows.note_saved(None)  # these rows have nothing to do with the last checkpoint
        if self.cold is not None:
            self.cold.clear()
            if cold:
                self.cold.put(RowPart.of_tensors(cold, stored.device))
