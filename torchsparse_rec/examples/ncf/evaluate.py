"""HR@10 and NDCG@10 of held-out items, against 99 sampled items and against the full catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _records
from .._job import ALONE, Job
from .._records import Record
from .model import NeuMF
from .sampling import PairSet, Split

# How many pairs are scored at once, so that their hidden layer stays in the cache.
_PAIRS = 1 << 15


@dataclass(frozen=True)
class Metrics(_records.Metrics):
    """Means over the tested users: ``hr`` and ``ndcg`` against sampled items, ``full_*`` against the catalogue."""

    hr: float
    ndcg: float
    full_hr: float
    full_ndcg: float

    @classmethod
    def of(cls, train_on: Any, source: Any) -> Metrics:
        """Return the metrics of a step's network by the evaluator of its samples."""
        return source.evaluator(train_on.network(), train_on.job)

    def __str__(self) -> str:
        """Return the metrics against sampled items."""
        return f"HR@10 {self.hr:.4f} NDCG@10 {self.ndcg:.4f}"

    def line(self, record: Record) -> str:
        """Return all metrics and the loss."""
        return f"  {self} full-HR@10 {self.full_hr:.4f} full-NDCG@10 {self.full_ndcg:.4f} loss {record.loss:.4f}"

    def place(self, record: Record) -> str:
        """Return the epoch."""
        return f"epoch {record.epoch}"

    def rank(self) -> tuple[float, float]:
        """Return the metrics against sampled items."""
        return self.hr, self.ndcg

    @staticmethod
    def draw(history: Sequence[Record], left: Any, right: Any) -> None:
        """Draw metrics and loss over the epochs."""
        epochs = [record.epoch for record in history]
        for name, label in zip(
            ("hr", "ndcg", "full_hr", "full_ndcg"), ("HR@10", "NDCG@10", "full-HR@10", "full-NDCG@10"), strict=True
        ):
            left.plot(epochs, [getattr(record.metrics, name) for record in history], label=label, marker=".")
        left.set(xlabel="epoch", ylim=(0.0, None), title="held-out items")
        left.legend()
        right.plot(epochs, [record.loss for record in history], marker=".", color="black")
        right.set(xlabel="epoch", ylabel="binary cross-entropy", title="training loss")


def ranks(held_out: Tensor, others: Tensor) -> Tensor:
    """
    Return the 0-based rank of each held-out item: how many others do not score below it.

    Ties count against the held-out item, and so does a NaN on either side.

    Args:
        held_out: scores of the held-out items ``[T]``.
        others: scores of the items with which each competes ``[T, C]``.

    Returns:
        int64 ``[T]``.

    Example:
        >>> ranks(torch.tensor([2.0]), torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([2])
    """
    return others.shape[1] - (others < held_out.unsqueeze(1)).sum(1)


def hit_rate(ranks: Tensor, top: int = 10) -> float:
    """Return the share of ranks ``[T]`` below ``top``."""
    return (ranks < top).double().mean().item()


def ndcg(ranks: Tensor, top: int = 10) -> float:
    """Return the mean of ``1 / log2(rank + 2)`` over ranks ``[T]``, 0 for ranks from ``top`` on. The ideal is 1."""
    gain = 1.0 / torch.log2(ranks.double() + 2.0)
    return torch.where(ranks < top, gain, 0.0).mean().item()


class Evaluator:
    """
    Ranks the held-out item of every tested user.

    Args:
        split: held-out and training interactions.
        candidates: the sampled items of each tested user, int32 ``[T, C]``, none ever touched by the user.
        device: where the model lives.
    """

    def __init__(self, split: Split, candidates: Tensor, device: torch.device | str = "cpu") -> None:
        if not len(split.test_users):
            raise ValueError("there is nothing to evaluate: no user has two interactions or more")
        self._users = split.test_users.to(device)
        self._items = split.test_items.to(device)
        self._candidates = candidates.to(device)
        self._trained = PairSet(split.users.to(device), split.items.to(device), split.num_users, split.num_items)
        self._num_items = split.num_items

    @torch.no_grad()
    def __call__(self, model: NeuMF, job: Job = ALONE) -> Metrics:
        """Return the metrics of ``model``, without training it; each rank of a job ranks its part of the items."""
        sampled = self._sampled_ranks(model, job)
        full = self._full_ranks(model, job)
        return Metrics(hit_rate(sampled), ndcg(sampled), hit_rate(full), ndcg(full))

    def _sampled_ranks(self, model: NeuMF, job: Job) -> Tensor:
        items = torch.cat([self._items.unsqueeze(1), self._candidates], dim=1)
        found = []
        size = max(1, _PAIRS // items.shape[1]) * job.ranks
        for all_users, all_items in zip(self._users.split(size), items.split(size), strict=True):
            users, block = job.part(all_users), job.part(all_items)
            scores = model(users.repeat_interleave(block.shape[1]), block.flatten()).view(block.shape)
            found.append(job.joined(ranks(scores[:, 0], scores[:, 1:]), len(all_users)))
        return torch.cat(found)

    def _full_ranks(self, model: NeuMF, job: Job) -> Tensor:
        found = []
        size = max(1, _PAIRS // self._num_items) * job.ranks
        for all_users, all_items in zip(self._users.split(size), self._items.split(size), strict=True):
            users, items = job.part(all_users), job.part(all_items)
            scores = model.score_all(users)
            held_out = scores.gather(1, items.long().unsqueeze(1)).squeeze(1)
            # A training item, or the held-out item itself, is no competitor: it scores minus infinity, below every
            # number.
            scores.masked_fill_(self._trained.row_mask(users), -torch.inf)
            scores.scatter_(1, items.long().unsqueeze(1), -torch.inf)
            found.append(job.joined(ranks(held_out, scores), len(all_users)))
        return torch.cat(found)
