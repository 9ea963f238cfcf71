"""
The gradient of a table's rows that losses over all of them give, block by block, so that it is never there whole.

Backwards step each block when it is asked for, together with what lookups of the table have brought.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops._scores_kernels import Backward, Passes, Samples
from ..tables.table import Gradient, accumulator_dtype

__all__ = ["Deferred", "blocks"]


class Deferred(NamedTuple):
    """A loss whose backward has run, but for the step of the rows."""

    of: Samples
    grad: Tensor
    maximum: Tensor
    total: Tensor

    def backward(self, rows: int, wants_input: bool = False, wants_bias: bool = False) -> Backward:
        """Return the passes that make its gradients."""
        passes = Passes(self.of, rows)
        return Backward(passes, self.grad, self.maximum, self.total, wants_input, wants_bias)


def blocks(losses: Sequence[Backward], rows: Tensor, added: Gradient | None = None) -> Iterator[tuple[int, Tensor]]:
    """
    Yield blocks of the rows' gradient: the number of its first row, and its values, which the next block overwrites.

    A block's rows are read before it is yielded, and no more after it.

    Args:
        losses: the losses that the gradient is of. Each makes its other gradients as well.
        rows: the table, ``[V, D]``.
        added: the sum of what lookups have brought.
    """
    size, count = min(loss.size for loss in losses), rows.shape[0]
    sums, part = rows.new_empty(2, size, rows.shape[1], dtype=accumulator_dtype(rows.dtype))
    begins, bounds = range(0, count, size), [0]
    if added is not None and added.rows is not None:
        # On CUDA this waits for the device: the blocks' shares of the lookups' rows have sizes of their own.
        bounds += torch.searchsorted(added.rows, torch.arange(size, count + size, size, device=rows.device)).tolist()
    for number, begin in enumerate(begins):
        end = min(begin + size, count)
        grad = sums[: end - begin]
        losses[0].block(rows[begin:end], begin, end, grad)
        for loss in losses[1:]:
            loss.block(rows[begin:end], begin, end, part[: end - begin])
            grad += part[: end - begin]
        if added is not None and added.rows is not None:
            its = slice(bounds[number], bounds[number + 1])
            grad.index_add_(0, added.rows[its] - begin, added.values[its].to(grad.dtype))
        yield begin, grad
