"""The functions that make columns of sequences of ids."""

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
    Make a column of sequences of ids, whose rows are not pooled, for ``Features.sequence``.

    A step whose id is negative, or missing before others, keeps its place: its id becomes ``num_buckets``. In tables of
    :meth:`FeatureTransform.embedding_configs` this is the last row, of zeros.

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
    Make a column of sequences of hashed ids, with the arguments of :func:`categorical_column_with_hash_bucket`.

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
    Make a column of sequences of places in a list.

    Args: as for :func:`categorical_column_with_vocabulary_list`.

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
    Make a column of sequences of line numbers of a file.

    Args: as for :func:`categorical_column_with_vocabulary_file`, but in this order.

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
