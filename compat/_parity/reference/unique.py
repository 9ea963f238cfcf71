"""Slow, obvious references of the operators of the family ``unique``."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor


def _numbered(items: list) -> tuple[list, Tensor, Tensor]:
    """Return the distinct items in the order in which they appear, which of them each item is, and their counts."""
    numbers: dict = {}
    inverse = [numbers.setdefault(item, len(numbers)) for item in items]
    counts = Counter(inverse)
    return list(numbers), torch.tensor(inverse).long(), torch.tensor([counts[u] for u in range(len(numbers))]).long()


def unique(x: Tensor) -> tuple[Tensor, Tensor]:
    return unique_with_counts(x)[:2]


def unique_with_counts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, inverse, counts = _numbered(x.tolist())
    return torch.tensor(values, dtype=x.dtype), inverse, counts


def unique_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = [tuple(row.reshape(-1).tolist()) for row in x]
    distinct, inverse, counts = _numbered(rows)
    first = {row: position for position, row in reversed(list(enumerate(rows)))}
    return torch.tensor([first[row] for row in distinct]).long(), inverse, counts


FUNCTIONS = (unique, unique_with_counts, unique_rows)
