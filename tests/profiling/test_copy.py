"""A diagnosis trains a copy, in every gradient mode, or in place where it is told so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchsparse_rec
from torchsparse_rec import optim
from torchsparse_rec.nn.convert import announced_optimizers
from torchsparse_rec.profiling import diagnose
from torchsparse_rec.profiling._copy import copied_training

pytestmark = pytest.mark.usefixtures("one_thread")


def training(grad_mode: str | None, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with all that training changes, tables, layers, buffers and dropout, and its optimizer."""
    torch.manual_seed(0)
    table = torchsparse_rec.nn.Embedding(3000, 8, grad_mode=grad_mode)
    model = nn.Sequential(table, nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
    torchs = optimizer.startswith("torch.")
    make = getattr(torch.optim if torchs else optim, optimizer.removeprefix("torch."))
    return model, make(model.parameters(), lr=0.01, **({} if torchs else {"in_backward": True}))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (model(ids) - torch.rand(len(ids), 1)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def batches(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3000, (32,), generator=generator) for _ in range(count)]


def run(model: nn.Module, optimizer: torch.optim.Optimizer, diagnosis: Callable[[], object]) -> list[Tensor]:
    """Train for a while, with a diagnosis in between. Return the losses and the final bits of all that changed."""
    torch.manual_seed(2)
    losses = [step(model, optimizer, batch) for batch in batches(5, 0)]
    diagnosis()
    losses += [step(model, optimizer, batch) for batch in batches(5, 1)]
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return [*losses, *model.state_dict().values(), *map(torch.as_tensor, states), torch.get_rng_state()]


CASES = [
    (None, "torch.Adam"),
    (None, "torch.SGD"),
    ("dense", "Adam"),
    ("sparse", "Adam"),
    ("fused", "Adam"),
    ("fused", "SGD"),
    ("auto", "Adagrad"),
]


@pytest.mark.parametrize(("grad_mode", "optimizer"), CASES)
def test_training_goes_on_as_after_a_checkpoint(grad_mode, optimizer):
    plain, diagnosed = training(grad_mode, optimizer), training(grad_mode, optimizer)
    expected = run(*plain, lambda: [part.state_dict() for part in plain])  # which flushes stale rows, as a copy does
    found = run(*diagnosed, lambda: diagnose(step, batches(4, 7), *diagnosed, steps=3))
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_nothing_stays_on(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for part in model.modules():
        assert not part._forward_hooks and not part._forward_pre_hooks
        assert "forward" not in part.__dict__
    for parameter in model.parameters():
        assert parameter.requires_grad
        assert not parameter._post_accumulate_grad_hooks
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_step_raises_passes_through_and_nothing_stays(in_place):
    model, optimizer = training("dense", "Adam")
    before, calls = copy.deepcopy(model.state_dict()), []

    def failing(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor) -> None:
        calls.append(step(model, optimizer, ids))
        if len(calls) == 9:
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        diagnose(failing, batches(20, 7), model, optimizer, in_place=in_place, steps=10)
    assert len(calls) == 9
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before) == (not in_place)
    assert_nothing_stays_on(model, optimizer)


@pytest.mark.parametrize(("grad_mode", "optimizer"), [("dense", "SGD"), ("fused", "Adam")])
def test_in_place_the_training_moves_on_and_all_is_measured(grad_mode, optimizer):
    model, updates = training(grad_mode, optimizer)
    before = model[1].weight.detach().clone()
    found = diagnose(step, batches(8, 7), model, updates, in_place=True, steps=3)
    assert found.times_ms["without_dense"] is not None
    assert not torch.equal(model[1].weight, before)
    assert_nothing_stays_on(model, updates)


def test_several_optimizers():
    model = nn.Sequential(nn.Embedding(3000, 8, sparse=True), nn.Linear(8, 1))
    optimizers = [torch.optim.SparseAdam(model[0].parameters()), torch.optim.SGD(model[1].parameters(), lr=0.1)]
    seen: set[int] = set()

    def step(model: nn.Module, optimizers: Any, ids: Tensor) -> None:
        seen.update(map(id, optimizers))
        model.zero_grad()
        model(ids).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    before = copy.deepcopy(model.state_dict())
    found = diagnose(step, batches(4, 7), model, optimizers, steps=2)
    assert len(seen) == 2 and not seen & set(map(id, optimizers))
    assert "sparse gradient" in found.tables[0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---- Copies that do not train as the model does ----------------------------------------------------------------------


def only_the_model(model: nn.Module, optimizer: torch.optim.Optimizer, given: Any, ids: Tensor) -> None:
    step(given[0], optimizer, ids)


def only_a_layer(model: nn.Module, optimizer: torch.optim.Optimizer, given: Any, ids: Tensor) -> None:
    given[0][1](model[0](ids)).sum().backward()


def only_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, given: Any, ids: Tensor) -> None:
    model(ids).square().mean().backward()
    given[1].step()


@pytest.mark.parametrize("wrong", [only_the_model, only_a_layer, only_the_optimizer])
def test_a_step_that_trains_the_given_model_is_refused_before_it_does(wrong):
    given = training("fused", "Adam")
    before = copy.deepcopy(given[0].state_dict())
    with pytest.raises(RuntimeError, match=r"step must use the copies .* in_place=True makes no copy"):
        diagnose(lambda model, optimizer, ids: wrong(model, optimizer, given, ids), batches(4, 7), *given, steps=2)
    assert all(torch.equal(value, before[name]) for name, value in given[0].state_dict().items())
    assert_nothing_stays_on(*given)
    diagnose(lambda model, optimizer, ids: step(*given, ids), batches(4, 7), *given, in_place=True, steps=2)


class Locked(nn.Linear):
    """A layer that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies of this one")


def test_a_model_that_cannot_be_copied():
    model = Locked(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        model(batch).sum().backward()

    with pytest.raises(RuntimeError, match=r"cannot be copied \(no copies of this one\): in_place=True makes no copy"):
        diagnose(step, [torch.ones(4, 2)] * 4, model, optimizer)
    diagnose(step, [torch.ones(4, 2)] * 4, model, optimizer, in_place=True, steps=2)


def test_a_copy_that_would_not_be_compiled():
    model = nn.Linear(2, 1)
    model.compile(backend="eager")
    with pytest.raises(RuntimeError, match="a copy is not compiled, .* in_place=True makes no copy"):
        diagnose(step, [torch.ones(4, 2)] * 4, model, [])


@pytest.mark.parametrize("announced", [False, True])
def test_an_announced_optimizer_of_torch_is_announced_to_the_copy(announced):
    Config, Collection = torchsparse_rec.nn.EmbeddingBagConfig, torchsparse_rec.nn.EmbeddingBagCollection
    configs = [Config(num_embeddings=5000, embedding_dim=2, name="a", feature_names=["a"])]
    table = torchsparse_rec.nn.Embedding(5000, 2, grad_mode="auto")
    model = nn.ModuleList([Collection(configs, grad_mode="auto"), table])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if announced:
        torchsparse_rec.nn.use_optimizer(model, optimizer)
    copied, twin = copied_training(model, optimizer)
    assert set(announced_optimizers(model)) == ({optimizer} if announced else set())
    assert set(announced_optimizers(copied)) == ({twin} if announced else set())
    assert twin is not optimizer and copied[1].weight is twin.param_groups[0]["params"][-1]
