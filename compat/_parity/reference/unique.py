"""Slow, obvious references of the operators of the family ``unique``."""

from __future__ import annotations

import torch
from torch import Tensor


def unique(x: Tensor) -> tuple[Tensor, Tensor]:
    values, inverse, _ = unique_with_counts(x)
    return values, inverse


def unique_with_counts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    positions: dict[int, int] = {}
    inverse = [positions.setdefault(value, len(positions)) for value in x.tolist()]
    counts = [inverse.count(u) for u in range(len(positions))]
    return (
        torch.tensor(list(positions), dtype=x.dtype, device=x.device),
        torch.tensor(inverse, dtype=torch.int64, device=x.device),
        torch.tensor(counts, dtype=torch.int64, device=x.device),
    )


def unique_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = [tuple(row.reshape(-1).tolist()) for row in x]
    first: dict[tuple, int] = {}
    for position, row in enumerate(rows):
        first.setdefault(row, position)
    inverse = [list(first).index(row) for row in rows]
    counts = [inverse.count(u) for u in range(len(first))]
    return (
        torch.tensor(list(first.values()), dtype=torch.int64, device=x.device),
        torch.tensor(inverse, dtype=torch.int64, device=x.device),
        torch.tensor(counts, dtype=torch.int64, device=x.device),
    )


FUNCTIONS = (unique, unique_with_counts, unique_rows)
