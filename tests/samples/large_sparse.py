"""Large samples of segment reductions without indices, distinct rows, sparse tensors and shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from samples.large_sizes import SIZES, Build, Size, floats_of, generator_of, ids_of, offsets_of, segment_ids_of
from samples.sample import Sample
from torch import Tensor

from torchsparse_rec.compat._parity.reference import MAX, MEAN, SQRTN, SUM

PROD = 5
# Sizes with long segments, one row for all ids, popular rows, half types, or wide rows; their tables are not large.
CHOSEN = [size for size in SIZES if size.items >= 5_000 and size.rows < 2_000_000]


def _data(size: Size) -> Tensor:
    """Return a row for each item, near 1 so that products stay finite."""
    return (1 + torch.rand(size.items, size.dim, generator=generator_of(size)) / size.items).to(size.dtype)


def _reduce(operator: str, size: Size, reduction: int) -> tuple:
    data = _data(size)
    ids = segment_ids_of(size) if operator.startswith("segment") else ids_of(size).clone()
    count = size.segments if operator.startswith("segment") else size.rows
    if not operator.endswith("backward"):
        return (data, ids, None, count, reduction) if operator == "segment_reduce" else (data, ids, count, reduction)
    grad = torch.randn(count, size.dim, generator=generator_of(size)).to(size.dtype)
    needed = data if reduction in (MAX, PROD) else None
    if operator == "segment_reduce_backward":
        return grad, needed, None, offsets_of(size), size.items, reduction
    return grad, needed, ids, reduction


def _matrix(size: Size) -> Tensor:
    """Return the indices of a matrix of segments and rows, whose columns are not in order."""
    return torch.stack([segment_ids_of(size).long(), ids_of(size).long()], 1)


def _arguments(operator: str, size: Size) -> tuple:
    """Return the arguments of every operator except the segment reductions."""
    ids = ids_of(size)
    half = size.rows // 2
    shards = [floats_of(size, size.rows)[:half], floats_of(size, size.rows)[half:]]
    bags = (ids, offsets_of(size))
    weights = torch.rand(size.items, generator=generator_of(size)).to(size.dtype) + 0.5
    grad = floats_of(size, size.segments)
    if operator == "unique_rows":
        return (torch.stack([ids, ids // 3, ids], 1),)
    if operator == "row_ids_to_offsets":
        return segment_ids_of(size), size.segments
    if operator == "offsets_to_row_ids":
        return offsets_of(size), size.items
    if operator == "sparse_reshape":
        return _matrix(size), [size.segments, size.rows], [size.rows, size.segments]
    if operator == "sparse_reorder":
        return (_matrix(size).flip(1).contiguous(),)
    if operator == "sparse_to_dense":
        return (ids.long().unsqueeze(1), [size.rows], weights.float(), torch.tensor(-1.0), False)
    if operator == "sparse_fill_empty_rows":
        return _matrix(size), weights, size.segments + 7, torch.tensor(0.5, dtype=size.dtype)
    if operator == "sparse_fill_empty_rows_grad":
        return torch.arange(size.items) * 2, torch.rand(2 * size.items, generator=generator_of(size))
    if operator == "shard_rows":
        return torch.arange(size.items) % size.rows, [size.rows - half, half], 1, False
    if operator == "pruned_bags":
        return ids, segment_ids_of(size).flip(0).clone(), weights - 1, size.segments, size.rows, True, 0, True
    if operator == "embedding_bag_shards":
        return shards, *bags, weights, MEAN, -1, 1.5, False
    if operator == "embedding_bag_shards_weights_backward":
        return grad, shards, *bags, weights, grad.flip(0).clone(), SQRTN, -1, 1.5
    accumulator = torch.float64 if size.dtype == torch.float64 else torch.float32
    return torch.randn(size.rows, size.dim, generator=generator_of(size)).to(accumulator), shards, None, 1.5


OPERATORS = (
    "unique_rows",
    "row_ids_to_offsets",
    "offsets_to_row_ids",
    "sparse_reshape",
    "sparse_reorder",
    "sparse_to_dense",
    "sparse_fill_empty_rows",
    "sparse_fill_empty_rows_grad",
    "shard_rows",
    "pruned_bags",
    "embedding_bag_shards",
    "embedding_bag_shards_weights_backward",
    "clip_rows_backward",
)


def _sample(operator: str, size: Size, arguments: Callable[..., tuple], *more: int) -> Sample:
    return Sample(operator, str(size), arguments(operator, size, *more))


def builds_of_sparse() -> list[Build]:
    """Return a sample of each operator for each size."""
    builds = []
    for n, size in enumerate(CHOSEN):
        for operator in OPERATORS:
            builds.append(Build(f"{operator}-{size}-", partial(_sample, operator, size, _arguments)))
        reduction = (SUM, MAX, PROD, MEAN)[n % 4]
        for operator in ("segment_reduce", "unsorted_segment_reduce"):
            for name in (operator, f"{operator}_backward"):
                build = partial(_sample, name, size, _reduce, reduction)
                builds.append(Build(f"{name}-{size}-{reduction}", build))
    return builds
