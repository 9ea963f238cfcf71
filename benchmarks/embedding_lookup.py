"""
Benchmark rows of TensorFlow's lookups: sparse ids combined by row, the safe form, and a training step of it.

TensorFlow's step is compiled by tf.function. It updates the table by a scatter of the IndexedSlices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchsparse_rec import ops
from torchsparse_rec.ops.row_update import RowRule, row_update_

from .ids import SPREADS
from .rows import Case, Make, Options, Row, tensorflow

RATE = 0.01


@dataclass(frozen=True)
class Problem:
    """A table, and ids in the rows of a batch."""

    table: Tensor  # [V, D]
    ids: Tensor  # [N]
    indices: Tensor  # [N, 2]: row and column of each id
    offsets: Tensor  # [rows + 1]
    grad: Tensor  # [rows, D]

    @property
    def rows(self) -> int:
        """The number of rows in the batch."""
        return len(self.offsets) - 1


def problem(options: Options, spread: str) -> Problem:
    """Make a table 1M x 64, and 1M ids in 100k rows; small ones in quick mode."""
    size, rows, dim = options.size(1_000_000, 4_000), options.size(100_000, 400), 64
    device = options.device
    row_ids = torch.randint(0, rows, (size,), device=device).sort().values
    row_ids[-1] = rows - 1  # TensorFlow drops empty rows at the end.
    columns = torch.zeros_like(row_ids)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return Problem(
        torch.randn(size, dim, device=device),
        SPREADS[spread](size, size, device),
        torch.stack([row_ids, columns], 1),
        torch.cat([zero, torch.bincount(row_ids, minlength=rows).cumsum(0)]),
        torch.randn(rows, dim, device=device),
    )


def ours(p: Problem, safe: bool) -> Make:
    """Return a call of our lookup."""
    lookup = ops.safe_embedding_lookup_sparse if safe else ops.embedding_lookup_sparse
    return lambda: lambda: lookup(p.table, p.ids, p.indices[:, 0], num_rows=p.rows)


def torch_bag(p: Problem) -> Make:
    """Return a call of torch's pooled lookup. It needs offsets, which are made beforehand."""
    return lambda: lambda: functional.embedding_bag(p.ids, p.table, p.offsets, mode="mean", include_last_offset=True)


def _tensorflow_ids(tf: Any, p: Problem) -> Any:
    return tf.SparseTensor(p.indices.cpu().numpy(), p.ids.cpu().numpy(), [p.rows, 1])


def tensorflow_lookup(p: Problem, options: Options, safe: bool) -> Make:
    """Return a call of TensorFlow's lookup in a variable."""

    def make() -> Callable:
        tf = tensorflow(options)
        table, ids = tf.Variable(p.table.numpy()), _tensorflow_ids(tf, p)
        lookup = tf.nn.safe_embedding_lookup_sparse if safe else tf.nn.embedding_lookup_sparse
        return lambda: lookup(table, ids, None, combiner="mean")

    return make


def our_step(p: Problem) -> Make:
    """Return a call of our training step: lookup, sparse gradient, and SGD on its rows."""

    def make() -> Callable:
        table = torch.nn.Parameter(p.table.clone())

        def step() -> Tensor:
            pooled = ops.embedding_lookup_sparse(table, p.ids, p.indices[:, 0], num_rows=p.rows, sparse=True)
            (grad,) = torch.autograd.grad(pooled, table, p.grad)
            with torch.no_grad():
                row_update_(RowRule.GRADIENT_DESCENT, [table], grad._values(), grad._indices()[0], [RATE])
            return table.detach()

        return step

    return make


def torch_step(p: Problem) -> Make:
    """Return a call of torch's training step."""

    def make() -> Callable:
        table = torch.nn.Parameter(p.table.clone())
        optimizer = torch.optim.SGD([table], lr=RATE)

        def step() -> Tensor:
            pooled = functional.embedding_bag(
                p.ids, table, p.offsets, mode="mean", include_last_offset=True, sparse=True
            )
            pooled.backward(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            return table.detach()

        return step

    return make


def tensorflow_step(p: Problem, options: Options) -> Make:
    """Return a call of TensorFlow's training step."""

    def make() -> Callable:
        tf = tensorflow(options)
        table, ids, upstream = tf.Variable(p.table.numpy()), _tensorflow_ids(tf, p), tf.constant(p.grad.numpy())

        @tf.function
        def step() -> Any:
            with tf.GradientTape() as tape:
                pooled = tf.nn.embedding_lookup_sparse(table, ids, None, combiner="mean")
            grad = tape.gradient(pooled, table, output_gradients=upstream)
            return table.scatter_sub(tf.IndexedSlices(grad.values * RATE, grad.indices))

        return step

    return make


def row(spread: str, kind: str) -> Row:
    """Make a benchmark row of a ``kind``: ``lookup``, ``safe`` or ``step``."""

    def build(options: Options) -> Case:
        p = problem(options, spread)
        mine = our_step(p) if kind == "step" else ours(p, kind == "safe")
        torchs = torch_step(p) if kind == "step" else torch_bag(p)
        theirs = tensorflow_step(p, options) if kind == "step" else tensorflow_lookup(p, options, kind == "safe")

        def check() -> None:
            # The gradient of an often looked-up row is a sum of tens of thousands of terms.
            torch.testing.assert_close(mine()(), torchs()(), rtol=1e-5, atol=1e-4)

        rows = p.table.shape[1] * p.table.element_size()
        moved = (24 + rows) * len(p.ids) + rows * p.rows
        return Case(mine, {"TensorFlow": theirs, "torch embedding_bag": torchs}, check, moved, ids=len(p.ids))

    what = {
        "lookup": "embedding_lookup_sparse, mean, 1M x 64, 1M ids in 100k rows",
        "safe": "safe_embedding_lookup_sparse of the same",
        "step": "the same with its gradient and SGD",
    }
    targets = {"TensorFlow": 8.0} | ({"torch embedding_bag": 1.0} if kind != "step" else {})
    return Row(f"embedding_lookup/{kind}-{spread}", what[kind], build, targets=targets)


ROWS = [row(spread, kind) for spread in ("uniform", "zipf") for kind in ("lookup", "safe", "step")]
