"""The functions that make sequences of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._categorical import (
    categorical_column_with_hash_bucket,
    categorical_column_with_identity,
    categorical_column_with_vocabulary_file,
    categorical_column_with_vocabulary_list,
)
from ._composed import SequenceCategoricalColumn


def sequence_categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> SequenceCategoricalColumn:
    """
    Sequences of ids, whose rows are not pooled: they go to ``Features.sequence``.

    A step keeps its place if its id is negative, or missing before others: its id becomes ``num_buckets``, the row of
    zeros that tables of :meth:`FeatureTransform.embedding_configs` end with.

    Args: as for :func:`categorical_column_with_identity`.

    Source: ``tf.feature_column.sequence_categorical_column_with_identity``.

    Example:
        >>> from torchsparse_rec.features import FeatureTransform, sequence_categorical_column_with_identity
        >>> FeatureTransform([sequence_categorical_column_with_identity("seen", 10)])({"seen": [[3, 1], []]}).sequence
        KeyedJaggedTensor({'seen': [[3, 1], []]})
    """
    return SequenceCategoricalColumn(categorical_column_with_identity(key, num_buckets, default_value))


def sequence_categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: Any = "string"
) -> SequenceCategoricalColumn:
    """
    Sequences of hashes. Args: as for :func:`categorical_column_with_hash_bucket`.

    Source: ``tf.feature_column.sequence_categorical_column_with_hash_bucket``.

    Example:
        >>> sequence_categorical_column_with_hash_bucket("query", 1000).num_buckets
        1000
    """
    return SequenceCategoricalColumn(categorical_column_with_hash_bucket(key, hash_bucket_size, dtype))


def sequence_categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[str | bytes | int] | None = None,
    dtype: Any = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
    *,
    max_tokens: int | None = None,
) -> SequenceCategoricalColumn:
    """
    Sequences of places in a list. Args: as for :func:`categorical_column_with_vocabulary_list`.

    Source: ``tf.feature_column.sequence_categorical_column_with_vocabulary_list``.

    Example:
        >>> sequence_categorical_column_with_vocabulary_list("color", ["red", "green"]).num_buckets
        2
    """
    return SequenceCategoricalColumn(
        categorical_column_with_vocabulary_list(
            key, vocabulary_list, dtype, default_value, num_oov_buckets, max_tokens=max_tokens
        )
    )


def sequence_categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: Any,
    vocabulary_size: int | None = None,
    num_oov_buckets: int = 0,
    default_value: int | None = None,
    dtype: Any = "string",
) -> SequenceCategoricalColumn:
    """
    Sequences of lines of a file. Args: as for :func:`categorical_column_with_vocabulary_file`, in this other order.

    Source: ``tf.feature_column.sequence_categorical_column_with_vocabulary_file``.

    Example:
        >>> sequence_categorical_column_with_vocabulary_file("color", "colors.txt", vocabulary_size=3).num_buckets
        3
    """
    return SequenceCategoricalColumn(
        categorical_column_with_vocabulary_file(
            key, vocabulary_file, vocabulary_size, dtype, default_value, num_oov_buckets
        )
    )
