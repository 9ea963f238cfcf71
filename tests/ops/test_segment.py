"""The sentences and checks of csrc/segment.h; rules for all operators are in test_operators.py."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from devices import KERNELS, cpu_only
from pairs import in_pairs
from samples.sample import FLOATS
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import MAX, MEAN, MIN, PROD, SQRTN, SUM

pytestmark = pytest.mark.usefixtures("kernels")

REDUCTIONS = ("sum", "mean", "sqrt_n", "max", "min", "prod")
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)

each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
operators = torch.ops.torchsparse_rec


def sorted_one(reduction: str) -> Callable[..., Tensor]:
    return getattr(ops, f"segment_{reduction}")


def unsorted_one(reduction: str) -> Callable[..., Tensor]:
    return getattr(ops, f"unsorted_segment_{reduction}")


def raises(kind: type[Exception], text: str):
    return pytest.raises(kind, match=re.escape(text))


# ---- Segments without rows, dropped rows ----------------------------------------------------------------------------


@in_pairs(reduction=REDUCTIONS, dtype=FLOATS, kernels=KERNELS)
def test_segments_without_rows(reduction: str, dtype: torch.dtype) -> None:
    data, ids = torch.tensor([3.0], dtype=dtype), torch.tensor([1])
    gap = 1 if reduction == "prod" else 0
    assert sorted_one(reduction)(data, ids, 3).tolist() == [gap, 3, gap]
    info = torch.finfo(dtype)
    gap = {"prod": 1, "max": info.min, "min": info.max}.get(reduction, 0)
    assert unsorted_one(reduction)(data, ids, 3).tolist() == [gap, 3, gap]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_segments_without_rows_of_integers(dtype: torch.dtype) -> None:
    data, ids, info = torch.tensor([3]).to(dtype), torch.tensor([1]), torch.iinfo(dtype)
    assert ops.unsorted_segment_max(data, ids, 3).tolist() == [info.min, 3, info.min]
    assert ops.unsorted_segment_min(data, ids, 3).tolist() == [info.max, 3, info.max]
    assert ops.segment_max(data, ids, 3).tolist() == [0, 3, 0]
    assert ops.segment_prod(data, ids, 3).tolist() == [1, 3, 1]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_extremes_of_integers(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    numbers = [info.min, info.max, 0, 1, info.max - 1, info.min + 1]
    data = torch.tensor(numbers, dtype=dtype)
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    assert ops.segment_max(data, ids).tolist() == [info.max, 1, info.max - 1]
    assert ops.segment_min(data, ids).tolist() == [info.min, 0, info.min + 1]


@each_reduction
def test_rows_with_a_negative_id_are_left_out(reduction: str) -> None:
    data = torch.tensor([[1.0, 2.0], [torch.nan, torch.inf], [3.0, 5.0]], requires_grad=True)
    result = unsorted_one(reduction)(data, torch.tensor([1, -1, 1]), 2)
    assert torch.equal(result[1], sorted_one(reduction)(data[::2], torch.tensor([0, 0]))[0])
    result.sum().backward()
    assert data.grad[1].tolist() == [0, 0] and data.grad.isfinite().all()


# ---- Numbers --------------------------------------------------------------------------------------------------------


@cpu_only
@each_reduction
def test_a_single_negative_zero_stays(reduction: str) -> None:
    result = sorted_one(reduction)(torch.tensor([-0.0]), torch.tensor([0]))
    assert math.copysign(1, result.item()) == -1


@in_pairs(reduction=["max", "min"], position=range(5), kernels=KERNELS)
def test_nan_wins(reduction: str, position: int) -> None:
    data = torch.arange(5.0)
    data[position] = torch.nan
    assert sorted_one(reduction)(data, torch.zeros(5).long()).isnan().all()
    data = data.clone().requires_grad_()
    unsorted_one(reduction)(data, torch.zeros(5).long(), 1).sum().backward()
    assert data.grad.tolist() == [0] * 5


def test_halves_are_rounded_once() -> None:
    data = torch.tensor([2048.0] + [1.0] * 8, dtype=torch.float16)
    ids = torch.zeros(9).long()
    assert ops.segment_sum(data, ids).item() == 2056
    assert ops.unsorted_segment_sum(data, ids, 1).item() == 2056
    assert ops.segment_mean(torch.full((2,), 60000.0, dtype=torch.float16), ids[:2]).item() == 60000


def test_integers_wrap_and_their_mean_is_cut() -> None:
    def mean(*numbers: int, dtype: torch.dtype = torch.int8) -> int:
        return ops.segment_mean(torch.tensor(numbers, dtype=dtype), torch.zeros(len(numbers)).long()).item()

    assert mean(-3, -4) == -3 and mean(7, -8) == 0 and mean(3, 4) == 3 and mean(100, 100, 100) == 14
    assert mean(200, 201, dtype=torch.uint8) == 72 and mean(-(2**63), -1, dtype=torch.int64) == (2**63 - 1) // 2
    assert mean(*[1] * 256) == 0  # the number of rows wraps too
    assert mean(*[1] * 255, dtype=torch.int8) == 1
    data = torch.tensor([100, 100, 3], dtype=torch.int8)
    assert ops.segment_sum(data, torch.tensor([0, 0, 0])).item() == 203 - 256
    assert ops.unsorted_segment_prod(data, torch.tensor([0, 0, 0]), 1).item() == (30000 + 128) % 256 - 128


# ---- Gradients ------------------------------------------------------------------------------------------------------


@each_reduction
@pytest.mark.parametrize("function", [sorted_one, unsorted_one])
def test_rows_without_columns_have_gradients_without_columns(function: Callable, reduction: str) -> None:
    data = torch.empty(3, 0, requires_grad=True)  # no memory at all: `make sanitize` sees what touches it
    size = (2,) if function is unsorted_one else ()
    function(reduction)(data, torch.tensor([0, 0, 1]), *size).sum().backward()
    assert data.grad.shape == (3, 0)


@cpu_only
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradient_of_wide_rows(dtype: torch.dtype, restore_threads: None) -> None:
    """Divide rows wider than one division's block; some segments have no rows, and some are shared by threads."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor([1] * 100 + [2] * 3 + [5] * 200)
    grad = torch.randn(7, 2_500, generator=generator).to(dtype)
    counts = torch.bincount(ids, minlength=7).unsqueeze(1)
    exact = torch.promote_types(dtype, torch.float32)
    for reduction, divisors in ((SUM, torch.ones(7, 1)), (MEAN, counts), (SQRTN, counts.to(exact).sqrt())):
        wanted = (grad.to(exact) / divisors.to(exact)).to(dtype)[ids]
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            got = operators.segment_reduce_backward.default(grad, None, ids, None, len(ids), reduction)
            assert torch.equal(got, wanted)


@cpu_only
def test_gradient_of_long_segments(restore_threads: None) -> None:
    """Cut segments longer than a thread's share by columns; every number of threads gives the same bits."""
    generator = torch.Generator().manual_seed(2)
    data = torch.randint(-3, 4, (40_000, 37), generator=generator).float()
    ids = torch.zeros(40_000).long()
    ids[39_000:] = torch.arange(1000) // 10 + 1
    order = torch.randperm(40_000, generator=generator)
    for reduction in (SUM, MEAN, MAX, MIN, PROD):
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            forward = operators.segment_reduce.default(data, ids, None, 101, reduction)
            shuffled = operators.unsorted_segment_reduce.default(data[order], ids[order], 101, reduction)
            back = operators.segment_reduce_backward.default(forward, data, ids, None, 40_000, reduction)
            back_shuffled = operators.unsorted_segment_reduce_backward.default(
                forward, data[order], ids[order], reduction
            )
            assert torch.equal(back_shuffled, back[order])
            results.append([forward, shuffled, back])
        for result in results[1:]:
            assert all(
                torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(result, results[0], strict=True)
            )
        if reduction in (SUM, MAX, MIN):  # exact in any order
            words = {SUM: "sum", MAX: "amax", MIN: "amin"}
            columns = ids[:, None].expand_as(data)
            wanted = torch.zeros(101, 37).scatter_reduce_(0, columns, data, words[reduction], include_self=False)
            assert torch.equal(results[0][0], wanted) and torch.equal(results[0][1], wanted)


@in_pairs(reduction=[SUM, MEAN, SQRTN, MAX, PROD], rows=[129, 1000], kernels=KERNELS)
def test_segments_of_many_pieces(reduction: int, rows: int) -> None:
    """Add segments in pieces of 128 rows, as CUDA does."""
    generator = torch.Generator().manual_seed(rows)
    # Sums of whole numbers are exact; products are of powers of two, whose exponents go up and down.
    data = torch.randint(-4, 5, (rows, 6), generator=generator).float()
    if reduction == PROD:
        data = 2.0 ** (torch.arange(rows)[:, None] % 2 * 2 - 1).float().expand(rows, 6)
    ids = torch.where(torch.arange(rows) < 5, 0, 2)
    wanted = {
        SUM: data[5:].sum(0),
        MEAN: data[5:].sum(0) / (rows - 5),
        SQRTN: data[5:].sum(0) / torch.tensor(float(rows - 5)).sqrt(),
        MAX: data[5:].amax(0),
        PROD: data[5:].prod(0),
    }[reduction]
    result = operators.segment_reduce.default(data, ids, None, 4, reduction)
    torch.testing.assert_close(result[2], wanted, rtol=1e-6, atol=0)
    again = operators.unsorted_segment_reduce.default(data.flip(0), ids.flip(0), 4, reduction)
    torch.testing.assert_close(again[2], wanted, rtol=1e-6, atol=0)
    back = operators.segment_reduce_backward.default(torch.ones(4, 6), data, ids, None, rows, reduction)
    parts = {
        SUM: torch.ones_like(data[5:]),
        MEAN: torch.full_like(data[5:], 1 / (rows - 5)),
        SQRTN: torch.full_like(data[5:], (rows - 5) ** -0.5),
        MAX: (data[5:] == wanted) / (data[5:] == wanted).sum(0),
        PROD: wanted / data[5:],
    }[reduction]
    torch.testing.assert_close(back[5:], parts.expand(rows - 5, 6), rtol=1e-6, atol=0)


def test_products_of_many_pieces_with_zeros() -> None:
    """Give one zero in a later piece the only gradient, and none if two zeros lie in different pieces."""
    data = 2.0 ** (torch.arange(1000)[:, None] % 2 * 2 - 1).float().repeat(1, 3)
    data[700, 0] = data[300, 1] = data[800, 1] = 0
    ids = torch.zeros(1000, dtype=torch.int64)
    back = operators.segment_reduce_backward.default(torch.ones(1, 3), data, ids, None, 1000, PROD)
    wanted = torch.zeros(1000, 3)
    wanted[700, 0], wanted[:, 2] = 2.0, 1 / data[:, 2]  # 500 halves and 499 twos; all of them give 1
    assert torch.equal(back, wanted)


# ---- Errors ---------------------------------------------------------------------------------------------------------

DATA = torch.ones(3, 2)
ERRORS = {
    "both": (lambda: ops.segment_sum(DATA, torch.zeros(3).long(), offsets=torch.tensor([0, 3])), "got both"),
    "neither": (lambda: ops.segment_sum(DATA), "exactly one of segment_ids and offsets must be given, got neither"),
    "num_segments with offsets": (
        lambda: ops.segment_max(DATA, None, 1, offsets=torch.tensor([0, 3])),
        "num_segments must be None when offsets say it, got 1",
    ),
    "negative num_segments": (
        lambda: ops.segment_sum(DATA, torch.zeros(3).long(), -1),
        "segment_reduce: num_segments must be >= 0, got -1",
    ),
    "scalar": (lambda: ops.segment_sum(torch.tensor(1.0), torch.zeros(1).long()), "data must have rank >= 1"),
    "length": (
        lambda: ops.segment_sum(DATA, torch.zeros(2).long()),
        "segment_reduce: segment_ids must have one id for each of the 3 rows, got 2",
    ),
    "rank": (
        lambda: ops.segment_sum(DATA, torch.zeros(3, 1).long()),
        "segment_reduce: segment_ids must have rank 1, got shape [3, 1]",
    ),
    "id dtype": (
        lambda: ops.segment_sum(DATA, torch.zeros(3)),
        "segment_reduce: segment_ids must be int32 or int64, got Float",
    ),
    "bool": (
        lambda: ops.segment_sum(DATA.bool(), torch.zeros(3).long()),
        "segment_reduce: data, if not floating, must have an integer dtype, got Bool",
    ),
    "sqrt_n of integers": (
        lambda: ops.segment_sqrt_n(DATA.int(), torch.zeros(3).long()),
        "segment_reduce: data must be floating for sqrt_n, got Int",
    ),
    "empty offsets": (
        lambda: torch.ops.torchsparse_rec.segment_reduce.default(DATA, None, torch.zeros(0).long(), None, 0),
        "segment_reduce: offsets must not be empty",
    ),
    "prefix": (
        lambda: ops.unsorted_segment_sum(DATA, torch.zeros(2).long(), 1),
        "unsorted_segment_reduce: the shape of data, [3, 2], must begin with that of segment_ids, [2]",
    ),
    "prefix of a larger rank": (
        lambda: ops.unsorted_segment_sum(DATA, torch.zeros(3, 2, 1).long(), 1),
        "must begin with that of segment_ids, [3, 2, 1]",
    ),
    "unsorted num_segments": (
        lambda: ops.unsorted_segment_sum(DATA, torch.zeros(3).long(), -2),
        "unsorted_segment_reduce: num_segments must be >= 0, got -2",
    ),
    "unknown reduction": (
        lambda: operators.segment_reduce.default(DATA, torch.zeros(3).long(), None, 1, 6),
        "segment_reduce: reduction must be in [0, 5], got 6",
    ),
    "gradient without data": (
        lambda: operators.segment_reduce_backward.default(DATA, None, torch.zeros(3).long(), None, 3, MAX),
        "segment_reduce_backward: data must be given for max, min and prod",
    ),
    "gradient with other data": (
        lambda: operators.unsorted_segment_reduce_backward.default(DATA, DATA, torch.zeros(4).long(), PROD),
        "data must have the segment ids' shape followed by a row of grad's, got [3, 2] with grad [3, 2]",
    ),
    "gradient with data of another dtype": (
        lambda: operators.segment_reduce_backward.default(DATA, DATA.double(), torch.zeros(3).long(), None, 3, MIN),
        "segment_reduce_backward: data must have the dtype of grad, Float, got Double",
    ),
    "gradient of integers": (
        lambda: operators.segment_reduce_backward.default(DATA.int(), None, torch.zeros(3).long(), None, 3, SUM),
        "segment_reduce_backward: grad must be float16, bfloat16, float32 or float64, got Int",
    ),
    "gradient with other offsets": (
        lambda: operators.segment_reduce_backward.default(DATA, None, None, torch.tensor([0, 3]), 3, SUM),
        "segment_reduce_backward: offsets must have one more entry than grad has rows, 3, got 2",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments(name: str) -> None:
    function, text = ERRORS[name]
    with raises(ValueError, text):
        function()


def _sorted(*ids: int, size: int | None = None) -> Callable[[], Tensor]:
    return lambda: ops.segment_sum(torch.ones(len(ids)), torch.tensor(ids), size)


BAD_VALUES = {
    "unsorted": (_sorted(0, 2, 1), "segment_reduce: segment_ids must be sorted, got 2 followed by 1 at position 2"),
    "negative": (_sorted(-1, 2), "segment_reduce: segment_ids[0] must be >= 0, got -1"),
    "too large": (_sorted(0, 4, size=4), "segment_reduce: segment_ids[1] must be below num_segments = 4, got 4"),
    "too large, unsorted": (
        lambda: ops.unsorted_segment_max(torch.ones(2, 2), torch.tensor([[0, -5], [1, 2]]), 2),
        "unsorted_segment_reduce: segment_ids[3] must be below num_segments = 2, got 2",
    ),
    "gradient": (
        lambda: operators.unsorted_segment_reduce_backward.default(DATA, None, torch.tensor([0, 3]), SUM),
        "unsorted_segment_reduce_backward: segment_ids[1] must be below num_segments = 3, got 3",
    ),
    "offsets": (
        lambda: ops.segment_prod(DATA, offsets=torch.tensor([0, 2, 1, 3])),
        "segment_reduce: offsets must not decrease, got 2 followed by 1 at position 2",
    ),
    "last offset": (
        lambda: ops.segment_prod(DATA, offsets=torch.tensor([0, 2])),
        "segment_reduce: offsets[1], the last, must be the number of indices, 3, got 2",
    ),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(name: str) -> None:
    """Raise at once on the CPU; CUDA kernels record the error, which check_errors raises."""
    function, text = BAD_VALUES[name]
    with raises(ValueError, text):
        function()
        torch.ops.torchsparse_rec.check_errors.default(DATA)


@cpu_only
def test_last_id_that_no_size_can_follow() -> None:
    with raises(ValueError, "segment_reduce: segment_ids[1] must be in [0, 2^63 - 2), got 9223372036854775806"):
        ops.segment_sum(torch.ones(2), torch.tensor([0, 2**63 - 2]))


@cpu_only
def test_old_names_of_modules_go_on_importing():
    from torchsparse_rec.ops.segment import segment_max, sparse_segment_mean
    from torchsparse_rec.ops.segment_rows import segment_max as same

    assert segment_max is same is ops.segment_max and sparse_segment_mean is ops.sparse_segment_mean
    with pytest.raises(AttributeError, match="has no attribute 'segment_median'"):
        _ = ops.segment.segment_median
