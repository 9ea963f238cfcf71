"""What ``FeatureTransform`` makes of its columns beforehand: checks, all columns below them, and their modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._base import Column, DenseColumn, checked_columns
from ._categorical import VocabularyColumn
from ._composed import IndicatorColumn, SequenceCategoricalColumn
from ._numeric import BucketizedColumn, SequenceNumericColumn
from .vocabulary import Vocabulary


def distinct_columns(columns: Any, argument: str, kind: type[Any]) -> list[Any]:
    """Return a list of columns; raise ``ValueError`` unless they are of one kind and have distinct names."""
    found = checked_columns("FeatureTransform", argument, columns, kind)
    names: dict[str, Column] = {}
    for column in found:
        if column.name in names:
            raise ValueError(
                f"FeatureTransform: {argument} must have distinct names, got {column.name!r} of {names[column.name]!r} "
                f"and of {column!r}"
            )
        names[column.name] = column
    return found


def all_columns(columns: Sequence[Column]) -> list[Column]:
    """Return columns and the columns that they are made from; a column may occur several times."""
    found, waiting = [], list(columns)
    while waiting:
        column = waiting.pop(0)
        found.append(column)
        waiting += column.parents()
    return found


def has_steps(column: DenseColumn) -> bool:
    """Say whether a column's numbers belong to the steps of sequences."""
    if isinstance(column, IndicatorColumn):
        return isinstance(column.categorical_column, SequenceCategoricalColumn)
    return isinstance(column, SequenceNumericColumn)


class _Boundaries(torch.nn.Module):
    """A bucketized column's boundaries, on the module's device; not in its state, since the column has them."""

    boundaries: Tensor

    def __init__(self, boundaries: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("boundaries", torch.tensor(boundaries, dtype=torch.float32), persistent=False)


def lookup_of(column: Column) -> torch.nn.Module | None:
    """Return the module with the buffers that a column needs on the device: vocabulary or boundaries; else None."""
    # On the CPU, even under torch.device("meta"): the values are needed. The module is moved afterwards.
    with torch.device("cpu"):
        if isinstance(column, VocabularyColumn):
            return Vocabulary(column.words())
        if isinstance(column, BucketizedColumn):
            assert column.boundaries is not None
            return _Boundaries(column.boundaries)
    return None
