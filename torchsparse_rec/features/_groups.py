"""Groups of features evaluated in one call: integers of several columns that hash alike, or that are ids already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..jagged import KeyedJaggedTensor
from ._categorical import HashedCategoricalColumn, IdentityCategoricalColumn
from ._evaluate import Evaluation, prunes
from ._ids import Assembler, Ids, has_negative
from ._tables import Feature
from .raw import Raw

#: Features that are evaluated together. If there are several, their columns only differ in the raw feature.
Group = list[Feature]


def groups_of(features: Sequence[Feature], merge: bool) -> list[Group]:
    """Group features, in the order of each group's first; without ``merge`` each feature is a group."""
    found: dict[Any, Group] = {}
    for feature in features:
        kind = _kind(feature.column) if merge else None
        found.setdefault(feature.key if kind is None else kind, []).append(feature)
    return list(found.values())


def _kind(column: Any) -> tuple | None:
    """Return the properties that columns of one group share; None: the column is a group by itself."""
    if isinstance(column, HashedCategoricalColumn) and column.dtype != "string":
        return ("hash", column.hash_bucket_size)
    if isinstance(column, IdentityCategoricalColumn):
        return ("identity",) if column.default_value is None else ("identity", column.num_buckets, column.default_value)
    return None


def evaluate_groups(
    evaluation: Evaluation, groups: Sequence[Group], assembler: Assembler, kind: str
) -> KeyedJaggedTensor:
    """Return the ids of all features of the groups, in one ``KeyedJaggedTensor``."""
    pieces: list[Ids] = []
    dropped: list[Tensor | None] = []
    for group in groups:
        merged = _merged(evaluation, group) if len(group) > 1 else None
        ids_of = evaluation.steps if kind == "sequence" else evaluation.ids
        made = [ids_of(feature.column) for feature in group] if merged is None else [merged]
        for k, ids in enumerate(made):
            if kind == "weighted" and ids.weights is None:
                ids = replace(ids, weights=torch.ones_like(ids.values, dtype=torch.float32))
            pieces.append(ids)
            weights = ids.weights if group[k].drops_weights else None
            dropped.append(None if weights is None else ~(weights > 0))
    return assembler(pieces, dropped)


def _merged(evaluation: Evaluation, group: Group) -> Ids | None:
    """Evaluate a group by one call on the integers of all its features; return None if no dtype holds them all."""
    raws = [evaluation.raw_for(feature.column) for feature in group]
    column = group[0].column
    values = _concatenated([raw.values for raw in raws], isinstance(column, IdentityCategoricalColumn))  # type: ignore[misc]
    if values is None:
        return None
    prune = prunes(column) and evaluation.drops_missing
    # In identity columns without a default, -1 for a missing value is dropped with all negative ids.
    marks = evaluation.drops_missing and not prune and values.dtype.is_signed and has_negative(values)
    ids = evaluation.ids_of(column, values)
    layouts = [(raw.width, raw.offsets) for raw in raws]
    return Ids(ids, raws[0].batch, layouts, _present(raws, values, marks), prune=prune)


def _present(raws: Sequence[Raw], values: Tensor, marks: bool) -> Tensor | None:
    """Return a mask of the values that are neither null nor, in columns of fixed width, -1; None: none is missing."""
    if all(raw.valid is None for raw in raws):
        if not marks:
            return None
        if all(raw.offsets is None for raw in raws):
            return values != -1
    masks = [raw.present() if marks else raw.valid for raw in raws]
    return torch.cat(
        [
            torch.ones(raw.count(), dtype=torch.bool, device=values.device) if mask is None else mask
            for raw, mask in zip(raws, masks, strict=True)
        ]
    )


def _concatenated(values: list[Tensor], to_int64: bool) -> Tensor | None:
    """Concatenate integers in one dtype; return None if no dtype holds them all, or -1 would not stay -1."""
    dtypes = {x.dtype for x in values}
    if len(dtypes) == 1:
        return torch.cat(values)
    if torch.uint64 in dtypes or not all(x.is_signed for x in dtypes):
        return None
    if to_int64:
        return torch.cat([x.to(torch.int64) for x in values])
    return torch.cat(values)
