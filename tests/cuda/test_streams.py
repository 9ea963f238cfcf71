"""On CUDA an operator works on the current stream alone, with torch's memory, and gives the same bits every time."""

from __future__ import annotations

import gc

import pytest
import torch
from calls import assert_same_bits, call
from cuda_cases import CASES, DEVICE, WIDE, WIDE_CASES, blank, input_tensors, overwrite
from samples.large_sizes import Build
from samples.sample import Sample

import torchsparse_rec

# Some 50 ms of a GPU's clock.
CYCLES = 100_000_000

each_case = pytest.mark.parametrize("build", CASES, ids=lambda build: build.name)


@pytest.mark.cuda
@each_case
def test_side_stream(build: Build) -> None:
    """Read inputs that a stream other than the default writes late: the operator must work on that stream alone."""
    sample = build().to(DEVICE)
    wanted = [x.clone() for x in call(sample)]
    late = blank(sample)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        overwrite(late, sample)
        results = call(late)
    stream.synchronize()
    for actual, same in zip(results, wanted, strict=True):
        assert_same_bits(actual, same)
    torchsparse_rec.check_errors(DEVICE)


@pytest.mark.cuda
@each_case
def test_same_bits_twenty_times(build: Build) -> None:
    sample = build().to(DEVICE)
    wanted = [x.clone() for x in call(sample)]
    for _ in range(20):
        for actual, same in zip(call(sample), wanted, strict=True):
            assert_same_bits(actual, same)


# ---- Memory ---------------------------------------------------------------------------------------------------------


def size_of(tensors: list[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.cuda
@pytest.mark.parametrize("build", CASES + WIDE_CASES, ids=lambda build: build.name)
def test_memory_is_bounded_and_given_back(build: Build) -> None:
    """Use scratch memory to sort and hash the ids, not for each row, and give it back to torch afterwards."""
    sample = build().to(DEVICE)
    call(sample)  # makes allocations that happen once, and resizes the outputs
    gc.collect()  # what other tests have left would be given back in between
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call(sample)
    torch.cuda.synchronize()
    peak, held = torch.cuda.max_memory_allocated() - before, size_of(list(results))
    del results
    assert torch.cuda.memory_allocated() == before
    assert peak <= held + scratch_limit(sample)


def scratch_limit(sample: Sample) -> int:
    """Return the most bytes of scratch memory: sorted pairs, hash tables, offsets, at most one copy of the inputs."""
    schema = getattr(torch.ops.torchsparse_rec, sample.operator).default._schema
    by_name = {argument.name: x for argument, x in zip(schema.arguments, sample.arguments, strict=False)}
    given = input_tensors(sample)
    ids = max((x.numel() for x in given if not x.is_floating_point()), default=0)
    sizes = ("num_segments", "output_dim0", "dense_output_dim0", "num_embeddings")
    asked = [by_name.get(name) or 0 for name in sizes]
    rows = sum(x.shape[0] for x in given if x.dim()) + sum(sum(x) if isinstance(x, list) else x for x in asked)
    return 256 * ids + 32 * rows + size_of(given) + (4 << 20)


def test_the_limit_leaves_no_room_for_a_row_per_id() -> None:
    for build in WIDE_CASES:
        assert scratch_limit(build()) < WIDE.items * WIDE.dim * 4
