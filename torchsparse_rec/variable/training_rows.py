"""Rows of keys in training: which keys get one, and its initial values."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from .._torch import is_in_ddp, is_in_fsdp
from ..tables.table import table_of
from .base import VariablePart
from .optimizer_rows import OptimizerRows

__all__ = ["TrainingRows"]


class TrainingRows(VariablePart):
    """The base class of EmbeddingVariable that finds and inserts the keys of a training step."""

    @torch.no_grad()
    def rows_of(self, ids: Tensor) -> Tensor:
        """
        Return the rows of ``weight`` that keys have in this training step; insert new keys. For collections.

        Args:
            ids: ``[N]``. No other thread may read or write the table meanwhile.

        Returns:
            ``[N]`` int64.
        """
        self._begin_lookup(len(ids))
        weight, step = self._stored_weight(), self.global_step
        if self.cold is not None:
            self._found_cold += self.cold.promote(ids)
        if self.admission is None:
            rows, born = self.keys.insert(ids, version=step, count=True, make_room=self._find_room)
            self._end_lookup(born, ids)
            return rows
        absent = self.keys.find(ids) < 0
        allowed = counts = None
        # On CUDA any() would wait for the device.
        if absent.is_cuda or absent.any():
            allowed, counts = self.admission.count(ids, absent, step)
        rows, born = self.keys.insert(
            ids, allowed=allowed, frequencies=counts, version=step, count=True, make_room=self._find_room
        )
        if allowed is not None:
            self._begin_rows(born, ids)
            self.admission.admitted(ids, born)
            filtered = rows < 0
            self._filtered += filtered.sum()
            self._write_default_row(weight)
        self._keep_capacity()
        return rows.clamp_min_(0)

    def takes_all(self) -> bool:
        """Say whether a lookup inserts every int64 key that has no row, without a filter or other tiers to ask."""
        return self.training and self.admission is None and self.cold is None and self.key_dtype == torch.int64

    def _begin_lookup(self, count: int) -> None:
        """Prepare a training lookup of ``count`` ids: count the step, admit waiting keys, evict on schedule."""
        if getattr(self, "_is_replica", False):
            raise RuntimeError(
                f"EmbeddingVariable {self.name!r}: replicas of torch.nn.DataParallel cannot train, their new rows "
                "would be lost: use one process for each device"
            )
        if is_in_ddp():
            raise RuntimeError(
                f"EmbeddingVariable {self.name!r}: a table that grows cannot be in a DistributedDataParallel, whose "
                "processes would give the same row to different keys: leave it out of the wrapped module"
            )
        if is_in_fsdp(self):
            raise RuntimeError(
                f"EmbeddingVariable {self.name!r}: a table that grows cannot be in fully_shard, which deals out the "
                "rows that it has now: leave it out by ignored_params"
            )
        weight = self._stored_weight()
        self._tend(weight)
        if table_of(weight).optimizer is None:
            self.global_step += 1
        if self._newcomers and (self._newcomers_step != self.global_step or not self._waits_for_a_step()):
            self._let_in()
        self._eviction.on_schedule()
        self._looked_up += count

    def _end_lookup(self, born: Tensor, ids: Tensor) -> None:
        """Finish a training lookup: initialise its new rows, and evict keys beyond the capacity."""
        self._begin_rows(born, ids)
        self._keep_capacity()

    def _begin_rows(self, born: Tensor, ids: Tensor) -> None:
        """Initialise new rows, and reset their optimizer states."""
        if not born.is_cuda and self.keys.inserted == self._inserted_before:
            return
        self._inserted_before = -1 if born.is_cuda else self.keys.inserted
        weight = self._stored_weight()
        # Through .data, hidden from autograd: graphs of earlier lookups do not use rows that are new now.
        if self.admission is None:
            self.initial.write(weight.data, born, ids)
        else:
            ops.table_initialize_(weight.data, born, ids, kind="constant", parameters=(self._default(),))
            its = slice(None) if born.is_cuda else born >= 0  # all on CUDA, where a mask would wait for the device
            self._newcomers.append((born[its].clone(), ids[its].clone()))
            self._newcomers_step = self.global_step
        OptimizerRows(weight).begin(born)

    _inserted_before = 0

    # ---- Keys that a filter has just admitted ------------------------------------------------------------------------

    # DeepRec admits a key when its gradient is applied: lookups of that step still return the default value, and the
    # gradient is applied to the row's initial values. So new rows hold the default value until the optimizer's step
    # begins.

    def _default(self) -> float:
        return float(self.ev_option.init_option.default_value_no_permission)

    def _waits_for_a_step(self) -> bool:
        """Say whether an optimizer of ``torchsparse_rec.optim`` will end this step, and admit its new keys."""
        weight = self._stored_weight()
        return weight.requires_grad and table_of(weight).optimizer is not None

    @torch.no_grad()
    def _let_in(self) -> None:
        """Write the initial values of rows whose keys a filter has admitted."""
        newcomers, self._newcomers = self._newcomers, []
        weight = self._stored_weight().data
        default = weight.new_full((), self._default())
        for rows, keys in newcomers:
            rows, keys = rows.to(weight.device), keys.to(weight.device)
            # Zero, unless an optimizer that does not tell the table of its steps has moved the row.
            moved = weight.index_select(0, rows.clamp_min(0)) - default
            ops.table_assign_(weight, rows, self.initial.rows_of(keys, weight, rows >= 0) + moved)

    def _write_default_row(self, weight: Tensor) -> None:
        # The optimizer moves row 0 as any row that is looked up.
        weight.data[0] = self._default()
        OptimizerRows(weight).begin(torch.zeros(1, dtype=torch.int64, device=weight.device))  # type: ignore[arg-type]
