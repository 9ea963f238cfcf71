"""Collections of tables that grow: what a step costs the host, and the lock that their tables have."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchsparse_rec import nn, optim
from torchsparse_rec.jagged import KeyedJaggedTensor
from torchsparse_rec.variable import EmbeddingVariableOption


def collection(tables: int, lookups: int = 1) -> nn.EmbeddingBagCollection:
    """Make a collection of tables, each with several features."""
    option = EmbeddingVariableOption()
    return nn.EmbeddingBagCollection(
        [
            nn.EmbeddingBagConfig(64, 4, f"t{k}", feature_names=[f"f{k}_{j}" for j in range(lookups)], ev_option=option)
            for k in range(tables)
        ],
        grad_mode="fused",
    )


def training(bags: nn.EmbeddingBagCollection) -> Callable[[], None]:
    """Return a step, of which two have been taken."""
    optimizer = optim.Adagrad(bags.parameters(), lr=0.1, in_backward=True)
    features = [name for config in bags._configs for name in config.feature_names]
    ids, counts = torch.arange(4 * len(features)) % 7, [4] * len(features)
    x = KeyedJaggedTensor(features, ids, offsets=torch.arange(len(ids) + 1), length_per_key=counts)

    def step() -> None:
        bags(x).values().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return step


def calls(step: Callable[[], None]) -> int:
    """Count the calls of Python functions in a step, without those of what dies of steps before."""
    gc.collect()
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("lookups", [1, 2])
def test_a_step_of_many_tables_takes_as_many_calls(lookups: int) -> None:
    """Let a table cost no call of its own, and one where its keys must be put together."""
    few, many = (calls(training(collection(tables, lookups))) for tables in (2, 26))
    assert many <= 300 and many - few <= 24 * (lookups - 1)


def test_tables_have_one_lock_in_copies_too() -> None:
    bags = collection(3)
    locks = []
    for each in (bags, copy.deepcopy(bags), pickle.loads(pickle.dumps(bags))):
        training(each)
        (lock,) = {table._lock for table in each.embedding_bags.values()}
        locks.append(lock)
    assert len(set(locks)) == 3


def test_a_step_takes_the_lock_of_all_tables_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count how often the lock is taken: for the keys, for the lookup, and by the optimizer."""
    bags = collection(4)
    step, lock = training(bags), bags.embedding_bags["t0"]._lock
    taken = []
    monkeypatch.setattr(type(lock), "writing", lambda self: taken.append("writing") or self._writing)
    monkeypatch.setattr(type(lock), "reading", lambda self: taken.append("reading") or self._reading)
    step()
    assert taken == ["writing", "reading", "writing"]
