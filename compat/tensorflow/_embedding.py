"""Behind :mod:`.nn` and :mod:`.compat.v1.nn`: TensorFlow's embedding lookups with their checks and odd cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ..._reduction import COMBINERS
from ...typing import Combiner, PartitionStrategy
from ._sparse_segment import keep_coalesced, sparse_segment_reduce
from .arguments import as_size, as_tensor
from .tensors import RaggedTensor, SparseTensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)


def lookup(params: Any, ids: Any, partition_strategy: PartitionStrategy, max_norm: Any, sparse_gradient: bool) -> Any:
    """Compute ``tf.nn.embedding_lookup``."""
    shards = shards_of("params", params)
    if isinstance(ids, RaggedTensor):
        values = lookup(shards, _ragged_ids(ids.values), partition_strategy, max_norm, sparse_gradient)
        return RaggedTensor(values, ids.row_splits)
    ids = _index("ids", as_tensor("ids", ids, empty=torch.float32, device=shards[0].device), int16=True)
    if shards[0].dtype in _FLOATS:
        return ops.embedding_lookup(shards, ids, **_options(shards, partition_strategy, max_norm, sparse_gradient))
    if max_norm is not None:
        raise ValueError(f"params must be floating for max_norm, got {shards[0].dtype}")
    return _picked(shards, ids, partition_strategy)


def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    partition_strategy: PartitionStrategy,
    combiner: Combiner | None,
    max_norm: Any,
    sparse_gradient: bool,
) -> Tensor:
    """Compute ``tf.nn.embedding_lookup_sparse``; the result ends with the row of the last id."""
    combiner = _combiner(combiner)
    shards = shards_of("params", params)
    _check_kinds("sp_ids", sp_ids, "sp_weights", sp_weights)
    ids = _sparse_ids("sp_ids", sp_ids, shards, sp_weights, max_norm)
    weights = None
    if sp_weights is not None:
        weights = _weights("sp_weights", sp_weights, ids)
        same = "row_splits" if isinstance(sp_ids, RaggedTensor) else "indices"
        shape, wanted = getattr(sp_weights, same).shape, getattr(sp_ids, same).shape
        if shape != wanted:
            raise ValueError(f"sp_weights must have {same} of shape {list(wanted)} as sp_ids has, got {list(shape)}")
    rows: dict[str, Any]
    if isinstance(sp_ids, RaggedTensor):
        # The first split that is the end belongs to the last row that is not empty.
        end = torch.searchsorted(sp_ids.row_splits, sp_ids.row_splits[-1:])
        rows = {"offsets": sp_ids.row_splits[: int(end) + 1]}
    else:
        row_ids = sp_ids.indices[:, 0]
        rows = {"row_ids": row_ids, "num_rows": int(row_ids[-1]) + 1 if len(row_ids) else 0}
    try:
        if shards[0].dtype not in _FLOATS:
            return _integer_lookup(shards, ids, weights, rows, partition_strategy, combiner, max_norm)
        options = _options(shards, partition_strategy, max_norm, sparse_gradient)
        if weights is not None and not weights.is_floating_point():
            weights = weights.to(torch.float32 if shards[0].dtype in _HALVES else shards[0].dtype)
        return ops.embedding_lookup_sparse(
            shards, ids, **rows, weights=weights, combiner=combiner, nan_weights=True, **options
        )
    except (IndexError, ValueError):
        # If rows are not sorted, the last is not the highest, and the operator's error would name another argument.
        _check_rows("sp_ids", rows.get("row_ids"))
        raise


def _check_rows(argument: str, row_ids: Tensor | None) -> None:
    if row_ids is None or len(row_ids) == 0:
        return
    if row_ids[0] < 0:
        raise ValueError(f"{argument} must have rows >= 0, got row_ids[0] = {int(row_ids[0])}")
    falls = (row_ids[1:] < row_ids[:-1]).nonzero()
    if len(falls) > 0:
        i = int(falls[0]) + 1
        before, after = row_ids[i - 1 : i + 1].tolist()
        raise ValueError(f"{argument} must have sorted rows, got {before} followed by {after} at position {i}")


def safe_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any,
    combiner: Combiner | None,
    default_id: Any,
    partition_strategy: PartitionStrategy,
    max_norm: Any,
    sparse_gradient: bool,
) -> Tensor:
    """Compute ``tf.nn.safe_embedding_lookup_sparse``: ids of any rank, combined over the last dimension."""
    combiner = _combiner(combiner)
    dtype = None if sparse_weights is None else sparse_weights.values.dtype
    shards = shards_of("embedding_weights", embedding_weights, dtype)
    if default_id is None and shards[0].dim() != 2:
        raise ValueError(f"embedding_weights must have rank 2 without default_id, got shape {list(shards[0].shape)}")
    _check_kinds("sparse_ids", sparse_ids, "sparse_weights", sparse_weights)
    ids = _sparse_ids("sparse_ids", sparse_ids, shards, sparse_weights, max_norm)
    weights = None if sparse_weights is None else _weights("sparse_weights", sparse_weights, ids)
    row_ids, num_rows, shape = _rows_of_any_rank(sparse_ids)
    total = sum(shard.shape[0] for shard in shards)
    default_id = None if default_id is None else as_size("default_id", default_id)
    # TensorFlow's default is row 0, which must be there if any row is empty.
    bad_default = total == 0 if default_id is None else not 0 <= default_id < total
    if bad_default:
        if _any_row_empty(ids, row_ids, num_rows, weights, combiner):
            raise IndexError(f"default_id must be in [0, {total}) where rows are empty, got {default_id}")
        default_id = None
    if shards[0].dtype not in _FLOATS:
        if weights is not None:
            raise ValueError(f"sparse_weights must be None for embedding_weights of integers, got {weights.dtype}")
        ids, rows = _pruned(ids, row_ids, num_rows, default_id)
        result = _integer_lookup(shards, ids, None, rows, partition_strategy, combiner, max_norm, "embedding_weights")
        return result.reshape([*shape, *shards[0].shape[1:]])
    result = ops.safe_embedding_lookup_sparse(
        shards,
        ids,
        row_ids,
        num_rows=num_rows,
        weights=weights,
        combiner=combiner,
        default_id=default_id,
        nan_weights=True,
        **_options(shards, partition_strategy, max_norm, sparse_gradient),
    )
    return result.reshape([*shape, *shards[0].shape[1:]])


# ---- Arguments ------------------------------------------------------------------------------------------------------


def shards_of(argument: str, params: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the shards of a table: a list is shards, anything else (also a tuple) one. Numbers get ``dtype``."""
    if params is None:
        raise ValueError(f"{argument} must be given, got None")
    each = params if isinstance(params, list) else [params]
    if not each or (isinstance(params, tuple) and not params):
        raise ValueError(f"{argument} must hold at least one tensor, got none")
    shards = []
    for table in each:
        if isinstance(table, Sequence) and len(table) and all(isinstance(part, Tensor) for part in table):
            table = torch.stack(list(table))
        given = isinstance(table, Tensor)
        tensor = as_tensor(argument, table)
        if dtype is not None and tensor.dtype != dtype:
            if given:
                raise ValueError(f"{argument} must have the dtype of the weights, {dtype}, got {tensor.dtype}")
            tensor = tensor.to(dtype)
        if tensor.dim() == 0:
            raise ValueError(f"{argument} must have rank >= 1, got a scalar; a list is one of shards")
        shards.append(tensor)
    return shards


def _combiner(combiner: Combiner | None) -> Combiner:
    if combiner is None:
        return "mean"
    if combiner not in COMBINERS:
        raise ValueError(f"combiner must be one of {', '.join(map(repr, COMBINERS))}, got {combiner!r}")
    return combiner


def _check_kinds(ids_argument: str, ids: Any, weights_argument: str, weights: Any) -> None:
    if not isinstance(ids, (SparseTensor, RaggedTensor)):
        raise TypeError(f"{ids_argument} must be a SparseTensor or a RaggedTensor, got {type(ids).__name__}")
    if weights is not None and type(weights) is not type(ids):
        raise TypeError(
            f"{weights_argument} must be None or of the type of {ids_argument}, {type(ids).__name__}, got "
            f"{type(weights).__name__}"
        )


def _index(argument: str, ids: Any, int16: bool) -> Tensor:
    """Return ids in a dtype that our operators take; int16 is allowed where TensorFlow allows it."""
    if isinstance(ids, Tensor):
        if ids.dtype in (torch.int32, torch.int64):
            return ids
        if ids.dtype == torch.int16 and int16:
            return ids.to(torch.int32)
    dtypes = "int16, int32 or int64" if int16 else "int32 or int64"
    raise ValueError(f"{argument} must be {dtypes}, got {getattr(ids, 'dtype', type(ids).__name__)}")


def _ragged_ids(values: Any) -> Any:
    return values if isinstance(values, RaggedTensor) else _index("ids", values, int16=False)


def _sparse_ids(argument: str, ids: Any, shards: list[Tensor], weights: Any, max_norm: Any) -> Tensor:
    if isinstance(ids, RaggedTensor) and isinstance(ids.values, RaggedTensor):
        raise ValueError(f"{argument} must have rank 2 if it is a RaggedTensor")
    # TensorFlow's plain lookup is a segment reduction, which takes no int16; the others begin with a gather.
    plain = len(shards) == 1 and max_norm is None and weights is None
    return _index(argument, ids.values, int16=not plain)


def _weights(argument: str, weights: Any, ids: Tensor) -> Tensor:
    """Return the values of the weights; as in TensorFlow, their indices do not matter."""
    values = as_tensor(argument, weights.values)
    if values.shape != ids.shape:
        raise ValueError(f"{argument} must have as many values as there are ids, {len(ids)}, got {len(values)}")
    return values


def _options(
    shards: list[Tensor], partition_strategy: PartitionStrategy, max_norm: Any, sparse_gradient: bool
) -> dict[str, Any]:
    """Return the common arguments of our lookup operators; the shards' sparse gradients will be marked as coalesced."""
    if sparse_gradient and torch.is_grad_enabled():
        for shard in shards:
            if shard.requires_grad and shard.is_leaf:
                keep_coalesced(shard)
    norm = None if max_norm is None else float(max_norm)
    return {"partition_strategy": partition_strategy, "max_norm": norm, "sparse": sparse_gradient}


def _rows_of_any_rank(ids: SparseTensor | RaggedTensor) -> tuple[Tensor, int, list[int]]:
    """Return each id's row, the number of rows and the rows' shape; all dimensions but the last count as rows."""
    if isinstance(ids, RaggedTensor):
        rows = ids.row_splits.shape[0] - 1
        return ids.value_rowids(), rows, [rows]
    *shape, last = ids.shape
    if len(shape) == 1:
        return ids.indices[:, 0], shape[0], shape
    # As tf.sparse.reshape: an index beyond its dimension carries over.
    linear = ids.indices.new_zeros(ids.indices.shape[0])
    for dimension, size in enumerate(ids.shape):
        linear = linear * size + ids.indices[:, dimension]
    return torch.div(linear, max(last, 1), rounding_mode="trunc"), math.prod(shape), shape


def _any_row_empty(ids: Tensor, row_ids: Tensor, num_rows: int, weights: Tensor | None, combiner: str) -> bool:
    kept = ids >= 0
    if weights is not None and combiner != "sum":
        kept = kept & (weights > 0)
    return len(torch.unique(row_ids[kept])) < num_rows


# ---- What our operators do not take ----------------------------------------------------------------------------------


def _picked(shards: list[Tensor], ids: Tensor, partition_strategy: PartitionStrategy) -> Tensor:
    """Return one row per id, for tables of any dtype."""
    empty = [torch.empty(shard.shape[0], 0, device=ids.device) for shard in shards]
    ops.embedding_lookup(empty, ids, partition_strategy=partition_strategy)  # checks the ids
    places = ids
    if len(shards) > 1:
        sizes = [shard.shape[0] for shard in shards]
        places = torch.ops.torchsparse_rec.shard_rows.default(ids, sizes, int(partition_strategy == "div"), False)
    picked = torch.cat(shards).index_select(0, places.reshape(-1))
    return picked.reshape(*ids.shape, *shards[0].shape[1:])


def _pruned(ids: Tensor, row_ids: Tensor, num_rows: int, default_id: int | None) -> tuple[Tensor, dict[str, Any]]:
    """Return the ids that a safe lookup keeps, ordered by row; rows without any get the default id."""
    kept = ids >= 0
    ids, row_ids = ids[kept], row_ids[kept]
    if default_id is not None:
        has_ids = torch.bincount(row_ids, minlength=num_rows) > 0
        empty = (~has_ids).nonzero().squeeze(1)
        ids, row_ids = torch.cat([ids, ids.new_full(empty.shape, default_id)]), torch.cat([row_ids, empty])
    row_ids, order = torch.sort(row_ids, stable=True)
    return ids[order], {"row_ids": row_ids, "num_rows": num_rows}


def _integer_lookup(
    shards: list[Tensor],
    ids: Tensor,
    weights: Tensor | None,
    rows: dict[str, Any],
    partition_strategy: PartitionStrategy,
    combiner: str,
    max_norm: Any,
    argument: str = "params",
) -> Tensor:
    """Combine rows of integers: sums wrap, and a weighted mean is cut towards zero."""
    allowed = ("sum",) if weights is None else ("sum", "mean")
    if combiner not in allowed or max_norm is not None:
        raise ValueError(f"{argument} must be floating for combiner {combiner!r} with max_norm={max_norm}")
    row_ids, num_rows = rows.get("row_ids"), rows.get("num_rows")
    if row_ids is None:
        row_ids, num_rows = ops.offsets_to_row_ids(rows["offsets"], ids.shape[0]), len(rows["offsets"]) - 1
    picked = _picked(shards, ids, partition_strategy)
    entries = torch.arange(len(ids), device=ids.device)

    def summed(values: Tensor) -> Tensor:
        return sparse_segment_reduce("sum", values, entries, row_ids, num_rows, False)

    if weights is None:
        return summed(picked)
    weights = weights.to(picked.dtype).reshape(-1, *[1] * (picked.dim() - 1))
    total = summed(picked * weights)
    if combiner == "sum":
        return total
    denominator = summed(weights)
    quotient = torch.div(total, denominator.masked_fill(denominator == 0, 1), rounding_mode="trunc")
    return quotient.masked_fill(denominator == 0, 0)
