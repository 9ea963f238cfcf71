"""The family ``sparse_tensor``: errors, sizes that use several threads, and TensorFlow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from devices import cpu_only
from torch import Tensor

from torchsparse_rec import ops

pytestmark = pytest.mark.usefixtures("kernels")


def matrix(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


ONE, TWO = matrix([0, 1]), matrix([0, 1], [1, 2])
VALUES = torch.tensor([5.0, 6.0])

# ---- Errors ---------------------------------------------------------------------------------------------------------

# By name: a call, and the error's text.
VALUE_ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "reshape_rank": (lambda: ops.sparse_reshape(torch.arange(3), [3], [3]), r"indices must have rank 2"),
    "reshape_dtype": (
        lambda: ops.sparse_reshape(ONE.int(), [2, 3], [6]),
        r"sparse_reshape: indices must be int64, got Int",
    ),
    "reshape_columns": (
        lambda: ops.sparse_reshape(ONE, [6], [2, 3]),
        r"indices must have a column for each dimension of shape \[6\], got shape \[1, 2\]",
    ),
    "reshape_elements": (
        lambda: ops.sparse_reshape(ONE, [2, 3], [7]),
        r"new_shape must have the 6 elements of shape \[2, 3\], got \[7\] with 7",
    ),
    "reshape_negative": (
        lambda: ops.sparse_reshape(ONE, [2, 3], [-2, -3]),
        r"new_shape must not be negative, got \[-2, -3\]",
    ),
    "reshape_overflow": (
        lambda: ops.sparse_reshape(ONE, [2**40, 2**40], [2**40, 2**40]),
        r"shape must have fewer than 2\^63 elements, got \[1099511627776, 1099511627776\]",
    ),
    "reshape_entries_without_elements": (
        lambda: ops.sparse_reshape(ONE, [0, 3], [3, 0]),
        r"shape must have elements where there are entries, got \[0, 3\] for 1 entries",
    ),
    "reshape_dimensions": (
        lambda: ops.sparse_reshape(ONE, [1, 1], [1] * 65),
        r"new_shape must have at most 64 dimensions, got 65",
    ),
    "fill_columns": (
        lambda: ops.sparse_fill_empty_rows(torch.empty(2, 0, dtype=torch.int64), VALUES, 3, 0),
        r"indices must have at least one column, got shape \[2, 0\]",
    ),
    "fill_values": (
        lambda: ops.sparse_fill_empty_rows(TWO, VALUES[:1], 3, 0),
        r"values must have shape \[2\], one for each row of indices, got \[1\]",
    ),
    "fill_default_shape": (
        lambda: ops.sparse_fill_empty_rows(TWO, VALUES, 3, torch.zeros(1)),
        r"default_value must be a scalar, got shape \[1\]",
    ),
    "fill_default_dtype": (
        lambda: ops.sparse_fill_empty_rows(TWO, VALUES, 3, torch.tensor(0)),
        r"default_value must have the dtype of values, Float, got Long",
    ),
    "fill_default_fraction": (
        lambda: ops.sparse_fill_empty_rows(TWO, VALUES.long(), 3, 0.5),
        r"default_value must be an integer as values are, torch.int64, got 0.5$",
    ),
    "dense_default_nan": (
        lambda: ops.sparse_to_dense(TWO, [2, 2], VALUES.int(), float("nan")),
        r"default_value must be an integer as values are, torch.int32, got nan$",
    ),
    "fill_rows": (lambda: ops.sparse_fill_empty_rows(TWO, VALUES, -1, 0), r"num_rows must be >= 0, got -1"),
    "fill_grad_dtype": (
        lambda: ops.sparse_fill_empty_rows_grad(torch.tensor([0]), VALUES.bool()),
        r"grad_values must have an integer dtype, got Bool",
    ),
    "fill_grad_map_dtype": (
        lambda: ops.sparse_fill_empty_rows_grad(torch.tensor([0.5]), VALUES),
        r"reverse_index_map must be int64, got Float",
    ),
    "dense_repeated": (
        lambda: ops.sparse_to_dense(matrix([0, 1], [0, 1]), [2, 2], VALUES),
        r"indices must not repeat, got element 1 of the dense tensor again at position 1$",
    ),
    "dense_unsorted": (
        lambda: ops.sparse_to_dense(matrix([1, 0], [0, 1]), [2, 2], VALUES),
        r"indices must be sorted, got element 2 of the dense tensor followed by element 1 at position 1$",
    ),
    "dense_overflow": (
        lambda: ops.sparse_to_dense(ONE, [2**40, 2**40], VALUES[:1]),
        r"shape must have fewer than 2\^63 elements",
    ),
    "dense_columns": (
        lambda: ops.sparse_to_dense(TWO, [2, 2, 2], VALUES),
        r"indices must have a column for each dimension of shape \[2, 2, 2\], got shape \[2, 2\]",
    ),
    "offsets_unsorted": (
        lambda: ops.row_ids_to_offsets(torch.tensor([0, 2, 1]), 3),
        r"row_ids must be sorted, got 2 followed by 1 at position 2$",
    ),
    "offsets_rows": (
        lambda: ops.row_ids_to_offsets(torch.tensor([0]), -1),
        r"num_rows must be in \[0, 2\^63 - 1\), got -1",
    ),
    "offsets_dtype": (
        lambda: ops.row_ids_to_offsets(torch.tensor([0.0]), 1),
        r"row_ids must be int32 or int64, got Float",
    ),
    "row_ids_first": (
        lambda: ops.offsets_to_row_ids(torch.tensor([1, 2]), 2),
        r"offsets_to_row_ids: offsets\[0\] must be 0, got 1$",
    ),
    "row_ids_decreasing": (
        lambda: ops.offsets_to_row_ids(torch.tensor([0, 3, 2, 4]), 4),
        r"offsets must not decrease, got 3 followed by 2 at position 2$",
    ),
    "row_ids_last": (
        lambda: ops.offsets_to_row_ids(torch.tensor([0, 3]), 4),
        r"offsets\[1\], the last, must be the number of items, 4, got 3$",
    ),
    "reshape_two_unknown": (
        lambda: ops.sparse_reshape(ONE, [2, 3], [-1, 2, -1]),
        r"new_shape must have at most one -1, got \[-1, 2, -1\] with -1 at \[0, 2\]",
    ),
    "reshape_unknown_of_zero": (
        lambda: ops.sparse_reshape(matrix().reshape(0, 2), [0, 3], [0, -1]),
        r"new_shape must have positive sizes beside the -1 that they determine, got \[0, -1\]",
    ),
    "reshape_does_not_divide": (
        lambda: ops.sparse_reshape(ONE, [2, 3], [4, -1]),
        r"new_shape must divide the 6 elements of shape \[2, 3\], got \[4, -1\]",
    ),
    "ragged_rank": (
        lambda: ops.ragged_fill_empty_rows(TWO, VALUES, 3, 0),
        r"ragged_fill_empty_rows: value_rowids must have rank 1, got shape \[2, 2\]",
    ),
    "reorder_values": (
        lambda: ops.sparse_reorder(TWO, VALUES[:1]),
        r"values must have one entry for each row of indices, got shapes \[1\] and \[2, 2\]",
    ),
    "retain_length": (
        lambda: ops.sparse_retain(TWO, VALUES, torch.tensor([True])),
        r"to_retain must have one element for each entry, got shape \[1\]",
    ),
    "row_ids_empty": (
        lambda: ops.offsets_to_row_ids(torch.empty(0, dtype=torch.int64)),
        r"offsets must be a vector of at least one element, got shape \[0\]",
    ),
}
INDEX_ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "fill_row_too_large": (
        lambda: ops.sparse_fill_empty_rows(TWO, VALUES, 1, 0),
        r"sparse_fill_empty_rows: indices\[1, 0\] must be in \[0, 1\), got 1$",
    ),
    "fill_row_negative": (
        lambda: ops.sparse_fill_empty_rows(matrix([2, 0], [-1, 0]), VALUES, 3, 0),
        r"indices\[1, 0\] must be in \[0, 3\), got -1$",
    ),
    "fill_no_rows": (
        lambda: ops.sparse_fill_empty_rows(ONE, VALUES[:1], 0, 0),
        r"indices\[0, 0\] must be in \[0, 0\), got 0$",
    ),
    "fill_grad_position": (
        lambda: ops.sparse_fill_empty_rows_grad(torch.tensor([0, 2]), VALUES),
        r"sparse_fill_empty_rows_grad: reverse_index_map\[1\] must be in \[0, 2\), got 2$",
    ),
    "fill_grad_negative": (
        lambda: ops.sparse_fill_empty_rows_grad(torch.tensor([-1, 0]), VALUES),
        r"reverse_index_map\[0\] must be in \[0, 2\), got -1$",
    ),
    "dense_out_of_bounds": (
        lambda: ops.sparse_to_dense(TWO, [2, 2], VALUES),
        r"sparse_to_dense: indices\[1, 1\] must be in \[0, 2\), got 2$",
    ),
    "dense_negative": (
        lambda: ops.sparse_to_dense(matrix([0, 1], [-1, 0]), [2, 2], VALUES, 0, False),
        r"indices\[1, 0\] must be in \[0, 2\), got -1$",
    ),
    "dense_without_elements": (
        lambda: ops.sparse_to_dense(ONE, [2, 0], VALUES[:1]),
        r"indices\[0, 1\] must be in \[0, 0\), got 1$",
    ),
    "offsets_too_large": (
        lambda: ops.row_ids_to_offsets(torch.tensor([0, 3]), 3),
        r"row_ids_to_offsets: row_ids\[1\] must be in \[0, 3\), got 3$",
    ),
    "offsets_negative": (
        lambda: ops.row_ids_to_offsets(torch.tensor([-1, 3]).int(), 4),
        r"row_ids\[0\] must be in \[0, 4\), got -1$",
    ),
}


@pytest.mark.parametrize(
    ("kind", "call", "text"),
    [(ValueError, *case) for case in VALUE_ERRORS.values()] + [(IndexError, *case) for case in INDEX_ERRORS.values()],
    ids=[*VALUE_ERRORS, *INDEX_ERRORS],
)
def test_errors_name_the_argument_and_the_value(kind: type[Exception], call: Callable[[], object], text: str) -> None:
    # Some calls are refused before an operator is called; the last line calls one, as the fixture requires.
    with pytest.raises(kind, match=text):
        call()
    torch.ops.torchsparse_rec.row_ids_to_offsets.default(torch.tensor([0, 2]), 3)


def test_the_first_of_several_bad_values_is_named(restore_threads: None) -> None:
    rows = torch.arange(300_000)
    rows[100_000], rows[299_000] = -7, 10**9
    for threads in (1, 3):
        torch.set_num_threads(threads)
        with pytest.raises(IndexError, match=r"row_ids\[100000\] must be in \[0, 300000\), got -7$"):
            ops.row_ids_to_offsets(rows, 300_000)
        with pytest.raises(IndexError, match=r"indices\[100000, 0\] must be in \[0, 300000\), got -7$"):
            ops.sparse_fill_empty_rows(rows.unsqueeze(1), rows, 300_000, 0)
        with pytest.raises(IndexError, match=r"indices\[100000, 0\] must be in \[0, 300000\), got -7$"):
            ops.sparse_to_dense(rows.unsqueeze(1), [300_000], rows)
        with pytest.raises(IndexError, match=r"reverse_index_map\[100000\] must be in \[0, 300000\), got -7$"):
            ops.sparse_fill_empty_rows_grad(rows, torch.zeros(300_000))


@cpu_only
@pytest.mark.parametrize("size", [300_000, 5_000_000, 2**61])
def test_the_first_of_several_bad_rows_in_any_order_is_named(size: int, restore_threads: None) -> None:
    """Name the first bad row also if there are many more rows than entries, and no memory for their results."""
    rows = torch.arange(300_000).flip(0)
    rows[100_000], rows[299_000] = -7, -8
    for threads in (1, 3):
        torch.set_num_threads(threads)
        with pytest.raises(IndexError, match=rf"indices\[100000, 0\] must be in \[0, {size}\), got -7$"):
            ops.sparse_fill_empty_rows(rows.unsqueeze(1), rows, size, 0)


@cpu_only
def test_a_result_too_large_for_memory_is_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot allocate"):
        ops.sparse_fill_empty_rows(matrix().reshape(0, 2), VALUES[:0], 2**61, 0)
    with pytest.raises(RuntimeError, match="cannot allocate"):
        ops.row_ids_to_offsets(torch.empty(0, dtype=torch.int64), 2**60)
    with pytest.raises(RuntimeError, match="cannot allocate"):
        ops.sparse_to_dense(matrix().reshape(0, 2), [2**30, 2**30], VALUES[:0])


# ---- Sizes that use several threads ---------------------------------------------------------------------------------


def large_rows(order: str, rows: int, entries: int) -> Tensor:
    generator = torch.Generator().manual_seed(entries)
    row = torch.randint(0, rows, (entries,), generator=generator)
    if order == "gaps":
        row = row // 1000 * 1000
    if order == "one":
        row = torch.full_like(row, rows // 2)
    if order != "unsorted":
        row = row.sort().values
    return torch.stack([row, torch.arange(entries)], 1)


@cpu_only
@pytest.mark.parametrize("order", ["sorted", "unsorted", "gaps", "one"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_many_empty_rows(order: str, rank: int, restore_threads: None) -> None:
    rows, entries = 50_000, 600_000
    indices = torch.cat([large_rows(order, rows, entries)] * 2, 1)[:, :rank]
    values = torch.arange(entries, dtype=torch.int32)
    order_of_rows = indices[:, 0].argsort(stable=True)
    empty = torch.ones(rows, dtype=torch.bool)
    empty[indices[:, 0]] = False
    # The row of each entry, in order of rows, and after them the empty rows.
    all_rows = torch.cat([indices[order_of_rows, 0], empty.nonzero()[:, 0]])
    places = all_rows.argsort(stable=True)
    wanted_values = torch.cat([values[order_of_rows], torch.full((int(empty.sum()),), -1, dtype=torch.int32)])[places]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        filled = ops.sparse_fill_empty_rows(indices, values, rows, -1)
        assert torch.equal(filled.empty_row_indicator, empty)
        assert torch.equal(filled.indices[:, 0], all_rows[places])
        assert torch.equal(filled.values, wanted_values)
        assert torch.equal(filled.values[filled.reverse_index_map], values)
        assert torch.equal(filled.indices[filled.reverse_index_map], indices)
        assert not filled.indices[filled.values == -1, 1:].any()


@cpu_only
def test_the_last_of_many_duplicates_wins(restore_threads: None) -> None:
    entries = 400_000
    indices = torch.randint(0, 300, (entries, 2), generator=torch.Generator().manual_seed(1))
    element = indices[:, 0] * 300 + indices[:, 1]
    last = torch.full((90_000,), -1).scatter_reduce_(0, element, torch.arange(entries), "amax").reshape(300, 300)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(ops.sparse_to_dense(indices, [300, 300], torch.arange(entries), -1, False), last)


@cpu_only
@pytest.mark.parametrize("span", [30, 2**20, 2**62])
def test_many_entries_are_reordered(span: int, restore_threads: None) -> None:
    entries = 200_000
    indices = torch.randint(-span // 2, span // 2, (entries, 2), generator=torch.Generator().manual_seed(2))
    order = indices[:, 1].argsort(stable=True)
    order = order[indices[order, 0].argsort(stable=True)]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        ordered, values = ops.sparse_reorder(indices, torch.arange(entries))
        assert torch.equal(values, order) and torch.equal(ordered, indices[order])


@cpu_only
def test_the_sum_of_a_gradient_does_not_depend_on_threads(restore_threads: None) -> None:
    grad = torch.randn(1_000_000, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(0, 1_000_000, 3)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(ops.sparse_fill_empty_rows_grad(positions, grad))
    for d_values, d_default in results:
        assert torch.equal(d_values, grad[positions]) and torch.equal(d_default, results[0][1])
    kept = torch.ones(1_000_000, dtype=torch.bool)
    kept[positions] = False
    torch.testing.assert_close(results[0][1].double(), grad.double()[kept].sum(), rtol=0, atol=0.05)


# ---- Values and gradients -------------------------------------------------------------------------------------------


def test_numbers_are_taken_for_defaults() -> None:
    assert ops.sparse_fill_empty_rows(ONE, VALUES[:1].half(), 2, 7).values.tolist() == [5, 7]
    assert ops.sparse_to_dense(ONE, [1, 3], torch.tensor([True])).tolist() == [[False, True, False]]
    unsigned = torch.tensor([5, 6], dtype=torch.uint16)
    assert ops.sparse_reorder(TWO.flip(0), unsigned)[1].tolist() == [6, 5]
    assert ops.sparse_retain(TWO, unsigned, VALUES > 5)[1].tolist() == [6]
    assert ops.ragged_fill_empty_rows(torch.tensor([1, 0]), VALUES, 3, 0.5).values.tolist() == [6, 5, 0.5]


def test_complex_values_have_gradients() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128, requires_grad=True)
    default = torch.tensor(1j, dtype=torch.complex128, requires_grad=True)
    indices = matrix([2, 0], [0, 1])

    def fill(values: Tensor, default: Tensor) -> Tensor:
        return ops.sparse_fill_empty_rows(indices, values, 4, default).values

    def dense(values: Tensor, default: Tensor) -> Tensor:
        return ops.sparse_to_dense(indices, [3, 2], values, default, False)

    assert torch.autograd.gradcheck(fill, (values, default))
    assert torch.autograd.gradcheck(dense, (values, default))


def test_order_keeps_gradients() -> None:
    values = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    indices = matrix([1], [0], [1])
    _, ordered = ops.sparse_reorder(indices, values)
    _, kept = ops.sparse_retain(indices, values, torch.tensor([2, 0, 1]))
    assert ordered.tolist() == [[2], [1], [3]] and kept.tolist() == [[1], [3]]
    (ordered.sum() + 10 * kept.sum()).backward()
    assert values.grad is not None and values.grad.tolist() == [[11], [1], [11]]
