"""Columns made from other columns: crosses, weights, sequences and indicators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ._base import CategoricalColumn, DenseColumn, check_count, check_key, dtype_name
from ._categorical import HashedCategoricalColumn
from ._growing import growing_option
from ._plain import make_fields_plain, set_field


@dataclass(frozen=True, eq=False, repr=False)
class CrossedColumn(CategoricalColumn):
    """Hashed combinations of features: see :func:`crossed_column`."""

    PARENTS: ClassVar[tuple[str, ...]] = ("keys",)

    keys: tuple[str | CategoricalColumn, ...]
    hash_bucket_size: int
    hash_key: int | None = None

    def __post_init__(self) -> None:
        make_fields_plain(self)
        if isinstance(self.keys, str) or not isinstance(self.keys, (list, tuple)) or len(self.keys) < 2:
            raise ValueError(f"crossed_column: keys must be a list of at least two, got {self.keys!r}")
        set_field(self, "keys", tuple(self.keys))
        for position, key in enumerate(self.keys):
            if not isinstance(key, (str, CategoricalColumn)):
                raise ValueError(
                    f"crossed_column: keys must be features' names or categorical columns, got {key!r} at position "
                    f"{position}"
                )
            if isinstance(key, HashedCategoricalColumn):
                raise ValueError(
                    f"crossed_column: keys must not be hashed already, got {key!r} at position {position}: give the "
                    "feature's name"
                )
            if isinstance(key, (WeightedCategoricalColumn, SequenceCategoricalColumn)):
                raise ValueError(
                    f"crossed_column: keys must not be weighted or sequences, got {key!r} at position {position}"
                )
        set_field(self, "hash_bucket_size", check_count("hash_bucket_size", self.hash_bucket_size, 1, self.name))
        if self.hash_key is not None and not (isinstance(self.hash_key, int) and -(2**63) <= self.hash_key < 2**64):
            raise ValueError(f"column {self.name!r}: hash_key must be an integer of 64 bits, got {self.hash_key!r}")

    @property
    def name(self) -> str:
        """The names of the keys, sorted, with ``_X_`` between them."""
        return "_X_".join(sorted(key if isinstance(key, str) else key.name for key in self.flat_keys()))

    def flat_keys(self) -> list[str | CategoricalColumn]:
        """Return the keys, with crosses among them replaced by their own keys."""
        return [x for key in self.keys for x in (key.flat_keys() if isinstance(key, CrossedColumn) else [key])]

    def features(self) -> list[str]:
        """Return the names of the features that the keys read."""
        return [x for key in self.flat_keys() for x in ([key] if isinstance(key, str) else key.features())]

    @property
    def num_buckets(self) -> int:
        """How many buckets there are."""
        return self.hash_bucket_size


@dataclass(frozen=True, eq=False, repr=False)
class WeightedCategoricalColumn(CategoricalColumn):
    """Ids with weights: see :func:`weighted_categorical_column`."""

    PARENTS: ClassVar[tuple[str, ...]] = ("categorical_column",)

    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: str = "float32"

    def __post_init__(self) -> None:
        make_fields_plain(self)
        check_categorical("weighted_categorical_column", self.categorical_column)
        if isinstance(self.categorical_column, (WeightedCategoricalColumn, SequenceCategoricalColumn)):
            raise ValueError(
                "weighted_categorical_column: categorical_column must not be weighted or a sequence, got "
                f"{self.categorical_column!r}"
            )
        check_key(self.weight_feature_key)
        name = dtype_name(self.dtype, self.weight_feature_key)
        if name == "string":
            raise ValueError(f"column {self.weight_feature_key!r}: dtype must be a number's, got 'string'")
        set_field(self, "dtype", name)

    @property
    def name(self) -> str:
        """The name of the column of ids, ``_weighted_by_`` and the name of the weights' feature."""
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    def features(self) -> list[str]:
        """Return the names of the features of the ids and of the weights."""
        return [*self.categorical_column.features(), self.weight_feature_key]

    @property
    def num_buckets(self) -> int:
        """How many ids the column without weights or steps has."""
        return self.categorical_column.num_buckets


@dataclass(frozen=True, eq=False, repr=False)
class SequenceCategoricalColumn(CategoricalColumn):
    """Ids whose rows are not pooled: see :func:`sequence_categorical_column_with_identity`."""

    PARENTS: ClassVar[tuple[str, ...]] = ("categorical_column",)

    categorical_column: CategoricalColumn

    def __post_init__(self) -> None:
        check_categorical("sequence column", self.categorical_column)
        if isinstance(self.categorical_column, (WeightedCategoricalColumn, SequenceCategoricalColumn)):
            raise ValueError(
                f"sequence column: categorical_column must be a plain one, got {self.categorical_column!r}"
            )

    @property
    def name(self) -> str:
        """The name of the column whose ids are in sequences."""
        return self.categorical_column.name

    @property
    def num_buckets(self) -> int:
        """How many ids the column without weights or steps has."""
        return self.categorical_column.num_buckets


@dataclass(frozen=True, eq=False, repr=False)
class IndicatorColumn(DenseColumn):
    """Counts of ids: see :func:`indicator_column`."""

    PARENTS: ClassVar[tuple[str, ...]] = ("categorical_column",)

    categorical_column: CategoricalColumn

    def __post_init__(self) -> None:
        check_categorical("indicator_column", self.categorical_column)
        if growing_option(self.categorical_column) is not None:
            raise ValueError(
                "indicator_column: categorical_column must have a number of buckets, got the keys of a table that "
                f"grows, {self.categorical_column.name!r}: use its embedding_column"
            )

    @property
    def name(self) -> str:
        """The name of the column of ids, and ``_indicator``."""
        return f"{self.categorical_column.name}_indicator"

    @property
    def width(self) -> int:
        """The number of ids: each has one number."""
        return self.categorical_column.num_buckets


def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> CrossedColumn:
    """
    Make a column of hashed combinations of several features' values: each value of one with each of the others.

    Args:
        keys: the parts of the cross, at least two: names of features, whose values are combined, or categorical
            columns, whose ids are. Crosses among them are replaced by their keys.
        hash_bucket_size: the number of buckets.
        hash_key: the hash's initial value. Default, and 0: TensorFlow's.

    The hash takes the keys in TensorFlow's order. Categorical columns, and features given as rows of any length, come
    first. Features given as tensors, arrays or lists of one value (or ``k``) per example follow.

    Raises:
        ValueError: for arguments that TensorFlow refuses too, and for weighted columns and sequences.

    Source: ``tf.feature_column.crossed_column``.

    Example:
        >>> from torchsparse_rec.features import FeatureTransform, crossed_column
        >>> cross = crossed_column(["color", "size"], 1000)
        >>> FeatureTransform([cross])({"color": ["red", "green"], "size": ["S", "M"]}).sparse
        KeyedJaggedTensor({'color_X_size': [[683], [465]]})
    """
    return CrossedColumn(keys, hash_bucket_size, hash_key)  # type: ignore[arg-type]


def weighted_categorical_column(
    categorical_column: CategoricalColumn, weight_feature_key: str, dtype: Any = "float32"
) -> WeightedCategoricalColumn:
    """
    Make a column of ids with weights: a lookup multiplies rows by them before it pools the rows.

    Args:
        categorical_column: the column of the ids.
        weight_feature_key: the feature with the weights, one for each id.
        dtype: the dtype of the weights. Default float32.

    With the combiners mean and sqrtn, ids whose weight is not above 0 are left out, as in TensorFlow.

    Raises:
        ValueError: for arguments that TensorFlow refuses too; when used, if an example has not one weight for each id.

    Source: ``tf.feature_column.weighted_categorical_column``.

    Example:
        >>> from torchsparse_rec import features
        >>> words = features.categorical_column_with_identity("words", 10)
        >>> column = features.weighted_categorical_column(words, "tf_idf")
        >>> batch = {"words": [[3, 1], [4]], "tf_idf": [[0.5, 2.0], [1.0]]}
        >>> features.FeatureTransform([column])(batch).weighted.weights()
        tensor([0.5000, 2.0000, 1.0000])
    """
    return WeightedCategoricalColumn(categorical_column, weight_feature_key, dtype)


def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """
    Make a column of ``num_buckets`` dense numbers: how often each id occurs in an example, or the sum of its weights.

    Args:
        categorical_column: the column of the ids; negative ids and ids that are too large do not count. For a sequence,
            each step gets its own numbers, in ``Features.sequence_dense``.

    Raises:
        ValueError: for arguments that TensorFlow refuses too.

    Source: ``tf.feature_column.indicator_column``.

    Example:
        >>> from torchsparse_rec.features import FeatureTransform, categorical_column_with_identity, indicator_column
        >>> days = indicator_column(categorical_column_with_identity("days", 3))
        >>> FeatureTransform([days])({"days": [[0, 0], [2]]}).dense
        tensor([[2., 0., 0.],
                [0., 0., 1.]])
    """
    return IndicatorColumn(categorical_column)


def check_categorical(function: str, column: Any) -> None:
    if not isinstance(column, CategoricalColumn):
        raise ValueError(f"{function}: categorical_column must be a categorical column, got {column!r}")
