"""A table of rows by key as others see it: its locks, the calls from optimizers, and its state_dict."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from .._torch import as_stored
from .._torch_modules import is_averaging
from ..checkpoint.loaded import check_state, counts_of
from ..tables.growing import Places, marked, plain_rows
from ..tables.part import are_left_out
from ..tables.table import split_part
from ..variable.arguments import LOAD_INSTEAD, SAVE_INSTEAD, check_whole
from ..variable.cold import ColdRows
from ..variable.keys import KeyRows
from ..variable.own_tensors import leave_inference_mode
from ..variable.read_write_lock import ReadWriteLock, writing
from ..variable.records import RowPart
from ..variable.rows import TableRows
from ..variable.store import RowStore
from ..variable.training_rows import TrainingRows
from .grad_mode import GradModeMixin

__all__ = ["KeyedState"]


class KeyedState(GradModeMixin):
    """The part of a table of rows by key that threads, optimizers and checkpoints share."""

    name: str
    keys: KeyRows
    _lock: ReadWriteLock
    _store: RowStore
    _rows: TableRows
    _training: TrainingRows
    #: The table of which this one is the copy in an AveragedModel; else None.
    _model: weakref.ref[KeyedState] | None

    @property
    def cold(self) -> ColdRows | None:
        """The rows of the tiers below the first; None where there is one tier."""
        return self._rows.cold

    @property
    def global_step(self) -> int:
        """The step of training."""
        return self._store.step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self._store.step = step

    # ---- Locks -------------------------------------------------------------------------------------------------------

    def writing(self) -> AbstractContextManager[None]:
        """Hold the table's lock for writing: no other thread reads or writes rows inside, and none is flushed."""
        return self.all_writing([self])

    @staticmethod
    @contextmanager
    def all_writing(tables: Sequence[KeyedState]) -> Iterator[None]:
        """Hold the locks of some tables for writing, each once."""
        with writing([table._lock for table in tables]), as_stored():
            made_there = [table for table in tables if table._store.keys.counters.is_inference()]
            if made_there and not torch.is_inference_mode_enabled():
                for table in made_there:
                    leave_inference_mode(table)
            yield

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Hold the lock for writing while all rows are replaced: nothing is known of keys that waited for rows."""
        with self.writing():
            self._training.forget()
            yield

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Hold the lock for writing; rows whose keys a filter has admitted have their initial values inside."""
        with self.writing():
            self._training.let_in()
            yield

    # ---- Calls from an optimizer: see StepListener in tables/table.py ------------------------------------------------

    @staticmethod
    def all_step(tables: Sequence[KeyedState]) -> None:
        """Prepare for a step of the optimizer: initialise the rows of keys that a filter has just admitted."""
        for table in [table for table in tables if table._training.newcomers]:
            with table.settled():
                pass

    @staticmethod
    def all_stepped(tables: Sequence[KeyedState]) -> None:
        """Count a step that the optimizer has ended."""
        for table in tables:
            table._store.step += 1

    def places(self, reader: FrameType) -> Places:
        """
        Bring all rows up to date, and return the row of each key: code of others is about to read or write them.

        The copy in an AveragedModel first gives its rows to the keys that the model has now; new keys begin with their
        initial values.
        """
        model = None if self._model is None or not is_averaging(reader) else self._model()
        with nullcontext() if model is None else model.writing(), self.writing():
            self._flush()
            if model is not None and not self.keys.places().are(model.keys.places()):
                self._training.follow(model._training)
            return self.keys.places()

    def history_ends(self) -> None:
        """Flush the rows of other tiers, before the optimizer forgets its history."""
        if self.cold is not None:
            self.cold.flush()

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
        if f"{prefix}weight" in state_dict:  # rows, keys and what belongs to them load together or not at all
            check_state(self._rows, state_dict, prefix)
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
