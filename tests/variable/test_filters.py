"""Filters: which keys get a row, when, and which values lookups return before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from variable.cases import rows_of

from torchsparse_rec import optim
from torchsparse_rec.nn import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingVariable,
    lookup_sparse,
)
from torchsparse_rec.variable import CBFFilter, CounterFilter, EmbeddingVariableOption, InitializerOption, L2WeightEvict


def test_a_counter_filter_admits_after_the_nth_occurrence() -> None:
    """Admit keys as DeepRec does: the lookup of the n-th occurrence still returns the default value."""
    option = EmbeddingVariableOption(
        filter_option=CounterFilter(3), init_option=InitializerOption(default_value_no_permission=0.25)
    )
    table = EmbeddingVariable(2, initializer=1.0, ev_option=option)
    assert table(torch.tensor([7, 7, 8]))[:, 0].tolist() == [0.25, 0.25, 0.25]
    assert table(torch.tensor([7, 8]))[:, 0].tolist() == [0.25, 0.25]
    assert table.lookup(torch.tensor([7, 8]))[:, 0].tolist() == [1.0, 0.25]
    assert table(torch.tensor([7, 8, 8, 9]))[:, 0].tolist() == [1.0, 0.25, 0.25, 0.25]
    assert table.export().frequencies.tolist() == [4, 4]
    stats = table.stats()
    assert [stats[name] for name in ("keys", "admitted", "filtered", "waiting")] == [2, 2, 5, 1]
    assert table(torch.tensor([7, 8, 9]))[:, 0].tolist() == [1.0, 1.0, 0.25]


def _deeprec(frequency: int, batches: list[list[int]], default: float, initial: float) -> list[list[float]]:
    """Return what DeepRec's CounterFilter serves: lookups only read; the optimizer (SGD, 0.5) counts and admits."""
    counts: dict[int, int] = {}
    rows: dict[int, float] = {}
    served = []
    for ids in batches:
        served.append([rows.get(key, default) for key in ids])
        for key in dict.fromkeys(ids):
            counts[key] = counts.get(key, 0) + ids.count(key)
            if counts[key] >= frequency:
                # the gradient of sum(x * x), at the values that were looked up
                slope = 2 * rows.get(key, default) * ids.count(key)
                rows[key] = rows.get(key, initial) - 0.5 * slope
    return served


@pytest.mark.parametrize("way", ["sparse", "dense", "fused", "pooled", "collection", "other"])
@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_filters_serve_what_deeprecs_serve(frequency: int, way: str) -> None:
    option = EmbeddingVariableOption(
        filter_option=CounterFilter(frequency), init_option=InitializerOption(default_value_no_permission=0.25)
    )
    mode = way if way in ("sparse", "dense", "fused") else "sparse"
    look_up: Any
    if way == "collection":
        configs = [
            EmbeddingBagConfig(8, 1, name="t", feature_names=["f"], ev_option=option, initializer=1.0),
            EmbeddingBagConfig(8, 1, name="u", feature_names=["g"]),
        ]
        bags = EmbeddingBagCollection(configs, grad_mode="fused")
        table: Any = bags.embedding_bags["t"]
        look_up = lambda ids: bags({k: (ids, torch.arange(len(ids) + 1)) for k in "fg"}).values()[:, :1]  # noqa: E731
        parameters = list(bags.parameters())
    else:
        table = EmbeddingVariable(1, initializer=1.0, ev_option=option, capacity=2, grad_mode=mode)
        look_up = table
        if way == "pooled":
            look_up = lambda ids: lookup_sparse(table, (ids, torch.arange(len(ids) + 1)), "sum")  # noqa: E731
        parameters = list(table.parameters())
    optimizer: Any = torch.optim.SGD(parameters, lr=0.5)
    if way != "other":
        optimizer = optim.SGD(parameters, lr=0.5, in_backward=True)
    batches = [[1, 2, 1], [2, 3], [1, 2, 3, 3, 4], [4, 1], [5, 5, 5, 4, 2], [5, 1, 2, 3, 4]]
    served = []
    for ids in batches:
        optimizer.zero_grad()
        values = look_up(torch.tensor(ids))
        served.append(values.detach().flatten().tolist())
        values.square().sum().backward()
        optimizer.step()
    assert served == _deeprec(frequency, batches, 0.25, 1.0)
    assert look_up(torch.tensor([5])).item() == table.lookup(torch.tensor([5])).item() == rows_of(table)[5][0]


@pytest.mark.parametrize("what", ["export", "save", "state_dict", "insert", "erase", "evict", "copy"])
def test_rows_that_were_admitted_at_this_step_are_seen_as_they_begin(what: str, tmp_path: Path) -> None:
    option = EmbeddingVariableOption(filter_option=CounterFilter(1), evict_option=L2WeightEvict(0.5))
    table = EmbeddingVariable(1, initializer=3.0, ev_option=option)
    optimizer = optim.SGD(table.parameters(), lr=0.5)
    values = table(torch.tensor([1, 2]))
    assert values.tolist() == [[0.0], [0.0]]
    wanted = {1: [3.0], 2: [3.0]}
    other = EmbeddingVariable(1, ev_option=option)
    if what == "save":
        table.save(tmp_path)
        other.restore(tmp_path)
        assert rows_of(other) == wanted
    elif what == "state_dict":
        other.load_state_dict(table.state_dict())
        assert rows_of(other) == wanted
    elif what == "copy":
        assert rows_of(copy.deepcopy(table)) == wanted
    elif what == "insert":
        table.insert([2], [[7.0]])
        wanted[2] = [7.0]
    elif what == "erase":
        table.erase([2])
        del wanted[2]
        values = values[:1]
    elif what == "evict":
        assert table.evict() == 0
    assert rows_of(table) == wanted
    values.sum().backward()
    optimizer.step()
    assert rows_of(table) == {key: [x[0] - 0.5] for key, x in wanted.items()}


def test_a_bloom_filter_is_never_late() -> None:
    option = CBFFilter(3, max_element_size=1000, false_positive_probability=0.01, counter_type=torch.int8)
    table = EmbeddingVariable(2, ev_option=EmbeddingVariableOption(filter_option=option))
    keys = torch.arange(1000)
    table(keys)
    table(keys)
    assert table.total_count() <= 30
    table(keys)
    assert table.total_count() == 1000
    assert table.stats()["bytes_filter"] == option.nbytes
