"""Checkpoints of a table that grows: where a save or a restore has failed, and what a delta holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from variable.cases import rows_of

from torchsparse_rec import optim
from torchsparse_rec.nn import EmbeddingVariable, table_cross_entropy
from torchsparse_rec.variable.rows import TableRows


def test_no_delta_on_top_of_a_restore_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, other = EmbeddingVariable(2), EmbeddingVariable(2)
    table.insert([1, 2, 3], torch.ones(3, 2))
    table.save(tmp_path / "f")
    other.insert([100], torch.ones(1, 2))
    other.save(tmp_path / "g")

    def fails(*arguments: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(TableRows, "put", fails)
        table.restore(tmp_path / "g")
    table(torch.tensor([7]))
    with pytest.raises(ValueError, match="there is none: save"):
        table.save_delta(tmp_path / "f")


@pytest.mark.parametrize("at", ["write shard 0", "rename manifest"])
def test_a_delta_that_failed_has_saved_nothing(at: str, tmp_path: Path) -> None:
    """Check that the next delta holds the failed delta's changes too."""
    table, other = EmbeddingVariable(2), EmbeddingVariable(2)
    table.insert([1, 2, 3], torch.ones(3, 2))
    table.save(tmp_path)
    table.insert([4], torch.ones(1, 2))
    table.erase([2])

    def full_disk(phase: str) -> None:
        if phase == at:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        table.save_delta(tmp_path, on_phase=full_disk)
    table.insert([5], torch.ones(1, 2))
    table.save_delta(tmp_path)
    other.restore(tmp_path)
    assert rows_of(other) == rows_of(table) and sorted(rows_of(other)) == [1, 3, 4, 5]


@pytest.mark.parametrize("grad_mode", ["fused", "dense"])
def test_a_delta_has_all_rows_that_a_loss_over_them_has_moved(grad_mode: Any, tmp_path: Path) -> None:
    table, input = EmbeddingVariable(2, grad_mode=grad_mode), torch.randn(4, 2)
    optimizer = optim.Adagrad(table.parameters(), lr=0.1, in_backward=grad_mode == "fused")
    for first, save in ((0, table.save), (10, table.save_delta)):
        optimizer.zero_grad()
        table_cross_entropy(input, table, torch.arange(first, first + 4)).backward()
        optimizer.step()
        save(tmp_path)
    other = EmbeddingVariable(2)
    _its = optim.Adagrad(other.parameters(), lr=0.1)
    other.restore(tmp_path)
    assert torch.equal(other.lookup(torch.arange(20)), table.lookup(torch.arange(20)))
