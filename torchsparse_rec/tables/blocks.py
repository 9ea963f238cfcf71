"""
Where the rows of a table that is split by rows are, and in which blocks the keys of one that grows.

A table ``[V, D]`` is kept as ``[Q, S, D]``: row v is at place ``v // S`` of block ``reverse(v % S)``. Here ``reverse``
turns the bits of a block's number round. Each rank has consecutive blocks, a box of ``Shard(1)``, which lies in its
memory as a table of its own. Contract: csrc/route.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..ops.route import route_keys

__all__ = ["MOST_BLOCKS", "Blocks", "block_range", "by_block", "first_block"]

MOST_BLOCKS = 4096
# A table has at least so many rows for each block.
_LEAST_PLACES = 16


def first_block(count: int, rank: int, ranks: int) -> int:
    """Return the first of ``count`` blocks that a rank has, as ``torch.chunk`` cuts them."""
    return min(count, rank * -(-count // ranks))


@dataclass(frozen=True)
class Blocks:
    """
    The blocks of a table.

    Args:
        rows: the number of rows of the whole table, V.
    """

    rows: int

    @cached_property
    def count(self) -> int:
        """S, a power of two that depends on the rows alone."""
        most = min(MOST_BLOCKS, max(1, self.rows // _LEAST_PLACES))
        return 1 << (most.bit_length() - 1)

    @property
    def places(self) -> int:
        """Q, the rows of a block. A block's last place may have no row."""
        return -(-self.rows // self.count)

    def begin(self, rank: int, ranks: int) -> int:
        """Return a rank's first block."""
        return first_block(self.count, rank, ranks)

    def rows_of(self, rank: int, ranks: int) -> int:
        """Return how many rows a rank keeps, those without an id included."""
        return self.places * (self.begin(rank + 1, ranks) - self.begin(rank, ranks))

    @cached_property
    def reversed(self) -> Tensor:
        """The number of the block of each remainder, ``[S]`` int64: its own inverse."""
        numbers, made = torch.arange(self.count), torch.zeros(self.count, dtype=torch.int64)
        for bit in range(self.count.bit_length() - 1):
            made = made << 1 | (numbers >> bit & 1)
        return made

    def ids_of(self, rank: int, ranks: int) -> Tensor:
        """Return the id of each row that a rank keeps, ``[rows_of]`` int64; those without an id get V or more."""
        blocks = torch.arange(self.begin(rank, ranks), self.begin(rank + 1, ranks))
        places = torch.arange(self.places).unsqueeze(1)
        return (places * self.count + self.reversed[blocks]).reshape(-1)

    def part_of(self, table: Tensor, rank: int, ranks: int) -> Tensor:
        """Return the rows of a whole table ``[V, ...]`` that a rank keeps; rows without an id are zeros."""
        ids = self.ids_of(rank, ranks)
        part = table.index_select(0, ids.clamp_max(self.rows - 1).to(table.device)) if self.rows else table[:0]
        part[(ids >= self.rows).to(table.device)] = 0
        return part

    def whole(self, box: Tensor) -> Tensor:
        """Return the table ``[V, ...]`` of one process from all blocks ``[Q, S, ...]``."""
        return box[:, self.reversed.to(box.device)].flatten(0, 1)[: self.rows]

    def row_of(self, id: int, rank: int, ranks: int) -> int:
        """Return the row that a rank keeps of an id, or -1 if another rank does."""
        begin, end = self.begin(rank, ranks), self.begin(rank + 1, ranks)
        block = int(self.reversed[id % self.count])
        return id // self.count * (end - begin) + block - begin if begin <= block < end else -1

    def rows_of_ids(self, ids: Tensor, rank: int, ranks: int) -> Tensor:
        """Return the row that a rank keeps of each id, or -1 if another rank does; of -1 it is -1."""
        begin, end = self.begin(rank, ranks), self.begin(rank + 1, ranks)
        blocks = self.reversed.to(ids.device)[ids % self.count]
        rows = ids // self.count * (end - begin) + blocks - begin
        return rows.where((ids >= 0) & (blocks >= begin) & (blocks < end), -1)

    def without_id(self, rank: int, ranks: int) -> Tensor:
        """Return the rows that a rank keeps without an id, ascending: they are in blocks' last places."""
        begin, end = self.begin(rank, ranks), self.begin(rank + 1, ranks)
        ids = (self.places - 1) * self.count + self.reversed[begin:end]
        return (self.places - 1) * (end - begin) + (ids >= self.rows).nonzero()[:, 0]


# ---- Tables that grow ------------------------------------------------------------------------------------------------


def by_block(keys: Tensor) -> Tensor:
    """Return the positions of some keys, ``[N]``, in the order of their blocks."""
    places = route_keys(keys, [0, len(keys)], MOST_BLOCKS, distinct=False)[3]
    return torch.empty_like(places).index_copy_(0, places, torch.arange(len(keys), device=places.device))


def block_range(keys: Tensor) -> tuple[int, int]:
    """Return the first of the blocks that some keys are in, and the end of the last; (0, 0) if there are no keys."""
    blocks = route_keys(keys, [0, len(keys)], MOST_BLOCKS, distinct=False)[2].flatten().nonzero().flatten()
    return (int(blocks[0]), int(blocks[-1]) + 1) if len(blocks) else (0, 0)
