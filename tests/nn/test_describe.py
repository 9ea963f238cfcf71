"""``describe()`` and ``print`` of tables: what is in them; the mode of collections whose user has named none."""

import copy
import pickle
from typing import Any

import pytest
import torch
from variable.cases import on_disk

from torchsparse_rec import nn, optim
from torchsparse_rec.variable import EmbeddingVariableOption


def bags(**arguments: Any) -> nn.EmbeddingBagCollection:
    sizes = {"large": 100_000, "small": 10}
    configs = [
        nn.EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=2, feature_names=[name])
        for name, rows in sizes.items()
    ]
    return nn.EmbeddingBagCollection(configs, **arguments)


def test_rows_that_are_no_numbers_are_named() -> None:
    rows = torch.ones(70_000, 4)
    rows[3] = 0
    rows[[5, 9, 66_000, 69_999], 1] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    text = nn.Embedding.from_pretrained(rows, grad_mode="sparse").describe()
    assert text.splitlines() == [
        "Embedding: 70,000 rows x 4, float32, 1.12 MB; grad_mode='sparse', optimizer: none of ours",
        "  norms of rows: 0 to 2, median 2; zeros: 1; NaN or infinite: 4, of row 5, 9, 66000, 69999",
    ]
    rows[:] = torch.nan
    text = nn.EmbeddingBag.from_pretrained(rows.half()).describe()
    assert "float16, 560.00 kB; grad_mode=None" in text
    assert "norms of rows: none; zeros: 0; NaN or infinite: 70,000, of row 0, 1, 2, 3, 4, ..." in text


def test_stale_rows_are_described_as_they_are_read() -> None:
    table = nn.Embedding(4, 2, grad_mode="sparse")
    with torch.no_grad():
        table.weight.fill_(1.0)
    optimizer = optim.SGD(table.parameters(), lr=1.0, weight_decay=0.5)
    table(torch.tensor([1])).mul(0).sum().backward()
    optimizer.step()
    assert table.describe().splitlines() == [
        "Embedding: 4 rows x 2, float32, 32 bytes; grad_mode='sparse', optimizer: SGD",
        "  norms of rows: 0.707 to 0.707, median 0.707; zeros: 0",
    ]


def test_tables_that_grow_say_where_rows_are_and_how_often_keys_came(tmp_path: Any) -> None:
    option = EmbeddingVariableOption(storage_option=on_disk(tmp_path, 4))
    table = nn.EmbeddingVariable(2, name="items", initializer=3.0, capacity=4, ev_option=option)
    optimizer = optim.SGD(table.parameters(), lr=0.0)
    assert "keys: 0" in table.describe() and "norms" not in table.describe()
    for ids in ([1, 2, 2], [3, 4], [5, 6], [7, 1]):
        table(torch.tensor(ids)).sum().backward()
        optimizer.step()
    table.insert([99], [[torch.nan, 0.0]])
    lines = table.describe().splitlines()
    assert lines[0].startswith("EmbeddingVariable 'items': 8 rows x 2, float32, 64 bytes; grad_mode=None, optimizer: S")
    assert lines[1].startswith("  keys: 8; ") and " in dram (" in lines[1] and " in ssd (" in lines[1]
    assert lines[2] == "  norms of rows: 4.24 to 4.24, median 4.24; zeros: 0; NaN or infinite: 1, of key 99"
    assert lines[3].startswith("  lookups of a key in training: ") and lines[3].endswith(" to 2, median 1")
    assert lines[4].endswith("now 4")
    assert repr(table).splitlines()[1] == "  2, name='items', 8 keys, 8 rows, 64 bytes"


def test_collections_describe_each_table() -> None:
    lines = bags(grad_mode="sparse").describe().splitlines()
    assert [line.partition(";")[0] for line in lines[::2]] == [
        "large: 100,000 rows x 2, float32, 800.00 kB",
        "small: 10 rows x 2, float32, 80 bytes",
    ]
    assert all("grad_mode='sparse'" in line for line in lines[::2]) and len(lines) == 4
    assert "(large): BagTable(100000, 2, 800.00 kB)" in repr(bags())
    quantized = nn.quantize(bags())
    assert quantized.describe() == quantized.explain()


def test_collections_choose_the_mode_where_no_one_does() -> None:
    """README's shortest model trains large tables by rows; with an optimizer of torch's, gradients are torch's."""
    features = {"large": torch.tensor([[5], [7]]), "small": torch.tensor([[5], [7]])}
    for make, sparse in ((optim.Adam, True), (torch.optim.Adam, False)):
        model = bags()
        optimizer = make(model.parameters())
        model(features).values().sum().backward()
        grads = [model.embedding_bags[name].weight.grad for name in ("large", "small")]
        assert [grad.is_sparse for grad in grads] == [sparse, False]
        optimizer.step()


def test_the_default_goes_by_the_device_until_a_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection on a GPU has torch's layout: ``auto`` has not been measured there."""
    model = bags()
    assert model.grad_mode == "auto" and bags(device="meta").grad_mode == "auto"
    named = bags(grad_mode="auto")
    left = copy.deepcopy(model)
    monkeypatch.setattr(nn.EmbeddingBagCollection, "device", torch.device("cuda"))
    assert model.double().grad_mode is None and named.double().grad_mode == "auto"
    monkeypatch.undo()
    assert model.double().grad_mode == "auto"
    model.grad_mode = "dense"
    assert model.double().grad_mode == "dense"
    for again in (left, pickle.loads(pickle.dumps(left))):
        assert again.grad_mode == "auto" and again._by_device
    assert "by_device" not in "".join(left.state_dict())


def test_checkpoints_of_a_collection_without_a_mode_load() -> None:
    """States of collections made before the default was auto have no estimate of lookups."""
    before, after = bags(grad_mode=None), bags()
    after.load_state_dict(before.state_dict())
    assert torch.equal(after.embedding_bags["large"].weight, before.embedding_bags["large"].weight)
    before.load_state_dict(after.state_dict())
