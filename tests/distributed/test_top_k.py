"""``nn.TopK`` over the rows of all ranks, beside one process that has all rows. Scores are whole numbers: exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchsparse_rec import distributed, nn, optim
from torchsparse_rec.jagged import JaggedTensor

DIM, PADDING = 3, 4
PLANS = {"row": distributed.RowWise(), "table": distributed.TableWise(1)}
# The plan; the rows of the table, of which some ranks may have none, or that it has keys; k; what is excluded; how many
# queries each rank has.
CASES = [
    (plan, rows, k, excluded, sizes)
    for plan in PLANS
    for rows, k, excluded, sizes in (
        (301, 7, None, (3, 5, 2, 4)),
        (304, 304, "matrix", (3, 0, 2, 0)),
        (5, 4, "jagged", (1, 2, 0, 0)),
        (301, 3, "one rank's", (2, 2, 2, 2)),
        ("keys", 6, None, (3, 5, 2, 4)),
        ("keys", 40, "matrix", (2, 0, 0, 1)),
        ("few keys", 2, "jagged", (2, 1, 1, 1)),
        (301, 2, None, (0, 0, 0, 0)),
    )
]


def drawn(seed: int, *shape: int, most: int = 3) -> Tensor:
    """Return whole numbers, so few that many scores are equal."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def table_of(rows: Any) -> Any:
    if isinstance(rows, int):
        return nn.Embedding(rows, DIM, padding_idx=PADDING, _weight=drawn(1, rows, DIM))
    table = nn.EmbeddingVariable(DIM, capacity=64)
    keys = torch.tensor([-1, 9]) if rows == "few keys" else torch.arange(40) * 7 - 100
    table.insert(keys, drawn(2, len(keys), DIM))
    return table


def asked(rows: Any, rank: int, excluded: str | None, size: int) -> tuple[Tensor, Any]:
    """Return a rank's queries, and what is excluded of them."""
    ids = drawn(10 + rank, size, 30, most=40).long() * (7 if rows == "keys" else 1)
    ids = ids.clamp(-100, 172) if rows == "keys" else ids.abs() % (rows if isinstance(rows, int) else 9)
    ids[:, 3] = -1
    given: Any = None
    if excluded == "matrix" or (excluded == "one rank's" and rank == 0):
        given = ids
    elif excluded == "jagged":
        given = JaggedTensor(ids[:, 0].to(torch.int32), lengths=torch.ones(size, dtype=torch.int64))
    return drawn(20 + rank, size, DIM), given


def on_rank(cases: list[Any]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for plan, rows, k, excluded, sizes in cases:
        table = distributed.shard(table_of(rows), plan=PLANS[plan])
        query, without = asked(rows, dist.get_rank(), excluded, sizes[dist.get_rank()])
        found.append(nn.TopK(k)(query, table, excluded=without))
    return found


def alone(case: Any, rank: int) -> tuple[Tensor, Tensor]:
    """Return the best rows of one process, whose keys come in order: of equal scores it too has the lower key."""
    _, rows, k, excluded, sizes = case
    query, without = asked(rows, rank, excluded, sizes[rank])
    return nn.TopK(k)(query, table_of(rows), excluded=without)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_ranks_are_as_one_process(pool_of, ranks: int) -> None:
    got = pool_of(ranks).run(on_rank, CASES)
    for k, case in enumerate(CASES):
        for rank in range(ranks):
            for x, wanted in zip(got[rank][k], alone(case, rank), strict=True):
                assert x.dtype == wanted.dtype and torch.equal(x, wanted), (case, rank)


# ---- Other tables, and what a call leaves ---------------------------------------------------------------------------


def trained(plan: str | None) -> tuple[Tensor, Tensor]:
    """Return the best rows of a table of a collection, some of whose rows are stale."""
    config = nn.EmbeddingConfig(64, DIM, name="items", feature_names=["item"])
    model = nn.EmbeddingCollection([config], grad_mode="fused")
    with torch.no_grad():
        model.embeddings["items"].weight.copy_(drawn(1, 64, DIM))
    if plan is not None:
        distributed.shard(model, plan=plan)
    optimizer = optim.Adam(model.parameters(), lr=0.5, in_backward=True)
    for step in range(3):
        rows = model({"item": torch.tensor([[step, 40 + step], [9 * step, step]])})["item"].values()
        rows.square().sum().backward()
        optimizer.step()
    best = nn.TopK(5)(drawn(30, 4, DIM).view(2, 2, DIM), model.embeddings["items"])
    assert not best[0].requires_grad
    return best


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["row_wise", "data_parallel"])
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_stale_rows_of_a_collection(two, plan: str) -> None:
    wanted = trained(None)
    for values, ids in two.run(trained, plan):
        torch.testing.assert_close(values, wanted[0])
        assert torch.equal(ids, wanted[1]) and ids.shape == (2, 2, 5)


# ---- Errors ---------------------------------------------------------------------------------------------------------


def wrong(what: str) -> str:
    """Do something wrong on rank 1 or on both ranks; return what was raised. Then look something up."""
    grows = what in ("parameter", "too few keys")
    plan = "column_wise" if what == "columns" else "row_wise"
    table = distributed.shard(table_of("few keys" if grows else 64), plan=plan)
    is_second, excluded, k = dist.get_rank() == 1, None, 2
    query: Any = drawn(3, 2, DIM)
    if is_second:
        excluded = torch.full((2, 1), 64) if what == "excluded" else None
        k = 3 if what == "k" else k
        query = [1.0] if what == "query" else query
    k = {"many": 65, "too few keys": 3}.get(what, k)
    with pytest.raises((IndexError, RuntimeError, TypeError, ValueError)) as raised:
        nn.TopK(k)(query, table.weight if what == "parameter" else table, excluded=excluded)
    assert table(torch.tensor([9])).shape == (1, DIM)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_errors_are_those_of_all_ranks(two) -> None:
    messages = {
        "columns": "ValueError: TopK: table 'Embedding' must be RowWise or TableWise, got ColumnWise: choose its plan "
        "in shard()",
        "excluded": "IndexError: rank 1: scores_targets: excluded[0] must be in [0, 64) or -1, got 64",
        "query": "TypeError: rank 1: TopK: query must be a tensor, got list",
        "k": "RuntimeError: Embedding: all ranks must make the same calls, got on rank 0: best of all rows of",
        "many": "ValueError: TopK: k must be in [1, 64], got 65",
        "too few keys": "ValueError: TopK: k must be in [1, 2], got 3",
        "parameter": "ValueError: rank 0: TopK: table must be the EmbeddingVariable",
    }
    for what, message in messages.items():
        for said in two.run(wrong, what):
            assert said.startswith(message), (what, said)
