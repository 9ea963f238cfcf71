"""Few cases for tests with many arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from random import Random
from typing import Any

import pytest

_FIXTURES = ("kernels", "lookup_size")


def in_pairs(allowed: Callable[..., bool] = lambda *_: True, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize arguments and fixtures of a test by their names, so that every two values meet: :func:`pairwise`."""
    indirect = [name for name in axes if name in _FIXTURES]
    return pytest.mark.parametrize(tuple(axes), pairwise(*axes.values(), allowed=allowed), indirect=indirect, ids=str)


def pairwise(*axes: Iterable[Any], allowed: Callable[..., bool] = lambda *_: True) -> list[tuple]:
    """
    Return few combinations, with a value of each axis, in which every two values of two axes meet.

    Where arguments do not depend on each other, a fault shows for a value of one or for two values that meet, whatever
    the others are: all combinations take many times as long, and find hardly more. Where a branch or a message depends
    on three arguments, make two of them one axis.

    Always one of the combinations with most new pairs is taken. The list is the same in every process.

    Args:
        axes: the values of each argument, of any type; two axes are combined fully.
        allowed: whether a combination, given as arguments, is possible; two values that none of these has do not meet.
    """
    values = [list(axis) for axis in axes]
    bits: dict[tuple, int] = {}
    possible = []
    for places in product(*(range(len(axis)) for axis in values)):
        case = tuple(axis[place] for axis, place in zip(values, places, strict=True))
        if allowed(*case):
            pairs = combinations(enumerate(places), 2)
            possible.append((case, sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs)))
    Random(0).shuffle(possible)  # each value then comes about as often as another, and many three of them meet
    found, missing = [], (1 << len(bits)) - 1
    while missing:
        case, pairs_of_it = max(possible, key=lambda x: (x[1] & missing).bit_count())
        found.append(case)
        missing &= ~pairs_of_it
    return found
