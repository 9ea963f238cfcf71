"""Readers and writers of ``module.weight``: they may do what they may with torch's modules."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import kinds
import pytest
import torch
from nn.cases import train_squares
from torch.nn.utils import prune

from torchsparse_rec import nn, optim
from torchsparse_rec.tables import table as _tables
from torchsparse_rec.tables.table import table_if_any, table_of

MODES = (None, "dense", "sparse", "fused", "auto")


def trained(grad_mode: str | None, steps: int = 3, **arguments) -> tuple[nn.Embedding, optim.Adam]:
    """Train a table, which leaves rows stale unless its gradients are dense; return it and its optimizer."""
    torch.manual_seed(0)
    table = nn.Embedding(12, 3, grad_mode=grad_mode, **arguments)
    optimizer = optim.Adam(table.parameters(), lr=0.1, in_backward=True)
    train_squares(table, optimizer, (torch.tensor([1, step]) for step in range(steps)))
    optimizer.zero_grad()
    return table, optimizer


# ---- Tables ----------------------------------------------------------------------------------------------------------


def test_a_table_ends_with_its_parameter() -> None:
    gc.collect()
    before = len(_tables._tables)
    table, optimizer = trained("sparse")
    table.itself = [table]  # the collector frees it, not the last reference
    assert len(_tables._tables) == before + 1
    del table, optimizer
    gc.collect()
    assert len(_tables._tables) == before


def test_threads_find_one_table() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1, 1)) for _ in range(200)]
    start = threading.Barrier(4)

    def look(_) -> list:
        start.wait()
        return [table_of(parameter) for parameter in parameters]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(look, range(4)))
    assert all(tables == found[0] for tables in found)
    assert [table_if_any(parameter) for parameter in parameters] == found[0]


# ---- Weights that are no parameters ----------------------------------------------------------------------------------


def spectral(module: torch.nn.Module) -> torch.nn.Module:
    """Apply torch's old spectral_norm, whose vectors are drawn at random, from a fixed seed."""
    torch.manual_seed(1)
    return torch.nn.utils.spectral_norm(module)


REPLACEMENTS = {
    "prune": lambda module: prune.l1_unstructured(module, "weight", 5),
    "weight_norm": torch.nn.utils.weight_norm,
    "spectral_norm": spectral,
    "parametrized": torch.nn.utils.parametrizations.weight_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("grad_mode", MODES)
@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_a_weight_computed_from_others_trains_as_torchs(replacement: str, grad_mode: str | None) -> None:
    table, bag = nn.Embedding(12, 3, grad_mode=grad_mode), nn.EmbeddingBag(12, 3, mode="sum", grad_mode=grad_mode)
    theirs = torch.nn.Embedding(12, 3), torch.nn.EmbeddingBag(12, 3, mode="sum")
    ids = torch.tensor([[1, 2], [1, 4]])
    for module, reference in zip((table, bag), theirs, strict=True):
        reference.load_state_dict(module.state_dict())
        REPLACEMENTS[replacement](module)
        REPLACEMENTS[replacement](reference)
        steps = 0 if grad_mode == "sparse" else 3  # torch, too, has no sparse gradient through these
        optimizers = [optim.Adam(module.parameters(), lr=0.1), torch.optim.Adam(reference.parameters(), lr=0.1)]
        for each, optimizer in zip((module, reference), optimizers, strict=True):
            train_squares(each, optimizer, [ids] * steps)
        torch.testing.assert_close(module(ids), reference(ids))


def test_a_replaced_weight_can_be_put_back() -> None:
    table = nn.Embedding(12, 3)
    prune.random_unstructured(table, "weight", 5)
    prune.remove(table, "weight")
    assert isinstance(table.weight, torch.nn.Parameter) and list(table.state_dict()) == ["weight"]
    del table.weight
    for forbidden in (lambda: table.weight, lambda: delattr(table, "weight")):
        with pytest.raises(AttributeError, match="weight"):
            forbidden()


@pytest.mark.parametrize("grad_mode", MODES)
def test_replicas_give_their_gradients_to_the_module(grad_mode: str | None) -> None:
    table, _ = trained(grad_mode)
    replica = table._replicate_for_data_parallel()
    copied = table.weight * 1  # a copy as Broadcast makes it, which is no parameter
    replica.weight = copied
    ids = torch.tensor([1, 7, 1])
    torch.testing.assert_close(replica(ids), table(ids), rtol=0, atol=0)
    if grad_mode != "sparse":
        replica(ids).sum().backward()
        assert table.weight.grad[:, 0].tolist() == [0, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


# ---- Rows flushed between a lookup and its backward ------------------------------------------------------------------


@pytest.mark.parametrize("make", [optim.Adam, partial(optim.SGD, momentum=0.5)])
@pytest.mark.parametrize("grad_mode", ["sparse", "fused"])
def test_reading_a_table_before_backward_is_no_update(grad_mode: str, make) -> None:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(12, 3, mode="sum", grad_mode=grad_mode)
    optimizer = make(bag.parameters(), lr=0.1, in_backward=True)
    ids = torch.tensor([[1, 2], [1, 4]])
    readers = [lambda: bag.weight, bag.eval, bag.state_dict, optimizer.state_dict, lambda: None]
    for read in readers:
        weights = torch.ones(2, 2, requires_grad=True)
        bag(torch.tensor([[3]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            want = bag(ids.reshape(-1, 1)).sum(-1).reshape(2, 2)
        output = bag(ids, per_sample_weights=weights)
        read()
        output.sum().backward()
        torch.testing.assert_close(weights.grad, want)
        optimizer.zero_grad()
        optimizer.step()


@pytest.mark.parametrize("grad_mode", ["sparse", "fused"])
@pytest.mark.parametrize("read_before", [False, True])
def test_an_update_before_backward_is_refused(grad_mode: str, read_before: bool) -> None:
    bag = nn.EmbeddingBag(12, 3, mode="sum", grad_mode=grad_mode)
    optimizer = optim.Adam(bag.parameters(), lr=0.1, in_backward=True)
    for _ in range(2):
        optimizer.zero_grad()
        bag(torch.tensor([[3]])).sum().backward()
        optimizer.step()
    output = bag(torch.tensor([[1, 2]]), per_sample_weights=torch.ones(1, 2, requires_grad=True))
    if read_before:
        _ = bag.weight
    bag(torch.tensor([[3]])).sum().backward()
    optimizer.step()
    if not read_before:
        _ = bag.weight
    with pytest.raises(RuntimeError, match="have been updated since"):
        output.sum().backward()


# ---- Modules made without memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_lookups_follow_a_table_that_is_assigned(compiled: bool) -> None:
    torch._dynamo.reset()
    start = nn.EmbeddingBag(12, 3, mode="sum").state_dict()
    trained = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            bag = nn.EmbeddingBag(12, 3, mode="sum", grad_mode="fused")
        bag.load_state_dict({"weight": start["weight"].clone()}, assign=True)
        assert {parameter.device.type for parameter in bag.parameters()} == {"cpu"}
        optimizer = optim.Adam(bag.parameters(), lr=0.1, in_backward=True)
        call = torch.compile(bag, backend="aot_eager", fullgraph=True) if compiled else bag
        for step in range(3):
            call(torch.tensor([[1, step]])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append(bag.weight)
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_lookups_of_a_collection_follow_too() -> None:
    with torch.device("meta"):
        bags = kinds.table_of("collection", "fused", 12, 3)
    bags.requires_grad_(False)
    bags.load_state_dict(kinds.table_of("collection", "dense", 12, 3).state_dict(), assign=True)
    assert [parameter.device.type for parameter in bags.parameters()] == ["cpu"]
    assert bags({"f": torch.tensor([[1]])}).values().shape == (1, 3)


# ---- Weights whose rows are not contiguous --------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda x: x.t().contiguous().t(),
    "columns apart": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "rows apart": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
}
OPTIMIZERS = {"SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}, "Adagrad": {}, "RMSprop": {"weight_decay": 0.1}}


def of_torch(rows: torch.Tensor, name: str, batches: list) -> torch.Tensor:
    bags = torch.nn.EmbeddingBag.from_pretrained(rows.clone(), freeze=False, mode="sum")
    optimizer = getattr(torch.optim, name)(bags.parameters(), lr=0.1, **OPTIMIZERS[name])
    train_squares(bags, optimizer, batches)
    return bags.weight.detach()


@pytest.mark.filterwarnings("ignore:.*(each step copies|every step updates|weight_decay).*:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("grad_mode", MODES)
def test_tables_of_any_strides_are_trained_where_they_are(grad_mode: str | None, name: str, layout: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(12, 4)
    batches = [torch.tensor([[1, 2], [2, step]]) for step in range(4)]
    want = of_torch(rows, name, batches)
    for collected in (False, True):
        given = LAYOUTS[layout](rows)
        strides = given.stride()
        if collected:
            config = nn.EmbeddingBagConfig(name="t", num_embeddings=12, embedding_dim=4, feature_names=["f"])
            module: torch.nn.Module = nn.EmbeddingBagCollection([config], grad_mode=grad_mode)
            module.load_state_dict({"embedding_bags.t.weight": given}, assign=True)
        else:
            module = nn.EmbeddingBag.from_pretrained(given, freeze=False, mode="sum", grad_mode=grad_mode)
        optimizer = getattr(optim, name)(module.parameters(), lr=0.1, in_backward=True, **OPTIMIZERS[name])
        train_squares(module, optimizer, [{"f": ids} for ids in batches] if collected else batches)
        (weight,) = module.parameters()
        torch.testing.assert_close(weight.detach(), want, rtol=1e-5, atol=1e-6)
        assert weight.stride() == strides
        assert weight.data_ptr() == given.data_ptr()


@pytest.mark.filterwarnings("ignore:.*(each step copies|every step updates).*:UserWarning")
@pytest.mark.parametrize("grad_mode", MODES)
def test_a_table_tied_to_a_layer_by_a_transposition(grad_mode: str | None) -> None:
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.Linear(12, 4)
        tied = layer.weight.detach().t()
        if ours:
            table: torch.nn.Module = nn.Embedding.from_pretrained(tied, freeze=False, grad_mode=grad_mode)
            optimizer = optim.Adam([*table.parameters(), *layer.parameters()], lr=0.1, in_backward=True)
        else:
            table = torch.nn.Embedding.from_pretrained(tied, freeze=False)
            optimizer = torch.optim.Adam([*table.parameters(), *layer.parameters()], lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            (table(torch.tensor([step, 1])).sum() + layer(torch.eye(12)).square().sum()).backward()
            optimizer.step()
        assert layer.weight.data_ptr() == table.weight.data_ptr()
        results.append(layer.weight.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*(each step copies|every step updates).*:UserWarning")
@pytest.mark.parametrize("grad_mode", MODES)
@pytest.mark.parametrize("given", [torch.ones(1, 4).expand(12, 4), torch.ones(12, 1).expand(12, 4)])
def test_a_table_whose_elements_share_memory_is_refused(given: torch.Tensor, grad_mode: str | None) -> None:
    table = nn.Embedding.from_pretrained(given, freeze=False, grad_mode=grad_mode)
    optimizer = optim.Adam(table.parameters(), lr=0.1, in_backward=True)
    with pytest.raises((ValueError, RuntimeError), match=r"share memory, by .*weight.contiguous\(\)|Please clone\(\)"):
        train_squares(table, optimizer, [torch.tensor([1])])
