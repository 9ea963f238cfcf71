"""
Benchmark rows of the ``row_update`` family: steps of SGD and Adagrad, beside TensorFlow's and torch's.

Bytes are counted by formula: the ids, and a row of the gradient per id. Every row that occurs is read once and written
once, in the table and in the accumulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchsparse_rec.ops.row_update import RowRule, row_update_

from .ids import zipf_ids
from .rows import Call, Case, CudaTargets, Make, Options, Row, tensorflow

LEARNING_RATE = 0.01
DIM = 64


def tables(options: Options) -> tuple[Tensor, Tensor]:
    """Make a table and its accumulator."""
    rows = options.size(1_000_000, 10_000, 10_000_000)
    table = torch.randn(rows, DIM, generator=torch.Generator(options.device).manual_seed(0), device=options.device)
    return table, torch.full_like(table, 0.1)


def batch(options: Options, ids: int) -> tuple[Tensor, Tensor]:
    """Draw skewed ids, and a gradient for each."""
    rows, count = tables(options)[0].shape[0], options.size(ids, max(ids // 100, 100))
    grad = torch.randn(count, DIM, generator=torch.Generator(options.device).manual_seed(1), device=options.device)
    return zipf_ids(count, rows, options.device), grad


def sgd(table: Tensor, _: Tensor, ids: Tensor, grad: Tensor) -> Call:
    """Update the table by our gradient descent."""
    return lambda: row_update_(RowRule.GRADIENT_DESCENT, [table], grad, ids, [LEARNING_RATE])


def adagrad(table: Tensor, sums: Tensor, ids: Tensor, grad: Tensor) -> Call:
    """Update the table by our Adagrad."""
    return lambda: row_update_(RowRule.ADAGRAD, [table, sums], grad, ids, [LEARNING_RATE, 0.0])


def torch_step(make: Callable[..., torch.optim.Optimizer], table: Tensor, ids: Tensor, grad: Tensor) -> Call:
    """Return a call of torch's optimizer with a given sparse gradient. It merges rows of one id first."""
    weight = torch.nn.Parameter(table)
    optimizer = make([weight], lr=LEARNING_RATE)

    def step() -> None:
        weight.grad = torch.sparse_coo_tensor(ids.unsqueeze(0), grad, table.shape, check_invariants=False)
        optimizer.step()

    return step


def tensorflow_sgd(tf: Any, table: Any, _: Any, ids: Any, grad: Any) -> Call:
    """Update a variable as TensorFlow's GradientDescentOptimizer does."""
    rate = tf.constant(LEARNING_RATE)
    return lambda: tf.raw_ops.ResourceScatterSub(resource=table.handle, indices=ids, updates=rate * grad)


def tensorflow_adagrad(tf: Any, table: Any, sums: Any, ids: Any, grad: Any) -> Call:
    """Update a variable by TensorFlow's Adagrad operator, which loses updates when threads write to one row at once."""
    rate = tf.constant(LEARNING_RATE)
    return lambda: tf.raw_ops.ResourceSparseApplyAdagrad(
        var=table.handle, accum=sums.handle, lr=rate, grad=grad, indices=ids
    )


def check(rule: Callable[..., Call], adagrad_rule: bool) -> None:
    """Compare a small table after one step with the result of torch's operations."""
    options = Options(quick=True)
    table, sums = tables(options)
    ids, grad = batch(options, 10_000)
    if adagrad_rule:  # There are no duplicates, whose squares torch would add up before.
        ids = torch.randperm(table.shape[0], generator=torch.Generator().manual_seed(2))[: len(ids)]
    wanted, wanted_sums = table.clone(), sums.clone()
    rule(table, sums, ids, grad)()
    if adagrad_rule:
        wanted_sums[ids] += grad * grad
        grad = grad / wanted_sums[ids].sqrt()
        torch.testing.assert_close(sums, wanted_sums)
    wanted.index_add_(0, ids, grad, alpha=-LEARNING_RATE)
    torch.testing.assert_close(table, wanted, rtol=1e-4, atol=1e-4)


def row(name: str, what: str, count: int, adagrad_rule: bool, targets: dict[str, float]) -> Row:
    """Make a benchmark row for one rule and one number of ids."""
    rule, optimizer = (adagrad, torch.optim.Adagrad) if adagrad_rule else (sgd, torch.optim.SGD)
    in_tensorflow = tensorflow_adagrad if adagrad_rule else tensorflow_sgd

    def build(options: Options) -> Case:
        table, sums = tables(options)
        ids, grad = batch(options, count)

        def tensorflow_step() -> Call:
            tf = tensorflow(options)
            given, slot = tf.Variable(table.numpy()), tf.Variable(sums.numpy())
            return in_tensorflow(tf, given, slot, tf.constant(ids.numpy()), tf.constant(grad.numpy()))

        peers: dict[str, Make] = {
            "TensorFlow": tensorflow_step,
            "torch": lambda: torch_step(optimizer, table.clone(), ids, grad),
        }
        distinct = ids.unique().numel()
        written = 2 if adagrad_rule else 1
        bytes_moved = 8 * len(ids) + 4 * DIM * (len(ids) + 2 * written * distinct)
        sizes = f"{len(ids):,} ids of {distinct:,} rows, {table.shape[0]:,} x {DIM}"
        make: Make = lambda: rule(table, sums, ids, grad)  # noqa: E731
        return Case(make, peers, lambda: check(rule, adagrad_rule), bytes_moved, ids=len(ids), sizes=sizes)

    return Row(f"row_update/{name}", what, build, targets, CudaTargets())


_TARGETS = {"TensorFlow": 2.0, "torch": 1.0}
ROWS = [
    row("sgd", "gradient descent on the rows of popular ids", 1_000_000, False, _TARGETS),
    row("sgd-100k", "the same, fewer ids", 100_000, False, _TARGETS),
    row("sgd-8k", "the same, a batch's ids", 8_192, False, _TARGETS),
    row("adagrad", "Adagrad on the rows of popular ids, one after another", 1_000_000, True, _TARGETS),
    row("adagrad-100k", "the same, fewer ids", 100_000, True, _TARGETS),
    row("adagrad-8k", "the same, a batch's ids", 8_192, True, _TARGETS),
]
