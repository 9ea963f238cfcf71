"""What ranks keep of the tables that a file has, and the way of its pieces there."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from ...distributed.boxes import KeptByPlan, kept_by_plan
from ...distributed.plan import Replicated, RowWise
from ...distributed.sharded import Sharded
from ..checkpoints.format import CHUNK, Piece, copy_bytes

__all__ = ["Parts", "copy_kept"]


class Parts:
    """
    This rank's part of each table of a model.

    Args:
        model: the model; some of its modules may be split over ranks.

    Raises:
        ValueError: modules are split over different ranks.
    """

    def __init__(self, model: Module) -> None:
        self._kept: dict[int, KeptByPlan] = {}
        self.group: Any = None
        self.rank = 0
        for child in model.modules():
            if not isinstance(child, Sharded):
                continue
            shards = child.shards
            its = dist.get_process_group_ranks(shards.ranks.group)
            if self.group is None:
                self.group, self.rank = shards.ranks.group, shards.ranks.rank
            elif its != (wanted := dist.get_process_group_ranks(self.group)):
                raise ValueError(
                    f"load_tables: all tables must be split over the same ranks, {wanted}, got {its} of {shards.name!r}"
                )
            for table, plan in zip(shards.tables, shards.plans, strict=True):
                if table.rows is not None:
                    kept = kept_by_plan(table.rows, table.dim, plan, shards.ranks.rank, shards.ranks.count)
                    self._kept[id(table.weight)] = kept

    def of(self, parameter: Tensor) -> KeptByPlan | None:
        """Return this rank's part of the table of a parameter; None: it is no table over ranks."""
        return self._kept.get(id(parameter))


def copy_kept(piece: Piece, out: Tensor, kept: KeptByPlan | None) -> None:
    """
    Copy a rank's part of a piece of a table, or of a state of its rows.

    Args:
        piece: the piece of the whole table ``[V, D]``, or of one number for each row ``[V]``.
        out: this rank's part.
        kept: the rank's part of the whole; None: all.
    """
    if kept is None or isinstance(kept.plan, Replicated):
        copy_bytes(piece, out)
        return
    if not out.numel():
        return
    rows, columns = piece.place[0], piece.place[1] if out.dim() > 1 else slice(0, 1)
    first, last = kept.box.columns if out.dim() > 1 else (0, 1)
    common = slice(max(first, columns.start), min(last, columns.stop))
    if common.start >= common.stop:
        return
    to = slice(common.start - first, common.stop - first)
    of = slice(common.start - columns.start, common.stop - columns.start)
    part = out if out.dim() > 1 else out.unsqueeze(1)
    each = max(1, CHUNK // max(1, (columns.stop - columns.start) * piece.dtype.itemsize))
    if not isinstance(kept.plan, RowWise):
        for begin in range(rows.start, rows.stop, each):
            end = min(begin + each, rows.stop)
            part[begin:end, to] = _elements(piece, slice(begin - rows.start, end - rows.start))[:, of].to(part.device)
        return
    blocks = kept.box.blocks[1] - kept.box.blocks[0]
    # The ids of all blocks lie together for each place.
    begin_place, end_place = (end // kept.blocks.count for end in (rows.start, rows.stop + kept.blocks.count - 1))
    step = max(1, each // max(1, blocks))
    for begin in range(begin_place, end_place, step):
        end = min(begin + step, end_place)
        ids = kept.ids_of(kept.box._replace(places=(begin, end)))
        where = ((ids >= rows.start) & (ids < rows.stop)).nonzero().squeeze(1)
        values = _elements(piece, ids[where] - rows.start)[:, of].to(part.device, part.dtype)
        part[:, to].index_copy_(0, (where + begin * blocks).to(part.device), values)


def _elements(piece: Piece, rows: Tensor | slice) -> Tensor:
    """Return a copy of some rows of a piece, ``[N, width]``; the bytes of the piece need not be aligned."""
    width = piece.shape[1] if len(piece.shape) > 1 else 1
    by_row = piece.bytes.view(piece.shape[0], width * piece.dtype.itemsize)
    some = by_row.index_select(0, rows) if isinstance(rows, Tensor) else by_row[rows].clone()
    return some.view(piece.dtype)
