"""The part that a rank keeps of a table by its plan."""

from __future__ import annotations

from dataclasses import dataclass

from ..checkpoint.parts import KeptKeys
from ..tables.blocks import MOST_BLOCKS, Blocks, first_block
from ..tables.boxes import Box, Kept, all_of
from .plan import Replicated, RowWise, TablePlan, TableWise
from .shards import columns

__all__ = ["KeptByPlan", "kept_by_plan", "kept_keys"]


@dataclass(frozen=True)
class KeptByPlan(Kept):
    """
    The part that a rank keeps of a table.

    Args:
        plan: the place of the table.
    """

    plan: TablePlan


def kept_by_plan(rows: int, dim: int, plan: TablePlan, rank: int, ranks: int) -> KeptByPlan:
    """Return the part that a rank of ``ranks`` keeps of a table ``[rows, dim]``."""
    return KeptByPlan(rows, dim, _box(rows, dim, plan, rank, ranks), isinstance(plan, RowWise), plan)


def _box(rows: int, dim: int, plan: TablePlan, rank: int, ranks: int) -> Box:
    whole = all_of(rows, dim)
    if isinstance(plan, Replicated):
        return whole
    if isinstance(plan, RowWise):
        blocks = Blocks(rows)
        return whole._replace(blocks=(blocks.begin(rank, ranks), blocks.begin(rank + 1, ranks)))
    of_rank = [its for owner, its in columns(plan, dim) if owner == rank]
    return whole._replace(columns=of_rank[0] if of_rank else (0, 0))


def kept_keys(plan: TablePlan, rank: int, ranks: int) -> KeptKeys:
    """Return which keys a rank of ``ranks`` keeps of a table that grows."""
    if isinstance(plan, RowWise):
        blocks = first_block(MOST_BLOCKS, rank, ranks), first_block(MOST_BLOCKS, rank + 1, ranks)
        return KeptKeys(f"RowWise of {ranks}", blocks)
    assert isinstance(plan, TableWise)
    return KeptKeys(f"TableWise {plan.rank} of {ranks}", (0, MOST_BLOCKS * (plan.rank == rank)))
