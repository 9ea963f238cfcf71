"""How a variable's table grows, and what autograd must not notice of it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import unserializable_hook

from ...optim._tables import table_of
from .base import VariablePart
from .memory import new_zeros
from .optimizer_rows import OptimizerRows

__all__ = ["Growth"]


class Growth(VariablePart):
    """The part of an EmbeddingVariable that is about its size."""

    def _take_capacity(self, capacity: int) -> None:
        """Have so many rows, whose values will be written."""
        weight = self._stored_weight()
        optimizer = OptimizerRows(weight)
        steps = optimizer.steps()
        optimizer.table.release()
        self._replace_weight(new_zeros((capacity, self.embedding_dim), weight.dtype, weight.device))
        optimizer.start_over([], steps, keep=True)  # an optimizer that was loaded before has them already

    def _find_room(self, wanted: int, protected: Tensor | None = None) -> None:
        """Have so many rows free: grow, or where the capacity is reached, let others go."""
        self._grow_for(wanted)
        room = self.keys.room()
        if room < wanted:
            self._eviction.make_room(wanted - room, protected)

    def _grow_for(self, wanted: int) -> None:
        """Grow until so many rows are free, or to the capacity."""
        capacity = self.keys.capacity_for(wanted, self._most_rows())
        if capacity != self.keys.capacity:
            self._grow(capacity)

    def _most_rows(self) -> int | None:
        """Rows that the first tier may have."""
        capacity = self.ev_option.capacity
        limits = [] if capacity is None else [capacity + self.keys.reserved]
        if self.cold is not None:
            limits.append(self.cold.most_rows())
        return min(limits) if limits else None

    def _keep_capacity(self) -> None:
        """See to the capacity of all tiers together, and of a table that was loaded with more rows than it may have."""
        most = self.ev_option.capacity
        if most is None or (self.cold is None and self.keys.capacity <= most + self.keys.reserved):
            return
        self._eviction.keep_capacity()

    def _grow(self, capacity: int) -> None:
        """Have so many rows; the Parameter stays, and those of keys stay where they are."""
        weight = self._stored_weight()
        before = weight.shape[0]
        # Memory may run out: until all of it is there, nothing has changed.
        optimizer = OptimizerRows(weight)
        longer = new_zeros((capacity, self.embedding_dim), weight.dtype, weight.device)
        longer[:before] = weight.detach()
        grown = optimizer.grown(before, capacity)
        self.keys.grow(capacity)
        self._replace_weight(longer)
        optimizer.take(*grown)

    def _replace_weight(self, values: Tensor) -> None:
        """
        Let the Parameter have other values, of another number of rows perhaps.

        Graphs of lookups before have gradients of the size the table had then: :func:`_fit_gradient` makes them fit.
        """
        weight = self._stored_weight()
        grad, weight.grad = weight.grad, None
        # Autograd keeps the shape of a leaf as long as a graph needs it, but not beyond a change of dtype.
        weight.data = values.new_empty(0, dtype=torch.float64 if values.dtype != torch.float64 else torch.float32)
        weight.data = values
        if grad is not None:
            _fit(grad, weight)
            weight.grad = grad

    def _tend(self, weight: Parameter) -> None:
        """Have the hooks of a table that grows on the Parameter, which may be another one than before."""
        table = table_of(weight)
        if table.growing is not None and table.growing() is self:
            return
        table.growing = weakref.ref(self)  # type: ignore[arg-type]
        weight.register_hook(_fit_gradient(weight))


# ---- Gradients of lookups made before a table grew ------------------------------------------------------------------


def _fit_gradient(weight: Parameter) -> Any:
    """A hook that gives gradients the size that the table has now."""
    reference = weakref.ref(weight)

    @unserializable_hook
    def fit(grad: Tensor) -> None:
        now = reference()
        if now is not None and grad.shape[0] < now.shape[0]:
            _fit(grad, now)

    return fit


@torch.no_grad()
def _fit(grad: Tensor, weight: Tensor) -> None:
    """Give a gradient the size of the table, in place."""
    before = grad.shape[0]
    if grad.layout is torch.sparse_coo:
        grad.sparse_resize_(weight.shape, 1, weight.dim() - 1)
    elif before < weight.shape[0]:
        longer = grad.new_zeros(weight.shape)
        longer[:before] = grad  # which may be expanded, so it cannot be resized
        grad.set_(longer)  # type: ignore[call-overload]
