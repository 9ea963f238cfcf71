"""EmbeddingVariables over ranks beside what else a job has: plans, DDP, clipping, prefetch, tiers, and errors."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import Case, Table, draw, features_of, keys_of, optimizer_of, sharded_of, tables_of, train_step
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torchsparse_rec import distributed, nn, optim
from torchsparse_rec.variable import CounterFilter, EmbeddingVariableOption, LRUEvict, StorageOption

DIM = 4
PLAIN = EmbeddingVariableOption()


def variable_of(**options: Any) -> nn.EmbeddingVariable:
    return nn.EmbeddingVariable(DIM, name="users", **options)


# ---- Plans -----------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Variables, a fixed table, and dense layers."""

    def __init__(self, grad_mode: str | None, target_gpu: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.users = variable_of(grad_mode=grad_mode)
        self.items = nn.EmbeddingVariable(DIM, name="items", grad_mode=grad_mode, target_gpu=target_gpu)
        self.days = nn.Embedding(7, DIM, grad_mode=grad_mode)
        self.top = torch.nn.Linear(3 * DIM, 1)

    def forward(self, keys: Tensor) -> Tensor:
        rows = [self.users(keys), self.items(keys * 3), self.days(keys % 7)]
        return self.top(torch.cat(rows, 1)).squeeze(1)


def planned(plan: Any, constraints: Any = None) -> dict[str, Any]:
    model = distributed.shard(Model(None, 1), plan=plan, constraints=constraints)
    found = {name: each.plan for name, each in distributed.plan_of(model).tables.items()}
    return found | {"text": str(distributed.plan_of(model)), "weight": model.items.weight.device.type}


@pytest.mark.parametrize(
    ("plan", "constraints", "users", "items"),
    [
        ("auto", None, distributed.RowWise(), distributed.TableWise(1)),
        ({"users": "table_wise"}, None, None, distributed.TableWise(1)),
        ({"items": "row_wise"}, None, distributed.RowWise(), distributed.RowWise()),
        ("row_wise", None, distributed.RowWise(), distributed.RowWise()),
        ({"items": "auto"}, {"items": ["row_wise"]}, distributed.RowWise(), distributed.RowWise()),
    ],
)
def test_target_gpu_names_a_rank_where_no_plan_is_given(
    two, plan: Any, constraints: Any, users: Any, items: Any
) -> None:
    for found in two.run(planned, plan, constraints):
        assert found["items"] == items and found["weight"] == "cpu"
        assert found["users"] == users or (users is None and isinstance(found["users"], distributed.TableWise))
        assert "grows" in found["text"]


def test_target_gpu_is_a_rank_as_torchrun_has_started_it(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert variable_of(target_gpu=7).weight.device.type == "cpu"
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises((RuntimeError, AssertionError)):  # no such GPU here
        variable_of(target_gpu=99)


def shard_users(plan: Any, rank_options: dict[int, dict[str, Any]]) -> None:
    distributed.shard(variable_of(**rank_options.get(dist.get_rank(), {})), plan=plan)


def test_shard_refuses(two) -> None:
    for plan, text in [
        ("column_wise", "table 'users', which grows, must be RowWise() or TableWise(), got ColumnWise"),
        ("data_parallel", "table 'users', which grows, must be RowWise() or TableWise(), got Replicated()"),
        (distributed.TableWise(2), "table 'users' must name ranks in [0, 2), got 2"),
    ]:
        assert all(text in str(error) for error in two.errors(shard_users, plan, {}))
    assert all(
        "target_gpu of table 'users' must be a rank, in [0, 2), got 5" in str(error)
        for error in two.errors(shard_users, "auto", {1: {"target_gpu": 5}})
    )
    for options in ({"seed": 3}, {"key_dtype": torch.int32}, {"initializer": 1.0}):
        errors = two.errors(shard_users, "auto", {1: options})
        assert all("all ranks must have the same tables" in str(error) for error in errors), options


def shard_other_keys() -> None:
    variable = variable_of()
    variable(torch.tensor([1, 2, 3 + dist.get_rank()]))
    distributed.shard(variable)


def test_ranks_with_other_keys_are_noticed(two) -> None:
    assert all("all ranks must have the same tables" in str(error) for error in two.errors(shard_other_keys))


# ---- DDP and gradients -----------------------------------------------------------------------------------------------


def around_ddp(grad_mode: str | None) -> Any:
    model = Model(grad_mode, 1)
    distributed.shard(model)
    wrapped = DistributedDataParallel(model)
    optimizer = optim.Adagrad(model.parameters(), lr=0.1, in_backward=grad_mode == "fused")
    rank = dist.get_rank()
    for step in range(3):
        optimizer.zero_grad()
        wrapped(torch.arange(6) * (rank + 2) + step * 1000).square().mean().backward()
        optimizer.step()
    return [keys_of(table, all_ranks=True) for table in (model.users, model.items)], model.top.weight.detach()


def beside_ddp(grad_mode: str | None) -> Any:
    model = Model(grad_mode, -1)
    optimizer = optim.Adagrad(model.parameters(), lr=0.1, in_backward=grad_mode == "fused")
    for step in range(3):
        optimizer.zero_grad()
        model(torch.cat([torch.arange(6) * (rank + 2) + step * 1000 for rank in range(2)])).square().mean().backward()
        optimizer.step()
    return [keys_of(table, all_ranks=False) for table in (model.users, model.items)], model.top.weight.detach()


@pytest.mark.parametrize("grad_mode", ["fused", None])
def test_ddp_leaves_them_out_with_their_keys(two, grad_mode: str | None) -> None:
    wanted, top = beside_ddp(grad_mode)
    for found, its_top in two.run(around_ddp, grad_mode):
        torch.testing.assert_close(its_top, top)
        for mine, its in zip(found, wanted, strict=True):
            assert torch.equal(mine["keys"], its["keys"]) and torch.equal(mine["frequencies"], its["frequencies"])
            torch.testing.assert_close(mine["values"], its["values"])


def in_ddp_of_a_parent() -> None:
    parent = torch.nn.Sequential(distributed.shard(variable_of()), torch.nn.Linear(DIM, 1))
    DistributedDataParallel(parent)(torch.tensor([1, 2]))


def test_a_parents_ddp_is_refused(two) -> None:
    for error in two.errors(in_ddp_of_a_parent):
        assert "leave_out_of_ddp(parent)" in str(error)


def clipped(mode: str, torchs: bool) -> Any:
    variable = distributed.shard(variable_of(grad_mode=mode, initializer=0.0))
    variable(torch.arange(10) + 5 * dist.get_rank()).backward(torch.ones(10, DIM))
    if torchs:
        return torch.nn.utils.clip_grad_norm_(variable.parameters(), 1.0)
    norm = optim.clip_grad_norm_(variable.parameters(), 1.0)
    optim.SGD(variable.parameters(), lr=1.0).step()
    return norm, keys_of(variable, all_ranks=True)["values"]


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_clipping_sees_all_ranks(two, mode: str) -> None:
    gradients = torch.ones(15, DIM) / 2
    gradients[5:10] *= 2
    for norm, values in two.run(clipped, mode, False):
        torch.testing.assert_close(norm, gradients.norm())
        torch.testing.assert_close(values, -gradients / gradients.norm())
    assert all("table 'users' is split over ranks" in str(error) for error in two.errors(clipped, mode, True))


# ---- Prefetch --------------------------------------------------------------------------------------------------------


def train(case: Case, ahead: bool) -> Any:
    module = sharded_of(case)
    optimizer = optimizer_of(case, module)
    batches = [draw(case, step, dist.get_rank()) for step in range(5)]
    turns: Any = [(batch, None) for batch in batches]
    if ahead:
        turns = distributed.prefetch(batches, module, partial(features_of, case))
    results, counts = [], []
    for batch, ids in turns:
        counts.append([child.total_count() for child in module.modules() if isinstance(child, nn.EmbeddingVariable)])
        results += train_step(case, module, optimizer, batch, None, ids)[0]
    return results, counts, tables_of(module, case)


GROWING = (Table(30, 4, ("a", "b"), option=PLAIN), Table(40, 5, ("b",)))
FILTER = EmbeddingVariableOption(filter_option=CounterFilter(filter_freq=3))


@pytest.mark.parametrize("kind", ["bags", "rows"])
@pytest.mark.parametrize("plan", ["row", "table"])
def test_prefetched_keys_are_inserted_in_their_step_with_the_same_bits(two, plan: str, kind: str) -> None:
    tables = (*GROWING, Table(50, 4, ("c",), option=FILTER))
    case = Case(tables, plan, kind, merge=True, batch="many", grad_mode="sparse", optimizer="Adam")
    for with_, without in zip(*(two.run(train, case, ahead) for ahead in (True, False)), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(with_[0], without[0], strict=True))
        assert with_[1] == without[1] and sum(with_[1][0]) == 0
        assert all(torch.equal(x, without[2][name]) for name, x in with_[2].items())


def alone_ahead(plan: Any) -> Any:
    found = []
    for ahead in (True, False):
        variable = distributed.shard(variable_of(), plan=plan)
        batches = [torch.arange(8).view(4, 2) * (dist.get_rank() + 1) + step for step in range(3)]
        turns: Any = [(batch, batch) for batch in batches]
        if ahead:
            turns = distributed.prefetch(batches, variable, lambda batch: batch)
        found.append([variable(ids).detach() for _, ids in turns] + [*keys_of(variable, all_ranks=True).values()])
    return found


@pytest.mark.parametrize("plan", ["row_wise", distributed.TableWise(1)], ids=["row", "table"])
def test_a_variable_alone_prefetches(two, plan: Any) -> None:
    for with_, without in two.run(alone_ahead, plan):
        assert with_[0].shape == (4, 2, DIM)
        assert all(torch.equal(x, y) for x, y in zip(with_, without, strict=True))


def in_other_modes(plan: Any) -> Any:
    """Look prefetched batches up: the second in train() on rank 1 alone, the last in eval() on all."""
    variable, errors = distributed.shard(variable_of(), plan=plan), []
    batches = [torch.arange(4) + 10 * step for step in range(4)]
    for step, (_, ids) in enumerate(distributed.prefetch(batches, variable, lambda batch: batch)):
        variable.train(step in (0, 2) or (step == 1 and dist.get_rank() == 1))
        before = variable.shards.ranks._messages
        errors.append(message_of(lambda ids=ids: variable(ids).sum().backward()))
        assert step == 1 or variable.shards.ranks._messages - before == 2  # results, gradients
    return errors, keys_of(variable, all_ranks=True)["keys"]


@pytest.mark.parametrize("plan", ["row_wise", distributed.TableWise(1)], ids=["row", "table"])
def test_modes_that_differ_after_a_prefetch_are_noticed_and_training_may_go_on(two, plan: Any) -> None:
    for errors, keys in two.run(in_other_modes, plan):
        assert [kind for kind, _ in errors] == ["", "RuntimeError", "", ""]
        assert re.search(r"on rank 0: lookup of .* in eval\(\).*; on rank 1: lookup of .* in train\(\)", errors[1][1])
        assert {0, 1, 2, 3, 20, 21, 22, 23} == set(keys.tolist()) - {10, 11, 12, 13}


# ---- Room ------------------------------------------------------------------------------------------------------------


def least_recent(options: dict[str, Any]) -> Any:
    variable = distributed.shard(variable_of(**options))
    for step in range(8):
        variable(torch.arange(40) + 20 * step)
    export = variable.export()
    return variable.total_count(), variable.stats()["evicted"], int(export.versions.min())


def test_a_capacity_is_shared_by_the_ranks(two) -> None:
    option = EmbeddingVariableOption(evict_option=LRUEvict(capacity=121))
    counts, evicted, oldest = zip(*two.run(least_recent, {"ev_option": option}), strict=True)
    assert max(counts) <= 61 and sum(counts) > 80
    assert min(evicted) > 0 and min(oldest) > 1  # the first keys have gone


def in_tiers(folder: str, tiers: bool) -> Any:
    storage = StorageOption("DRAM_SSD", storage_path=f"{folder}/{dist.get_rank()}", storage_size=[1])
    options = {"ev_option": EmbeddingVariableOption(storage_option=storage)} if tiers else {}
    variable = distributed.shard(variable_of(**options))
    optimizer = optim.Adam(variable.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        variable(torch.arange(12) * 3 + 40 * (step % 4)).square().sum().backward()
        optimizer.step()
    stats = variable.stats()
    return keys_of(variable, all_ranks=True), stats.get("rows_ssd", 0)


def test_tiers_are_of_each_rank(two, tmp_path) -> None:
    got = two.run(in_tiers, str(tmp_path), True)
    wanted = two.run(in_tiers, str(tmp_path), False)
    for (mine, on_disk), (its, _) in zip(got, wanted, strict=True):
        assert on_disk > 0
        assert all(torch.equal(mine[name], its[name]) for name in ("keys", "values", "versions", "frequencies"))


# ---- Errors ----------------------------------------------------------------------------------------------------------


def message_of(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def bad_calls(plan: Any) -> Any:
    rank = dist.get_rank()
    option = EmbeddingVariableOption(evict_option=LRUEvict(capacity=16))
    variable = distributed.shard(variable_of(ev_option=option, key_dtype=torch.int32), plan=plan)
    keys = torch.arange(4, dtype=torch.int32)
    errors = [
        message_of(lambda: variable(keys.float() if rank == 1 else keys)),
        message_of(lambda: variable(keys.long() if rank == 0 else keys)),
        message_of(lambda: variable(torch.arange(200, dtype=torch.int32) if rank == 1 else keys)),
    ]
    if rank == 0:
        variable.eval()
    errors.append(message_of(lambda: variable(keys)))
    variable.train()
    variable(keys).sum().backward()  # and training may go on
    return errors, keys_of(variable, all_ranks=True)["keys"]


@pytest.mark.parametrize("plan", ["row_wise", distributed.TableWise(1)], ids=["row", "table"])
def test_errors_of_one_rank_are_those_of_all(two, plan: Any) -> None:
    wanted = [
        ("ValueError", "rank 1: EmbeddingVariable: input must be int32 or int64, got torch.float32"),
        ("ValueError", "rank 0: EmbeddingVariable: input must be of the key_dtype, int32, got torch.int64"),
        ("RuntimeError", "EmbeddingVariable 'users': a capacity of"),
        ("RuntimeError", "all ranks must make the same calls"),
    ]
    for errors, keys in two.run(bad_calls, plan):
        for (kind, text), (wanted_kind, part) in zip(errors, wanted, strict=True):
            assert kind == wanted_kind and part in text
        assert re.match(r"rank \d: ", errors[2][1]) and set(range(4)) <= set(keys.tolist())


def modes_of_tables() -> None:
    bags = [nn.EmbeddingBagConfig(4, DIM, "bags", feature_names=["f"], ev_option=PLAIN)]
    module = distributed.shard(nn.EmbeddingBagCollection(bags))
    if dist.get_rank() == 1:
        module.embedding_bags["bags"].eval()
    module({"f": torch.tensor([1])})


def test_a_table_in_another_mode_is_noticed(two) -> None:
    assert all("bags in eval()" in str(error) for error in two.errors(modes_of_tables))


# ---- Optimizers made before ------------------------------------------------------------------------------------------


def trained_by(made_before: bool, grad_mode: str) -> dict[str, Tensor]:
    variable = variable_of(grad_mode=grad_mode)
    options = {"lr": 0.1, "in_backward": grad_mode == "fused"}
    optimizer = optim.Adam(variable.parameters(), **options) if made_before else None
    distributed.shard(variable)
    optimizer = optimizer or optim.Adam(variable.parameters(), **options)
    for step in range(3):
        optimizer.zero_grad()
        variable(torch.arange(10) + 3 * step + dist.get_rank()).square().sum().backward()
        optimizer.step()
    return keys_of(variable, all_ranks=True)


@pytest.mark.parametrize("grad_mode", ["fused", "sparse"])
def test_an_optimizer_made_before_goes_on(two, grad_mode: str) -> None:
    for before, after in zip(*(two.run(trained_by, made, grad_mode) for made in (True, False)), strict=True):
        assert all(torch.equal(x, after[name]) for name, x in before.items())


def with_states() -> None:
    variable = variable_of(grad_mode="sparse")
    optimizer = optim.Adam(variable.parameters(), lr=0.1)
    variable(torch.arange(4)).sum().backward()
    optimizer.step()
    distributed.shard(variable)


def test_an_optimizer_with_states_is_refused(two) -> None:
    assert all("Adam, has states of the whole table" in str(error) for error in two.errors(with_states))
