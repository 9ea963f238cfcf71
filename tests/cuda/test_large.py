"""
More than 2^31 elements: in a table, a result, a gradient and a list of ids.

Each test also runs at a small size on the CPU, which shows that its expected values are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import torchsparse_rec
from torchsparse_rec import ops

HUGE = 2**31 + 2**20
DIM = 64
sizes = pytest.mark.parametrize(
    ("device", "elements"), [("cpu", 2**16), pytest.param("cuda", HUGE, marks=pytest.mark.cuda)]
)


@contextmanager
def memory(device: str, gigabytes: float) -> Iterator[None]:
    """Skip the test if so many gigabytes are not free, or if other programs take them meanwhile."""
    if device == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] / 1e9
        if free < gigabytes:
            pytest.skip(f"{gigabytes:g} GB of memory are needed, {free:.1f} are free")
    try:
        yield
        if device == "cuda":
            torchsparse_rec.check_errors(device)
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()


def table(elements: int, device: str) -> Tensor:
    """Return a table ``[elements / DIM, DIM]`` of float16 whose row r holds r mod 97."""
    numbers = (torch.arange(elements // DIM, device=device) % 97).half()
    return numbers.unsqueeze(1).expand(-1, DIM).contiguous()


def ends_and_between(rows: int, count: int, device: str) -> Tensor:
    """Return ids of the first row, the last two and a middle one, and then of random rows."""
    generator = torch.Generator(device).manual_seed(0)
    between = torch.randint(0, rows, (count - 4,), generator=generator, device=device)
    return torch.cat([torch.tensor([0, rows - 1, rows - 2, rows // 2], device=device), between])


@sizes
def test_rows_of_a_huge_table(device: str, elements: int) -> None:
    with memory(device, 10):
        weight = table(elements, device)
        ids = ends_and_between(len(weight), 4_000, device)
        wanted = (ids % 97).half()
        assert bool((ops.embedding(weight, ids) == wanted.unsqueeze(1)).all())
        pairs = torch.arange(0, 4_001, 2, device=device)
        pooled = ops.embedding_bag(weight, ids, pairs)
        assert bool((pooled == (wanted[::2] + wanted[1::2]).unsqueeze(1)).all())
        highest = ops.embedding_bag(weight, ids, pairs, mode="max")
        assert bool((highest == torch.maximum(wanted[::2], wanted[1::2]).unsqueeze(1)).all())
        segments = torch.arange(4_000, device=device) // 2
        summed = ops.sparse_segment_sum(weight, ids, segments, 2_000)
        assert torch.equal(summed, pooled)


@sizes
def test_a_huge_result_of_a_lookup(device: str, elements: int) -> None:
    with memory(device, 12):
        weight = table(97 * DIM, device)
        ids = (torch.arange(elements // DIM, device=device, dtype=torch.int32) * 31) % 97
        rows = ops.embedding(weight, ids)
        assert rows.numel() > elements - DIM
        for part, wanted in zip(rows.split(2**22), ids.split(2**22), strict=True):
            assert bool((part == wanted.half().unsqueeze(1)).all())


@sizes
def test_a_huge_result_of_pooling(device: str, elements: int) -> None:
    """Pool one id per bag, with every third bag empty."""
    with memory(device, 14):
        weight, bags = table(97 * DIM, device), elements // DIM
        lengths = (torch.arange(bags, device=device) % 3 != 0).long()
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        ids = (torch.arange(int(offsets[-1]), device=device) * 31) % 97
        pooled = ops.embedding_bag(weight, ids, offsets)
        wanted = torch.zeros(bags, dtype=torch.float16, device=device)
        wanted[lengths == 1] = ids.half()
        for part, right in zip(pooled.split(2**22), wanted.split(2**22), strict=True):
            assert bool((part == right.unsqueeze(1)).all())


@sizes
def test_a_huge_gradient(device: str, elements: int) -> None:
    """Compute dense gradients of a lookup and of a segment sum: zeros, except in the rows that occur."""
    with memory(device, 14):
        rows = elements // DIM
        ids = ends_and_between(rows, 5_000, device)
        present, counts = ids.unique(return_counts=True)
        wanted = counts.half().unsqueeze(1).expand(-1, DIM)
        ones = torch.ones(5_000, DIM, dtype=torch.float16, device=device)
        gradient = torch.ops.torchsparse_rec.embedding_dense_backward.default(
            ones, ids, None, None, None, rows, 0, -1, False
        )
        assert torch.equal(gradient[present], wanted)
        assert int(sum(part.any(1).sum() for part in gradient.split(2**22))) == len(present)
        del gradient
        segments = torch.arange(5_000, device=device)
        gradient = ops.sparse_segment_sum_grad(ones, ids, segments, rows)
        assert torch.equal(gradient[present], wanted)
        assert int(sum(part.any(1).sum() for part in gradient.split(2**22))) == len(present)
        values, found = ops.sparse_segment_sum_grad_v2(ones, ids, segments, rows)
        assert torch.equal(found, present) and torch.equal(values, wanted)


@sizes
def test_a_huge_gradient_of_rows(device: str, elements: int) -> None:
    """Add up a gradient of that many elements into few rows."""
    with memory(device, 14):
        count = elements // DIM
        ids = torch.arange(count, device=device) % 97
        # The last gradients are a sixteenth, the others zero: sums are exact.
        grad = torch.zeros(count, DIM, dtype=torch.float32 if device == "cpu" else torch.float16, device=device)
        grad[-97 * 16 :] = 0.0625
        values, rows = torch.ops.torchsparse_rec.embedding_sparse_backward.default(
            grad, ids, None, None, None, 97, 0, -1, False
        )
        assert rows.tolist() == list(range(97))
        wanted = torch.bincount(ids[-97 * 16 :], minlength=97).to(grad.dtype) * 0.0625
        assert torch.equal(values, wanted.unsqueeze(1).expand(-1, DIM))


@sizes
def test_a_huge_list_of_ids(device: str, elements: int) -> None:
    with memory(device, 26):
        few = torch.arange(-125, 126, dtype=torch.int8, device=device)
        repeats = elements // 251
        buckets = ops.to_hash_bucket_fast(few.repeat(repeats), 1_000_003).view(repeats, 251)
        wanted = ops.to_hash_bucket_fast(few, 1_000_003)
        for part in buckets.split(2**20):
            assert bool((part == wanted).all())
