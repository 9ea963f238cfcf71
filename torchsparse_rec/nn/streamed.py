"""
The gradient of a table's rows that losses over all of them give, block by block, so that it is never there whole.

Backwards step each block when it is asked for, together with what lookups of the table have brought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.scores_passes import Backward, Factors, Passes, Samples
from ..tables.layouts import accumulator_dtype
from ..tables.table import Gradient, Table

__all__ = ["Deferred", "blocks", "lock_of", "rows_of"]

_ops = torch.ops.torchsparse_rec


class Deferred(NamedTuple):
    """A loss whose backward has run, but for the step of the rows."""

    of: Samples
    factors: Callable[[Passes], Factors]
    passes: Callable[[Samples, int], Passes] = Passes

    def backward(self, rows: int, wants_input: bool = False, wants_bias: bool = False) -> Backward:
        """Return the passes that make its gradients."""
        passes = self.passes(self.of, rows)
        return Backward(passes, self.factors(passes), wants_input, wants_bias)


def lock_of(table: Table) -> AbstractContextManager:
    """Return the lock to hold while :func:`rows_of` is used: other threads may flush the rows."""
    return nullcontext() if table.rows is None else table.rows.clock.lock


def rows_of(table: Table) -> Callable[[int, int], Tensor]:
    """Return a function that returns a block of rows, those that are stale in a copy that is up to date."""
    stored, states = table.weight(), table.rows
    if states is None or not table.is_stale():
        return lambda begin, end: stored[begin:end]
    clock = states.clock
    clock.refuse_capture()
    steps = clock.rule, clock.hyperparameters, clock.step, clock.base

    def current(begin: int, end: int) -> Tensor:
        rows = torch.arange(begin, end, device=stored.device)
        return _ops.row_optimizer_current.default(  # type: ignore[no-any-return]
            stored, states.states, states.last_step, clock.history, rows, *steps
        )

    return current


def blocks(losses: Sequence[Backward], table: Table, added: Gradient | None = None) -> Iterator[tuple[int, Tensor]]:
    """
    Yield blocks of the rows' gradient: the number of its first row, and its values, which the next block overwrites.

    A block's rows are read before it is yielded, and no more after it.

    Args:
        losses: the losses that the gradient is of. Each makes its other gradients as well.
        table: the table.
        added: the sum of what lookups have brought.
    """
    stored, read = table.weight(), rows_of(table)
    size, count = min(loss.size for loss in losses), stored.shape[0]
    sums, part = stored.new_empty(2, size, stored.shape[1], dtype=accumulator_dtype(stored.dtype))
    begins, bounds = range(0, count, size), [0]
    if added is not None:
        assert added.rows is not None
        # On CUDA this waits for the device: the blocks' shares of the lookups' rows have sizes of their own.
        bounds += torch.searchsorted(added.rows, torch.arange(size, count + size, size, device=stored.device)).tolist()
    for number, begin in enumerate(begins):
        end = min(begin + size, count)
        grad, rows = sums[: end - begin], read(begin, end)
        losses[0].block(rows, begin, end, grad)
        for loss in losses[1:]:
            loss.block(rows, begin, end, part[: end - begin])
            grad += part[: end - begin]
        if added is not None and added.rows is not None:
            its = slice(bounds[number], bounds[number + 1])
            grad.index_add_(0, added.rows[its] - begin, added.values[its].to(grad.dtype))
        yield begin, grad
