"""Bags of every shape that has an algorithm of its own: many short ones, long ones, empty ones, all mixed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from pairs import in_pairs, pairwise
from samples.sample import Random
from torch import Tensor

import torchsparse_rec  # noqa: F401  (it loads the operators)
from torchsparse_rec.compat._parity.reference import EXTREMES, MEAN, POOLING, REFERENCES, SQRTN, SUM
from torchsparse_rec.compat._parity.reference import embedding as reference

# Pairs of mode and weighted, each with an algorithm of its own.
WEIGHTED = [("sum", True), ("mean", True), ("sqrtn", True)]
# A case of max is one of min, too.
POOLINGS = [(mode, False) for mode in POOLING if mode != "min"] + WEIGHTED
ROWS = 40
PADDING = 7
# CUDA kernels give several short bags to one team of lanes, take bags from it that are too much for it, and cut bags of
# more than 128 entries into pieces.
LENGTHS: dict[str, list[int]] = {
    "one_each": [1] * 700,
    "empty": [0] * 300,
    "short": [0, 1, 2, 5, 0, 0, 3, 1] * 60,
    "popular_neighbours": [0, 1] * 200 + [60, 20, 5, 17] * 12 + [0, 1] * 200,
    "one_long_among_short": [1, 0, 2] * 50 + [1500] + [0, 3, 1] * 50,
    "around_the_limit": [127, 0, 128, 1, 129, 256, 257, 513],
    "long": [3000],
}
# An odd number of columns, a few 16-byte loads, and more of them than a warp has lanes.
DIMS = (3, 16, 132)


def _operator(name: str) -> Callable:
    return getattr(torch.ops.torchsparse_rec, name).default


def _bags(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, Random]:
    random = Random(seed)
    return random.integers(0, ROWS, sum(lengths), dtype=torch.int64), torch.tensor([0, *accumulate(lengths)]), random


def _quarters(random: Random, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return quarters from -2 to 2: sums without divisors are exact, and columns have equal values."""
    return (random.integers(-8, 9, *shape, dtype=torch.int64) / 4).to(dtype)


def _weights(random: Random, entries: int, mode: int, weighted: bool) -> Tensor | None:
    """Return weights from 1/4 to 2, so that no divisor comes near zero."""
    return random.integers(1, 9, entries, dtype=torch.int64).float() / 4 if weighted and mode not in EXTREMES else None


def _on(device: str, arguments: tuple) -> tuple:
    return tuple(x.to(device) if isinstance(x, Tensor) else x for x in arguments)


def _wanted(name: str, arguments: tuple) -> Tensor | tuple[Tensor, ...]:
    """Return the reference's result in float64."""
    widened = (x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)
    return REFERENCES[name](*widened)


def _assert_close(actual: Tensor, wanted: Tensor) -> None:
    # Sums of up to 1,500 products whose coefficients are rounded.
    torch.testing.assert_close(actual.cpu().double(), wanted, rtol=1e-5, atol=1e-3)


def _cases(poolings: list[tuple[str, bool]], dims: tuple[int, ...]) -> list:
    return [
        pytest.param(shape, mode, weighted, dim, id=f"{shape}-{mode}{'-weighted' if weighted else ''}-{dim}")
        for shape, (mode, weighted), dim in pairwise(LENGTHS, poolings, dims)
    ]


@pytest.mark.parametrize("shape, mode, weighted, dim", _cases(POOLINGS, DIMS))
def test_pooled_bags(shape: str, mode: str, weighted: bool, dim: int, device: str) -> None:
    indices, offsets, random = _bags(LENGTHS[shape], dim)
    weights = _weights(random, len(indices), POOLING[mode], weighted)
    table = _quarters(random, ROWS, dim)
    for number in EXTREMES if mode == "max" else (POOLING[mode],):
        arguments = (table, indices, offsets, weights, number, PADDING, False, False)
        actual = _operator("embedding_bag")(*_on(device, arguments))
        wanted = _wanted("embedding_bag", arguments)
        _assert_close(actual[0], wanted[0])
        assert torch.equal(actual[1].cpu(), wanted[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("mode", ["mean", "max"])
def test_pooled_bags_of_other_dtypes(mode: str, dtype: torch.dtype, device: str) -> None:
    indices, offsets, random = _bags(LENGTHS["one_long_among_short"], 1)
    table = _quarters(random, ROWS, 24, dtype=dtype)
    for number in EXTREMES if mode == "max" else (POOLING[mode],):
        arguments = (table, indices, offsets, None, number, PADDING, False, False)
        actual = _operator("embedding_bag")(*_on(device, arguments))
        wanted = _wanted("embedding_bag", arguments)
        torch.testing.assert_close(actual[0].cpu().double(), wanted[0], rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        assert torch.equal(actual[1].cpu(), wanted[1])


@pytest.mark.parametrize("shape, mode, weighted, dim", _cases(POOLINGS, (3, 16)))
def test_gradients_of_bags(shape: str, mode: str, weighted: bool, dim: int, device: str) -> None:
    """Compute both forms of the gradient; many entries name every row, and half of them row 5."""
    indices, offsets, random = _bags(LENGTHS[shape], dim)
    indices[::2] = 5
    weights = _weights(random, len(indices), POOLING[mode], weighted)
    grad = _quarters(random, len(offsets) - 1, dim)
    argmax = None
    if mode == "max":
        table = _quarters(random, ROWS, dim)
        argmax = reference.embedding_bag(table, indices, offsets, None, POOLING[mode], PADDING, False, False)[1]
    for by_freq in (False, True):
        arguments = (grad, indices, offsets, weights, argmax, ROWS, POOLING[mode], PADDING, by_freq)
        wanted = _wanted("embedding_dense_backward", arguments)
        _assert_close(_operator("embedding_dense_backward")(*_on(device, arguments)), wanted)
        values, rows = _operator("embedding_sparse_backward")(*_on(device, arguments))
        present = sorted(set(indices.tolist()) - {PADDING})
        assert rows.tolist() == present
        _assert_close(values, wanted[present])


@pytest.mark.parametrize("shape, mode, weighted, dim", _cases(WEIGHTED, (16, 132)))
def test_gradients_of_weights(shape: str, mode: str, weighted: bool, dim: int, device: str) -> None:
    indices, offsets, random = _bags(LENGTHS[shape], dim)
    weights = _weights(random, len(indices), POOLING[mode], weighted)
    table = _quarters(random, ROWS, dim)
    grad = _quarters(random, len(offsets) - 1, dim)
    output = reference.embedding_bag(table, indices, offsets, weights, POOLING[mode], PADDING, False, False)[0]
    arguments = (grad, table, indices, offsets, weights, output, POOLING[mode], PADDING)
    actual = _operator("embedding_weights_backward")(*_on(device, arguments))
    _assert_close(actual, _wanted("embedding_weights_backward", arguments))


@pytest.mark.parametrize("entries", [0, 1, 3, 4, 5, 1001])
@pytest.mark.parametrize("dim", DIMS)
def test_lookups(dim: int, entries: int, device: str) -> None:
    random = Random(dim)
    table = _quarters(random, ROWS, dim)
    indices = random.integers(0, ROWS, entries, dtype=torch.int64)
    actual = _operator("embedding")(*_on(device, (table, indices, -1, False, False)))
    assert torch.equal(actual.cpu(), table[indices])


SEGMENTS = {"one_each": [1] * 600, "few": [40, 0, 1], "long": [600, 1, 300]}


@in_pairs(reduction=[SUM, MEAN, SQRTN], shape=SEGMENTS, is_sorted=[True, False])
def test_gradients_of_segments(reduction: int, shape: str, is_sorted: bool, device: str) -> None:
    """Compute gradients of segments of one entry and of many, also with unsorted ids."""
    lengths = SEGMENTS[shape]
    indices, offsets, random = _bags(lengths, reduction)
    segment_ids = torch.repeat_interleave(torch.arange(len(lengths)), offsets.diff())
    if not is_sorted:
        segment_ids = segment_ids[torch.randperm(len(segment_ids), generator=random.generator)]
    grad = _quarters(random, len(lengths), 5)
    arguments = (grad, indices, segment_ids, ROWS, reduction)
    wanted = _wanted("sparse_segment_reduce_grad", arguments)
    _assert_close(_operator("sparse_segment_reduce_grad")(*_on(device, arguments)), wanted)
    values, rows = _operator("sparse_segment_reduce_grad_v2")(*_on(device, arguments))
    assert rows.tolist() == sorted(set(indices.tolist()))
    _assert_close(values, wanted[rows.cpu()])


@pytest.mark.parametrize("mode", ["sum", "sqrtn", "max"])
@pytest.mark.parametrize("shape", ["popular_neighbours", "one_long_among_short", "around_the_limit"])
def test_a_bag_has_the_same_bits_in_any_company(shape: str, mode: str, device: str) -> None:
    """Compare a bag alone, pooled by one team of threads or many, with the same bag among others, which share teams."""
    indices, offsets, random = _bags(LENGTHS[shape], 2)
    weights = None if mode == "max" else random.floats(len(indices), dtype=torch.float32)
    table = random.floats(ROWS, 8, dtype=torch.float32)
    arguments = _on(device, (table, indices, offsets, weights))
    together = _operator("embedding_bag")(*arguments, POOLING[mode], PADDING, False, False)[0].cpu()
    sizes = offsets.diff().tolist()
    for bag in [sizes.index(size) for size in set(sizes)]:
        begin, end = int(offsets[bag]), int(offsets[bag + 1])
        one = (
            table,
            indices[begin:end],
            torch.tensor([0, end - begin]),
            None if weights is None else weights[begin:end],
        )
        alone = _operator("embedding_bag")(*_on(device, one), POOLING[mode], PADDING, False, False)[0].cpu()
        assert torch.equal(alone[0].view(torch.int32), together[bag].view(torch.int32)), bag


@pytest.mark.parametrize("mode, weighted", [("sum", False), ("sum", True), ("mean", False), ("sqrtn", True)])
@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_columns_have_the_same_bits_in_any_company(dim: int, mode: str, weighted: bool) -> None:
    """Compare numbers of columns for which the CPU has loops of their own with the same columns among others."""
    lengths = [*range(40)] * 2 + [0, 255, 256, 257, 0, 272, 273, 512, 513, 1500, 0]
    indices, offsets, random = _bags(lengths, dim)
    weights = random.floats(len(indices), dtype=torch.float32) if weighted else None
    table = random.floats(5000, 132, dtype=torch.float32)

    def pooled(rows: int, columns: int, padding: int) -> Tensor:
        arguments = (table[:rows, :columns], indices, offsets, weights, POOLING[mode], padding, False, False)
        return _operator("embedding_bag")(*arguments)[0][:, :dim].view(torch.int32)

    for padding in (-1, PADDING, ROWS):  # none, some, and one that no entry has
        wanted = pooled(5000, 132, padding)
        for rows in (ROWS, 5000):  # of a table that caches hold, and of one whose rows are fetched ahead
            assert torch.equal(pooled(rows, dim, padding), wanted), (rows, padding)


@pytest.mark.parametrize("mode", ["mean", "sqrtn"])
@pytest.mark.parametrize("weights", [[1e-39, 0.0], [torch.inf, 1.0], [3e38, 3e38], [0.0, 0.0], [1.0, -1.0]], ids=str)
def test_gradients_of_extreme_weights_are_the_formulas(weights: list[float], mode: str, device: str) -> None:
    """Divide by denominators that are zero, tiny, or overflow: the result may be infinite or NaN."""
    grad, table = torch.ones(1, 1), torch.tensor([[1.0], [2.0]])
    indices, offsets, w = torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor(weights)

    def in_float32(function: Callable, *arguments: object) -> Tensor:
        # The reference widens tensors, but not arrays; the denominators here must overflow in float32.
        arrays = [x.numpy() if isinstance(x, Tensor) else x for x in arguments]
        result = function(*arrays)
        return torch.from_numpy(result[0] if isinstance(result, tuple) else result)

    output = in_float32(reference.embedding_bag, table, indices, offsets, w, POOLING[mode], -1, False, False)
    bag = (grad, indices, offsets, w, None, 2, POOLING[mode], -1, False)
    actual = _operator("embedding_dense_backward")(*_on(device, bag))
    torch.testing.assert_close(actual.cpu(), in_float32(reference.embedding_dense_backward, *bag), equal_nan=True)
    entries = (grad, table, indices, offsets, w, output, POOLING[mode], -1)
    actual = _operator("embedding_weights_backward")(*_on(device, entries))
    torch.testing.assert_close(actual.cpu(), in_float32(reference.embedding_weights_backward, *entries), equal_nan=True)


@pytest.mark.parametrize("entries", [1, 50, 3000])
def test_more_rows_and_segments_than_a_block_takes(entries: int, device: str) -> None:
    random = Random(entries)
    rows = 10_000
    indices = random.integers(0, rows, entries, dtype=torch.int64)
    segment_ids = random.integers(0, rows, entries, dtype=torch.int64).sort().values
    grad, data = _quarters(random, rows, 2), _quarters(random, rows, 2)
    summed = _operator("sparse_segment_reduce")(*_on(device, (data, indices, segment_ids, rows, SUM)))
    wanted = torch.zeros(rows, 2).index_add_(0, segment_ids, data[indices])
    assert torch.equal(summed.cpu(), wanted)
    backward = _operator("sparse_segment_reduce_grad")(*_on(device, (grad, indices, segment_ids, rows, SUM)))
    wanted = torch.zeros(rows, 2).index_add_(0, indices, grad[segment_ids])
    assert torch.equal(backward.cpu(), wanted)
