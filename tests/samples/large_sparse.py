"""Large samples of distinct rows, sparse tensors and shards."""

from __future__ import annotations

from functools import partial

import torch
from samples.large_sizes import CHOSEN, Build, Size, floats_of, generator_of, ids_of, offsets_of, segment_ids_of
from samples.sample import Family, Sample
from torch import Tensor

from torchsparse_rec.compat._parity.reference import MEAN, SQRTN


def _matrix(size: Size) -> Tensor:
    """Return the indices of a matrix of segments and rows, whose columns are not in order."""
    return torch.stack([segment_ids_of(size).long(), ids_of(size).long()], 1)


def _arguments(operator: str, size: Size) -> tuple:
    """Return the arguments of an operator below."""
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


def _sample(operator: str, size: Size) -> Sample:
    return Sample(operator, str(size), _arguments(operator, size))


FAMILY = Family(
    large=[Build(f"{operator}-{size}-", partial(_sample, operator, size)) for size in CHOSEN for operator in OPERATORS]
)
