"""``nn.lookup_sparse`` of tables over ranks: one exchange, the bits of one process, and errors on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import keys_of
from torch import Tensor

from torchsparse_rec import distributed, nn, optim
from torchsparse_rec.variable import CounterFilter, EmbeddingVariableOption

ROWS, STEPS = 40, 3
COMBINERS = ["sum", "mean", "sqrtn", "sum", "mean", "sum"]


class Tables(torch.nn.Module):
    """A table of each kind."""

    def __init__(self, grad_mode: str | None) -> None:
        super().__init__()
        torch.manual_seed(5)
        option = EmbeddingVariableOption(filter_option=CounterFilter(filter_freq=2))
        self.rows = nn.Embedding(ROWS, 4, padding_idx=3, grad_mode=grad_mode)
        self.bags = nn.EmbeddingBag(ROWS, 5, grad_mode=grad_mode)
        self.keys = nn.EmbeddingVariable(4, name="keys", grad_mode=grad_mode)
        self.counted = nn.EmbeddingVariable(4, name="counted", ev_option=option, grad_mode=grad_mode)
        self.plain = nn.Embedding(ROWS, 4, grad_mode="dense")

    def forward(self, ids: list[tuple[Tensor, Tensor]], weights: list[Tensor] | None) -> list[Tensor]:
        """Look up all tables, one of them twice, and one by its parameter."""
        params = [self.rows, self.bags, self.keys, self.counted, self.keys, self.plain.weight]
        return nn.lookup_sparse(params, ids, COMBINERS, weights)


PLANS: dict[str, dict[str, Any]] = {
    "row": dict.fromkeys(("rows", "bags", "keys", "counted", "plain"), "row_wise"),
    "table": {
        name: distributed.TableWise(k % 2) for k, name in enumerate(("rows", "bags", "keys", "counted", "plain"))
    },
    "column": {  # four columns over three ranks leave one without
        "rows": distributed.ColumnWise(),
        "bags": "column_wise",
        "keys": "row_wise",
        "counted": distributed.TableWise(1),
        "plain": distributed.ColumnWise([1]),
    },
    "mixed": {"rows": "data_parallel", "bags": "row_wise", "keys": "row_wise", "counted": distributed.TableWise(1)},
}


def batch(step: int, rank: int) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Draw a rank's ids, as values and lengths, and their weights; rank 1 has no example in step 1."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    examples = 0 if (step, rank) == (1, 1) else 4 + 2 * rank
    ids, weights = [], []
    for _ in COMBINERS:
        lengths = torch.randint(0, 4, (examples,), generator=generator)
        ids.append(((torch.rand(int(lengths.sum()), generator=generator) ** 2 * ROWS).long(), lengths))
        weights.append(torch.rand(int(lengths.sum()), generator=generator) + 0.5)
    return ids, weights


def as_given(ids: list[tuple[Tensor, Tensor]]) -> list[Any]:
    """Return ids with offsets in place of lengths."""
    return [(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])) for values, lengths in ids]


def train(model: Tables, batches: list[Any], mode: str | None, weighted: bool, factor: float) -> list[list[Tensor]]:
    its = [parameter for name, parameter in model.named_parameters() if "plain" not in name]
    optimizers = [optim.Adagrad(its, lr=0.1, in_backward=mode == "fused"), optim.Adagrad(model.plain.parameters())]
    results = []
    for ids, weights in batches:
        model.zero_grad()
        found = model(as_given(ids), weights if weighted else None)
        torch.autograd.backward(found, [(result.detach() - 1) * factor for result in found])
        for optimizer in optimizers:
            optimizer.step()
        results.append([result.detach() for result in found])
    return results


def contents(model: Tables, all_ranks: bool) -> dict[str, Tensor]:
    """Return all rows: of fixed tables as ``eval()`` looks them up."""
    model.eval()
    every = torch.arange(ROWS)
    with torch.no_grad():
        found = {"rows": model.rows(every), "bags": model.bags(every.unsqueeze(1)), "plain": model.plain(every)}
    for name in ("keys", "counted"):
        found.update({f"{name}.{what}": x for what, x in keys_of(getattr(model, name), all_ranks).items()})
    return found


def on_rank(plan: str, mode: str | None, weighted: bool) -> Any:
    model = distributed.shard(Tables(mode), plan=PLANS[plan], merge=False)
    batches = [batch(step, dist.get_rank()) for step in range(STEPS)]
    ranks = model.rows.shards.ranks
    results = train(model, batches, mode, weighted, 1.0)
    before = ranks._messages
    with torch.no_grad():
        model(as_given(batches[0][0]), None)
    messages = ranks._messages - before
    return results, contents(model, all_ranks=True), messages


def alone(ranks: int, mode: str | None, weighted: bool) -> Any:
    model = Tables(mode)
    batches, sizes = [], []
    for step in range(STEPS):
        parts = [batch(step, rank) for rank in range(ranks)]
        ids = [tuple(map(torch.cat, zip(*its, strict=True))) for its in zip(*[ids for ids, _ in parts], strict=True)]
        batches.append((ids, [torch.cat(its) for its in zip(*[weights for _, weights in parts], strict=True)]))
        sizes.append([len(its[0][1]) for its, _ in parts])
    results = train(model, batches, mode, weighted, 1 / ranks)
    split = [[x.split(its) for x in found] for found, its in zip(results, sizes, strict=True)]
    with torch.no_grad():  # as ranks do after training
        first = [batch(0, rank)[0] for rank in range(ranks)]
        model(as_given([tuple(map(torch.cat, zip(*its, strict=True))) for its in zip(*first, strict=True)]), None)
    its = contents(model, all_ranks=False)
    return [([[x[rank] for x in found] for found in split], its) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("plan", "mode", "weighted", "ranks"),
    [
        ("row", "fused", True, 2),
        ("row", "sparse", False, 3),
        ("table", "fused", False, 3),
        ("table", "dense", True, 2),
        ("column", "fused", True, 2),
        ("column", "sparse", False, 3),
        ("column", "dense", True, 3),
        ("mixed", "sparse", True, 2),
        ("mixed", "fused", False, 2),
    ],
)
def test_the_bits_of_one_process_in_one_exchange(
    pool_of, plan: str, mode: str | None, weighted: bool, ranks: int
) -> None:
    got = pool_of(ranks).run(on_rank, plan, mode, weighted)
    for (results, tables, messages), (wanted, its) in zip(got, alone(ranks, mode, weighted), strict=True):
        assert messages == 3  # header, ids, results
        for step, (ours, theirs) in enumerate(zip(results, wanted, strict=True)):
            assert [k for k, (x, y) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(x, y)] == [], step
        assert [name for name, x in tables.items() if not torch.equal(x, its[name])] == []


# ---- Errors ----------------------------------------------------------------------------------------------------------


def message_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def bad_calls() -> list[str]:
    rank = dist.get_rank()
    model = distributed.shard(Tables(None), plan="row_wise")
    other = distributed.shard(nn.Embedding(5, 4), plan="row_wise")
    bags = [nn.EmbeddingBagConfig(5, 4, "items", feature_names=["f"])]
    collection = distributed.shard(nn.EmbeddingBagCollection(bags), plan="row_wise")
    ids = torch.tensor([[1, 2]])
    bad = torch.tensor([[1, ROWS]]) if rank == 1 else ids
    both = [model.rows, model.keys]
    calls = [
        lambda: nn.lookup_sparse([model.rows, torch.eye(3)], [ids, ids], ["sum", "sum"]),
        lambda: nn.lookup_sparse([torch.nn.Embedding(3, 3), model.rows], [ids, ids], ["sum", "sum"]),
        lambda: nn.lookup_sparse([model.rows, other], [ids, ids], ["sum", "sum"]),
        lambda: nn.lookup_sparse(collection.embedding_bags["items"], ids, "sum"),
        lambda: nn.lookup_sparse(both, [ids, ids], ["sum", "max" if rank == 1 else "mean"]),
        lambda: nn.lookup_sparse(both, [ids, ids], ["sum", "mean"] if rank == 0 else ["mean", "sum"]),
        lambda: nn.lookup_sparse(both, [bad, ids], ["sum", "mean"]),
        lambda: nn.lookup_sparse(both, [ids, ids] if rank == 0 else [ids], ["sum", "mean"]),
        lambda: nn.lookup_sparse(both, [ids, ids], ["sum", "mean"], [None, torch.ones(rank + 2)]),
        lambda: nn.lookup_sparse(both, [ids, ids], ["sum"] * 3),
        lambda: nn.lookup_sparse([model.rows, torch.nn.ReLU() if rank == 0 else model.keys], [ids, ids], ["sum"] * 2),
        lambda: nn.lookup_sparse([None if rank == 1 else model.rows, model.keys], [ids, ids], ["sum"] * 2),
        lambda: nn.lookup_sparse(model.keys.weight if rank == 1 else model.keys, ids, "sum"),
        lambda: nn.lookup_sparse(both, [ids, ids], ["sum", "mean"]),
    ]
    return [message_of(call) for call in calls]


def test_errors_of_one_rank_are_those_of_all(two) -> None:
    wanted = [
        "ValueError: rank 0: lookup_sparse: params[1] must be split over ranks, as others of params are, got a whole",
        "ValueError: rank 0: lookup_sparse: params[0] must be split over ranks, as others of params are, got a whole",
        "ValueError: rank 0: lookup_sparse: params[1] must have been split by the call of shard() that has split the",
        "ValueError: rank 0: lookup_sparse: params[0] must be a table that shard() has split by itself, got 'items' of",
        "ValueError: rank 1: lookup_sparse: combiners[1] must be one of 'sum', 'mean', 'sqrtn', got 'max'",
        "(mean): all ranks must make the same calls, got on rank 0: first lookup of lookup_sparse of rows (sum), keys",
        f"IndexError: rank 1: feature 'params[0]': id 1 must be in [0, {ROWS}), got {ROWS}",
        "ValueError: rank 1: lookup_sparse: indices must be a list of 2, one for each table, got 1",
        "ValueError: rank 1: lookup_sparse: sp_weights[1] must have 2 weights, one for each id, got 3",
        "ValueError: rank 0: lookup_sparse: combiners must be a list of 2, one for each table, got 3",
        "TypeError: rank 0: lookup_sparse: params[1] must be an EmbeddingVariable, Embedding, EmbeddingBag or a",
        "TypeError: rank 1: lookup_sparse: params[0] must be an EmbeddingVariable, Embedding, EmbeddingBag or a",
        "ValueError: rank 1: lookup_sparse: params[0] must be the EmbeddingVariable 'keys' itself, whose keys all",
    ]
    for rank, (*texts, last) in enumerate(two.run(bad_calls)):
        for text, part in zip(texts, wanted, strict=True):
            # Of different calls each rank says first what it did.
            assert (part if rank == 0 else part.replace("(mean)", "(sum)", 1)) in text
        assert last == ""


def with_a_long_key(plan: Any) -> tuple[str, int]:
    """Look up keys of which rank 1 has one that no table of int32 keys has; return the error, and how many came."""
    first, short = nn.EmbeddingVariable(4), nn.EmbeddingVariable(4, key_dtype=torch.int32)
    distributed.shard(torch.nn.ModuleList([first, short]), plan=plan)
    keys = torch.arange(8)
    of_short = keys.masked_fill(keys == 3, 2**40) if dist.get_rank() == 1 else keys
    text = message_of(lambda: nn.lookup_sparse([first, short], [keys, of_short], ["sum", "sum"]))
    nn.lookup_sparse([first, short], [keys[:0], keys[:0]], ["sum", "sum"])
    return text, first.total_count() + short.total_count()


@pytest.mark.parametrize("plan", ["row_wise", distributed.TableWise(0)], ids=["row", "table"])
def test_a_key_that_is_too_long_is_found_before_any_is_inserted(two, plan: Any) -> None:
    wanted = f"ValueError: rank 1: feature 'params[1]': key 3 must be of the key_dtype, int32, got {2**40}"
    assert two.run(with_a_long_key, plan) == [(wanted, 0)] * 2


def while_another_calls_a_module() -> None:
    model = distributed.shard(Tables(None), plan="row_wise")
    ids = torch.tensor([[1, 2]])
    if dist.get_rank() == 0:
        tables = [model.rows, model.bags, model.keys, model.counted]
        nn.lookup_sparse(tables, [ids] * 4, ["sum"] * 4)
    model.rows(ids)


def test_a_first_call_that_one_rank_alone_makes_is_noticed(two) -> None:
    # The header of several tables is longer than those before: gloo would end the processes if they met.
    assert all("all ranks must make the same calls" in str(error) for error in two.errors(while_another_calls_a_module))
