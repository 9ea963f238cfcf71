"""
Records that hold a whole batch each: one Example, whose features have the values of all rows.

A feature of k values in every row has rows * k values, row after row: ``tf.io.FixedLenFeature([rows, k], ...)`` reads
it. A feature with any number of values in a row has the values of all rows. Beside it, the feature
``<name>/row_lengths``, int64, has the number of values of each row: ``tf.io.RaggedFeature(dtype, value_key=name,
partitions=[tf.io.RaggedFeature.RowLengths(f"{name}/row_lengths")])`` reads both.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .. import ops
from ..ops import ExampleColumn, ExampleValues
from ._tfrecord_features import Feature, FixedLenFeature, VarLenFeature

#: The suffix that a feature's name gets for the lengths of its rows.
ROW_LENGTHS = "/row_lengths"


def check_features(reader: str, features: Mapping[str, Feature]) -> None:
    """Raise ``ValueError`` unless a feature that also holds another's row lengths is read as one int64 per row."""
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
    """Return the columns that the parser takes for one record that holds a batch: the values of all rows together."""
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
    Cut the features of one record that holds a batch into rows.

    Returns:
        The number of rows, and the columns by name.

    Raises:
        ValueError: features that have values for different numbers of rows, or a feature that is missing.
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
    """Return the number of rows that a feature has values for, or None if the feature does not determine it."""
    if isinstance(feature, VarLenFeature):
        lengths = whole[name + ROW_LENGTHS]
        if not _is_present(lengths):
            raise ValueError(f"feature {name + ROW_LENGTHS!r} is missing, which says where the rows of {name!r} begin")
        return _count(lengths)
    if not _is_present(whole[name]):
        return None
    if feature.size == 0:
        if _count(whole[name]):
            raise ValueError(f"feature {name!r} has {_count(whole[name])} values, and no row may have any")
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
    # Each length is checked before they are added up, since a sum may wrap around.
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > count):
        bad = int(((lengths < 0) | (lengths > count)).nonzero()[0, 0])
        raise ValueError(
            f"feature {name + ROW_LENGTHS!r} must have lengths in [0, {count}], the values of {name!r}, got"
            f" {int(lengths[bad])} for row {bad}"
        )
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    # A sum that wraps around decreases from one entry to the next.
    if int(offsets[-1]) != count or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(
            f"feature {name + ROW_LENGTHS!r} adds up to {int(offsets[-1])} values, and {name!r} has {count}"
        )
    return offsets


def _absent(name: str, feature: FixedLenFeature, rows: int) -> ExampleValues:
    """Return the column of ``rows`` rows without the feature: the parser's result for as many empty messages."""
    column = feature.column()
    if column.default is None and not column.nullable:
        raise ValueError(f"feature {name!r}: is missing, and the column has no default")
    empty, ranges = torch.empty(0, dtype=torch.uint8), torch.zeros(rows, 2, dtype=torch.int64)
    return ops.parse_examples(empty, ranges, {name: column})[name]


def as_one_record(
    columns: Mapping[str, ExampleColumn], values: Mapping[str, ExampleValues]
) -> tuple[dict[str, ExampleColumn], dict[str, ExampleValues]]:
    """
    Join the columns of a batch into the columns of one record that holds it: the inverse of :func:`by_rows`.

    Raises:
        ValueError: nulls, which such a record cannot hold (a null list becomes an empty one), or a column with the name
            that another column's row lengths take.
    """
    whole: dict[str, ExampleColumn] = {}
    joined: dict[str, ExampleValues] = {}
    for name, column in columns.items():
        given = values[name]
        offsets = given.row_offsets
        if offsets is None and given.present is not None:
            raise ValueError(
                f"column {name!r} has nulls, which a record that holds a batch cannot store: fill them, or write one"
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
