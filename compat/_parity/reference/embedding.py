"""The slow, obvious meaning of the operators on one table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .numbers import MAX, MEAN, SUM, accumulator


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
    table = accumulator(weight)
    weights = torch.ones_like(indices, dtype=table.dtype) if per_sample_weights is None else per_sample_weights
    weights = accumulator(weights)
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
    values = accumulator(grad)
    weights = torch.ones_like(indices, dtype=values.dtype) if per_sample_weights is None else per_sample_weights
    weights = accumulator(weights)
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
    grad, table, weights, output = map(accumulator, (grad, weight, per_sample_weights, output))
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


FUNCTIONS = (
    embedding,
    embedding_bag,
    embedding_dense_backward,
    embedding_sparse_backward,
    embedding_weights_backward,
)
