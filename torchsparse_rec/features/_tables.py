"""The tables of a model: their features, and their configs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..initializers import Constant
from ..nn.configs import EmbeddingBagConfig, EmbeddingConfig, embedding_names_by_table
from ._base import CategoricalColumn, Column, DenseColumn
from ._composed import SequenceCategoricalColumn, WeightedCategoricalColumn
from ._embedding import EmbeddingColumn, SharedEmbeddingColumn
from ._growing import first_rows, growing_option


class Feature(NamedTuple):
    """A key of a ``KeyedJaggedTensor``, and the column of its ids."""

    key: str
    column: CategoricalColumn
    #: Whether ids whose weights are not above 0 are left out, as the combiners mean and sqrtn need it.
    drops_weights: bool = False


class ColumnTables:
    """
    The tables of columns, and the features that look them up, by kind: sparse, weighted, sequence.

    All features of a table have its kind, also plain ones beside sequences.
    """

    def __init__(
        self, columns: Sequence[Column], linear_columns: Sequence[CategoricalColumn], linear_combiner: str
    ) -> None:
        self._linear, self._linear_combiner = linear_columns, linear_combiner
        self._embeddings = [x for x in columns if isinstance(x, (EmbeddingColumn, SharedEmbeddingColumn))]
        self._by_name: dict[str, list[Any]] = {}
        for embedding in self._embeddings:
            self._by_name.setdefault(embedding.table_name, []).append(embedding)
        for name, sharing in self._by_name.items():
            _check_sharing(name, sharing)
        self._kinds = {name: _kind_of(name, sharing) for name, sharing in self._by_name.items()}
        _check_dotless([*self._by_name])
        _check_dotless([f"{column.name}_weights" for column in linear_columns])
        self.frozen = {_dotless(x.table_name) for x in self._embeddings if not x.trainable}
        self._keys: dict[tuple[str, CategoricalColumn, bool], str] = {}
        self.features: dict[str, list[Feature]] = {"sparse": [], "weighted": [], "sequence": []}
        self._alone = [x for x in columns if isinstance(x, CategoricalColumn) and not isinstance(x, DenseColumn)]
        for embedding in self._embeddings:
            self._add(self._kinds[embedding.table_name], embedding.categorical_column, embedding.combiner)
        for column in self._alone:
            self._add(_kind(column), column, "sum")
        for column in linear_columns:
            if isinstance(column, SequenceCategoricalColumn):
                raise ValueError(f"FeatureTransform: linear_columns must not hold sequences, got {column!r}")
            self._add(_kind(column), column, linear_combiner)

    def _add(self, kind: str, column: CategoricalColumn, combiner: str) -> None:
        drops = _drops(column, combiner)
        if (kind, column, drops) in self._keys:
            return
        taken = {feature.key: feature for feature in self.features[kind]}
        key = column.name
        if key in taken and taken[key].column == column:
            # A column used both by lookups that drop weights and by others becomes two features.
            key += "@mean" if drops else "@sum"
        if key in taken:
            raise ValueError(
                f"FeatureTransform: columns of ids must have distinct names, got {key!r} of {taken[key].column!r} and "
                f"of {column!r}"
            )
        self._keys[kind, column, drops] = key
        self.features[kind].append(Feature(key, column, drops))

    def bag_configs(self, kind: str) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables whose lookups are pooled."""
        return [
            EmbeddingBagConfig(pooling=sharing[0].combiner, **self._arguments(name, sharing, kind))
            for name, sharing in self._of_kind(kind)
        ]

    def results(self, kind: str) -> dict[Any, str]:
        """Return, by embedding column that is no sequence, its key in the result of the collection of its kind."""
        configs: list[Any] = []
        if kind in self._kinds.values():
            configs = self.sequence_configs() if kind == "sequence" else self.bag_configs(kind)
        names = {
            (config.name, feature): name
            for config, its in zip(configs, embedding_names_by_table(configs), strict=True)
            for feature, name in zip(config.feature_names, its, strict=True)
        }
        return {
            x: names[_dotless(x.table_name), self._key_of(kind, x)]
            for x in self._embeddings
            if self._kinds[x.table_name] == kind and not isinstance(x.categorical_column, SequenceCategoricalColumn)
        }

    def _key_of(self, kind: str, embedding: Any) -> str:
        column = embedding.categorical_column
        return self._keys[kind, column, _drops(column, embedding.combiner)]

    def sequence_configs(self) -> list[EmbeddingConfig]:
        """Return the configs of the tables whose lookups are not pooled."""
        return [
            EmbeddingConfig(padding_idx=arguments["num_embeddings"], **_with_one_more(arguments))
            for name, sharing in self._of_kind("sequence")
            for arguments in [self._arguments(name, sharing, "sequence")]
        ]

    def _of_kind(self, kind: str) -> list[tuple[str, list[Any]]]:
        """Return the tables that look up ids of a kind; raise ``ValueError`` if there are such ids but no table."""
        found = [(name, sharing) for name, sharing in self._by_name.items() if self._kinds[name] == kind]
        alone = [column.name for column in self._alone if _kind(column) == kind]
        if alone and not found:
            raise ValueError(
                f"FeatureTransform: columns must hold embedding_column(column, dimension) for tables of {kind} ids, "
                f"got {', '.join(map(repr, alone))} alone, which give ids and no table"
            )
        return found

    def linear_configs(self, kind: str) -> list[EmbeddingBagConfig]:
        """Return the configs of the linear columns' tables, which have one number per id."""
        return [
            EmbeddingBagConfig(
                first_rows(column, growing_option(column)),
                1,
                name=_dotless(f"{column.name}_weights"),
                feature_names=[self._keys[kind, column, _drops(column, self._linear_combiner)]],
                pooling=self._linear_combiner,
                init_fn=Constant(0.0),
                ev_option=growing_option(column),
            )
            for column in self._linear
            if _kind(column) == kind
        ]

    def _arguments(self, name: str, sharing: list[Any], kind: str) -> dict[str, Any]:
        first, option = sharing[0], growing_option(sharing[0])
        return {
            "num_embeddings": first_rows(first.categorical_column, option),
            "embedding_dim": first.dimension,
            "name": _dotless(name),
            "feature_names": [self._key_of(kind, x) for x in sharing],
            "init_fn": first.initializer,
            "max_norm": first.max_norm,
            "ev_option": option,
        }


def _with_one_more(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a table's arguments with one more row, for steps without an id."""
    return arguments | {"num_embeddings": arguments["num_embeddings"] + 1}


def _dotless(name: str) -> str:
    """Replace dots by underscores, since names of parameters have dots between their parts."""
    return name.replace(".", "_")


def _check_dotless(names: Sequence[str]) -> None:
    """Raise ``ValueError`` if two tables' names only differ in dots."""
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(_dotless(name), name)
        if other != name:
            raise ValueError(
                f"FeatureTransform: tables must have names that differ in more than dots, which become _, got "
                f"{other!r} and {name!r}: rename a feature, or give shared embeddings another "
                "shared_embedding_collection_name"
            )


def _kind(column: CategoricalColumn) -> str:
    if isinstance(column, SequenceCategoricalColumn):
        return "sequence"
    return "weighted" if isinstance(column, WeightedCategoricalColumn) else "sparse"


def _kind_of(name: str, sharing: list[Any]) -> str:
    """Return the kind of a table's ids, which is one for all its columns, since a table is in one collection."""
    kinds = {_kind(x.categorical_column) for x in sharing}
    if {"sequence", "weighted"} <= kinds:
        raise ValueError(
            f"shared_embeddings {name!r}: columns must not be weighted beside sequences, whose ids have no weights: "
            "share the column without weights, and multiply its rows by them"
        )
    return next(kind for kind in ("sequence", "weighted", "sparse") if kind in kinds)


def _drops(column: CategoricalColumn, combiner: str) -> bool:
    return isinstance(column, WeightedCategoricalColumn) and combiner != "sum"


def _described(embedding: Any, field: str) -> Any:
    """Return what a column says of its table; its ``num_buckets`` is None if ids are keys of any range."""
    if field == "ev_option":
        return growing_option(embedding)
    if field != "num_buckets":
        return getattr(embedding, field)
    ids = embedding.categorical_column
    return ids.num_buckets if growing_option(ids) is None else None


def _check_sharing(name: str, sharing: list[Any]) -> None:
    """Raise ``ValueError`` unless all columns of a table describe it in the same way."""
    for column in sharing[1:]:
        for field in ("num_buckets", "dimension", "combiner", "initializer", "max_norm", "trainable", "ev_option"):
            others, mine = (_described(x, field) for x in (sharing[0], column))
            if mine != others:
                raise ValueError(f"table {name!r}: its columns must have the same {field}, got {others} and {mine}")
