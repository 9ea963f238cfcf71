"""Columns whose ids have a table, of their own or shared with other columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from .._reduction import COMBINERS
from ..typing import Combiner
from ..variable import EmbeddingVariableOption
from ._base import CategoricalColumn, Column, check_count, check_key
from ._composed import SequenceCategoricalColumn, WeightedCategoricalColumn, check_categorical
from ._functions import as_initializer
from ._growing import checked_option, growing_option
from ._plain import make_fields_plain, set_field

Initializer = Callable[[Tensor], Any]


@dataclass(frozen=True, eq=False, repr=False)
class EmbeddingColumn(Column):
    """Ids with a table: see :func:`embedding_column`."""

    PARENTS: ClassVar[tuple[str, ...]] = ("categorical_column",)

    categorical_column: CategoricalColumn
    dimension: int
    combiner: Combiner = "mean"
    initializer: Initializer | None = None
    max_norm: float | None = None
    trainable: bool = True
    ev_option: EmbeddingVariableOption | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        _check_table(self, "embedding_column")

    @property
    def name(self) -> str:
        """The name of the column of ids, and ``_embedding``."""
        return f"{self.categorical_column.name}_embedding"

    @property
    def table_name(self) -> str:
        """The name of the column's table."""
        return self.name

    @classmethod
    def _from_fields(cls, values: dict[str, Any]) -> Any:
        # Fields that only TensorFlow has: the checkpoint of an estimator, and a choice of lookups.
        for name in ("ckpt_to_load_from", "tensor_name_in_ckpt"):
            if values.pop(name, None) is not None:
                raise ValueError(f"EmbeddingColumn: {name} must be None: load the table's weights instead")
        values.pop("use_safe_embedding_lookup", None)
        return super()._from_fields(values)


@dataclass(frozen=True, eq=False, repr=False)
class SharedEmbeddingColumn(Column):
    """Ids with a table that other columns share: see :func:`shared_embeddings`."""

    PARENTS: ClassVar[tuple[str, ...]] = ("categorical_column",)

    categorical_column: CategoricalColumn
    dimension: int
    combiner: Combiner = "mean"
    initializer: Initializer | None = None
    shared_embedding_collection_name: str = ""
    max_norm: float | None = None
    trainable: bool = True
    ev_option: EmbeddingVariableOption | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        _check_table(self, "shared_embeddings")
        check_key(self.shared_embedding_collection_name)

    @property
    def name(self) -> str:
        """The name of the column of ids, and ``_shared_embedding``."""
        return f"{self.categorical_column.name}_shared_embedding"

    @property
    def table_name(self) -> str:
        """The name of the shared table."""
        return self.shared_embedding_collection_name


def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: Combiner = "mean",
    initializer: Initializer | None = None,
    *,
    max_norm: float | None = None,
    trainable: bool = True,
    ev_option: EmbeddingVariableOption | None = None,
) -> EmbeddingColumn:
    """
    Make a column of ids with a table of their own, see :meth:`FeatureTransform.embedding_bag_configs`.

    Args:
        categorical_column: the column of the ids; a sequence goes to :meth:`FeatureTransform.embedding_configs`.
        dimension: the number of elements of the table's rows.
        combiner: the pooling of an example's rows: ``"mean"`` (default), ``"sum"`` or ``"sqrtn"``.
        initializer: the function that fills the table: one of :mod:`torchsparse_rec.initializers`, or any function of a
            tensor, which cannot be written as a configuration. Default: ``TruncatedNormal(std=1 / sqrt(dimension))``.
        max_norm: the norm to which a lookup scales longer rows down, see :class:`EmbeddingBagConfig`. Default: none.
        trainable: whether the table is trained; see :meth:`FeatureTransform.freeze`. Default True.
        ev_option: options that make the table an :class:`EmbeddingVariable`, which has a row for each id that has come.
            Default: those of :func:`categorical_column_with_embedding`; for other columns a table of fixed size.

    Raises:
        ValueError: for arguments that TensorFlow refuses too, for an unknown combiner, and for a sequence whose table
            would grow.

    Source: ``tf.feature_column.embedding_column``.

    Example:
        >>> from torchsparse_rec.features import FeatureTransform, categorical_column_with_identity, embedding_column
        >>> transform = FeatureTransform([embedding_column(categorical_column_with_identity("user", 943), 8)])
        >>> [(table.name, table.num_embeddings) for table in transform.embedding_bag_configs()]
        [('user_embedding', 943)]
    """
    return EmbeddingColumn(categorical_column, dimension, combiner, initializer, max_norm, trainable, ev_option)


def shared_embeddings(
    categorical_columns: Sequence[CategoricalColumn],
    dimension: int,
    combiner: Combiner = "mean",
    initializer: Initializer | None = None,
    shared_embedding_collection_name: str | None = None,
    *,
    max_norm: float | None = None,
    trainable: bool = True,
    ev_option: EmbeddingVariableOption | None = None,
) -> list[SharedEmbeddingColumn]:
    """
    Make several columns of ids that share one table.

    Args:
        categorical_columns: columns of one kind with the same number of buckets; some may be weighted, or some
            sequences. If they are several, none may need ``adapt()``, which would find a different vocabulary for each.
            If one is a sequence, the table is in ``embedding_configs()``, and the ids of all are in
            ``Features.sequence``.
        dimension: the argument of :func:`embedding_column`.
        combiner: the argument of :func:`embedding_column`.
        initializer: the argument of :func:`embedding_column`.
        shared_embedding_collection_name: the table's name. Default: the columns' sorted names and
            ``shared_embedding``, with ``_`` between them.
        max_norm: the argument of :func:`embedding_column`.
        trainable: the argument of :func:`embedding_column`.
        ev_option: the argument of :func:`embedding_column`.

    Raises:
        ValueError: for arguments that TensorFlow refuses too.

    Source: ``tf.feature_column.shared_embeddings``.

    Example:
        >>> from torchsparse_rec import features
        >>> columns = [features.categorical_column_with_identity(key, 100) for key in ("bought", "seen")]
        >>> transform = features.FeatureTransform(features.shared_embeddings(columns, 8))
        >>> [(table.name, table.feature_names) for table in transform.embedding_bag_configs()]
        [('bought_seen_shared_embedding', ['bought', 'seen'])]
    """
    columns = list(categorical_columns)
    if not columns:
        raise ValueError("shared_embeddings: categorical_columns must hold a column, got none")
    for column in columns:
        check_categorical("shared_embeddings", column)
    ordered = sorted(columns, key=lambda column: column.name)
    for column in columns:
        if len(columns) > 1 and getattr(_plain_column(column), "needs_adapt", False):
            raise ValueError(
                f"shared_embeddings: categorical_columns must be complete, got {column!r}: what adapt() finds is each "
                "column's own, and a shared table needs one vocabulary: adapt one column, and make the others with "
                "what it found"
            )
    first = _plain_column(ordered[0])
    for column in ordered[1:]:
        if type(_plain_column(column)) is not type(first) or not _same_ids(column, ordered[0]):
            raise ValueError(
                "shared_embeddings: categorical_columns must be of one kind with the same num_buckets, got "
                f"{ordered[0]!r} and {column!r}"
            )
    name = shared_embedding_collection_name or "_".join(column.name for column in ordered) + "_shared_embedding"
    return [
        SharedEmbeddingColumn(column, dimension, combiner, initializer, name, max_norm, trainable, ev_option)
        for column in columns
    ]


def _same_ids(column: CategoricalColumn, other: CategoricalColumn) -> bool:
    """Say whether two columns of one kind have their ids from one range."""
    if growing_option(column) is not None:
        return growing_option(column) == growing_option(other)
    return column.num_buckets == other.num_buckets


def _plain_column(column: CategoricalColumn) -> CategoricalColumn:
    while isinstance(column, (WeightedCategoricalColumn, SequenceCategoricalColumn)):
        column = column.categorical_column
    return column


def _check_table(column: Any, function: str) -> None:
    make_fields_plain(column)
    check_categorical(function, column.categorical_column)
    name = column.categorical_column.name
    set_field(column, "dimension", check_count("dimension", column.dimension, 1, name))
    if column.combiner not in COMBINERS:
        raise ValueError(f"{function} {name!r}: combiner must be one of {tuple(COMBINERS)}, got {column.combiner!r}")
    if column.max_norm is not None and not (isinstance(column.max_norm, (int, float)) and column.max_norm > 0):
        raise ValueError(f"{function} {name!r}: max_norm must be above 0, got {column.max_norm!r}")
    set_field(column, "ev_option", checked_option(column.ev_option, name))
    option = growing_option(column)
    if option is None or option.init_option.initializer is None:
        set_field(column, "initializer", as_initializer(column.initializer, column.dimension))
    elif column.initializer is not None:
        raise ValueError(
            f"{function} {name!r}: initializer must be None where ev_option.init_option has one, got "
            f"{column.initializer!r}"
        )
    if isinstance(column.categorical_column, SequenceCategoricalColumn) and option is not None:
        raise ValueError(
            f"{function} {name!r}: ev_option must be None for a sequence, as its missing steps need a row of zeros, "
            "which a table that grows has not: use a column that is no sequence"
        )
