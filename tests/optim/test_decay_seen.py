"""``decay="seen"``: weight decay of the rows that a step sees. Whole runs are in test_training.py."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from torchsparse_rec import nn, optim

ROWS, DIM, DECAY = 20, 3, 0.25
OPTIMIZERS = {
    "adam": lambda p, **kw: optim.Adam(p, lr=0.1, weight_decay=DECAY, **kw),
    "amsgrad": lambda p, **kw: optim.Adam(p, lr=0.1, weight_decay=DECAY, amsgrad=True, **kw),
    "decoupled": lambda p, **kw: optim.Adam(p, lr=0.1, weight_decay=DECAY, decoupled_weight_decay=True, **kw),
    "adagrad": lambda p, **kw: optim.Adagrad(p, lr=0.1, weight_decay=DECAY, **kw),
    "rowwise": lambda p, **kw: optim.RowWiseAdagrad(p, lr=0.1, weight_decay=DECAY, **kw),
    "rmsprop": lambda p, **kw: optim.RMSprop(p, lr=0.1, weight_decay=DECAY, **kw),
    "momentum": lambda p, **kw: optim.RMSprop(p, lr=0.1, weight_decay=DECAY, momentum=0.5, centered=True, **kw),
}

# Those that move rows without gradient: a table whose readers expect it costs them all rows, and they say so.
MOVE_IDLE_ROWS = {"adam", "amsgrad", "decoupled", "momentum"}


def first() -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))


def trained(optimizer: torch.optim.Optimizer, module: torch.nn.Module, steps: list[list[int]]) -> Tensor:
    """Train towards 1, all but the last id of each step: its gradient is zero."""
    for ids in steps:
        optimizer.zero_grad()
        mask = torch.ones(len(ids), 1)
        mask[-1] = 0
        (mask * (module(torch.tensor(ids)) - 1)).square().sum().backward()
        optimizer.step()
    return module.weight.detach()


# Rows that are seen again after a pause, all rows at once, and rows that only ever have gradients of zero.
STEPS = [[1, 2, 3, 19], [2, 5, 19], [1, 3, 5, 19], [*range(18), 19], [1, 19], [*range(18), 19]]


def test_is_a_penalty_on_the_rows_of_the_batch() -> None:
    ours = nn.Embedding(ROWS, DIM, _weight=first(), grad_mode="sparse")
    theirs = torch.nn.Embedding(ROWS, DIM, _weight=first())
    mine = optim.Adam(ours.parameters(), lr=0.1, weight_decay=DECAY, decay="seen")
    others = torch.optim.Adam(theirs.parameters(), lr=0.1)
    for ids in STEPS:
        for module, optimizer in ((ours, mine), (theirs, others)):
            optimizer.zero_grad()
            loss = (module(torch.tensor(ids)) - 1).square().sum()
            if module is theirs:
                loss = loss + DECAY / 2 * module.weight[torch.tensor(ids)].square().sum()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mode", ["sparse", "fused", "dense"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_without_gradient_do_not_decay(name: str, mode: str) -> None:
    module = nn.Embedding(ROWS, DIM, _weight=first(), grad_mode=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = trained(OPTIMIZERS[name](module.parameters(), decay="seen", in_backward=True), module, STEPS)
    assert torch.equal(got[18:], first()[18:])
    assert not (got[:18] == first()[:18]).any()
    plain = nn.Embedding(ROWS, DIM, _weight=first(), grad_mode="sparse")
    optimizer = OPTIMIZERS[name](plain.parameters(), decay="seen")
    torch.testing.assert_close(got, trained(optimizer, plain, STEPS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_of_torchs_modules(name: str) -> None:
    """Step every row of a table whose readers do not ask for rows that are up to date, and decay those seen."""
    ours = nn.Embedding(ROWS, DIM, _weight=first(), grad_mode="sparse")
    want = trained(OPTIMIZERS[name](ours.parameters(), decay="seen"), ours, STEPS)
    theirs = torch.nn.Embedding(ROWS, DIM, _weight=first(), sparse=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = trained(OPTIMIZERS[name](theirs.parameters(), decay="seen"), theirs, STEPS)
    told = [str(x.message) for x in caught]
    assert len(told) == (name in MOVE_IDLE_ROWS)
    assert all("is looked up by a module that is not of torchsparse_rec.nn" in text for text in told)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(got[18:], first()[18:])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_that_grow(name: str) -> None:
    fixed = nn.Embedding(ROWS, DIM, _weight=torch.zeros(ROWS, DIM), grad_mode="sparse")
    want = trained(OPTIMIZERS[name](fixed.parameters(), decay="seen"), fixed, STEPS)
    growing = nn.EmbeddingVariable(DIM, initializer=0.0)
    trained(OPTIMIZERS[name](growing.parameters(), decay="seen"), growing, STEPS)
    growing.eval()
    torch.testing.assert_close(growing(torch.arange(18)).detach(), want[:18], rtol=1e-5, atol=1e-6)


def test_decay_may_come_and_go() -> None:
    """Begin no new history: decay of rows seen changes nothing of what idle rows do."""
    module = nn.Embedding(ROWS, DIM, _weight=first(), grad_mode="sparse")
    theirs = torch.nn.Parameter(first())
    mine = optim.Adam(module.parameters(), lr=0.1, decay="seen")
    other = torch.optim.Adam([theirs], lr=0.1)
    for k, ids in enumerate(STEPS):
        mine.param_groups[0]["weight_decay"] = decay = DECAY * (k % 2)
        trained(mine, module, [ids])
        seen = torch.tensor(ids[:-1])
        theirs.grad = torch.zeros(ROWS, DIM).index_add_(
            0, seen, 2 * (theirs.detach()[seen] - 1) + decay * theirs.detach()[seen]
        )
        other.step()
    torch.testing.assert_close(module.weight, theirs, rtol=1e-5, atol=1e-6)


def test_parameters_that_are_no_tables_decay_whole() -> None:
    ours, theirs = (torch.nn.Parameter(first()) for _ in range(2))
    mine = optim.Adam([ours], weight_decay=DECAY, decay="seen")
    other = torch.optim.Adam([theirs], weight_decay=DECAY)
    for parameter, optimizer in ((ours, mine), (theirs, other)):
        parameter.grad = torch.zeros(ROWS, DIM)
        optimizer.step()
    assert torch.equal(ours, theirs) and not torch.equal(ours, first())


def test_another_word_is_refused() -> None:
    parameter = torch.nn.Parameter(first())
    wanted = r"^Adam: decay must be 'all' or 'seen', got 'some'$"
    with pytest.raises(ValueError, match=wanted):
        optim.Adam([parameter], decay="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=wanted):
        optim.Adam([{"params": [parameter], "decay": "some"}])


def test_columns_of_a_row_on_several_ranks_are_refused() -> None:
    table = nn.Embedding(ROWS, DIM, grad_mode="sparse")
    seen = optim.RMSprop(table.parameters(), weight_decay=DECAY, decay="seen")
    obstacle = seen.column_obstacle(table.weight)
    assert obstacle is not None and "RMSprop with decay='seen'" in obstacle and "or decay='all'" in obstacle
    assert optim.Adam(table.parameters(), decay="seen").column_obstacle(table.weight) is None
