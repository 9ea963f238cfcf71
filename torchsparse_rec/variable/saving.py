"""Saving a variable: its state_dict, and checkpoints in folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._contents import seen_of
from .base import VariablePart
from .checkpoint import CheckpointStore
from .cold import STATE_DICT_BYTES
from .filters import CounterAdmission, SketchAdmission
from .keys import packed, unpacked
from .optimizer_rows import OptimizerRows
from .parts import Part, select

__all__ = ["Saving"]

# Rows in one shard of a checkpoint; so many are copied at once while a table is saved.
_ROWS = 1 << 19
# The most keys noted for a delta, unless the table has more rows.
_MOST_NOTED = 1 << 20


class Saving(VariablePart):
    """The base class of EmbeddingVariable that saves checkpoints, and has and loads a state_dict."""

    # The step, folder and version of the last checkpoint, which a delta is on top of.
    _saved: tuple[int, str, int] | None
    _erased: list[Tensor]
    _written: list[Tensor]
    # Whether more keys have changed since then than the table has rows.
    _all_changed: bool

    def _init_saving(self) -> None:
        self._note_saved(None)

    def _note_saved(self, saved: tuple[int, str, int] | None) -> None:
        self._saved = saved
        self._erased, self._written, self._all_changed = [], [], False

    def _note_erased(self, keys: Tensor) -> None:
        """Note keys that have lost their row, for the next delta."""
        self._note(self._erased, keys)

    def _note_written(self, keys: Tensor) -> None:
        """Note keys that have changed although their version does not say so, for the next delta."""
        self._note(self._written, keys)

    def _note(self, noted: list[Tensor], keys: Tensor) -> None:
        if self._saved is None or self._all_changed:
            return
        noted.append(keys.to("cpu", torch.int64, copy=True))
        if len(noted) > 256:
            noted[:] = [torch.cat(noted).unique()]
            rows = self.keys.capacity + (0 if self.cold is None else len(self.cold))
            if len(noted[0]) > max(rows, _MOST_NOTED):
                self._erased, self._written, self._all_changed = [], [], True

    # ---- Rows --------------------------------------------------------------------------------------------------------

    def _parts(self, since: int | None = None) -> Iterator[Part]:
        """
        Yield all rows in parts, in the order of rows, those of the first tier first.

        Args:
            since: only rows whose version is not below this step, and those of :meth:`_note_written`. Default: all.
        """
        self._let_in()
        numbers = self.keys.entries[: self.keys.used, 1]
        mask = numbers != -1
        if since is not None:
            mask = mask & (unpacked(numbers)[1] >= since)
            if self._written:
                rows = self.keys.find(torch.cat(self._written).to(numbers.device))
                mask[rows[rows >= 0]] = True
        rows = mask.nonzero().flatten()
        optimizer = OptimizerRows(self._stored_weight())
        for some in rows.split(_ROWS) if len(rows) else [rows]:
            values, states = optimizer.current(some)
            entries = self.keys.entries.index_select(0, some)
            yield Part(entries[:, 0].contiguous(), values, *unpacked(entries[:, 1]), states)
        if self.cold is not None:
            for part in self.cold.parts():
                if since is not None:
                    changed = part.versions >= since
                    if self._written:
                        changed |= torch.isin(part.keys, torch.cat(self._written).to(part.keys.device))
                    part = select(part, changed)
                yield part

    def _put(self, part: Part) -> None:
        """Write rows, new or not; those that do not fit in the first tier go to the next."""
        weight = self._stored_weight()
        if self.cold is not None:
            part = self.cold.put_what_does_not_fit(part)
        elif self.ev_option.capacity is not None:
            part = self._hottest(part, self.ev_option.capacity)
        keys, optimizer = self.keys, OptimizerRows(weight)
        rows, _ = keys.insert(part.keys, version=self.global_step, make_room=self._find_room)
        keys.entries[rows, 1] = packed(part.frequencies, part.versions)
        weight.data.index_copy_(0, rows, part.values.to(weight.dtype))
        optimizer.put(rows, part.states)

    def _hottest(self, part: Part, capacity: int) -> Part:
        """Return the rows that a capacity lets stay, and evict here: the coldest go, of both together."""
        keys, eviction = self.keys, self._eviction
        new = keys.find(part.keys) < 0
        over = len(keys) + int(new.sum()) - capacity
        if over <= 0:
            return part
        here = keys.entries[keys.rows()]
        numbers = packed(part.frequencies, part.versions)
        coming = torch.stack([part.keys, numbers], 1)[new]
        stay = eviction.staying(torch.cat([here, coming]), over)
        self._erase(here[~stay[: len(here)], 0])
        stays = torch.ones_like(new)
        stays[new] = stay[len(here) :]
        return select(part, stays)

    # ---- Checkpoints in folders --------------------------------------------------------------------------------------

    def save(
        self, path: str | os.PathLike[str], *, keep: int | None = None, on_phase: Callable[[str], None] | None = None
    ) -> int:
        """
        Write a full checkpoint: all rows of all tiers, optimizer states, filters.

        One rename at the end makes it the next numbered version under ``path``: whenever the process is killed, and
        whatever fails, earlier versions stay whole. Evict options are applied first.

        Args:
            path: a folder for this variable alone.
            keep: how many of the last restorable versions stay. Default: all.
            on_phase: is called with the name of each phase.

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
        return self._save("full", path, keep, on_phase)

    def save_delta(
        self, path: str | os.PathLike[str], *, keep: int | None = None, on_phase: Callable[[str], None] | None = None
    ) -> int:
        """
        Write what has changed since the last :meth:`save` or delta: rows looked up in training, keys erased or evicted.

        If the optimizer also moves rows without a gradient (Adam, momentum, decay, unless ``lazy=True``), all rows have
        changed. If more keys have gone, or were written by :meth:`insert`, than the table has rows, and more than 2^20,
        a full version may be written.

        Args:
            path: the folder of the last :meth:`save`, :meth:`save_delta` or :meth:`restore`.
            keep: as of :meth:`save`.
            on_phase: as of :meth:`save`.

        Returns:
            The version's number.

        Raises:
            ValueError: the last checkpoint is in another folder, there is none, or a state_dict has been loaded since.
            OSError: the disk is full or fails; the error names the file.

        Source: DeepRec's incremental checkpoints.

        Example:
            See :meth:`save`.
        """
        if self._saved is None or self._saved[1] != os.path.abspath(path):
            last = "there is none" if self._saved is None else f"the last one is in {self._saved[1]}"
            raise ValueError(
                f"EmbeddingVariable.save_delta: path must be that of the last checkpoint, but {last}: save()"
            )
        return self._save("delta", path, keep, on_phase)

    @torch.no_grad()
    def _save(
        self, kind: str, path: str | os.PathLike[str], keep: int | None, on_phase: Callable[[str], None] | None
    ) -> int:
        store = CheckpointStore(path, keep=keep)
        with self._guard.writing():
            self._eviction.run()
            if self._all_changed:
                kind = "full"
            optimizer = OptimizerRows(self._stored_weight())
            since = None
            if kind == "delta":
                assert self._saved is not None
                since = None if optimizer.moves_all_rows() else self._saved[0]
            optimizer.flush()
            base = self._saved[2] if kind == "delta" and self._saved is not None else None
            with store.writer(kind, self._metadata(optimizer), base=base, on_phase=on_phase) as writer:
                if kind == "delta" and self._erased:
                    writer.write("erased", {"keys": torch.cat(self._erased).unique()})
                for part in self._parts(since=since):
                    if len(part.keys) or kind == "full":
                        writer.write("rows", part.tensors())
                self._write_filter(writer, since)
            # Only now: a checkpoint that failed has saved nothing.
            self._note_saved((self.global_step, os.path.abspath(path), writer.number))
        return writer.number

    def _metadata(self, optimizer: OptimizerRows) -> dict[str, Any]:
        return {
            "name": self.name,
            "embedding_dim": self.embedding_dim,
            "dtype": str(self._stored_weight().dtype).removeprefix("torch."),
            "key_dtype": str(self.key_dtype).removeprefix("torch."),
            "global_step": self.global_step,
            "evicted": self._evicted,
            "seen": self._eviction.seen,
            "optimizer": type(optimizer.optimizer).__name__ if optimizer.optimizer is not None else None,
            "optimizer_steps": optimizer.steps(),
            "states": [column.name for column in optimizer.columns()],
        }

    def _write_filter(self, writer: Any, since: int | None) -> None:
        admission = self.admission
        if isinstance(admission, SketchAdmission):
            writer.write("sketch", {"sketch": admission.sketch})
        elif isinstance(admission, CounterAdmission):
            candidates = admission.candidates
            entries = candidates.entries[candidates.rows()]
            frequencies, versions = unpacked(entries[:, 1])
            if since is not None:
                entries, frequencies, versions = (x[versions >= since] for x in (entries, frequencies, versions))
            keys = entries[:, 0].contiguous()
            writer.write("candidates", {"keys": keys, "frequencies": frequencies, "versions": versions})

    # ---- state_dict --------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """
        Return the state as :meth:`torch.nn.Module.state_dict` does, with copies of the rows in other tiers.

        All of it is of one moment, even if another thread trains. The tensors of the first tier are the table's own,
        and training changes them later: copy them, or use :meth:`save`.
        """
        with self._guard.writing():
            self._let_in()
            return super().state_dict(*args, **kwargs)

    def get_extra_state(self) -> dict[str, int]:
        """Return the state that is not in tensors, for ``state_dict()``."""
        return {"global_step": self.global_step, "evicted": self._evicted, "seen": self._eviction.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Take over the result of :meth:`get_extra_state`."""
        self.global_step, self._evicted = state["global_step"], state["evicted"]
        self._eviction.seen = seen_of(state)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.cold is not None:
            if self.cold.nbytes() > STATE_DICT_BYTES:
                raise RuntimeError(
                    f"EmbeddingVariable.state_dict: {self.cold.nbytes():,} bytes of rows are outside of the first "
                    f"tier, more than the {STATE_DICT_BYTES:,} that a state_dict takes: use save()"
                )
            for name, values in self.cold.tensors().items():
                destination[f"{prefix}cold.{name}"] = values
        self._flush()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        width = self.embedding_dim
        if weight is not None and tuple(weight.shape[1:]) != (width,):
            raise RuntimeError(  # raised here, so that rows and keys load together or not at all
                f"EmbeddingVariable.load_state_dict: weight of {self.name!r} must be [rows, {width}], got "
                f"{list(weight.shape)}"
            )
        filtered = any(name.startswith(f"{prefix}admission.") for name in state_dict)
        if weight is not None and filtered != (self.admission is not None):
            has, wants = ("a filter", "none") if filtered else ("no filter", "one")
            raise RuntimeError(
                f"EmbeddingVariable.load_state_dict: the state_dict of {self.name!r} has {has}, the variable "
                f"{wants}: the rows of their keys differ; use save() and restore()"
            )
        self._flush()
        stored = self._stored_weight()
        cold = {
            name.removeprefix(f"{prefix}cold."): state_dict.pop(name)
            for name in list(state_dict)
            if name.startswith(f"{prefix}cold.")
        }
        if weight is not None and weight.shape[0] != stored.shape[0] and weight.shape[1:] == stored.shape[1:]:
            self._take_capacity(weight.shape[0])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._inserted_before = -1
        self._newcomers = []
        if weight is not None:
            self._note_saved(None)  # these rows have nothing to do with the last checkpoint
        if self.cold is not None:
            self.cold.clear()
            if cold:
                self.cold.put(Part.of_tensors(cold, stored.device))
        elif cold and len(cold["keys"]):
            raise RuntimeError(
                f"EmbeddingVariable.load_state_dict: {len(cold['keys'])} rows are of other tiers, which this variable "
                "does not have: use save() and restore()"
            )
