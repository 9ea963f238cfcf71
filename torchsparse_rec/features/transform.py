"""``FeatureTransform``: makes ids for tables, and dense numbers, from the raw columns of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from .._reduction import COMBINERS
from ..jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from ..nn.configs import EmbeddingBagConfig, EmbeddingConfig
from ..typing import Combiner
from ._adapt import adapted, from_state, to_state, with_leaves
from ._base import CategoricalColumn, Column, DenseColumn, column_from_config
from ._evaluate import Evaluation
from ._groups import Group, evaluate_groups, groups_of
from ._ids import Assembler
from ._prepared import all_columns, distinct_columns, has_steps, lookup_of
from ._tables import ColumnTables
from .inputs import RawBatch

__all__ = ["FeatureTransform", "Features"]

_POOL = dict(zip(COMBINERS, (ops.segment_sum, ops.segment_mean, ops.segment_sqrt_n), strict=True))


class Features(NamedTuple):
    """
    The result of :class:`FeatureTransform` for a batch. A field without a column is None.

    Args:
        dense: ``[B, D]``, float32: numeric, bucketized and indicator columns, side by side, sorted by name.
        sparse: ids for an :class:`EmbeddingBagCollection` of ``embedding_bag_configs()``.
        weighted: ids with weights, for an :class:`EmbeddingBagCollection` of ``weighted_embedding_bag_configs()`` with
            ``is_weighted=True``.
        sequence: ids for an :class:`EmbeddingCollection` of ``embedding_configs()``. A step without an id has the
            column's number of buckets as id, which is the last row, of zeros, in these tables. Here are also the ids of
            columns that are no sequences, but share a table with one.
        sequence_dense: the numbers of ``sequence_numeric_column`` and of indicators of sequences, by column.

    Example:
        >>> Features(dense=torch.ones(2, 3)).sparse is None
        True
    """

    dense: Tensor | None = None
    sparse: KeyedJaggedTensor | None = None
    weighted: KeyedJaggedTensor | None = None
    sequence: KeyedJaggedTensor | None = None
    sequence_dense: dict[str, JaggedTensor] | None = None


class FeatureTransform(torch.nn.Module):
    """
    Turns a batch of raw columns into the ids of tables and a matrix of dense numbers, with TensorFlow's results.

    Args:
        columns: the columns of a model's tables and dense layers: embedding, shared embedding, numeric, bucketized
            (dense: one-hot) and indicator columns. A categorical column alone gives ids and no table. Names are
            distinct.
        linear_columns: categorical columns, bucketized ones among them, for the wide part of a model: their tables
            have one number per id, see :meth:`linear_bag_configs`.
        linear_combiner: the pooling of an example's numbers: ``"sum"`` (default), ``"mean"`` or ``"sqrtn"``.
        drop_missing: whether ``-1`` and ``""`` of columns with a fixed number of values per example mean a missing
            value, and identity columns leave out negative ids, as in TensorFlow (default). False: integers are taken
            unchanged. This saves a check of every id on the CPU. On CUDA nothing then waits for the device, except for
            vocabularies without ``num_oov_buckets``, strings, nulls, weights and crosses of rows of any length.
            ``torch.compile(fullgraph=True)`` needs False.

    Shape:
        ``batch``: a mapping from features to columns, a pandas frame, or columns that are handed over by
        ``__arrow_c_stream__`` or ``__arrow_c_array__``, as by a ``RecordBatch`` or ``Table`` of pyarrow, a frame of
        polars, or a relation of DuckDB. A column is

        * a tensor, a numpy array (masked ones too) or a list ``[B]`` or ``[B, k]`` of numbers, or of strings (arrays
          and lists). Numeric columns may also be ``[B, *shape]``, and rows whose lengths all equal the column's width;
        * rows of any length: a :class:`JaggedTensor`, a ``torch.nested`` jagged tensor, a list of lists, a
          ``SparseTensor`` or ``RaggedTensor`` of :mod:`torchsparse_rec.compat.tensorflow`, or ``(values, offsets)``
          with ``values`` in any of the flat forms. A tuple of two, the second a tensor or an array, is always taken as
          the latter: give two rows in a list;
        * a pyarrow array: scalars, fixed-size lists (``k``) or lists (rows), dictionary-encoded or not; nulls are
          missing, as ``None`` is in lists, and NaN among strings;
        * an array, a series or a tensor of another library, by Arrow's methods or ``__array__``.

        The result is :class:`Features`, on the module's device. Everything is first copied there.

    Raises:
        ValueError: a feature that is missing, of another kind or number of values than the column needs, or of
            another number of examples; a missing number without ``default_value``; two columns of one name. Errors name
            the column.

    The lookup checks ids, and names those outside its table. NaN stays NaN, and falls into the last bucket.

    ``state_dict()`` has the results of :meth:`adapt`; :meth:`to_config` has the columns themselves.

    Source: ``tf.feature_column``; ``keras.layers.DenseFeatures`` of TensorFlow 2.12, whose order ``dense`` has.

    Example:
        A Wide & Deep model.

        >>> from torchsparse_rec.features import *
        >>> from torchsparse_rec.nn import EmbeddingBagCollection
        >>> age, user = numeric_column("age"), categorical_column_with_identity("user", 100)
        >>> city = categorical_column_with_hash_bucket("city", 1000)
        >>> transform = FeatureTransform(
        ...     [age, embedding_column(user, 8), embedding_column(city, 8, combiner="sum")],
        ...     linear_columns=[city, crossed_column([user, "city"], 5000), bucketized_column(age, [18, 30, 65])],
        ... )
        >>> deep = EmbeddingBagCollection(transform.embedding_bag_configs())
        >>> wide = EmbeddingBagCollection(transform.linear_bag_configs())
        >>> layers = torch.nn.Linear(transform.dense_width + 16, 1)
        >>> batch = {"age": [17.0, 42.0], "user": [3, 14], "city": ["Oslo", "Lima"]}
        >>> features = transform(batch)
        >>> features.sparse.keys()
        ['user', 'city', 'city_X_user', 'age_bucketized']
        >>> deep_inputs = torch.cat([features.dense, deep(features.sparse).values()], 1)
        >>> logits = layers(deep_inputs) + wide(features.sparse).values().sum(1, keepdim=True)
        >>> logits.shape
        torch.Size([2, 1])
    """

    _home: Tensor

    def __init__(
        self,
        columns: Iterable[Column],
        linear_columns: Iterable[CategoricalColumn] = (),
        *,
        linear_combiner: Combiner = "sum",
        drop_missing: bool = True,
    ) -> None:
        super().__init__()
        self.columns = distinct_columns(columns, "columns", Column)
        self.linear_columns = distinct_columns(linear_columns, "linear_columns", CategoricalColumn)
        if not self.columns and not self.linear_columns:
            raise ValueError("FeatureTransform: columns must hold at least one column, got none")
        if linear_combiner not in COMBINERS:
            known = tuple(COMBINERS)
            raise ValueError(f"FeatureTransform: linear_combiner must be one of {known}, got {linear_combiner!r}")
        self.linear_combiner = linear_combiner
        self.drop_missing = drop_missing
        # Its device is the module's, whatever columns there are.
        self.register_buffer("_home", torch.empty(0), persistent=False)
        self._lookups = torch.nn.ModuleList()
        self._prepare()

    # ---- Preparation ------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Make everything that depends on the columns, which :meth:`adapt` replaces."""
        self._all = all_columns([*self.columns, *self.linear_columns])
        self._unready = [column.name for column in self._all if getattr(column, "needs_adapt", False)]
        self._tables = ColumnTables(self.columns, self.linear_columns, self.linear_combiner)
        self._groups: dict[str, list[Group]] = {
            kind: groups_of(features, kind == "sparse") for kind, features in self._tables.features.items()
        }
        self._assemblers = {
            kind: Assembler([feature.key for group in groups for feature in group.features])
            for kind, groups in self._groups.items()
        }
        dense = [x for x in self.columns if isinstance(x, DenseColumn)]
        self._sequences: list[Any] = [x for x in dense if has_steps(x)]
        self._dense = sorted((x for x in dense if not has_steps(x)), key=lambda column: column.name)
        self._lookups = torch.nn.ModuleList()
        self._place: dict[Column, int] = {}
        for column in self._all:
            if column not in self._place and not getattr(column, "needs_adapt", False):
                lookup = lookup_of(column)
                if lookup is not None:
                    self._place[column] = len(self._lookups)
                    self._lookups.append(lookup.to(self._home.device))

    def _apply(self, fn: Any, recurse: bool = True) -> FeatureTransform:
        """
        Move or cast the module; vocabularies and boundaries are only moved.

        Otherwise ``half()`` would round boundaries, and ``to_empty()`` would leave vocabularies without values.
        """
        lookups = self._modules.pop("_lookups")
        try:
            super()._apply(fn, recurse)
        finally:
            self._modules["_lookups"] = lookups
        for column, place in self._place.items():
            lookup = self._lookups[place]
            if any(x.is_meta for x in lookup.buffers()) and not self._home.is_meta:
                made = lookup_of(column)
                assert made is not None
                lookup = self._lookups[place] = made
            lookup.to(self._home.device)
        return self

    # ---- A batch ----------------------------------------------------------------------------------------------------

    def _evaluation(self, batch: Any) -> Evaluation:
        if self._unready:
            raise ValueError(
                f"FeatureTransform: adapt() must find what column {self._unready[0]!r} needs before it is used"
            )
        lookups = {column: self._lookups[place] for column, place in self._place.items()}
        return Evaluation(RawBatch(batch, self._home.device), lookups, self.drop_missing)

    def forward(self, batch: Any) -> Features:
        """Transform a batch, see :class:`FeatureTransform`."""
        evaluation = self._evaluation(batch)
        made = {
            kind: evaluate_groups(evaluation, groups, self._assemblers[kind], kind)
            for kind, groups in self._groups.items()
            if groups
        }
        dense = [evaluation.dense(column) for column in self._dense]
        steps = {column.name: evaluation.dense_steps(column) for column in self._sequences}
        return Features(
            torch.cat(dense, 1) if dense else None,
            made.get("sparse"),
            made.get("weighted"),
            made.get("sequence"),
            steps or None,
        )

    if TYPE_CHECKING:  # a call of torch's modules gives Any

        def __call__(self, batch: Any) -> Features: ...

    # ---- Configs of a model's tables ---------------------------------------------------------------------------------

    @property
    def dense_width(self) -> int:
        """The number of dense numbers of an example, D."""
        return sum(column.width for column in self._dense)

    def dense_slices(self) -> dict[str, slice]:
        """Return the slice of each dense column in ``Features.dense``, by the column's name."""
        found, start = {}, 0
        for column in self._dense:
            found[column.name] = slice(start, start + column.width)
            start += column.width
        return found

    def dense_features(
        self,
        features: Features,
        pooled: KeyedTensor | None = None,
        weighted: KeyedTensor | None = None,
        sequence: Mapping[str, JaggedTensor] | None = None,
    ) -> Tensor:
        """
        Put dense columns and looked-up embeddings side by side, all sorted by their columns' names.

        Args:
            features: the module's result for a batch.
            pooled: the result of the collection of ``embedding_bag_configs()`` for ``features.sparse``.
            weighted: the result of the collection of ``weighted_embedding_bag_configs()`` for ``features.weighted``.
            sequence: the result of the collection of ``embedding_configs()`` for ``features.sequence``; columns that
                are no sequences are pooled by their combiners.

        Returns:
            ``[B, D]``, without sequences.

        Raises:
            ValueError: for embedding columns whose results are not given.

        Source: ``keras.layers.DenseFeatures`` of TensorFlow 2.12, ``tf.compat.v1.feature_column.input_layer``.

        Example:
            >>> from torchsparse_rec.features import *
            >>> from torchsparse_rec.nn import EmbeddingBagCollection
            >>> city = embedding_column(categorical_column_with_identity("city", 3), 2, initializer=Constant(0.5))
            >>> transform = FeatureTransform([numeric_column("age"), numeric_column("size"), city])
            >>> tables = EmbeddingBagCollection(transform.embedding_bag_configs())
            >>> features = transform({"age": [17, 42], "size": [1, 2], "city": [0, -1]})
            >>> transform.dense_features(features, tables(features.sparse)).detach()
            tensor([[17.0000,  0.5000,  0.5000,  1.0000],
                    [42.0000,  0.0000,  0.0000,  2.0000]])
        """
        parts: dict[str, Tensor] = {}
        if features.dense is not None:
            parts = {name: features.dense[:, where] for name, where in self.dense_slices().items()}
        for argument, kind, made in (
            ("pooled", "sparse", pooled),
            ("weighted", "weighted", weighted),
            ("sequence", "sequence", sequence),
        ):
            for column, result in self._tables.results(kind).items():
                if made is None:
                    raise ValueError(
                        f"dense_features: {argument} must hold the result of column {column.name!r}, got None"
                    )
                found: Any = made[result]
                if kind == "sequence":
                    found = _POOL[column.combiner](found.values(), offsets=found.offsets())
                parts[column.name] = found
        if not parts:
            raise ValueError("dense_features: there must be a column that is no sequence, got none")
        return torch.cat([parts[name] for name in sorted(parts)], 1)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """
        Return the configs of the tables of ``Features.sparse``, for an :class:`EmbeddingBagCollection`.

        A shared table has one config, with all its features.

        Raises:
            ValueError: for a column that still needs ``adapt()``; if there are categorical columns, but none has an
                embedding column.
        """
        return self._tables.bag_configs("sparse")

    def weighted_embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables of ``Features.weighted``, for a collection with ``is_weighted=True``."""
        return self._tables.bag_configs("weighted")

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """
        Return the configs of the tables of ``Features.sequence``, for an :class:`EmbeddingCollection`.

        Each table has one more row than its column has ids, its ``padding_idx``: zeros that are not trained, for steps
        without an id.
        """
        return self._tables.sequence_configs()

    def linear_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of tables of ``linear_columns`` without weights: one number per id, initially 0."""
        return self._tables.linear_configs("sparse")

    def weighted_linear_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of tables of ``linear_columns`` with weights, whose ids are in ``Features.weighted``."""
        return self._tables.linear_configs("weighted")

    def freeze(self, collection: torch.nn.Module) -> None:
        """Stop training the tables of columns with ``trainable=False``, in a collection made of the configs."""
        for name, parameter in collection.named_parameters():
            # A collection's parameters end in a table's name and ".weight".
            if name.split(".")[-2:-1] and name.split(".")[-2] in self._tables.frozen:
                parameter.requires_grad_(False)

    # ---- Learning from data -----------------------------------------------------------------------------------------

    def adapt(self, batches: Iterable[Any], *, max_distinct: int = 100_000_000) -> FeatureTransform:
        """
        Find vocabularies, boundaries, means and variances that the columns were made without, in one pass.

        Vocabularies are sorted by frequency, the most frequent word first, of equally frequent words the greater first.
        Boundaries have about equally many numbers between them. Each element has its own mean and variance. Missing
        values and NaN do not count. Complete columns stay unchanged.

        Args:
            batches: all batches, as for the module; read once. One batch alone will do, and a stream of Arrow's is read
                a batch at a time. Memory grows with the number of different words, not with the number of batches.
            max_distinct: the largest number of different words of a column.

        Returns:
            The module itself.

        Raises:
            ValueError: for no batches, or more different words than ``max_distinct``. Also for a column without any
                value, or whose numbers have several dimensions, and for boundaries of numbers whose mean would be found
                in the same pass.

        Source: ``adapt`` of ``keras.layers.StringLookup``, ``IntegerLookup``, ``Discretization``, ``Normalization``.

        Example:
            >>> from torchsparse_rec.features import *
            >>> color = categorical_column_with_vocabulary_list("color", num_oov_buckets=1)
            >>> transform = FeatureTransform([embedding_column(color, 4)])
            >>> transform.adapt([{"color": ["red", "blue"]}, {"color": ["red", "green"]}])({"color": ["green"]}).sparse
            KeyedJaggedTensor({'color': [[1]]})
        """
        found = adapted(self._all, batches, max_distinct, self.drop_missing)
        self._replace(found)
        return self

    def _replace(self, found: dict[Column, Column]) -> None:
        before = self.columns, self.linear_columns
        columns, linear = ([with_leaves(column, found) for column in some] for some in before)
        self.columns, self.linear_columns = columns, linear  # type: ignore[assignment]
        try:
            self._prepare()
        except BaseException:
            self.columns, self.linear_columns = before
            self._prepare()
            raise

    # ---- State ------------------------------------------------------------------------------------------------------

    def to_config(self) -> dict[str, Any]:
        """Return plain data for JSON; :meth:`from_config` makes an equal module of it."""
        return {
            "columns": [column.to_config() for column in self.columns],
            "linear_columns": [column.to_config() for column in self.linear_columns],
            "linear_combiner": self.linear_combiner,
            "drop_missing": self.drop_missing,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FeatureTransform:
        """
        Make a module from the result of :meth:`to_config`.

        Raises:
            ValueError: for a wrong configuration.

        Example:
            >>> import json
            >>> from torchsparse_rec.features import *
            >>> transform = FeatureTransform([numeric_column("age", normalizer_fn=Log())])
            >>> FeatureTransform.from_config(json.loads(json.dumps(transform.to_config()))).columns == transform.columns
            True
        """
        if not isinstance(config, Mapping) or not {"columns", "linear_columns"} <= set(config):
            raise ValueError(f"config must be a dict with columns and linear_columns, got {repr(config):.200}")
        values = {field: value for field, value in config.items() if field not in ("columns", "linear_columns")}
        columns, linear = ([column_from_config(x) for x in config[f]] for f in ("columns", "linear_columns"))
        return cls(columns, linear, **values)  # type: ignore[arg-type]

    def get_extra_state(self) -> dict[str, Any]:
        """Return the results of :meth:`adapt`, for ``state_dict()``."""
        return {"adapted": to_state(self._all)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take over the state of a module with the same columns; raise ``ValueError`` for any other state."""
        if not isinstance(state, Mapping) or "adapted" not in state:
            raise ValueError(
                f"FeatureTransform: a state must be a dict with what adapt() found, got {repr(state):.200}"
            )
        try:
            found = from_state(self._all, state["adapted"])
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"FeatureTransform: a state must be what adapt() found, got {error!r}") from error
        self._replace(found)

    def extra_repr(self) -> str:
        """Return the names of the columns."""
        return ", ".join(column.name for column in [*self.columns, *self.linear_columns])
