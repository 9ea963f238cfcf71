"""Ranks that do different things: an error on every rank that names what both do, and no abort."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import Case, collection_of, draw, features_of, look_up, optimizer_of, plans_of, train_step
from distributed.pool import Pool

from torchsparse_rec import distributed

PLANS = ["row", "table", "column"]


class Model(torch.nn.Module):
    """Two collections."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.users, self.items = collection_of(case), collection_of(case, seed=1)


def sharded(case: Case, device: str, timeout: float = 300) -> tuple[Model, Any]:
    """Return this rank's model and its optimizer."""
    model = Model(case).to(device)
    distributed.shard(model, plan=plans_of(case, dist.get_world_size()), timeout=timeout)
    return model, optimizer_of(case, model)


def features(case: Case, device: str) -> Any:
    """Return this rank's features."""
    return features_of(case, draw(case, 0, dist.get_rank(), device))


def other_module(case: Case, device: str) -> None:
    model, _ = sharded(case, device)
    (model.users if dist.get_rank() == 0 else model.items)(features(case, device))


def train_beside_eval(case: Case, device: str) -> None:
    model, _ = sharded(case, device)
    if dist.get_rank() == 1:
        model.eval()
    model.users(features(case, device))


def one_lookup_more(case: Case, device: str) -> None:
    model, _ = sharded(case, device, timeout=8)  # they find out after a part of it
    results = look_up(case, model.users, draw(case, 0, dist.get_rank(), device))
    if dist.get_rank() == 1:
        model.users(features(case, device))
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def one_without_gradients(case: Case, device: str) -> None:
    model, _ = sharded(case, device)
    with torch.set_grad_enabled(dist.get_rank() == 0):
        results = look_up(case, model.users, draw(case, 0, dist.get_rank(), device))
    if dist.get_rank() == 0:
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    else:
        model.users(features(case, device))


def other_order(case: Case, device: str) -> None:
    model, _ = sharded(case, device)
    modules = [model.users, model.items]
    results = [look_up(case, module, draw(case, 0, dist.get_rank(), device)) for module in modules]
    for its in results if dist.get_rank() == 0 else reversed(results):
        torch.autograd.backward(its, [torch.ones_like(result) for result in its])


def trains(case: Case, device: str) -> None:
    model, optimizer = sharded(case, device)
    train_step(case, model.users, optimizer, draw(case, 0, dist.get_rank(), device), None)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("function", "named"),
    [
        (other_module, ("users", "items")),
        (train_beside_eval, ("train", "eval")),
        pytest.param(one_lookup_more, ("lookup of users", "gradients of users"), marks=pytest.mark.slow),
        (one_without_gradients, ("lookup of users in train(), with g", "lookup of users in train(), without g")),
        (other_order, ("gradients of users", "gradients of items")),
    ],
)
def test_both_are_named(pool_of, device: str, function: Callable[..., Any], named: tuple[str, str], plan: str) -> None:
    pool, case = pool_of(2), Case(plan=plan, batch="even")
    for error in pool.errors(function, case, device):
        assert type(error) is RuntimeError, error
        assert all(word in str(error) for word in (*named, "rank 0", "rank 1")), error
    pool.run(trains, case, device)  # on the same groups


# ---- Ranks that do not come ------------------------------------------------------------------------------------------


def some_alone(case: Case, device: str, ranks: list[int]) -> None:
    """Evaluate on some ranks alone; the others go on without a call."""
    model, _ = sharded(case, device, timeout=2)
    if dist.get_rank() in ranks:
        with torch.no_grad():
            model.eval().users(features(case, device))


@pytest.mark.parametrize("plan", PLANS)
def test_a_call_that_one_rank_alone_makes_names_the_other(device: str, plan: str) -> None:
    with Pool(2, device) as pool:
        alone, other = pool.outcomes(some_alone, Case(plan=plan), device, [0])
    assert other.error is None, other.text
    assert type(alone.error) is RuntimeError, alone.text
    assert re.search("lookup of users in eval.* rank 1\\b", str(alone.error)), alone.error


def test_all_ranks_that_did_not_come_are_named(device: str) -> None:
    with Pool(4, device) as pool:
        outcomes = pool.outcomes(some_alone, Case(plan="row"), device, [0, 2])
    for rank in (0, 2):
        assert type(outcomes[rank].error) is RuntimeError, outcomes[rank].text
        assert re.search("ranks 1, 3\\b", str(outcomes[rank].error)), outcomes[rank].error
    assert outcomes[1].error is outcomes[3].error is None


def skips_backward(case: Case, device: str, goes_on: bool) -> None:
    """Train two steps; in the first one rank continues after forward."""
    model, optimizer = sharded(case, device, timeout=2)
    for step in range(2):
        results = look_up(case, model.users, draw(case, step, dist.get_rank(), device))
        if dist.get_rank() == 1:
            if goes_on:
                continue
            return
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        optimizer.step()


@pytest.mark.parametrize("plan", PLANS)
def test_a_rank_that_skips_a_backward_and_goes_on(device: str, plan: str) -> None:
    with Pool(2, device) as pool:
        first, other = pool.outcomes(skips_backward, Case(plan=plan), device, True)
    for outcome in (first, other):
        assert type(outcome.error) is RuntimeError, outcome.text
        assert "users" in str(outcome.error) and "rank" in str(outcome.error), outcome.error


@pytest.mark.parametrize("plan", PLANS)
def test_a_rank_that_skips_a_backward_and_calls_nothing_more(device: str, plan: str) -> None:
    with Pool(2, device) as pool:
        first, other = pool.outcomes(skips_backward, Case(plan=plan), device, False)
    assert other.error is None, other.text
    assert type(first.error) is RuntimeError, first.text
    assert re.search("gradients of users in train.* rank 1\\b", str(first.error)), first.error


# ---- Ranks that end --------------------------------------------------------------------------------------------------


def one_is_killed(case: Case, device: str, before: str) -> None:
    """Train; one rank is killed before its second lookup or its second backward."""
    model, _ = sharded(case, device)
    for step in range(2):
        if step == 1 and before == "lookup" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        results = look_up(case, model.users, draw(case, step, dist.get_rank(), device))
        if step == 1 and before == "backward" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])


@pytest.mark.parametrize("before", ["lookup", "backward"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_rank_that_is_killed_is_an_error_on_the_others(device: str, plan: str, before: str) -> None:
    with Pool(2, device) as pool:  # its calls end after a third of the timeout
        left, killed = pool.outcomes(one_is_killed, Case(plan=plan), device, before, seconds=100)
    assert "exit code -9" in killed.text
    assert isinstance(left.error, RuntimeError), left.text
