"""Pairs of users and items, and items that a user has not touched: the negatives of a recommender."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["PairSet", "latest"]


def latest(users: np.ndarray, times: np.ndarray) -> np.ndarray:
    """
    Return the place of each user's latest pair, in the order of users; of equal times it is the last one's.

    Args:
        users: the user of each pair ``[N]``.
        times: the time of each pair ``[N]``.

    Example:
        >>> latest(np.array([0, 1, 0, 1]), np.array([5, 7, 5, 6]))
        array([2, 1])
    """
    order = np.lexsort((times, users))  # A stable sort keeps equal times in their order.
    ordered = users[order]
    return order[np.append(ordered[1:] != ordered[:-1], True)]


class PairSet:
    """
    A set of (user, item) pairs as one bit per possible pair, so that a million pairs are looked up in milliseconds.

    Args:
        users, items: the pairs' ids, int32 ``[N]``, on the device where the set shall live.
        num_users, num_items: the bounds of the ids.

    Example:
        >>> pairs = PairSet(torch.tensor([0, 1]).int(), torch.tensor([2, 0]).int(), num_users=2, num_items=3)
        >>> pairs.row_mask(torch.tensor([0, 1]))
        tensor([[False, False,  True],
                [ True, False, False]])
    """

    def __init__(self, users: Tensor, items: Tensor, num_users: int, num_items: int) -> None:
        self.num_items, self._row_bytes = num_items, (num_items + 7) // 8
        self._bits = torch.zeros(num_users * self._row_bytes, dtype=torch.uint8, device=users.device)
        for bit in range(8):  # Within one pass every pair of the same byte writes the same value.
            chosen = (items & 7) == bit
            position = self._byte(users[chosen], items[chosen])
            self._bits[position] = self._bits[position] | (1 << bit)

    def _byte(self, users: Tensor, items: Tensor) -> Tensor:
        return users.long() * self._row_bytes + (items >> 3)

    def contains(self, users: Tensor, items: Tensor) -> Tensor:
        """Say whether each pair is in the set: bool of the shape of ``items``, to which ``users`` is broadcast."""
        return ((self._bits[self._byte(users, items)] >> (items & 7).to(torch.uint8)) & 1).bool()

    def row_mask(self, users: Tensor) -> Tensor:
        """Say of every item whether the set has it with each user: bool ``[len(users), num_items]``."""
        rows = self._bits.view(-1, self._row_bytes)[users.long()]
        shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
        return ((rows.unsqueeze(-1) >> shifts) & 1).bool().flatten(1)[:, : self.num_items]

    def draw_outside(self, users: Tensor, generator: torch.Generator) -> Tensor:
        """
        Draw a uniform item for each user such that no pair is in the set: int32, of the shape of ``users``.

        It does not return if a user has all items.
        """

        def draw(size: torch.Size) -> Tensor:
            return torch.randint(self.num_items, size, generator=generator, dtype=torch.int32, device=users.device)

        items = draw(users.shape)
        bad = self.contains(users, items).nonzero(as_tuple=True)
        while len(bad[0]):
            items[bad] = redrawn = draw(bad[0].shape)
            still = self.contains(users[bad], redrawn)
            bad = tuple(index[still] for index in bad)
        return items

    def draw_distinct_outside(self, users: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """
        Draw ``count`` different items for each user such that no pair is in the set: int32 ``[len(users), count]``.

        Raises:
            ValueError: a user has all but fewer than ``count`` items.
        """
        untouched = [self.num_items - self.row_mask(some).sum(1) for some in users.split(1024)]
        if untouched and (least := int(torch.cat(untouched).min())) < count:
            raise ValueError(f"there must be {count} items that each user never touched, got {least} of one")
        items = self.draw_outside(users.unsqueeze(1).expand(-1, count), generator)
        while True:
            items = items.sort(dim=1).values
            repeated = torch.zeros_like(items, dtype=torch.bool)
            repeated[:, 1:] = items[:, 1:] == items[:, :-1]
            rows, columns = repeated.nonzero(as_tuple=True)
            if not len(rows):
                return items
            items[rows, columns] = self.draw_outside(users[rows], generator)
