"""The sentences and checks of csrc/sparse_segment.h that no sample shows; all samples are in test_operators.py."""

from __future__ import annotations

import re

import pytest
import torch
from devices import KERNELS, cpu_only
from pairs import in_pairs
from torch import Tensor

from torchsparse_rec import ops

pytestmark = pytest.mark.usefixtures("kernels")

FORWARD = {"sum": ops.sparse_segment_sum, "mean": ops.sparse_segment_mean, "sqrt_n": ops.sparse_segment_sqrt_n}
GRAD = {
    "sum": ops.sparse_segment_sum_grad,
    "mean": ops.sparse_segment_mean_grad,
    "sqrt_n": ops.sparse_segment_sqrt_n_grad,
}
GRAD_V2 = {
    "sum": ops.sparse_segment_sum_grad_v2,
    "mean": ops.sparse_segment_mean_grad_v2,
    "sqrt_n": ops.sparse_segment_sqrt_n_grad_v2,
}
REDUCTIONS = list(FORWARD)
GRADIENTS = {f"{r}_grad": f for r, f in GRAD.items()} | {f"{r}_grad_v2": f for r, f in GRAD_V2.items()}
# Every public function as f(values, indices, segment_ids, size).
OPERATORS = FORWARD | GRADIENTS
# Four entries: row 0 twice, in segments of two, none and two entries.
INDICES, SEGMENT_IDS = torch.tensor([0, 2, 1, 0]), torch.tensor([0, 0, 2, 2])

each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)


# ---- Values ---------------------------------------------------------------------------------------------------------


@each_reduction
def test_offsets_instead_of_segment_ids(reduction: str) -> None:
    for shape in ((3,), (3, 2), (3, 2, 5)):
        data = torch.randn(shape)
        for dtype in (torch.int32, torch.int64):
            offsets = torch.tensor([0, 2, 2, 4, 4], dtype=dtype)
            result = FORWARD[reduction](data, INDICES, offsets=offsets)
            torch.testing.assert_close(result, FORWARD[reduction](data, INDICES, SEGMENT_IDS, 4))


def test_entries_are_added_in_order() -> None:
    """Add in float32, where 1e8 + 1 is 1e8: only the given order makes ((1e8 + 1) - 1e8) + 1 equal to 1."""
    data = torch.tensor([[1e8], [1.0], [-1e8]])
    ids = torch.zeros(4, dtype=torch.int64)
    assert ops.sparse_segment_sum(data, torch.tensor([0, 1, 2, 1]), ids).item() == 1.0
    assert ops.sparse_segment_sum(data, torch.tensor([0, 2, 1, 1]), ids).item() == 2.0
    assert ops.sparse_segment_sum_grad(data, ids, torch.tensor([0, 1, 2, 1]), 1).item() == 1.0
    assert ops.sparse_segment_sum_grad(data, ids, torch.tensor([0, 2, 1, 1]), 1).item() == 2.0
    assert ops.sparse_segment_sum_grad_v2(data, ids, torch.tensor([0, 1, 2, 1]), 1)[0].item() == 1.0


@cpu_only
def test_a_long_segment_is_added_in_blocks() -> None:
    """Add 16 rows to a block and 16 blocks to a part, in float32; then the parts in float64."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(1000, 3, generator=generator)
    indices = torch.randint(0, 1000, (200 * 256,), generator=generator)
    # numpy's cumsum adds one row after another, in float32 (torch's accumulates in float64).
    blocks = data[indices].numpy().reshape(200, 16, 16, 3).cumsum(2)[:, :, -1]
    parts = blocks.cumsum(1)[:, -1]
    wanted = torch.from_numpy(parts.astype("float64").cumsum(0)[-1].astype("float32"))
    ids = torch.zeros_like(indices)
    assert torch.equal(ops.sparse_segment_sum(data, indices, ids)[0], wanted)
    assert torch.equal(ops.sparse_segment_sum_grad(data, ids, indices, 1)[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_accumulate_in_float32(dtype: torch.dtype) -> None:
    """Keep eight ones added to 2048, each of which float16 would lose alone; in bfloat16 256 + 1 is 256."""
    large = 2048.0 if dtype == torch.float16 else 256.0
    data = torch.tensor([large, 1.0], dtype=dtype)
    indices, ids = torch.tensor([0] + [1] * 8), torch.zeros(9, dtype=torch.int64)
    assert ops.sparse_segment_sum(data, indices, ids).tolist() == [large + 8]
    assert ops.sparse_segment_sum_grad(data, ids, indices, 1).tolist() == [large + 8]
    assert ops.sparse_segment_mean(data * 0 + 60000, indices, ids).isfinite().all()


@each_reduction
def test_nan_and_infinity_stay_in_their_segment(reduction: str) -> None:
    data = torch.tensor([[torch.nan, 1.0], [torch.inf, 2.0], [3.0, 4.0]])
    result = FORWARD[reduction](data, torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), 4)
    assert result[0, 0].isnan() and result[1, 0] == torch.inf
    assert result[0, 1] == 1 and result[1:, 1].tolist() == [2.0, 4.0, 0.0] and result[2:, 0].tolist() == [3.0, 0.0]


# ---- Sizes ----------------------------------------------------------------------------------------------------------


@each_reduction
def test_gradients_of_nothing_are_zero(reduction: str) -> None:
    """Return zeros where TensorFlow 2.21 returns uninitialised memory."""
    nothing = torch.empty(0, dtype=torch.int32)
    torch.full((1000, 7), torch.nan)  # freed at once: memory that a forgotten initialisation would show
    result = GRAD[reduction](torch.ones(4, 7), nothing, nothing, 1000)
    assert torch.equal(result, torch.zeros(1000, 7))
    values, rows = GRAD_V2[reduction](torch.ones(4, 7), nothing, nothing, 1000)
    assert values.shape == (0, 7) and rows.shape == (0,) and rows.dtype == torch.int32


@cpu_only
def test_threads_count_unsorted_segment_ids_together(restore_threads: None) -> None:
    """Count three segments of a million entries in turn: threads write the same few counters all the time."""
    torch.set_num_threads(2)
    ids = torch.arange(3_000_000, dtype=torch.int32) % 3
    grad, indices = torch.ones(3, 1, dtype=torch.float64), torch.zeros_like(ids)
    for _ in range(10):  # on a busy machine the threads seldom meet
        result = ops.sparse_segment_mean_grad(grad, indices, ids, 1)
        torch.testing.assert_close(result.item(), 3.0, rtol=1e-8, atol=0)  # one lost count is 1e-6


# ---- out= -----------------------------------------------------------------------------------------------------------


@each_reduction
def test_out_reuses_memory_that_suffices(reduction: str) -> None:
    grad = torch.randn(3, 2)
    wanted = GRAD[reduction](grad, INDICES, SEGMENT_IDS, 5)
    for shape in ((5, 2), (40, 3), (10,)):
        out = torch.full(shape, torch.nan)
        address = out.data_ptr()
        assert GRAD[reduction](grad, INDICES, SEGMENT_IDS, 5, out=out) is out
        assert out.data_ptr() == address and torch.equal(out, wanted)


@each_reduction
def test_v2_out_reuses_memory_that_suffices(reduction: str) -> None:
    grad = torch.randn(3, 2)
    wanted = GRAD_V2[reduction](grad, INDICES, SEGMENT_IDS, 5)
    out = torch.full((20, 2), torch.nan), torch.full((20,), -1)
    addresses = [x.data_ptr() for x in out]
    result = GRAD_V2[reduction](grad, INDICES, SEGMENT_IDS, 5, out=out)
    for actual, given, address, right in zip(result, out, addresses, wanted, strict=True):
        assert actual is given and given.data_ptr() == address and torch.equal(given, right)


def test_out_is_refused() -> None:
    grad = torch.randn(3, 2)
    call = (INDICES, SEGMENT_IDS, 5)
    with pytest.raises(ValueError, match="out must have the dtype of grad, Float, got Double"):
        ops.sparse_segment_sum_grad(grad, *call, out=torch.empty(5, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="out must be contiguous"):
        ops.sparse_segment_sum_grad(grad, *call, out=torch.empty(2, 5).t())
    with pytest.raises(ValueError, match="values must have the dtype of grad, Float, got Half"):
        ops.sparse_segment_sum_grad_v2(grad, *call, out=(torch.empty(0).half(), torch.empty(0, dtype=torch.int64)))
    with pytest.raises(ValueError, match="rows must have the dtype of indices, Long, got Int"):
        ops.sparse_segment_sum_grad_v2(grad, *call, out=(torch.empty(0), torch.empty(0, dtype=torch.int32)))
    with pytest.raises(ValueError, match="rows must be contiguous"):
        ops.sparse_segment_sum_grad_v2(grad, *call, out=(torch.empty(0), torch.empty(8, dtype=torch.int64)[::2]))


def test_no_gradient_passes_through_out() -> None:
    grad, call = torch.randn(3, 2), (INDICES, SEGMENT_IDS, 5)
    rows = torch.empty(0, dtype=torch.int64)
    wants, wanted = grad.clone().requires_grad_(), torch.empty(0, requires_grad=True)
    for values, out in ((wants, torch.empty(0)), (grad, wanted)):
        with pytest.raises(ValueError, match="out= cannot be used with tensors that require a gradient"):
            ops.sparse_segment_sum_grad(values, *call, out=out)
        with pytest.raises(ValueError, match="out= cannot be used with tensors that require a gradient"):
            ops.sparse_segment_sum_grad_v2(values, *call, out=(out, rows))
    with torch.no_grad():
        out = ops.sparse_segment_sum_grad(wants, *call, out=torch.empty(0))
    assert torch.equal(out, ops.sparse_segment_sum_grad(grad, *call))


@cpu_only
def test_a_failed_call_leaves_out_alone() -> None:
    out = torch.full((5, 2), 7.0)
    with pytest.raises(IndexError):
        ops.sparse_segment_sum_grad(torch.ones(3, 2), torch.tensor([0, 5]), torch.tensor([0, 1]), 5, out=out)
    assert torch.equal(out, torch.full((5, 2), 7.0))


# ---- Bad values: the error names the argument, the value and its position -------------------------------------------

ITEMS = 2501
POSITIONS = (0, 1237, ITEMS - 1)
ID_DTYPES = (torch.int32, torch.int64)


def names(argument: str, value: int, position: int) -> str:
    """Return a pattern for messages that hold all three, as words of their own, in any order."""
    return "".join(rf"(?=.*(?<![\w-]){re.escape(str(word))}(?!\w))" for word in (argument, value, position))


def long_call(dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return a call with ITEMS entries and values of 50 rows, which is the number of rows and of segments."""
    entries = torch.arange(ITEMS)
    return torch.ones(50, 3), (entries * 7 % 50).to(dtype), (entries * 50 // ITEMS).to(dtype), 50


def has(dtype: torch.dtype, value: int, *_: object) -> bool:
    """Say whether an integer is one of a dtype's numbers."""
    return torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


VALUES_OUTSIDE = (-1, 50, 2**31 - 1, -(2**31), 2**40, -(2**62))


@in_pairs(has, dtype=ID_DTYPES, value=VALUES_OUTSIDE, position=POSITIONS, name=OPERATORS, kernels=KERNELS)
def test_index_out_of_range(dtype: torch.dtype, value: int, position: int, name: str) -> None:
    values, indices, segment_ids, size = long_call(dtype)
    indices[position] = value
    with pytest.raises(IndexError, match=names("indices", value, position)):
        OPERATORS[name](values, indices, segment_ids, size)


@each_reduction
def test_index_out_of_range_of_an_empty_table(reduction: str) -> None:
    with pytest.raises(IndexError, match=names("indices", 0, 0)):
        FORWARD[reduction](torch.empty(0, 3), torch.tensor([0]), torch.tensor([0]), 1)
    with pytest.raises(IndexError, match=names("indices", 0, 0)):
        GRAD[reduction](torch.ones(1, 3), torch.tensor([0]), torch.tensor([0]), 0)


@in_pairs(reduction=REDUCTIONS, position=POSITIONS, num_segments=(50, None), kernels=KERNELS)
def test_negative_segment_id(reduction: str, position: int, num_segments: int | None) -> None:
    data, indices, segment_ids, _ = long_call()
    segment_ids[position] = -3
    with pytest.raises(ValueError, match=names("segment_ids", -3, position)):
        FORWARD[reduction](data, indices, segment_ids, num_segments)


@in_pairs(reduction=REDUCTIONS, position=(1, 1237, ITEMS - 1), num_segments=(60, None), kernels=KERNELS)
def test_unsorted_segment_ids(reduction: str, position: int, num_segments: int | None) -> None:
    """Name the id at ``position``, which is smaller than the one before it."""
    data, indices, segment_ids, _ = long_call()
    segment_ids += 5
    segment_ids[position] = 3
    with pytest.raises(ValueError, match=names("segment_ids", 3, position)):
        FORWARD[reduction](data, indices, segment_ids, num_segments)


@each_reduction
def test_num_segments_too_small(reduction: str) -> None:
    data, indices, segment_ids, _ = long_call()
    first = int((segment_ids == 49).nonzero()[0])
    with pytest.raises(ValueError, match=r"segment_ids.*(?<!\d)49(?!\d)"):
        FORWARD[reduction](data, indices, segment_ids, 49)
    with pytest.raises(ValueError, match=r"segment_ids"):
        FORWARD[reduction](data, indices[first:], segment_ids[first:], 0)
    with pytest.raises(ValueError, match=r"segment_ids.*(?<!\d)4000000000(?!\d)"):
        FORWARD[reduction](data, indices[:1], torch.tensor([4_000_000_000]), 5)


@in_pairs(dtype=ID_DTYPES, value=VALUES_OUTSIDE[:4], position=POSITIONS, name=GRADIENTS, kernels=KERNELS)
def test_segment_id_out_of_range_in_gradients(dtype: torch.dtype, value: int, position: int, name: str) -> None:
    grad, indices, segment_ids, size = long_call(dtype)
    segment_ids[position] = value
    with pytest.raises(IndexError, match=names("segment_ids", value, position)):
        GRADIENTS[name](grad, indices, segment_ids, size)


def test_the_first_bad_entry_is_named() -> None:
    for threads_items in (10, 200_000):
        indices = torch.zeros(threads_items, dtype=torch.int64)
        indices[threads_items // 2 :] = 9
        with pytest.raises(IndexError, match=names("indices", 9, threads_items // 2)):
            ops.sparse_segment_sum(torch.ones(3, 1), indices, torch.zeros_like(indices))


# ---- Bad shapes, dtypes and arguments -------------------------------------------------------------------------------

VALUES = torch.ones(4, 2)
# Both kinds of kernels share these checks.
FORWARD_CHECKS = {
    "data must be float16, bfloat16, float32 or float64, got Int": dict(data=VALUES.int()),
    "data must be float16, bfloat16, float32 or float64, got ComplexFloat": dict(data=VALUES.to(torch.complex64)),
    "data must have rank >= 1, got a scalar": dict(data=torch.tensor(1.0)),
    "indices must have rank 1, got shape [2, 2]": dict(indices=INDICES.reshape(2, 2)),
    "indices must have rank 1, got shape []": dict(indices=torch.tensor(0)),
    "segment_ids must have rank 1, got shape [4, 1]": dict(segment_ids=SEGMENT_IDS.reshape(4, 1)),
    "indices must be int32 or int64, got Float": dict(indices=INDICES.float()),
    "indices must be int32 or int64, got Short": dict(indices=INDICES.to(torch.int16)),
    "segment_ids must be int32 or int64, got Bool": dict(segment_ids=SEGMENT_IDS.bool()),
    "segment_ids must have the length of indices, 4, got 3": dict(segment_ids=SEGMENT_IDS[:3]),
    "segment_ids must have the length of indices, 0, got 4": dict(indices=INDICES[:0]),
    "num_segments must be >= 0, got -1": dict(num_segments=-1),
}


@in_pairs(text=FORWARD_CHECKS, reduction=REDUCTIONS, kernels=KERNELS)
def test_forward_checks(text: str, reduction: str) -> None:
    call = dict(data=VALUES, indices=INDICES, segment_ids=SEGMENT_IDS, num_segments=3) | FORWARD_CHECKS[text]
    with pytest.raises(ValueError, match=re.escape(f"sparse_segment_reduce: {text}")):
        FORWARD[reduction](**call)


@in_pairs(text=[*FORWARD_CHECKS][:-1], reduction=REDUCTIONS, kernels=KERNELS)
def test_gradient_checks(text: str, reduction: str) -> None:
    call = dict(data=VALUES, indices=INDICES, segment_ids=SEGMENT_IDS) | FORWARD_CHECKS[text]
    call["grad"] = call.pop("data")
    match = f"sparse_segment_reduce_grad.*: {re.escape(text.replace('data', 'grad'))}"
    with pytest.raises(ValueError, match=match):
        GRAD[reduction](**call, output_dim0=3)
    with pytest.raises(ValueError, match=match):
        GRAD_V2[reduction](**call, dense_output_dim0=3)


@each_reduction
def test_negative_output_dim0(reduction: str) -> None:
    with pytest.raises(ValueError, match=": output_dim0 must be >= 0, got -2"):
        GRAD[reduction](VALUES, INDICES, SEGMENT_IDS, -2)
    with pytest.raises(ValueError, match=": dense_output_dim0 must be >= 0, got -2"):
        GRAD_V2[reduction](VALUES, INDICES, SEGMENT_IDS, -2)


@pytest.mark.parametrize("reduction", [-1, 3, 7])
def test_unknown_reduction(reduction: int) -> None:
    call = torch.ops.torchsparse_rec
    text = rf"reduction must be in \[0, 2\], got {reduction}"
    with pytest.raises(ValueError, match=text):
        call.sparse_segment_reduce(VALUES, INDICES, SEGMENT_IDS, 3, reduction)
    with pytest.raises(ValueError, match=text):
        call.sparse_segment_reduce_grad(VALUES, INDICES, SEGMENT_IDS, 3, reduction)
    with pytest.raises(ValueError, match=text):
        call.sparse_segment_reduce_grad_v2(VALUES, INDICES, SEGMENT_IDS, 3, reduction)


def test_segment_ids_or_offsets() -> None:
    offsets = torch.tensor([0, 2, 2, 4])
    with pytest.raises(ValueError, match="exactly one of segment_ids and offsets"):
        ops.sparse_segment_sum(VALUES, INDICES)
    with pytest.raises(ValueError, match="exactly one of segment_ids and offsets"):
        ops.sparse_segment_sum(VALUES, INDICES, SEGMENT_IDS, offsets=offsets)
    with pytest.raises(ValueError, match="num_segments must be None when offsets say it, got 3"):
        ops.sparse_segment_sum(VALUES, INDICES, num_segments=3, offsets=offsets)
    with pytest.raises(ValueError, match="data must have rank >= 1, got a scalar"):
        ops.sparse_segment_sum(torch.tensor(1.0), INDICES, offsets=offsets)
    with pytest.raises(IndexError, match=names("indices", 77, 1)):
        ops.sparse_segment_sum(VALUES, torch.tensor([0, 77, 0, 0]), offsets=offsets)


def test_offsets_with_a_table_of_no_rows() -> None:
    """Return the right shape: the size of a row is known even if there are no rows."""
    empty, offsets = torch.empty(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    assert ops.sparse_segment_mean(torch.empty(0, 2, 5), empty, offsets=offsets).shape == (3, 2, 5)
    assert ops.sparse_segment_mean(torch.empty(0), empty, offsets=offsets).shape == (3,)
    assert ops.sparse_segment_mean(torch.empty(4, 0, 5), INDICES, offsets=torch.tensor([0, 4])).shape == (1, 0, 5)
