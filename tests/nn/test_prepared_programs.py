"""What a step keeps for the next one: a program that changes between two steps has its effect."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forks import forked, needs_fork
from nn.changing import DTYPES, KINDS, MODES, OPTIMIZERS, Change, Side, Steps, assert_same, both, check, of_lookups, run
from pairs import in_pairs
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*every step updates all rows"),  # optimizers warn of that
]


# ---- The program -----------------------------------------------------------------------------------------------------


def zeros_are_kept(side: Side) -> Steps:
    """Keep gradients of zeros, with which a step moves tables that have no lookup."""
    yield
    side.zero = {"set_to_none": False}
    side.backward = lambda loss: loss.backward() if side.number % 2 else None
    yield
    side.zero, side.backward = {}, lambda loss: loss.backward()


def zeroed_by_the_module(side: Side) -> Steps:
    yield
    zero, side.optimizer.zero_grad = side.optimizer.zero_grad, side.module.zero_grad
    yield
    side.optimizer.zero_grad = zero


def read_between(context: Callable[[], Any]) -> Change:
    """Look up in a context between two steps."""

    def change(side: Side) -> Steps:
        yield
        with context():
            side.see(side.look_up(side.ids(60)))
        yield
        with context():
            side.see(side.look_up(side.ids(61)))

    return change


def within(context: Callable[[], Any]) -> Change:
    """Train in a context."""

    def change(side: Side) -> Steps:
        yield
        its = context()
        its.__enter__()
        yield
        its.__exit__(None, None, None)

    return change


def loss_without_gradient(side: Side) -> Steps:
    yield
    look_up = side.look_up
    side.look_up = lambda ids: torch.no_grad()(look_up)(ids)
    side.backward = lambda loss: None
    yield
    side.look_up, side.backward = look_up, lambda loss: loss.backward()


def checkpointed(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    return checkpoint(look_up, ids, use_reentrant=False)


def saved_elsewhere(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return look_up(ids)


def twice(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    return look_up(ids) + look_up((ids + 5) % 40)


def thrice_with_one_dropped(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    first, dropped = look_up(ids), look_up((ids + 1) % 40)
    del dropped
    return first * look_up((ids + 5) % 40)


def one_kept(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    side.kept = look_up((ids + 1) % 40)
    return look_up(ids)


def written_in_place(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    return look_up(ids).mul_(2)


def hooked(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    result = look_up(ids)
    result.register_hook(lambda grad: 3 * grad)
    result.grad_fn.register_prehook(lambda grads: tuple(None if x is None else 2 * x for x in grads))
    return result


def with_its_gradient(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    result = look_up(ids)
    result.retain_grad()
    side.between = lambda: side.see(result.grad)
    return result


def detached(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    return look_up(ids).detach() + look_up((ids + 1) % 40)


def vmapped(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(look_up)(ids[None])[0]


def nested(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    return look_up(torch.nested.nested_tensor([ids[0], ids[1:].flatten()], layout=torch.jagged)).values()


def weighted(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.5, ids.numel(), dtype=side.dtype).view(ids.shape).requires_grad_()
    side.between = lambda: side.see(weights.grad)
    return side.module(ids, per_sample_weights=weights)


def with_offsets(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    return side.module(ids.flatten(), torch.arange(0, ids.numel(), 2))


def with_last_offset(side: Side, look_up: Callable, ids: torch.Tensor) -> torch.Tensor:
    side.module.include_last_offset = True
    result = side.module(ids.flatten(), torch.arange(0, ids.numel() + 1, 2))
    side.module.include_last_offset = False
    return result


def other_ids(features: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(side: Side) -> Steps:
        yield
        side.features = features
        yield
        side.features = lambda ids: ids

    return change


def inputs_of_backward(side: Side) -> Steps:
    """Differentiate by another leaf alone: the table has no gradient."""
    yield
    leaf = torch.ones(1, dtype=side.dtype, requires_grad=True)
    side.score = lambda result: result * leaf
    side.backward = lambda loss: loss.backward(inputs=[leaf])
    side.between = lambda: side.see(leaf.grad)
    yield
    side.score, side.backward, side.between = lambda x: x, lambda loss: loss.backward(), lambda: None


def gradients_of_another(side: Side) -> Steps:
    yield
    leaf = torch.ones(1, dtype=side.dtype, requires_grad=True)
    side.score = lambda result: result * leaf
    side.backward = lambda loss: side.see(*torch.autograd.grad(loss, [leaf], retain_graph=True), loss.backward() or 0)
    yield
    side.score, side.backward = lambda x: x, lambda loss: loss.backward()


def retained(side: Side) -> Steps:
    yield
    side.backward = lambda loss: loss.backward(retain_graph=True)
    yield
    side.backward = lambda loss: loss.backward()


def in_threads(side: Side) -> Steps:
    """Run backward and step in new threads."""
    yield

    def elsewhere(call: Callable, *arguments: Any) -> None:
        thread = threading.Thread(target=call, args=arguments)
        thread.start()
        thread.join()

    side.backward = lambda loss: elsewhere(loss.backward)
    side.step = lambda: elsewhere(side.optimizer.step)
    yield
    side.backward, side.step = lambda loss: loss.backward(), lambda: side.optimizer.step()


def functional(side: Side) -> Steps:
    """Call the module with another parameter, and differentiate by it."""
    yield
    state = {name: 0.5 * x.detach().clone() for name, x in side.module.named_parameters()}

    def loss(state: Any) -> torch.Tensor:
        ids = side.ids(70)
        args = ids if side.kind != "collection" else {"a": ids, "b": ids}
        found = torch.func.functional_call(side.module, state, (args,))
        return (found if isinstance(found, torch.Tensor) else found.values()).square().sum()

    side.see(loss(state))
    if side.beside == "dense":
        side.see(*torch.func.grad(loss)(state).values())
    yield


def refused_ids(side: Side) -> Steps:
    yield
    for ids in (torch.tensor([[2, side.rows]]), torch.tensor([[0.5]])):
        with pytest.raises((IndexError, ValueError, RuntimeError)):
            side.look_up(ids)
    yield


class _Functions(torch.overrides.TorchFunctionMode):
    """A mode that changes nothing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Dispatches(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


PROGRAM: dict[str, Change] = {
    **{x.__name__: x for x in (zeros_are_kept, zeroed_by_the_module, loss_without_gradient, inputs_of_backward)},
    **{x.__name__: x for x in (gradients_of_another, retained, in_threads, functional, refused_ids)},
    **{
        x.__name__: of_lookups(x)
        for x in (checkpointed, saved_elsewhere, twice, thrice_with_one_dropped, one_kept, written_in_place, hooked)
        + (with_its_gradient, detached, vmapped, nested, weighted, with_offsets, with_last_offset)
    },
    "no_grad": read_between(torch.no_grad),
    "inference_mode": read_between(torch.inference_mode),
    "in autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "in anomaly mode": within(torch.autograd.detect_anomaly),
    "in a function mode": within(_Functions),
    "in a dispatch mode": within(_Dispatches),
    "in one thread": within(lambda: torch.autograd.set_multithreading_enabled(False)),
    "int32": other_ids(lambda ids: ids.int()),
    "more ids": other_ids(lambda ids: torch.cat([ids, ids.flip(0) // 2, ids])),
    "no ids": other_ids(lambda ids: ids[:0]),
    "strided ids": other_ids(lambda ids: ids.t().contiguous().t()),
}


def _is_possible(change: str, mode: str, kind: str, of: str, dtype: torch.dtype) -> bool:
    # Autograd functions of the other modes have no rule for it, and torch's bags warn of theirs.
    if change == "vmapped":
        return (mode, kind) == ("dense", "rows")
    if change == "nested":
        return kind == "rows"
    return kind == "bags" or change not in ("weighted", "with_offsets", "with_last_offset")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@in_pairs(_is_possible, change=PROGRAM, mode=MODES, kind=KINDS, of=OPTIMIZERS, dtype=DTYPES)
def test_a_program_changes(change: str, mode: str, kind: str, of: str, dtype: torch.dtype) -> None:
    check(PROGRAM[change], kind, mode, of, dtype)


# ---- Other dtypes, lazy steps, forks, compilers ----------------------------------------------------------------------


def low(dtype: torch.dtype) -> Change:
    """Go on in a dtype of two bytes."""

    def change(side: Side) -> Steps:
        yield
        side.optimizer.zero_grad()
        side.module.to(dtype)
        side.optimizer = side.make_optimizer()
        yield

    return change


@pytest.mark.slow
@in_pairs(to=(torch.float16, torch.bfloat16), mode=MODES, kind=KINDS, of=("SGD", "momentum", "Adagrad"))
def test_a_table_becomes_one_of_two_bytes(to: torch.dtype, mode: str, kind: str, of: str) -> None:
    """Compare with torch's table of float32, to the rounding of five steps."""
    mine, theirs = both(kind, mode, of, torch.float32)
    got, want = run(mine, low(to)), run(theirs, low(torch.float32))
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)


@in_pairs(mode=MODES, kind=KINDS)
def test_rows_are_rounded_at_random_once_it_is_set(mode: str, kind: str) -> None:
    """Step by a tenth of the last bit of 1: no element moves before it is set, and about a tenth of them after."""
    side = both(kind, mode, "SGD", torch.float32)[0]
    side.module.to(torch.bfloat16)
    with torch.no_grad():
        side.table.weight.fill_(1.0)
    side.optimizer = side.make_optimizer(lr=2**-8 / 10)
    shares = []
    for is_set in (False, True, False):
        side.group["stochastic_rounding"] = is_set
        for _ in range(4):
            before = side.table.weight.detach().clone()
            side.optimizer.zero_grad()
            side.look_up(torch.arange(40)[:, None])[:, : side.dim].sum().backward()
            side.optimizer.step()
            shares.append((side.table.weight[:40] != before[:40]).float().mean().item())
    assert shares[:4] == shares[8:] == [0.0] * 4
    assert all(0.02 < share < 0.25 for share in shares[4:8])


def lazily(side: Side) -> None:
    """Step the rows alone that have a gradient."""
    if side.is_ours:
        side.optimizer.step()
        return
    places = [(x, x.grad.ne(0).any(1, keepdim=True)) for x in side.module.parameters()]
    kept = [[x.detach().clone(), *(v.clone() for v in side.optimizer.state[x].values() if v.dim())] for x, _ in places]
    side.optimizer.step()
    with torch.no_grad():
        for (x, has), values in zip(places, kept, strict=True):
            after = [x, *(v for v in side.optimizer.state[x].values() if v.dim())]
            for new, old in zip(after, values, strict=True):
                new.copy_(torch.where(has, new, old))


def lazy(side: Side) -> Steps:
    yield
    side.step = lambda: lazily(side)
    if side.is_ours:
        side.group["lazy"] = True
    yield
    side.step = lambda: side.optimizer.step()
    if side.is_ours:
        side.group["lazy"] = False


@in_pairs(mode=MODES, kind=KINDS, dtype=DTYPES)
def test_rows_are_left_alone_once_it_is_lazy(mode: str, kind: str, dtype: torch.dtype) -> None:
    check(lazy, kind, mode, "Adam", dtype)


@in_pairs(mode=MODES, kind=KINDS, of=("momentum", "Adam"))
def test_steps_outgrow_their_first_history(mode: str, kind: str, of: str) -> None:
    """Train more steps than the history of past steps has room for at first: 64."""
    kept = []
    for side in both(kind, mode, of, torch.float64):
        side.train(140)
        kept.append(side.end())
    assert_same(*kept, rounded=False)


@pytest.mark.slow
@needs_fork
@in_pairs(mode=MODES, kind=KINDS, of=OPTIMIZERS)
def test_a_forked_process_goes_on(mode: str, kind: str, of: str) -> None:
    mine, theirs = both(kind, mode, of, torch.float64)
    for side in (mine, theirs):
        side.train(4)

    def some(found: list[float]) -> list[float]:  # as many as a pipe holds
        return found[:7] + found[7::20]

    def go_on() -> list[float]:
        mine.train(3)
        return some(mine.end())

    theirs.train(3)
    want = some(theirs.end())
    for _ in range(2):  # the second child begins where the first one did
        assert_same(json.loads(forked(go_on)), want, rounded=False)
    assert_same(go_on(), want, rounded=False)


@pytest.mark.full
@in_pairs(backend=("eager", "aot_eager"), mode=MODES, kind=("rows", "bags"), of=OPTIMIZERS, dtype=DTYPES)
def test_a_step_is_compiled(backend: str, mode: str, kind: str, of: str, dtype: torch.dtype) -> None:
    def change(side: Side) -> Steps:
        yield
        module = side.module
        if side.is_ours:
            side.module = torch.compile(module, backend=backend)
        yield
        side.module = module

    check(change, kind, mode, of, dtype)
