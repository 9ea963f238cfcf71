"""How a variable's table grows without autograd noticing it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import unserializable_hook

from ..tables.table import table_of
from .base import VariablePart
from .memory import new_zeros
from .optimizer_rows import OptimizerRows

__all__ = ["Growth"]


class Growth(VariablePart):
    """The base class of EmbeddingVariable with the methods that change its number of rows."""

    def _take_capacity(self, capacity: int) -> None:
        """Give the weight ``capacity`` rows, whose values are yet to be written."""
        weight = self._stored_weight()
        optimizer = OptimizerRows(weight)
        steps = optimizer.steps()
        optimizer.table.release()
        self._replace_weight(new_zeros((capacity, self.embedding_dim), weight.dtype, weight.device))
        optimizer.start_over([], steps, keep=True)  # an optimizer loaded before has states of that size

    def _find_room(self, wanted: int, protected: Tensor | None = None) -> None:
        """Make ``wanted`` rows free: grow, or where the capacity is reached, evict or demote other rows."""
        self._grow_for(wanted)
        room = self.keys.room()
        if room < wanted:
            self._eviction.make_room(wanted - room, protected)

    def _grow_for(self, wanted: int) -> None:
        """Grow until ``wanted`` rows are free, or to the capacity."""
        capacity = self.keys.capacity_for(wanted, self._most_rows())
        if capacity != self.keys.capacity:
            self._grow(capacity)

    def _most_rows(self) -> int | None:
        """Return how many rows the first tier may have; None: any number."""
        capacity = self.ev_option.capacity
        limits = [] if capacity is None else [capacity + self.keys.reserved]
        if self.cold is not None:
            limits.append(self.cold.most_rows())
        return min(limits) if limits else None

    def _keep_capacity(self) -> None:
        """Evict keys beyond the capacity, of all tiers together or of a table loaded with too many rows."""
        most = self.ev_option.capacity
        if most is None or (self.cold is None and self.keys.capacity <= most + self.keys.reserved):
            return
        self._eviction.keep_capacity()

    def _grow(self, capacity: int) -> None:
        """Grow to ``capacity`` rows; the Parameter stays the same object, and each key keeps its row."""
        weight = self._stored_weight()
        before = weight.shape[0]
        # Memory may run out: nothing changes until all of it is allocated.
        optimizer = OptimizerRows(weight)
        longer = new_zeros((capacity, self.embedding_dim), weight.dtype, weight.device)
        longer[:before] = weight.detach()
        grown = optimizer.grown(before, capacity)
        self.keys.grow(capacity)
        self._replace_weight(longer)
        optimizer.take(*grown)

    def _replace_weight(self, values: Tensor) -> None:
        """
        Give the Parameter other values, perhaps with another number of rows.

        Graphs of earlier lookups give gradients of the size that the table had: :func:`_fit_gradient` resizes them.
        """
        weight = self._stored_weight()
        grad, weight.grad = weight.grad, None
        # Autograd keeps a leaf's shape as long as a graph needs it, except where the dtype changes.
        weight.data = values.new_empty(0, dtype=torch.float64 if values.dtype != torch.float64 else torch.float32)
        weight.data = values
        if grad is not None:
            _fit(grad, weight)
            weight.grad = grad

    def _tend(self, weight: Parameter) -> None:
        """Register the hook of a growing table on the Parameter, which may be another object than before."""
        table = table_of(weight)
        if table.growing is not None and table.growing() is self:
            return
        table.growing = weakref.ref(self)  # type: ignore[arg-type]
        weight.register_hook(_fit_gradient(weight))


# ---- Gradients of lookups made before a table grew ------------------------------------------------------------------


def _fit_gradient(weight: Parameter) -> Any:
    """Return a hook that gives gradients the size that the table has now."""
    reference = weakref.ref(weight)

    @unserializable_hook
    def fit(grad: Tensor) -> None:
        now = reference()
        if now is not None and grad.shape[0] < now.shape[0]:
            _fit(grad, now)

    return fit


@torch.no_grad()
def _fit(grad: Tensor, weight: Tensor) -> None:
    """Resize a gradient to the size of the table, in place; new rows are zeros."""
    before = grad.shape[0]
    if grad.layout is torch.sparse_coo:
        grad.sparse_resize_(weight.shape, 1, weight.dim() - 1)
    elif before < weight.shape[0]:
        longer = grad.new_zeros(weight.shape)
        longer[:before] = grad  # grad may be an expanded tensor, which cannot be resized
        grad.set_(longer)  # type: ignore[call-overload]
