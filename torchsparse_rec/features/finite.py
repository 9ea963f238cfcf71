"""The first column of a batch whose numbers are not finite, in words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..ops import offsets_to_row_ids
from ._composed import WeightedCategoricalColumn
from ._evaluate import Evaluation
from ._functions import Compose, parts_of
from ._numeric import NumericColumn, SequenceNumericColumn
from .transform import FeatureTransform


def first_not_finite(transform: FeatureTransform, batch: Any) -> str | None:
    """Say which column of a batch has a number that is not finite, where, and the way out; None: all are finite."""
    evaluation = transform._evaluation(batch)
    # The numbers of a bucketized column, which are no dense ones, only choose its buckets.
    said = [_of_numbers(evaluation, x) for x in [*transform._dense, *transform._sequences]]
    said += [_of_weights(evaluation, x) for x in transform._all]
    return next(filter(None, said), None)


def _of_numbers(evaluation: Evaluation, column: Any) -> str | None:
    if not isinstance(column, (NumericColumn, SequenceNumericColumn)):
        return None
    parts = [] if column.normalizer_fn is None else parts_of(column.normalizer_fn)
    made = [_numbers(evaluation, replace(column, normalizer_fn=Compose(*parts[:k]))) for k in range(len(parts) + 1)]
    wrong = (~made[-1][0].isfinite()).nonzero().tolist()
    if not wrong:
        return None
    row, element = wrong[0]
    values = [float(numbers[row, element]) for numbers, _ in made]
    where = f"in example {int(made[-1][1][row])}" + (f", element {element}" if column.width > 1 else "")
    # The last normalizer that made what is not finite of what was.
    last = next((k for k in reversed(range(1, len(made))) if math.isfinite(values[k - 1])), 0)
    is_nan = math.isnan(values[last])
    if last:
        ways = "before it, or FillNaN(value) after it" if is_nan else "before or after it"
        return (
            f"column {column.name!r}: {parts[last - 1]!r:.200} makes {values[last]:g} of {values[last - 1]:g} {where}: "
            f"put Clip(low, high) {ways}"
        )
    ways = "FillNaN(value) into its normalizer_fn, or a null in its place and a default_value"
    return f"column {column.name!r}: has {values[0]:g} {where}: put " + (
        ways if is_nan else "Clip(low, high) into its normalizer_fn"
    )


def _numbers(evaluation: Evaluation, column: Any) -> tuple[Tensor, Tensor]:
    """Return a column's numbers, a row for each example or step, and the example of each row."""
    if isinstance(column, NumericColumn):
        numbers = evaluation.numbers(column)
        return numbers, torch.arange(len(numbers))
    steps = evaluation.dense_steps(column)
    return steps.values().reshape(-1, column.width), offsets_to_row_ids(steps.offsets())


def _of_weights(evaluation: Evaluation, column: Any) -> str | None:
    if not isinstance(column, WeightedCategoricalColumn):
        return None
    ids = evaluation.ids(column)
    assert ids.weights is not None
    wrong = (~ids.weights.isfinite()).nonzero()
    if not len(wrong):
        return None
    place = wrong[0, 0]
    return (
        f"column {column.name!r}: has the weight {float(ids.weights[place]):g} in example {int(ids.row_ids()[place])}: "
        "put a number in its place, or a null, which counts as 0"
    )
