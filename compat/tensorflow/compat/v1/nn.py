"""``tf.compat.v1.nn``: the embedding lookups with a choice of ``partition_strategy``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .....typing import Combiner, PartitionStrategy
from ... import _embedding

__all__ = ["embedding_lookup", "embedding_lookup_sparse", "safe_embedding_lookup_sparse"]


def embedding_lookup(
    params: Any,
    ids: Any,
    partition_strategy: PartitionStrategy = "mod",
    name: str | None = None,
    validate_indices: bool = True,
    max_norm: Any = None,
    *,
    sparse_gradient: bool = False,
) -> Any:
    """
    Look up rows of a table or of its shards, by default ``"mod"``: id is row ``id // n`` of shard ``id % n``.

    Source: ``tf.compat.v1.nn.embedding_lookup``.

    Example:
        >>> embedding_lookup([[[0.0], [2.0]], [[1.0], [3.0]]], [3, 0]).flatten()
        tensor([3., 0.])
    """
    return _embedding.lookup(params, ids, partition_strategy, max_norm, sparse_gradient)


def embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    partition_strategy: PartitionStrategy = "mod",
    name: str | None = None,
    combiner: Combiner | None = None,
    max_norm: Any = None,
    allow_fast_lookup: bool = False,
    *,
    sparse_gradient: bool = False,
) -> Tensor:
    """
    Compute ``tf.nn.embedding_lookup_sparse`` with a ``partition_strategy``, by default ``"mod"``.

    Source: ``tf.compat.v1.nn.embedding_lookup_sparse``.

    Example:
        >>> from torchsparse_rec.compat.tensorflow import SparseTensor
        >>> ids = SparseTensor([[0, 0], [0, 1], [1, 0]], [0, 1, 3], [2, 2])
        >>> embedding_lookup_sparse([[[0.0], [2.0]], [[1.0], [3.0]]], ids, None).flatten()
        tensor([0.5000, 3.0000])
    """
    return _embedding.lookup_sparse(params, sp_ids, sp_weights, partition_strategy, combiner, max_norm, sparse_gradient)


def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: Combiner | None = "mean",
    default_id: Any = None,
    name: str | None = None,
    partition_strategy: PartitionStrategy = "div",
    max_norm: Any = None,
    allow_fast_lookup: bool = False,
    *,
    sparse_gradient: bool = False,
) -> Tensor:
    """
    Compute ``tf.nn.safe_embedding_lookup_sparse`` with a ``partition_strategy``, by default ``"div"`` here too.

    Source: ``tf.compat.v1.nn.safe_embedding_lookup_sparse``.

    Example:
        >>> from torchsparse_rec.compat.tensorflow import SparseTensor
        >>> ids = SparseTensor([[0, 0], [2, 0]], [0, -2], [3, 2])
        >>> safe_embedding_lookup_sparse([[0.5], [1.0]], ids, default_id=1).flatten()
        tensor([0.5000, 1.0000, 1.0000])
    """
    return _embedding.safe_lookup_sparse(
        embedding_weights,
        sparse_ids,
        sparse_weights,
        combiner,
        default_id,
        partition_strategy,
        max_norm,
        sparse_gradient,
    )
