"""The same bits on every run and for every number of threads, at sizes that use several threads; correct results."""

from __future__ import annotations

import pytest
import torch
from calls import assert_same_bits, call
from devices import HARDWARE
from samples.large import EXACT_SAMPLES, LARGE_SAMPLES
from samples.large_sizes import Build


# Every test runs emulated operators in several orders.
@pytest.mark.parametrize("device", HARDWARE, indirect=True)
@pytest.mark.parametrize("build", LARGE_SAMPLES, ids=lambda build: build.name)
def test_same_bits_on_every_run(build: Build, device: str, restore_threads: None) -> None:
    """Run with each number of threads, and again: a later run may meet what an earlier one left in memory."""
    sample = build()
    torch.set_num_threads(1)
    wanted = call(sample.to(device))
    for threads in (2, 3, 2):
        torch.set_num_threads(threads)
        for actual, same in zip(call(sample.to(device)), wanted, strict=True):
            assert_same_bits(actual, same)


@pytest.mark.parametrize("build", EXACT_SAMPLES, ids=lambda build: build.name)
def test_large_results_are_right(build: Build, device: str, restore_threads: None) -> None:
    """Add up small whole numbers, whose sums are exact in any order: every bit is known."""
    sample, wanted = build()
    for threads in (1, 3) if device == "cpu" else (1,):
        torch.set_num_threads(threads)
        for actual, right in zip(call(sample.to(device)), wanted, strict=True):
            assert actual.dtype == right.dtype
            assert torch.equal(actual.cpu(), right)
