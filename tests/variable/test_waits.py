"""Tables on CUDA: the host does not wait for the device in a step in which no table need grow."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from calls import assert_same_bits
from torch import Tensor
from variable.like_cuda import LikeCuda

from torchsparse_rec import nn, optim
from torchsparse_rec.jagged import KeyedJaggedTensor
from torchsparse_rec.variable import CounterFilter, EmbeddingVariableOption, GlobalStepEvict, LRUEvict

# Of each table. Ids of the first fit in few rows, of which a batch has more; those of the last are nearly all distinct.
KEYS, BATCH, OPTION = (3, 40, 5000), 64, EmbeddingVariableOption()
FEATURES = [f"f{k}" for k in range(len(KEYS))]


class Model:
    """A collection of tables that grow, and its optimizer."""

    def __init__(self, option: EmbeddingVariableOption = OPTION) -> None:
        configs = [nn.EmbeddingBagConfig(48, 4, name, feature_names=[name], ev_option=option) for name in FEATURES]
        self.bags = nn.EmbeddingBagCollection(configs, grad_mode="fused")
        self.optimizer = optim.Adagrad(self.bags.parameters(), lr=0.1, in_backward=True)

    def step(self, features: KeyedJaggedTensor) -> Tensor:
        values = self.bags(features).values()
        values.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return values.detach()

    def tables(self) -> list[nn.EmbeddingVariable]:
        return list(self.bags.embedding_bags.values())


def batches(count: int) -> list[KeyedJaggedTensor]:
    random, made = torch.Generator().manual_seed(5), []
    for _ in range(count):
        ids = torch.cat([torch.randint(0, keys, (BATCH,), generator=random) for keys in KEYS])
        offsets, counts = torch.arange(len(ids) + 1), [BATCH] * len(KEYS)
        made.append(KeyedJaggedTensor(FEATURES, ids, offsets=offsets, length_per_key=counts))
    return made


def test_a_step_waits_only_where_a_table_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, given = Model(), batches(60)
    wanted = [plain.step(features) for features in given]
    model, device = Model(), LikeCuda(monkeypatch)
    for k, (features, values) in enumerate(zip(given, wanted, strict=True)):
        before, _ = [table.keys.capacity for table in model.tables()], device.count()
        assert_same_bits(model.step(features), values)
        waits, grown = device.count(), before != [table.keys.capacity for table in model.tables()]
        assert grown == (waits > 0), f"step {k}: {waits} waits, grown: {grown}"
    monkeypatch.undo()
    for table, other in zip(model.tables(), plain.tables(), strict=True):
        for one, two in zip(table.export(), other.export(), strict=True):
            assert_same_bits(one, two)


def test_counters_that_come_late_are_waited_for_once_there_is_no_other_room(monkeypatch: pytest.MonkeyPatch) -> None:
    given, model = batches(72), Model()
    device = LikeCuda(monkeypatch, arrives=lambda: False)
    for features in given[:60]:
        model.step(features)
    capacities = [table.keys.capacity for table in model.tables()]
    device.count()
    waits = []
    for features in given[60:]:
        model.step(features)
        waits.append(+device.waits)
        device.count()
    assert capacities == [table.keys.capacity for table in model.tables()]
    # The first tables have room for a batch more than they need: not every step finds it used up.
    assert all(each in ({}, {"synchronize": 1}) for each in waits) and 0 < sum(map(bool, waits)) <= 8, waits


@pytest.mark.parametrize("evict", [LRUEvict(90), GlobalStepEvict(steps_to_live=3)], ids=["capacity", "steps"])
def test_evictions_are_those_of_the_cpu(evict: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    option = EmbeddingVariableOption(evict_option=evict)
    plain, given = Model(option), batches(30)
    wanted = [plain.step(features) for features in given]
    model, _ = Model(option), LikeCuda(monkeypatch)
    for features, values in zip(given, wanted, strict=True):
        assert_same_bits(model.step(features), values)


def test_what_is_on_its_way_keeps_no_table_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = Model(), LikeCuda(monkeypatch)
    model.step(batches(1)[0])
    keys = weakref.ref(model.tables()[0].keys)
    gc.disable()
    try:
        assert keys() is not None and keys().known.coming is not None
        del model
        assert keys() is None
    finally:
        gc.enable()


def test_a_filter_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    option = EmbeddingVariableOption(filter_option=CounterFilter(3))
    make = lambda: nn.EmbeddingVariable(4, capacity=16, ev_option=option)  # noqa: E731
    batches = [torch.arange(k, k + 20) % 30 for k in range(30)]
    plain = make()
    wanted = [plain(ids).detach() for ids in batches]
    table, device = make(), LikeCuda(monkeypatch)
    for k, (ids, values) in enumerate(zip(batches, wanted, strict=True)):
        device.count()
        assert_same_bits(table(ids).detach(), values)
        assert k < 10 or not device.count(), device.waits
