"""
Behaviour of the CUDA kernels alone, run without a GPU (tests/emulation): sizes beyond 2^31, numbers of launches.

Tests of behaviour on every device are in the other files, and run on emulated kernels too by the fixtures ``device``
and ``kernels``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from samples.row_optimizer import ruled
from samples.sample import Random

from emulation import fixture
from torchsparse_rec.compat._parity.reference import MEAN, SQRTN, SUM

Launches = Callable[[], int]


# ---- Operators ------------------------------------------------------------------------------------------------------


def test_the_fixture_gives_the_cpu_kernels_back() -> None:
    before = fixture.library().tsr_emulated_launches()
    torch.ops.torchsparse_rec.unique.default(torch.tensor([3, 3, 1]))
    assert fixture.library().tsr_emulated_launches() == before


# ---- Beyond 2^31 ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def huge() -> torch.Tensor:
    """Return more than 2^31 float16 elements; the system gives memory only to the pages that are written."""
    return torch.empty(2**31 + 2**12, dtype=torch.float16)


@pytest.mark.parametrize("dim", [64, 7])
def test_table_of_more_than_2_to_the_31_elements(dim: int, huge: torch.Tensor, emulated: Launches) -> None:
    rows = huge.numel() // dim
    table = huge[: rows * dim].view(rows, dim)
    small = Random(1).floats(6, dim, dtype=torch.float16)
    # The elements of the last two rows have numbers that do not fit in 31 bits.
    places = torch.tensor([0, 1, 2**30 // dim, 2**31 // dim - 1, 2**31 // dim + 1, rows - 1])
    table[places] = small
    picked = torch.tensor([5, 4, 0, 3, 3, 5, 1, 2])
    ids, bags, weights = places[picked], torch.tensor([0, 3, 3, 8]), Random(2).weights(8, torch.float16)
    segments, ops = torch.tensor([0, 0, 1, 1, 1, 3, 3, 3]), torch.ops.torchsparse_rec
    grad = Random(3).floats(3, dim, dtype=torch.float16)

    def results(table: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        pooled, _ = ops.embedding_bag.default(table, ids, bags, weights, MEAN, -1, False, False)
        return [
            ops.embedding.default(table, ids, -1, False, False),
            pooled,
            ops.embedding_bag.default(table, ids, bags, None, 3, -1, False, False)[0],
            ops.embedding_weights_backward.default(grad, table, ids, bags, weights, pooled, MEAN, -1),
            ops.sparse_segment_reduce.default(table, ids, segments, 5, SQRTN),
        ]

    for large, same in zip(results(table, ids), results(small, picked), strict=True):
        assert torch.equal(large, same)


FAR_ROWS = 2**33 + 9
# Ids that 32 bits would make the same, and the first and last row.
FAR_IDS = torch.tensor([5, 2**32 + 5, FAR_ROWS - 1, 5, 2**33 + 5, 0, 2**32 + 5])


def test_gradient_rows_beyond_2_to_the_32(emulated: Launches) -> None:
    grad = Random(1).integers(-9, 9, 7, 3, dtype=torch.float32)
    wanted = torch.stack([grad[5], grad[0] + grad[3], grad[1] + grad[6], grad[4], grad[2]])
    ops, rows = torch.ops.torchsparse_rec, [0, 5, 2**32 + 5, 2**33 + 5, FAR_ROWS - 1]
    for values, ids in (
        ops.embedding_sparse_backward.default(grad, FAR_IDS, None, None, None, FAR_ROWS, SUM, -1, False),
        ops.sparse_segment_reduce_grad_v2.default(grad, FAR_IDS, torch.arange(7), FAR_ROWS, SUM),
    ):
        assert ids.tolist() == rows and torch.equal(values, wanted)
    bags = ops.embedding_sparse_backward.default(
        grad[:2], FAR_IDS, torch.tensor([0, 4, 7]), None, None, FAR_ROWS, SUM, 2**32 + 5, False
    )
    assert bags[1].tolist() == [0, 5, 2**33 + 5, FAR_ROWS - 1]
    assert torch.equal(bags[0], torch.stack([grad[1], 2 * grad[0], grad[1], grad[0]]))


def test_id_beyond_2_to_the_32_is_told(emulated: Launches) -> None:
    with pytest.raises(IndexError, match=rf"indices\[1\] must be in \[0, {FAR_ROWS}\), got {FAR_ROWS + 2**32}"):
        torch.ops.torchsparse_rec.embedding_sparse_backward.default(
            torch.ones(3, 2), torch.tensor([5, FAR_ROWS + 2**32, 7]), None, None, None, FAR_ROWS, SUM, -1, False
        )


# ---- Small batches ---------------------------------------------------------------------------------------------------

# The most launches for 256 bags and some 2,000 ids: launching takes the host longer than they take the device.
SMALL: dict[str, tuple[str, int]] = {
    "lookup": ("embedding_bag", 4),
    "gradient": ("embedding_sparse_backward", 9),
    "update": ("embedding_collection_update_", 12),
}


@pytest.mark.parametrize("what", SMALL)
def test_launches_of_a_small_batch(what: str) -> None:
    """Count kernels, CUB's included, and memory that is set."""
    name, most = SMALL[what]
    random = Random(1)
    lengths = random.integers(0, 16, 256, dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = random.integers(0, 5000, int(offsets[-1]), dtype=torch.int64)
    ids[::3] = 7  # a row of many pieces
    weight, grad = random.floats(5000, 16, dtype=torch.float32), random.floats(256, 16, dtype=torch.float32)
    history = torch.zeros(8, 8, dtype=torch.float64)
    arguments = {
        "lookup": (weight, ids, offsets, None, SUM, -1, False, False),
        "gradient": (grad, ids, offsets, None, None, 5000, SUM, -1, False),
        "update": (
            *([weight], [torch.zeros_like(weight), torch.zeros_like(weight)], [torch.zeros(5000, dtype=torch.int32)]),
            *(history, grad, ids, offsets, None, None, [0], [0], [SUM], [256], [-1], True, [True], None),
            *(*ruled("adam", lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8), 1, 0, False, []),
        ),
    }[what]
    launches = fixture.library().tsr_emulated_launches
    before = launches()
    fixture.operator(name)(*arguments)
    assert launches() - before == most
