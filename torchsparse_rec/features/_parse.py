"""The features that columns read from files of ``tf.train.Example``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ._base import FLOATS, Column, checked_columns
from ._composed import CrossedColumn, WeightedCategoricalColumn
from ._numeric import NumericColumn, SequenceNumericColumn, flattened


def parse_example_features(columns: Iterable[Column]) -> dict[str, Any]:
    """
    Return the features that columns read, for :class:`torchsparse_rec.data.TFRecordReader`.

    Args:
        columns: the columns of a :class:`FeatureTransform`, ``linear_columns`` too.

    Returns:
        A dict by name: a :class:`FixedLenFeature` with the default for numeric columns, a :class:`VarLenFeature` for
        others. Files hold integers as int64 and other numbers as float32, whatever the columns' dtypes.

    Raises:
        ValueError: for an item that is no column, or two columns that read one feature in different ways.

    Source: ``tf.feature_column.make_parse_example_spec``.

    Example:
        >>> from torchsparse_rec.features import *
        >>> age = numeric_column("age", default_value=0)
        >>> city = categorical_column_with_hash_bucket("city", 100)
        >>> features = parse_example_features([age, embedding_column(city, 8)])
        >>> features["age"].default_value, features["city"].dtype
        (0, 'bytes')
    """
    from ..data import FixedLenFeature, VarLenFeature

    found: dict[str, Any] = {}
    checked = checked_columns("parse_example_features", "columns", columns, Column)
    for name, (dtype, width, default) in _wanted(checked).items():
        if width is None:
            found[name] = VarLenFeature(dtype)
        else:
            found[name] = FixedLenFeature(() if width == 1 else (width,), dtype, default)
    return found


#: A feature's dtype, how many numbers it has in every example (None: any number), and its default.
_Wanted = tuple[str, "int | None", Any]


def _wanted(columns: list[Any]) -> dict[str, _Wanted]:
    found: dict[str, _Wanted] = {}
    for column in columns:
        for name, wanted in _of_column(column):
            if found.setdefault(name, wanted) != wanted:
                raise ValueError(f"columns must read feature {name!r} in one way, got {found[name]} and {wanted}")
    return found


def _of_column(column: Any) -> list[tuple[str, _Wanted]]:
    if isinstance(column, NumericColumn):
        default = None if column.default_value is None else flattened(column.default_value, column.shape)
        single = default[0] if default is not None and column.width == 1 else default
        return [(column.key, (_stored(column.dtype), column.width, single))]
    if isinstance(column, SequenceNumericColumn):
        return [(column.key, (_stored(column.dtype), None, None))]
    found: list[tuple[str, _Wanted]] = []
    if isinstance(column, CrossedColumn):
        found = [(key, ("bytes", None, None)) for key in column.flat_keys() if isinstance(key, str)]
        parents: list[Any] = [key for key in column.flat_keys() if not isinstance(key, str)]
    else:
        parents = column.parents()
    if not parents and not isinstance(column, CrossedColumn):
        found.append((column.key, (_stored(getattr(column, "dtype", "int64")), None, None)))
    for parent in parents:
        found += _of_column(parent)
    if isinstance(column, WeightedCategoricalColumn):
        found.append((column.weight_feature_key, (_stored(column.dtype), None, None)))
    return found


def _stored(dtype: str) -> str:
    return "bytes" if dtype == "string" else "float32" if dtype in FLOATS else "int64"
