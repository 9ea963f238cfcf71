"""
The parity check by parts: every family of operators has a module here, with the random and hand-picked calls of each
operator and what their float results should be.

The rest is common: case.py says what an operator of the check is made of, evaluate.py runs a case on both sides,
compare.py compares the outcomes. What they should be is in reference/, whose functions the tests use too, and how far
floats may be off it in bounds.py and reference/rounded.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np

from . import (
    bucketize,
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
    indexed_slices,
    row_update,
    optimizers,
    bucketize,
    columns,
    columns_together,
)

#: The most numbers in a random case.
ELEMENTS = 1_000_000
_SMALL = 10_000

#: Every operator that is compared, in the order of the table.
OPERATORS: dict[str, Operator] = {name: operator for family in _FAMILIES for name, operator in family.OPERATORS.items()}


def hand_picked(operator: str) -> list[Case]:
    """The hand-picked cases of an operator."""
    return OPERATORS[operator].hand_picked(operator)


def random_cases(operator: str, count: int, seed: int, elements: int = ELEMENTS) -> Iterator[Case]:
    """
    ``count`` random calls of an operator; a case depends only on the operator, the seed, its position and ``elements``.

    One in forty has up to ``elements`` numbers, the others up to ten thousand: what is wrong with an operator shows in
    many small cases sooner than in few large ones.
    """
    for position in range(count):
        place = [seed, zlib.crc32(operator.encode()), position]
        is_large = np.random.default_rng([*place, 1]).random() < 1 / 40
        most = elements if is_large else min(elements, _SMALL)
        yield OPERATORS[operator].random(np.random.default_rng(place), operator, most)
