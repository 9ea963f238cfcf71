"""``adapt``: vocabularies, boundaries, means and variances from a stream of batches; and their place in a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from .._foreign import batches_of
from ._base import Column
from ._categorical import VocabularyListCategoricalColumn
from ._evaluate import Evaluation
from ._functions import (
    Compose,
    Standardize,
    as_normalizer,
    is_open,
    parts_of,
    standardizers,
    with_standardizers,
)
from ._numeric import BucketizedColumn, NumericColumn
from .inputs import RawBatch
from .statistics import Moments, Quantiles, WordCounts
from .words import decoded

_CPU = torch.device("cpu")


def adapted(
    columns: Sequence[Column], batches: Iterable[Any], max_distinct: int, drop_missing: bool
) -> dict[Column, Column]:
    """Return, for each column that needs ``adapt``, the column completed from the batches."""
    waiting = {
        column: _collector(column, max_distinct, drop_missing)
        for column in columns
        if getattr(column, "needs_adapt", False)
    }
    # A bucketized column's numbers are normalized first, so mean and variance must be found before.
    for column in waiting:
        if isinstance(column, BucketizedColumn) and column.source_column.needs_adapt:
            raise ValueError(
                f"column {column.name!r}: boundaries of numbers that are still to be standardized cannot be found in "
                "one pass: adapt the numeric column first, or bucketize the raw numbers"
            )
    seen = 0
    for batch in batches_of(batches, "FeatureTransform.adapt"):
        seen += 1
        raws = RawBatch(batch, _CPU)
        for collector in waiting.values():
            collector.add(raws)
    if waiting and not seen:
        raise ValueError("FeatureTransform.adapt: batches must hold a batch, got none")
    return {column: collector.made() for column, collector in waiting.items()}


class _Words:
    """Collects the words of a vocabulary."""

    def __init__(self, column: VocabularyListCategoricalColumn, max_distinct: int, drop_missing: bool) -> None:
        self._column, self._most, self._drops = column, max_distinct, drop_missing
        self._counts = WordCounts()

    def add(self, batch: RawBatch) -> None:
        column, evaluation = self._column, Evaluation(batch, {}, self._drops)
        raw = evaluation.raw_for(column)
        self._counts.add(raw.values, evaluation.present(raw, column))
        if len(self._counts) > self._most:
            raise ValueError(
                f"column {column.name!r}: there must be at most max_distinct={self._most} different words, got more: "
                "a hash bucket column needs no vocabulary"
            )

    def made(self) -> Column:
        words = self._counts.by_frequency(self._column.max_tokens)
        if not words:
            raise ValueError(f"column {self._column.name!r}: adapt() must see a word, got none")
        texts = tuple(decoded(x) if isinstance(x, bytes) else x for x in words)
        return replace(self._column, vocabulary_list=texts)


class _Boundaries:
    """Collects the boundaries of a bucketized column."""

    def __init__(self, column: BucketizedColumn) -> None:
        self._column = column
        self._quantiles = Quantiles(column.epsilon)

    def add(self, batch: RawBatch) -> None:
        self._quantiles.add(_numbers(self._column.source_column, batch).reshape(-1))

    def made(self) -> Column:
        assert self._column.num_bins is not None
        found = self._quantiles.boundaries(self._column.num_bins)
        if not found:
            raise ValueError(
                f"column {self._column.name!r}: adapt() must see enough numbers for a boundary, got too few"
            )
        return replace(self._column, boundaries=tuple(sorted(set(found))), num_bins=None)


class _MeanAndVariance:
    """Collects mean and variance of each element of a numeric column."""

    def __init__(self, column: NumericColumn) -> None:
        if len(column.shape) != 1:
            raise ValueError(
                f"column {column.name!r}: shape must have one dimension to be standardized by adapt(), got "
                f"{column.shape}"
            )
        self._column = column
        before = takewhile(lambda part: not is_open(part), parts_of(column.normalizer_fn))
        self._before = replace(column, normalizer_fn=Compose(*before))
        self._moments = Moments(column.width)

    def add(self, batch: RawBatch) -> None:
        numbers = _numbers(self._before, batch)
        if np.isinf(numbers).any():
            row, place = np.argwhere(np.isinf(numbers))[0].tolist()
            raise ValueError(
                f"column {self._column.name!r}: adapt() must see finite numbers, got {numbers[row, place]} at position "
                f"{place} of row {row}"
            )
        self._moments.add(numbers)

    def made(self) -> Column:
        mean, variance = self._moments.result()
        if not self._moments.counts.all():
            raise ValueError(
                f"column {self._column.name!r}: adapt() must see a number of each element, got none of some"
            )
        found, normalizer = Standardize(tuple(mean), tuple(variance)), self._column.normalizer_fn
        whole = [found if is_open(part) else part for part in standardizers(normalizer)]
        return replace(self._column, normalizer_fn=with_standardizers(normalizer, iter(whole)))


def _collector(column: Any, max_distinct: int, drop_missing: bool) -> Any:
    if isinstance(column, VocabularyListCategoricalColumn):
        return _Words(column, max_distinct, drop_missing)
    return _Boundaries(column) if isinstance(column, BucketizedColumn) else _MeanAndVariance(column)


def _numbers(column: NumericColumn, batch: RawBatch) -> Any:
    """Return a column's numbers of a batch, ``[B, width]`` float32; NaN where a null is, which has no default."""
    raw = batch.raw(column.key, column.name)
    if raw.valid is None or column.default_value is not None:
        return Evaluation(batch, {}, True).numbers(column).numpy()
    made = Evaluation(batch, {}, True).numbers(replace(column, default_value=float("nan"), dtype="float32"))
    # Of a null no normalizer makes a number.
    return torch.where(raw.valid.reshape(made.shape), made, float("nan")).numpy()


# ---- Columns in columns ---------------------------------------------------------------------------------------------


def with_leaves(column: Any, found: Mapping[Column, Column]) -> Any:
    """Return a column with the columns in it replaced by the ones in ``found``."""
    if column in found:
        return found[column]
    changed = {}
    for field in fields(column):
        value = getattr(column, field.name)
        if isinstance(value, Column):
            new: Any = with_leaves(value, found)
        elif isinstance(value, tuple) and any(isinstance(item, Column) for item in value):
            new = tuple(with_leaves(item, found) if isinstance(item, Column) else item for item in value)
        else:
            continue
        if new != value:
            changed[field.name] = new
    return replace(column, **changed) if changed else column


def _is_adaptable(column: Column) -> bool:
    if isinstance(column, NumericColumn):
        return bool(standardizers(column.normalizer_fn))
    return isinstance(column, (VocabularyListCategoricalColumn, BucketizedColumn))


def _adaptable(columns: Sequence[Column]) -> list[Column]:
    """Return the distinct columns whose vocabulary, boundaries or mean ``adapt`` could find."""
    return list(dict.fromkeys(column for column in columns if _is_adaptable(column)))


def to_state(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Return the findings of ``adapt`` as plain data, for each column that it could complete."""
    return [_learned(column) for column in _adaptable(columns)]


def _learned(column: Any) -> dict[str, Any]:
    if isinstance(column, VocabularyListCategoricalColumn):
        words = column.vocabulary_list
        return {"column": column.name, "vocabulary_list": None if words is None else list(words)}
    if isinstance(column, BucketizedColumn):
        bounds = column.boundaries
        return {
            "column": column.name,
            "boundaries": None if bounds is None else list(bounds),
            "num_bins": column.num_bins,
        }
    if isinstance(column.normalizer_fn, Standardize):
        return {"column": column.name, "normalizer_fn": column.normalizer_fn.to_config()}
    # The others in a Compose may be functions that have no configuration.
    return {"column": column.name, "standardizers": [x.to_config() for x in standardizers(column.normalizer_fn)]}


def from_state(columns: Sequence[Column], states: Sequence[Mapping[str, Any]]) -> dict[Column, Column]:
    """Return each column completed from a state that :func:`to_state` returned for the same columns."""
    theirs = [state["column"] for state in states]
    # States that were saved when adapt() did not look into a Compose lack those, which were complete.
    own = [column for column in _adaptable(columns) if column.name in theirs or not _is_whole(column)]
    names = [column.name for column in own]
    if names != theirs:
        raise ValueError(
            f"FeatureTransform: a state must be of the columns that adapt() fills here, {names}, got {theirs}"
        )
    found: dict[Column, Column] = {}
    for column, state in zip(own, states, strict=True):
        values = {field: tuple(x) if isinstance(x, list) else x for field, x in state.items() if field != "column"}
        if "standardizers" in values:
            others = list(map(as_normalizer, values.pop("standardizers")))
            count = len(standardizers(column.normalizer_fn))  # type: ignore[attr-defined]
            if len(others) != count:
                raise ValueError(
                    f"FeatureTransform: a state must have {count} means of column {column.name!r}, got {len(others)}"
                )
            values["normalizer_fn"] = with_standardizers(column.normalizer_fn, iter(others))  # type: ignore[attr-defined]
        found[column] = replace(column, **values)
    return found


def _is_whole(column: Any) -> bool:
    return isinstance(column, NumericColumn) and isinstance(column.normalizer_fn, Compose) and not column.needs_adapt
