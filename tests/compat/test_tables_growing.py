"""Tables that grow, from and to checkpoints with DeepRec's names."""

import pytest
import torch

from torchsparse_rec import nn, optim
from torchsparse_rec.compat.checkpoints.format import CheckpointReader
from torchsparse_rec.compat.checkpoints.writer import CheckpointWriter
from torchsparse_rec.compat.tensorflow import load_tables, save_tables


def grown(optimizer=None):
    table = nn.EmbeddingVariable(2, name="items")
    model = torch.nn.ModuleDict({"itemz": table})
    its = None if optimizer is None else optimizer(model.parameters())
    return model, table, its


def train(table, optimizer, keys):
    optimizer.zero_grad()
    table(torch.tensor(keys)).square().sum().backward()
    optimizer.step()


def test_growing_tables_there_and_back(tmp_path):
    model, table, optimizer = grown(lambda p: optim.Adam(p, lr=0.1))
    for keys in ([7, 2**40, -3], [7, 9], [-3]):
        train(table, optimizer, keys)
    path = str(tmp_path / "model")
    save_tables(path, model, optimizer=optimizer)
    names = set(CheckpointReader(path).entries)
    suffixes = ("-keys", "-values", "-freqs", "-versions")
    assert names == {f"itemz{slot}{x}" for slot in ("", "/Adam", "/Adam_1") for x in suffixes} | {
        *("beta1_power", "beta2_power", "global_step")
    }
    other, its_table, its = grown(lambda p: optim.Adam(p, lr=0.1))
    load_tables(path, other, optimizer=its)
    for a, b in zip(table.export(), its_table.export(), strict=True):
        assert torch.equal(a, b)
    its_table.global_step = table.global_step
    for keys in ([9, 11], [7]):
        train(table, optimizer, keys)
        train(its_table, its, keys)
    assert torch.equal(table.lookup(torch.tensor([7, 9, 11, -3])), its_table.lookup(torch.tensor([7, 9, 11, -3])))
    with pytest.raises(ValueError, match="'itemz.weight' must have no rows yet, got 5"):
        load_tables(path, other)


def test_growing_tables_in_deeprecs_partitions(tmp_path):
    """As DeepRec's saver names them, in partitions, without counts, and with slots in an order of their own."""
    keys, values = torch.tensor([4, 8, 15, 16]), torch.randn(4, 2)
    path = str(tmp_path / "model")
    with CheckpointWriter(path) as writer:
        for k, part in enumerate((slice(0, 1), slice(1, 4))):
            prefix, slot = f"a/items/part_{k}", f"a/items/part_{k}/Adagrad"
            writer.add(f"{prefix}-keys", keys[part])
            writer.add(f"{prefix}-values", values[part])
            for name in ("freqs", "versions"):
                writer.add(f"{prefix}-{name}", torch.empty(0, dtype=torch.int64))
            writer.add(f"{prefix}-partition_offset", torch.zeros(1001, dtype=torch.int32))
            writer.add(f"{slot}-keys", keys[part].flip(0))
            writer.add(f"{slot}-values", values[part].flip(0) + 10)
    model, table, optimizer = grown(lambda p: optim.Adagrad(p, lr=0.1))
    load_tables(path, model, {"itemz": "items"}, optimizer=optimizer)
    assert torch.equal(table.lookup(keys), values)
    rows = table.keys.find(keys)
    assert torch.equal(optimizer.state[table.weight]["sum"][rows], values + 10)


def test_growing_tables_from_fixed_ones(tmp_path):
    checkpoint = str(tmp_path / "model")
    with CheckpointWriter(checkpoint) as writer:
        writer.add("cities", torch.full((5, 2), 1.5))
        writer.add("cities/Adagrad", torch.full((5, 2), 1.25))
    model, table, optimizer = grown(lambda p: optim.Adagrad(p, lr=0.1))
    load_tables(checkpoint, model, {"itemz": "cities"}, optimizer=optimizer)
    assert torch.equal(table.lookup(torch.arange(5)), torch.full((5, 2), 1.5))
    assert torch.equal(optimizer.state[table.weight]["sum"][table.keys.find(torch.arange(5))], torch.full((5, 2), 1.25))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"keys": torch.ones(3), "values": torch.ones(3, 2)}, r"'items-keys' must be keys \[N\], got torch.float32"),
        ({"keys": torch.ones(3).long(), "values": torch.ones(2, 2)}, r"must have the shape \[3, 2\], got \[2, 2\]"),
        ({"keys": torch.ones(3).long(), "values": torch.ones(3, 4)}, r"must have the shape \[3, 2\], got \[3, 4\]"),
        (
            {"keys": torch.arange(3), "values": torch.ones(3, 2), "freqs": torch.ones(2).long()},
            r"'items-freqs' must have the shape \[3\], got \[2\]",
        ),
    ],
)
def test_growing_tables_that_are_refused(tmp_path, tensors, message):
    path = str(tmp_path / "model")
    with CheckpointWriter(path) as writer:
        for name, tensor in tensors.items():
            writer.add(f"items-{name}", tensor)
    with pytest.raises(ValueError, match=message):
        load_tables(path, grown()[0], {"itemz": "items"})
