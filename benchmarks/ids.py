"""Ids as recommenders have them: uniform, or with a few rows that take most lookups. They are drawn on the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# The exponent of the power law in FBGEMM's published figures.
EXPONENT = 1.05


def _generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def uniform_ids(count: int, rows: int, device: str, seed: int = 0) -> Tensor:
    """Draw ``count`` int64 ids, uniform in ``[0, rows)``."""
    return torch.randint(0, rows, (count,), generator=_generator(device, seed), device=device)


def zipf_ids(count: int, rows: int, device: str, seed: int = 0, exponent: float = EXPONENT) -> Tensor:
    """
    Draw ``count`` int64 ids in ``[0, rows)`` by Zipf's law: the k-th most popular about as often as ``k ** -exponent``.

    The law is over exactly ``rows`` values, and its distribution function is inverted. Popular ids lie scattered over
    the table, as they do in one that is filled by time or by hash.
    """
    weights = torch.arange(1, rows + 1, dtype=torch.float64, device=device).pow_(-exponent)
    distribution = weights.cumsum_(0)
    drawn = torch.rand(count, dtype=torch.float64, generator=_generator(device, seed), device=device)
    ranks = torch.searchsorted(distribution, drawn.mul_(distribution[-1]))
    return scatter(ranks.clamp_max_(rows - 1), rows)


def scatter(ranks: Tensor, rows: int) -> Tensor:
    """Permute ``[0, rows)`` so that no neighbours stay together, by multiples of a step that is prime to ``rows``."""
    step = max(1, round(rows * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, rows) != 1:
        step += 1
    assert rows * step < 2**63
    return (ranks * step) % rows


SPREADS = {"uniform": uniform_ids, "zipf": zipf_ids}


def bag_lengths(bags: int, shortest: int, longest: int, device: str, seed: int = 0) -> Tensor:
    """Draw ``[bags]`` int64 lengths, uniform from ``shortest`` to ``longest``."""
    return torch.randint(shortest, longest + 1, (bags,), generator=_generator(device, seed), device=device)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return offsets ``[bags + 1]``: where each bag begins, and where the last ends."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
