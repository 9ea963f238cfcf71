"""What a step keeps for the next one: what the fused mode refuses, it refuses after any number of steps."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from nn.changing import DTYPES, KINDS, MODES, OPTIMIZERS, Change, Side, Steps, assert_same, both, check, of_lookups
from pairs import in_pairs

from torchsparse_rec import optim

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*every step updates all rows"),  # optimizers warn of that
]


# ---- Refusals of the fused mode --------------------------------------------------------------------------------------


def with_a_gradient(side: Side) -> Steps:
    side.stored.grad = torch.ones_like(side.stored)
    yield
    side.stored.grad = None


def with_a_hook(side: Side) -> Steps:
    handle = side.stored.register_hook(lambda grad: 2 * grad)
    yield
    handle.remove()


def with_a_post_hook(side: Side) -> Steps:
    handle = side.stored.register_post_accumulate_grad_hook(lambda parameter: None)
    yield
    handle.remove()


def in_ddp(side: Side) -> Steps:
    DDP = torch.nn.parallel.DistributedDataParallel
    before, DDP._active_ddp_module = DDP._active_ddp_module, object()
    yield
    DDP._active_ddp_module = before


def without_an_optimizer(side: Side) -> Steps:
    state = side.optimizer.state_dict()
    side.optimizer = None
    yield
    side.optimizer = side.make_optimizer()
    side.optimizer.load_state_dict(state)


def with_in_backward_off(side: Side) -> Steps:
    if side.is_ours:
        side.optimizer.in_backward = False
    yield
    if side.is_ours:
        side.optimizer.in_backward = True


def with_a_younger_optimizer(side: Side) -> Steps:
    side.kept = optim.SGD([side.stored], lr=0.1)
    yield
    side.optimizer = side.make_optimizer()  # a table whose last optimizer is gone has none


def with_a_parameter_without_one(side: Side) -> Steps:
    before = side.stored
    side.table.weight = torch.nn.Parameter(torch.ones_like(before))
    yield
    side.table.weight = before


def assigned_without_an_optimizer(side: Side) -> Steps:
    before = side.stored
    side.module.load_state_dict({k: v + 1 for k, v in side.module.state_dict().items()}, assign=True)
    others = dict(side.module.named_parameters())
    yield
    for name in others:
        owner, _, name = name.rpartition(".")
        side.module.get_submodule(owner)._parameters[name] = side.parameters[f"{owner}.{name}".lstrip(".")]
    assert side.stored is before


def lasting(change: Change) -> Change:
    """Train under a change that the fused mode refuses."""

    def lasting_change(side: Side) -> Steps:
        yield
        its = change(side)
        next(its)
        yield
        next(its, None)

    return lasting_change


def meets_a_gradient(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    side.stored.grad = torch.ones_like(side.stored)
    return look_up(ids)


# The other modes do with these as torch does.
TAKEN: dict[str, Change] = {
    "a hook": lasting(with_a_hook),
    "a post hook": lasting(with_a_post_hook),
    "a gradient": of_lookups(meets_a_gradient),
}


@pytest.mark.slow
@in_pairs(change=TAKEN, mode=[x for x in MODES if x != "fused"], kind=KINDS, of=OPTIMIZERS, dtype=DTYPES)
def test_what_the_other_modes_take(change: str, mode: str, kind: str, of: str, dtype: torch.dtype) -> None:
    check(TAKEN[change], kind, mode, of, dtype)


GONE = "made with in_backward=True, .* got none"
OFF = "made with in_backward=True, .* got {name} without it"
AT_LOOKUP: dict[str, tuple[Change, str]] = {
    x.__name__: (x, text)
    for x, text in {
        with_a_gradient: "the table has a .grad",
        with_a_hook: "has a hook on its gradient, which would never run",
        with_a_post_hook: "has a hook on its gradient, which would never run",
        in_ddp: "is in a DistributedDataParallel",
        without_an_optimizer: GONE,
        with_in_backward_off: OFF,
        with_a_younger_optimizer: "made with in_backward=True, .* got SGD without it",
        with_a_parameter_without_one: GONE,
        assigned_without_an_optimizer: GONE,
    }.items()
}


def _is_undone(change: str, kind: str, of: str, dtype: torch.dtype) -> bool:
    return change != "with_a_younger_optimizer" or of == "SGD"  # another one has no state


@in_pairs(_is_undone, change=AT_LOOKUP, kind=KINDS, of=OPTIMIZERS, dtype=DTYPES)
def test_a_prepared_lookup_is_refused(change: str, kind: str, of: str, dtype: torch.dtype) -> None:
    """Refuse the lookup after a change, write nothing, and go on once the change is undone."""
    kept = []
    for side in both(kind, "fused", of, dtype):
        side.train(4)
        side.optimizer.zero_grad()
        if side.is_ours:
            side.parameters = dict(side.module.named_parameters())
            its, text = AT_LOOKUP[change][0](side), AT_LOOKUP[change][1].format(name=OPTIMIZERS[of][0])
            next(its)
            for _ in range(2):
                with pytest.raises(RuntimeError, match=text):
                    side.loss(90)
            with torch.no_grad():
                side.look_up(side.ids(90))
            next(its, None)
        side.train(3)
        kept.append(side.end())
    assert_same(*kept, rounded=dtype is torch.float32)


def second_backward(side: Side, loss: torch.Tensor) -> None:
    side.loss(91).backward()


def second_backward_of_one_loss(side: Side, loss: torch.Tensor) -> None:
    loss.backward()


def second_backward_in_another_thread(side: Side, loss: torch.Tensor) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            side.loss(91).backward()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise errors[0]


def clipped(side: Side, loss: torch.Tensor) -> None:
    optim.clip_grad_norm_(side.module.parameters(), 1.0)


def clipped_by_value(side: Side, loss: torch.Tensor) -> None:
    optim.clip_grad_value_(side.module.parameters(), 1.0)


def unscaled(side: Side, loss: torch.Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.step(side.optimizer)


def changed(side: Side, loss: torch.Tensor) -> None:
    before, side.group["lr"] = side.group["lr"], 0.3
    try:
        side.optimizer.step()
    finally:
        side.group["lr"] = before


def changed_in_a_hook(side: Side, loss: torch.Tensor) -> None:
    before = side.group["lr"]
    handle = side.optimizer.register_step_pre_hook(lambda *_: side.group.update(lr=0.3))
    try:
        side.optimizer.step()
    finally:
        handle.remove()
        side.group["lr"] = before


def removed(side: Side, loss: torch.Tensor) -> None:
    before, side.group["params"] = side.group["params"], []
    try:
        side.optimizer.step()
    finally:
        side.group["params"] = before


def penalised(side: Side, loss: torch.Tensor) -> None:
    side.table.weight.square().sum().backward()
    try:
        side.optimizer.step()
    finally:
        side.stored.grad = None


SECOND = r"a second backward\(\) reached a table before its optimizer's step\(\)"
IN_BETWEEN: dict[str, tuple[Callable[[Side, torch.Tensor], None], str]] = {
    x.__name__: (x, text)
    for x, text in {
        second_backward: SECOND,
        second_backward_of_one_loss: SECOND,
        second_backward_in_another_thread: SECOND,
        clipped: "gradients are to be clipped",
        clipped_by_value: "gradients are to be clipped",
        unscaled: "divides gradients by its scale",
        changed: "a hyperparameter has changed before step",
        changed_in_a_hook: "a hyperparameter has changed before step",
        removed: "a table's parameter group has changed before step",
        penalised: "a table has a .grad from something other than its lookups",
    }.items()
}


@in_pairs(change=IN_BETWEEN, kind=KINDS, of=OPTIMIZERS, dtype=DTYPES)
def test_a_prepared_step_is_refused(change: str, kind: str, of: str, dtype: torch.dtype) -> None:
    """Refuse what comes between a backward and its step, and go on without it."""
    kept = []
    for side in both(kind, "fused", of, dtype):
        side.train(4)
        side.optimizer.zero_grad()
        loss = side.loss(92)
        loss.backward(retain_graph=True)
        if side.is_ours:
            with pytest.raises(RuntimeError, match=IN_BETWEEN[change][1]):
                IN_BETWEEN[change][0](side, loss)
        side.step()
        side.train(3)
        kept.append(side.end())
    assert_same(*kept, rounded=dtype is torch.float32)
