"""
The slow, obvious meaning of every operator in csrc/library.cpp, in plain Python and PyTorch.

Each function takes the arguments of its schema, all valid, and returns the results (of a mutating operator also
what the written arguments must hold, which come last). Half types are accumulated in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import reference_embedding_collection
import reference_embedding_lookup
import reference_hash
import reference_row_optimizer
import reference_table
import reference_table_rows
import torch
from reference_row_update import row_update
from reference_segment_rows import (
    segment_reduce,
    segment_reduce_backward,
    unsorted_segment_reduce,
    unsorted_segment_reduce_backward,
)
from reference_sparse_tensor import SPARSE_TENSOR_REFERENCES
from torch import Tensor

SUM, MEAN, SQRTN, MAX = range(4)


def _accumulator(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# ---- segment --------------------------------------------------------------------------------------------------------


def _segment_scale(count: int, reduction: int) -> float:
    return {SUM: 1.0, MEAN: 1.0 / count, SQRTN: 1.0 / math.sqrt(count)}[reduction]


def sparse_segment_reduce(
    data: Tensor, indices: Tensor, segment_ids: Tensor, num_segments: int | None, reduction: int
) -> Tensor:
    ids = segment_ids.tolist()
    if num_segments is None:
        num_segments = ids[-1] + 1 if ids else 0
    values = _accumulator(data)
    out = values.new_zeros(num_segments, *data.shape[1:])
    for index, segment in zip(indices.tolist(), ids, strict=True):
        out[segment] += values[index]
    for segment in set(ids):
        out[segment] *= _segment_scale(ids.count(segment), reduction)
    return out.to(data.dtype)


def sparse_segment_reduce_grad(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, reduction: int
) -> Tensor:
    ids = segment_ids.tolist()
    values = _accumulator(grad)
    out = values.new_zeros(output_dim0, *grad.shape[1:])
    for index, segment in zip(indices.tolist(), ids, strict=True):
        out[index] += _segment_scale(ids.count(segment), reduction) * values[segment]
    return out.to(grad.dtype)


def sparse_segment_reduce_grad_out(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, output_dim0: int, reduction: int, out: Tensor
) -> Tensor:
    return sparse_segment_reduce_grad(grad, indices, segment_ids, output_dim0, reduction)


def sparse_segment_reduce_grad_v2(
    grad: Tensor, indices: Tensor, segment_ids: Tensor, dense_output_dim0: int, reduction: int
) -> tuple[Tensor, Tensor]:
    rows = torch.tensor(sorted(set(indices.tolist())), dtype=indices.dtype, device=indices.device)
    dense = sparse_segment_reduce_grad(grad, indices, segment_ids, dense_output_dim0, reduction)
    return dense[rows.long()], rows


def sparse_segment_reduce_grad_v2_out(
    grad: Tensor,
    indices: Tensor,
    segment_ids: Tensor,
    dense_output_dim0: int,
    reduction: int,
    values: Tensor,
    rows: Tensor,
) -> tuple[Tensor, Tensor]:
    return sparse_segment_reduce_grad_v2(grad, indices, segment_ids, dense_output_dim0, reduction)


# ---- unique ---------------------------------------------------------------------------------------------------------


def unique(x: Tensor) -> tuple[Tensor, Tensor]:
    values, inverse, _ = unique_with_counts(x)
    return values, inverse


def unique_with_counts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positions: dict[int, int] = {}
    inverse = [positions.setdefault(value, len(positions)) for value in x.tolist()]
    counts = [inverse.count(u) for u in range(len(positions))]
    return (
        torch.tensor(list(positions), dtype=x.dtype, device=x.device),
        torch.tensor(inverse, dtype=torch.int64, device=x.device),
        torch.tensor(counts, dtype=torch.int64, device=x.device),
    )


def unique_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = [tuple(row.reshape(-1).tolist()) for row in x]
    first: dict[tuple, int] = {}
    for position, row in enumerate(rows):
        first.setdefault(row, position)
    inverse = [list(first).index(row) for row in rows]
    counts = [inverse.count(u) for u in range(len(first))]
    return tuple(
        torch.tensor(part, dtype=torch.int64, device=x.device) for part in (list(first.values()), inverse, counts)
    )


# ---- embedding ------------------------------------------------------------------------------------------------------


def embedding(weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool, sparse: bool) -> Tensor:
    rows = [weight[index] for index in indices.flatten().tolist()]
    picked = torch.stack(rows) if rows else weight.new_zeros(0, weight.shape[1])
    return picked.reshape(*indices.shape, weight.shape[1])


def _bags(indices: Tensor, offsets: Tensor | None, padding_idx: int) -> Iterator[list[int]]:
    """The positions of each bag, without those of ``padding_idx``."""
    bounds = list(range(indices.shape[0] + 1)) if offsets is None else offsets.tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        yield [i for i in range(begin, end) if padding_idx < 0 or int(indices[i]) != padding_idx]


def _denominator(weights: list[Tensor], mode: int) -> Tensor | float:
    """What a bag's weighted sum is divided by."""
    if mode == SUM:
        return 1.0
    total: Tensor | float = 0.0
    for w in weights:
        total = total + (w if mode == MEAN else w * w)
    return total if mode == MEAN else total**0.5


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> tuple[Tensor, Tensor]:
    table = _accumulator(weight)
    weights = torch.ones_like(indices, dtype=table.dtype) if per_sample_weights is None else per_sample_weights
    weights = _accumulator(weights)
    output = table.new_zeros(offsets.shape[0] - 1, weight.shape[1])
    argmax = torch.full(output.shape, -1, dtype=torch.int64, device=weight.device)
    for bag, positions in enumerate(_bags(indices, offsets, padding_idx)):
        if mode == MAX:
            for i in positions:
                row, best = table[int(indices[i])], output[bag]
                wins = (argmax[bag] < 0) | (row > best) | (row.isnan() & ~best.isnan())
                output[bag] = torch.where(wins, row, best)
                argmax[bag] = torch.where(wins, i, argmax[bag])
            continue
        for i in positions:
            output[bag] += weights[i] * table[int(indices[i])]
        denominator = _denominator([weights[i] for i in positions], mode)
        output[bag] = output[bag] / denominator if denominator != 0 else torch.zeros_like(output[bag])
    return output.to(weight.dtype), argmax if mode == MAX else argmax.new_empty(0)


def embedding_dense_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    num_embeddings: int,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Tensor:
    values = _accumulator(grad)
    weights = torch.ones_like(indices, dtype=values.dtype) if per_sample_weights is None else per_sample_weights
    weights = _accumulator(weights)
    out = values.new_zeros(num_embeddings, grad.shape[1])
    entries = [0] * num_embeddings
    for bag, positions in enumerate(_bags(indices, offsets, padding_idx)):
        denominator = 1.0 if mode == MAX else _denominator([weights[i] for i in positions], mode)
        for i in positions:
            row = int(indices[i])
            entries[row] += 1
            if mode == MAX:
                out[row] += torch.where(argmax[bag] == i, values[bag], 0.0)
            elif denominator != 0:
                out[row] += weights[i] / denominator * values[bag]
    if scale_grad_by_freq:
        for row, count in enumerate(entries):
            out[row] /= max(count, 1)
    return out.to(grad.dtype)


def embedding_sparse_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    argmax: Tensor | None,
    num_embeddings: int,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> tuple[Tensor, Tensor]:
    entries = sorted({int(i) for i in indices.tolist() if padding_idx < 0 or i != padding_idx})
    rows = torch.tensor(entries, dtype=torch.int64, device=grad.device)
    dense = embedding_dense_backward(
        grad, indices, offsets, per_sample_weights, argmax, num_embeddings, mode, padding_idx, scale_grad_by_freq
    )
    return dense[rows], rows


def embedding_weights_backward(
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor,
    output: Tensor,
    mode: int,
    padding_idx: int,
) -> Tensor:
    grad, table, weights, output = map(_accumulator, (grad, weight, per_sample_weights, output))
    result = torch.zeros_like(weights)
    for bag, positions in enumerate(_bags(indices, offsets, padding_idx)):
        q = _denominator([weights[i] for i in positions], mode)
        if q == 0:
            continue
        for i in positions:
            x = table[int(indices[i])]
            if mode == SUM:
                result[i] = grad[bag] @ x
            elif mode == MEAN:
                result[i] = grad[bag] @ (x - output[bag]) / q
            else:
                result[i] = (grad[bag] @ x - grad[bag] @ output[bag] * weights[i] / q) / q
    return result.to(weight.dtype)


REFERENCES: dict[str, Callable] = {
    function.__name__: function
    for function in (
        sparse_segment_reduce,
        sparse_segment_reduce_grad,
        sparse_segment_reduce_grad_out,
        sparse_segment_reduce_grad_v2,
        sparse_segment_reduce_grad_v2_out,
        segment_reduce,
        segment_reduce_backward,
        unsorted_segment_reduce,
        unsorted_segment_reduce_backward,
        unique,
        unique_with_counts,
        *reference_hash.OPERATORS,
        unique_rows,
        embedding,
        embedding_bag,
        embedding_dense_backward,
        embedding_sparse_backward,
        embedding_weights_backward,
        row_update,
        *reference_row_optimizer.FUNCTIONS,
        *reference_embedding_lookup.FUNCTIONS,
        *reference_embedding_collection.FUNCTIONS,
        *reference_table.FUNCTIONS,
        *reference_table_rows.FUNCTIONS,
    )
}
REFERENCES |= SPARSE_TENSOR_REFERENCES
