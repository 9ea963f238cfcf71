"""Embedding and EmbeddingBag over ranks: the results, gradients and tables of one process."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchsparse_rec import distributed, nn, optim

ROWS, DIM, STEPS = 60, 6, 3


class Model(torch.nn.Module):
    """A table of rows and one of bags."""

    def __init__(self, grad_mode: str | None, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows = nn.Embedding(ROWS, DIM, padding_idx=4, grad_mode=grad_mode, **options)
        self.bags = nn.EmbeddingBag(2 * ROWS, DIM, mode="sum", padding_idx=-1, grad_mode=grad_mode, **options)
        self.means = nn.EmbeddingBag(ROWS, DIM, mode="mean", include_last_offset=True, grad_mode=grad_mode, **options)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor) -> list[Tensor]:
        """Look up a batch: ``[B, 3]`` ids, where bags of the mean begin, with the end of the last, and weights."""
        flat = ids.reshape(-1)
        return [self.rows(ids), self.bags(ids, per_sample_weights=weights), self.means(flat, offsets)]


def batch(step: int, rank: int, sizes: tuple[int, ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a rank's examples."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, ROWS, (sizes[rank], 3), generator=generator)
    offsets = torch.arange(0, ids.numel() + 1, 3)
    return ids.to(device), offsets.to(device), torch.rand(ids.shape, generator=generator).to(device)


def optimizer_of(model: Model, name: str, grad_mode: str | None) -> Any:
    return getattr(optim, name)(model.parameters(), lr=0.1, in_backward=grad_mode == "fused")


def train(model: Model, optimizer: Any, batches: list[Any], factor: float) -> tuple[list[list[Tensor]], list[Tensor]]:
    results, gradients = [], []
    for ids, offsets, weights in batches:
        weights.requires_grad_()
        optimizer.zero_grad()
        found = model(ids, offsets, weights)
        torch.autograd.backward(found, [(result.detach() - 1) * factor for result in found])
        optimizer.step()
        results.append([result.detach().cpu() for result in found])
        gradients.append(weights.grad.cpu())
    return results, gradients


def on_rank(plan: Any, name: str, grad_mode: str | None, sizes: tuple[int, ...], device: str, options: dict) -> Any:
    model = Model(grad_mode, **options).to(device)
    distributed.shard(model, plan=plan, merge=False)
    rank = dist.get_rank()
    batches = [batch(step, rank, sizes, device) for step in range(STEPS)]
    results = train(model, optimizer_of(model, name, grad_mode), batches, 1.0)
    return (*results, {key: x.cpu().clone() for key, x in distributed.full_state_dict(model).items()})


def alone(name: str, grad_mode: str | None, sizes: tuple[int, ...], ranks: int, device: str, options: dict) -> Any:
    model = Model(grad_mode, **options).to(device)
    batches = []
    for step in range(STEPS):
        ids, _, weights = map(torch.cat, zip(*[batch(step, r, sizes, device) for r in range(ranks)], strict=True))
        batches.append((ids, torch.arange(0, ids.numel() + 1, 3, device=device), weights))
    results, gradients = train(model, optimizer_of(model, name, grad_mode), batches, 1 / ranks)
    state = {key: x.detach().cpu() for key, x in model.state_dict().items()}
    split = [[list(x.split(sizes[:ranks])) for x in its] for its in results]
    return [
        ([[x[rank] for x in its] for its in split], [ranks * g.split(sizes[:ranks])[rank] for g in gradients], state)
        for rank in range(ranks)
    ]


def check(pool_of: Any, ranks: int, device: str, plan: Any, name: str, grad_mode: str | None, **options: Any) -> None:
    sizes = (4, 0, 3, 2)
    got = pool_of(ranks).run(on_rank, plan, name, grad_mode, sizes, device, options)
    for ours, theirs in zip(got, alone(name, grad_mode, sizes, ranks, device, options), strict=True):
        # Gradients of weights are sums over columns, which ranks add up where columns are split.
        rounded = 1e-6 if plan == "column_wise" else 0
        torch.testing.assert_close(ours[1], theirs[1], rtol=rounded, atol=rounded)
        torch.testing.assert_close(ours[::2], theirs[::2], rtol=0, atol=0)


PLANS = ["row_wise", "table_wise", "column_wise", "data_parallel"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("grad_mode", [None, "sparse", "fused"])
@pytest.mark.parametrize("plan", PLANS)
def test_modules_of_one_table(pool_of, device: str, plan: str, grad_mode: str | None, ranks: int) -> None:
    check(pool_of, ranks, device, plan, "Adagrad", grad_mode)


@pytest.mark.parametrize("grad_mode", ["sparse", "auto"])
def test_rows_that_are_brought_up_to_date_late(pool_of, device: str, grad_mode: str) -> None:
    check(pool_of, 2, device, "row_wise", "Adam", grad_mode)


@pytest.mark.parametrize("plan", ["row_wise", "table_wise"])
def test_norms_are_limited(pool_of, device: str, plan: str) -> None:
    check(pool_of, 2, device, plan, "SGD", "sparse", max_norm=1.5)


def sharded(plan: Any, options: dict) -> Any:
    return distributed.shard(nn.Embedding(ROWS, DIM, **options), plan=plan)


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        ("column_wise", {"max_norm": 1.0}, "table 'Embedding' is ColumnWise, but has max_norm, a norm of whole rows"),
        ("row_wise", {"scale_grad_by_freq": True}, "table 'Embedding' must have scale_grad_by_freq=False, got True"),
    ],
)
def test_what_cannot_be_split(two, plan: str, options: dict, message: str) -> None:
    for error in two.errors(sharded, plan, options):
        assert type(error) is ValueError and message in str(error), error


def bad_id(device: str, bags: bool) -> Tensor:
    """Look up an id that one rank's table does not have, then go on."""
    model = distributed.shard(Model(None).to(device), plan="row_wise")
    ids = torch.tensor([[1, 2], [3, ROWS if dist.get_rank() else 0]], device=device)
    if bags:
        ids *= 2
    with pytest.raises(IndexError) as raised:
        (model.bags if bags else model.rows)(ids)
    model.rows(torch.tensor([1], device=device))
    return str(raised.value)


@pytest.mark.parametrize("bags", [False, True])
def test_a_bad_id_on_one_rank(two, device: str, bags: bool) -> None:
    name, rows = ("EmbeddingBag", 2 * ROWS) if bags else ("Embedding", ROWS)
    text = f"rank 1: {name}: input[1, 1] must be in [0, {rows}), got {rows}"
    assert two.run(bad_id, device, bags) == [text, text]


# ---- What a split table is not for ---------------------------------------------------------------------------------


def not_for(device: str, what: str) -> None:
    model = distributed.shard(Model("sparse").to(device), plan="row_wise")
    if what == "copy":
        copy.deepcopy(model)
    elif what == "pickle":
        pickle.dumps(model)
    else:
        model.double()(*batch(0, dist.get_rank(), (2, 3), device))


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("copy", TypeError, "rows: a module whose tables are split over ranks cannot be copied or pickled"),
        ("pickle", TypeError, "rows: a module whose tables are split over ranks cannot be copied or pickled"),
        ("convert", RuntimeError, "table 'rows': .* must stay as shard.. made it, .*float32 .*, got .*float64"),
    ],
)
def test_what_is_refused(two, device: str, what: str, kind: type, message: str) -> None:
    for error in two.errors(not_for, device, what):
        assert type(error) is kind and re.search(message, str(error)), error
