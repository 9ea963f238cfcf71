"""Forks while other threads look up and train: their locks are released, and what is half written is refused."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from forks import Held, forked, needs_fork

from torchsparse_rec import nn, optim
from torchsparse_rec.nn import _fused
from torchsparse_rec.tables.clock import Clock
from torchsparse_rec.tables.table import table_of

ROOT = Path(__file__).resolve().parents[2]
IDS = torch.tensor([[1, 2, 3], [3, 1, 0]])


def trained(mode: str) -> tuple[nn.EmbeddingBag, torch.optim.Optimizer]:
    """Return a table with stale rows, and its optimizer."""
    table = nn.EmbeddingBag(10, 4, grad_mode=mode)
    optimizer = optim.Adam(table.parameters(), lr=0.1, in_backward=mode == "fused")
    for ids in (IDS, IDS[:1] + 4):
        train(table, optimizer, ids)
    return table, optimizer


def train(table: nn.EmbeddingBag, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    table(ids).square().sum().backward()
    optimizer.step()
    return table(ids)


def clock_of(table: nn.EmbeddingBag) -> Clock:
    rows = table_of(table._parameters["weight"]).rows
    assert rows is not None
    return rows.clock


@needs_fork
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["sparse", "fused"])
def test_a_process_that_was_forked_while_others_read_goes_on(mode: str) -> None:
    """Look up, train and read the weight in a process forked while another thread held what lookups hold."""
    table, optimizer = trained(mode)
    with Held(clock_of(table).lock), Held(_fused._lock):
        assert forked(lambda: table(IDS).sum().isfinite().item()) == "True"
        there = forked(lambda: (train(table, optimizer, IDS).tolist(), table.weight.sum().item()))
    assert there == str((train(table, optimizer, IDS).tolist(), table.weight.sum().item()))


@needs_fork
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("mode", ["sparse", "fused"])
def test_a_process_that_was_forked_while_another_thread_wrote_refuses_the_table(mode: str) -> None:
    table, optimizer = trained(mode)
    refusal = "RuntimeError: another thread was writing a table when this process was forked: the table"
    with Held(clock_of(table)):
        for work in (lambda: table(IDS), lambda: table.weight.sum(), lambda: train(table, optimizer, IDS)):
            assert forked(work).startswith(refusal)
    with clock_of(table):  # this thread is in the forked process too
        assert forked(lambda: table(IDS).sum().isfinite().item()) == "True"
    assert forked(lambda: table(IDS).sum().isfinite().item()) == "True"


# The files that make locks, and what becomes of these in a forked process.
LOCKS = {
    "torchsparse_rec/data/_planes.py": "nobody waits for it",
    "torchsparse_rec/nn/_fused.py": "register_at_fork",
    "torchsparse_rec/serving/_folder.py": "tell_of_forks",
    "torchsparse_rec/tables/steps.py": "tell_of_forks",
    "torchsparse_rec/variable/_tier.py": "tell_of_forks",
    "torchsparse_rec/variable/read_write_lock.py": "tell_of_forks",
    "torchsparse_rec/_lock.py": "register_at_fork",
}


def test_every_lock_is_known() -> None:
    """Find all that makes a lock: each file is in the list, and registers what makes its locks anew."""
    found = {}
    for folder in ("torchsparse_rec", "compat"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.is_relative_to(ROOT / "torchsparse_rec/compat"):
                continue
            text = path.read_text()
            calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            names = {ast.unparse(call).rpartition(".")[2] for call in calls}
            if names & {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "flock", "lockf"}:
                found[str(path.relative_to(ROOT))] = text
    assert found.keys() == LOCKS.keys()
    for name, text in found.items():
        assert LOCKS[name] not in ("register_at_fork", "tell_of_forks") or f"{LOCKS[name]}(" in text
