"""The row of padding in every gradient mode: it is read as any other, and has no gradient, whatever its values are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchsparse_rec import nn, optim

MODES = (None, "dense", "sparse", "fused", "auto")
RULES = {"Adam": {"lr": 0.1}, "SGD": {"lr": 0.1, "momentum": 0.9}, "Adagrad": {"lr": 0.1}}
pytestmark = pytest.mark.usefixtures("kernels")


def rows() -> Tensor:
    """Return a table without zeros."""
    return torch.arange(1.0, 31.0).view(10, 3) / 10


def single(grad_mode: str | None) -> torch.nn.Module:
    """Make a single table."""
    return nn.Embedding(10, 3, padding_idx=2, _weight=rows(), grad_mode=grad_mode)


def of_a_collection(grad_mode: str | None) -> torch.nn.Module:
    """Make a collection of one table."""
    config = nn.EmbeddingConfig(10, 3, name="t", feature_names=["f"], padding_idx=2)
    module = nn.EmbeddingCollection([config], grad_mode=grad_mode)
    module.load_state_dict({"embeddings.t.weight": rows()})
    return module


def look_up(module: torch.nn.Module, ids: Tensor) -> Tensor:
    """Look up ids, without pooling."""
    return module(ids) if isinstance(module, nn.Embedding) else module({"f": ids})["f"].values()


@pytest.mark.parametrize("make", [single, of_a_collection])
@pytest.mark.parametrize("grad_mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_the_row_of_padding_is_read_and_gets_no_gradient(rule: str, grad_mode: str | None, make) -> None:
    module, theirs = make(grad_mode), torch.nn.Embedding(10, 3, padding_idx=2, _weight=rows())
    optimizer = getattr(optim, rule)(module.parameters(), in_backward=True, **RULES[rule])
    reference = getattr(torch.optim, rule)(theirs.parameters(), **RULES[rule])
    for step in range(4):
        ids = torch.tensor([1, 2, (3 * step) % 10, 2])
        for output, its in ((look_up(module, ids), optimizer), (theirs(ids), reference)):
            its.zero_grad()
            output.square().sum().backward()
            its.step()
        everything = torch.arange(10)
        for context in (torch.enable_grad, torch.no_grad):
            with context():
                torch.testing.assert_close(look_up(module, everything), theirs(everything), rtol=1e-5, atol=1e-6)
    assert torch.equal(look_up(module.eval(), torch.tensor([2])), rows()[2:3])


@pytest.mark.parametrize("make", [single, of_a_collection])
@pytest.mark.parametrize("grad_mode", ["dense", "fused"])
def test_compiled_too(grad_mode: str, make) -> None:
    torch._dynamo.reset()
    module = make(grad_mode)
    optimizer = optim.Adam(module.parameters(), in_backward=True, lr=0.1)
    compiled = torch.compile(lambda ids: look_up(module, ids), backend="aot_eager", fullgraph=True)
    ids = torch.tensor([1, 2, 7, 2])
    for _ in range(3):
        optimizer.zero_grad()
        output = compiled(ids)
        assert torch.equal(output[[1, 3]], rows()[[2, 2]])
        output.square().sum().backward()
        optimizer.step()
    assert not torch.equal(output[0], rows()[1])
    with torch.no_grad():
        assert torch.equal(compiled(ids)[[1, 3]], rows()[[2, 2]])
