"""Calls of public functions at sizes of the test's choice: each must compile once for all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from samples.compiled_sparse_tensor import COMPILED_SPARSE_TENSORS
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.ops.hash import column_ids


def _segments(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, indices and sorted segment ids of sizes that never coincide, so that no two become one symbol."""
    generator = torch.Generator().manual_seed(size)
    data = torch.randn(5 * size + 1, 2 * size + 1, generator=generator)
    indices = torch.randint(0, 5 * size + 1, (11 * size + 3,), generator=generator)
    return data, indices, torch.randint(0, 3 * size, (11 * size + 3,), generator=generator).sort().values


def bags(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data, indices, ids = _segments(size)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(ids, minlength=3 * size).cumsum(0)])
    return data, indices, offsets, torch.rand(indices.shape, generator=torch.Generator().manual_seed(1)) + 0.5


def _rows(size: int, *segments: int) -> tuple:
    """Return rows and their sorted segment ids, and the number of segments if ``segments`` is given."""
    ids = _segments(size)[2]
    data = torch.randn(ids.shape[0], 2 * size + 1, generator=torch.Generator().manual_seed(size))
    return data, ids, *(3 * size + x for x in segments)


def _forward(size: int) -> tuple[Tensor, Tensor, Tensor, int]:
    return *_segments(size), 3 * size + 4


def _backward(size: int) -> tuple[Tensor, Tensor, Tensor, int]:
    data, indices, ids = _segments(size)
    return data[: 3 * size], indices, ids, 5 * size + 1


COMPILED: dict[str, tuple[Callable, Callable[[int], tuple]]] = {
    "sparse_segment_sum": (ops.sparse_segment_sum, _forward),
    "sparse_segment_mean": (ops.sparse_segment_mean, _forward),
    "sparse_segment_sqrt_n": (ops.sparse_segment_sqrt_n, _segments),
    "sparse_segment_sum_offsets": (
        lambda data, indices, offsets: ops.sparse_segment_sum(data, indices, offsets=offsets),
        lambda size: bags(size)[:3],
    ),
    "sparse_segment_mean_grad": (ops.sparse_segment_mean_grad, _backward),
    "sparse_segment_sum_grad_v2": (
        ops.sparse_segment_sum_grad_v2,
        _backward,
    ),
    "segment_prod": (ops.segment_prod, lambda size: _rows(size, 7)),
    "segment_max_offsets": (
        lambda data, offsets: ops.segment_max(data, offsets=offsets),
        lambda size: (_rows(size)[0], bags(size)[2]),
    ),
    "segment_mean": (ops.segment_mean, _rows),
    "unsorted_segment_min": (
        lambda data, ids: ops.unsorted_segment_min(data, ids, 2 * data.shape[1]),
        lambda size: (_rows(size)[0], _segments(size)[1] - 2 * size - 4),
    ),
    "unique": (ops.unique, lambda size: (_segments(size)[1],)),
    "unique_with_counts": (ops.unique_with_counts, lambda size: (_segments(size)[1],)),
    "unique_rows": (lambda x: ops.unique_with_counts(x, dim=1), lambda size: ((_segments(size)[0] > 1).long(),)),
    "to_hash_bucket_fast": (lambda x: ops.to_hash_bucket_fast(x, 1000), lambda size: (_segments(size)[1],)),
    "string_to_hash_bucket_fast": (
        lambda text, offsets: torch.ops.torchsparse_rec.string_to_hash_bucket_fast.default(text, offsets, 1000),
        lambda size: (torch.arange(7 * size, dtype=torch.uint8), torch.arange(0, 7 * size, 3)),
    ),
    "to_hash_bucket_strong": (lambda x: ops.to_hash_bucket_strong(x, 9, (1, 2)), lambda size: (_segments(size)[1],)),
    "fingerprint64": (ops.fingerprint64, lambda size: (_segments(size)[1],)),
    "column_ids": (
        lambda x, y: column_ids([x, y], [1000, 0], [1, 2]),
        lambda size: (torch.arange(-2, 3 * size), torch.arange(6 * size).reshape(3 * size, 2) - 5),
    ),
    "cross_hashed": (
        lambda x, values, offsets: ops.cross_hashed([x, (values, offsets)], 1000),
        lambda size: (torch.arange(3 * size), *bags(size)[1:3]),
    ),
    "cross_hashed_matrices": (
        lambda x, y: ops.cross_hashed([x, y], 1000),
        lambda size: (torch.arange(3 * size), torch.arange(6 * size).reshape(3 * size, 2)),
    ),
    **COMPILED_SPARSE_TENSORS,
    "embedding": (lambda weight, ids: ops.embedding(weight, ids, padding_idx=1), lambda size: _segments(size)[:2]),
    "embedding_bag_mean": (
        lambda weight, ids, offsets, w: ops.embedding_bag(weight, ids, offsets, per_sample_weights=w, mode="mean"),
        bags,
    ),
    "embedding_bag_max": (
        lambda weight, ids, offsets: ops.embedding_bag(weight, ids, offsets, mode="max", scale_grad_by_freq=True),
        lambda size: bags(size)[:3],
    ),
    "embedding_lookup": (
        lambda one, two, ids: ops.embedding_lookup([one, two], ids, partition_strategy="div", max_norm=1.0),
        lambda size: (_segments(size)[0], *_segments(size)[:2]),
    ),
    "embedding_lookup_sparse": (
        lambda weight, ids, rows, n: ops.embedding_lookup_sparse(weight, ids, rows, num_rows=n, combiner="sqrtn"),
        _forward,
    ),
    "safe_embedding_lookup_sparse": (
        lambda one, ids, offsets, w: ops.safe_embedding_lookup_sparse(
            [one, 2 * one], ids - 1, offsets=offsets, weights=w, default_id=1, max_norm=1.0
        ),
        bags,
    ),
}
