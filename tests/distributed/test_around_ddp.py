"""torch's DistributedDataParallel trains the dense layers, and leaves sharded tables out or is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from distributed.cases import Case, Table, collection_of, draw, features_of, joined, optimizer_of, plans_of, tables_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchsparse_rec import KeyedJaggedTensor, distributed


class Model(torch.nn.Module):
    """A collection, and a dense layer after it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tables = collection_of(case)
        self.head = torch.nn.Linear(sum(table.dim * len(table.features) for table in case.tables), 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return a score for every example."""
        return self.head(self.tables(features).values())  # type: ignore[no-any-return]


class Parent(torch.nn.Module):
    """A module around the one that is sharded."""

    def __init__(self, child: Model) -> None:
        super().__init__()
        self.child, self.last = child, torch.nn.Linear(1, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return a score for every example."""
        return self.last(self.child(features))  # type: ignore[no-any-return]


def train_around(case: Case, device: str, around: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train under DistributedDataParallel around the model or a parent; return tables and dense layers."""
    torch.manual_seed(0)
    model = Model(case).to(device)
    distributed.shard(model, plan=plans_of(case, dist.get_world_size()))
    whole: torch.nn.Module = model
    if around != "the model":
        torch.manual_seed(1)
        whole = Parent(model).to(device)
    if around == "a parent that leaves them out":
        distributed.leave_out_of_ddp(whole)
    wrapped = DistributedDataParallel(whole)
    optimizer = optimizer_of(case, whole)
    for step in range(case.steps):
        optimizer.zero_grad()
        batch = draw(case, step, dist.get_rank(), device)
        wrapped(features_of(case, batch)).square().mean().backward()
        optimizer.step()
    return tables_of(model.tables), {name: p.detach().cpu() for name, p in model.head.named_parameters()}


def train_alone(case: Case, ranks: int, around: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train one process on whole batches, by the mean of the ranks' means."""
    torch.manual_seed(0)
    model = Model(case)
    torch.manual_seed(1)
    whole = model if around == "the model" else Parent(model)
    optimizer = optimizer_of(case, whole)
    for step in range(case.steps):
        optimizer.zero_grad()
        batches = [draw(case, step, rank) for rank in range(ranks)]
        scores = whole(features_of(case, joined(batches))).split([len(batch.targets[0]) for batch in batches])
        (sum(part.square().mean() for part in scores) / ranks).backward()  # type: ignore[union-attr]
        optimizer.step()
    return dict(model.tables.state_dict()), dict(model.head.state_dict())


# Daily: each mode under each plan, and around a parent each mode and each plan once.
@pytest.mark.parametrize(
    ("plan", "mode", "around"),
    [
        pytest.param(
            *(plan, mode, around),
            id=f"{plan}-{mode}-{around}",
            marks=[] if around == "the model" or k == m else [pytest.mark.slow],
        )
        for k, plan in enumerate(("row", "table", "column"))
        for m, mode in enumerate(("fused", "sparse", "dense"))
        for around in ("the model", "a parent that leaves them out")
    ],
)
def test_dense_layers_are_averaged_and_tables_left_out(two, device: str, plan: str, mode: str, around: str) -> None:
    case = Case(plan=plan, grad_mode=mode, optimizer="SGD", options={"lr": 0.1}, steps=3)
    tables, dense = train_alone(replace(case), 2, around)
    outcomes = two.run(train_around, case, device, around)
    for its, layers in outcomes:
        assert its.keys() == tables.keys()
        for name in tables:
            torch.testing.assert_close(its[name], tables[name], rtol=1e-5, atol=1e-6)
        for name in dense:
            torch.testing.assert_close(layers[name], dense[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(layers[name], outcomes[0][1][name])


@pytest.mark.parametrize("mode", ["fused", "sparse", "dense"])
@pytest.mark.parametrize("plan", ["row", "column"])
def test_around_a_parent_the_first_forward_raises(two, device: str, plan: str, mode: str) -> None:
    # Parts of one shape: where shapes differ, DistributedDataParallel itself raises when it is made.
    case = Case((Table(1024, 8, ("a", "b")),), plan, grad_mode=mode, optimizer="SGD", options={"lr": 0.1})
    for error in two.errors(train_around, case, device, "a parent"):
        assert type(error) is RuntimeError, error
        assert re.search(r"distributed\.leave_out_of_ddp\(", str(error)), error
