"""A table in each kind of module, for tests that run the same on all of them; and files in memory."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchsparse_rec import nn


def table_of(kind: str, grad_mode: str | None, rows: int, dim: int, **of_variable: Any) -> torch.nn.Module:
    """Return a table of a kind: "table", "bag", "collection" or "variable", which has no rows yet."""
    if kind == "table":
        return nn.Embedding(rows, dim, grad_mode=grad_mode)
    if kind == "bag":
        return nn.EmbeddingBag(rows, dim, grad_mode=grad_mode)
    if kind == "collection":
        config = nn.EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=["f"])
        return nn.EmbeddingBagCollection([config], grad_mode=grad_mode)
    assert kind == "variable"
    return nn.EmbeddingVariable(dim, grad_mode=grad_mode, **of_variable)


def looked_up(table: torch.nn.Module, ids: Tensor) -> Tensor:
    """Look up ids and return a tensor; a collection pools the ids of a matrix by its rows."""
    if isinstance(table, nn.EmbeddingBagCollection):
        return table({"f": ids.view(ids.size(0), -1)}).values()
    return table(ids)  # type: ignore[no-any-return]


class WithHead(torch.nn.Module):
    """A table of 20 rows of 4, and a layer after it: ids ``[B]`` become ``[B, 1]``."""

    def __init__(self, kind: str, grad_mode: str | None, **of_variable: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = table_of(kind, grad_mode, 20, 4, **of_variable)
        self.head = torch.nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Apply the layer to the rows that a lookup of ``ids`` gives."""
        return self.head(looked_up(self.tables, ids))  # type: ignore[no-any-return]


def loss_of(model: torch.nn.Module, seed: int) -> Tensor:
    """Return the loss of eight ids, which the seed draws."""
    ids = torch.randint(0, 20, (8,), generator=torch.Generator().manual_seed(seed))
    return model(ids).square().mean()  # type: ignore[no-any-return]


def train(model: torch.nn.Module, optimizer: Any, seeds: Iterable[int], set_to_none: bool = True) -> None:
    """Train a step with the ids of each seed."""
    for seed in seeds:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, seed).backward()
        optimizer.step()


def saved(x: Any, **options: Any) -> Any:
    """Save and load ``x`` by a file."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)
