"""Tables on ``meta``: each rank draws the values of its own part, so that no rank ever holds a whole table."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tables.boxes import Kept
from ..variable.initial import InitialRows
from ..variable.options import InitializerOption
from .tables import ModuleTable

__all__ = ["drawn_part"]

# Rows that are drawn at a time, with all their columns.
_ROWS = 2**16


def drawn_part(table: ModuleTable, kept: Kept, seed: int, device: torch.device) -> Tensor:
    """
    Return this rank's part of a table on meta.

    Each row's values are a function of the seed and the row's number: the same for any number of ranks and any plan.

    Args:
        table: the table, whose initializer draws.
        kept: the part of it that this rank keeps.
        seed: the seed of the table, the same on all ranks.
        device: the device of the part.
    """
    assert table.rows is not None
    dtype, padding = table.weight.dtype, table.padding_idx
    initial = InitialRows(table.initializer, InitializerOption(), table.dim, seed, dtype, device)
    part = torch.zeros(kept.shape, dtype=dtype, device=device)
    like = part.new_empty(0, table.dim)
    (_, places), (first, end), columns = kept.box
    step = max(1, _ROWS // max(1, end - first))
    for begin in range(0, places if part.numel() else 0, step):
        box = kept.box._replace(places=(begin, min(begin + step, places)))
        ids = kept.ids_of(box).to(device)
        is_drawn = ids < table.rows
        if padding is not None:
            is_drawn &= ids != padding % table.rows
        rows = initial.rows_of(ids, like, is_drawn)
        rows[~is_drawn] = 0
        kept.write(part, box, rows[:, slice(*columns)].view(box.shape))
    return part
