"""The faults that ``make mutate`` plants fit the sources; that tests notice them is left to ``make mutate``."""

from __future__ import annotations

from mutations import cuda, mutation


def test_every_fault_is_where_it_is_said_to_be() -> None:
    assert list(mutation.problems()) == []


def test_every_kernel_file_has_faults_to_plant() -> None:
    assert list(cuda.problems()) == []
