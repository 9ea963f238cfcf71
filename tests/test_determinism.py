"""The same bits on every run and for every number of threads, at sizes that use several threads; and the right ones."""

from __future__ import annotations

import pytest
import torch
from large_samples import EXACT_SAMPLES, LARGE_SAMPLES
from sample import Sample
from test_operators import assert_same_bits, call

THREADS = (1, 2, 3)


def _assert_equal_results(sample: Sample, wanted: tuple[torch.Tensor, ...], device: str) -> None:
    for actual, same in zip(call(sample.to(device)), wanted, strict=True):
        assert_same_bits(actual, same)


@pytest.mark.parametrize("build", LARGE_SAMPLES, ids=lambda build: build.name)
def test_same_bits_for_every_number_of_threads(build, restore_threads: None) -> None:
    """Two runs of each: the first may meet fresh memory where a later one meets what an earlier left there."""
    sample = build()
    torch.set_num_threads(THREADS[0])
    wanted = call(sample.to("cpu"))
    for threads in (2, 3, 1, 3, 2):
        torch.set_num_threads(threads)
        _assert_equal_results(sample, wanted, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("build", LARGE_SAMPLES, ids=lambda build: build.name)
def test_same_bits_on_every_run_on_cuda(build) -> None:
    sample = build()
    wanted = call(sample.to("cuda"))
    for _ in range(3):
        _assert_equal_results(sample, wanted, "cuda")


@pytest.mark.parametrize("build", EXACT_SAMPLES, ids=lambda build: build.name)
def test_large_results_are_right(build, device: str, restore_threads: None) -> None:
    """Small whole numbers, whose sums are exact in any order: every bit is known."""
    sample, wanted = build()
    for threads in THREADS if device == "cpu" else (1,):
        torch.set_num_threads(threads)
        for actual, right in zip(call(sample.to(device)), wanted, strict=True):
            assert actual.dtype == right.dtype
            assert torch.equal(actual.cpu(), right)
