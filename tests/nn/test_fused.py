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
from torchsparse_rec.optim._tables import table_of

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
        """A score for every bag."""
        return self.head(self.table(*ids)).squeeze(-1)


def pair(grad_mode: str = "fused", apply: str = "step", make=ours.EmbeddingBag, **arguments) -> tuple[Model, Model]:
    """Our model and torch's, with the same weights."""
    torch.manual_seed(0)
    model = Model(make(ROWS, DIM, grad_mode=grad_mode, apply=apply, **arguments))
    theirs = nn.EmbeddingBag if make is ours.EmbeddingBag else nn.Embedding
    reference = Model(theirs(ROWS, DIM, **arguments))
    reference.load_state_dict(model.state_dict())
    return model, reference


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bags of ids of which few are frequent, and labels."""
    ids = (torch.rand(6, 4, generator=generator) ** 3 * ROWS).long()
    return ids, torch.rand(6, generator=generator)


def loss_of(model: Model, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Any loss."""
    ids, labels = batch
    return ((model(ids) - labels) ** 2).mean()


def train_step(optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], *arguments: Any) -> None:
    """One step on a loss, computed once the gradients of the last are gone."""
    optimizer.zero_grad()
    loss(*arguments).backward()
    optimizer.step()


def assert_same(model: Model, reference: Model, rtol: float = 2e-5) -> None:
    """Both have the same parameters, to rounding."""
    assert model.state_dict().keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("apply", ["step", "backward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_dense_gradients(name: str, apply: str) -> None:
    model, reference = pair(apply=apply)
    make, make_reference, arguments = OPTIMIZERS[name]
    optimizer = make(model.parameters(), **arguments)
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


@pytest.mark.parametrize("apply", ["step", "backward"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_modes_padding_and_embedding(mode: str, apply: str) -> None:
    for make, arguments in (
        (ours.EmbeddingBag, {"mode": mode, "padding_idx": 2}),
        (ours.Embedding, {"padding_idx": 0}),
    ):
        model, reference = pair(apply=apply, make=make, **arguments)
        optimizers = [optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(reference.parameters(), lr=0.01)]
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            ids, _ = draw(generator)
            for side, optimizer in zip((model, reference), optimizers, strict=True):
                optimizer.zero_grad()
                side(ids).square().sum().backward()
                optimizer.step()
        assert_same(model, reference)


@pytest.mark.parametrize("apply", ["step", "backward"])
def test_a_table_looked_up_twice_is_updated_once(apply: str) -> None:
    model, reference = pair(apply=apply, make=ours.Embedding)
    optimizers = [optim.Adagrad(model.parameters(), lr=0.1), torch.optim.Adagrad(reference.parameters(), lr=0.1)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        (positive, _), (negative, _) = draw(generator), draw(generator)
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            (side(positive) - side(negative)).sigmoid().log().neg().mean().backward()
            optimizer.step()
    assert_same(model, reference)


@pytest.mark.parametrize("apply", ["step", "backward"])
def test_an_output_that_is_dropped_or_kept_without_backward(apply: str) -> None:
    model, reference = pair(apply=apply)
    optimizers = [optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(reference.parameters(), lr=0.01)]
    generator = torch.Generator().manual_seed(1)
    kept = []
    for step in range(4):
        batch, other = draw(generator), draw(generator)
        model(other[0])  # dropped
        if step == 2:
            kept.append(model(other[0]))  # never used: the update waits for the optimizer's step
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            train_step(optimizer, loss_of, side, batch)
    assert kept
    assert_same(model, reference)


def test_gradients_accumulate_over_backwards() -> None:
    model, reference = pair()
    optimizers = [optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(reference.parameters(), lr=0.01)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        batches = [draw(generator) for _ in range(3)]
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            for batch in batches:
                (loss_of(side, batch) / 3).backward()
            optimizer.step()
    assert_same(model, reference)


@pytest.mark.parametrize("between", [False, True])
def test_torchs_clip_grad_norm(between: bool) -> None:
    model, reference = pair()
    optimizers = [optim.SGD(model.parameters(), lr=0.3), torch.optim.SGD(reference.parameters(), lr=0.3)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        batches = [draw(generator) for _ in range(2)]
        norms = []
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            for batch in batches:
                loss_of(side, batch).backward()
                if between:
                    nn.utils.clip_grad_norm_(side.parameters(), 0.01)
            norms.append(nn.utils.clip_grad_norm_(side.parameters(), 0.02).item())
            optimizer.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_same(model, reference)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_our_clips(norm_type: float) -> None:
    model, reference = pair()
    optimizers = [optim.SGD(model.parameters(), lr=0.3), torch.optim.SGD(reference.parameters(), lr=0.3)]
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        batch = draw(generator)
        norms = []
        for side, optimizer, tools in zip((model, reference), optimizers, (optim, nn.utils), strict=True):
            optimizer.zero_grad()
            loss_of(side, batch).backward()
            if step % 2:
                norms.append(tools.clip_grad_norm_(side.parameters(), 0.01, norm_type=norm_type).item())
            else:
                tools.clip_grad_value_(side.parameters(), 1e-3)
            optimizer.step()
        if norms:
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert_same(model, reference)


def test_grad_scaler_with_an_infinity() -> None:
    model, reference = pair()
    optimizers = [optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(reference.parameters(), lr=0.01)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        batches = [draw(generator) for _ in range(2)]
        for side, optimizer, scaler in zip((model, reference), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            for number, batch in enumerate(batches):
                factor = float("inf") if (step, number) in ((3, 0), (5, 1)) else 1.0
                scaler.scale(loss_of(side, batch) * factor).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(side.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_same(model, reference)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad_lets_go_of_the_rows(set_to_none: bool) -> None:
    model, _ = pair()
    optimizer = optim.SGD(model.parameters(), lr=0.3)
    before = model.table.weight.clone()
    loss_of(model, draw(torch.Generator().manual_seed(1))).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    assert torch.equal(model.table.weight, before)


def test_steps_without_zero_grad_apply_the_gradient_again() -> None:
    model, reference = pair()
    optimizers = [optim.SGD(model.parameters(), lr=0.3), torch.optim.SGD(reference.parameters(), lr=0.3)]
    batch = draw(torch.Generator().manual_seed(1))
    for side, optimizer in zip((model, reference), optimizers, strict=True):
        loss_of(side, batch).backward()
        optimizer.step()
        optimizer.step()
        loss_of(side, batch).backward()
        optimizer.step()
    assert_same(model, reference)


def test_an_optimizer_of_ours_is_needed() -> None:
    model, _ = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loss = loss_of(model, draw(torch.Generator().manual_seed(1)))
    with pytest.raises(RuntimeError, match="grad_mode='fused' needs an optimizer of torchsparse_rec.optim"):
        loss.backward()
    del optimizer


def test_the_optimizer_may_hold_the_table_alone() -> None:
    model, reference = pair()
    table = model.table._parameters["weight"]
    optimizers = [
        optim.Adam([table, *model.head.parameters()], lr=0.01),
        torch.optim.Adam([reference.table.weight, *reference.head.parameters()], lr=0.01),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        batch = draw(generator)
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(side, batch).backward()
            nn.utils.clip_grad_norm_(side.parameters(), 0.01)
            optimizer.step()
    assert_same(model, reference)


@pytest.mark.parametrize("apply", ["step", "backward"])
def test_dropped_outputs_leave_nothing_behind(apply: str) -> None:
    model, _ = pair(apply=apply)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        model(draw(generator)[0])
    loss_of(model, draw(generator)).backward()
    optimizer.step()
    table = table_of(model.table._parameters["weight"])
    assert not any(table in tables for _, tables in _fused._outstanding._lookups.values())


def test_the_next_optimizer_gets_the_anchor_too() -> None:
    model, _ = pair()
    table = model.table._parameters["weight"]
    for _ in range(3):
        optimizer = optim.SGD([table, *model.head.parameters()], lr=0.1)
        loss_of(model, draw(torch.Generator().manual_seed(1))).backward()
        assert optimizer.holds(model.table.fused_anchor)
        optimizer.step()
        del optimizer


def test_frozen_tables_and_periods() -> None:
    model, reference = pair()
    optimizers = [optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(reference.parameters(), lr=0.01)]
    generator = torch.Generator().manual_seed(1)
    for step in range(9):
        batch = draw(generator)
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            side.table._parameters["weight"].requires_grad_(not 3 <= step < 6)
            train_step(optimizer, loss_of, side, batch)
    assert_same(model, reference)


@pytest.mark.parametrize("apply", ["step", "backward"])
def test_gradient_of_per_sample_weights(apply: str) -> None:
    model, reference = pair(apply=apply, mode="sum")
    optimizers = [optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(reference.parameters(), lr=0.01)]
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
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    weights = torch.rand(2, 2, requires_grad=True)
    early = model.table(torch.tensor([[1, 2], [3, 1]]), None, weights)
    loss_of(model, draw(torch.Generator().manual_seed(1))).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="have been updated since"):
        early.sum().backward()


def test_modes_can_change_at_any_time() -> None:
    model, reference = pair("dense")
    optimizers = [optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(reference.parameters(), lr=0.01)]
    generator = torch.Generator().manual_seed(1)
    for step in range(12):
        model.table.grad_mode = ("dense", "sparse", "fused", "auto")[step // 2 % 4]
        batch = draw(generator)
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            train_step(optimizer, loss_of, side, batch)
    assert_same(model, reference)


@pytest.mark.parametrize("apply", ["step", "backward"])
def test_two_modules_that_share_a_table(apply: str) -> None:
    model, reference = pair(apply=apply)
    other = ours.EmbeddingBag(ROWS, DIM, mode="sum", grad_mode="fused", apply=apply)
    other.weight = model.table._parameters["weight"]
    shared = nn.EmbeddingBag(ROWS, DIM, mode="sum")
    shared.weight = reference.table.weight
    optimizers = [
        optim.Adam([*model.parameters(), other.fused_anchor], lr=0.01),
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
