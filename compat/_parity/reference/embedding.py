"""Slow, obvious references of the operators on one table: reductions of :mod:`segment`, on picked rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .numbers import MAX, MEAN, MIN, SQRTN, SUM, on_tensors
from .segment import segment_reduce

#: The modes of bags, by the words that lookups take.
POOLING = {"sum": SUM, "mean": MEAN, "sqrtn": SQRTN, "max": MAX, "min": MIN}
#: Those whose elements come from one row each.
EXTREMES = (MAX, MIN)


class Entries(NamedTuple):
    """Entries that count: no padding, and no bag whose divisor is 0."""

    #: The positions of the entries in ``indices``.
    places: np.ndarray
    #: The table's row of each entry.
    rows: np.ndarray
    bags: np.ndarray
    #: The divisor of each entry's bag.
    divisors: np.ndarray
    #: The factor of each entry's row.
    factors: np.ndarray


def entries(
    indices: np.ndarray, offsets: np.ndarray | None, weights: np.ndarray | None, mode: int, padding_idx: int
) -> Entries:
    bags = np.arange(len(indices)) if offsets is None else np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    places = np.flatnonzero(indices != padding_idx)
    weights = np.ones(len(indices), np.longdouble) if weights is None else weights
    weights, bags = weights[places], bags[places]
    divisors = np.ones_like(weights)
    if mode == MEAN:
        divisors = segment_reduce(weights, bags, None, None, SUM)[bags]
    elif mode == SQRTN:
        divisors = np.sqrt(segment_reduce(weights * weights, bags, None, None, SUM))[bags]
    kept = divisors != 0
    places, divisors = places[kept], divisors[kept]
    return Entries(places, indices[places], bags[kept], divisors, weights[kept] / divisors)


def all_offsets(offsets: np.ndarray | None, indices: np.ndarray, include_last_offset: bool) -> np.ndarray | None:
    return offsets if offsets is None or include_last_offset else np.append(offsets, len(indices))


@on_tensors
def embedding(
    weight: np.ndarray, indices: np.ndarray, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> np.ndarray:
    return weight[indices]


@on_tensors
def embedding_bag(
    weight: np.ndarray,
    indices: np.ndarray,
    offsets: np.ndarray,
    per_sample_weights: np.ndarray | None,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    include_last_offset: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    offsets = offsets if include_last_offset else np.append(offsets, len(indices))
    places, rows, bags, _, factors = entries(indices, offsets, per_sample_weights, mode, padding_idx)
    size = len(offsets) - 1
    if mode not in EXTREMES:
        return segment_reduce(factors[:, None] * weight[rows], bags, None, size, SUM), np.empty(0, np.int64)
    # A NaN wins over all; among equal numbers the first wins.
    best = segment_reduce(weight[rows], bags, None, size, mode)
    argmax = np.full(best.shape, -1)
    for i, row, bag in zip(places[::-1], rows[::-1], bags[::-1], strict=True):
        wins = (weight[row] == best[bag]) | np.isnan(weight[row])
        argmax[bag] = np.where(wins, i, argmax[bag])
    return best, argmax


@on_tensors
def embedding_dense_backward(
    grad: np.ndarray,
    indices: np.ndarray,
    offsets: np.ndarray | None,
    per_sample_weights: np.ndarray | None,
    argmax: np.ndarray | None,
    num_embeddings: int,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    include_last_offset: bool = True,
) -> np.ndarray:
    offsets = all_offsets(offsets, indices, include_last_offset)
    places, rows, bags, _, factors = entries(indices, offsets, per_sample_weights, mode, padding_idx)
    received = factors[:, None] * grad[bags]
    if mode in EXTREMES and argmax is not None:
        received = np.where(argmax[bags] == places[:, None], grad[bags], 0)
    out = segment_reduce(received, rows, None, num_embeddings, SUM)
    if scale_grad_by_freq:
        counts = np.bincount(indices[indices != padding_idx], minlength=num_embeddings)
        out = out / np.maximum(counts, 1)[:, None]
    return out


@on_tensors
def embedding_sparse_backward(
    grad: np.ndarray,
    indices: np.ndarray,
    offsets: np.ndarray | None,
    per_sample_weights: np.ndarray | None,
    argmax: np.ndarray | None,
    num_embeddings: int,
    mode: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
    include_last_offset: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    offsets = all_offsets(offsets, indices, include_last_offset)
    rows = np.unique(indices[indices != padding_idx]).astype(np.int64)
    dense = embedding_dense_backward(
        grad, indices, offsets, per_sample_weights, argmax, num_embeddings, mode, padding_idx, scale_grad_by_freq
    )
    return dense[rows], rows


@on_tensors
def embedding_coo_backward(grad: np.ndarray, indices: np.ndarray, *rest: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices and the values of the COO tensor."""
    values, rows = embedding_sparse_backward(grad, indices, *rest)
    return rows[None], values


@on_tensors
def embedding_weights_backward(
    grad: np.ndarray,
    weight: np.ndarray,
    indices: np.ndarray,
    offsets: np.ndarray,
    per_sample_weights: np.ndarray,
    output: np.ndarray,
    mode: int,
    padding_idx: int,
) -> np.ndarray:
    places, rows, bags, divisors, factors = entries(indices, offsets, per_sample_weights, mode, padding_idx)
    of_row = weight[rows]
    if mode != SUM:
        of_row = of_row - output[bags] * (factors if mode == SQRTN else np.ones_like(factors))[:, None]
    result = np.zeros_like(per_sample_weights)
    result[places] = (grad[bags] * of_row).sum(1) / divisors
    return result


FUNCTIONS = (
    embedding,
    embedding_bag,
    embedding_dense_backward,
    embedding_sparse_backward,
    embedding_coo_backward,
    embedding_weights_backward,
)
