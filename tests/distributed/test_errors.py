"""Bad input on one rank is an error on all: the same type and text, nothing written, and training may go on."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import Case, draw, features_of, optimizer_of, sharded_of, tables_of, train_alone, train_step
from torch import Tensor

from torchsparse_rec import KeyedJaggedTensor


def ids_out_of_range(case: Case, rank: int, value: int) -> Any:
    """Return features with a bad id at position 2 of feature b."""
    batch = draw(case, 0, rank)
    batch.ids["b"][2] = value
    return features_of(case, batch)


def weights_that_are_nan(case: Case, rank: int) -> Any:
    """Return features with a weight that is no number."""
    batch = draw(case, 0, rank)
    batch.weights["b"][1] = float("nan")
    return features_of(case, batch)


def bad_offsets(case: Case, rank: int) -> Any:
    """Return features with offsets that decrease."""
    good = features_of(case, draw(case, 0, rank))
    offsets = good.offsets().clone()
    offsets[2] = offsets[-1] + 3
    return KeyedJaggedTensor(good.keys(), good.values(), good.weights_or_none(), offsets=offsets)


def a_feature_missing(case: Case, rank: int) -> Any:
    """Return features without one that the collection needs."""
    return {"a": torch.tensor([1])}


BROKEN = {f.__name__: f for f in (ids_out_of_range, weights_that_are_nan, bad_offsets, a_feature_missing)}


def goes_on(case: Case, ranks: list[int], broken: str, arguments: tuple, device: str) -> tuple[list, dict[str, Tensor]]:
    """Train, with errors between the steps; return the errors of a lookup with gradients and of one without."""
    module = sharded_of(case, device)
    optimizer = optimizer_of(case, module)
    rank, told = dist.get_rank(), []
    for step in range(case.steps):
        for with_gradients in (True, False):
            if rank in ranks:
                features = BROKEN[broken](case, rank, *arguments)
            else:
                features = features_of(case, draw(case, 0, rank))
            try:
                with torch.set_grad_enabled(with_gradients):
                    module(features if isinstance(features, dict) else features.to(torch.device(device)))
            except (IndexError, ValueError) as error:
                told.append((type(error).__name__, str(error)))
        train_step(case, module, optimizer, draw(case, step, rank, device), None)
    return told, tables_of(module)


def check(pool_of: Any, of: int, case: Case, broken: str, *arguments: Any, device: str, ranks: tuple = (1,)) -> str:
    """Check that all ranks raise alike and train on as if nothing had been; return the errors' kind and text."""
    outcomes = pool_of(of).run(goes_on, case, list(ranks), broken, arguments, device)
    want = train_alone(case, of, device)[0].tables
    for told, tables in outcomes:
        assert told == [outcomes[0][0][0]] * (2 * case.steps)
        for name, table in tables.items():
            assert torch.equal(table, want[name]), name
    kind, text = outcomes[0][0][0]
    return f"{kind}: {text}"


PLANS = [("row", "bags"), ("table", "bags"), ("column", "bags"), ("row", "rows"), ("table", "rows"), ("mixed", "bags")]


@pytest.mark.parametrize("value", [50, -1, 2**40])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("plan", "kind"), PLANS)
def test_an_id_out_of_range(pool_of, device: str, plan: str, kind: str, ranks: int, value: int) -> None:
    case = Case(plan=plan, kind=kind, batch="even", steps=2)
    text = check(pool_of, ranks, case, "ids_out_of_range", value, device=device)
    assert re.fullmatch(rf"IndexError: rank 1: feature 'b': id 2 must be in \[0, 50\), got {value}", text), text


def seconds_of_an_error(case: Case, device: str) -> float:
    """Return the seconds that a lookup takes in which rank 1 has a bad id."""
    module = sharded_of(case, device)
    _optimizer = optimizer_of(case, module)  # the tables hold it no longer than this name
    rank = dist.get_rank()
    good = features_of(case, draw(case, 0, rank))
    module(good.to(torch.device(device)))
    features = ids_out_of_range(case, rank, 77) if rank == 1 else good
    start = time.monotonic()
    with pytest.raises(IndexError, match="^rank 1: feature 'b': id 2"):
        module(features.to(torch.device(device)))
    return time.monotonic() - start


def test_an_error_is_on_all_ranks_within_a_second(two, device: str) -> None:
    # 2 to 5 ms where the machine does nothing else; ranks do not wait for a timeout.
    assert max(two.run(seconds_of_an_error, Case(plan="mixed", batch="even"), device)) < 1


@pytest.mark.parametrize(("of", "ranks"), [(4, (3, 1)), (2, (0, 1))])
def test_the_first_of_several_ranks_with_errors_is_named(pool_of, device: str, of: int, ranks: tuple) -> None:
    case = Case(plan="row", batch="even", steps=1)
    text = check(pool_of, of, case, "ids_out_of_range", 77, device=device, ranks=ranks)
    assert text == f"IndexError: rank {min(ranks)}: feature 'b': id 2 must be in [0, 50), got 77"


@pytest.mark.parametrize("plan", ["row", "table", "column"])
def test_weights_that_are_not_numbers(pool_of, device: str, plan: str) -> None:
    case = Case(plan=plan, weighted=True, batch="even", steps=2)
    text = check(pool_of, 2, case, "weights_that_are_nan", device=device)
    assert re.match("ValueError: rank 1: .*must be a number, got nan", text), text


@pytest.mark.parametrize(("plan", "kind"), [("row", "bags"), ("table", "bags"), ("column", "bags")])
def test_bad_offsets(pool_of, device: str, plan: str, kind: str) -> None:
    text = check(pool_of, 2, Case(plan=plan, kind=kind, batch="even", steps=2), "bad_offsets", device=device)
    assert re.match("ValueError: rank 1: .*offsets must not decrease", text), text


@pytest.mark.parametrize(("plan", "kind"), PLANS)
def test_a_feature_that_one_rank_does_not_have(pool_of, device: str, plan: str, kind: str) -> None:
    text = check(pool_of, 2, Case(plan=plan, kind=kind, batch="even", steps=2), "a_feature_missing", device=device)
    assert re.match("ValueError: rank 1: .*features must have every key, got none named 'b'", text), text
