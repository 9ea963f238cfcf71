"""What ``explain()`` says of a lookup's route is what runs: the operators of a step, by torch's profiler."""

import re

import pytest
import torch

from torchsparse_rec import nn, optim

IDS = torch.arange(40) % 30
OFFSETS = torch.tensor([0, 10, 20])


def bags(grad_mode):
    return nn.EmbeddingBag(4000, 32, grad_mode=grad_mode), (IDS, OFFSETS)


def rows(grad_mode):
    return nn.Embedding(4000, 32, grad_mode=grad_mode), (IDS.repeat(50),)


def scaled(grad_mode):
    return nn.Embedding(4000, 32, scale_grad_by_freq=True, grad_mode=grad_mode), (IDS,)


def collection(grad_mode):
    config = nn.EmbeddingBagConfig(num_embeddings=4000, embedding_dim=32, name="t", feature_names=["f"])
    return nn.EmbeddingBagCollection([config], grad_mode=grad_mode), ({"f": IDS.reshape(4, 10)},)


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("grad_mode", ["dense", "sparse", "fused"])
@pytest.mark.parametrize("made", [bags, rows, scaled, collection])
def test_a_step_calls_the_operators_that_explain_names(made, grad_mode, stale):
    module, inputs = made(grad_mode)
    optimizer = optim.Adam(module.parameters(), lr=0.1, in_backward=grad_mode == "fused")
    if stale:  # Adam owes rows a step after each
        _loss(module(*inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    way, forward, gradient = re.search(
        r"route: (\w+): forward (\w+), gradient ([\w, ]+)$", module.explain(), re.M
    ).groups()
    behind = stale and grad_mode != "dense"
    assert way == ("fused" if grad_mode == "fused" else "current" if behind else "plain")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        _loss(module(*inputs)).backward()
    seen = {event.name.partition("::")[2] for event in seen.events() if event.name.startswith("torchsparse_rec::")}
    names = {name.replace("planned_", "embedding_") for name in seen}
    assert {forward, *gradient.split(", ")} <= names
    lookups = {name for name in names if name.startswith("embedding") and "backward" not in name and name[-1] != "_"}
    assert lookups == {forward}


def test_a_frozen_table_has_no_gradient_to_explain():
    module = nn.Embedding(4, 2).requires_grad_(False)
    assert "route: plain: forward embedding, gradient none" in module.explain()


def _loss(result):
    values = result.values() if not isinstance(result, torch.Tensor) else result
    return values.square().sum()
