"""One-hot, multi-hot and count vectors of ids, strided or sparse, as Keras's layers make them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensorflow import RaggedTensor, SparseTensor
from ..tensorflow.tensors import as_values

ENCODINGS = ("one_hot", "multi_hot", "count")


class Entries(NamedTuple):
    """Bins, and the row of the result that each belongs to."""

    rows: Tensor
    bins: Tensor
    #: The shape of the result's rows: its shape without the last dimension.
    shape: tuple[int, ...]
    #: The weight of each entry. None: 1.
    weights: Tensor | None = None


def one_hot_entries(bins: Tensor) -> Entries:
    """Give every entry a row of its own; a last dimension of 1 is dropped."""
    if bins.dim() == 0:
        bins = bins.unsqueeze(0)
    if bins.dim() > 1 and bins.shape[-1] == 1:
        bins = bins.squeeze(-1)
    return Entries(torch.arange(bins.numel(), device=bins.device), bins.reshape(-1), tuple(bins.shape))


def reduced_entries(bins: Tensor) -> Entries:
    """Make entries along dimension 1 share a row; all entries of a vector or scalar share one."""
    if bins.dim() < 2:
        return Entries(torch.zeros_like(bins, dtype=torch.int64).reshape(-1), bins.reshape(-1), ())
    shape = (bins.shape[0], *bins.shape[2:])
    rows = torch.arange(math.prod(shape), device=bins.device).reshape(shape).unsqueeze(1).expand(bins.shape)
    return Entries(rows.reshape(-1), bins.reshape(-1), shape)


def encoded(entries: Entries, depth: int, counts_all: bool, dtype: torch.dtype, sparse: bool) -> Any:
    """Write into each entry's bin a one, the number of entries or the sum of their weights; skip bins out of range."""
    inside = (entries.bins >= 0) & (entries.bins < depth)
    rows, bins, weights = entries.rows, entries.bins, entries.weights
    if not bool(inside.all()):
        rows, bins = rows[inside], bins[inside]
        weights = None if weights is None else weights[inside]
    codes = rows * depth + bins
    shape = (*entries.shape, depth)
    if not sparse:
        size = math.prod(shape)
        if weights is not None:
            sums = torch.zeros(size, dtype=weights.dtype, device=codes.device).index_add_(0, codes, weights)
            return sums.reshape(shape)
        counts = torch.bincount(codes, minlength=size).reshape(shape)
        return (counts if counts_all else counts.clamp(max=1)).to(dtype)
    places, inverse, counts = torch.unique(codes, return_inverse=True, return_counts=True)
    if weights is not None:
        values = torch.zeros(len(places), dtype=weights.dtype, device=codes.device).index_add_(0, inverse, weights)
    else:
        values = (counts if counts_all else torch.ones_like(counts)).to(dtype)
    indices = torch.stack(torch.unravel_index(places, shape), dim=1)
    return SparseTensor(indices, values, torch.tensor(shape))


def encode(x: Any, mode: str, depth: int, dtype: torch.dtype, sparse: bool, weights: Tensor | None = None) -> Any:
    """
    Return the one-hot, multi-hot or count vectors of ids.

    Args:
        x: int64: a tensor, a ``SparseTensor`` of rank 1 or 2 (not for ``"one_hot"``) or a ``RaggedTensor`` of two
            dimensions.
        mode: ``"one_hot"``: a vector of each id; ``"multi_hot"``, ``"count"``: a vector of each row of ids.
        depth: the length of the vectors. Ids that are not below it do not count. Negative ids do not count either, but
            they are refused for ``"multi_hot"`` and ``"count"`` in inputs of up to two dimensions. A ``SparseTensor``
            may have them if the vectors are strided.
        dtype: the vectors' dtype.
        sparse: whether they are given as a ``SparseTensor``.
        weights: weights of ``x``'s shape, for ``"count"``.
    """
    counts_all = mode == "count"
    if isinstance(x, SparseTensor):
        return encoded(_sparse_entries(x, mode, weights, sparse), depth, counts_all, dtype, sparse)
    if isinstance(x, RaggedTensor):
        return _encode_ragged(x, mode, depth, dtype, sparse, weights)
    if mode == "one_hot":
        return encoded(one_hot_entries(x), depth, counts_all, dtype, sparse)
    if x.dim() <= 2:
        _refuse_negative(x)
    entries = reduced_entries(x)
    if weights is not None:
        if weights.shape != x.shape:
            raise ValueError(f"count_weights must have the shape of inputs, {list(x.shape)}, got {list(weights.shape)}")
        entries = entries._replace(weights=weights.reshape(-1))
    return encoded(entries, depth, counts_all, dtype, sparse)


def _sparse_entries(x: SparseTensor, mode: str, weights: Tensor | None, sparse: bool) -> Entries:
    rank = len(x.shape)
    if mode == "one_hot" or rank > 2:
        raise ValueError(f"inputs must not be sparse of rank {rank} for output_mode {mode!r}")
    if weights is not None:
        raise ValueError("count_weights must not be given for sparse inputs")
    if rank < 2 or sparse:
        _refuse_negative(x.values)
    rows = x.indices[:, 0].to(x.values.device) if rank == 2 else torch.zeros_like(x.values, dtype=torch.int64)
    return Entries(rows, x.values, tuple(x.shape[:-1]))


def _encode_ragged(
    x: RaggedTensor, mode: str, depth: int, dtype: torch.dtype, sparse: bool, weights: Tensor | None
) -> Any:
    if isinstance(x.values, RaggedTensor) or x.values.dim() > 1:
        raise ValueError(f"inputs must have two dimensions for output_mode {mode!r} of ragged ones")
    if weights is not None:
        raise ValueError("count_weights must not be given for ragged inputs")
    bins = x.values
    if mode == "one_hot":
        if sparse:
            raise TypeError("inputs must not be ragged for a sparse result of output_mode 'one_hot'")
        every = Entries(torch.arange(len(bins), device=bins.device), bins, (len(bins),))
        return RaggedTensor(encoded(every, depth, False, dtype, False), x.row_splits)
    _refuse_negative(bins)
    entries = Entries(x.value_rowids().to(bins.device), bins, (len(x.row_splits) - 1,))
    return encoded(entries, depth, mode == "count", dtype, sparse)


def _refuse_negative(bins: Tensor) -> None:
    wrong = (bins < 0).nonzero()
    if len(wrong):
        raise ValueError(
            f"inputs must not be negative for output_mode 'multi_hot' and 'count', got {int(bins[tuple(wrong[0])])} at "
            f"position {wrong[0].tolist()}"
        )


def as_inputs(inputs: Any) -> Any:
    """Convert a layer's inputs to a tensor, or to a numpy array of strings; sparse and ragged ones stay."""
    return inputs if isinstance(inputs, (SparseTensor, RaggedTensor)) else as_values("inputs", inputs)


def mapped_values(x: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to the values of a tensor, SparseTensor or RaggedTensor; each stays in its place."""
    if isinstance(x, SparseTensor):
        return SparseTensor(x.indices, change(x.values), x.dense_shape)
    if isinstance(x, RaggedTensor):
        return RaggedTensor(mapped_values(x.values, change), x.row_splits)
    return change(x)


def as_dtype(dtype: Any) -> torch.dtype | None:
    """Return the torch dtype of a dtype, its name or a Keras policy's configuration; None stays None."""
    if isinstance(dtype, dict):
        dtype = dtype["config"]["name"]
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
