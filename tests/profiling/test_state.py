"""A diagnosis leaves training as it was: bit for bit, in every gradient mode, also when the step raises."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import torchsparse_rec
from torchsparse_rec import optim
from torchsparse_rec._torch import as_stored
from torchsparse_rec.profiling import diagnose
from torchsparse_rec.profiling._find import find
from torchsparse_rec.profiling._state import Snapshot

pytestmark = pytest.mark.usefixtures("one_thread")


class Training:
    """A model with all that training changes: tables, layers, buffers, dropout, optimizer, schedule, generators."""

    def __init__(self, grad_mode: str | None, optimizer: str) -> None:
        torch.manual_seed(0)
        table = torchsparse_rec.nn.Embedding(3000, 8, grad_mode=grad_mode)
        self.model = nn.Sequential(table, nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
        torchs = optimizer.startswith("torch.")
        make = getattr(torch.optim if torchs else optim, optimizer.removeprefix("torch."))
        self.optimizer = make(self.model.parameters(), lr=0.01, **({} if torchs else {"in_backward": True}))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.generator = torch.Generator().manual_seed(1)
        self.clears_first = True

    def step(self, ids: Tensor) -> Tensor:
        if self.clears_first:
            self.optimizer.zero_grad()
        noise = torch.rand(len(ids), 1, generator=self.generator) + random.random() + numpy.random.rand()
        loss = (self.model(ids) - noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        if not self.clears_first:
            self.optimizer.zero_grad()
        return loss.detach()


def batches(count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3000, (32,), generator=generator) for _ in range(count)]


def everything(training: Training) -> list[Any]:
    """Return the bits of everything that training changes."""
    model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
    states = [value for state in optimizer["state"].values() for value in state.values()]
    numbers = [torch.get_rng_state(), training.generator.get_state(), torch.tensor(random.random())]
    rates = [torch.tensor(group["lr"], dtype=torch.float64) for group in optimizer["param_groups"]]
    numbers.append(torch.tensor(numpy.random.rand()))
    return [*(v.clone() for v in model.values()), *(torch.as_tensor(s).clone() for s in states), *numbers, *rates]


def seed_all() -> None:
    torch.manual_seed(2)
    random.seed(3)
    numpy.random.seed(4)


def run(training: Training, diagnosis: Callable[[], object] | None) -> list[Any]:
    """Train for a while, with a diagnosis in between or without. Return the losses and the final bits."""
    seed_all()
    losses = [training.step(batch) for batch in batches(5, 0)]
    if diagnosis is not None:
        diagnosis()
    losses += [training.step(batch) for batch in batches(5, 1)]
    return [*losses, *everything(training)]


def assert_same_bits(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


CASES = [
    (None, "torch.Adam"),
    (None, "torch.SGD"),
    ("dense", "Adam"),
    ("sparse", "Adam"),
    ("fused", "Adam"),
    ("fused", "SGD"),
    ("auto", "Adagrad"),
]


@pytest.mark.parametrize("clears_first", [True, False])
@pytest.mark.parametrize(("grad_mode", "optimizer"), CASES)
def test_training_goes_on_as_if_nothing_had_been(grad_mode, optimizer, clears_first):
    def training() -> Training:
        made = Training(grad_mode, optimizer)
        made.clears_first = clears_first
        return made

    plain, diagnosed = training(), training()
    expected = run(plain, None)
    found = run(diagnosed, lambda: diagnose(diagnosed.step, batches(4, 7), steps=3))
    assert_same_bits(found, expected)


def test_a_diagnosis_before_the_first_step():
    plain, diagnosed = Training("fused", "Adam"), Training("fused", "Adam")
    seed_all()
    diagnose(diagnosed.step, batches(4, 7), steps=3)
    assert not diagnosed.optimizer.state_dict()["state"]
    assert all(p.grad is None for p in diagnosed.model.parameters())
    assert_same_bits(run(diagnosed, None), run(plain, None))


def test_no_row_is_brought_up_to_date():
    training = Training("fused", "Adam")
    run(training, None)
    seed_all()
    training.step(batches(1, 0)[0])
    with as_stored():
        before = training.model[0]._parameters["weight"].detach().clone()
    diagnose(training.step, batches(4, 7), steps=3)
    with as_stored():
        assert torch.equal(training.model[0]._parameters["weight"], before)
    assert not torch.equal(training.model[0].weight, before)  # some rows were stale, and stay so until they are read


def test_what_a_step_raises_passes_through_and_all_is_restored():
    training, calls = Training("fused", "Adam"), []
    run(training, None)
    before = copy.deepcopy(training.model.state_dict())
    forward = training.model[1].forward

    def step(ids: Tensor) -> None:
        calls.append(training.step(ids))
        if len(calls) == 9:
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        diagnose(step, batches(20, 7), steps=10)
    assert len(calls) == 9
    after = training.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert training.model[1].forward == forward


def test_nothing_stays_on_the_model():
    training = Training("dense", "SGD")
    diagnose(training.step, batches(8, 7), steps=3)
    for part in training.model.modules():
        assert not part._forward_hooks and not part._forward_pre_hooks
        assert "forward" not in part.__dict__
    for parameter in training.model.parameters():
        assert parameter.requires_grad
        assert not parameter._post_accumulate_grad_hooks


def test_without_restore_the_training_moves_on_and_no_part_is_taken_out():
    training = Training(None, "torch.SGD")
    before = training.model[1].weight.detach().clone()
    found = diagnose(training.step, batches(8, 7), steps=3, restore=False)
    assert not found.restored
    assert found.times_ms["without_dense"] is None
    assert any("restore=False" in note for note in found.notes)
    assert not torch.equal(training.model[1].weight, before)
    assert training.model[1].weight.isfinite().all()


def test_random_numbers_go_on_even_if_no_model_is_found():
    def step(_batch: Tensor) -> None:
        torch.rand(3), random.random(), numpy.random.rand()

    seed_all()
    expected = torch.rand(1), random.random(), numpy.random.rand()
    seed_all()
    found = diagnose(step, [torch.ones(2)] * 4, steps=2)
    assert (torch.rand(1), random.random(), numpy.random.rand()) == expected
    assert not found.restored
    assert "refers to no model" in found.notes[0]


def test_parameters_without_a_model_come_back_and_the_note_says_so():
    weight = nn.Parameter(torch.randn(2, 1))
    optimizer, before = torch.optim.SGD([weight], lr=0.1), weight.detach().clone()

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        (batch @ weight).sum().backward()
        optimizer.step()

    found = diagnose(step, [torch.ones(4, 2)] * 4, steps=2)
    assert found.restored and torch.equal(weight, before)
    assert "refers to no model" in found.notes[0] and "moved on" not in found.notes[0]
    assert "moved on" in diagnose(step, [torch.ones(4, 2)] * 4, steps=2, restore=False).notes[0]


def test_the_order_of_a_shuffled_loader_goes_on():
    def loader() -> torch.utils.data.DataLoader:
        data = torch.utils.data.TensorDataset(torch.arange(64))
        return torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(5))

    diagnosed, plain = loader(), loader()
    diagnose(lambda batch: None, diagnosed, steps=2)
    for a, b in zip(diagnosed, plain, strict=True):
        assert torch.equal(a[0], b[0])


# ---- What else training changes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [(), ("model",), ("model", "optimizer")])
def test_an_average_of_the_weights_comes_back_whatever_is_given(given):
    model = nn.Linear(2, 1)
    arguments = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    optimizer = arguments["optimizer"]
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        average.update_parameters(model)

    step(torch.ones(4, 2))
    before = copy.deepcopy(average.state_dict())
    diagnose(step, [torch.ones(4, 2)] * 4, steps=2, **{name: arguments[name] for name in given})
    assert all(torch.equal(value, before[name]) for name, value in average.state_dict().items())


def test_sparse_gradients_that_accumulate_come_back():
    model = nn.EmbeddingBag(50, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.randint(50, (16, 3)) for _ in range(6)]

    def step(ids: Tensor) -> None:  # the update is made elsewhere
        model(ids).square().mean().backward()

    step(data[0]), step(data[1])
    before, gradient = model.weight.grad.to_dense().clone(), model.weight.grad
    diagnose(step, data, model=model, optimizer=optimizer, steps=2)
    assert model.weight.grad is gradient and gradient.is_sparse
    assert torch.equal(gradient.to_dense(), before)
    step(data[2])
    assert not torch.equal(model.weight.grad.to_dense(), before)


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_scaler_comes_back_also_from_the_middle_of_a_step(fails, steps_before):
    model, scaler = nn.Linear(2, 1), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[bool] = []

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(batch).sum()).backward()
        scaler.unscale_(optimizer)
        calls.append(True)
        if fails and len(calls) == steps_before + 3:
            raise RuntimeError("out of luck")
        scaler.step(optimizer)
        scaler.update()

    data = [torch.ones(4, 2)] * 4
    for batch in data[:steps_before]:
        step(batch)
    before = scaler.state_dict()
    try:
        diagnose(step, data, steps=2)
    except RuntimeError:
        assert fails
    assert scaler.state_dict() == before and (scaler._scale is None) == (steps_before == 0)
    step(data[0])  # unscale_() would refuse, had it been called already since the last update
    assert scaler.get_scale() == 8.0 * 2 ** (steps_before // 2)


class Noisy(nn.Module):
    """A layer that draws its noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.more = torch.Generator().manual_seed(1), [torch.Generator().manual_seed(2)]
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn(x.shape, generator=self.own) + torch.rand(1, generator=self.more[0]))


def test_generators_within_a_model_go_on():
    model = nn.Sequential(nn.Identity(), Noisy())
    before = [generator.get_state() for generator in (model[1].own, *model[1].more)]
    diagnose(lambda batch: model(batch).sum().backward(), [torch.ones(4, 2)] * 4, steps=2)
    after = [generator.get_state() for generator in (model[1].own, *model[1].more)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_parameters_that_were_moved_come_back():
    model = nn.Linear(3, 1)
    snapshot, values = Snapshot(find(model.forward, model, None)), model.weight.detach().clone()
    storage = model.weight.data_ptr()
    model.weight.data = torch.zeros(5, 3)
    model.eval()
    snapshot.restore()
    assert torch.equal(model.weight, values) and model.weight.data_ptr() == storage
    assert model.training
