"""Rows of keys in training: which keys get one, and its initial values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._torch import is_run_again
from ..tables.table import table_of
from .filters import CounterAdmission
from .initial import InitialRows
from .optimizer_rows import new_zeros
from .rows import TableRows
from .together import insert_together

__all__ = ["TrainingRows", "begin", "rows_together"]


class TrainingRows:
    """
    Finds and inserts the keys of training steps.

    DeepRec admits a key when its gradient is applied: lookups of that step still return the default value, and the
    gradient is applied to the row's initial values. So new rows of a table with a filter hold the default value until
    the optimizer's step begins.

    Args:
        rows: the rows of the variable.
        initial: the initial values of new rows.
        default: the value of keys that are not admitted.
    """

    def __init__(self, rows: TableRows, initial: InitialRows, default: float) -> None:
        self.rows, self._initial, self.default = rows, initial, default
        self.looked_up, self.found_cold = 0, 0
        #: The rows and keys that a filter has just admitted.
        self.newcomers: list[tuple[Tensor, Tensor]] = []
        self._newcomers_step = 0
        # On the CPU, how many keys had been inserted by the last lookup.
        self._insertions_before = 0

    def forget(self) -> None:
        """Forget the keys that a filter has just admitted: all rows are about to be replaced, or have been."""
        self.newcomers, self._insertions_before = [], -1

    def rows_of(self, ids: Tensor) -> Tensor:
        """Return the rows of ids in the training step that :func:`begin` has prepared, ``[N]``; insert new keys."""
        if is_run_again():
            return self._rows_again(ids)
        rows, step = self.rows, self.rows.store.step
        keys, admission = rows.store.keys, rows.admission
        if rows.cold is not None:
            self.found_cold += rows.cold.promote(ids, rows.find_room)
        allowed = counts = None
        if admission is not None:
            absent = keys.find(ids) < 0
            # On CUDA any() would wait for the device.
            if absent.is_cuda or absent.any():
                allowed, counts = admission.count(ids, absent, step)
        found, inserted = keys.insert(
            ids, allowed=allowed, frequencies=counts, version=step, count=True, make_room=rows.find_room
        )
        if admission is None or allowed is not None:
            self._begin_rows(inserted, ids)
        if admission is not None and allowed is not None:
            admission.admitted(ids, inserted)
            admission.filtered += (found < 0).sum()
            self._write_default_row()
        rows.keep_capacity()
        return found if admission is None else found.clamp_min_(0)

    def _rows_again(self, ids: Tensor) -> Tensor:
        """Return the rows of ids for a lookup that runs again, which counts and admits nothing."""
        rows, admits = self.rows, self.rows.admission is not None
        if rows.cold is not None:  # they may have left the first tier since
            rows.cold.promote(ids, rows.find_room)
        nobody = torch.zeros_like(ids, dtype=torch.bool) if admits else None
        found, inserted = rows.store.keys.insert(ids, allowed=nobody, version=rows.store.step, make_room=rows.find_room)
        self._begin_rows(inserted, ids)
        rows.keep_capacity()
        return found.clamp_min_(0) if admits else found

    def _begin_rows(self, inserted: Tensor, ids: Tensor) -> None:
        """Initialise new rows, and reset their optimizer states."""
        store = self.rows.store
        if not inserted.is_cuda:
            if store.keys.known.inserted == self._insertions_before:
                return
            self._insertions_before = store.keys.known.inserted
        # Through .data, hidden from autograd: graphs of earlier lookups do not use rows that are new now.
        weight = store.weight.data
        if self.rows.admission is None:
            self._initial.write(weight, inserted, ids)
        else:
            ops.table_initialize_(weight, inserted, ids, kind="constant", parameters=(self.default,))
            # All on CUDA, where a mask would wait for the device.
            its = slice(None) if inserted.is_cuda else inserted >= 0
            self.newcomers.append((inserted[its].clone(), ids[its].clone()))
            self._newcomers_step = store.step
        store.states.begin(inserted)

    def _write_default_row(self) -> None:
        # The optimizer moves row 0 as any row that is looked up.
        store = self.rows.store
        store.weight.data[0] = self.default
        store.states.begin(torch.zeros(1, dtype=torch.int64, device=store.weight.device))

    def waits_for_a_step(self) -> bool:
        """Say whether an optimizer of ``torchsparse_rec.optim`` will end this step, and admit its new keys."""
        weight = self.rows.store.weight
        return weight.requires_grad and table_of(weight).optimizer is not None

    @torch.no_grad()
    def let_in(self) -> None:
        """Write the initial values of rows whose keys a filter has admitted."""
        newcomers, self.newcomers = self.newcomers, []
        if not newcomers:
            return
        weight = self.rows.store.weight.data
        default = weight.new_full((), self.default)
        for rows, keys in newcomers:
            rows, keys = rows.to(weight.device), keys.to(weight.device)
            # Zero, unless an optimizer that does not announce its steps to the table has moved the row.
            moved = weight.index_select(0, rows.clamp_min(0)) - default
            ops.table_assign_(weight, rows, self._initial.rows_of(keys, weight, rows >= 0) + moved)

    @torch.no_grad()
    def follow(self, other: TrainingRows) -> None:
        """Take over the keys of another table, and keep the values of keys that are in both."""
        rows, theirs, store = self.rows, other.rows, self.rows.store
        weight, its_keys = store.weight, theirs.store.keys
        if rows.cold is not None or theirs.cold is not None:
            raise RuntimeError(
                f"EmbeddingVariable {store.name!r}: a table in tiers cannot be averaged, since rows are elsewhere: "
                "take it out of the AveragedModel, or average by export(), lookup() and insert()"
            )
        if table_of(weight).rows is not None:
            return  # it is trained by itself: its rows will not be averaged with others'
        places = its_keys.rows().to(weight.device)
        keys = its_keys.entries[:, 0].to(weight.device)[places]
        before = store.keys.find(keys)
        values = self._initial.rows_of(keys, weight, before < 0)
        values = torch.where((before < 0)[:, None], values, weight.detach()[before.clamp_min(0)])
        made = new_zeros((its_keys.capacity, weight.shape[1]), weight.dtype, weight.device)
        made[: store.keys.reserved] = self.default
        made[places] = values
        store.replace(made)
        store.keys.follow(its_keys)
        if rows.admission is not None and theirs.admission is not None:
            rows.admission.load_state_dict(theirs.admission.state_dict())
        store.step, rows.evicted, rows.seen = theirs.store.step, theirs.evicted, theirs.seen
        self.forget()

    def stats(self) -> dict[str, Any]:
        """Return statistics by name, see :meth:`EmbeddingVariable.stats`."""
        rows, admission, keys, weight = self.rows, self.rows.admission, self.rows.store.keys, self.rows.store.weight
        states = sum(c.values.numel() * c.values.element_size() for c in self.rows.store.states.columns())
        first = "hbm" if weight.is_cuda else "dram"
        looked_up = max(self.looked_up, 1)
        numbers = {
            "keys": len(rows),
            "admitted": keys.insertions,
            "filtered": 0 if admission is None else int(admission.filtered),
            "waiting": len(admission) if isinstance(admission, CounterAdmission) else 0,
            "evicted": rows.evicted,
            "failed": keys.failed,
            "capacity": keys.capacity,
            "global_step": rows.store.step,
            f"rows_{first}": len(keys),
            f"bytes_{first}": weight.numel() * weight.element_size() + states + keys.nbytes(),
            f"hit_rate_{first}": 1 - self.found_cold / looked_up,
            "bytes_filter": 0 if admission is None else admission.nbytes(),
        }
        if rows.cold is not None:
            numbers.update(rows.cold.stats(looked_up))
        return numbers


def begin(tables: Sequence[TrainingRows], counts: Sequence[int], are_steps: Sequence[bool]) -> None:
    """
    Prepare a training lookup, unless it runs again: count the step, admit waiting keys, evict on schedule.

    Args:
        tables: the tables.
        counts: the number of each table's ids.
        are_steps: whether the lookup is a step of its own, of each table.
    """
    if is_run_again():
        return
    for table, count, is_step in zip(tables, counts, are_steps, strict=True):
        rows, store = table.rows, table.rows.store
        store.step += is_step
        if table.newcomers and (table._newcomers_step != store.step or not table.waits_for_a_step()):
            table.let_in()
        if rows._options:
            rows.evict_on_schedule()
        rows.seen = store.step
        table.looked_up += count


def rows_together(tables: Sequence[TrainingRows], ids: Tensor, parts: Sequence[tuple[int, int]]) -> Tensor:
    """
    Do as :meth:`TrainingRows.rows_of` for several tables that take all keys, by one operator.

    Args:
        tables: the tables, whose lookups have begun.
        ids: the keys of all tables.
        parts: the beginning and end of each table's keys in ``ids``, in ascending order.

    Returns:
        ``[N]``: rows; at positions in no part the ids themselves.
    """
    stores = [table.rows.store for table in tables]
    make_rooms = [table.rows.find_room for table in tables]
    steps = [store.step for store in stores]
    rows, inserted = insert_together([store.keys for store in stores], ids, parts, steps, make_rooms)
    for k, (table, store) in enumerate(zip(tables, stores, strict=True)):
        if inserted.is_cuda or store.keys.known.inserted != table._insertions_before:
            its = slice(*parts[k])
            table._begin_rows(inserted[its], ids[its])
        if not store.keys.may_grow:
            table.rows.keep_capacity()
    return rows
