"""
The parity check in parts: a module for each family of operators has its calls and references.

The rest is common: case.py defines the parts of a check, evaluate.py runs a case on both sides, compare.py compares the
outcomes. The folder reference/ computes the right outcomes, for the tests too; bounds.py and reference/rounded.py
compute how far floats may be off these.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from . import (
    bucketize,
    candidates,
    columns,
    columns_together,
    cross,
    embedding,
    hash,
    indexed_slices,
    keras,
    keras_layers,
    optimizers,
    row_update,
    segment,
    sparse_segment,
    sparse_tensor,
    unique,
)
from .case import Case, Operator

_FAMILIES = (
    sparse_segment,
    segment,
    unique,
    hash,
    cross,
    keras,
    keras_layers,
    sparse_tensor,
    embedding,
    candidates,
    indexed_slices,
    row_update,
    optimizers,
    bucketize,
    columns,
    columns_together,
)

#: The largest number of elements in a random case.
ELEMENTS = 1_000_000
_SMALL = 10_000

#: Every operator that is compared, in the order of the table.
OPERATORS: dict[str, Operator] = {name: operator for family in _FAMILIES for name, operator in family.OPERATORS.items()}


def hand_picked(operator: str) -> list[Case]:
    """Return the hand-picked cases of an operator."""
    return OPERATORS[operator].hand_picked(operator)


def random_cases(operator: str, count: int, seed: int, elements: int = ELEMENTS) -> Iterator[Case]:
    """
    Yield ``count`` random calls of an operator; each depends only on operator, seed, position and ``elements``.

    One in forty has up to ``elements`` numbers, the others up to ten thousand: many small cases show an operator's
    errors sooner than few large ones.
    """
    for position in range(count):
        place = [seed, zlib.crc32(operator.encode()), position]
        is_large = np.random.default_rng([*place, 1]).random() < 1 / 40
        most = elements if is_large else min(elements, _SMALL)
        yield OPERATORS[operator].random(np.random.default_rng(place), operator, most)
