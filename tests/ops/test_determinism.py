"""The same bits on every run and for every number of threads, at sizes that use several threads; correct results."""

from __future__ import annotations

import pytest
import torch
from calls import call
from cuda_cases import STATIC_CASES, input_tensors, mirrored
from devices import HARDWARE
from ops.sample_checks import assert_all_same_bits
from samples.large import EXACT_SAMPLES, LARGE_SAMPLES
from samples.large_sizes import Build
from samples.sample import Sample
from torch import Tensor

OPERATORS: dict[str, list[Build]] = {}
for _build in LARGE_SAMPLES:
    OPERATORS.setdefault(_build.name.split("-")[0], []).append(_build)


# Every test runs emulated operators in several orders.
@pytest.mark.parametrize("device", HARDWARE, indirect=True)
@pytest.mark.parametrize("builds", OPERATORS.values(), ids=OPERATORS)
def test_same_bits_on_every_run(
    builds: list[Build], device: str, restore_threads: None, subtests: pytest.Subtests
) -> None:
    """Run with each number of threads, and again: a later run may meet what an earlier one left in memory."""
    for build in builds:
        with subtests.test(build.name):
            sample = build()
            torch.set_num_threads(1)
            wanted = call(sample.to(device))
            if device == "cpu" and build in STATIC_CASES:
                with subtests.test(f"{build.name}, mirrored"):
                    _check_mirrored(build.name, sample, wanted)
            for threads in (2, 3, 2):
                torch.set_num_threads(threads)
                assert_all_same_bits(call(sample.to(device)), wanted)


def _check_mirrored(name: str, sample: Sample, wanted: tuple[Tensor, ...]) -> None:
    """Call with the inputs that tests/cuda/test_graphs.py replays: they are valid, and give other results."""
    other = call(mirrored(sample).to("cpu"))
    assert [x.shape for x in wanted] == [x.shape for x in other]
    # A single value, a single row that is also the padding, and calls without inputs always give the same results.
    if "_from_0_to_1_" not in name and wanted[0].count_nonzero() and input_tensors(sample):
        assert any(not torch.equal(x, y) for x, y in zip(wanted, other, strict=True))


@pytest.mark.parametrize("build", EXACT_SAMPLES, ids=lambda build: build.name)
def test_large_results_are_right(build: Build, device: str, restore_threads: None) -> None:
    """Add up small whole numbers, whose sums are exact in any order: every bit is known."""
    sample, wanted = build()
    for threads in (1, 3) if device == "cpu" else (1,):
        torch.set_num_threads(threads)
        for actual, right in zip(call(sample.to(device)), wanted, strict=True):
            assert actual.dtype == right.dtype
            assert torch.equal(actual.cpu(), right)
