"""What a rank keeps of a table, as a box of ``[Q, S, D]``: blocks.py says which row of the table is where in that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .blocks import Blocks
from .plan import Replicated, RowWise, TablePlan
from .shards import columns

__all__ = ["Box", "Kept"]


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
        """Return where its elements are in a tensor of those of another box."""
        return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(self, other, strict=True))  # type: ignore[return-value]


@dataclass(frozen=True)
class Kept:
    """
    What a rank keeps of a table.

    Args:
        rows: V, of the whole table.
        dim: D, of the whole table.
        plan: where the table is.
        rank: this rank.
        ranks: W.
    """

    rows: int
    dim: int
    plan: TablePlan
    rank: int
    ranks: int

    @cached_property
    def blocks(self) -> Blocks:
        """The table's blocks."""
        return Blocks(self.rows)

    @property
    def whole(self) -> Box:
        """All of the table."""
        return Box((0, self.blocks.places), (0, self.blocks.count), (0, self.dim))

    @cached_property
    def box(self) -> Box:
        """What this rank keeps."""
        if isinstance(self.plan, Replicated):
            return self.whole
        if isinstance(self.plan, RowWise):
            ends = self.blocks.begin(self.rank, self.ranks), self.blocks.begin(self.rank + 1, self.ranks)
            return self.whole._replace(blocks=ends)
        for owner, its in columns(self.plan, self.dim):
            if owner == self.rank:
                return self.whole._replace(columns=its)
        return self.whole._replace(columns=(0, 0))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the part in this rank's memory."""
        places, blocks, width = self.box.shape
        if isinstance(self.plan, RowWise):
            return places * blocks, width
        return (self.rows, width) if width else (0, self.dim)

    def read(self, part: Tensor, box: Box) -> Tensor:
        """Return the elements of a box, of which this rank keeps all; of rows without an id: zeros."""
        if isinstance(self.plan, RowWise):
            return part.view(self.box.shape)[box.within(self.box)]
        ids, (begin, end), first = self.ids_of(box).to(part.device), box.columns, self.box.columns[0]
        rows = part[:, begin - first : end - first].index_select(0, ids.clamp_max(self.rows - 1))
        rows[ids >= self.rows] = 0
        return rows.view(box.shape)

    def write(self, part: Tensor, box: Box, values: Tensor) -> None:
        """Write the elements of a box, of which this rank keeps all."""
        if isinstance(self.plan, RowWise):
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
