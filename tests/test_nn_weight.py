"""What readers and writers of ``module.weight`` may do: what they may with torch's modules."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
from torch import Tensor

from torchsparse_rec import nn, optim
from torchsparse_rec.optim import _tables
from torchsparse_rec.optim._tables import table_if_any, table_of

MODES = (None, "dense", "sparse", "fused", "auto")


def trained(grad_mode: str | None, steps: int = 3, **arguments) -> tuple[nn.Embedding, optim.Adam]:
    """A table of which rows are behind, unless its gradients are dense, and its optimizer."""
    torch.manual_seed(0)
    table = nn.Embedding(12, 3, grad_mode=grad_mode, **arguments)
    optimizer = optim.Adam(table.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        table(torch.tensor([1, step])).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return table, optimizer


def saved(x: object) -> object:
    """Through a file that holds nothing but tensors."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


# ---- Files and copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_mode", MODES)
def test_parameters_can_be_saved_by_themselves(grad_mode: str | None) -> None:
    table, _ = trained(grad_mode)
    torch.testing.assert_close(saved(table.weight), table.weight, rtol=0, atol=0)
    assert saved(table.state_dict(keep_vars=True)).keys() == {"weight"}  # type: ignore[attr-defined]
    assert len(saved(list(table.parameters()))) == len(list(table.parameters()))  # type: ignore[arg-type]


def test_copies_of_a_parameter_have_no_table() -> None:
    table, _ = trained("sparse")
    assert table_if_any(table.weight) is table_of(table.weight)
    for twin in (copy.deepcopy(table.weight), pickle.loads(pickle.dumps(table.weight))):
        assert table_if_any(twin) is None and torch.equal(twin, table.weight)


def test_a_table_ends_with_its_parameter() -> None:
    gc.collect()
    before = len(_tables._tables)
    table, optimizer = trained("sparse")
    table.itself = [table]  # freed by the collector, not by the last reference
    assert len(_tables._tables) == before + 1
    del table, optimizer
    gc.collect()
    assert len(_tables._tables) == before


def test_threads_find_one_table() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1, 1)) for _ in range(200)]
    start, found = threading.Barrier(4), []

    def look() -> None:
        start.wait()
        found.append([table_of(parameter) for parameter in parameters])

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tables == found[0] for tables in found)
    assert [table_if_any(parameter) for parameter in parameters] == found[0]
