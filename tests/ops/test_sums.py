"""Float32 sums of rows: how far they may be from the exact sums, also where one row is added many times."""

from __future__ import annotations

import math

import pytest
import torch
from samples.sample import Random
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import MAX, MEAN, SQRTN, SUM

EPS = 2.0**-23
COUNTS = (5, 16, 17, 100, 257, 1000, 100_000)
# Numbers of columns that fill whole registers, and others.
DIMS = (1, 3, 20, 147)


def _counts(kernels: str) -> tuple[int, ...]:
    return COUNTS if kernels == "cpu" else COUNTS[:-1]


def _row(dim: int) -> Tensor:
    """Return multiples of 0.1, which float32 cannot hold exactly."""
    return 0.1 * torch.arange(1, dim + 1, dtype=torch.float32)


def _assert_bounded(actual: Tensor, terms: Tensor, count: int, by: float = 1.0) -> None:
    """Check the sum of ``count`` equal terms, over ``by``, against its bound; ``terms`` are in float64."""
    error = (actual.double() - terms * (count / by)).abs()
    allowed = EPS * math.sqrt(count) * (terms * (count / by)).abs()
    assert bool((error <= allowed).all()), float((error / allowed).max())


@pytest.mark.parametrize("dim", DIMS)
def test_one_row_many_times(dim: int, kernels: str) -> None:
    row = _row(dim)
    for count in _counts(kernels):
        indices, ids = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
        offsets = torch.tensor([0, count])
        for reduce, by in (
            (ops.sparse_segment_sum, 1.0),
            (ops.sparse_segment_mean, count),
            (ops.sparse_segment_sqrt_n, math.sqrt(count)),
        ):
            _assert_bounded(reduce(row[None], indices, ids)[0], row.double(), count, by)
        for mode, by in (("sum", 1.0), ("mean", count)):
            _assert_bounded(ops.embedding_bag(row[None], indices, offsets, mode=mode)[0], row.double(), count, by)
        rows = row.expand(count, dim)
        _assert_bounded(ops.segment_sum(rows, ids)[0], row.double(), count)
        _assert_bounded(ops.unsorted_segment_sum(rows, ids, 1)[0], row.double(), count)


@pytest.mark.parametrize("weight", [0.1, 0.7])
def test_one_weighted_row_many_times(weight: float, kernels: str) -> None:
    row = _row(20)
    for count in _counts(kernels):
        indices, offsets = torch.zeros(count, dtype=torch.int64), torch.tensor([0, count])
        weights = torch.full((count,), weight)
        terms = row.double() * weights[0].double()
        for mode, by in ((SUM, 1.0), (MEAN, count * weights[0].double().item())):
            operator = torch.ops.torchsparse_rec.embedding_bag.default
            out = operator(row[None], indices, offsets, weights, mode, -1, False, False)[0]
            _assert_bounded(out[0], terms, count, by)
        for max_norm in (-1.0, 1e6):
            shards = [row[None], row[None]]
            out = torch.ops.torchsparse_rec.embedding_bag_shards.default(
                shards, indices, offsets, weights, MEAN, -1, max_norm, False
            )
            _assert_bounded(out[0], terms, count, count * weights[0].double().item())


@pytest.mark.parametrize("mode", [SUM, MEAN, SQRTN, MAX])
def test_a_row_that_all_bags_share(mode: int, kernels: str) -> None:
    """Add up the gradient of that row, which has as many equal terms as there are bags."""
    grad_row = _row(20)
    for count in _counts(kernels):
        indices, offsets = torch.zeros(count, dtype=torch.int64), torch.arange(count + 1)
        grad = grad_row.expand(count, 20).contiguous()
        argmax = torch.arange(count).reshape(-1, 1).expand(count, 20).contiguous() if mode == MAX else None
        arguments = (grad, indices, offsets, None, argmax, 1, mode, -1, False)
        operators = torch.ops.torchsparse_rec
        _assert_bounded(operators.embedding_dense_backward.default(*arguments)[0], grad_row.double(), count)
        _assert_bounded(operators.embedding_sparse_backward.default(*arguments)[0][0], grad_row.double(), count)
        if mode != MAX:
            out = operators.sparse_segment_reduce_grad.default(grad, indices, torch.arange(count), 1, mode)
            _assert_bounded(out[0], grad_row.double(), count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [5, 17, 100, 1000])
def test_infinities_stay(count: int, dtype: torch.dtype, kernels: str) -> None:
    """Keep an infinity in the first block or in the last one; two that oppose each other give NaN."""
    table = torch.ones(count, 20, dtype=dtype)
    indices, ids, offsets = torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.tensor([0, count])
    for first, last, wanted in ((math.inf, 1, math.inf), (1, -math.inf, -math.inf), (math.inf, -math.inf, math.nan)):
        table[0], table[-1] = first, last
        for out in (
            ops.sparse_segment_sum(table, indices, ids),
            ops.embedding_bag(table, indices, offsets, mode="mean"),
            ops.segment_sum(table, ids),
        ):
            torch.testing.assert_close(out, torch.full((1, 20), wanted, dtype=dtype), equal_nan=True)


def test_sums_of_a_block_are_as_always(kernels: str) -> None:
    """Add up to 16 rows one by one in their order."""
    for count in (1, 2, 15, 16):
        table = Random(count).floats(count, 20, dtype=torch.float32)
        wanted = torch.zeros(20)
        for row in table:
            wanted = wanted + row
        out = ops.sparse_segment_sum(table, torch.arange(count), torch.zeros(count, dtype=torch.int64))
        assert torch.equal(out[0], wanted)
