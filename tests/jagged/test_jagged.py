"""Conversions between forms of rows: there and back, edges, errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchsparse_rec import ops

VALUES, OFFSETS = torch.tensor([3, 1, 4, 1, 5]), torch.tensor([0, 2, 2, 5])
FORMS = [
    (VALUES, OFFSETS),
    (VALUES.float(), OFFSETS.int()),
    (VALUES[:0], torch.tensor([0, 0, 0])),
    (VALUES[:0], torch.tensor([0])),
    (torch.arange(1, 1001), torch.tensor([0, 1000, 1000, 1000])),
]


def rows(values: Tensor, offsets: Tensor) -> list[list]:
    bounds = offsets.tolist()
    return [values[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize(("values", "offsets"), FORMS)
def test_there_and_back(values: Tensor, offsets: Tensor) -> None:
    wanted, count = rows(values, offsets), offsets.shape[0] - 1
    ids = ops.offsets_to_row_ids(offsets)
    assert ids.dtype == torch.int64 and torch.equal(ids, ops.offsets_to_row_ids(offsets, values.shape[0]))
    lengths = ops.offsets_to_lengths(offsets)
    assert lengths.dtype == torch.int64
    for back in (ops.row_ids_to_offsets(ids, count), ops.lengths_to_offsets(lengths)):
        assert back.dtype == torch.int64 and back.tolist() == offsets.tolist()
    assert rows(*ops.padded_to_jagged(ops.jagged_to_padded(values, offsets))) == wanted
    indices, same, (height, width) = ops.jagged_to_sparse(values, offsets)
    assert same is values and (height, width) == (count, max(map(len, wanted), default=0))
    assert indices.tolist() == [[row, column] for row, items in enumerate(wanted) for column in range(len(items))]
    assert rows(*ops.sparse_to_jagged(indices, values, count)) == wanted
    if count:
        assert rows(*ops.nested_to_jagged(ops.jagged_to_nested(values, offsets))) == wanted


def test_padded() -> None:
    assert ops.jagged_to_padded(VALUES, OFFSETS, 2, -1).tolist() == [[3, 1], [-1, -1], [4, 1]]
    assert ops.jagged_to_padded(VALUES, OFFSETS, 4).tolist() == [[3, 1, 0, 0], [0, 0, 0, 0], [4, 1, 5, 0]]
    assert ops.jagged_to_padded(VALUES, OFFSETS, 0).shape == (3, 0)
    rows_of_two = ops.jagged_to_padded(torch.arange(10.0).reshape(5, 2), OFFSETS, 2, 9.0)
    assert rows_of_two.tolist() == [[[0, 1], [2, 3]], [[9, 9], [9, 9]], [[4, 5], [6, 7]]]
    values, offsets = ops.padded_to_jagged(torch.tensor([[0, 7, 0], [0, 0, 0], [8, 0, 9]]))
    assert values.tolist() == [7, 8, 9] and offsets.tolist() == [0, 1, 1, 3]
    with_nan = torch.tensor([[math.nan, 1.0], [2.0, math.nan]])
    assert ops.padded_to_jagged(with_nan, math.nan)[0].tolist() == [1, 2]


@pytest.mark.parametrize("offsets", [[0, 9, 5], [-3, 2, 5], [0, 2**62, 2**63 - 1], [-(2**63), 2, 5]])
def test_padded_of_offsets_without_sense_stays_in_bounds(offsets: list[int]) -> None:
    padded = ops.jagged_to_padded(VALUES, torch.tensor(offsets), 3, -7)
    assert padded.shape == (2, 3) and set(padded.flatten().tolist()) <= {-7, *VALUES.tolist()}


def test_nested_with_holes() -> None:
    nested = torch.nested.narrow(
        torch.arange(12).reshape(3, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1]), layout=torch.jagged
    )
    assert rows(*ops.nested_to_jagged(nested)) == [[0, 1], [], [10]]


def test_conversions_have_gradients() -> None:
    values = VALUES.double().requires_grad_()

    def through(values: Tensor) -> Tensor:
        padded = ops.jagged_to_padded(values, OFFSETS, 4, 2.0)
        back, offsets = ops.padded_to_jagged(padded * padded, 4.0)
        nested, _ = ops.nested_to_jagged(ops.jagged_to_nested(back, offsets))
        return ops.sparse_to_jagged(ops.jagged_to_sparse(nested, offsets)[0], nested, 3)[0] * 3

    assert torch.autograd.gradcheck(through, (values,))


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "lengths_rank": (lambda: ops.lengths_to_offsets(OFFSETS.reshape(2, 2)), r"lengths must be a vector of integers"),
    "lengths_dtype": (lambda: ops.lengths_to_offsets(torch.ones(2)), r"got torch.float32 of shape \[2\]"),
    "offsets_dtype": (lambda: ops.offsets_to_lengths(torch.ones(2)), r"offsets must be a vector of integers"),
    "offsets_empty": (lambda: ops.offsets_to_lengths(OFFSETS[:0]), r"offsets must have at least one element"),
    "padded_rank": (lambda: ops.padded_to_jagged(VALUES), r"padded must have rank 2, got shape \[5\]"),
    "padded_length": (lambda: ops.jagged_to_padded(VALUES, OFFSETS, -1), r"length must be >= 0, got -1"),
    "padded_fraction": (
        lambda: ops.jagged_to_padded(VALUES.long(), OFFSETS, padding_value=0.5),
        r"padding_value must be an integer as values are, torch.int64, got 0.5$",
    ),
    "padded_scalar": (lambda: ops.jagged_to_padded(VALUES[0], OFFSETS), r"values must have rank >= 1, got a scalar"),
    "sparse_rows": (
        lambda: ops.sparse_to_jagged(torch.zeros(2, 2).long(), VALUES, 3),
        r"values must have N rows, got shapes \[2, 2\] and \[5\]",
    ),
    "sparse_values": (lambda: ops.jagged_to_sparse(VALUES.reshape(5, 1), OFFSETS), r"values must have rank 1"),
    "sparse_offsets": (lambda: ops.jagged_to_sparse(VALUES, OFFSETS[:3]), r"the number of items, 5, got 2"),
    "nested_kind": (lambda: ops.nested_to_jagged(VALUES), r"nested must be a nested tensor with the layout"),
    "nested_transposed": (
        lambda: ops.nested_to_jagged(ops.jagged_to_nested(torch.ones(5, 3), OFFSETS).transpose(1, 2)),
        r"nested must be ragged in dimension 1, got a tensor ragged in 2$",
    ),
    "nested_offsets": (lambda: ops.jagged_to_nested(VALUES, VALUES.float()), r"offsets must be a vector of integers"),
}


@pytest.mark.parametrize(("call", "text"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument_and_the_value(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
