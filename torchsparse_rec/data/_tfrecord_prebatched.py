"""
Records that hold a whole batch each: one Example, in which each feature has the values of all rows.

A feature of k values in every row has rows * k values, row after row: ``tf.io.FixedLenFeature([rows, k], ...)`` reads
it. One with any number has all rows' values, and beside it ``<name>/row_lengths``, int64, how many each row has: which
``tf.io.RaggedFeature(dtype, value_key=name, partitions=[tf.io.RaggedFeature.RowLengths(f"{name}/row_lengths")])`` is
for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import ops
from ..ops import ExampleColumn, ExampleValues
from ._tfrecord_features import Feature, FixedLenFeature, VarLenFeature

#: What is added to a feature's name for the lengths of its rows.
ROW_LENGTHS = "/row_lengths"


def check_features(reader: str, features: Mapping[str, Feature]) -> None:
    """Raise unless a feature that is the lengths of another's rows too is read as the integers that they are."""
    for name, feature in features.items():
        lengths = features.get(name + ROW_LENGTHS)
        if not isinstance(feature, VarLenFeature) or lengths is None:
            continue
        if not isinstance(lengths, FixedLenFeature) or lengths.shape or lengths.dtype != "int64":
            raise ValueError(
                f"{reader}: features[{name + ROW_LENGTHS!r}] must be FixedLenFeature((), 'int64'), since it counts the"
                f" values of {name!r}, got {lengths!r}"
            )


def whole_columns(features: Mapping[str, Feature]) -> dict[str, ExampleColumn]:
    """What the parser is asked for: every feature as a whole, whatever its rows."""
    columns: dict[str, ExampleColumn] = {}
    for name, feature in features.items():
        columns[name] = ExampleColumn(feature.column().dtype, None, nullable=True)
        if isinstance(feature, VarLenFeature):
            columns[name + ROW_LENGTHS] = ExampleColumn("int64", None, nullable=True)
    return columns


def by_rows(
    features: Mapping[str, Feature], whole: Mapping[str, ExampleValues]
) -> tuple[int, dict[str, ExampleValues]]:
    """
    One record's features cut into rows.

    Returns:
        The number of rows, and the columns.

    Raises:
        ValueError: if the features do not have values for the same number of rows, or one is missing.
    """
    rows, said_by = None, ""
    for name, feature in features.items():
        count = _rows_of(name, feature, whole)
        if rows is None:
            rows, said_by = count, name
        elif count is not None and count != rows:
            raise ValueError(f"feature {name!r} has values for {count} rows, and {said_by!r} for {rows}")
    if rows is None:
        raise ValueError(f"none of the features {', '.join(map(repr, features))} says how many rows there are")
    return rows, {name: _cut(name, feature, whole, rows) for name, feature in features.items()}


def _is_present(values: ExampleValues) -> bool:
    assert values.present is not None
    return bool(values.present[0])


def _count(values: ExampleValues) -> int:
    return values.values.numel() if values.string_offsets is None else values.string_offsets.numel() - 1


def _rows_of(name: str, feature: Feature, whole: Mapping[str, ExampleValues]) -> int | None:
    """The number of rows that a feature has values for; None if it does not say."""
    if isinstance(feature, VarLenFeature):
        lengths = whole[name + ROW_LENGTHS]
        if not _is_present(lengths):
            raise ValueError(f"feature {name + ROW_LENGTHS!r} is missing, which says where the rows of {name!r} begin")
        return _count(lengths)
    if not _is_present(whole[name]):
        return None
    if feature.size == 0:
        if _count(whole[name]):
            raise ValueError(f"feature {name!r} has {_count(whole[name])} values, and no row is to have any")
        return None
    rows, rest = divmod(_count(whole[name]), feature.size)
    if rest:
        raise ValueError(
            f"feature {name!r} has {_count(whole[name])} values, no multiple of the {feature.size} of a row"
        )
    return rows


def _cut(name: str, feature: Feature, whole: Mapping[str, ExampleValues], rows: int) -> ExampleValues:
    values = whole[name]
    if isinstance(feature, VarLenFeature):
        offsets = _offsets(name, whole[name + ROW_LENGTHS].values, _count(values))
        return ExampleValues(values.values, values.string_offsets, offsets)
    if _is_present(values) or feature.size == 0:
        return ExampleValues(values.values, values.string_offsets)
    return _absent(name, feature, rows)


def _offsets(name: str, lengths: Tensor, count: int) -> Tensor:
    # Each first: a sum may wrap around.
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > count):
        bad = int(((lengths < 0) | (lengths > count)).nonzero()[0, 0])
        raise ValueError(
            f"feature {name + ROW_LENGTHS!r} must have lengths in [0, {count}], the values of {name!r}, got"
            f" {int(lengths[bad])} for row {bad}"
        )
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    # No wrap-around from one entry to the next goes unseen: it would decrease.
    if int(offsets[-1]) != count or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(
            f"feature {name + ROW_LENGTHS!r} adds up to {int(offsets[-1])} values, and {name!r} has {count}"
        )
    return offsets


def _absent(name: str, feature: FixedLenFeature, rows: int) -> ExampleValues:
    """What as many rows without the feature have: the parser says it of so many empty messages."""
    column = feature.column()
    if column.default is None and not column.nullable:
        raise ValueError(f"feature {name!r}: is missing, and the column has no default")
    empty, ranges = torch.empty(0, dtype=torch.uint8), torch.zeros(rows, 2, dtype=torch.int64)
    return ops.parse_examples(empty, ranges, {name: column})[name]


def as_one_record(
    columns: Mapping[str, ExampleColumn], values: Mapping[str, ExampleValues]
) -> tuple[dict[str, ExampleColumn], dict[str, ExampleValues]]:
    """
    The columns of a batch as those of one record: the inverse of :func:`by_rows`.

    Raises:
        ValueError: for nulls, which such a record cannot hold (a null list is an empty one), or a column of the name
            that is for the lengths of another's rows.
    """
    whole: dict[str, ExampleColumn] = {}
    joined: dict[str, ExampleValues] = {}
    for name, column in columns.items():
        given = values[name]
        offsets = given.row_offsets
        if offsets is None and given.present is not None:
            raise ValueError(
                f"column {name!r} has nulls, which a record that holds a batch cannot say: fill them, or write one"
                " record per row"
            )
        count = _count(given)
        if offsets is not None and name + ROW_LENGTHS in columns:
            raise ValueError(
                f"column {name + ROW_LENGTHS!r} has the name under which the lengths of the rows of {name!r} are"
                " written: rename one of them"
            )
        if offsets is not None:
            whole[name + ROW_LENGTHS] = ExampleColumn("int64", None)
            lengths = offsets[1:] - offsets[:-1]
            joined[name + ROW_LENGTHS] = ExampleValues(lengths, None, torch.tensor([0, lengths.numel()]))
        whole[name] = ExampleColumn(column.dtype, None)
        joined[name] = ExampleValues(given.values, given.string_offsets, torch.tensor([0, count]))
    return whole, joined
