"""The rows of one rank among which the best ones of a table are looked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.scores_top_k import places_of_keys
from ..tables.blocks import Blocks

__all__ = ["Candidates", "of_blocks", "of_keys"]


class Candidates(NamedTuple):
    """
    The rows of a rank that have an id, in ascending order of these, so that of equal scores the lower id comes first.

    ``places_of`` is -1 of ids that the rank does not have. Of the place -1 ``ids_of`` may be anything. The defaults are
    those of a rank without rows, which nobody asks for one.
    """

    size: int = 0
    rows_of: Callable[[int, int], Tensor] = torch.empty
    places_of: Callable[[Tensor], Tensor] = partial(torch.full_like, fill_value=-1)
    ids_of: Callable[[Tensor], Tensor] = torch.clone


def of_blocks(rows: Tensor, blocks: Blocks, rank: int, ranks: int) -> Candidates:
    """Return the candidates among the rows that a rank keeps of a table that is split by rows."""
    remainders, order = blocks.reversed[blocks.begin(rank, ranks) : blocks.begin(rank + 1, ranks)].sort()
    width, in_last = len(order), int((remainders < blocks.rows % blocks.count).sum())
    remainders, order = remainders.to(rows.device), order.to(rows.device)
    inverse = order.argsort()

    def rows_of(begin: int, end: int) -> Tensor:
        places = torch.arange(begin, end, device=rows.device)
        return rows.index_select(0, places - places % width + order[places % width])

    def places_of(ids: Tensor) -> Tensor:
        its = blocks.rows_of_ids(ids, rank, ranks)
        return (its - its % width + inverse[its % width]).where(its >= 0, -1)

    def ids_of(places: Tensor) -> Tensor:
        return places // width * blocks.count + remainders[places % width]

    return Candidates(blocks.rows // blocks.count * width + in_last, rows_of, places_of, ids_of)


def of_keys(rows: Tensor, keys: Tensor) -> Candidates:
    """Return the candidates of a table that grows, of which a rank has these keys."""
    keys, order = keys.sort()
    return Candidates(
        len(keys),
        lambda begin, end: rows.index_select(0, order[begin:end]),
        partial(places_of_keys, keys),
        lambda places: keys[places],
    )
