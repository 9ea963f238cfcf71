"""The slow, obvious meaning of the operators behind TensorFlow's lookups."""

from __future__ import annotations

import torch
from torch import Tensor

from . import embedding
from .numbers import accumulator


def shard_rows(ids: Tensor, shard_sizes: list[int], strategy: int, keep_padding: bool) -> Tensor:
    n, total = len(shard_sizes), sum(shard_sizes)
    # Deal the ids out; what is beyond the table has no shard.
    places: dict[int, tuple[int, int]] = {}
    if strategy == 0:
        places = {i: (i % n, i // n) for i in range(n * max(shard_sizes))}
    else:
        i = 0
        for shard in range(n):
            for row in range(total // n + (shard < total % n)):
                places[i] = shard, row
                i += 1
    result = []
    for i in ids.flatten().tolist():
        shard, row = (0, i) if keep_padding and i == total else places[i]
        result.append(sum(shard_sizes[:shard]) + row)
    return torch.tensor(result, dtype=ids.dtype, device=ids.device).reshape(ids.shape)


def pruned_bags(
    ids: Tensor,
    row_ids: Tensor,
    weights: Tensor | None,
    num_bags: int,
    num_embeddings: int,
    prune_weights: bool,
    default_id: int | None,
    with_positions: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    indices: list[int] = []
    kept_weights: list[float] = []
    offsets = [0]
    positions = [0] * len(ids)
    for bag in range(num_bags):
        empty = True
        for i in [i for i in range(len(ids)) if int(row_ids[i]) == bag]:
            weight = 1.0 if weights is None else float(weights[i])
            kept = int(ids[i]) >= 0 and not (prune_weights and not weight > 0)
            empty = empty and not kept
            positions[i] = len(indices)
            indices.append(int(ids[i]) if kept else num_embeddings)
            kept_weights.append(weight if kept else 0.0)
        if default_id is not None:
            indices.append(default_id if empty else num_embeddings)
            kept_weights.append(1.0 if empty else 0.0)
        offsets.append(len(indices))
    where = ids.device
    return (
        torch.empty(0) if weights is None else torch.tensor(kept_weights, dtype=weights.dtype, device=where),
        torch.tensor(indices, dtype=ids.dtype, device=where),
        torch.tensor(offsets, device=where),
        torch.tensor(positions if with_positions else [], dtype=torch.int64, device=where),
    )


def _clipped_table(params: list[Tensor], max_norm: float) -> Tensor:
    """In the accumulator's dtype."""
    table = accumulator(torch.cat(params))
    if max_norm < 0:
        return table
    norms = torch.stack([sum((x * x for x in row), row.new_zeros(())).sqrt() for row in table]) if len(table) else 0
    return torch.stack(
        [row * (max_norm / max(float(n), max_norm) if max_norm > 0 or n > 0 else torch.nan)
         for row, n in zip(table, norms, strict=True)]
    ) if len(table) else table  # fmt: skip


def embedding_bag_shards(
    params: list[Tensor],
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: int,
    padding_idx: int,
    max_norm: float,
    sparse: bool,
) -> Tensor:
    table = _clipped_table(params, max_norm)
    offsets = torch.arange(len(indices) + 1) if offsets is None else offsets
    weights = None if per_sample_weights is None else per_sample_weights.to(table.dtype)
    pooled, _ = embedding.embedding_bag(table, indices, offsets, weights, mode, padding_idx, False, False)
    return pooled.to(params[0].dtype)


def embedding_bag_shards_weights_backward(
    grad: Tensor,
    params: list[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor,
    output: Tensor,
    mode: int,
    padding_idx: int,
    max_norm: float,
) -> Tensor:
    table = _clipped_table(params, max_norm)
    arguments = (per_sample_weights, output, mode, padding_idx)
    return embedding.embedding_weights_backward(grad, table, indices, offsets, *arguments).to(grad.dtype)


def clip_rows_backward(grad: Tensor, params: list[Tensor], rows: Tensor | None, max_norm: float) -> Tensor:
    table = accumulator(torch.cat(params))
    result = torch.zeros_like(grad)
    for u, row in enumerate(range(len(table)) if rows is None else rows.tolist()):
        g, x = grad[u], table[row]
        norm = (x @ x).sqrt()
        if bool((g == 0).all()):
            continue
        result[u] = g if norm < max_norm else max_norm / norm * (g - x * ((x @ g) / (x @ x)))
    return result.to(params[0].dtype)


FUNCTIONS = (
    shard_rows,
    pruned_bags,
    embedding_bag_shards,
    embedding_bag_shards_weights_backward,
    clip_rows_backward,
)
