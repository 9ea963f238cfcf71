"""Tables with stale rows: every reader sees the rows that dense training would have left."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from nn.test_fused import ROWS, Model, draw, loss_of, pair, train_step
from torch import Tensor, nn

from torchsparse_rec import optim
from torchsparse_rec._torch import as_stored

pytestmark = pytest.mark.usefixtures("kernels")


def trained(grad_mode: str, steps: int = 5):
    """Train a model until rows are stale; return it, its optimizer, and what the rows should be."""
    model, reference = pair(grad_mode)
    optimizer = optim.Adam(model.parameters(), lr=0.01, in_backward=True)
    reference_optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = draw(generator)
        for side, its in ((model, optimizer), (reference, reference_optimizer)):
            train_step(its, loss_of, side, batch)
    return model, optimizer, reference.table.weight.detach()


READERS = {
    "weight": lambda model, _: model.table.weight.detach(),
    "state_dict": lambda model, _: model.state_dict()["table.weight"],
    "deepcopy": lambda model, _: copy.deepcopy(model).table.weight.detach(),
    "copied storage": lambda model, _: copy.deepcopy(model).table._parameters["weight"].detach(),
    "pickle": lambda model, _: pickle.loads(pickle.dumps(model)).table.weight.detach(),
    "saved": lambda model, _: _saved(model).table.weight.detach(),
    "to": lambda model, _: model.to(torch.float64).table._parameters["weight"].detach().float(),
    "eval": lambda model, _: model.eval().table._parameters["weight"].detach(),
    "flush": lambda model, optimizer: optimizer.flush() or model.table._parameters["weight"].detach(),
    "optimizer's state_dict": lambda model, optimizer: (
        optimizer.state_dict() and model.table._parameters["weight"].detach()
    ),
    "lookup": lambda model, _: model.table(torch.arange(ROWS).unsqueeze(1)).detach(),
    "lookup without gradient": lambda model, _: _without_gradient(model),
}


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@torch.no_grad()
def _without_gradient(model: Model) -> Tensor:
    return model.table(torch.arange(ROWS).unsqueeze(1))


@pytest.mark.parametrize("grad_mode", ["fused", "sparse"])
@pytest.mark.parametrize("reader", READERS)
def test_readers_see_current_rows(reader: str, grad_mode: str) -> None:
    model, optimizer, want = trained(grad_mode)
    with as_stored():
        stored = model.table._parameters["weight"].detach().clone()
    assert not torch.allclose(stored, want, rtol=2e-5, atol=1e-6), "no row is stale: the test shows nothing"
    torch.testing.assert_close(READERS[reader](model, optimizer), want, rtol=2e-5, atol=2e-6)


def test_to_list_parameters_writes_nothing() -> None:
    model, optimizer, want = trained("fused")
    held = next(model.table.parameters())
    with as_stored():
        before = held.detach().clone()
    list(model.parameters()), optimizer.param_groups
    assert held.grad is None and held.requires_grad and held.shape == before.shape and held.is_leaf
    with as_stored():
        assert torch.equal(held, before)
    torch.testing.assert_close(held.detach(), want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("grad_mode", ["fused", "sparse"])
def test_lookups_write_nothing(grad_mode: str) -> None:
    model, optimizer, _ = trained(grad_mode)
    stored = model.table._parameters["weight"]
    with as_stored():
        before, version = stored.detach().clone(), stored._version
    model(torch.arange(ROWS).unsqueeze(1))
    _without_gradient(model)
    with as_stored():
        assert torch.equal(stored, before)
        assert stored._version == version
    assert optimizer.holds(stored)


def test_copies_train_on_by_themselves() -> None:
    model, optimizer, _ = trained("fused")
    copied = copy.deepcopy(model)
    its = optim.Adam(copied.parameters(), lr=0.01, in_backward=True)
    batch = draw(torch.Generator().manual_seed(7))
    before = model.state_dict()["table.weight"].clone()
    loss_of(copied, batch).backward()
    its.step()
    assert torch.equal(model.state_dict()["table.weight"], before)
    assert not torch.equal(copied.state_dict()["table.weight"], before)
    loss_of(model, batch).backward()
    optimizer.step()
    assert not torch.equal(model.state_dict()["table.weight"], before)


@pytest.mark.parametrize("grad_mode", ["fused", "sparse"])
def test_a_resumed_run_equals_one_that_went_on(grad_mode: str) -> None:
    model, optimizer, _ = trained(grad_mode)
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, _ = pair(grad_mode)
    resumed.load_state_dict(checkpoint[0])
    its = optim.Adam(resumed.parameters(), lr=0.5, in_backward=True)
    its.load_state_dict(checkpoint[1])
    generator = torch.Generator().manual_seed(3)
    for _ in range(6):
        batch = draw(generator)
        for side, at in ((model, optimizer), (resumed, its)):
            train_step(at, loss_of, side, batch)
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
