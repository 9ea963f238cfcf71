"""The columns of results, which come owner by owner and go side by side, in the order of lookups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Move", "laid_out", "moves_of"]


class Move(NamedTuple):
    """
    Columns of an owner's block that are copied by one call: some pieces of ``width``, at regular distances.

    Args:
        before: the columns of all owners before this one.
        block: the owner's columns.
        at: where the first piece begins in the block.
        at_step: the distance of the pieces there.
        to: where the first piece goes among all columns.
        to_step: the distance of the pieces there.
        pieces: how many they are.
        width: the columns of each.
    """

    before: int
    block: int
    at: int
    at_step: int
    to: int
    to_step: int
    pieces: int
    width: int


def moves_of(owners: Sequence[Sequence[tuple[int, int]]]) -> list[Move]:
    """
    Return how the owners' columns go to their places: few moves, as each is a call, and narrow copies are slow.

    Args:
        owners: for each owner the width of each of its units, and its place among all columns, ascending.
    """
    moves: list[Move] = []
    before = 0
    for units in owners:
        block, at, its = sum([width for width, _ in units]), 0, list[Move]()
        for width, to in _joined(units):
            last = its[-1] if its else None
            if last is not None and last.width == width:
                steps = (at - last.at, to - last.to)
                if last.pieces == 1:
                    last = last._replace(at_step=steps[0], to_step=steps[1])
                if steps == (last.pieces * last.at_step, last.pieces * last.to_step):
                    its[-1] = last._replace(pieces=last.pieces + 1)
                    at += width
                    continue
            its.append(Move(before, block, at, width, to, width, 1, width))
            at += width
        moves += its
        before += block
    return moves


def _joined(units: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join units that follow one another at home too."""
    joined: list[tuple[int, int]] = []
    for width, to in units:
        if joined and sum(joined[-1]) == to:
            joined[-1] = joined[-1][0] + width, joined[-1][1]
        else:
            joined.append((width, to))
    return joined


def laid_out(values: Tensor, rows: int, moves: Sequence[Move]) -> Tensor:
    """
    Return the columns of all owners side by side, ``[B, C]``.

    Args:
        values: each owner's block ``[B, columns]``, one after the other, flat.
        rows: B.
        moves: by which columns go to their places.
    """
    if len(moves) == 1 and moves[0].pieces == 1:  # they lie as they should
        return values.view(rows, moves[0].width)
    return _Columns.apply(values, rows, moves)  # type: ignore[no-any-return]


def _pairs(values: Tensor, whole: Tensor, moves: Sequence[Move]) -> list[tuple[Tensor, Tensor]]:
    """Return what each move copies: in the owners' blocks, and side by side."""
    rows, (down, right) = whole.shape[0], whole.stride()
    begin, begin_of_whole = values.storage_offset(), whole.storage_offset()
    return [
        (
            values.as_strided(
                (rows, move.pieces, move.width),
                (move.block, move.at_step, 1),
                begin + rows * move.before + move.at,
            ),
            whole.as_strided(
                (rows, move.pieces, move.width),
                (down, move.to_step * right, right),
                begin_of_whole + move.to * right,
            ),
        )
        for move in moves
    ]


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: int, moves: Sequence[Move]) -> Tensor:
        ctx.moves = moves
        values = values.contiguous()
        whole = values.new_empty(rows, sum([move.pieces * move.width for move in moves]))
        for x, y in _pairs(values, whole, moves):
            y.copy_(x)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Put gradients together as results came."""
        result = grad.new_empty(grad.numel())
        for x, y in _pairs(result, grad, ctx.moves):
            x.copy_(y)
        return result, None, None
