"""Tables that grow over ranks: results, rows, counts and filters are those of one process, by key."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import Case, Table, draw, features_of, keys_of, sharded_of, train_alone, train_rank
from distributed.test_equal import OPTIMIZERS, check

from torchsparse_rec import nn
from torchsparse_rec.variable import CBFFilter, CounterFilter, EmbeddingVariableOption, GlobalStepEvict, L2WeightEvict

PLAIN = EmbeddingVariableOption()
COUNTED = EmbeddingVariableOption(filter_option=CounterFilter(filter_freq=3))
SKETCHED = EmbeddingVariableOption(
    filter_option=CBFFilter(filter_freq=3, max_element_size=10**5, false_positive_probability=1e-4)
)
EVICTED = EmbeddingVariableOption(evict_option=[GlobalStepEvict(1, every=2), L2WeightEvict(1e-4, every=3)])


def tables(*options: EmbeddingVariableOption | None, pooling: str = "sum") -> tuple[Table, ...]:
    """Return three tables, of which two share feature b, and one has two features."""
    features = (("a",), ("b", "c"), ("b",))
    sizes = ((20, 4), (50, 5), (40, 5))
    return tuple(
        Table(rows, dim, its, pooling, option=option)
        for (rows, dim), its, option in zip(sizes, features, options, strict=True)
    )


SLOW = pytest.mark.slow
POOLED = [
    Case(tables(PLAIN, PLAIN, PLAIN, pooling=pooling), plan, weighted=weighted, batch=batch)
    for plan, pooling, weighted, batch in product(
        ("row", "table"), ("sum", "mean", "sqrtn", "max"), (False, True), ("uneven", "empty")
    )
    if not (pooling == "max" and weighted)
]


def of(cases: list[Case], every: int) -> Any:
    """Return cases, each with a number of ranks; all but every so manieth are slow."""
    found = []
    for k, case in enumerate(cases):
        ranks = (2, 3)[(k + k // 2) % 2]
        marks = [] if k % every == 0 else [SLOW]
        found.append(pytest.param(case, ranks, id=f"{case}-{case.tables[0].pooling}-{ranks}", marks=marks))
    return pytest.mark.parametrize(("case", "ranks"), found)


@of(POOLED, 5)
def test_pooled(pool_of, device: str, case: Case, ranks: int) -> None:
    check(pool_of, ranks, case, device)


UNPOOLED = [
    Case(tables(PLAIN, PLAIN, PLAIN), plan, "rows", batch=batch)
    for plan, batch in product(("row", "table"), ("uneven", "empty", "single"))
]


@of(UNPOOLED, 4)
def test_not_pooled(pool_of, device: str, case: Case, ranks: int) -> None:
    check(pool_of, ranks, case, device)


FILTERED = [
    Case(tables(option, option, PLAIN), plan, kind, batch="many", grad_mode=mode, merge=merge)
    for option, plan, (kind, mode, merge) in product(
        (COUNTED, SKETCHED, EVICTED),
        ("row", "table"),
        (("bags", "fused", False), ("rows", "sparse", False), ("bags", "dense", False)),
    )
]


@of(FILTERED, 3)
def test_filters_and_evictions(pool_of, device: str, case: Case, ranks: int) -> None:
    check(pool_of, ranks, case, device)


def with_fixed(plan: str) -> list[Case]:
    """Return cases of a fixed table beside those that grow, which share a feature."""
    its = tables(PLAIN, None, COUNTED)
    return [
        Case(its, plan, kind, batch="many", grad_mode=mode, optimizer="Adam")
        for kind, mode in (("bags", "fused"), ("rows", "sparse"))
    ]


@of([*with_fixed("row"), *with_fixed("table"), *with_fixed("mixed")], 2)
def test_beside_fixed_tables(pool_of, device: str, case: Case, ranks: int) -> None:
    check(pool_of, ranks, case, device)


def of_optimizers() -> list[Any]:
    """Return a case for each optimizer of ours in each gradient mode."""
    found = []
    for k, ((name, (optimizer, options)), mode) in enumerate(
        product(OPTIMIZERS.items(), (None, "dense", "sparse", "fused", "auto"))
    ):
        if "torch." not in name:
            case = Case(tables(PLAIN, COUNTED, PLAIN), ("row", "mixed")[k % 2], "bags", False, mode, optimizer, options)
            daily = name in ("Adam", "LAMB", "Adagrad") and mode in ("sparse", "fused")
            marks = [] if daily else [SLOW]
            found.append(pytest.param(case, (2, 3)[k // 2 % 2], id=f"{name}-{mode}", marks=marks))
    return found


@pytest.mark.parametrize(("case", "ranks"), of_optimizers())
def test_optimizers(pool_of, device: str, case: Case, ranks: int) -> None:
    check(pool_of, ranks, case, device)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("option", [COUNTED, SKETCHED, EVICTED], ids=["counted", "sketched", "evicted"])
def test_merged_keys_are_counted_exactly(pool_of, device: str, option: EmbeddingVariableOption, ranks: int) -> None:
    case = Case(tables(option, PLAIN, option), "row", batch="many", optimizer="SGD", merge=True)
    got = pool_of(ranks).run(train_rank, case, device)
    for ours, theirs in zip(got, train_alone(case, ranks, device), strict=True):
        assert ours.tables.keys() == theirs.tables.keys()
        for name, x in ours.tables.items():
            if name.endswith("values") or "result" in name:  # sums over ranks of sums over ids
                torch.testing.assert_close(x, theirs.tables[name], rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(x, theirs.tables[name]), name
        assert len(ours.tables["embedding_bags.t0.keys"]) > 5


def evaluated(case: Case) -> Any:
    module = sharded_of(case)
    module(features_of(case, draw(case, 0, dist.get_rank())))
    before = [keys_of(child, all_ranks=True) for child in module.modules() if isinstance(child, nn.EmbeddingVariable)]
    module.eval()
    result = module(features_of(case, draw(case, 7, dist.get_rank()))).values()
    after = [keys_of(child, all_ranks=True) for child in module.modules() if isinstance(child, nn.EmbeddingVariable)]
    return before, after, result.requires_grad


@pytest.mark.parametrize("plan", ["row", "table"])
def test_eval_writes_nothing_and_gives_no_gradient(two, plan: str) -> None:
    case = Case(tables(PLAIN, COUNTED, SKETCHED), plan, batch="many", grad_mode="sparse")
    for before, after, has_gradient in two.run(evaluated, case):
        assert not has_gradient
        for mine, its in zip(before, after, strict=True):
            assert len(mine["keys"]) > 0 and all(torch.equal(x, its[name]) for name, x in mine.items())
