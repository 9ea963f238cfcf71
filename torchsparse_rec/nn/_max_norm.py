"""Lookups with a largest norm: rows are clipped in reading, before they are pooled; tables stay unchanged."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from .. import _reduction
from ..ops.embedding import lookup_bags
from .plan import Ids, LookupPlan


def look_up_clipped(
    rows_of: Callable[[LookupPlan, Ids], Tensor], part: LookupPlan, ids: Ids, max_norm: float
) -> Tensor:
    """
    Return the results of a plan, whose tables all have this ``max_norm``; a row for each id is made first.

    Args:
        rows_of: a function that looks up the tables.
        part: the plan.
        ids: the ids of all keys. On CUDA the number of each key's ids is read back if ids come in bags.
        max_norm: a row ``x`` becomes ``x * max_norm / max(||x||, max_norm)``, and the derivative goes through that.
    """
    if ids.offsets is None:
        return torch.cat([clipped_rows(x, max_norm).reshape(-1) for x in _matrices(rows_of(part, ids), part, ids)])
    firsts = [0, *accumulate(ids.bags)]
    bounds = ids.offsets[torch.tensor(firsts, device=ids.offsets.device)].tolist()
    counts = [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]
    single = Ids(ids.indices, None, None, counts, False)
    flat = rows_of(part._replace(modes=(_reduction.SUM,) * len(part.modes)), single)
    pooled = []
    for rows, key, mode, table in zip(_matrices(flat, part, single), part.keys, part.modes, part.tables, strict=True):
        begin, end = bounds[key], bounds[key + 1]
        entries = torch.arange(end - begin, device=rows.device)
        # Padding of the table is padding of the bags too: an id behind the last row.
        if part.padding[table] >= 0:
            entries = entries.masked_fill(ids.indices[begin:end] == part.padding[table], end - begin)
        offsets = ids.offsets[firsts[key] : firsts[key + 1] + 1] - begin
        weights = None if ids.per_sample_weights is None else ids.per_sample_weights[begin:end].to(rows.dtype)
        clipped = clipped_rows(rows, max_norm)
        bags = lookup_bags(clipped, entries, offsets, weights, mode, end - begin, False, False)
        pooled.append(bags if ids.side_by_side else bags.reshape(-1))
    return torch.cat(pooled, -1)


def _matrices(flat: Tensor, part: LookupPlan, ids: Ids) -> list[Tensor]:
    """Split rows that lie end to end into a matrix for each lookup."""
    return [x.reshape(-1, n) for x, n in zip(flat.split(part.sizes(ids)), part.columns(), strict=True)]


def clipped_rows(rows: Tensor, max_norm: float) -> Tensor:
    """Clip rows to ``max_norm``; rows of half types are clipped in float32 and rounded once."""
    wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    # The clamp also avoids the square root of 0, whose derivative is infinite.
    squares = wide.square().sum(1, keepdim=True)
    norms = squares.clamp(min=max_norm * max_norm).sqrt()
    return (wide * (max_norm / norms)).to(rows.dtype)
