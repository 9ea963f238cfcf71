"""Models of one table of each kind, in every gradient mode: what exporters are given."""

from __future__ import annotations

import torch
from torch import Tensor

from torchsparse_rec import nn, optim

MODES = (None, "dense", "sparse", "fused", "auto")
KINDS = ("table", "bag", "collection", "variable")
IDS = torch.tensor([[1, 2], [3, 19]])


class Model(torch.nn.Module):
    """A table of 20 rows, called with ids ``[B, 2]``."""

    def __init__(self, kind: str, grad_mode: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        if kind == "table":
            self.table: torch.nn.Module = nn.Embedding(20, 3, grad_mode=grad_mode)
        elif kind == "bag":
            self.table = nn.EmbeddingBag(20, 3, grad_mode=grad_mode)
        elif kind == "collection":
            config = nn.EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=3, feature_names=["f"])
            self.table = nn.EmbeddingBagCollection([config], grad_mode=grad_mode)
        else:
            self.table = nn.EmbeddingVariable(3, initializer=0.5, grad_mode=grad_mode)

    def forward(self, ids: Tensor) -> Tensor:
        """What is looked up."""
        return self.table({"f": ids}).values() if self.kind == "collection" else self.table(ids)


def trained(kind: str, grad_mode: str | None) -> tuple[Model, optim.Adam]:
    """A model of which rows are behind, where its mode leaves any, and its optimizer."""
    model = Model(kind, grad_mode)
    optimizer = optim.Adam(model.parameters(), lr=0.1, in_backward=True)
    for k in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[k, k + 1]])).square().sum().backward()
        optimizer.step()
    return model, optimizer
