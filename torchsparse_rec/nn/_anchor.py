"""
Anchors: parameters of one element that stand, among a model's parameters, for tables whose gradient has no ``.grad``.

An anchor's gradient is the norm of the rows that wait for the optimizer's step: so those who look at gradients before a
step (``clip_grad_norm_``, ``GradScaler``) see it, and what they multiply it by is applied to the rows.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..optim._gradients import merged, scaled
from ..optim._row_optimizer import RowOptimizer
from ..optim._tables import Gradient, Pending, Table


class Anchor(Parameter):
    """
    A parameter that stands for tables. Its copies do so for none: they are to make their own.

    The mark is the class's, so that copies have it. In files it is an attribute, and the class torch's: ``torch.load``
    knows no other.
    """

    _torchsparse_rec_anchor = True

    def __reduce_ex__(self, protocol: object) -> tuple:
        """A plain parameter with the mark."""
        state = {"_torchsparse_rec_anchor": True}
        hooks: OrderedDict = OrderedDict()
        return torch._utils._rebuild_parameter_with_state, (self.data, self.requires_grad, hooks, state)


def new_anchor(weights: Sequence[Tensor]) -> Parameter:
    """The anchor of these tables."""
    wide = all(weight.dtype == torch.float64 for weight in weights)
    return Anchor(torch.zeros(1, dtype=torch.float64 if wide else torch.float32, device=weights[0].device))


# ---- Rows that wait for the optimizer's step -------------------------------------------------------------------------


class AnchorGradient:
    """What the gradient of one anchor stands for: the rows that wait, by table."""

    def __init__(self, anchor: Parameter) -> None:
        anchor.__class__ = Anchor  # it is not if it comes from a file
        self.anchor = weakref.ref(anchor)
        self.held_by: weakref.WeakSet[RowOptimizer] = weakref.WeakSet()  # optimizers known to hold the anchor
        self.rows: weakref.WeakKeyDictionary[Table, Gradient] = weakref.WeakKeyDictionary()
        # What the lookups of a backward leave, by the backward's number. It counts once the anchor has its gradient,
        # after the last of them: where a backward raises, never.
        self._coming: dict[int, list[tuple[weakref.ref[Table], Gradient]]] = {}
        self._stored: Tensor | None = None  # the anchor's gradient when it was last set here
        self._factor: Tensor | None = None
        self.is_stale = False  # whether rows have been changed since
        anchor.register_post_accumulate_grad_hook(self._after_backward)

    def add(self, tables: Sequence[Table], values: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Within a backward: let rows wait, after those that wait already."""
        number = torch._C._current_graph_task_id()
        if number not in self._coming:  # the first lookup of this backward
            if self.is_valid():
                self.apply_factor()
            else:
                self.rows.clear()
            self._coming[number] = []
        for table, its_values, its_rows in zip(tables, values, rows, strict=True):
            self._coming[number].append((weakref.ref(table), Gradient(its_rows, its_values)))
            waiting_rows(table).sources[self] = None

    @torch._dynamo.disable
    @torch.no_grad()
    def _after_backward(self, anchor: Tensor) -> None:
        coming = self._coming.pop(torch._C._current_graph_task_id(), None)
        if anchor.grad is None:
            return
        if coming is None:  # updated already: nothing waits
            anchor.grad = None
            return
        parts = {table: [waiting] for table, waiting in self.rows.items()}
        for reference, part in coming:
            table = reference()
            if table is not None:
                parts.setdefault(table, []).append(part)
        for table, its in parts.items():
            self.rows[table] = merged(its, table.num_embeddings)
        self.store()

    def forget_unfinished(self) -> None:
        """Let go of what backwards left that have raised. One may be running, if this is called from a hook."""
        if torch._C._current_graph_task_id() == -1:
            self._coming.clear()

    def is_valid(self) -> bool:
        """Whether the rows still wait. Who clears the anchor's gradient (``zero_grad()``) lets go of them."""
        anchor = self.anchor()
        return anchor is not None and anchor.grad is not None

    def factor(self) -> Tensor | None:
        """What the anchor's gradient has been multiplied by since it was stored; None, on the CPU, for nothing."""
        anchor = self.anchor()
        if self._stored is None or anchor is None or anchor.grad is None:
            return None
        now, before = anchor.grad, self._stored
        if now.device.type == "cpu" and torch.equal(now, before):
            return None
        # No rows but zeros: any factor is right. Rows with an infinity, made finite by a clip to nothing: none is left.
        factor = torch.where(now == before, torch.ones_like(now), now / before)
        factor = torch.where(before == 0, torch.ones_like(now), factor)
        factor = torch.where(torch.isinf(before) & ~torch.isfinite(now), torch.zeros_like(now), factor)
        # One tensor for all tables, so that one call can update them.
        if self._factor is None or self._factor.device != factor.device:
            self._factor = torch.empty_like(factor)
        return self._factor.copy_(factor)

    def apply_factor(self) -> None:
        """Multiply the rows by the factor, which is 1 then."""
        factor = self.factor()
        if factor is None:
            return
        for table, (rows, values, _) in list(self.rows.items()):
            self.rows[table] = Gradient(rows, torch.where(factor == 0, torch.zeros_like(values), values * factor))
        self.store()

    def store(self) -> None:
        """Set the anchor's gradient to the norm of the rows that wait."""
        anchor, self.is_stale = self.anchor(), False
        if anchor is not None and anchor.grad is not None:
            self._stored = self._total_norm(anchor)
            anchor.grad.copy_(self._stored)

    def _total_norm(self, anchor: Tensor) -> Tensor:
        """Of all rows that wait, as stored, ``[1]``; infinite if any element is not finite."""
        values = [gradient.values for gradient in self.rows.values()]
        if not values:
            return torch.zeros_like(anchor)
        norms = torch._foreach_norm(values)
        total = norms[0]
        if len(norms) > 1:
            total = torch.linalg.vector_norm(torch.stack([x.to(total.dtype) for x in norms]))
        return torch.where(torch.isfinite(total), total, torch.full_like(total, torch.inf)).to(anchor.dtype).reshape(1)


_lock = threading.Lock()


def gradient_of_anchor(anchor: Parameter) -> AnchorGradient:
    """What an anchor's gradient stands for, made at the first call."""
    with _lock:  # the anchor has one hook
        gradient = anchor.__dict__.get("_torchsparse_rec_gradient")
        if gradient is None:
            gradient = AnchorGradient(anchor)
            anchor._torchsparse_rec_gradient = gradient  # type: ignore[attr-defined]
        return gradient


class WaitingRows(Pending):
    """
    The rows of one table that wait, of all anchors.

    What an anchor stands for goes on waiting as long as the anchor has its gradient.
    """

    def __init__(self, table: Table) -> None:
        self._table = weakref.ref(table)
        # Rows of apply="backward" that wait for another lookup's backward. They need no anchor, so after a backward
        # that raised it takes the optimizer's zero_grad() to let go of them.
        self.own: list[tuple[Tensor, Tensor]] = []
        self.newest_lookup = -1  # when these last came
        self.sources: weakref.WeakKeyDictionary[AnchorGradient, None] = weakref.WeakKeyDictionary()

    @property
    def table(self) -> Table:
        """The table, which holds this."""
        table = self._table()
        assert table is not None
        return table

    def take(self) -> Gradient | None:
        """See :meth:`Pending.take`."""
        for source in list(self.sources):
            source.forget_unfinished()
        total = self._total()
        self.own.clear()
        return total

    def norm(self, norm_type: float) -> Tensor | None:
        """See :meth:`Pending.norm`."""
        total = self._total()
        return None if total is None else torch.linalg.vector_norm(scaled(total), norm_type)

    def scale(self, factor: Tensor) -> None:
        """See :meth:`Pending.scale`."""
        self._replace(lambda values: values * factor)

    def clamp(self, limit: float) -> None:
        """See :meth:`Pending.clamp`."""
        self._replace(lambda values: values.clamp(-limit, limit))

    def refresh(self) -> None:
        """See :meth:`Pending.refresh`."""
        for source in list(self.sources):
            if source.is_stale:
                source.store()

    def discard(self) -> None:
        """See :meth:`Pending.discard`."""
        self.own.clear()
        for source in list(self.sources):
            source.forget_unfinished()
            source.rows.pop(self.table, None)

    def _total(self) -> Gradient | None:
        """All that waits."""
        parts = [Gradient(*part) for part in self.own]
        holder = self._holder()
        if holder is not None:
            parts.append(holder.rows[self.table]._replace(grad_scale=holder.factor()))
        return merged(parts, self.table.num_embeddings) if parts else None

    def _holder(self) -> AnchorGradient | None:
        """The anchor that stands for rows of the table. If several do, of modules that share it, the first gets all."""
        table = self.table
        holders = [source for source in list(self.sources) if source.is_valid() and table in source.rows]
        if len(holders) > 1:
            for holder in holders:
                holder.apply_factor()
            total = merged([holder.rows.pop(table) for holder in holders], table.num_embeddings)
            holders[0].rows[table] = total
            for holder in holders:
                holder.store()
        return holders[0] if holders else None

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        """Change the values that wait; whoever multiplies the anchor's gradient afterwards multiplies these."""
        if self.own:
            total = merged([Gradient(*part) for part in self.own], self.table.num_embeddings)
            assert total.rows is not None
            self.own = [(total.rows, function(total.values))]
        holder = self._holder()
        if holder is not None:
            holder.apply_factor()
            rows, values, _ = holder.rows[self.table]
            holder.rows[self.table] = Gradient(rows, function(values))
            holder.is_stale = True


def waiting_rows(table: Table) -> WaitingRows:
    """What waits of a table, made at the first call."""
    if table.pending is None:
        table.pending = WaitingRows(table)
    assert isinstance(table.pending, WaitingRows)
    return table.pending
