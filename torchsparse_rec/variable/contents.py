"""What a variable contains: counts, export, insertion, erasure, eviction and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from .base import VariablePart
from .filters import CounterAdmission
from .keys import packed
from .optimizer_rows import OptimizerRows
from .parts import Part, select

__all__ = ["Contents", "Export"]


class Export(NamedTuple):
    """The result of :meth:`EmbeddingVariable.export`, in the order of rows; its fields are in DeepRec's order."""

    #: ``[K]``, the variable's key_dtype.
    keys: Tensor
    #: ``[K, D]``.
    values: Tensor
    #: The step of each key's last lookup in training, ``[K]`` int64; -1: none.
    versions: Tensor
    #: How often each key has been looked up in training, ``[K]`` int64.
    frequencies: Tensor


class Contents(VariablePart):
    """The base class of EmbeddingVariable with the methods that read or change its contents."""

    def total_count(self) -> int:
        """
        Count the keys that have a row, in all tiers.

        Returns:
            The number. On CUDA it waits for the device.
        """
        with self._guard.reading():
            return self._count()

    def _count(self) -> int:
        return len(self.keys) + (0 if self.cold is None else len(self.cold))

    @torch.no_grad()
    def export(self) -> Export:
        """
        Return all keys of all tiers, with their rows, versions and frequencies.

        Returns:
            An :class:`Export`.

        Source: DeepRec's ``EmbeddingVariable.export``.
        """
        with self._guard.writing():
            keys, values, frequencies, versions = [], [], [], []
            for part in self._parts():
                keys.append(part.keys)
                values.append(part.values)
                frequencies.append(part.frequencies)
                versions.append(part.versions)
        return Export(
            torch.cat(keys).to(self.key_dtype), torch.cat(values), torch.cat(versions), torch.cat(frequencies)
        )

    @torch.no_grad()
    def insert(self, keys: Any, values: Any, frequencies: Any = None, versions: Any = None) -> None:
        """
        Write rows: from pretrained vectors, or from another system's export.

        Rows of keys that are there are overwritten, and their optimizer state is reset. Filters do not apply.

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
        weight = self._stored_weight()
        keys = self._given_keys("insert", keys)
        values = torch.as_tensor(values, dtype=weight.dtype, device=weight.device)
        if values.shape != (len(keys), self.embedding_dim) and (len(keys) or values.numel()):
            raise ValueError(
                f"EmbeddingVariable.insert: values must be [{len(keys)}, {self.embedding_dim}], got "
                f"{list(values.shape)}"
            )
        values = values.reshape(len(keys), self.embedding_dim)
        numbers = [
            self._given_numbers("frequencies", frequencies, len(keys), 0),
            self._given_numbers("versions", versions, len(keys), -1),
        ]
        with self._guard.writing():
            self._let_in()
            self._tend(weight)
            if self.cold is None:
                self._insert(keys, values, *numbers)
            else:
                self._insert_in_tiers(keys, values, *numbers)
            self._note_written(keys)
            self._keep_capacity()

    def insert_export(self, tensors: Mapping[str, Any]) -> int:
        """
        Insert the rows of another system's export, as DeepRec and TensorFlow Recommenders Addons write it.

        Args:
            tensors: arrays or tensors by name: for every ``<prefix>-keys`` the ``<prefix>-values``, and perhaps
                ``<prefix>-freqs`` and ``<prefix>-versions``: DeepRec's names, of one variable or all its partitions;
                also the result of ``numpy.load`` for an ``.npz`` file.

        Returns:
            How many rows were inserted.

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
        prefixes = [name.removesuffix("-keys") for name in tensors if name.endswith("-keys")]
        if not prefixes:
            raise ValueError(
                f"EmbeddingVariable.insert_export: tensors must have names that end with '-keys', got {sorted(tensors)}"
            )
        inserted = 0
        for prefix in prefixes:
            if f"{prefix}-values" not in tensors:
                raise ValueError(
                    f"EmbeddingVariable.insert_export: tensors must have '{prefix}-values', beside its keys"
                )
            keys = torch.as_tensor(tensors[f"{prefix}-keys"])
            rest = [
                tensors[f"{prefix}-{name}"] if f"{prefix}-{name}" in tensors else None for name in ("freqs", "versions")
            ]
            self.insert(keys, torch.as_tensor(tensors[f"{prefix}-values"]), *rest)
            inserted += len(keys)
        return inserted

    def _numbers_of(self, keys: Tensor, frequencies: Tensor | None, versions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return frequencies and versions for inserted rows; by default the version is the step before this one."""
        least = 0 if self.admission is None else self.admission.filter_freq
        frequencies = torch.full_like(keys, least, dtype=torch.int64) if frequencies is None else frequencies
        if versions is None:
            versions = torch.full_like(keys, max(self.global_step - 1, -1), dtype=torch.int64)
        return frequencies, versions

    def _insert(self, keys: Tensor, values: Tensor, frequencies: Tensor | None, versions: Tensor | None) -> None:
        weight = self._stored_weight()
        known = self.keys.inserted
        if known == 0:
            self._grow_for(len(keys))  # all keys are new, except repeated ones
        # With this step as version, so that none of these rows is evicted to make room for the others; where none can
        # be, with the version that they will have.
        is_plain = known == 0 and frequencies is None and versions is None and self.ev_option.capacity is None
        rows, born = self.keys.insert(
            keys,
            frequencies=None if self.admission is None else self._numbers_of(keys, None, None)[0].int(),
            version=max(self.global_step - 1, -1) if is_plain else self.global_step,
            make_room=self._find_room,
        )
        OptimizerRows(weight).begin(rows)
        self._inserted_before = -1
        ops.table_assign_(weight.data, rows, values)
        if not (is_plain and self.keys.inserted == len(keys)):
            self.keys.set_numbers(rows, packed(*self._numbers_of(keys, frequencies, versions)))
        if self.admission is not None:
            self.admission.admitted(keys, born)

    def _insert_in_tiers(
        self, keys: Tensor, values: Tensor, frequencies: Tensor | None, versions: Tensor | None
    ) -> None:
        assert self.cold is not None
        part = Part(keys.long(), values, *self._numbers_of(keys, frequencies, versions), {})
        backwards = torch.arange(len(keys) - 1, -1, -1, device=keys.device)
        firsts = torch.ops.torchsparse_rec.unique_rows.default(part.keys[backwards])[0]
        part = select(part, backwards[firsts])
        if self.ev_option.capacity is not None:
            self._eviction.keep_capacity(part.keys)
        self._erase(keys)
        self.cold.erase(keys)
        self._put(part)
        if self.admission is not None:
            self.admission.admitted(keys, torch.zeros_like(keys))

    def _given_keys(self, method: str, keys: Any) -> Tensor:
        """Check a caller's keys, and return them as ``[K]`` int64 on the table's device."""
        given = torch.as_tensor(keys, device=self._stored_weight().device)
        if given.numel() == 0 and not isinstance(keys, Tensor):
            given = given.long()  # an empty list becomes floats
        if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"EmbeddingVariable.{method}: keys must be int32 or int64 of rank 1, got {given.dtype} "
                f"{list(given.shape)}"
            )
        self._check_range(f"{method}: keys", given)
        return given.long()

    def _check_range(self, argument: str, keys: Tensor) -> None:
        if self.key_dtype == torch.int32 and keys.dtype != torch.int32 and bool((keys != keys.int()).any()):
            bad = keys[keys != keys.int()][0].item()
            raise ValueError(f"EmbeddingVariable.{argument} must be of the key_dtype, int32, got {bad}")

    def _given_numbers(self, argument: str, numbers: Any, count: int, least: int) -> Tensor | None:
        """Check a caller's frequencies or versions, and return them as ``[K]`` int64; None stays None."""
        if numbers is None:
            return None
        given = torch.as_tensor(numbers, device=self._stored_weight().device)
        if given.shape != (count,):
            raise ValueError(
                f"EmbeddingVariable.insert: {argument} must be [{count}], one for each key, got {list(given.shape)}"
            )
        if count and (given.is_floating_point() or given.dtype == torch.bool):
            raise ValueError(f"EmbeddingVariable.insert: {argument} must be integers, got {given.dtype}")
        bad = given[(given < least) | (given >= 2**31 - 1)]
        if len(bad):
            raise ValueError(
                f"EmbeddingVariable.insert: {argument} must be in [{least}, 2**31 - 1), got {bad[0].item()}"
            )
        return given.long()

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
        keys = self._given_keys("erase", keys)
        with self._guard.writing():
            self._let_in()
            erased = self._erase(keys)
            if self.cold is not None:
                erased += self.cold.erase(keys)
            if isinstance(self.admission, CounterAdmission):
                self.admission.candidates.erase(keys)
                self._note_erased(keys)  # also those without a row
        return erased

    def _erase(self, keys: Tensor) -> int:
        """Erase keys of the first tier, and return how many had a row in it."""
        rows = self.keys.erase(keys)
        if len(rows):
            self._note_erased(keys)
        return len(rows)

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
        with self._guard.writing():
            self._let_in()
            return self._eviction.run()

    def stats(self) -> dict[str, Any]:
        """
        Return statistics by name.

        Returns:
            ``keys`` with a row; keys ever ``admitted``; ids ``filtered``, looked up in training before admission;
            ``waiting``: keys that a :class:`CounterFilter` counts; ``evicted`` keys; ``failed`` ids, without room;
            ``capacity`` in rows; ``global_step``; for each tier (``hbm``, ``dram``, ``ssd``) ``rows_*``, ``bytes_*``
            (rows, keys and optimizer states) and ``hit_rate_*``, the tier's share of ids looked up in training;
            ``bytes_filter``. On CUDA it waits for the device.

        Example:
            >>> from torchsparse_rec.nn import EmbeddingVariable
            >>> EmbeddingVariable(2).stats()["keys"]
            0
        """
        with self._guard.reading():
            weight = self._stored_weight()
            states = sum(c.values.numel() * c.values.element_size() for c in OptimizerRows(weight).columns())
            first = "hbm" if weight.is_cuda else "dram"
            looked_up = max(self._looked_up, 1)
            numbers = {
                "keys": self._count(),
                "admitted": self.keys.inserted,
                "filtered": int(self._filtered),
                "waiting": len(self.admission) if isinstance(self.admission, CounterAdmission) else 0,
                "evicted": self._evicted,
                "failed": self.keys.failed,
                "capacity": self.keys.capacity,
                "global_step": self.global_step,
                f"rows_{first}": len(self.keys),
                f"bytes_{first}": weight.numel() * weight.element_size() + states + self.keys.nbytes(),
                f"hit_rate_{first}": 1 - self._found_cold / looked_up,
                "bytes_filter": 0 if self.admission is None else self.admission.nbytes(),
            }
            if self.cold is not None:
                numbers.update(self.cold.stats(looked_up))
            return numbers
