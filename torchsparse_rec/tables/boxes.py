"""A process's part of a table, as a box of ``[Q, S, D]``: blocks.py has the place of a row in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Blocks

__all__ = ["Box", "Kept", "all_of", "kept_whole"]


class Box(NamedTuple):
    """The elements ``[places, blocks, columns]`` of a table, each from its first to the one after its last."""

    places: tuple[int, int]
    blocks: tuple[int, int]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many places, blocks and columns it has."""
        return tuple(end - begin for begin, end in self)  # type: ignore[return-value]

    def common(self, other: Box) -> Box | None:
        """Return the elements that another box has too, or None if there are none."""
        both = Box(*((max(a, c), min(b, d)) for (a, b), (c, d) in zip(self, other, strict=True)))
        return both if all(begin < end for begin, end in both) else None

    def within(self, other: Box) -> tuple[slice, slice, slice]:
        """Return the place of its elements in a tensor of another box's elements."""
        return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(self, other, strict=True))  # type: ignore[return-value]


@dataclass(frozen=True)
class Kept:
    """
    A process's part of a table.

    Args:
        rows: V, the rows of the whole table.
        dim: D, the columns of the whole table.
        box: the elements that it keeps.
        by_blocks: whether they lie in its memory as the box does. Else they lie there as rows ``[V, columns]``.
    """

    rows: int
    dim: int
    box: Box
    by_blocks: bool

    @cached_property
    def blocks(self) -> Blocks:
        """The table's blocks."""
        return Blocks(self.rows)

    @property
    def whole(self) -> Box:
        """All of the table."""
        return all_of(self.rows, self.dim)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the part in this process's memory."""
        places, blocks, width = self.box.shape
        if self.by_blocks:
            return places * blocks, width
        return (self.rows, width) if width else (0, self.dim)

    def of_state(self, x: Tensor) -> Kept:
        """Return the process's part of a state of the rows, which may have one number for each: ``[rows]``."""
        has_rows = self.box.columns[0] < self.box.columns[1]
        return self if x.dim() == 2 else replace(self, dim=1, box=self.box._replace(columns=(0, int(has_rows))))

    def read(self, part: Tensor, box: Box) -> Tensor:
        """Return the elements of a box within this process's part; for rows without an id zeros."""
        if self.by_blocks:
            return part.view(self.box.shape)[box.within(self.box)]
        ids, (begin, end), first = self.ids_of(box).to(part.device), box.columns, self.box.columns[0]
        rows = part[:, begin - first : end - first].index_select(0, ids.clamp_max(self.rows - 1))
        rows[ids >= self.rows] = 0
        return rows.view(box.shape)

    def write(self, part: Tensor, box: Box, values: Tensor) -> None:
        """Write the elements of a box within this process's part."""
        if self.by_blocks:
            part.view(self.box.shape)[box.within(self.box)] = values.to(part.device)
            return
        ids, (begin, end), first = self.ids_of(box), box.columns, self.box.columns[0]
        there = ids < self.rows
        rows = values.reshape(len(ids), end - begin)[there].to(part.device)
        part[:, begin - first : end - first][ids[there].to(part.device)] = rows

    def ids_of(self, box: Box) -> Tensor:
        """Return the id of each row of a box, ``[places * blocks]``."""
        blocks = self.blocks.reversed[slice(*box.blocks)]
        return (torch.arange(*box.places).unsqueeze(1) * self.blocks.count + blocks).reshape(-1)


def all_of(rows: int, dim: int) -> Box:
    """Return all elements of a table ``[rows, dim]``."""
    blocks = Blocks(rows)
    return Box((0, blocks.places), (0, blocks.count), (0, dim))


def kept_whole(rows: int, dim: int) -> Kept:
    """Return the part of a process that has all of a table ``[rows, dim]``."""
    return Kept(rows, dim, all_of(rows, dim), False)
