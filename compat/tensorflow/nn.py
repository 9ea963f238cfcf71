"""``tf.nn``: the embedding lookups, and losses over classes that were sampled."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...nn import sampled_losses
from ...typing import Combiner
from . import _candidates, _embedding, _sampled_losses
from ._candidates import AccidentalHits
from .random import all_candidate_sampler as all_candidate_sampler
from .random import fixed_unigram_candidate_sampler as fixed_unigram_candidate_sampler
from .random import learned_unigram_candidate_sampler as learned_unigram_candidate_sampler

__all__ = [
    "compute_accidental_hits",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "nce_loss",
    "safe_embedding_lookup_sparse",
    "sampled_softmax_loss",
]


def embedding_lookup(
    params: Any, ids: Any, max_norm: Any = None, name: str | None = None, *, sparse_gradient: bool = False
) -> Any:
    """
    Look up rows of a table, or of a list of its shards, which hold consecutive ids ("div").

    Args:
        params: ``[V, ...]``, or a list of shards. A tuple is one table, of the tensors stacked, as in TensorFlow.
        ids: row numbers of any shape, int16, int32 or int64, in ``[0, V)``; or a ragged tensor.
        max_norm: rows are multiplied with ``max_norm / max(||x||, max_norm)``.
        name: the name, ignored.
        sparse_gradient: whether tables get coalesced sparse COO gradients instead of dense ones: TensorFlow's
            IndexedSlices, with equal ids added up.

    Returns:
        ``[*ids.shape, ...]`` with the dtype of ``params``; ragged where ``ids`` are.

    Raises:
        IndexError: an id that no shard holds.
        ValueError: no params, wrong dtypes.

    Source: ``tf.nn.embedding_lookup``.

    Example:
        >>> embedding_lookup([[[0.0], [1.0]], [[2.0], [3.0]]], [3, 0]).flatten()
        tensor([3., 0.])
    """
    return _embedding.lookup(params, ids, "div", max_norm, sparse_gradient)


def embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    combiner: Combiner | None = None,
    max_norm: Any = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
    *,
    sparse_gradient: bool = False,
) -> Tensor:
    """
    Look up and combine the table's rows for each row of sparse ids; trailing rows without ids are dropped.

    Args:
        params: the argument of :func:`embedding_lookup`.
        sp_ids: a sparse tensor, combined over all its dimensions but the first, with sorted rows; or a ragged tensor of
            rank 2.
        sp_weights: None, or of the kind of ``sp_ids``; only its values are used. They are cast to the dtype of
            ``params`` (float32 for half types).
        combiner: ``"sum"``, ``"mean"`` (also None) or ``"sqrtn"``.
        max_norm: the argument of :func:`embedding_lookup`.
        name: the name, ignored.
        allow_fast_lookup: an argument that is ignored; it chooses between ways that give the same.
        sparse_gradient: the argument of :func:`embedding_lookup`.

    Returns:
        ``[last row with ids + 1, ...]`` with the dtype of ``params``.

    Raises:
        IndexError: an id that no shard holds.
        TypeError: ``sp_ids`` or ``sp_weights`` of another kind.
        ValueError: unsorted or negative rows, an unknown combiner, or not as many weights as ids.

    On CUDA it waits for the device: the number of rows is read back.

    Source: ``tf.nn.embedding_lookup_sparse``.

    Example:
        >>> from torchsparse_rec.compat.tensorflow import SparseTensor
        >>> ids = SparseTensor([[0, 0], [0, 1], [2, 0]], [0, 1, 2], [5, 2])
        >>> embedding_lookup_sparse([[[0.0], [1.0], [2.0]]], ids, None).flatten()
        tensor([0.5000, 0.0000, 2.0000])
    """
    return _embedding.lookup_sparse(params, sp_ids, sp_weights, "div", combiner, max_norm, sparse_gradient)


def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: Combiner | None = "mean",
    default_id: Any = None,
    max_norm: Any = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
    *,
    sparse_gradient: bool = False,
) -> Tensor:
    """
    Look up and combine the table's rows for each row of sparse ids: without invalid ids, and with empty rows filled.

    Invalid are negative ids and, unless the combiner is ``"sum"``, ids whose weight is not positive. All rows are kept,
    where :func:`embedding_lookup_sparse` drops trailing empty ones.

    Args:
        embedding_weights: the argument ``params`` of :func:`embedding_lookup`; of rank 2 if ``default_id`` is None.
        sparse_ids: a sparse tensor of any rank, combined over its last dimension, in any order; or a ragged tensor of
            rank 2.
        sparse_weights: None, or of the kind of ``sparse_ids`` and the dtype of ``embedding_weights``.
        combiner: the argument of :func:`embedding_lookup_sparse`.
        default_id: the id of empty rows; None makes them zeros.
        max_norm: the argument of :func:`embedding_lookup`.
        name: the name, ignored.
        allow_fast_lookup: an argument that is ignored.
        sparse_gradient: the argument of :func:`embedding_lookup`.

    Returns:
        ``[*shape of sparse_ids but the last dimension, ...]``.

    Raises:
        IndexError: an id that no shard holds, a bad ``default_id`` that is needed, an index beyond the rows.
        TypeError: as :func:`embedding_lookup_sparse`.
        ValueError: as :func:`embedding_lookup_sparse`.

    Source: ``tf.nn.safe_embedding_lookup_sparse``.

    Example:
        >>> from torchsparse_rec.compat.tensorflow import SparseTensor
        >>> ids = SparseTensor([[0, 0], [0, 1], [2, 0]], [0, -1, 2], [4, 2])
        >>> safe_embedding_lookup_sparse([[[0.5], [1.0], [2.0]]], ids, default_id=1).flatten()
        tensor([0.5000, 1.0000, 2.0000, 1.0000])
    """
    return _embedding.safe_lookup_sparse(
        embedding_weights, sparse_ids, sparse_weights, combiner, default_id, "div", max_norm, sparse_gradient
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
    seed: int | None = None,
    name: str | None = "sampled_softmax_loss",
    *,
    sparse_gradient: bool = False,
) -> Tensor:
    """
    Return the cross entropy of each sample's softmax over its own classes and some that are sampled.

    Args:
        weights: ``[num_classes, dim]``, or a list of shards, which hold consecutive classes ("div").
        biases: ``[num_classes]``, or a list of shards.
        labels: ``[batch, num_true]``, int32 or int64: the true classes, with equal shares.
        inputs: ``[batch, dim]``.
        num_sampled: the number of classes to sample.
        num_classes: the number of classes.
        num_true: the number of true classes of each sample.
        sampled_values: the result of a sampler of ``tf.random`` for ``labels``. Default: that of
            :func:`.random.log_uniform_candidate_sampler`, unique.
        remove_accidental_hits: whether a sampled class does not count for the samples whose true class it is.
        seed: the argument of :func:`.random.log_uniform_candidate_sampler`.
        name: the name, ignored.
        sparse_gradient: the argument of :func:`embedding_lookup`, for ``weights`` and ``biases``.

    Returns:
        ``[batch]``, in the dtype of ``inputs``: a loss for each sample.

    Raises:
        IndexError: a class without a row.
        ValueError: shapes and dtypes that do not fit.

    Source: ``tf.nn.sampled_softmax_loss``.

    Example:
        >>> weights, biases = torch.zeros(10, 2), torch.zeros(10)
        >>> sampled_softmax_loss(weights, biases, [[1], [2]], torch.ones(2, 2), 3, 10).shape
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
        "div",
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
    name: str | None = "nce_loss",
    *,
    sparse_gradient: bool = False,
) -> Tensor:
    """
    Return the noise-contrastive loss of each sample: the sum of its logits' binary cross entropies.

    Arguments, result and errors are those of :func:`sampled_softmax_loss`.

    Source: ``tf.nn.nce_loss``.

    Example:
        >>> weights, biases = torch.zeros(10, 2), torch.zeros(10)
        >>> nce_loss(weights, biases, [[1], [2]], torch.ones(2, 2), 3, 10).shape
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
        "div",
        sparse_gradient,
    )


def compute_accidental_hits(
    true_classes: Any, sampled_candidates: Any, num_true: int, seed: int | None = None, name: str | None = None
) -> AccidentalHits:
    """
    Find the candidates that are true classes of a row. Of one that was sampled several times, the last place counts.

    Args:
        true_classes: ``[batch, num_true]``, int64.
        sampled_candidates: ``[num_sampled]``, int64.
        num_true: the number of columns of ``true_classes``.
        seed: the seed, ignored, as nothing is drawn.
        name: the name, ignored.

    Raises:
        ValueError: wrong dtypes or shapes.

    Source: ``tf.nn.compute_accidental_hits``.

    Example:
        >>> compute_accidental_hits([[3], [5], [4]], [4, 3, 9], 1)
        AccidentalHits(indices=tensor([0, 2], dtype=torch.int32), ids=tensor([1, 0]), \
weights=tensor([-3.4028e+38, -3.4028e+38]))
    """
    return _candidates.accidental_hits(true_classes, sampled_candidates, num_true)
