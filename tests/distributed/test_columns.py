"""Columns that come owner by owner: where they go, by how many moves, and their gradients."""

from __future__ import annotations

import random

import pytest
import torch

from torchsparse_rec.distributed._columns import Columns


def check(owners: list[list[int]], widths: list[int], rows: int = 3) -> int:
    """Compare with one column of tables after another; return the number of copies, 0 for a lookup of pieces."""
    begins = [sum(widths[:k]) for k in range(len(widths))]
    columns = Columns([[(widths[k], begins[k]) for k in its] for its in owners])
    tables = [torch.randn(rows, width) for width in widths]
    blocks = [torch.cat([tables[k] for k in its], 1).reshape(-1) for its in owners if its]
    values = torch.cat([torch.zeros(2), *blocks])[2:].requires_grad_()  # as a part of more
    found, whole = columns.side_by_side(values, rows), torch.cat(tables, 1)
    assert torch.equal(found, whole)
    for grad in (torch.randn(whole.shape[::-1]).T, torch.randn(()).expand(whole.shape)):
        (got,) = torch.autograd.grad(found, values, grad, retain_graph=True)
        parts = grad.split(widths, 1)
        assert torch.equal(got, torch.cat([torch.cat([parts[k] for k in its], 1).reshape(-1) for its in owners if its]))
    return 0 if columns.looks_up else len(columns.moves)


@pytest.mark.parametrize(
    ("owners", "widths", "moves"),
    [
        ([[0, 1, 2]], [4, 2, 3], 1),
        ([[0, 1], [], [2, 3, 4]], [4, 2, 3, 1, 5], 2),
        ([[0, 2, 4, 6], [1, 3, 5]], [8] * 7, 2),
        ([[1, 3, 5], [0, 2, 4]], [8, 1] * 3, 2),
        ([[0, 1, 4, 5, 8], [2, 3, 6, 7]], [4] * 9, 3),
        ([[0, 3, 4], [1, 2, 5]], [2, 3, 1, 2, 1, 2], 4),
        ([[0, 1, 3, 6], [2, 4, 5]], [2] * 7, 4),
        ([[0, 2, 3, 6, 8], [1, 4, 5, 7]], [3] * 9, 6),
        ([[0, 2, 3, 6, 8], [1, 4, 5, 7]], [4, 4, 8, 4, 12, 4, 4, 8, 4], 0),
    ],
)
def test_columns_go_where_they_belong(owners: list[list[int]], widths: list[int], moves: int) -> None:
    assert check(owners, widths) == moves


def test_any_columns() -> None:
    chance = random.Random(5)
    for _ in range(100):
        tables, ranks = chance.randint(1, 12), chance.randint(1, 4)
        owners: list[list[int]] = [[] for _ in range(ranks)]
        for k in range(tables):
            chance.choice(owners).append(k)
        some = chance.choice([[1, 2, 2, 2, 5], [4, 8, 8, 8, 20]])
        check(owners, [chance.choice(some) for _ in range(tables)], chance.randint(0, 3))


def test_columns_in_their_places_are_not_copied() -> None:
    values = torch.randn(12)
    assert Columns([[(1, 0), (3, 1)]]).side_by_side(values, 3).data_ptr() == values.data_ptr()


def test_batches_of_other_sizes() -> None:
    columns = Columns([[(4, 4 * k) for k in (0, 2, 3, 6, 8)], [(4, 4 * k) for k in (1, 4, 5, 7)]])
    assert columns.looks_up
    for rows in (3, 5, 3, 0):
        table = torch.randn(rows, 9, 4)
        values = torch.cat([table[:, [0, 2, 3, 6, 8]].reshape(-1), table[:, [1, 4, 5, 7]].reshape(-1)])
        assert torch.equal(columns.side_by_side(values, rows), table.view(rows, 36))
