"""Tables small beside their batches are stepped whole: with dense optimizers' results, and no row of them lags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchsparse_rec import nn, optim
from torchsparse_rec.tables.table import table_of

ROWS = 600
OPTIMIZERS: dict[str, Any] = {
    "adam": (optim.Adam, {"lr": 0.1}),
    "adamw": (optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "row-wise": (optim.PartialRowWiseAdam, {"lr": 0.1}),
}


def trained(
    mode: str, kind: str, batches: list[Tensor], dtype: torch.dtype = torch.float32, rows: int = ROWS
) -> tuple[nn.Embedding, Tensor]:
    """Train a table; return it and its first state, both as they are stored."""
    torch.manual_seed(0)
    table = nn.Embedding(rows, 5, grad_mode=mode, dtype=dtype)
    make, options = OPTIMIZERS[kind]
    optimizer = make(table.parameters(), in_backward=mode == "fused", **options)
    for ids in batches:
        optimizer.zero_grad()
        (table(ids).float().sin() * ids[:, None].cos()).sum().backward()
        optimizer.step()
    stored = optimizer.stored_state[table._parameters["weight"]]
    name = "momentum_buffer" if kind == "momentum" else "exp_avg"
    return table, stored[name]


def lag(table: nn.Embedding) -> Tensor:
    """Return how many steps each row of a table is behind."""
    rows = table_of(table._parameters["weight"]).rows
    assert rows is not None and rows.last_step is not None
    return rows.clock.step - rows.clock.base - rows.last_step


def batches(named: list[int], rows: int = ROWS) -> list[Tensor]:
    """Return ids of so many distinct rows each, some of which occur twice."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randperm(rows, generator=generator)[:count] for count in named]
    return [torch.cat([ids, ids[: len(ids) // 3]]) for ids in drawn]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_modes_agree_and_no_row_lags(kind):
    # Of 600 rows 120 are a fifth, 119 too few: after those rows lag, which the next step, or the last read, makes good.
    ids = batches([120, 300, 119, 5, 200, 600, 120])
    fused, state = trained("fused", kind, ids)
    sparse, state_of_sparse = trained("sparse", kind, ids)
    dense, state_of_dense = trained("dense", kind, ids)
    assert not lag(fused).any() and not lag(sparse).any()
    assert torch.equal(fused.weight, sparse.weight) and torch.equal(state, state_of_sparse)
    torch.testing.assert_close(fused.weight, dense.weight, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(state, state_of_dense, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["fused", "sparse"])
@pytest.mark.parametrize(
    ("rows", "named", "dtype"),
    [(ROWS, 119, torch.float32), (511, 300, torch.float32), (ROWS, 300, torch.bfloat16)],
    ids=["few named", "few rows", "half precision"],
)
def test_others_are_not(mode, rows, named, dtype):
    table, _ = trained(mode, "adam", batches([rows, named], rows), dtype, rows)
    assert int((lag(table) > 0).sum()) == rows - named


def test_a_table_whose_optimizer_moves_no_idle_row_is_not():
    torch.manual_seed(0)
    table = nn.Embedding(ROWS, 5, grad_mode="fused")
    before = table.weight.detach().clone()
    optimizer = optim.Adam(table.parameters(), lr=0.1, in_backward=True, lazy=True)
    for ids in batches([300, 300]):
        table(ids[:300]).sum().backward()
        optimizer.step()
    named = torch.cat([ids[:300] for ids in batches([300, 300])]).unique()
    others = torch.ones(ROWS, dtype=torch.bool).index_fill(0, named, False)
    assert others.any() and torch.equal(table.weight[others], before[others])


@pytest.mark.parametrize("mode", ["fused", "sparse"])
def test_threads_do_not_change_the_bits(mode, restore_threads):
    ids, results = batches([20_000, 9_000], 40_000), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        table, state = trained(mode, "adam", ids, rows=40_000)
        assert not lag(table)[ids[1]].any()
        results.append((table.weight, state))
    for weight, state in results[1:]:
        assert torch.equal(weight, results[0][0]) and torch.equal(state, results[0][1])
