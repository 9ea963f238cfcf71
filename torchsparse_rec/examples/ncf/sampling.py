"""Samples for training and evaluation: leave-one-out split, fresh training negatives, candidates for the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .data import Interactions


@dataclass(frozen=True)
class Split:
    """
    Interactions in two parts: every user's latest one is held out, the rest is trained on.

    Args:
        users, items: training interactions, int32 ``[N]``.
        test_users, test_items: one held-out interaction per user with at least two, int32 ``[T]``.
        num_users, num_items: sizes of the tables.
    """

    users: Tensor
    items: Tensor
    test_users: Tensor
    test_items: Tensor
    num_users: int
    num_items: int


def leave_one_out(interactions: Interactions) -> Split:
    """
    Hold out each user's latest interaction; of equal timestamps the one that comes last in the file.

    A user with a single interaction keeps it for training and is not tested.
    """
    users, items = interactions.users, interactions.items
    order = np.lexsort((interactions.timestamps, users))  # A stable sort keeps equal timestamps in the file's order.
    sorted_users = users[order]
    last_of_user = np.append(sorted_users[1:] != sorted_users[:-1], True)
    counts = np.bincount(users, minlength=interactions.num_users)
    held_out = np.zeros(len(users), dtype=bool)
    held_out[order[last_of_user & (counts[sorted_users] > 1)]] = True
    test = np.flatnonzero(held_out)
    test = test[np.argsort(users[test])]
    return Split(
        users=torch.from_numpy(users[~held_out]),
        items=torch.from_numpy(items[~held_out]),
        test_users=torch.from_numpy(users[test]),
        test_items=torch.from_numpy(items[test]),
        num_users=interactions.num_users,
        num_items=interactions.num_items,
    )


class PairSet:
    """
    A set of (user, item) pairs as one bit per possible pair, so that a million pairs are looked up in milliseconds.

    Args:
        users, items: int32 ``[N]``, on the device where the set shall live.
        num_users, num_items: bounds of the ids.
    """

    def __init__(self, users: Tensor, items: Tensor, num_users: int, num_items: int) -> None:
        self.num_items = num_items
        self._row_bytes = (num_items + 7) // 8
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

    def counts(self) -> Tensor:
        """Return the number of items that the set has for each user, int64 ``[num_users]``."""
        powers = torch.arange(8, dtype=torch.uint8, device=self._bits.device)
        counted = ((torch.arange(256, dtype=torch.uint8, device=self._bits.device).unsqueeze(1) >> powers) & 1).sum(1)
        return counted[self._bits.int()].view(-1, self._row_bytes).sum(1)


def _trained(split: Split) -> tuple[Tensor, Tensor]:
    return split.users, split.items


def _touched(split: Split) -> tuple[Tensor, Tensor]:
    return torch.cat([split.users, split.test_users]), torch.cat([split.items, split.test_items])


class Batch(NamedTuple):
    """Samples in training order: users and items, int32 ``[B]``, and labels, float32 ``[B]`` (1 or 0)."""

    users: Tensor
    items: Tensor
    labels: Tensor

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.labels.shape[0]

    def rows(self, begin: int, end: int) -> Batch:
        """Return the batch of the samples from ``begin`` up to, without, ``end``."""
        return Batch(self.users[begin:end], self.items[begin:end], self.labels[begin:end])

    def split(self, size: int) -> list[Batch]:
        """Return consecutive slices of ``size`` samples; the last may be shorter."""
        return list(map(Batch, self.users.split(size), self.items.split(size), self.labels.split(size)))


class TrainingSampler:
    """
    Draws an epoch: every training interaction with fresh negatives, shuffled.

    A negative is uniform over the items outside the user's training interactions. The held-out item is one of them:
    training must not know the answer.

    Args:
        split: the training interactions.
        negatives: per positive, default 4.
        seed: of the generator, whose state is :attr:`generator`'s.
        device: where the samples are drawn and stay.
        exclude_held_out: never draw a user's held-out item either. Many published programs do so; the items that are
            never negatives then give the answer away, and the metrics rise by some hundredths. Default False.

    Raises:
        ValueError: if a user's training interactions cover every item.
    """

    def __init__(
        self,
        split: Split,
        negatives: int = 4,
        seed: int = 0,
        device: torch.device | str = "cpu",
        exclude_held_out: bool = False,
    ) -> None:
        if negatives < 1:
            raise ValueError(f"negatives must be at least 1, got {negatives}")
        self.negatives = negatives
        self.generator = torch.Generator(device).manual_seed(seed)
        self._users = split.users.to(device)
        self._items = split.items.to(device)
        excluded = _touched(split) if exclude_held_out else _trained(split)
        self._excluded = PairSet(excluded[0].to(device), excluded[1].to(device), split.num_users, split.num_items)
        full = (self._excluded.counts() == split.num_items).nonzero()
        if len(full):
            raise ValueError(f"no negative exists for user {int(full[0])}, who has all {split.num_items} items")

    @property
    def samples(self) -> int:
        """The number of samples in an epoch."""
        return len(self._users) * (1 + self.negatives)

    def draw(self) -> Batch:
        """Return the samples of the next epoch, and advance the generator."""
        device, group = self._users.device, 1 + self.negatives
        items = torch.empty(len(self._users), group, dtype=torch.int32, device=device)
        items[:, 0] = self._items
        negatives = _draw_outside(self._excluded, self._users.unsqueeze(1).expand(-1, self.negatives), self.generator)
        items[:, 1:] = negatives
        order = torch.randperm(self.samples, generator=self.generator, device=device)
        positives = order.div(group, rounding_mode="floor")
        labels = (order == positives * group).float()
        return Batch(self._users[positives], items.view(-1)[order], labels)


def _draw_outside(pairs: PairSet, users: Tensor, generator: torch.Generator) -> Tensor:
    """Draw uniform items for each user such that no pair is in ``pairs``: int32, of the shape of ``users``."""

    def draw(size: torch.Size) -> Tensor:
        return torch.randint(pairs.num_items, size, generator=generator, dtype=torch.int32, device=users.device)

    items = draw(users.shape)
    bad = pairs.contains(users, items).nonzero(as_tuple=True)
    while len(bad[0]):
        redrawn = draw(bad[0].shape)
        items[bad] = redrawn
        still = pairs.contains(users[bad], redrawn)
        bad = tuple(index[still] for index in bad)
    return items


def evaluation_candidates(split: Split, count: int = 99, seed: int = 0) -> Tensor:
    """
    Draw ``count`` different items for each tested user, none ever touched by the user, in training or test.

    Args:
        split: the held-out interactions and what else the users touched.
        count: candidates per user, default 99 as in the NCF paper.
        seed: the same candidates serve every epoch of every run with this seed.

    Returns:
        int32 ``[T, count]``.

    Raises:
        ValueError: if a user left fewer than ``count`` items untouched.
    """
    users, device = split.test_users, split.users.device
    touched = PairSet(*_touched(split), split.num_users, split.num_items)
    untouched = split.num_items - touched.counts()[users.long()]
    if bool((untouched < count).any()):
        worst = int(untouched.argmin())
        raise ValueError(
            f"evaluation needs {count} items that a user never touched; user {int(users[worst])} has {untouched[worst]}"
        )
    generator = torch.Generator(device).manual_seed(seed)
    candidates = _draw_outside(touched, users.unsqueeze(1).expand(-1, count), generator)
    while True:
        candidates = candidates.sort(dim=1).values
        repeated = torch.zeros_like(candidates, dtype=torch.bool)
        repeated[:, 1:] = candidates[:, 1:] == candidates[:, :-1]
        rows, columns = repeated.nonzero(as_tuple=True)
        if not len(rows):
            return candidates
        candidates[rows, columns] = _draw_outside(touched, users[rows], generator)
