"""Adam's fused steps of parameters that are no tables: torch's bits, by one call, whatever happens in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from torchsparse_rec import nn, optim

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "amsgrad": {"amsgrad": True},
    "decay": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "maximize": {"maximize": True},
    "tensor": {"lr": torch.tensor(0.01), "betas": (torch.tensor(0.8), torch.tensor(0.9))},
    "rates": {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3},
}
Optimizer = torch.optim.Optimizer


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 3), (5,), (), (0, 2), (2, 3, 4)]
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(weights: list[Parameter], optimizer: Optimizer, steps: int, without: Callable[[int, int], bool]) -> None:
    """Train by gradients of one seed; ``without(step, k)`` says which weights have none."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for k, weight in enumerate(weights):
            grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            weight.grad = None if without(step, k) else grad
        optimizer.step()


def assert_same(ours: list[Parameter], a: Optimizer, theirs: list[Parameter], b: Optimizer) -> None:
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x, y)
        assert a.state[x].keys() == b.state[y].keys()
        assert all(torch.equal(value, b.state[y][name]) for name, value in a.state[x].items())


@pytest.mark.parametrize("without", [lambda step, k: False, lambda step, k: k == step % 3], ids=["all", "some"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_gives_torchs_bits(options, without):
    options = {"fused": True, "lr": 0.1} | options
    decoupled = options.get("decoupled_weight_decay", False)
    ours, theirs = parameters(), parameters()
    # Torch's own class takes a decay that is decoupled by another name in some versions.
    a = optim.Adam(ours, **options)
    plain = {key: value for key, value in options.items() if key != "decoupled_weight_decay"}
    b = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **plain)
    train(ours, a, 7, without)
    train(theirs, b, 7, without)
    assert_same(ours, a, theirs, b)


def test_it_is_one_call(monkeypatch):
    weights = parameters()
    optimizer = optim.AdamW(weights, fused=True)
    train(weights, optimizer, 1, lambda step, k: False)
    monkeypatch.setattr(torch.optim.Adam, "_init_group", None)  # torch's own step needs it
    train(weights, optimizer, 3, lambda step, k: False)
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}


def assert_trains_as_torch(dtype: torch.dtype, groups: Callable[[list[Parameter]], Any], **options: Any) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    a, b = optim.Adam(groups(ours), **options), torch.optim.Adam(groups(theirs), **options)
    train(ours, a, 4, lambda step, k: False)
    train(theirs, b, 4, lambda step, k: False)
    assert_same(ours, a, theirs, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    assert_trains_as_torch(dtype, lambda weights: weights, fused=True)


def test_two_groups_of_which_one_is_not_fused():
    assert_trains_as_torch(
        torch.float32, lambda weights: [{"params": weights[:2], "fused": True}, {"params": weights[2:], "lr": 0.5}]
    )


def count_by_hand(weights: list[Parameter], optimizer: Optimizer) -> None:
    """Replace a state, and count a step otherwise."""
    state = optimizer.state[weights[0]]
    state["exp_avg"] = torch.full_like(weights[0], 0.25)
    state["step"].fill_(11)


def test_states_may_be_replaced_and_dropped():
    ours, theirs = parameters(), parameters()
    a, b = optim.Adam(ours, fused=True), torch.optim.Adam(theirs, fused=True)
    for change in (count_by_hand, lambda x, its: its.state.pop(x[1]), lambda _, its: its.state.clear()):
        for weights, optimizer in ((ours, a), (theirs, b)):
            train(weights, optimizer, 3, lambda step, k: False)
            change(weights, optimizer)
            train(weights, optimizer, 3, lambda step, k: False)
        assert_same(ours, a, theirs, b)


def test_states_travel_between_torchs_optimizer_and_ours():
    ours, theirs = parameters(), parameters()
    a, b = optim.Adam(ours, fused=True), torch.optim.Adam(theirs, fused=True)
    train(ours, a, 3, lambda step, k: False)
    train(theirs, b, 3, lambda step, k: False)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in (a, b)]
    copied = copy.deepcopy(a)
    b.load_state_dict(saved[0])
    a.load_state_dict(saved[1])
    train(ours, a, 2, lambda step, k: False)
    train(theirs, b, 2, lambda step, k: False)
    assert_same(ours, a, theirs, b)
    assert {float(state["step"]) for state in copied.state.values()} == {3.0}


@pytest.mark.parametrize("uneven", ["", "gradient", "count"])
def test_tensorflows_place_of_eps(uneven):
    options = {"lr": 0.1, "eps": 1e-2, "tensorflow_eps": True}
    at_once, one_by_one = parameters(), parameters()
    fused, plain = optim.Adam(at_once, fused=True, **options), optim.Adam(one_by_one, fused=False, **options)
    for weights, optimizer in ((at_once, fused), (one_by_one, plain)):
        train(weights, optimizer, 6, lambda step, k: uneven == "gradient" and step == 2 and k == 0)
        if uneven == "count":
            optimizer.state[weights[1]]["step"].fill_(2)
        train(weights, optimizer, 2, lambda step, k: False)
    for x, y in zip(at_once, one_by_one, strict=True):
        torch.testing.assert_close(x, y)


# ---- Hooks and profilers ---------------------------------------------------------------------------------------------


def test_hooks_are_called_with_the_steps_arguments():
    weights = parameters()
    optimizer = optim.Adam(weights, fused=True)
    seen: list[Any] = []
    before = optimizer.register_step_pre_hook(lambda own, args, kwargs: seen.append(("before", args, kwargs)))
    after = optimizer.register_step_post_hook(lambda own, args, kwargs: seen.append(("after", args, kwargs)))
    assert optimizer.step(lambda: torch.tensor(1.0)) == 1.0
    assert [name for name, _, _ in seen] == ["before", "after"]
    before.remove(), after.remove()
    optimizer.step()
    assert len(seen) == 2


def test_hooks_of_all_optimizers_are_called():
    from torch.optim.optimizer import register_optimizer_step_post_hook

    weights, seen = parameters(), []
    optimizer = optim.SGD(weights)
    handle = register_optimizer_step_post_hook(lambda own, args, kwargs: seen.append(own))
    try:
        optimizer.step()
    finally:
        handle.remove()
    optimizer.step()
    assert seen == [optimizer]


@pytest.mark.parametrize("kind", [optim.Adam, optim.Ftrl], ids=lambda kind: kind.__name__)
def test_a_profiler_sees_the_step(kind):
    weights = parameters()
    optimizer = kind(weights)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert f"Optimizer.step#{kind.__name__}.step" in {event.name for event in profile.events()}


# ---- Tables beside them ----------------------------------------------------------------------------------------------


def test_tables_with_dense_gradients_are_among_them():
    def run(library: Any, table: type, options: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(0)
        layers = torch.nn.ModuleList([table(10, 4), torch.nn.Linear(4, 2)])
        optimizer = library.Adam(layers.parameters(), fused=True, lr=0.1, **options)
        for step in range(4):
            optimizer.zero_grad()
            layers[1](layers[0](torch.tensor([step, 1, 2]))).square().sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in layers.parameters()]

    for x, y in zip(run(optim, nn.Embedding, {}), run(torch.optim, torch.nn.Embedding, {}), strict=True):
        assert torch.equal(x, y)
