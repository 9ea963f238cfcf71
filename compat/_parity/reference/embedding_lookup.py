"""Slow, obvious references of the operators behind TensorFlow's lookups."""

from __future__ import annotations

import numpy as np

from . import embedding
from .numbers import on_tensors


@on_tensors
def shard_rows(ids: np.ndarray, shard_sizes: list[int], strategy: int, keep_padding: bool) -> np.ndarray:
    n, total = len(shard_sizes), sum(shard_sizes)
    is_padding = keep_padding & (ids == total)
    dealt = np.where(is_padding, 0, ids)
    shards, rows = dealt % n, dealt // n
    if strategy != 0:
        # Each shard holds consecutive ids; the first shards hold one more than the others.
        sizes = [total // n + (shard < total % n) for shard in range(n)]
        shards = np.append(np.repeat(np.arange(n), sizes), 0)[dealt]
        rows = np.append(np.concatenate([np.arange(size) for size in sizes]), 0)[dealt]
    begins = np.cumsum([0, *shard_sizes[:-1]])
    return np.where(is_padding, total, begins[shards] + rows).astype(ids.dtype)


@on_tensors
def pruned_bags(
    ids: np.ndarray,
    row_ids: np.ndarray,
    weights: np.ndarray | None,
    num_bags: int,
    num_embeddings: int,
    prune_weights: bool,
    default_id: int | None,
    with_positions: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    given = np.ones(len(ids), np.longdouble) if weights is None else weights
    kept = (ids >= 0) & ((given > 0) | (not prune_weights))
    indices, given, bags = np.where(kept, ids, num_embeddings), np.where(kept, given, 0), row_ids
    if default_id is not None:  # after the ids of every bag
        is_empty = np.bincount(row_ids[kept], minlength=num_bags) == 0
        indices = np.append(indices, np.where(is_empty, default_id, num_embeddings))
        given, bags = np.append(given, is_empty), np.append(bags, np.arange(num_bags))
    order = np.argsort(bags, kind="stable")
    offsets = np.append(0, np.bincount(bags, minlength=num_bags).cumsum())
    positions = np.argsort(order)[: len(ids)] if with_positions else np.empty(0, np.int64)
    kept_weights = given[:0] if weights is None else given[order]
    return kept_weights, indices[order].astype(ids.dtype), offsets, positions


def clipped(params: list[np.ndarray], max_norm: float) -> np.ndarray:
    """Return the table, whose rows are scaled down to ``max_norm`` if they are longer."""
    table = np.concatenate(params)
    norms = np.sqrt((table * table).sum(1, keepdims=True))
    return table if max_norm < 0 else table * (max_norm / np.maximum(norms, max_norm))


@on_tensors
def embedding_bag_shards(
    params: list[np.ndarray],
    indices: np.ndarray,
    offsets: np.ndarray | None,
    per_sample_weights: np.ndarray | None,
    mode: int,
    padding_idx: int,
    max_norm: float,
    sparse: bool,
) -> np.ndarray:
    offsets = np.arange(len(indices) + 1) if offsets is None else offsets
    arguments = (indices, offsets, per_sample_weights, mode, padding_idx, False, sparse)
    return embedding.embedding_bag(clipped(params, max_norm), *arguments)[0]


@on_tensors
def embedding_bag_shards_weights_backward(
    grad: np.ndarray,
    params: list[np.ndarray],
    indices: np.ndarray,
    offsets: np.ndarray,
    per_sample_weights: np.ndarray,
    output: np.ndarray,
    mode: int,
    padding_idx: int,
    max_norm: float,
) -> np.ndarray:
    arguments = (indices, offsets, per_sample_weights, output, mode, padding_idx)
    return embedding.embedding_weights_backward(grad, clipped(params, max_norm), *arguments)


@on_tensors
def _of_rows(params: list[np.ndarray], grad: np.ndarray, rows: np.ndarray | None, max_norm: float) -> np.ndarray:
    x = np.concatenate(params)
    x = x if rows is None else x[rows]
    squares, along = ((x * y).sum(1, keepdims=True) for y in (x, grad))
    norms = np.sqrt(squares)
    result = np.where(norms < max_norm, grad, max_norm / norms * (grad - x * (along / squares)))
    return np.where((grad == 0).all(1, keepdims=True), 0, result)


def clip_rows_backward(
    grad: np.ndarray, params: list[np.ndarray], rows: np.ndarray | None, max_norm: float
) -> np.ndarray:
    return _of_rows(params, grad, rows, max_norm)  # the result has the dtype of params


FUNCTIONS = (
    shard_rows,
    pruned_bags,
    embedding_bag_shards,
    embedding_bag_shards_weights_backward,
    clip_rows_backward,
)
