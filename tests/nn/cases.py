"""A table and a dense layer, ours beside torch's, and their training: what the tests of fused and stale rows share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchsparse_rec import nn as ours
from torchsparse_rec import optim

ROWS, DIM = 30, 5


class Model(nn.Module):
    """A table and a dense layer."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(DIM, 1)

    def forward(self, *ids: Tensor) -> Tensor:
        """Return a score for every bag."""
        return self.head(self.table(*ids)).squeeze(-1)


def pair(grad_mode: str = "fused", make=ours.EmbeddingBag, **arguments) -> tuple[Model, Model]:
    """Make our model and torch's, with the same weights."""
    torch.manual_seed(0)
    model = Model(make(ROWS, DIM, grad_mode=grad_mode, **arguments))
    theirs = nn.EmbeddingBag if make is ours.EmbeddingBag else nn.Embedding
    reference = Model(theirs(ROWS, DIM, **arguments))
    reference.load_state_dict(model.state_dict())
    return model, reference


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw bags of ids, few of which are frequent, and labels."""
    ids = (torch.rand(6, 4, generator=generator) ** 3 * ROWS).long()
    return ids, torch.rand(6, generator=generator)


def loss_of(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared distance of scores to labels."""
    ids, labels = batch
    return ((model(ids) - labels) ** 2).mean()


def train_step(optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], *arguments: Any) -> None:
    """Train one step on a loss, which is computed after zero_grad."""
    optimizer.zero_grad()
    loss(*arguments).backward()
    optimizer.step()


def squares(module: nn.Module, *ids: Any) -> Tensor:
    """Return the sum of the squares of what a lookup gives."""
    rows = module(*ids)
    return (rows if isinstance(rows, Tensor) else rows.values()).square().sum()


def train_squares(module: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    """Train a step on the squares of the rows of each batch."""
    for ids in batches:
        train_step(optimizer, squares, module, ids)


def stored(model: nn.Module) -> nn.Parameter:
    """Return the table's parameter as stored, without a flush, in one of the models that :func:`pair` makes."""
    return model.table._parameters["weight"]


def assert_same(model: Model, reference: Model, rtol: float = 2e-5) -> None:
    """Compare the parameters of both models, to rounding."""
    assert model.state_dict().keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=rtol, atol=rtol / 10)


def beside(model: Model, reference: Model, name: str = "Adam", lr: float = 0.01) -> list[tuple[Model, Any]]:
    """Return our model with our optimizer, which updates in backward where it may, and torch's model with torch's."""
    mine = getattr(optim, name)(model.parameters(), lr=lr, in_backward=True)
    return [(model, mine), (reference, getattr(torch.optim, name)(reference.parameters(), lr=lr))]


def train_beside(sides: list[tuple[Model, Any]], loss: Callable[..., Tensor] = loss_of, steps: int = 3) -> None:
    """Train both models on the same batches."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = draw(generator)
        for side, optimizer in sides:
            train_step(optimizer, loss, side, batch)


def trained(grad_mode: str) -> tuple[Model, optim.Adam, Tensor]:
    """Train a model until rows are stale; return it, its optimizer, and what the rows should be."""
    model, reference = pair(grad_mode)
    sides = beside(model, reference)
    train_beside(sides, steps=5)
    return model, sides[0][1], reference.table.weight.detach()
