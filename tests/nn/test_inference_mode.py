"""What ``torch.inference_mode`` makes is trained by other modes as if it had been made there, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import kinds
import pytest
import torch
from torch import Tensor

from torchsparse_rec import nn, optim
from torchsparse_rec.variable import EmbeddingVariableOption

KINDS = ("table", "bag", "collection", "variable", "collection that grows")
IDS = torch.tensor([[1, 2], [3, 1]])


def made(kind: str, grad_mode: str | None) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind != "collection that grows":
        return kinds.table_of(kind, grad_mode, 20, 3)
    config = nn.EmbeddingBagConfig(
        name="t", num_embeddings=2, embedding_dim=3, feature_names=["f"], ev_option=EmbeddingVariableOption()
    )
    return nn.EmbeddingBagCollection([config], grad_mode=grad_mode)


def construct(module: torch.nn.Module, kind: str, grad_mode: str | None) -> torch.nn.Module:
    return made(kind, grad_mode)


def load(module: torch.nn.Module, *_: Any) -> torch.nn.Module:
    module.load_state_dict(made(*_).state_dict())
    return module


def assign(module: torch.nn.Module, *_: Any) -> torch.nn.Module:
    module.load_state_dict(copy.deepcopy(made(*_).state_dict()), assign=True)
    return module


def set_mode(module: torch.nn.Module, kind: str, grad_mode: str | None) -> torch.nn.Module:
    module.grad_mode = grad_mode
    return module


ACTS: dict[str, Callable[..., torch.nn.Module]] = {
    "construct": construct,
    "load": load,
    "assign": assign,
    "copy": lambda module, *_: copy.deepcopy(module),
    "convert": lambda module, *_: module.double().float(),
    "construct, and convert outside": construct,
    "set grad_mode": set_mode,
}


def trained(table: torch.nn.Module) -> Tensor:
    optimizer = optim.Adam(table.parameters(), lr=0.1, in_backward=True)
    for step in range(4):
        optimizer.zero_grad()
        kinds.looked_up(table, IDS + 3 * step).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        return kinds.looked_up(table.eval(), torch.arange(20).view(-1, 1))


@pytest.mark.parametrize("grad_mode", [None, "dense", "sparse", "fused", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_is_trained_as_any_other(kind: str, grad_mode: str | None) -> None:
    want = trained(made(kind, grad_mode))
    for name, act in ACTS.items():
        table = made(kind, grad_mode)
        with torch.inference_mode():
            table = act(table, kind, grad_mode)
        if name.endswith("outside"):
            table.double().float()
        torch.testing.assert_close(trained(table), want, rtol=0, atol=0)


@pytest.mark.parametrize("grad_mode", ["dense", "sparse", "fused"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adadelta", "Adagrad", "Ftrl"])
def test_an_optimizer_goes_on_after_it_has_stepped_saved_or_loaded_there(name: str, grad_mode: str) -> None:
    results = []
    for mode in (False, True):
        table = made("table", grad_mode)
        optimizer = getattr(optim, name)(table.parameters(), lr=0.1, in_backward=grad_mode == "fused")
        for step in range(4):
            optimizer.zero_grad()
            table(IDS + step).square().sum().backward()
            with torch.inference_mode(mode and step != 2):
                optimizer.step()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        results.append(table.weight.detach().clone())
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("converted", [False, True])
def test_weights_of_ids_have_no_gradient_from_a_table_made_there(converted: bool) -> None:
    with torch.inference_mode():
        bags = nn.EmbeddingBag(20, 3, mode="sum", grad_mode="fused")
    if converted:  # its values are those of another tensor then, but torch counts no versions still
        bags.double().float()
    _optimizer = optim.SGD(bags.parameters(), lr=0.1, in_backward=True)
    weights = torch.ones(IDS.shape, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"made outside torch.inference_mode\(\): replace it by torch.nn.Parameter"):
        bags(IDS, None, weights)
    bags.weight = torch.nn.Parameter(bags.weight.clone())
    _optimizer = optim.SGD(bags.parameters(), lr=0.1, in_backward=True)
    bags(IDS, None, weights).sum().backward()
    assert weights.grad is not None


def test_a_table_that_grows_there_counts_its_versions() -> None:
    table = nn.EmbeddingVariable(3, capacity=2, grad_mode="sparse")
    with torch.inference_mode():
        table(torch.arange(40))
    optimizer, before = optim.SGD(table.parameters(), lr=0.1), table.stored_weight()._version
    table(torch.arange(40)).sum().backward()
    optimizer.step()
    assert table.stored_weight()._version > before
