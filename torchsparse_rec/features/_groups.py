"""Groups of features evaluated in one call: integers of several columns that are hashed, or that are ids already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..jagged import KeyedJaggedTensor
from ..ops.hash import column_ids
from ._categorical import EmbeddingCategoricalColumn, HashedCategoricalColumn, IdentityCategoricalColumn
from ._evaluate import Evaluation, prunes, with_default
from ._ids import Assembler, ColumnIds, RowLayout, is_cheap_to_ask
from ._tables import Feature
from .raw import Raw


@dataclass
class _Schema:
    """The properties of a group's columns, and their consequences."""

    batch: int
    layouts: list[RowLayout]
    #: The missing values of each column, by the numbers of ``column_ids``.
    missing: list[int]
    #: All that this depends on, if the columns are tensors that need no conversion.
    facts: tuple | None = None


class Group:
    """Features that are evaluated together. If there are several, their columns are of integers."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self.features = features
        self._names = [getattr(feature.column, "key", "") for feature in features]
        self._buckets = [getattr(feature.column, "hash_bucket_size", 0) for feature in features]
        self._known: _Schema | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}

    def ids(self, evaluation: Evaluation, kind: str) -> ColumnIds:
        """Return the ids of the features, joined in order."""
        if len(self.features) == 1:
            column = self.features[0].column
            return evaluation.steps(column) if kind == "sequence" else evaluation.ids(column)
        columns, schema, there = self._read(evaluation)
        ids, keep, num_missing = column_ids(columns, self._buckets, schema.missing)
        if any(schema.missing) and (not is_cheap_to_ask(ids) or bool(num_missing)):
            there = keep if there is None else keep & there
        return ColumnIds(with_default(self.features[0].column, ids), schema.batch, schema.layouts, there)

    def _read(self, evaluation: Evaluation) -> tuple[list[Tensor], _Schema, Tensor | None]:
        """Return the columns' values, their properties, and a mask that is false for nulls; None: there are none."""
        batch, drops = evaluation.batch, evaluation.drops_missing
        given = None if torch.compiler.is_compiling() else batch.tensors(self._names)
        facts, known = None, self._known  # read once: other threads may replace it meanwhile
        if given is not None:
            facts = drops, batch.device, [(x.dtype, x.shape, x.device, x.layout) for x in given]
            if known is not None and facts == known.facts and batch.has_examples(self._names[0], known.batch):
                return given, known, None
        raws = [evaluation.raw_for(feature.column) for feature in self.features]
        missing = [_missing(x.column, raw, drops) for x, raw in zip(self.features, raws, strict=True)]
        schema = _Schema(raws[0].batch, [(raw.width, raw.offsets) for raw in raws], missing)
        # Keys of uint64 are checked in each batch.
        if given is not None and all(x.device == batch.device and x.dtype != torch.uint64 for x in given):
            schema.facts = facts
            self._known = schema
        values: list[Any] = [raw.values for raw in raws]
        return values, schema, _there(raws, batch.device)


def groups_of(features: Sequence[Feature], merge: bool) -> list[Group]:
    """Group features, in the order of each group's first; without ``merge`` each feature is a group."""
    found: dict[Any, list[Feature]] = {}
    for feature in features:
        kind = _kind(feature.column) if merge else None
        found.setdefault(feature.key if kind is None else kind, []).append(feature)
    return [Group(group) for group in found.values()]


def _kind(column: Any) -> tuple | None:
    """Return the properties that columns of one group share; None: the column is a group by itself."""
    if isinstance(column, (HashedCategoricalColumn, EmbeddingCategoricalColumn)) and column.dtype != "string":
        return (None,)
    if isinstance(column, IdentityCategoricalColumn):
        return (None,) if column.default_value is None else (column.num_buckets, column.default_value)
    return None


def evaluate_groups(
    evaluation: Evaluation, groups: Sequence[Group], assembler: Assembler, kind: str
) -> KeyedJaggedTensor:
    """Return the ids of all features of the groups, in one ``KeyedJaggedTensor``."""
    pieces: list[ColumnIds] = []
    dropped: list[Tensor | None] = []
    for group in groups:
        ids = group.ids(evaluation, kind)
        if kind == "weighted" and ids.weights is None:
            ids = replace(ids, weights=torch.ones_like(ids.values, dtype=torch.float32))
        pieces.append(ids)
        weights = ids.weights if group.features[0].drops_weights else None
        dropped.append(None if weights is None else ~(weights > 0))
    return assembler(pieces, dropped)


def _missing(column: Any, raw: Raw, drops: bool) -> int:
    """Return which values of a column of integers are missing: 0 none, 1 values of -1, 2 negative values."""
    assert isinstance(raw.values, Tensor)
    if not (drops and column.drop_missing) or not raw.values.dtype.is_signed:
        return 0
    # An identity column without a default has no ids for negative numbers. Rows of any length have no mark.
    return 2 if prunes(column) else 0 if raw.width is None else 1


def _there(raws: Sequence[Raw], device: torch.device) -> Tensor | None:
    """Return a mask that is false for nulls; None: there are none."""
    if all(raw.valid is None for raw in raws):
        return None
    masks = [torch.ones(x.count(), dtype=torch.bool, device=device) if x.valid is None else x.valid for x in raws]
    return torch.cat(masks)
