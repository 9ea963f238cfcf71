"""EmbeddingVariables over ranks by themselves: lookups of one process, and what their methods do with a rank's keys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import keys_of
from torch import Tensor

from torchsparse_rec import distributed, nn, optim
from torchsparse_rec.variable import CounterFilter, EmbeddingVariableOption, InitializerOption

DIM, STEPS = 4, 4
FILTERED = EmbeddingVariableOption(
    filter_option=CounterFilter(filter_freq=2), init_option=InitializerOption(default_value_no_permission=0.25)
)


def variable_of(**options: Any) -> nn.EmbeddingVariable:
    return nn.EmbeddingVariable(DIM, name="users", **options)


def batch(step: int, rank: int, dtype: torch.dtype, empty: bool) -> Tensor:
    """Draw the keys of a rank, ``[B, 2]``: few of them are frequent; rank 1 may have none."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    examples = 0 if empty and rank == 1 else 5 + 3 * rank
    return ((torch.rand(examples, 2, generator=generator) ** 2 * 30).long() * 70_000_003 - 9).to(dtype)


def train(module: Any, batches: list[Tensor], mode: str | None, factor: float) -> tuple[list[Tensor], list[Tensor]]:
    """Train on batches; return the results, and those in ``eval()`` for keys of which some are unknown."""
    optimizer = optim.Adam(module.parameters(), lr=0.1, in_backward=mode == "fused")
    results, unknown = [], []
    for keys in batches:
        optimizer.zero_grad()
        result = module(keys)
        result.backward((result.detach() - 1) * factor)
        optimizer.step()
        results.append(result.detach())
        module.eval()
        with torch.no_grad():
            unknown.append(module(keys + 1))
        known = module(keys)  # with gradients to the rows that there are
        optimizer.zero_grad()
        if mode == "sparse":
            known.backward(known.detach() * factor)
            optimizer.step()
        unknown.append(known.detach())
        module.train()
    return results, unknown


def on_rank(plan: Any, mode: str | None, dtype: torch.dtype, empty: bool, merge: bool, options: dict) -> Any:
    module = distributed.shard(variable_of(grad_mode=mode, key_dtype=dtype, **options), plan=plan, merge=merge)
    rank = dist.get_rank()
    results = train(module, [batch(step, rank, dtype, empty) for step in range(STEPS)], mode, 1.0)
    return *results, keys_of(module, all_ranks=True)


def alone(ranks: int, mode: str | None, dtype: torch.dtype, empty: bool, options: dict) -> Any:
    module = variable_of(grad_mode=mode, key_dtype=dtype, **options)
    parts = [[batch(step, rank, dtype, empty) for rank in range(ranks)] for step in range(STEPS)]
    results = train(module, [torch.cat(its) for its in parts], mode, 1 / ranks)
    sizes = [len(part) for part in parts[0]]
    split = [[x.split(sizes) for x in each] for each in results]
    contents = keys_of(module, all_ranks=False)
    return [(*([x[rank] for x in each] for each in split), contents) for rank in range(ranks)]


# Daily: each option under each plan, split over three ranks, or on one of two.
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        pytest.param("row_wise", 3, id="row-3"),
        pytest.param(distributed.TableWise(1), 2, id="table-2"),
        pytest.param("row_wise", 2, id="row-2", marks=pytest.mark.slow),
        pytest.param(distributed.TableWise(1), 3, id="table-3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("mode", "dtype", "empty", "options"),
    [
        ("fused", torch.int64, True, {}),
        ("sparse", torch.int32, False, {"ev_option": FILTERED}),
        ("dense", torch.int64, False, {"initializer": torch.nn.init.normal_}),
        (None, torch.int64, True, {"ev_option": FILTERED, "capacity": 4}),
        # So small that parts and the whole choose the same gradients: Adam's idle rows round otherwise in each.
        ("auto", torch.int64, False, {"dtype": torch.float64, "capacity": 64}),
    ],
    ids=["fused", "sparse-int32-filtered", "dense-function", "default-filtered", "auto-float64"],
)
def test_the_bits_of_one_process(
    pool_of, ranks: int, plan: Any, mode: str | None, dtype: torch.dtype, empty: bool, options: dict
) -> None:
    got = pool_of(ranks).run(on_rank, plan, mode, dtype, empty, False, options)
    for ours, theirs in zip(got, alone(ranks, mode, dtype, empty, options), strict=True):
        for mine, its in zip(ours[:2], theirs[:2], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(mine, its, strict=True))
        assert ours[2].keys() == theirs[2].keys()
        assert [name for name, x in ours[2].items() if not torch.equal(x, theirs[2][name])] == []


@pytest.mark.parametrize("ranks", [2, 3])
def test_merged_keys_are_counted_as_often_as_they_occur(pool_of, ranks: int) -> None:
    options = {"ev_option": FILTERED}
    got = pool_of(ranks).run(on_rank, "row_wise", "sparse", torch.int64, False, True, options)
    for ours, theirs in zip(got, alone(ranks, "sparse", torch.int64, False, options), strict=True):
        for name in ("keys", "versions", "frequencies", "filtered", "waiting", "admitted"):
            assert torch.equal(ours[2][name], theirs[2][name]), name
        assert int(ours[2]["frequencies"].max()) > ranks
        torch.testing.assert_close(ours[2]["values"], theirs[2]["values"], rtol=1e-4, atol=1e-5)


# ---- What ranks keep, and what they do with it -----------------------------------------------------------------------


def shared_of(plan: Any = "row_wise", **options: Any) -> Any:
    return distributed.shard(variable_of(**options), plan=plan)


def filled() -> tuple[nn.EmbeddingVariable, Tensor]:
    """Return a variable with rows and with keys that its filter still counts, and its rows' keys."""
    variable = variable_of(ev_option=FILTERED, capacity=100)
    keys = torch.arange(64) * 4096
    variable(torch.cat([keys, keys, keys[:10] + 1]))
    variable(keys[:5])
    return variable, keys


def after_shard(plan: Any) -> Any:
    variable, keys = filled()
    distributed.shard(variable, plan=plan)
    before = keys_of(variable, all_ranks=True)
    counts = variable.total_count(), variable.stats()["capacity"], variable.stats()["waiting"]
    variable(keys[:10] + 1)  # seen once before, by each rank's filter
    return before, counts, keys_of(variable, all_ranks=True)["keys"]


@pytest.mark.parametrize("plan", ["row_wise", distributed.TableWise(1)], ids=["row", "table"])
def test_rows_that_were_there_stay_on_one_rank_each(two, plan: Any) -> None:
    found = two.run(after_shard, plan)
    variable, keys = filled()
    whole = keys_of(variable, all_ranks=False)
    for before, _, after in found:
        assert [name for name in before if name not in ("admitted", "filtered")] == [
            name for name, x in before.items() if name not in ("admitted", "filtered") and torch.equal(x, whole[name])
        ]
        assert torch.equal(after, torch.cat([keys, keys[:10] + 1]).sort().values)
    counts, capacities, waiting = zip(*[each for _, each, _ in found], strict=True)
    assert sum(counts) == 64 and sum(waiting) == 10
    if plan == "row_wise":
        assert 0 < min(counts) and capacities == (50, 50)  # keys with equal low bits fall on both
    else:
        assert counts == (0, 64) and capacities == (2, 100)


def spread(ranks: int) -> list[int]:
    variable = shared_of()
    keys = torch.arange(3000) << 40 if dist.get_rank() == 0 else torch.empty(0, dtype=torch.int64)
    variable(keys)
    counts = [None] * ranks
    dist.all_gather_object(counts, variable.total_count())
    return counts  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", [2, 3])
def test_keys_with_equal_low_bits_fall_evenly(pool_of, ranks: int) -> None:
    (counts, *_) = pool_of(ranks).run(spread, ranks)
    assert sum(counts) == 3000 and max(counts) < 1.15 * 3000 / ranks


def methods(plan: Any) -> Any:
    variable = shared_of(plan)
    keys = torch.arange(20) * 977
    variable.insert(keys, torch.arange(20.0).unsqueeze(1).expand(20, DIM), torch.arange(20), torch.arange(20))
    inserted = keys_of(variable, all_ranks=True)
    variable.eval()
    with torch.no_grad():
        values = variable(keys)
    erased = variable.erase(keys[:5])
    again = variable.insert_export({"v-keys": keys[:5].numpy(), "v-values": torch.ones(5, DIM).numpy()})
    return inserted, values, erased, again, variable.evict(), keys_of(variable, all_ranks=True)["keys"]


@pytest.mark.parametrize("plan", ["row_wise", distributed.TableWise(0)], ids=["row", "table"])
def test_methods_are_of_a_ranks_own_keys(two, plan: Any) -> None:
    found = two.run(methods, plan)
    keys = torch.arange(20) * 977
    for inserted, values, *_, evicted, after in found:
        assert torch.equal(inserted["keys"], keys)
        assert torch.equal(inserted["frequencies"], torch.arange(20))
        assert torch.equal(inserted["versions"], torch.arange(20))
        assert torch.equal(inserted["values"], torch.arange(20.0).unsqueeze(1).expand(20, DIM))
        assert torch.equal(values, inserted["values"])  # each key is looked up where it was inserted
        assert evicted == 0 and torch.equal(after, keys)
    assert sum(each[2] for each in found) == sum(each[3] for each in found) == 5


def refused(folder: str) -> list[str]:
    texts = []
    bags = [nn.EmbeddingBagConfig(4, DIM, "bags", feature_names=["f"], ev_option=EmbeddingVariableOption())]
    model = torch.nn.ModuleDict({"users": variable_of(), "bags": nn.EmbeddingBagCollection(bags)})
    state = {name: torch.clone(x) for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    distributed.shard(model)
    users, child = model["users"], model["bags"].embedding_bags["bags"]
    calls = [
        lambda: model.state_dict(),
        lambda: users.state_dict(),
        lambda: model.load_state_dict(state, strict=False),
        lambda: distributed.full_state_dict(model),
        lambda: users.save(folder),
        lambda: users.save_delta(folder),
        lambda: users.restore(folder),
        lambda: users.lookup(torch.tensor([1])),
        lambda: child(torch.tensor([1])),
        lambda: child.lookup(torch.tensor([1])),
        lambda: copy.deepcopy(model),
        lambda: torch.export.export(users.eval(), (torch.tensor([1]),)),
    ]
    for call in calls:
        try:
            call()
        except (RuntimeError, TypeError) as error:
            texts.append(str(error))
    return texts


def test_what_would_see_one_ranks_keys_alone_is_refused(two, tmp_path) -> None:
    for texts in two.run(refused, str(tmp_path)):
        assert len(texts) == 12
        assert all("table 'users' is split over ranks" in text for text in [*texts[1:2], *texts[4:8]])
        assert all("call torchsparse_rec.checkpoint.save(" in texts[k] for k in (0, 1, 3, 4, 5))
        assert all("call torchsparse_rec.checkpoint.load(" in texts[k] for k in (2, 6))
        assert all("the module that distributed.shard() has split" in text for text in texts[7:10])
        assert "call torchsparse_rec.checkpoint.save(" in texts[10] and "tables are split over ranks" in texts[11]
