"""The cases of tests with many arguments: tests/pairs.py."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairs import pairwise

SIZES = [(2, 2, 2), (9, 6, 3, 2), (3, 4, 5, 2), (1, 7, 2), (4, 6), (9, 5, 5, 2, 2), (2, 2, 2, 2, 2, 2)]


def met(cases: list[tuple]) -> set:
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("some", [False, True])
def test_every_two_values_that_may_meet_do_in_few_cases(some: bool, sizes: tuple[int, ...]) -> None:
    def allowed(*case: int) -> bool:
        return not some or (case[0] != case[1] and sum(case) % 5 != 3)

    axes = [range(size) for size in sizes]
    cases = pairwise(*axes, allowed=allowed)
    *_, next_to_largest, largest = sorted(sizes)
    assert all(allowed(*case) for case in cases)
    assert met(cases) == met([case for case in product(*axes) if allowed(*case)])
    assert some or len(cases) == len(set(cases)) <= next_to_largest * largest + max(largest, 4)


def test_the_list_is_the_same_in_every_process() -> None:
    """Combine words, whose hashes differ between processes, and what has no hash."""
    assert pairwise(["one", "two"], [[], {}], {"x": 1, "y": 2}) == [
        ("two", [], "x"),
        ("one", [], "y"),
        ("one", {}, "x"),
        ("two", {}, "y"),
    ]
