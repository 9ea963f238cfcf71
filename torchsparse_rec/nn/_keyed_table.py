"""A table of rows by key: what it is made of, and its contents."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..checkpoint.growing import restore
from ..checkpoint.parts import SavedRows, SavedTable
from ..tables.table import split_part
from ..typing import GradMode
from ..variable.arguments import (
    check_arguments,
    given_exports,
    given_keys,
    given_numbers,
    given_values,
    is_in_job,
)
from ..variable.filters import CounterAdmission, admission_of
from ..variable.initial import InitialRows
from ..variable.keys import KeyRows
from ..variable.optimizer_rows import new_zeros
from ..variable.options import EmbeddingVariableOption
from ..variable.read_write_lock import ReadWriteLock
from ..variable.records import Export
from ..variable.rows import TableRows
from ..variable.share import keep
from ..variable.store import RowStore
from ..variable.training_rows import TrainingRows
from ._described import with_size
from ._keyed_state import KeyedState

__all__ = ["KeyedTable"]


class KeyedTable(KeyedState):
    """The base class of :class:`EmbeddingVariable`, which has the same arguments, and adds lookups and checkpoints."""

    def __init__(
        self,
        embedding_dim: int,
        *,
        name: str | None = None,
        key_dtype: torch.dtype = torch.int64,
        initializer: Any = None,
        ev_option: EmbeddingVariableOption | None = None,
        target_gpu: int = -1,
        capacity: int = 1024,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        grad_mode: GradMode | None = None,
    ) -> None:
        super().__init__()
        self.name = name or "embedding_variable"
        option, where = ev_option or EmbeddingVariableOption(), device or torch.empty(0).device
        check_arguments(embedding_dim, key_dtype, option, target_gpu, capacity, dtype, self.name, seed, where)
        if target_gpu >= 0 and not is_in_job():  # in a job it names a rank: distributed.shard() reads it
            device = f"cuda:{target_gpu}"
        if device is None and option.storage_option.storage_type.tiers()[0] == "HBM":
            device = "cuda"
        self.embedding_dim, self.key_dtype, self.target_gpu = embedding_dim, key_dtype, target_gpu
        self.ev_option = option
        self.admission = admission_of(self.name, option.filter_option, device)
        if option.capacity is not None:
            capacity = min(capacity, option.capacity + int(self.admission is not None))
        # Where there is a filter, keys that are not admitted share row 0.
        self.keys = KeyRows(self.name, capacity, reserved=int(self.admission is not None), device=device)
        seed = zlib.crc32(self.name.encode()) if seed is None else seed
        self.initial = InitialRows(initializer, option.init_option, embedding_dim, seed, dtype, device)
        self.register_parameter("weight", Parameter(new_zeros((capacity, embedding_dim), dtype, device)))
        self._model = None
        self._lock = ReadWriteLock()
        self._store = store = RowStore(self.name, key_dtype, self.keys, self._parameters, self.stored_weight)
        self._rows = TableRows(store, option, self.admission)
        if self.cold is not None and self.cold.most_rows() < capacity:
            store.resize(self.cold.most_rows())
            self.keys.clear(self.cold.most_rows(), store.weight.device)
        self._training = TrainingRows(self._rows, self.initial, float(option.init_option.default_value_no_permission))
        self._init_grad_mode(grad_mode)
        store.tend(self)
        if option.ckpt is not None and option.ckpt.ckpt_to_load_from is not None:
            restore(self, option.ckpt.ckpt_to_load_from, None, 0, 1)

    @property
    def table_rows(self) -> TableRows:
        """The rows of all tiers, with their keys: for checkpoints, optimizers' states and tables over ranks."""
        return self._rows

    def saved_tables(self) -> list[SavedTable | SavedRows]:
        """Return the table, for checkpoints."""
        return [SavedRows("weight", self)]

    # ---- Contents ----------------------------------------------------------------------------------------------------

    def total_count(self) -> int:
        """
        Count the keys that have a row, in all tiers.

        Returns:
            The number. On CUDA it waits for the device.
        """
        with self._lock.reading():
            return len(self._rows)

    @torch.no_grad()
    def export(self) -> Export:
        """
        Return all keys of all tiers, with their rows, versions and frequencies.

        Returns:
            A named tuple: ``keys``, ``[K]`` of the key_dtype; ``values``, ``[K, D]``; ``versions``, the step of each
            key's last lookup in training, -1 for none; ``frequencies``, how often each was looked up in training.

        Source: DeepRec's ``EmbeddingVariable.export``.
        """
        with self.settled():
            keys, values, frequencies, versions, _ = zip(*self._rows.parts(), strict=True)
        with torch.autocast(values[0].device.type, enabled=False):  # which has no torch.cat of some dtypes
            return Export(
                torch.cat(keys).to(self.key_dtype), torch.cat(values), torch.cat(versions), torch.cat(frequencies)
            )

    @torch.no_grad()
    def insert(self, keys: Any, values: Any, frequencies: Any = None, versions: Any = None) -> None:
        """
        Write rows: from pretrained vectors, or from another system's export.

        Rows of keys that are there are overwritten, and their optimizer state is reset. Filters do not apply. Where the
        table is split over ranks, a rank writes the rows that it has, so that all may be given the same.

        Args:
            keys: ``[K]`` integers, a tensor or array; of repeated ones the last counts.
            values: ``[K, D]``.
            frequencies: ``[K]``. Default: the filter's threshold, or 0.
            versions: ``[K]``. Default: the step before the current one.

        Raises:
            ValueError: wrong shapes or dtypes.

        Example:
            >>> from torchsparse_rec.nn import EmbeddingVariable
            >>> table = EmbeddingVariable(2)
            >>> table.insert([7, 8], [[1.0, 2.0], [3.0, 4.0]])
            >>> table.lookup(torch.tensor([8]))
            tensor([[3., 4.]])
        """
        store, rows = self._store, self._rows
        weight = store.weight
        keys = given_keys("insert", keys, self.key_dtype, weight.device)
        values = given_values(values, keys, weight)
        frequencies = given_numbers("frequencies", frequencies, keys, 0)
        versions = given_numbers("versions", versions, keys, -1)
        here = self._here(keys)
        if here is not None:
            keys, values = keys[here], values[here]
            frequencies, versions = (None if x is None else x[here] for x in (frequencies, versions))
        with self.settled():
            store.tend(self)
            if frequencies is None:
                frequencies = 0 if self.admission is None else self.admission.filter_freq
            inserted = rows.insert(keys, values, frequencies, max(store.step - 1, -1) if versions is None else versions)
            if self.admission is not None:
                self.admission.admitted(keys, inserted)
            rows.note_written(keys)
            rows.keep_capacity()

    @torch.no_grad()
    def keep_keys(self, has: Callable[[Tensor], Tensor], share: int | None) -> None:
        """Drop all keys but some, as this rank's part of the table."""
        with self.settled():
            keep(self._rows, has, share)
            self._training.forget()

    def _here(self, keys: Tensor) -> Tensor | None:
        """Say which keys this rank has, ``[N]`` bool; None where the table is not split over ranks."""
        part = split_part(self.stored_weight())
        return None if part is None or part.has is None else part.has(keys)

    def insert_export(self, tensors: Mapping[str, Any]) -> int:
        """
        Insert the rows of another system's export, as DeepRec and TensorFlow Recommenders Addons write it.

        Args:
            tensors: arrays or tensors by name: for every ``<prefix>-keys`` the ``<prefix>-values``, and perhaps
                ``<prefix>-freqs`` and ``<prefix>-versions``. These are DeepRec's names, of one variable or all its
                partitions. The result of ``numpy.load`` for an ``.npz`` file will do.

        Returns:
            How many rows were inserted, on this rank if the table is split over ranks.

        Raises:
            ValueError: no keys, or keys without values.

        Source: DeepRec's ``EmbeddingVariable`` in checkpoints.

        Example:
            >>> import numpy
            >>> from torchsparse_rec.nn import EmbeddingVariable
            >>> table = EmbeddingVariable(2)
            >>> keys, values = numpy.array([7, 8]), numpy.array([[1.0, 2.0], [3.0, 4.0]])
            >>> table.insert_export({"var/part_0-keys": keys, "var/part_0-values": values})
            2
        """
        inserted = 0
        for keys, *rest in given_exports(tensors):
            self.insert(keys, *rest)
            here = self._here(keys.to(self.stored_weight().device))
            inserted += len(keys) if here is None else int(here.sum())
        return inserted

    @torch.no_grad()
    def erase(self, keys: Any) -> int:
        """
        Erase keys: their rows, their optimizer states, and their counts in a :class:`CounterFilter`.

        Args:
            keys: ``[K]`` integers; missing ones are no error.

        Returns:
            How many of the keys had a row.

        Example:
            >>> from torchsparse_rec.nn import EmbeddingVariable
            >>> table = EmbeddingVariable(2)
            >>> table.insert([7, 8], [[1.0, 2.0], [3.0, 4.0]])
            >>> table.erase([8, 9]), table.total_count()
            (1, 1)
        """
        keys = given_keys("erase", keys, self.key_dtype, self._store.weight.device)
        with self.settled():
            erased = self._rows.erase(keys)
            if isinstance(self.admission, CounterAdmission):
                self.admission.candidates.erase(keys)
                self._rows.note_erased(keys)  # also those without a row
        return erased

    @torch.no_grad()
    def evict(self) -> int:
        """
        Evict the keys that the evict options name; rows looked up in the current step stay.

        Returns:
            How many keys were evicted.

        Example:
            >>> from torchsparse_rec.nn import EmbeddingVariable
            >>> from torchsparse_rec.variable import EmbeddingVariableOption, GlobalStepEvict
            >>> option = EmbeddingVariableOption(evict_option=GlobalStepEvict(steps_to_live=1))
            >>> table = EmbeddingVariable(2, ev_option=option)
            >>> for key in (1, 2, 2, 2):
            ...     _ = table(torch.tensor([key]))
            >>> table.evict(), table.export().keys
            (1, tensor([2]))
        """
        with self.settled():
            return self._rows.evict()

    def stats(self) -> dict[str, Any]:
        """
        Return statistics by name.

        Returns:
            ``keys`` with a row; keys ever ``admitted``; ids ``filtered``, looked up in training before admission;
            ``waiting``: keys that a :class:`CounterFilter` counts; ``evicted`` keys; ``failed`` ids, without room;
            ``capacity`` in rows; ``global_step``; ``bytes_filter``. For each tier (``hbm``, ``dram``, ``ssd``) also
            ``rows_*``, ``bytes_*`` (rows, keys and optimizer states) and ``hit_rate_*``, the tier's share of ids looked
            up in training. On CUDA it waits for the device.

        Example:
            >>> from torchsparse_rec.nn import EmbeddingVariable
            >>> EmbeddingVariable(2).stats()["keys"]
            0
        """
        with self._lock.reading():
            return self._training.stats()

    def extra_repr(self) -> str:
        """Return the arguments that ``repr`` shows, and the size. On CUDA, to avoid waiting, without the keys."""
        weight, name = self.stored_weight(), self.name
        keys = "" if weight.is_cuda else f", {len(self._rows):,} keys"
        return with_size(f"{self.embedding_dim}, name={name!r}{keys}, {len(weight):,} rows", self.grad_mode, weight)
