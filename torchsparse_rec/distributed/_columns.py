"""The columns of results, which come owner by owner and go side by side, in the order of lookups."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Columns", "Move"]

# Pieces of so few elements are slower to look up, each by a number of eight bytes, than to copy.
_FEW = 4


class Move(NamedTuple):
    """
    Columns of an owner's block that are copied by one call: some pieces of ``width``, at regular distances.

    Args:
        before: the columns of all owners before this one.
        block: the owner's columns.
        at: the start of the first piece in the block.
        at_step: the distance of the pieces there.
        to: the place of the first piece among all columns.
        to_step: the distance of the pieces there.
        pieces: the number of pieces.
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


class Columns:
    """
    The places of columns that come owner by owner.

    A regular order, such as every second table, is a strided copy for each owner. Any other order is a lookup of
    pieces, since each copy of a few columns goes through all rows.

    Args:
        owners: the width of each unit of each owner, and its place among all columns, ascending.
    """

    def __init__(self, owners: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.moves = _moves_of(owners)
        self.width = sum([move.pieces * move.width for move in self.moves])
        self._piece = gcd(*[move.width for move in self.moves])
        self.looks_up = len(self.moves) > 2 * len(owners) and self._piece >= _FEW
        # The last batch's rows, and the number of each piece here and there.
        self._places: tuple[int, Tensor, Tensor] | None = None

    def side_by_side(self, values: Tensor, rows: int) -> Tensor:
        """
        Return the columns of all owners side by side, ``[B, C]``.

        Args:
            values: the owners' blocks ``[B, columns]``, in order, flat.
            rows: the number of rows, B.
        """
        if len(self.moves) == 1 and self.moves[0].pieces == 1:  # they lie as they should
            return values.view(rows, self.width)
        return _SideBySide.apply(values, rows, self)  # type: ignore[no-any-return]

    def copied(self, x: Tensor, rows: int, back: bool) -> Tensor:
        """Return a copy side by side, ``[B, C]``, of what came; with ``back`` as it came, flat, of columns."""
        x = x.contiguous()
        if self.looks_up:
            places = self._places_of(rows, x.device)[back]
            return x.view(-1, self._piece).index_select(0, places).view(-1 if back else (rows, self.width))
        result = x.new_empty(x.numel() if back else (rows, self.width))
        values, whole = (result, x) if back else (x, result)
        for move in self.moves:
            size = rows, move.pieces, move.width
            begin = values.storage_offset() + rows * move.before + move.at
            here = values.as_strided(size, (move.block, move.at_step, 1), begin)
            there = whole.as_strided(size, (self.width, move.to_step, 1), whole.storage_offset() + move.to)
            if back:
                here.copy_(there)
            else:
                there.copy_(here)
        return result

    def _places_of(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return for each piece, side by side, the number of it as it came, and the reverse."""
        if self._places is None or self._places[0] != rows or self._places[1].device != device:
            firsts = torch.empty(self.width // self._piece, dtype=torch.int64)
            steps = torch.empty_like(firsts)
            for move in self.moves:
                for k in range(move.pieces):
                    begin = (move.to + k * move.to_step) // self._piece
                    its = slice(begin, begin + move.width // self._piece)
                    firsts[its] = rows * move.before + move.at + k * move.at_step
                    firsts[its] += self._piece * torch.arange(its.stop - its.start)
                    steps[its] = move.block
            places = torch.arange(rows)[:, None] * steps + firsts
            places = places.div_(self._piece, rounding_mode="floor").view(-1).to(device)
            back = torch.empty_like(places).index_copy_(0, places, torch.arange(len(places), device=device))
            self._places = rows, places, back
        return self._places[1:]


def _moves_of(owners: Sequence[Sequence[tuple[int, int]]]) -> list[Move]:
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


class _SideBySide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: int, columns: Columns) -> Tensor:
        ctx.rows, ctx.columns = rows, columns
        return columns.copied(values, rows, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Put gradients together as results came."""
        return ctx.columns.copied(grad, ctx.rows, back=True), None, None
