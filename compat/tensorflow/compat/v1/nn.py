"""``tf.compat.v1.nn``: the embedding lookups and the losses of ``tf.nn``, with a choice of ``partition_strategy``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .....nn import sampled_losses
from .....typing import Combiner, PartitionStrategy
from ... import _embedding, _sampled_losses
from ...nn import compute_accidental_hits as compute_accidental_hits
from ...random import all_candidate_sampler as all_candidate_sampler
from ...random import fixed_unigram_candidate_sampler as fixed_unigram_candidate_sampler
from ...random import learned_unigram_candidate_sampler as learned_unigram_candidate_sampler
from ...random import log_uniform_candidate_sampler as log_uniform_candidate_sampler
from ...random import uniform_candidate_sampler as uniform_candidate_sampler

__all__ = [
    "embedding_lookup",
    "embedding_lookup_sparse",
    "nce_loss",
    "safe_embedding_lookup_sparse",
    "sampled_softmax_loss",
]


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


def sampled_softmax_loss(
    weights: Any,
    biases: Any,
    labels: Any,
    inputs: Any,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Any = None,
    remove_accidental_hits: bool = True,
    partition_strategy: PartitionStrategy = "mod",
    name: str | None = "sampled_softmax_loss",
    seed: int | None = None,
    *,
    sparse_gradient: bool = False,
) -> Tensor:
    """
    Compute ``tf.nn.sampled_softmax_loss`` with a ``partition_strategy``, by default ``"mod"``.

    Source: ``tf.compat.v1.nn.sampled_softmax_loss``.

    Example:
        >>> import torch
        >>> sampled_softmax_loss(torch.zeros(10, 2), torch.zeros(10), [[1], [2]], torch.ones(2, 2), 3, 10).shape
        torch.Size([2])
    """
    return _sampled_losses.sampled_loss(
        sampled_losses.softmax_losses,
        weights,
        biases,
        labels,
        inputs,
        num_sampled,
        num_classes,
        num_true,
        sampled_values,
        remove_accidental_hits,
        partition_strategy,
        sparse_gradient,
        seed,
    )


def nce_loss(
    weights: Any,
    biases: Any,
    labels: Any,
    inputs: Any,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Any = None,
    remove_accidental_hits: bool = False,
    partition_strategy: PartitionStrategy = "mod",
    name: str | None = "nce_loss",
    *,
    sparse_gradient: bool = False,
) -> Tensor:
    """
    Compute ``tf.nn.nce_loss`` with a ``partition_strategy``, by default ``"mod"``.

    Source: ``tf.compat.v1.nn.nce_loss``.

    Example:
        >>> import torch
        >>> nce_loss(torch.zeros(10, 2), torch.zeros(10), [[1], [2]], torch.ones(2, 2), 3, 10).shape
        torch.Size([2])
    """
    return _sampled_losses.sampled_loss(
        sampled_losses.nce_losses,
        weights,
        biases,
        labels,
        inputs,
        num_sampled,
        num_classes,
        num_true,
        sampled_values,
        remove_accidental_hits,
        partition_strategy,
        sparse_gradient,
    )
