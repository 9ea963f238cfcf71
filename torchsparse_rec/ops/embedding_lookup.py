"""
Family ``embedding``: TensorFlow's lookups, in tables that may be split into shards, by ids that may be sparse.

Contracts: csrc/embedding_ids.h and csrc/embedding_shards.h. Registrations: :mod:`._embedding_shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import _reduction
from ..typing import Combiner, PartitionStrategy
from . import _embedding_shards
from ._offsets import check_not_empty
from .embedding import embedding, lookup_bags
from .segment import segment_sum

__all__ = ["embedding_lookup", "embedding_lookup_sparse", "safe_embedding_lookup_sparse"]

_ops = torch.ops.torchsparse_rec
_STRATEGIES = {"mod": 0, "div": 1}
_NO_PADDING = -1
_NO_CLIP = -1.0
_HALVES = (torch.float16, torch.bfloat16)


def embedding_lookup(
    params: Tensor | Sequence[Tensor],
    ids: Tensor,
    *,
    partition_strategy: PartitionStrategy = "mod",
    max_norm: float | None = None,
    sparse: bool = False,
) -> Tensor:
    """
    Look up rows of a table that may be split into shards, optionally clipping each row to a norm.

    Args:
        params: the table, ``[V, ...]``, float16, bfloat16, float32 or float64; or the list of its shards, each
            ``[V_s, ...]``. Shards are not copied.
        ids: row numbers of any shape, int32 or int64, in ``[0, V)``.
        partition_strategy: the rule by which row ``id`` is in one of ``n`` shards. ``"mod"``: row ``id // n`` of shard
            ``id % n``. ``"div"``: shards hold consecutive ids, the first ``V % n`` of them one more than the others.
            Ignored for one shard.
        max_norm: the norm to which rows are clipped: a row ``x`` is multiplied with ``max_norm / max(||x||, max_norm)``
            in reading, and the derivative goes through that. A negative one counts as 0, which gives zeros, and NaN for
            a row of zeros.
        sparse: whether to give each shard a sparse COO gradient, coalesced, instead of a dense one.

    Returns:
        ``[*ids.shape, ...]``. Differentiable in ``params``, twice.

    Raises:
        IndexError: an id that no shard holds, named with its position.
        ValueError: no params, an unknown strategy, NaN for max_norm; wrong shapes, dtypes or devices.

    On CUDA nothing waits for the device, and CUDA graphs can capture it (the gradient too if it is not sparse).

    Source: ``tf.nn.embedding_lookup``.

    Example:
        >>> shards = [torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [3.0]])]
        >>> embedding_lookup(shards, torch.tensor([3, 0])).flatten()
        tensor([3., 0.])
        >>> embedding_lookup(shards, torch.tensor([3, 0]), max_norm=1.5).flatten()
        tensor([1.5000, 0.0000])
    """
    shards = _shards(params)
    flat = [_as_matrix(shard, sparse) for shard in shards]
    if len(flat) == 1 and max_norm is None:
        rows = embedding(flat[0], ids, sparse=sparse)
    else:
        places = _places(flat, ids, partition_strategy, keep_padding=False)
        arguments = (None, None, _reduction.SUM, _NO_PADDING, _clip(max_norm), sparse)
        rows = _ops.embedding_bag_shards.default(flat, places.reshape(-1), *arguments)
    return rows.reshape((*ids.shape, *shards[0].shape[1:]))


def embedding_lookup_sparse(
    params: Tensor | Sequence[Tensor],
    ids: Tensor,
    row_ids: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    num_rows: int | None = None,
    weights: Tensor | None = None,
    combiner: Combiner = "mean",
    partition_strategy: PartitionStrategy = "mod",
    max_norm: float | None = None,
    sparse: bool = False,
    nan_weights: bool = False,
) -> Tensor:
    """
    Look up a table's rows for the ids of each row of a sparse tensor, and combine them by sum, mean or sqrtn.

    ``x_i`` is the row of ``ids[i]``, clipped to ``max_norm`` if that is given, and ``w_i`` is ``weights[i]``, or 1. A
    result is ``sum(w x)`` (sum), ``sum(w x) / sum(w)`` (mean) or ``sum(w x) / sqrt(sum(w^2))`` (sqrtn). A row without
    ids and a zero denominator give zeros.

    Args:
        params: the argument of :func:`embedding_lookup`.
        ids: ``[N]``, int32 or int64, in ``[0, V)``.
        row_ids: ``[N]``, int32 or int64, not decreasing, in ``[0, num_rows)``: the row of each id. A column of a matrix
            of indices is not copied.
        offsets: ``[num_rows + 1]``, int32 or int64, instead of ``row_ids``: row ``r`` has
            ``ids[offsets[r] : offsets[r + 1]]``.
        num_rows: the number of rows; must be given with ``row_ids``, and not with ``offsets``.
        weights: ``[N]``, floating. Weights of another dtype than ``params`` are cast to it. Where ``params`` are of a
            half type, they are cast to float32, and all is computed in float32, at the cost of a copied row for each
            id.
        combiner: ``"sum"``, ``"mean"`` or ``"sqrtn"``.
        partition_strategy: the argument of :func:`embedding_lookup`.
        max_norm: the argument of :func:`embedding_lookup`.
        sparse: the argument of :func:`embedding_lookup`.
        nan_weights: whether weights may be NaN; results and gradients of their rows then are NaN too. Default: a NaN is
            an error. With it weights are checked: a CUDA device is waited for, and ``torch.compile`` breaks the graph.

    Returns:
        ``[num_rows, ...]``. Differentiable in ``params`` and ``weights``: once with weights, else twice.

    Raises:
        IndexError: an id that no shard holds, named with its position.
        ValueError: row_ids that decrease or are out of range, bad offsets, NaN weights, an unknown combiner or
            strategy; wrong shapes, dtypes or devices.

    On CUDA nothing waits for the device, and CUDA graphs can capture it (the gradient too if it is not sparse).

    Source: ``tf.nn.embedding_lookup_sparse``.

    Example:
        >>> table = torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]])
        >>> embedding_lookup_sparse(table, torch.tensor([2, 0, 1]), torch.tensor([0, 0, 2]), num_rows=3)
        tensor([[1.0000, 1.5000],
                [0.0000, 0.0000],
                [1.0000, 1.5000]])
    """
    mode = _mode(combiner)
    shards = _shards(params)
    flat = [_as_matrix(shard, sparse) for shard in shards]
    if offsets is None:
        offsets = _ops.row_ids_to_offsets.default(*_rows_of(row_ids, num_rows))
    elif row_ids is not None or num_rows is not None:
        raise ValueError("row_ids and num_rows must be None where offsets are given")
    check_not_empty("embedding_lookup_sparse", offsets, ids, "ids")
    places = _places(flat, ids, partition_strategy, keep_padding=False)
    pooled = _pool(flat, places, offsets, weights, mode, _NO_PADDING, max_norm, sparse, nan_weights)
    return pooled.reshape(pooled.shape[0], *shards[0].shape[1:]) if shards[0].dim() != 2 else pooled


def safe_embedding_lookup_sparse(
    params: Tensor | Sequence[Tensor],
    ids: Tensor,
    row_ids: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    num_rows: int | None = None,
    weights: Tensor | None = None,
    combiner: Combiner = "mean",
    default_id: int | None = None,
    partition_strategy: PartitionStrategy = "mod",
    max_norm: float | None = None,
    sparse: bool = False,
    nan_weights: bool = False,
) -> Tensor:
    """
    Look up rows by sparse ids and combine them, leaving out invalid ids and filling empty rows with a default id.

    This is :func:`embedding_lookup_sparse` without the negative ids and, unless the combiner is ``"sum"``, without the
    entries whose weight is not positive.

    Args:
        params: the argument of :func:`embedding_lookup`.
        ids: ``[N]``, int32 or int64, below ``V``.
        row_ids: the argument of :func:`embedding_lookup_sparse`, but in any order.
        offsets: the argument of :func:`embedding_lookup_sparse`.
        num_rows: the argument of :func:`embedding_lookup_sparse`.
        weights: the argument of :func:`embedding_lookup_sparse`; where weights that are not positive are left out, NaN
            is too.
        combiner: the argument of :func:`embedding_lookup_sparse`.
        default_id: the id, of weight 1, that a row gets in which no id is left; default: such a row gives zeros.
        partition_strategy: the argument of :func:`embedding_lookup`.
        max_norm: the argument of :func:`embedding_lookup`.
        sparse: the argument of :func:`embedding_lookup`.
        nan_weights: the argument of :func:`embedding_lookup_sparse`.

    Returns:
        ``[num_rows, ...]``. Differentiable in ``params`` and ``weights``: once with weights, else twice.

    Raises:
        IndexError: an id that no shard holds and is not left out, row_ids out of range, a bad default_id.
        ValueError: as :func:`embedding_lookup_sparse`.

    On CUDA nothing waits for the device, and CUDA graphs can capture it (the gradient too if it is not sparse).

    Source: ``tf.nn.safe_embedding_lookup_sparse``.

    Example:
        >>> table = torch.tensor([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]])
        >>> ids, row_ids = torch.tensor([2, -1, -1, 1]), torch.tensor([0, 0, 1, 2])
        >>> safe_embedding_lookup_sparse(table, ids, row_ids, num_rows=3, default_id=0)
        tensor([[2.0000, 2.5000],
                [0.0000, 0.5000],
                [1.0000, 1.5000]])
    """
    mode = _mode(combiner)
    shards = _shards(params)
    flat = [_as_matrix(shard, sparse) for shard in shards]
    if offsets is not None:
        if row_ids is not None or num_rows is not None:
            raise ValueError("row_ids and num_rows must be None where offsets are given")
        check_not_empty("safe_embedding_lookup_sparse", offsets, ids, "ids")
        num_rows = offsets.shape[0] - 1
        numbers = torch.arange(num_rows, device=offsets.device)
        row_ids = torch.repeat_interleave(numbers, offsets.diff(), output_size=ids.shape[0])
    row_ids, num_rows = _rows_of(row_ids, num_rows)
    total = sum(shard.shape[0] for shard in flat)
    kept_weights, indices, offsets, _ = _embedding_shards.pruned_bags(
        ids,
        row_ids,
        weights,
        num_rows,
        total,
        weights is not None and _reduction.is_divided(mode),
        default_id,
        weights is not None and weights.requires_grad,
    )
    weights = None if weights is None else kept_weights
    places = _places(flat, indices, partition_strategy, keep_padding=True)
    pooled = _pool(flat, places, offsets, weights, mode, total, max_norm, sparse, nan_weights)
    return pooled.reshape(pooled.shape[0], *shards[0].shape[1:]) if shards[0].dim() != 2 else pooled


def _shards(params: Tensor | Sequence[Tensor]) -> list[Tensor]:
    shards = [params] if isinstance(params, Tensor) else list(params)
    if not shards:
        raise ValueError("params must hold at least one tensor, got none")
    for shard in shards:
        if shard.dim() < 1 or shard.shape[1:] != shards[0].shape[1:]:
            shapes = [list(each.shape) for each in shards]
            raise ValueError(f"params must have rank >= 1 and rows of one shape, got shapes {shapes}")
    return shards


class _FlatRows(torch.autograd.Function):
    """A reshape of a table of rank other than 2 to a matrix, for sparse gradients: torch cannot reshape those."""

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        ctx.shape = table.shape
        return table.reshape(table.shape[0], prod(table.shape[1:]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        values = grad._values()
        values = values.reshape(values.shape[0], *ctx.shape[1:])
        return torch.sparse_coo_tensor(grad._indices(), values, ctx.shape, is_coalesced=True, check_invariants=False)


def _as_matrix(shard: Tensor, sparse: bool) -> Tensor:
    if shard.dim() == 2:
        return shard
    return _FlatRows.apply(shard) if sparse else shard.reshape(shard.shape[0], prod(shard.shape[1:]))


def _mode(combiner: str) -> int:
    if combiner not in _reduction.COMBINERS:
        raise ValueError(f"combiner must be one of {', '.join(map(repr, _reduction.COMBINERS))}, got {combiner!r}")
    return _reduction.COMBINERS[combiner]


def _clip(max_norm: float | None) -> float:
    return _NO_CLIP if max_norm is None else max(float(max_norm), 0.0)


def _rows_of(row_ids: Tensor | None, num_rows: int | None) -> tuple[Tensor, int]:
    if row_ids is None or num_rows is None:
        raise ValueError("either offsets, or row_ids and num_rows, must be given")
    return row_ids, num_rows


def _places(shards: list[Tensor], ids: Tensor, partition_strategy: str, keep_padding: bool) -> Tensor:
    """Return the ids as rows of the shards laid end to end."""
    if len(shards) == 1:
        return ids
    if partition_strategy not in _STRATEGIES:
        raise ValueError(f"partition_strategy must be 'mod' or 'div', got {partition_strategy!r}")
    sizes = [shard.shape[0] for shard in shards]
    return _ops.shard_rows.default(ids, sizes, _STRATEGIES[partition_strategy], keep_padding)


def _pool(
    shards: list[Tensor],
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    mode: int,
    padding: int,
    max_norm: float | None,
    sparse: bool,
    nan_weights: bool,
) -> Tensor:
    dtype = shards[0].dtype
    if weights is not None and weights.dtype != dtype and weights.is_floating_point():
        if dtype in _HALVES:
            rows = _rows(shards, indices, padding, None, sparse).to(torch.float32)
            entries = torch.arange(len(indices), device=indices.device)
            rest = (offsets, weights.to(torch.float32), mode, _NO_PADDING, max_norm, False, nan_weights)
            return _pool([rows], entries, *rest).to(dtype)
        weights = weights.to(dtype)
    if nan_weights and weights is not None and bool(weights.isnan().any()):
        return _pool_with_nan(_rows(shards, indices, padding, max_norm, sparse), offsets, weights, mode)
    if len(shards) == 1 and max_norm is None:
        return lookup_bags(shards[0], indices, offsets, weights, mode, padding, False, sparse)
    return _ops.embedding_bag_shards.default(shards, indices, offsets, weights, mode, padding, _clip(max_norm), sparse)


def _rows(shards: list[Tensor], indices: Tensor, padding: int, max_norm: float | None, sparse: bool) -> Tensor:
    """Look up a row for each index; zeros for padding."""
    return _ops.embedding_bag_shards.default(
        shards, indices, None, None, _reduction.SUM, padding, _clip(max_norm), sparse
    )


def _pool_with_nan(rows: Tensor, offsets: Tensor, weights: Tensor, mode: int) -> Tensor:
    """Pool rows step by step in torch's operations, where NaN weights are allowed: our kernels refuse them."""
    wide = torch.float32 if rows.dtype in _HALVES else rows.dtype
    weights = weights.to(wide)
    total = segment_sum(rows.to(wide) * weights.unsqueeze(1), offsets=offsets)
    if _reduction.is_divided(mode):
        summed = segment_sum(weights if mode == _reduction.MEAN else weights * weights, offsets=offsets)
        none = (summed == 0).unsqueeze(1)
        divisor = summed.unsqueeze(1).masked_fill(none, 1)
        total = (total / (divisor if mode == _reduction.MEAN else divisor.sqrt())).masked_fill(none, 0)
    return total.to(rows.dtype)
