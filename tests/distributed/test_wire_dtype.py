"""Rows and gradients that are narrower on the way."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from distributed.cases import (
    Case,
    collection_of,
    draw,
    look_up,
    optimizer_of,
    plans_of,
    sharded_of,
    tables_of,
    train_step,
)

from torchsparse_rec import distributed


def results(case: Case, device: str, wire_dtype: torch.dtype | None) -> list[torch.Tensor]:
    module, batch = sharded_of(case, device, wire_dtype=wire_dtype), draw(case, 0, dist.get_rank(), device)
    with torch.no_grad():
        return [result.cpu() for result in look_up(case, module, batch)]


def one_step(case: Case, device: str, wire_dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    module = sharded_of(case, device, wire_dtype=wire_dtype)
    train_step(case, module, optimizer_of(case, module), draw(case, 0, dist.get_rank(), device), None)
    return tables_of(module)


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["bags", "rows"])
@pytest.mark.parametrize("plan", ["row", "table", "column"])
def test_results_are_rounded_once(two, device: str, plan: str, kind: str, wire_dtype: torch.dtype) -> None:
    # Bags of one id: a result is a row.
    case = Case(plan=plan, kind=kind, batch="single", merge=True)
    for got, exact in zip(
        two.run(results, case, device, wire_dtype), two.run(results, case, device, None), strict=True
    ):
        for ours, theirs in zip(got, exact, strict=True):
            rounded = theirs.to(wire_dtype).to(theirs.dtype)
            assert not torch.equal(rounded, theirs)
            assert torch.equal(ours, rounded) and ours.dtype == theirs.dtype  # equal() takes bfloat16 for float32


def test_results_of_replicated_tables_are_not_sent(two, device: str) -> None:
    case = Case(plan="replicated", merge=True)
    for got, exact in zip(*(two.run(results, case, device, dtype) for dtype in (torch.bfloat16, None)), strict=True):
        assert all(map(torch.equal, got, exact))


@pytest.mark.parametrize("plan", ["row", "table", "replicated"])
def test_gradients_are_rounded(two, device: str, plan: str) -> None:
    case = Case(plan=plan, optimizer="SGD", options={"lr": 1.0}, merge=True)
    before = collection_of(case).state_dict()
    narrow, exact = (two.run(one_step, case, device, dtype)[0] for dtype in (torch.bfloat16, None))
    for name, table in exact.items():
        moved = (table - before[name]).abs()
        assert not torch.equal(narrow[name], table)
        # Rows, entries of the gradient and what they are made of are each within 2 ** -8 of themselves.
        assert ((narrow[name] - table).abs() <= 2**-6 * (moved + moved.max())).all()


def shards(case: Case, wire_dtype: object) -> None:
    distributed.shard(collection_of(case), plan=plans_of(case, 2), wire_dtype=wire_dtype)


def other_on_one_rank(case: Case) -> None:
    shards(case, torch.bfloat16 if dist.get_rank() else None)


def test_what_is_refused(two) -> None:
    for error in two.errors(shards, Case(), torch.float32):
        assert re.match(
            "shard: wire_dtype must be torch.bfloat16, torch.float16 or None, got torch.float32", str(error)
        )
    for error in two.errors(other_on_one_rank, Case()):
        assert "'wire_dtype': torch.bfloat16" in str(error) and "'wire_dtype': None" in str(error)
