"""Damaged checkpoints of a table that grows: it is restored right, or the error names the file and nothing changes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import check_damaged, content_of
from variable.cases import on_disk, step

from torchsparse_rec import optim
from torchsparse_rec.nn import EmbeddingVariable
from torchsparse_rec.variable import CBFFilter, CounterFilter, EmbeddingVariableOption

OPTIONS: dict[str, Any] = {
    "plain": {},
    "counted": {"filter_option": CounterFilter(2)},
    "sketched": {"filter_option": CBFFilter(2, 10, 0.1)},
    "tiers": {},
}
OPTIMIZERS: dict[str, Any] = {
    "plain": optim.Adam,
    "counted": optim.Adagrad,
    "sketched": optim.RowWiseAdagrad,
    "tiers": optim.Adagrad,
}
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace fsync, because no test takes the power away."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def made(kind: str, begin: int, folder: Path) -> tuple[EmbeddingVariable, Any]:
    options = {"storage_option": on_disk(folder.parent / f"rows{next(_numbers)}")} if kind == "tiers" else OPTIONS[kind]
    table = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(**options), seed=begin)
    optimizer = OPTIMIZERS[kind](table.parameters(), lr=0.1)
    train((table, optimizer), begin)
    return table, optimizer


def train(its: tuple[EmbeddingVariable, Any], begin: int) -> None:
    for k in range(4):
        step(*its, torch.arange(begin + 8 * (k // 2), begin + 8 * (k // 2) + 12))


def load(its: tuple[EmbeddingVariable, Any], folder: Path | None = None, version: int | None = None) -> Any:
    table, optimizer = its
    if folder is not None:
        table.restore(folder, version=version)
    return content_of([table.state_dict(), optimizer.state_dict(), table.export()])


def check(folder: Path, kind: str, seeds: range) -> Any:
    its = made(kind, 0, folder)
    its[0].save(folder)
    train(its, 20)
    its[0].save_delta(folder)
    return check_damaged(folder, lambda: made(kind, 5, folder), load, lambda its: (train(its, 9), load(its)), seeds)


def test_some_damage(tmp_path: Path) -> None:
    counts = check(tmp_path / "saved", "counted", range(60))
    assert counts["refused"] > 40 and counts["right"] > 2


@pytest.mark.full
@pytest.mark.parametrize("kind", OPTIONS)
def test_damage(tmp_path: Path, kind: str) -> None:
    assert check(tmp_path / "saved", kind, range(100, 150)).total() == 50
