"""Generated data that can be learned: skewed ids and their effects in a hidden model, and users' taste in items."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["ZIPF_EXPONENT", "effects", "generator_of", "interactions", "zipf"]

ZIPF_EXPONENT = 1.05

_MASK = (1 << 31) - 1


def generator_of(seed: int, number: int) -> torch.Generator:
    """Return the generator of a batch's random numbers, which depend on the seed and the batch's number alone."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number * 2 + 1) % (1 << 63))


def zipf(drawn: Tensor, rows: int | Tensor) -> Tensor:
    """
    Return ids in ``[0, rows)``, id ``i`` about as often as ``(i + 1) ** -1.05``.

    Args:
        drawn: numbers uniform in ``[0, 1)``, float64. It is overwritten.
        rows: the number of ids: an integer, or a tensor that goes with ``drawn`` by broadcasting.

    Returns:
        int64, in the shape of ``drawn``.

    Example:
        >>> zipf(torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64), 100)
        tensor([ 0,  7, 99])
    """
    # The inverse of the distribution function of x ** -1.05 on [1, rows + 1).
    power = 1.0 - ZIPF_EXPONENT
    ids = drawn.mul_((rows + 1.0) ** power - 1.0).add_(1.0).pow_(1.0 / power).to(torch.int64).sub_(1)
    return ids.clamp_(torch.zeros_like(rows), rows - 1) if isinstance(rows, Tensor) else ids.clamp_(0, rows - 1)


def effects(ids: Tensor, feature: int | Tensor) -> Tensor:
    """Return each id's effect on the hidden model's logit: a hash of id and feature, float32 uniform in ``[-1, 1)``."""
    mixed = (ids & _MASK) * 0x5BD1E995 + (feature + 1) * 0x27D4EB2F
    mixed = ((mixed >> 15) ^ mixed) & _MASK
    mixed = mixed * 0x2C1B3C6D
    mixed = ((mixed >> 12) ^ mixed) & _MASK
    return mixed.to(torch.float32) * (2.0 / _MASK) - 1.0


def interactions(num_users: int, num_items: int, total: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Return users, items and Unix times of interactions: there are popular and rare items, and users of different tastes.

    A user of taste ``t`` prefers item ``i`` of qualities ``q_i`` by ``log popularity_i + 2.5 <t, q_i>``; ``<t, q_i>``
    is about standard normal and popularity falls with an item's rank; the items a user touches are a draw without
    replacement by these preferences, in random order of time.

    Raises:
        ValueError: a user would have to touch more than half of the items.

    Example:
        >>> users, items, times = interactions(10, 200, 500, seed=0)
        >>> len(users), users.max(), items.max() < 200
        (500, np.int32(9), np.True_)
    """
    random = np.random.default_rng(seed)
    # Users' numbers of items are log-normal, at least a fifth of the mean, at most half of the items.
    most = num_items // 2
    if total > num_users * most:
        raise ValueError(f"total must be at most {num_users * most}, half of the items for each user, got {total}")
    least = min(total // num_users // 5, most)
    wish = random.lognormal(sigma=1.0, size=num_users)
    counts = np.clip(least + (total - least * num_users) * wish / wish.sum(), least, most).astype(np.int64)
    while (missing := total - int(counts.sum())) > 0:
        room = np.flatnonzero(counts < most)
        counts[random.choice(room, size=min(missing, len(room)), replace=False)] += 1
    log_popularity = random.permutation(-np.log(np.arange(num_items) + 11.0))
    tastes = random.standard_normal((num_users, 8)) / 8**0.5
    preference = log_popularity + 2.5 * tastes @ random.standard_normal((num_items, 8)).T
    # The largest values of preference + Gumbel noise are a draw without replacement with weights exp(preference).
    order = np.argsort(-(preference + random.gumbel(size=preference.shape)), axis=1)
    users = np.repeat(np.arange(num_users, dtype=np.int32), counts)
    items = np.concatenate([order[user, :count] for user, count in enumerate(counts)]).astype(np.int32)
    times = random.integers(874_000_000, 894_000_000, total)
    shuffled = random.permutation(total)
    return users[shuffled], items[shuffled], times[shuffled]
