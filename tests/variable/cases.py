"""Helpers of the tests of embedding variables: a step of training, the rows of a table, and tiers on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import StorageOption


def step(table: EmbeddingVariable, optimizer: torch.optim.Optimizer, ids: Any) -> None:
    optimizer.zero_grad()
    table(torch.as_tensor(ids)).sum().backward()
    optimizer.step()


def rows_of(table: EmbeddingVariable) -> dict[int, list[float]]:
    found = table.export()
    return dict(zip(found.keys.tolist(), found.values.tolist(), strict=True))


def on_disk(path: Path, size: int = 1, **options: Any) -> StorageOption:
    return StorageOption("DRAM_SSD", storage_path=str(path), storage_size=[size], **options)
