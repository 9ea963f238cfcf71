"""Plans that kernels hold: calls by a number have the bits and errors of the operators that they stand for."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import assert_same_bits
from forks import forked, needs_fork
from ops.test_embedding_collection import copies
from samples.embedding_collection import STEPS, Collection, optimizer_of, random_collection
from samples.row_optimizer import IDLE_RULES, RULES
from torch import Tensor

from torchsparse_rec.compat._parity.reference import MAX, MEAN, SUM

CPU = torch.ops.torchsparse_rec
SGD = (0, [0.5, 0.0, 0.0, 0.0, 0.0])


def example(seed: int = 0, rows: int = 50, lengths: int = 3, **more: Any) -> Collection:
    """Return three tables, of which two features look one up."""
    given = {"rows": (rows, 7, rows), "dims": (8, 3, 16), "tables": (0, 1, 2, 0), "keys": (0, 1, 2, 2)}
    given |= {"modes": (SUM, MEAN, SUM, SUM), "bags": (4, 4, 4), "lengths": [lengths] * 12, "padding_idx": (-1, 2, -1)}
    return random_collection("", **(given | {"seed": seed} | more))


def plan_of(ops: Any, x: Collection, states: list[Tensor], last_steps: list[Tensor]) -> int:
    """Return the number of a plan of a collection."""
    lists = (x.tables, x.keys, x.modes, x.padding_idx)
    return ops.collection_plan.default(x.weights, states, last_steps, *lists, False, [], [])


def by_plan(ops: Any, x: Collection, plan: int) -> tuple[Tensor, Tensor]:
    """Return results and argmax of the lookup."""
    return ops.planned_collection.default(x.weights, *x.inputs, list(x.bags), x.side_by_side, plan)


def stepped(ops: Any, x: Collection, name: str, by_number: bool) -> list[Tensor]:
    """Return what a lookup of rows as of now, a step and a lookup of rows as stored give, then tables and states."""
    rule, h = RULES[name]
    weights = copies(x.weights)
    states, last_steps, history = optimizer_of(x, [0, 1, 2], rule, h, 5, with_history=name in IDLE_RULES)
    lists = (x.tables, x.keys, x.modes, list(x.bags), x.padding_idx, x.side_by_side)
    its_bags, now = (list(x.bags), x.side_by_side), (rule, h, 3 + STEPS, 3)
    plan = ops.collection_plan.default(weights, states, last_steps, *lists[:3], x.padding_idx, True, [], [])
    results = []
    if history is not None and by_number:
        results += ops.planned_collection_current.default(weights, history, *x.inputs, *its_bags, *now, plan)
    elif history is not None:
        inputs = (history, *x.inputs, *lists)
        results += ops.embedding_collection_current.default(weights, states, last_steps, *inputs, *now)
    inputs, now = (x.grad, *x.inputs, x.argmax()), (rule, h, 4 + STEPS, 3)
    if by_number:
        ops.planned_collection_update_.default(weights, history, *inputs, *its_bags, *now, plan)
        results += ops.planned_collection.default(weights, *x.inputs, *its_bags, plan)
    else:
        rest = (history, *inputs, *lists, [True] * 3, None, *now, True, [], [])
        ops.embedding_collection_update_.default(weights, states, last_steps, *rest)
        results += ops.embedding_collection.default(weights, *x.inputs, *lists, False)
    ops.collection_plan_free.default(x.indices, plan)
    return [*copies(results), *weights, *states, *last_steps]


def check_steps(ops: Any, x: Collection, name: str) -> None:
    """Check that steps by a plan's number have the bits of steps by lists."""
    for mine, theirs in zip(stepped(ops, x, name, True), stepped(ops, x, name, False), strict=True):
        assert_same_bits(mine, theirs)


CASES = [
    example(),
    example(side_by_side=False, dtype=torch.float64, index=torch.int32),
    example(weighted=True, dtype=torch.bfloat16),
    example(modes=(MAX, MEAN, SUM, MAX), side_by_side=False),
    example(lengths=0),
]


@pytest.mark.parametrize("name", ["plain_sgd", "adam", "rowwise_adagrad", "momentum"])
@pytest.mark.parametrize("x", CASES)
def test_steps_have_the_bits_of_steps_by_lists(x: Collection, name: str) -> None:
    check_steps(CPU, x, name)


@pytest.mark.parametrize("number", [0, -1, 2**62, -(2**63)])
def test_a_number_of_no_plan_is_refused(number: int) -> None:
    x, inputs = example(), (list(example().bags), True)
    text = f"plan must be the number of a collection_plan of this device that has not been freed, got {number}"
    now = (*SGD, 1, 0, number)
    with pytest.raises(ValueError, match=re.escape(f"planned_collection: {text}")):
        by_plan(CPU, x, number)
    with pytest.raises(ValueError, match=re.escape(f"planned_collection_current: {text}")):
        CPU.planned_collection_current.default(x.weights, torch.zeros(2, 12), *x.inputs, *inputs, *now)
    before = [weight.clone() for weight in x.weights]
    with pytest.raises(ValueError, match=re.escape(f"planned_collection_update_: {text}")):
        CPU.planned_collection_update_.default(x.weights, None, x.grad, *x.inputs, None, *inputs, *now)
    assert all(map(torch.equal, before, x.weights))
    CPU.collection_plan_free.default(x.indices, number)  # is let alone


def test_a_plan_that_was_freed_is_refused_and_its_number_is_not_given_again() -> None:
    x = example()
    plan = plan_of(CPU, x, [], [])
    by_plan(CPU, x, plan)
    CPU.collection_plan_free.default(x.indices, plan)
    other = plan_of(CPU, x, [], [])
    assert other != plan
    with pytest.raises(ValueError, match="that has not been freed"):
        by_plan(CPU, x, plan)
    CPU.collection_plan_free.default(x.indices, plan)  # a second time
    by_plan(CPU, x, other)
    CPU.collection_plan_free.default(x.indices, other)


def test_a_plan_holds_states_until_it_is_freed_and_never_tables() -> None:
    x, state = example(), torch.zeros(50, 8)
    weight, held = weakref.ref(x.weights[0]), weakref.ref(state)
    plan = CPU.collection_plan.default(x.weights[:1], [state], [], [0], [0], [SUM], [-1], False, [], [])
    probe = x.indices
    del x, state
    gc.collect()
    assert weight() is None
    assert held() is not None
    CPU.collection_plan_free.default(probe, plan)
    assert held() is None


def refused(error: type[Exception], text: str, x: Collection, plan: int) -> None:
    """Check a lookup's error: by the plan's number as by lists."""
    with pytest.raises(error, match=re.escape(text)):
        by_plan(CPU, x, plan)
    with pytest.raises(error, match=re.escape(text)):
        CPU.embedding_collection.default(x.weights, *x.inputs, *x.lists, False)


def test_calls_check_their_arguments_each_time() -> None:
    """Refuse tables, ids and bags that fit the plan no longer, and go on with those that do."""
    x = example()
    plan, ids = plan_of(CPU, x, [], []), x.indices.clone()
    expected, weights = by_plan(CPU, x, plan)[0], x.weights
    ids[0] = 2
    y = replace(x, weights=[weights[0][:2], *weights[1:]], indices=ids)  # its rows were cut off
    refused(IndexError, "embedding_collection: indices[0] must be in [0, 2), got 2", y, plan)
    y = replace(x, weights=weights[:2])
    refused(ValueError, "embedding_collection: padding_idx must have one entry for each table, 2, got 3", y, plan)
    y = replace(x, weights=[weights[0].double(), *weights[1:]])
    refused(ValueError, "weights[1] must have the dtype of weights[0], Double, got Float", y, plan)
    y = replace(x, bags=(4, 4))
    refused(ValueError, "embedding_collection: keys[2] must be in [0, 2), got 2", y, plan)
    assert torch.equal(by_plan(CPU, x, plan)[0], expected)
    CPU.collection_plan_free.default(x.indices, plan)


@pytest.mark.usefixtures("one_thread")
def test_threads_make_use_and_free_plans_side_by_side() -> None:
    x = example()
    shared, expected = plan_of(CPU, x, [], []), CPU.embedding_collection.default(x.weights, *x.inputs, *x.lists, False)
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(100):
            mine = plan_of(CPU, x, [], [])
            for plan in (mine, shared):
                if not torch.equal(by_plan(CPU, x, plan)[0], expected[0]):
                    wrong.append(plan)
            CPU.collection_plan_free.default(x.indices, mine)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    CPU.collection_plan_free.default(x.indices, shared)
    assert not wrong


@needs_fork
@pytest.mark.usefixtures("one_thread")
def test_a_forked_process_has_the_plans_though_other_threads_were_making_some() -> None:
    x, stop = example(), threading.Event()
    plan = plan_of(CPU, x, [], [])
    expected = by_plan(CPU, x, plan)[0].sum().item()

    def make() -> None:
        while not stop.is_set():
            CPU.collection_plan_free.default(x.indices, plan_of(CPU, x, [], []))

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            there = forked(lambda: (by_plan(CPU, x, plan)[0].sum().item(), plan_of(CPU, x, [], []) > plan))
            assert there == str((expected, True))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    CPU.collection_plan_free.default(x.indices, plan)
