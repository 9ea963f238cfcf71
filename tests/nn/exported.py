"""Models of one table of each kind, in every gradient mode, for the tests of exporters."""

from __future__ import annotations

import torch
from kinds import looked_up, table_of
from nn.cases import train_squares
from torch import Tensor

from torchsparse_rec import optim

MODES = (None, "dense", "sparse", "fused", "auto")
KINDS = ("table", "bag", "collection", "variable")
IDS = torch.tensor([[1, 2], [3, 19]])


class Model(torch.nn.Module):
    """A table of 20 rows, called with ids ``[B, 2]``."""

    def __init__(self, kind: str, grad_mode: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = table_of(kind, grad_mode, 20, 3, initializer=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the looked-up rows."""
        return looked_up(self.table, ids)


def trained(kind: str, grad_mode: str | None) -> tuple[Model, optim.Adam]:
    """Train a model, which leaves rows stale where its mode does so; return it and its optimizer."""
    model = Model(kind, grad_mode)
    optimizer = optim.Adam(model.parameters(), lr=0.1, in_backward=True)
    train_squares(model, optimizer, (torch.tensor([[k, k + 1]]) for k in range(3)))
    return model, optimizer
