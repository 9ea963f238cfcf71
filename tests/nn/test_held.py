"""Plans that the kernels hold for modules: when there are such plans, what they keep alive, and when they end."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchsparse_rec import nn, optim
from torchsparse_rec.nn import plan as plans

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.tensor([1, 2, 3, 3])


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[weakref.WeakSet]:
    """Return the plans that live."""
    alive: weakref.WeakSet = weakref.WeakSet()
    made = plans.Held.__init__

    def init(self: plans.Held, *args: Any) -> None:
        made(self, *args)
        alive.add(self)

    monkeypatch.setattr(plans.Held, "__init__", init)
    yield alive


def table(kind: str = "Adam", **options: Any) -> tuple[nn.Embedding, torch.optim.Optimizer]:
    module = nn.Embedding(10, 4, grad_mode="fused")
    return module, getattr(optim, kind)(module.parameters(), lr=0.1, in_backward=True, **options)


def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor = IDS) -> None:
    module(ids).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_steps_make_no_more_plans(held: weakref.WeakSet, kind: str) -> None:
    module, optimizer = table(kind)
    for _ in range(3):
        step(module, optimizer)
    known = set(held)
    for _ in range(20):
        step(module, optimizer)
    assert set(held) == known
    assert 1 <= len(known) <= 2


def test_a_schedule_leaves_no_plans_behind(held: weakref.WeakSet) -> None:
    module, optimizer = table("SGD")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    for _ in range(20):
        step(module, optimizer)
        schedule.step()
    assert len(held) <= 3


def test_plans_end_with_the_module_and_tables_with_their_users(held: weakref.WeakSet) -> None:
    module, optimizer = table()
    for _ in range(3):
        step(module, optimizer)
    weight = weakref.ref(module._parameters["weight"])
    state = weakref.ref(optimizer.state[module._parameters["weight"]]["exp_avg"])
    assert held
    del module
    gc.collect()
    assert not held
    assert weight() is not None
    del optimizer
    gc.collect()
    assert weight() is None
    assert state() is None


def test_a_parameter_that_refers_to_its_optimizer_is_no_leak(held: weakref.WeakSet) -> None:
    """Collect what torch.distributed.optim makes: a parameter with its optimizer in an attribute."""
    module, optimizer = table()
    parameter = module._parameters["weight"]
    parameter._in_backward_optimizers, parameter.module = [optimizer], module
    for _ in range(3):
        step(module, optimizer)
    weight = weakref.ref(parameter)
    del module, optimizer, parameter
    gc.collect()
    assert weight() is None
    assert not held


def test_a_table_that_was_stepped_can_be_swapped() -> None:
    module, optimizer = table("SGD")
    for _ in range(3):
        step(module, optimizer)
    other = torch.nn.Parameter(torch.ones(10, 4))
    torch.utils.swap_tensors(module._parameters["weight"], other)
    assert torch.equal(module(IDS), torch.ones(4, 4))


def test_steps_move_the_version() -> None:
    module, optimizer = table()
    for _ in range(3):
        before = module._parameters["weight"]._version
        step(module, optimizer)
        assert module._parameters["weight"]._version > before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_plans_of_their_own(copied: Any, held: weakref.WeakSet) -> None:
    module, optimizer = table("SGD")
    for _ in range(3):
        step(module, optimizer)
    known = set(held)
    other, its_optimizer = copied((module, optimizer))
    its_optimizer.in_backward = True
    before = module.weight.detach().clone()
    for _ in range(3):
        step(other, its_optimizer)
    assert torch.equal(module.weight, before)
    for _ in range(3):
        step(module, optimizer)
    assert torch.equal(other.weight, module.weight)
    assert set(held) > known


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module._parameters["weight"], "data", torch.ones(20, 4)),
        lambda module: module.double(),
        lambda module: module.share_memory(),
        lambda module: module._parameters["weight"].data.resize_(5, 4),
        lambda module: module.load_state_dict({"weight": torch.ones(10, 4)}, assign=True),
    ],
    ids=["data", "double", "share_memory", "resize", "assign"],
)
def test_a_plan_follows_its_tables(change: Any) -> None:
    """Change tables between steps, beside a table that a step by lists updates each time."""
    sides = []
    for planned in (True, False):
        torch.manual_seed(0)
        module, optimizer = table("SGD")
        for number in range(6):
            if number == 3:
                change(module)
                if module._parameters["weight"] is not optimizer.param_groups[0]["params"][0]:
                    optimizer = optim.SGD(module.parameters(), lr=0.1, in_backward=True)
            if not planned:
                module._forget_lookups()
            step(module, optimizer)
        sides.append(module.weight.detach().clone())
    assert torch.equal(*sides)


def test_compilers_and_modes_see_the_operators_by_lists() -> None:
    """Let a mode see a step: a number would tell it nothing."""
    module, optimizer = table("SGD")
    seen: set[str] = set()

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    for _ in range(3):
        step(module, optimizer)
    with Mode():
        step(module, optimizer)
    assert any("embedding_collection" in name for name in seen)
    assert not [name for name in seen if "plan" in name]
