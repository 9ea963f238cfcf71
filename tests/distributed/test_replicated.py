"""Replicated tables, whose copies must stay equal."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from distributed.cases import Case, draw, optimizer_of, sharded_of, train_step

from torchsparse_rec._torch import as_stored
from torchsparse_rec.distributed import shards, tables


def trained(case: Case, device: str, written: bool) -> int:
    """Train while copies are compared after every third step; one rank's copy may be written by itself."""
    shards._OFTEN = 3
    try:
        module = sharded_of(case, device)
        optimizer = optimizer_of(case, module)
        for step in range(case.steps):
            if written and step == 3 and dist.get_rank() == 1:
                with torch.no_grad(), as_stored():
                    next(module.parameters())[7] += 1
            train_step(case, module, optimizer, draw(case, step, dist.get_rank(), device), None)
        return step
    finally:
        shards._OFTEN = 1000


@pytest.mark.parametrize("optimizer", ["Adagrad", "Adam"])  # Adam's rows are brought up to date late
def test_copies_are_compared(two, device: str, optimizer: str) -> None:
    case = Case(plan="replicated", optimizer=optimizer, merge=True, steps=7)
    assert two.run(trained, case, device, False) == [6, 6]
    for error in two.errors(trained, case, device, True):
        assert str(error).startswith("table 't0' is Replicated, but rank 1 has other values than rank 0"), error


def test_a_digest_tells_values_and_places() -> None:
    table = torch.randn(300_000, 2)
    other = table.clone()
    assert tables.digest(table) == shards.digest(other)
    other[[5, 6]] = other[[6, 5]]
    assert tables.digest(table) != shards.digest(other)
    other[[5, 6]], other[-1, -1] = other[[6, 5]], 3
    assert tables.digest(table) != shards.digest(other)
    blocks = torch.cat([table[150_000:], table[:150_000]])
    assert tables.digest(table) != shards.digest(blocks)
