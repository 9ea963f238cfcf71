"""
Anchors: parameters of one element that stand, among a model's parameters, for tables whose gradient has no ``.grad``.

An anchor's gradient is the norm of the rows that wait for the optimizer's step: so those who look at gradients before a
step (``clip_grad_norm_``, ``GradScaler``) see it, and what they multiply it by is applied to the rows.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..optim._row_optimizer import RowOptimizer
from ..optim._tables import Gradient, Pending, Table


def new_anchor(weights: Sequence[Tensor]) -> Parameter:
    """The anchor of these tables."""
    wide = all(weight.dtype == torch.float64 for weight in weights)
    anchor = Parameter(torch.zeros(1, dtype=torch.float64 if wide else torch.float32, device=weights[0].device))
    anchor._torchsparse_rec_anchor = True  # type: ignore[attr-defined]
    return anchor


# ---- Rows that wait for the optimizer's step -------------------------------------------------------------------------


class AnchorGradient:
    """What the gradient of one anchor stands for: the rows that wait, by table."""

    def __init__(self, anchor: Parameter) -> None:
        gradients, key = _gradients, id(anchor)
        self.anchor = weakref.ref(anchor, lambda _: gradients.pop(key, None))
        self.rows: dict[int, tuple[weakref.ref[Table], Tensor, Tensor]] = {}
        self._norm: Tensor | None = None  # what the anchor's gradient will be, once autograd has stored it
        self.held_by: weakref.WeakSet[RowOptimizer] = weakref.WeakSet()  # optimizers known to hold the anchor
        self._stored: Tensor | None = None  # the same, once it is stored
        self._factor: Tensor | None = None
        anchor.register_post_accumulate_grad_hook(self._after_backward)

    @torch._dynamo.disable
    def _after_backward(self, anchor: Tensor) -> None:
        grad, norm = anchor.grad, self._norm
        if grad is None:
            return
        if norm is None:  # updated already: nothing waits
            anchor.grad = None
            return
        with torch.no_grad():
            grad.copy_(norm)
        self._stored, self._norm = norm, None

    def is_valid(self) -> bool:
        """Whether the rows still wait. Who clears the anchor's gradient (``zero_grad()``) lets go of them."""
        anchor = self.anchor()
        return anchor is not None and (anchor.grad is not None or self._norm is not None)

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
        for key, (table, rows, values) in self.rows.items():
            self.rows[key] = (table, rows, torch.where(factor == 0, torch.zeros_like(values), values * factor))
        self.store()

    def store(self) -> None:
        """Set the anchor's gradient to the norm of the rows that wait."""
        anchor = self.anchor()
        if anchor is not None and anchor.grad is not None and self.rows:
            self._stored = self._total_norm()
            anchor.grad.copy_(self._stored)

    def add(self, tables: Sequence[Table], values: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Let rows wait, after those that wait already."""
        if self._norm is None:  # the first lookup of this backward
            if self.is_valid():
                self.apply_factor()
            else:
                self.clear()
            self._stored = None
        for table, more_values, more_rows in zip(tables, values, rows, strict=True):
            waiting = self.rows.get(id(table))
            if waiting is not None and waiting[0]() is table:
                both = [(waiting[1], waiting[2]), (more_rows, more_values)]
                more_rows, more_values = merged(both, table.num_embeddings)
            self.rows[id(table)] = (weakref.ref(table), more_rows, more_values)
            waiting_rows(table).sources[self] = None
        self._norm = self._total_norm()

    def _total_norm(self) -> Tensor:
        """Of all rows that wait, as stored, ``[1]``; infinite if any element is not finite."""
        norms = torch._foreach_norm([values for _, _, values in self.rows.values()])
        total = torch.linalg.vector_norm(torch.stack([x.to(norms[0].dtype) for x in norms]))
        anchor = self.anchor()
        assert anchor is not None
        return torch.where(torch.isfinite(total), total, torch.full_like(total, torch.inf)).to(anchor.dtype).reshape(1)

    def clear(self) -> None:
        """Let go of the rows."""
        self.rows.clear()
        self._stored = self._norm = None


# By the id of the anchor, whose death removes them; see optim/_tables.py. Copies of an anchor stand for nothing yet.
_gradients: dict[int, AnchorGradient] = {}
_lock = threading.Lock()


def gradient_of_anchor(anchor: Parameter) -> AnchorGradient:
    """What an anchor's gradient stands for, made at the first call."""
    with _lock:  # the anchor has one hook
        if id(anchor) not in _gradients:
            _gradients[id(anchor)] = AnchorGradient(anchor)
        return _gradients[id(anchor)]


def merged(parts: Sequence[tuple[Tensor, Tensor]], num_embeddings: int) -> tuple[Tensor, Tensor]:
    """(rows, values) of several, rows unique and sorted, values of equal rows added."""
    rows, values = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    with torch.no_grad():
        values, rows = torch.ops.torchsparse_rec.embedding_sparse_backward.default(
            values, rows, None, None, None, num_embeddings, 0, -1, False
        )
    return rows, values


class WaitingRows(Pending):
    """The rows of one table that wait, of all anchors."""

    def __init__(self, table: Table) -> None:
        self._table = weakref.ref(table)
        # Rows of apply="backward" that wait for another lookup's backward. They need no anchor.
        self.own: list[tuple[Tensor, Tensor]] = []
        self.sources: weakref.WeakKeyDictionary[AnchorGradient, None] = weakref.WeakKeyDictionary()

    def _gradients(self) -> list[Gradient]:
        """What waits, part by part."""
        key = id(self._table())
        found = [Gradient(rows, values) for rows, values in self.own]
        for source in list(self.sources):
            waiting = source.rows.get(key)
            if waiting is not None and waiting[0]() is self._table() and source.is_valid():
                found.append(Gradient(waiting[1], waiting[2], source.factor()))
        return found

    def take(self) -> Gradient | None:
        """See the class above. What an anchor stands for goes on waiting as long as the anchor has its gradient."""
        found = self._gradients()
        self.own.clear()
        if len(found) > 1:
            table = self._table()
            assert table is not None
            parts = [(part.rows, _scaled(part)) for part in found]
            return Gradient(*merged(parts, table.num_embeddings))  # type: ignore[arg-type]
        return found[0] if found else None

    def discard(self) -> None:
        """Forget all that waits."""
        self.own.clear()
        for source in list(self.sources):
            source.rows.pop(id(self._table()), None)

    def norm(self, norm_type: float) -> Tensor | None:
        """See the class above."""
        found = self._gradients()
        if not found:
            return None
        return torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(_scaled(part), norm_type) for part in found]), norm_type
        )

    def scale(self, factor: Tensor) -> None:
        """See the class above."""
        self._replace(lambda values: values * factor)

    def clamp(self, limit: float) -> None:
        """See the class above."""
        self._replace(lambda values: values.clamp(-limit, limit))

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        """Change the values that wait; whoever multiplies the anchor's gradient afterwards multiplies these."""
        key = id(self._table())
        self.own = [(rows, function(values)) for rows, values in self.own]
        for source in list(self.sources):
            if key in source.rows and source.is_valid():
                source.apply_factor()
                table, rows, values = source.rows[key]
                source.rows[key] = (table, rows, function(values))
                source.store()


def waiting_rows(table: Table) -> WaitingRows:
    """What waits of a table, made at the first call."""
    if table.pending is None:
        table.pending = WaitingRows(table)
    assert isinstance(table.pending, WaitingRows)
    return table.pending


def _scaled(part: Gradient) -> Tensor:
    return part.values if part.grad_scale is None else part.values * part.grad_scale
