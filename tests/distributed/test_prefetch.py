"""Batches whose ids travel ahead: the same bits, one message in a lookup, an end and errors that all ranks share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import (
    Batch,
    Case,
    draw,
    features_of,
    look_up,
    optimizer_of,
    sharded_of,
    tables_of,
    train_step,
)
from torch import Tensor

from torchsparse_rec import distributed, nn

PLANS = ["row", "table", "column", "replicated", "mixed"]


def none_of(batch: Batch) -> Batch:
    """Return a batch without examples."""
    parts = [{name: x[:0] for name, x in each.items()} for each in (batch.ids, batch.lengths, batch.weights)]
    return Batch(*parts, [target[:0] for target in batch.targets])


def batches_of(case: Case, count: int, device: str) -> list[Batch]:
    """Return this rank's batches."""
    return [draw(case, step, dist.get_rank(), device) for step in range(count)]


def train(case: Case, device: str, counts: list[int], ahead: bool) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Train on ``counts[rank]`` batches, and on empty ones while others have more; return results and tables."""
    module = sharded_of(case, device)
    optimizer = optimizer_of(case, module)
    batches = batches_of(case, counts[dist.get_rank()], device)
    empty = none_of(draw(case, 0, 0, device))
    if ahead:
        turns: Any = distributed.prefetch(batches, module, partial(features_of, case), empty)
    else:
        turns = [(batch, None) for batch in [*batches, *[empty] * (max(counts) - len(batches))]]
    results = []
    for batch, ids in turns:
        for weights in batch.weights.values():
            weights.requires_grad_(False)
        results.append(train_without_weights(case, module, optimizer, batch, ids))
    return results, tables_of(module)


def train_without_weights(case: Case, module: Any, optimizer: Any, batch: Batch, ids: Any) -> list[Tensor]:
    """Train one step in which weights are given but not trained."""
    given = features_of(case, batch) if ids is None else ids
    return [x.cpu() for x in train_step(case, module, optimizer, batch, None, given)[0]]


def check_equal(with_: list[Any], without: list[Any], steps: int) -> None:
    """Compare the results of each step and the tables that ranks have."""
    for (ours, our_tables), (theirs, their_tables) in zip(with_, without, strict=True):
        assert len(ours) == len(theirs) == steps
        assert all(torch.equal(x, y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True))
        assert all(torch.equal(table, their_tables[name]) for name, table in our_tables.items())


CASES = [
    Case(plan="mixed", batch="empty", grad_mode="dense", optimizer="Adam"),
    Case(plan="mixed", weighted=True, grad_mode="sparse"),
    *[Case(plan=plan, kind=kind, merge=True) for plan in PLANS for kind in ("bags", "rows")],
    *[Case(plan=plan, weighted=True, grad_mode="sparse") for plan in PLANS[:-1]],
]
SLOW = pytest.mark.slow


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("case", [*CASES[:3], *(pytest.param(case, marks=SLOW) for case in CASES[3:])], ids=str)
def test_the_same_bits(pool_of, device: str, case: Case, ranks: int) -> None:
    counts = [5] * ranks
    with_, without = (pool_of(ranks).run(train, case, device, counts, ahead) for ahead in (True, False))
    check_equal(with_, without, 5)


@pytest.mark.parametrize("counts", [[3, 6], [0, 2], *(pytest.param(x, marks=SLOW) for x in ([2, 1], [0, 0], [1, 1]))])
@pytest.mark.parametrize("plan", ["row", pytest.param("table", marks=SLOW)])
def test_ranks_whose_batches_end_at_different_times_end_together(
    two, device: str, plan: str, counts: list[int]
) -> None:
    case = Case(plan=plan, merge=True)
    with_, without = (two.run(train, case, device, counts, ahead) for ahead in (True, False))
    check_equal(with_, without, max(counts))


def messages(case: Case, device: str) -> list[int]:
    """Count the messages of each lookup."""
    module, counts = sharded_of(case, device), []
    ranks = module.shards.ranks
    turns = distributed.prefetch(batches_of(case, 4, device), module, partial(features_of, case))
    for batch, ids in turns:
        before = ranks._messages
        look_up(case, module, batch, ids)
        counts.append(ranks._messages - before)
    return counts


@pytest.mark.parametrize("plan", PLANS[:3])
def test_a_lookup_sends_nothing_but_results(two, device: str, plan: str) -> None:
    assert two.run(messages, Case(plan=plan, grad_mode="sparse"), device) == [[1] * 4] * 2


def times_read(case: Case, device: str) -> int:
    """Count how often features are read for four batches that are prefetched."""
    module, count = sharded_of(case, device), 0
    read = module.inputs_of

    def counted(*given: Any, **how: bool) -> Any:
        nonlocal count
        count += 1
        return read(*given, **how)

    module.inputs_of = counted
    for batch, ids in distributed.prefetch(batches_of(case, 4, device), module, partial(features_of, case)):
        look_up(case, module, batch, ids)
    return count


def test_features_are_read_once(two, device: str) -> None:
    assert two.run(times_read, Case(plan="mixed", grad_mode="sparse"), device) == [4, 4]


def both_ways(case: Case, device: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return what ``lookup`` finds for batches that were prefetched, given as mappings, and for the same batches."""
    module, batches = sharded_of(case, device), batches_of(case, 3, device)
    turns = distributed.prefetch(batches, module, lambda batch: features_of(case, batch).to_dict())
    found = [{name: x.detach() for name, x in module.lookup(ahead).items()} for _, ahead in turns]
    return [(mine, module.lookup(features_of(case, batch))) for mine, batch in zip(found, batches, strict=True)]


@pytest.mark.parametrize("plan", PLANS)
def test_lookup_of_a_batch(two, device: str, plan: str) -> None:
    for pairs in two.run(both_ways, Case(plan=plan, batch="even", grad_mode="sparse"), device):
        for mine, other in pairs:
            assert list(mine) == list(other) and all(torch.equal(mine[name], other[name]) for name in mine)


# ---- Errors ----------------------------------------------------------------------------------------------------------


def train_past(case: Case, device: str, what: str | None) -> tuple[list[str], dict[str, Tensor]]:
    """Train on five batches, of which rank 1 has an error in the third; without it, leave the third out."""
    module = sharded_of(case, device)
    optimizer = optimizer_of(case, module)
    batches = batches_of(case, 5, device)
    if what is None:
        del batches[2]
    elif dist.get_rank() == 1 and what == "id":
        batches[2].ids["a"][0] = 20

    def features(batch: Batch) -> Any:
        if what == "features" and dist.get_rank() == 1 and batch is batches[2]:
            raise KeyError("no such column")
        return features_of(case, batch)

    turns, said = distributed.prefetch(batches, module, features), []
    while True:
        try:
            batch, ids = next(turns)
        except StopIteration:
            return said, tables_of(module)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
            continue
        train_without_weights(case, module, optimizer, batch, ids)
        said.append("")


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("id", "IndexError: rank 1: feature 'a': id 0 must be in [0, 20), got 20"),
        ("features", "RuntimeError: rank 1: 'no such column'"),
    ],
)
@pytest.mark.parametrize("plan", ["row", "table"])
def test_an_error_of_one_rank_is_raised_on_all_in_its_turn_and_training_goes_on(
    two, device: str, plan: str, what: str, expected: str
) -> None:
    case = Case(plan=plan, batch="many")
    got, without = two.run(train_past, case, device, what), two.run(train_past, case, device, None)
    for (said, tables), (_, its) in zip(got, without, strict=True):
        assert said == ["", "", expected, "", ""]
        assert all(torch.equal(table, its[name]) for name, table in tables.items())


def loader(case: Case, device: str) -> Iterator[Batch]:
    yield draw(case, 0, dist.get_rank(), device)
    if dist.get_rank() == 0:
        raise OSError("the disk is gone")
    yield draw(case, 1, dist.get_rank(), device)


def load(case: Case, device: str) -> None:
    module = sharded_of(case, device)
    for batch, ids in distributed.prefetch(loader(case, device), module, partial(features_of, case)):
        look_up(case, module, batch, ids)


def test_an_error_of_one_rank_s_loader_is_raised_on_all(two, device: str) -> None:
    for error in two.errors(load, Case(grad_mode="sparse"), device):
        assert isinstance(error, OSError) and "the disk is gone" in str(error)


def without_empty(case: Case, device: str) -> list[str]:
    module, said = sharded_of(case, device), []
    batches = batches_of(case, 2 + dist.get_rank(), device)
    try:
        for batch, ids in distributed.prefetch(batches, module, partial(features_of, case)):
            look_up(case, module, batch, ids)
            said.append("")
    except ValueError as error:
        said.append(str(error))
    return said


def test_batches_that_end_early_without_an_empty_one(two, device: str) -> None:
    for said in two.run(without_empty, Case(grad_mode="sparse"), device):
        assert said[:2] == ["", ""] and len(said) == 3
        assert re.match("prefetch: the batches of rank 0 have ended before those of rank 1: give `empty`", said[2])


def trained_weights(case: Case, device: str) -> None:
    batch = draw(case, 0, dist.get_rank(), device)
    if dist.get_rank() == 1:
        batch.weights["a"].requires_grad_()
    next(distributed.prefetch([batch], sharded_of(case, device), partial(features_of, case)))


def test_weights_that_are_trained_are_refused(two, device: str) -> None:
    for error in two.errors(trained_weights, Case(weighted=True, grad_mode="sparse"), device):
        assert isinstance(error, ValueError) and "rank 1: prefetch: weights must not require a gradient" in str(error)


def for_another(case: Case, device: str) -> None:
    first, second = sharded_of(case, device), sharded_of(case, device)
    (_, ids), *_ = distributed.prefetch(batches_of(case, 1, device), first, partial(features_of, case))
    second(ids)


def test_a_batch_for_another_module_is_refused(two, device: str) -> None:
    for error in two.errors(for_another, Case(grad_mode="sparse"), device):
        assert isinstance(error, ValueError) and "must have been prefetched for this module" in str(error)


def test_a_module_that_is_not_split_is_refused() -> None:
    with pytest.raises(TypeError, match="module must be a collection or a table that shard.. has split, got a Linear"):
        distributed.prefetch([], torch.nn.Linear(1, 1), lambda batch: batch)


def two_at_a_time(device: str) -> list[list[Tensor]]:
    """Look up five batches and, after the second, three of another loader."""
    module = distributed.shard(nn.Embedding(20, 4, grad_mode="sparse").to(device), plan="row_wise")
    generator = torch.Generator().manual_seed(dist.get_rank())
    train, test = (list(torch.randint(0, 20, (n, 6), generator=generator).to(device)) for n in (5, 3))
    found = []
    for step, (batch, ids) in enumerate(distributed.prefetch(train, module, lambda batch: batch)):
        found.append([module(ids), module(batch)])
        if step == 2:
            found += [[module(ids), module(batch)] for batch, ids in distributed.prefetch(test, module, lambda x: x)]
    for step, (batch, ids) in enumerate(distributed.prefetch(train, module, lambda batch: batch)):
        if step == 1:
            break
        found.append([module(ids), module(batch)])
    for batch, ids in distributed.prefetch(train, module, lambda batch: batch):
        found.append([module(ids), module(batch)])
    return [[x.detach().cpu() for x in pair] for pair in found]


def test_an_iterator_waits_while_another_is_taken_from_and_may_be_left(two, device: str) -> None:
    for pairs in two.run(two_at_a_time, device):
        assert len(pairs) == 5 + 3 + 1 + 5 and all(torch.equal(*pair) for pair in pairs)


def out_of_turn(device: str, how: str) -> None:
    module = distributed.shard(nn.Embedding(20, 4).to(device), plan="row_wise")
    turns = distributed.prefetch([torch.arange(5, device=device)] * 3, module, lambda batch: batch)
    (_, first), (_, second) = next(turns), next(turns)
    if how == "twice":
        module(first)
    module({"twice": first, "skipped": second}[how])


@pytest.mark.parametrize(
    ("how", "numbers"), [("twice", "number 0 where number 1"), ("skipped", "number 1 where number 0")]
)
def test_batches_are_looked_up_once_in_turn(two, device: str, how: str, numbers: str) -> None:
    for error in two.errors(out_of_turn, device, how):
        assert isinstance(error, ValueError) and f"once each, in turn, got {numbers} is next" in str(error)


def skips(case: Case, device: str) -> None:
    module = distributed.shard(nn.Embedding(20, 4).to(device), plan="row_wise", timeout=1)
    batches = [torch.arange(5, device=device)] * 3
    for _, ids in distributed.prefetch(batches, module, lambda batch: batch):
        if dist.get_rank() == 0:
            module(ids)


def skips_one(case: Case, device: str) -> None:
    module = distributed.shard(nn.Embedding(20, 4).to(device), plan="row_wise", timeout=1)
    # Of other sizes, so that a result which met another's would end the process.
    batches = [torch.arange(n, device=device) for n in (5, 9, 3)]
    for step, (_, ids) in enumerate(distributed.prefetch(batches, module, lambda batch: batch)):
        if dist.get_rank() == 0 or step > 0:
            module(ids)


def test_a_rank_that_does_not_look_its_batch_up_is_named(device: str) -> None:
    from distributed.pool import Pool

    pool = Pool(2, device)
    for error in pool.errors(skips, Case(), device):
        assert isinstance(error, RuntimeError) and re.search("on rank 0: lookup .*; on rank 1: prefetch ", str(error))
    pool.close()
    pool = Pool(2, device)
    waits, skipped = pool.errors(skips_one, Case(), device)
    assert isinstance(waits, RuntimeError) and isinstance(skipped, ValueError)
    pool.close()


# ---- Single tables ---------------------------------------------------------------------------------------------------


def single(device: str, ahead: bool) -> list[Tensor]:
    torch.manual_seed(0)
    rows, bags = nn.Embedding(30, 4, grad_mode="sparse"), nn.EmbeddingBag(30, 4, mode="sum", grad_mode="sparse")
    model = distributed.shard(torch.nn.ModuleDict({"rows": rows, "bags": bags}).to(device), plan="row_wise")
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, 30, (4, 3), generator=generator).to(device) for _ in range(3)]
    weights, results = torch.rand(4, 3, generator=generator).to(device), []
    of_rows: Any = ((batch, batch) for batch in batches)
    of_bags: Any = ((batch, (batch, None, weights)) for batch in batches)
    if ahead:
        of_rows = distributed.prefetch(batches, model["rows"], lambda batch: batch)
        of_bags = distributed.prefetch(batches, model["bags"], lambda batch: (batch, None, weights))
    for (_, ids), (_, its) in zip(of_rows, of_bags, strict=True):
        results += [model["rows"](ids), model["bags"](*its) if isinstance(its, tuple) else model["bags"](its)]
        sum(x.square().sum() for x in results[-2:]).backward()
    gradients = [module.weight.grad.to_dense().cpu() for module in (rows, bags)]
    return [*(x.detach().cpu() for x in results), *gradients]


def test_single_tables(two, device: str) -> None:
    for ours, theirs in zip(two.run(single, device, True), two.run(single, device, False), strict=True):
        assert all(map(torch.equal, ours, theirs))
