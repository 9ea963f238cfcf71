"""Healthy training loops: one into which causes are planted, and others for which no cause may be named."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from ..jagged import KeyedJaggedTensor
from ..nn import EmbeddingBagCollection, EmbeddingBagConfig
from ..optim import SGD

__all__ = ["HEALTHY_LOOPS", "Demo", "Healthy", "Ranker", "RankerBatch", "Sizes"]

# The number of batches that are made beforehand: so many that no cache holds the rows of all.
_READY = 16


@dataclass
class Demo:
    """A training loop: the arguments of ``diagnose``."""

    step: Callable[[Any, Any, Any], Any]
    loader: Iterable[Any]
    model: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass
class RankerBatch:
    """A batch: ids by feature, dense features ``[B, dense]`` and labels ``[B]``."""

    ids: KeyedJaggedTensor
    dense: Tensor
    labels: Tensor


class Ranker(nn.Module):
    """
    A ranking model: pooled embeddings and dense features, concatenated, then a perceptron.

    Args:
        features: the number of features, each with its own table.
        rows: the number of rows of each table.
        width: the number of values of a row.
        dense: the number of dense features.
        hidden: the width of the perceptron's hidden layer.
    """

    def __init__(self, features: int, rows: int, width: int, dense: int, hidden: int) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=f"t{k}", num_embeddings=rows, embedding_dim=width, feature_names=[f"f{k}"])
                for k in range(features)
            ],
            grad_mode="fused",
        )
        self.mlp = nn.Sequential(nn.Linear(features * width + dense, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        """Return logits, ``[B]``."""
        return self.mlp(torch.cat([self.tables(ids).values(), dense], dim=1)).squeeze(1)  # type: ignore[no-any-return]


@dataclass
class Sizes:
    """The sizes of a loop, drawn from a seed."""

    batch: int
    features: int
    rows: int
    width: int
    dense: int
    hidden: int

    @staticmethod
    def draw(seed: int) -> Sizes:
        draw = random.Random(seed)
        return Sizes(
            batch=draw.choice([512, 768, 1024]),
            features=draw.randint(8, 20),
            rows=draw.choice([20_000, 50_000, 100_000]),
            width=draw.choice([8, 16]),
            dense=draw.randint(4, 13),
            hidden=draw.choice([4, 8]),
        )


class Healthy:
    """The healthy loop into which causes are planted: fused tables, a small perceptron, batches made beforehand."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.sizes = s = Sizes.draw(seed)
        self.draw = random.Random(seed + 1)
        self.model = Ranker(s.features, s.rows, s.width, s.dense, s.hidden)
        self.optimizer: torch.optim.Optimizer = SGD(self.model.parameters(), lr=0.01, in_backward=True)
        self.batches = [self.make_batch() for _ in range(_READY)]
        self._ready = cycle(self.batches)

    def make_batch(self) -> RankerBatch:
        s = self.sizes
        return self.batch_of(torch.randint(s.rows, (s.features, s.batch)))

    def batch_of(self, ids: Tensor) -> RankerBatch:
        """Return a batch with these ids, ``[features, B]``, and random dense features and labels."""
        features, batch = ids.shape
        lengths = torch.ones(features * batch, dtype=torch.int64)
        keyed = KeyedJaggedTensor([f"f{k}" for k in range(features)], ids.reshape(-1), lengths=lengths)
        return RankerBatch(keyed, torch.rand(batch, self.sizes.dense), torch.randint(2, (batch,)).float())

    @staticmethod
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: RankerBatch) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.ids, batch.dense), batch.labels)
        loss.backward()
        optimizer.step()
        return loss

    def another(self, optimizer: Callable[..., torch.optim.Optimizer]) -> Healthy:
        """Return another loop of the same sizes as a reference for timings, and give both this kind of optimizer."""
        other = Healthy(self._seed)
        for each in (self, other):
            each.optimizer = optimizer(each.model.parameters(), lr=0.001, in_backward=True)
        return other

    def run(self) -> None:
        """Run one step."""
        self.step(self.model, self.optimizer, next(self._ready))

    def demo(self, step: Callable[[Any, Any, Any], Any] | None = None, loader: Iterable[Any] | None = None) -> Demo:
        """Return the loop as a ``Demo``, with another step or loader if one is given."""
        return Demo(step or self.step, loader or cycle(self.batches), self.model, self.optimizer)


# ---- Healthy loops ---------------------------------------------------------------------------------------------------


def _healthy_fused(seed: int) -> Demo:
    return Healthy(seed).demo()


def _healthy_sparse(seed: int) -> Demo:
    """Return a loop of torch's ``EmbeddingBag`` with sparse gradients, a linear head and SGD."""
    draw = random.Random(seed)
    rows, width, batch, hot = draw.randint(100_000, 400_000), draw.choice([16, 32]), 1024, draw.randint(5, 20)
    model = nn.Sequential(nn.EmbeddingBag(rows, width, mode="mean", sparse=True), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randint(rows, (batch, hot)), torch.rand(batch, 1)) for _ in range(_READY)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, both: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(both[0]), both[1]).backward()
        optimizer.step()

    return Demo(step, batches, model, optimizer)


class Pairs(nn.Module):
    """A small model of neural collaborative filtering: user and item tables, a product beside a perceptron."""

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, 2 * width), nn.Embedding(items, 2 * width)
        self.mlp = nn.Sequential(nn.Linear(2 * width, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.output = nn.Linear(width + 8, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return logits, ``[B]``."""
        (p, r), (q, s) = self.users(users).chunk(2, dim=1), self.items(items).chunk(2, dim=1)
        hidden = self.mlp(torch.cat([r, s], dim=1))
        return self.output(torch.cat([p * q, hidden], dim=1)).squeeze(1)  # type: ignore[no-any-return]


def _healthy_small(seed: int) -> Demo:
    """Return a loop of small tables with dense gradients and Adam, like NCF on MovieLens: nothing is wrong with it."""
    draw = random.Random(seed)
    users, items, batch = draw.randint(900, 6_000), draw.randint(1_600, 3_700), draw.choice([512, 1024])
    model = Pairs(users, items, draw.choice([8, 16]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    batches = [
        (torch.randint(users, (batch,)), torch.randint(items, (batch,)), torch.randint(2, (batch,)).float())
        for _ in range(_READY)
    ]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, columns: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(*columns[:2]), columns[2])
        loss.backward()
        optimizer.step()
        return loss

    return Demo(step, batches, model, optimizer)


#: The healthy loops by name; a diagnosis must name no cause for any of them.
HEALTHY_LOOPS: dict[str, Callable[[int], Demo]] = {
    "healthy_fused": _healthy_fused,
    "healthy_sparse": _healthy_sparse,
    "healthy_small": _healthy_small,
}
