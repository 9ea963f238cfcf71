"""Plans that the kernels hold for modules: when there are such plans, what they keep alive, and when they end."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchsparse_rec import nn, optim
from torchsparse_rec.jagged import KeyedJaggedTensor
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
                module.forget_lookups()
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


def test_a_held_plan_serves_no_other_one() -> None:
    bag, ids = nn.EmbeddingBag(9, 3, mode="sum", grad_mode="sparse"), torch.tensor([[1, 2, 3, 4]])
    optimizer = optim.Adam(bag.parameters(), lr=0.1)
    for x in (ids, ids[:, :1]):
        optimizer.zero_grad()
        bag(x).sum().backward()
        optimizer.step()
    with torch.no_grad():
        for _ in range(3):
            sums = bag(ids)
        bag.mode = "mean"
        assert torch.equal(bag(ids), sums / 4)


def test_a_plan_is_held_for_a_second_call_by_it_and_not_for_calls_by_two_in_turn(held: weakref.WeakSet) -> None:
    configs = [nn.EmbeddingBagConfig(10, 4, name, feature_names=[name]) for name in "ab"]
    module = nn.EmbeddingBagCollection(configs, grad_mode="sparse")
    optimizer = optim.Adam(module.parameters(), lr=0.1)
    one, other = (KeyedJaggedTensor(list(keys), IDS.repeat(2), lengths=torch.ones(8).int()) for keys in ("ab", "ba"))
    for _ in range(3):
        for features in (one, other):
            module(features).values().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not held
    with torch.no_grad():
        results = [module(one).values() for _ in range(3)]
    assert len(held) == 1
    assert all(torch.equal(results[0], result) for result in results)


def test_a_plan_never_outlives_the_states_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load other states in one thread while another, in a lookup, is about to have a plan held."""
    module = nn.Embedding(10, 4, grad_mode="sparse")
    optimizer = optim.Adam(module.parameters(), lr=0.1)
    step(module, optimizer)
    states, made = copy.deepcopy(optimizer.state_dict()), plans.Held.__init__
    step(module, optimizer)

    def init(self: plans.Held, *args: Any) -> None:
        monkeypatch.setattr(plans.Held, "__init__", made)
        optimizer.load_state_dict(states)
        with torch.enable_grad():
            for ids in (IDS + 1, IDS + 2):
                step(module, optimizer, ids)
        made(self, *args)

    monkeypatch.setattr(plans.Held, "__init__", init)
    with torch.no_grad():
        for _ in range(2):
            module(IDS)
        assert plans.Held.__init__ is made
        for _ in range(3):
            read = module(IDS)
    assert torch.equal(read, module.weight[IDS])


def test_lookups_go_on_as_the_process_ends() -> None:
    """Look up and step in what runs at exit after torch's own."""
    program = """
import atexit
atexit.register(lambda: print(step(), flush=True))
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchsparse_rec import nn, optim
module = nn.Embedding(10, 4, grad_mode="fused")
optimizer = optim.Adam(module.parameters(), lr=0.1, in_backward=True)
def step():
    module(torch.arange(4)).sum().backward()
    optimizer.step()
    return module(torch.arange(4)).shape
for _ in range(4):
    step()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.stdout, result.returncode) == ("torch.Size([4, 4])\n", 0), result.stderr


def test_a_table_whose_class_sees_operators_sees_them_by_lists() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = nn.Embedding(10, 4, grad_mode="fused")
    optim.SGD(module.parameters(), lr=0.1, in_backward=True)
    with torch.no_grad():
        for _ in range(3):
            assert module(IDS).shape == (4, 4)
