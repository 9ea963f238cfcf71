"""The first tier of a variable: its keys, the weight, and the optimizer's states of each row."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import unserializable_hook

from .. import ops
from ..tables.stale import mark_growing
from ..tables.table import StepListener, table_of
from .keys import KeyRows, packed, unpacked
from .optimizer_rows import OptimizerRows, new_zeros
from .records import RowPart

__all__ = ["RowStore"]


class RowStore:
    """
    Rows by key, with an optimizer's states of them: they are read, written and erased together, and grow.

    Args:
        name: the name of the variable, for errors.
        key_dtype: the key_dtype of the variable.
        keys: the keys and their rows.
        parameters: the parameters of the variable. Its ``"weight"`` has the values; it may be replaced by another
            Parameter.
        computed: a method that returns the values where ``"weight"`` is missing, as in a module that is pruned. Its
            object is not kept alive.
    """

    def __init__(
        self,
        name: str,
        key_dtype: torch.dtype,
        keys: KeyRows,
        parameters: Mapping[str, Parameter | None],
        computed: Callable[[], Parameter],
    ) -> None:
        self.name, self.key_dtype, self.keys = name, key_dtype, keys
        self._parameters = parameters
        self.follow(computed)
        self.step = 0
        """The step of training: rows that are looked up now get it as their version."""

    @property
    def weight(self) -> Parameter:
        """The rows' stored values, perhaps stale, ``[capacity, D]``."""
        weight = self._parameters.get("weight")
        if weight is None:
            computed = self._computed()
            assert computed is not None
            weight = computed()
        return weight

    def follow(self, computed: Callable[[], Parameter]) -> None:
        """Take the values from ``computed`` where they are no parameter; for a copy, whose module is another one."""
        self._computed = weakref.WeakMethod(computed)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles: whoever makes one calls :meth:`follow`."""
        return {name: x for name, x in vars(self).items() if name != "_computed"}

    @property
    def states(self) -> OptimizerRows:
        """The optimizer's states of the rows."""
        return OptimizerRows(self.weight)

    def read(self, rows: Tensor) -> RowPart:
        """Return some rows, up to date."""
        values, states = self.states.current(rows)
        entries = self.keys.entries.index_select(0, rows)
        return RowPart(entries[:, 0].contiguous(), values, *unpacked(entries[:, 1]), states)

    def write(
        self,
        keys: Tensor,
        values: Tensor,
        frequencies: Tensor | int,
        versions: Tensor | int,
        states: Mapping[str, Tensor],
        steps: Tensor | None = None,
        *,
        make_room: Callable[[int], None],
    ) -> Tensor:
        """
        Write rows, new or not, with all that belongs to them; of a repeated key the last row counts.

        Args:
            keys: ``[N]`` int64.
            values: ``[N, D]``.
            frequencies: ``[N]`` int64, or one number for all rows.
            versions: ``[N]`` int64, or one number for all rows.
            states: ``[N, ...]`` by name; missing ones get their initial value.
            steps: the step of the optimizer up to which each row is up to date. Default: the last one.
            make_room: the argument of :meth:`KeyRows.insert`.

        Returns:
            ``[N]``: the row where a key was inserted, elsewhere -1.
        """
        weight = self.weight
        keys = keys.to(weight.device)
        # With this step as version, none of these rows is evicted to make room for the others.
        frequency, version, at_once = 0, self.step, False
        if isinstance(frequencies, int) and isinstance(versions, int):
            at_once = not self.keys.insertions and self.keys.room() >= len(keys)
            if at_once:
                frequency, version = frequencies, versions
        rows, inserted = self.keys.insert(
            keys,
            frequencies=torch.full_like(keys, frequency, dtype=torch.int32) if frequency else None,
            version=version,
            make_room=make_room,
        )
        if not (at_once and self.keys.insertions == len(keys)):
            each = (torch.as_tensor(x, device=weight.device).expand(len(keys)) for x in (frequencies, versions))
            self.keys.set_numbers(rows, packed(*each))
        ops.table_assign_(weight.data, rows, values.to(weight.device, weight.dtype))
        self.states.put(rows, states, None if steps is None else steps.to(weight.device))
        return inserted

    # ---- Sizes -------------------------------------------------------------------------------------------------------

    def resize(self, capacity: int) -> None:
        """Give the weight ``capacity`` rows, whose values are yet to be written."""
        states = self.states
        steps = states.steps()
        states.table.release()
        self.replace(new_zeros((capacity, self.weight.shape[1]), self.weight.dtype, self.weight.device))
        states.start_over([], steps, keep=True)  # an optimizer loaded before has states of that size

    def grow(self, capacity: int) -> None:
        """Grow to ``capacity`` rows; the Parameter stays the same object, and each key keeps its row."""
        weight, states = self.weight, self.states
        before = weight.shape[0]
        # Memory may run out: nothing changes until all of it is allocated.
        longer = new_zeros((capacity, weight.shape[1]), weight.dtype, weight.device)
        longer[:before] = weight.detach()
        grown = states.grown(before, capacity)
        self.keys.grow(capacity)
        self.replace(longer)
        states.take(*grown)

    def replace(self, values: Tensor) -> None:
        """
        Give the Parameter other values, perhaps with another number of rows.

        Graphs of earlier lookups give gradients of the size that the table had: :func:`_fit_gradient` resizes them.
        """
        weight = self.weight
        grad, weight.grad = weight.grad, None
        # Autograd keeps a leaf's shape as long as a graph needs it, except where the dtype changes.
        weight.data = values.new_empty(0, dtype=torch.float64 if values.dtype != torch.float64 else torch.float32)
        weight.data = values
        if grad is not None:
            _fit(grad, weight)
            weight.grad = grad

    def tend(self, growing: StepListener) -> None:
        """Register ``growing`` for optimizers' steps; the Parameter may be another object than before."""
        weight = self.weight
        table = table_of(weight)
        mark_growing(weight)
        if table.growing is None or table.growing() is not growing:
            table.growing = weakref.ref(growing)
            requires_grad = weight.requires_grad
            weight.requires_grad_(True)  # without it a table that is frozen, as a copy may be, takes no hook
            weight.register_hook(_fit_gradient(weight))
            weight.requires_grad_(requires_grad)


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
