"""The fused gradient mode: the parameters after training are those of torch's dense gradients and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchsparse_rec import nn as ours
from torchsparse_rec import optim
from torchsparse_rec.nn import _fused
from torchsparse_rec.tables.table import table_of

ROWS, DIM = 30, 5
OPTIMIZERS = {
    "sgd": (optim.SGD, torch.optim.SGD, {"lr": 0.1}),
    "momentum": (optim.SGD, torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}),
    "adagrad": (optim.Adagrad, torch.optim.Adagrad, {"lr": 0.1}),
    "adam": (optim.Adam, torch.optim.Adam, {"lr": 0.01}),
    "adamw": (optim.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (optim.RMSprop, torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "adam coupled": (optim.Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
}
pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.filterwarnings("ignore:.*weight_decay.*goes through the second moment"),
]


class Model(nn.Module):
    """A table and a dense layer."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(DIM, 1)

    def forward(self, *ids: Tensor) -> Tensor:
        """Return a score for every bag."""
        return self.head(self.table(*ids)).squeeze(-1)


def pair(grad_mode: str = "fused", make=ours.EmbeddingBag, **arguments) -> tuple[Model, Model]:
    """Make our model and torch's, with the same weights."""
    torch.manual_seed(0)
    model = Model(make(ROWS, DIM, grad_mode=grad_mode, **arguments))
    theirs = nn.EmbeddingBag if make is ours.EmbeddingBag else nn.Embedding
    reference = Model(theirs(ROWS, DIM, **arguments))
    reference.load_state_dict(model.state_dict())
    return model, reference


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw bags of ids, few of which are frequent, and labels."""
    ids = (torch.rand(6, 4, generator=generator) ** 3 * ROWS).long()
    return ids, torch.rand(6, generator=generator)


def loss_of(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared distance of scores to labels."""
    ids, labels = batch
    return ((model(ids) - labels) ** 2).mean()


def train_step(optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], *arguments: Any) -> None:
    """Train one step on a loss, which is computed after zero_grad."""
    optimizer.zero_grad()
    loss(*arguments).backward()
    optimizer.step()


def assert_same(model: Model, reference: Model, rtol: float = 2e-5) -> None:
    """Compare the parameters of both models, to rounding."""
    assert model.state_dict().keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_dense_gradients(name: str) -> None:
    model, reference = pair()
    make, make_reference, arguments = OPTIMIZERS[name]
    optimizer = make(model.parameters(), **arguments, in_backward=True)
    reference_optimizer = make_reference(reference.parameters(), **arguments)
    schedulers = [torch.optim.lr_scheduler.StepLR(x, 3, 0.7) for x in (optimizer, reference_optimizer)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        batch = draw(generator)
        losses = []
        for side, its in ((model, optimizer), (reference, reference_optimizer)):
            its.zero_grad()
            loss = loss_of(side, batch)
            loss.backward()
            its.step()
            losses.append(loss.item())
        for scheduler in schedulers:
            scheduler.step()
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert model.table._parameters["weight"].grad is None
    assert_same(model, reference)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_modes_padding_and_embedding(mode: str) -> None:
    for make, arguments in (
        (ours.EmbeddingBag, {"mode": mode, "padding_idx": 2}),
        (ours.Embedding, {"padding_idx": 0}),
    ):
        model, reference = pair(make=make, **arguments)
        optimizers = [
            optim.Adam(model.parameters(), lr=0.01, in_backward=True),
            torch.optim.Adam(reference.parameters(), lr=0.01),
        ]
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            ids, _ = draw(generator)
            for side, optimizer in zip((model, reference), optimizers, strict=True):
                optimizer.zero_grad()
                side(ids).square().sum().backward()
                optimizer.step()
        assert_same(model, reference)


def test_a_table_looked_up_twice_is_updated_once() -> None:
    model, reference = pair(make=ours.Embedding)
    optimizers = [
        optim.Adagrad(model.parameters(), lr=0.1, in_backward=True),
        torch.optim.Adagrad(reference.parameters(), lr=0.1),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        (positive, _), (negative, _) = draw(generator), draw(generator)
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            (side(positive) - side(negative)).sigmoid().log().neg().mean().backward()
            optimizer.step()
    assert_same(model, reference)


def test_an_output_that_is_dropped_or_kept_without_backward() -> None:
    model, reference = pair()
    optimizers = [
        optim.Adam(model.parameters(), lr=0.01, in_backward=True),
        torch.optim.Adam(reference.parameters(), lr=0.01),
    ]
    generator = torch.Generator().manual_seed(1)
    kept = []
    for step in range(4):
        batch, other = draw(generator), draw(generator)
        model(other[0])  # its result is dropped
        if step == 2:
            kept.append(model(other[0]))  # its result is kept, and never used
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            train_step(optimizer, loss_of, side, batch)
    assert kept
    assert_same(model, reference)


def test_dropped_outputs_leave_nothing_behind() -> None:
    model, _ = pair()
    optimizer = optim.SGD(model.parameters(), lr=0.1, in_backward=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        model(draw(generator)[0])
    loss_of(model, draw(generator)).backward()
    optimizer.step()
    table = table_of(model.table._parameters["weight"])
    assert not any(table in tables for _, tables in _fused._outstanding._lookups.values())


def test_frozen_tables_and_periods() -> None:
    model, reference = pair()
    optimizers = [
        optim.Adam(model.parameters(), lr=0.01, in_backward=True),
        torch.optim.Adam(reference.parameters(), lr=0.01),
    ]
    generator = torch.Generator().manual_seed(1)
    for step in range(9):
        batch = draw(generator)
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            side.table._parameters["weight"].requires_grad_(not 3 <= step < 6)
            train_step(optimizer, loss_of, side, batch)
    assert_same(model, reference)


def test_gradient_of_per_sample_weights() -> None:
    model, reference = pair(mode="sum")
    optimizers = [
        optim.Adam(model.parameters(), lr=0.01, in_backward=True),
        torch.optim.Adam(reference.parameters(), lr=0.01),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        ids, _ = draw(generator)
        drawn = torch.rand(6, 4, generator=generator)
        grads = []
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            weights = drawn.clone().requires_grad_()
            optimizer.zero_grad()
            side.head(side.table(ids, None, weights)).sum().backward()
            optimizer.step()
            grads.append(weights.grad)
        torch.testing.assert_close(*grads, rtol=2e-5, atol=1e-6)
    assert_same(model, reference)


def test_weights_of_a_table_that_has_changed_have_no_gradient() -> None:
    model, _ = pair(mode="sum")
    optimizer = optim.SGD(model.parameters(), lr=0.1, in_backward=True)
    weights = torch.rand(2, 2, requires_grad=True)
    early = model.table(torch.tensor([[1, 2], [3, 1]]), None, weights)
    loss_of(model, draw(torch.Generator().manual_seed(1))).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="have been updated since"):
        early.sum().backward()


def test_modes_can_change_at_any_time() -> None:
    model, reference = pair("dense")
    optimizers = [
        optim.Adam(model.parameters(), lr=0.01, in_backward=True),
        torch.optim.Adam(reference.parameters(), lr=0.01),
    ]
    generator = torch.Generator().manual_seed(1)
    for step in range(12):
        model.table.grad_mode = ("dense", "sparse", "fused", "auto")[step // 2 % 4]
        batch = draw(generator)
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            train_step(optimizer, loss_of, side, batch)
    assert_same(model, reference)


def test_two_modules_that_share_a_table() -> None:
    model, reference = pair()
    other = ours.EmbeddingBag(
        ROWS,
        DIM,
        mode="sum",
        grad_mode="fused",
    )
    other.weight = model.table._parameters["weight"]
    shared = nn.EmbeddingBag(ROWS, DIM, mode="sum")
    shared.weight = reference.table.weight
    optimizers = [
        optim.Adam(model.parameters(), lr=0.01, in_backward=True),
        torch.optim.Adam(reference.parameters(), lr=0.01),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        batch = draw(generator)
        for side, second, optimizer in ((model, other, optimizers[0]), (reference, shared, optimizers[1])):
            optimizer.zero_grad()
            (loss_of(side, batch) + second(batch[0]).square().mean()).backward()
            optimizer.step()
    assert_same(model, reference)
