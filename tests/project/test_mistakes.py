"""Mistakes that a user makes: the error names argument, feature or column, the value, its place, and the way out."""

import datetime
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from torchsparse_rec import (
    JaggedTensor,
    KeyedJaggedCollate,
    KeyedJaggedTensor,
    checkpoint,
    data,
    distributed,
    nn,
    optim,
    serving,
    variable,
)
from torchsparse_rec import features as columns

pa = pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")

IDS = torch.tensor([1, 2, 3])


def configs(dim: int = 4) -> list[nn.EmbeddingBagConfig]:
    """Return the tables of users, and of items with two features."""
    return [
        nn.EmbeddingBagConfig(10, dim, name="users", feature_names=["user"]),
        nn.EmbeddingBagConfig(50, dim, name="items", feature_names=["item", "seen"]),
    ]


def bags(grad_mode: str = "sparse", **options) -> nn.EmbeddingBagCollection:
    """Return a collection of these tables."""
    return nn.EmbeddingBagCollection(configs(), grad_mode=grad_mode, **options)


def batch(ids=(3, 9, 41, 7, 5, 5, 6), lengths=(1, 1, 1, 1, 3, 0), dtype=torch.int64, **options) -> KeyedJaggedTensor:
    """Return two examples of the collection's three features."""
    lengths = torch.tensor(lengths)
    return KeyedJaggedTensor(["user", "item", "seen"], torch.tensor(ids, dtype=dtype), lengths=lengths, **options)


def growing(capacity: int = 1024, feature: str = "item", **options) -> nn.EmbeddingBagCollection:
    """Return a collection of one table that grows."""
    option = variable.EmbeddingVariableOption(**options)
    config = nn.EmbeddingBagConfig(capacity, 4, name="goods", feature_names=[feature], ev_option=option)
    return nn.EmbeddingBagCollection([config], grad_mode="sparse")


def transform(*others) -> columns.FeatureTransform:
    """Return the transform of an identity column and of others."""
    return columns.FeatureTransform(
        [columns.embedding_column(columns.categorical_column_with_identity("user", 10), 4), *others]
    )


def record(**values) -> pa.RecordBatch:
    """Return a record batch."""
    return pa.RecordBatch.from_pydict(values)


def written(path: Path, *batches: pa.RecordBatch) -> list[str]:
    """Write a Parquet file of each batch. Return their names."""
    paths = [str(path / f"day_{i}.parquet") for i in range(len(batches))]
    for name, rows in zip(paths, batches, strict=True):
        data.write_parquet(name, [rows])
    return paths


def csv(path: Path, text: str) -> str:
    """Write a CSV file. Return its name."""
    (path / "log.csv").write_text(text)
    return str(path / "log.csv")


def trained(module: torch.nn.Module, optimizer: Callable, inputs=IDS, backwards: int = 1) -> None:
    """Train a module for a step."""
    optimizer = optimizer(module.parameters())
    for _ in range(backwards):
        x = module(inputs)
        (x if isinstance(x, torch.Tensor) else x.values()).sum().backward()
    optimizer.step()


def model(dim: int = 4, grows: bool = True, **layers: torch.nn.Module) -> torch.nn.ModuleDict:
    """Return a model of a table that may grow, a table of fixed size, and other layers."""
    users = nn.EmbeddingVariable(dim, name="users") if grows else nn.Embedding(10, dim)
    return torch.nn.ModuleDict({"users": users, "goods": nn.Embedding(50, dim, grad_mode="sparse"), **layers})


def loaded(folder: Path, other: torch.nn.Module, optimizer: Callable | None = None) -> None:
    """Save a model with Adagrad, and load it into another one."""
    first = model()
    its_optimizer = optim.Adagrad(first.parameters(), lr=0.1)
    (first["users"](IDS).sum() + first["goods"](IDS).sum()).backward()
    its_optimizer.step()
    checkpoint.save(folder / "run", first, its_optimizer)
    checkpoint.load(folder / "run", other, optimizer and optimizer(other.parameters(), lr=0.1))


def restored(folder: Path) -> None:
    """Save a table that grows, and restore it into one of another dimension."""
    table = nn.EmbeddingVariable(4, name="users")
    table(IDS)
    table.save(folder / "table")
    nn.EmbeddingVariable(8, name="clients").restore(folder / "table")


def sharded(module: torch.nn.Module, plan, optimizer: Callable | None = None) -> None:
    """Shard a module in a job of one rank, and step it with an optimizer that has stepped it before."""
    if optimizer is not None:
        step = optimizer(module.parameters())
        module(batch()).values().sum().backward()
        step.step()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        distributed.shard(module, init_device_mesh("cpu", (1,)), plan)
        module(batch()).values().sum().backward()
        step.step()
    finally:
        dist.destroy_process_group()


def on_disk(folder: Path) -> None:
    """Publish a table whose rows are on disk."""
    module = growing(storage_option=variable.StorageOption("DRAM_SSD", str(folder / "rows"), [2**20]))
    module({"item": (IDS, torch.tensor([0, 3]))})
    serving.save_for_serving(module, folder / "served")


def checkpoint_served(folder: Path) -> None:
    """Serve the folder of a checkpoint."""
    checkpoint.save(folder / "run", model())
    serving.load_for_serving(folder / "run")


class Activation(torch.nn.Module):
    """A layer that holds a lambda, which cannot be pickled."""

    def __init__(self):
        super().__init__()
        self.function = lambda x: x


def clipped() -> None:
    """Clip gradients that were used within backward."""
    table = nn.Embedding(50, 4, grad_mode="fused")
    optimizer = optim.SGD(table.parameters(), lr=0.1, in_backward=True)
    table(IDS).sum().backward()
    optim.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)


# Of each kind five: a name, what is done with a folder, and the words of the error.
MISTAKES: dict[str, list[tuple[str, Callable[[Path], object], tuple[str, ...]]]] = {
    "ids out of range": [
        (
            "bag",
            lambda _: nn.EmbeddingBag(50, 4)(torch.tensor([[1, 2], [3, 50]])),
            ("input[1, 1]", "[0, 50)", "got 50"),
        ),
        ("negative", lambda _: nn.Embedding(50, 4)(torch.tensor([3, -1])), ("input[1]", "[0, 50)", "got -1")),
        (
            "collection",
            lambda _: bags()(batch(ids=(3, 9, 41, 7, 5, 5, 50))),
            ("'seen'", "'items'", "example 0", "[0, 50)", "got 50"),
        ),
        (
            "identity column",
            lambda _: nn.EmbeddingBagCollection(transform().embedding_bag_configs())(
                transform()({"user": [3, 12]}).sparse
            ),
            ("'user'", "'user_embedding'", "example 1", "[0, 10)", "got 12"),
        ),
        (
            "lookup_sparse",
            lambda _: nn.lookup_sparse(
                [nn.Embedding(10, 4), nn.Embedding(50, 4)],
                [(IDS, torch.tensor([0, 3])), (IDS + 47, torch.tensor([0, 3]))],
                ["sum", "sum"],
            ),
            ("indices[1]", "example 0", "[0, 50)", "got 50"),
        ),
    ],
    "dtype": [
        ("floats", lambda _: nn.EmbeddingBag(50, 4)(torch.tensor([[1.0, 2.0]])), ("input", "float32", "int64")),
        ("float values of a collection", lambda _: bags()(batch(dtype=torch.float32)), ("values", "float32", "int64")),
        (
            "weights",
            lambda _: nn.EmbeddingBag(50, 4, mode="sum")(IDS[None], per_sample_weights=torch.ones(1, 3).double()),
            ("per_sample_weights", "Double", "Float"),
        ),
        ("list", lambda _: nn.EmbeddingBag(50, 4)([[1, 2], [3, 4]]), ("input", "list", "torch.tensor(")),
        ("array", lambda _: nn.Embedding(50, 4)(np.array([1, 2])), ("input", "ndarray", "torch.from_numpy(")),
    ],
    "shape": [
        ("no offsets", lambda _: nn.EmbeddingBag(50, 4)(IDS), ("input", "offsets", "rank 1")),
        ("lengths of fewer ids", lambda _: bags()(batch(lengths=(1, 1, 1, 1, 3, 1))), ("lengths", "'seen'", "8", "7")),
        (
            "decreasing offsets",
            lambda _: nn.EmbeddingBag(50, 4)(IDS, torch.tensor([0, 2, 1])),
            ("offsets", "2 followed by 1", "position 2"),
        ),
        (
            "columns of two lengths",
            lambda _: transform(columns.numeric_column("age"))({"user": [1, 2, 3], "age": [20, 45]}),
            ("'age'", "'user'", "2", "3"),
        ),
        (
            "batch sizes that differ",
            lambda _: bags()(
                KeyedJaggedTensor(["user", "item", "seen"], IDS, lengths=torch.ones(3).long(), stride_per_key=[1, 2, 0])
            ),
            ("features", "'item'", "1", "2", "lookup("),
        ),
    ],
    "missing key": [
        (
            "a feature of a table",
            lambda _: bags()(KeyedJaggedTensor(["user", "itme"], IDS, lengths=torch.tensor([1, 2]))),
            ("'item'", "'user', 'itme'"),
        ),
        ("a result's key", lambda _: bags()(batch())["itme"], ("'itme'", "'user', 'item', 'seen'")),
        (
            "a column",
            lambda _: transform(columns.numeric_column("age"))({"user": [1], "ago": [20]}),
            ("'age'", "'user', 'ago'"),
        ),
        (
            "a column of a file",
            lambda folder: list(data.read_parquet(written(folder, record(user=[1])), columns=["usr"])),
            ("day_0.parquet", "'usr'", "'user'"),
        ),
        (
            "an entry of an example",
            lambda _: KeyedJaggedCollate(["user", "seen"])([{"user": 7, "seen": [3]}, {"user": 9, "saw": [1]}]),
            ("'seen'", "example 1", "'user', 'saw'"),
        ),
    ],
    "missing value": [
        (
            "a null integer",
            lambda _: data.to_tensors(record(user=[3, None], age=[1, 2])),
            ("'user'", "null", "row 1", "fill"),
        ),
        (
            "a null number",
            lambda _: transform(columns.numeric_column("price"))({"user": [1, 2], "price": [1.0, None]}),
            ("'price'", "example 1", "default_value"),
        ),
        (
            "NaN among ids",
            lambda _: bags()({"user": np.array([3.0, np.nan]), "item": np.array([1, 2]), "seen": np.array([1, 2])}),
            ("'user'", "float64", "Int64"),
        ),
        (
            "an integer that a float rounds",
            lambda _: data.to_tensors(record(user=[None, 2**24 + 1]), fill=float("nan")),
            ("'user'", "16777217", "row 1", "fill"),
        ),
        (
            "no adapt",
            lambda _: transform(columns.numeric_column("price", normalizer_fn=columns.Standardize()))(
                {"user": [1], "price": [1.0]}
            ),
            ("'price'", "adapt("),
        ),
    ],
    "wrong column type": [
        (
            "text in a CSV file",
            lambda folder: list(data.read_csv(csv(folder, "user\n3\nann\n"), types={"user": "int64"})),
            ("log.csv", "line 3", "'user'", "'ann'", "string"),
        ),
        (
            "strings in an identity column",
            lambda _: transform()({"user": ["ann", "bob"]}),
            ("'user'", "string", "categorical_column_with_hash_bucket"),
        ),
        (
            "strings in a numeric column",
            lambda _: transform(columns.numeric_column("age"))({"user": [1], "age": ["20"]}),
            ("'age'", "string", "number", "cast"),
        ),
        (
            "files that differ",
            lambda folder: list(
                data.read_parquet(
                    written(folder, record(user=pa.array([1], "int32")), record(user=pa.array([1], "int64")))
                )
            ),
            ("day_1.parquet", "'user'", "int32", "int64", "unify=True"),
        ),
        (
            "dates",
            lambda _: data.to_tensors(record(time=[datetime.date(2026, 11, 30)])),
            ("'time'", "date32", "with_time_parts"),
        ),
    ],
    "optimizer of another mode": [
        (
            "torch's Adam of a table that grows",
            lambda _: trained(nn.EmbeddingVariable(4, name="goods", grad_mode="dense"), torch.optim.Adam),
            ("'goods'", "torch.optim.Adam", "torchsparse_rec.optim"),
        ),
        (
            "SparseAdam of a table that grows",
            lambda _: trained(nn.EmbeddingVariable(4, name="goods", grad_mode="sparse"), torch.optim.SparseAdam),
            ("'goods'", "SparseAdam", "torchsparse_rec.optim", "lazy=True"),
        ),
        (
            "torch's SGD of a fused table",
            lambda _: trained(bags("fused"), lambda x: torch.optim.SGD(x, lr=0.1), batch()),
            ("fused", "torchsparse_rec.optim", "in_backward=True"),
        ),
        (
            "two backwards of a fused table",
            lambda _: trained(
                nn.Embedding(50, 4, grad_mode="fused"), lambda x: optim.SGD(x, lr=0.1, in_backward=True), backwards=2
            ),
            ("fused", "backward", "step()", "grad_mode='sparse'"),
        ),
        ("clipping of a fused table", lambda _: clipped(), ("fused", "clip_grad_norm_", "grad_mode='sparse'")),
    ],
    "collection and single mixed up": [
        (
            "KeyedJaggedTensor to a bag",
            lambda _: nn.EmbeddingBag(50, 4)(batch()),
            ("input", "KeyedJaggedTensor", "EmbeddingBagCollection"),
        ),
        ("tensor to a collection", lambda _: bags()(IDS), ("features", "Tensor", "KeyedJaggedTensor")),
        (
            "JaggedTensor to a collection",
            lambda _: bags()(JaggedTensor(IDS, lengths=torch.tensor([1, 2]))),
            ("features", "JaggedTensor", "KeyedJaggedTensor.from_jt_dict"),
        ),
        (
            "configs of the other kind",
            lambda _: nn.EmbeddingBagCollection([nn.EmbeddingConfig(10, 4, name="users", feature_names=["user"])]),
            ("tables[0]", "'users'", "EmbeddingConfig", "EmbeddingBagConfig", "EmbeddingCollection"),
        ),
        (
            "a config that is in no list",
            lambda _: nn.EmbeddingBagCollection(configs()[0]),
            ("tables", "EmbeddingBagConfig", "list"),
        ),
    ],
    "capacities of tables that grow": [
        (
            "fewer than a step's ids",
            lambda _: growing(evict_option=variable.LRUEvict(capacity=2))({"item": (IDS, torch.tensor([0, 3]))}),
            ("'goods'", "capacity of 2", "1 have no room", "LRUEvict"),
        ),
        ("none", lambda _: growing(capacity=-1), ("'goods'", "num_embeddings", "capacity", "-1")),
        ("none kept", lambda _: variable.LRUEvict(capacity=0), ("LRUEvict", "capacity", "got 0", "1")),
        (
            "sizes of fewer tiers",
            lambda folder: growing(storage_option=variable.StorageOption("HBM_DRAM_SSD", str(folder), [9999])),
            ("storage_size", "HBM_DRAM_SSD", "2 tiers", "got 1"),
        ),
        (
            "no folder",
            lambda _: growing(storage_option=variable.StorageOption("DRAM_SSD", storage_size=[2**20])),
            ("storage_path", "DRAM_SSD", "folder"),
        ),
    ],
    "checkpoint of another model": [
        ("another dimension", lambda folder: loaded(folder, model(dim=8)), ("run", "goods", "[50, 4]", "[50, 8]")),
        ("another layer", lambda folder: loaded(folder, model(top=torch.nn.Linear(4, 1))), ("run", "top.weight")),
        ("another optimizer", lambda folder: loaded(folder, model(), optim.Adam), ("run", "Adagrad", "Adam")),
        (
            "a table that does not grow",
            lambda folder: loaded(folder, model(grows=False)),
            ("run", "users", "EmbeddingVariable"),
        ),
        ("a table of another dimension", restored, ("table", "'clients'", "embedding_dim", "4", "8")),
    ],
    "ranks": [
        ("no process group", lambda _: distributed.shard(bags()), ("torch.distributed", "init_process_group")),
        (
            "plan of an unknown table",
            lambda _: sharded(bags(), {"itmes": distributed.RowWise()}),
            ("plan", "'itmes'", "'items'", "'users'"),
        ),
        (
            "rank that is not there",
            lambda _: sharded(bags(), {"items": distributed.TableWise(3)}),
            ("plan", "'items'", "rank", "3", "[0, 1)"),
        ),
        (
            "columns of a table that grows",
            lambda _: sharded(growing(), distributed.ColumnWise([0])),
            ("'goods'", "ColumnWise", "RowWise", "TableWise"),
        ),
        (
            "optimizer before shard",
            lambda _: sharded(bags(), distributed.RowWise(), optim.Adagrad),
            ("Adagrad", "after", "shard"),
        ),
    ],
    "serving folder": [
        ("empty", lambda folder: serving.load_for_serving(folder / "nothing"), ("nothing", "save_for_serving")),
        ("checkpoint", checkpoint_served, ("run", "save_for_serving", "checkpoint.load")),
        ("rows on disk", on_disk, ("'goods'", "disk", "served")),
        (
            "lambda",
            lambda folder: serving.save_for_serving(torch.nn.Sequential(Activation()), folder),
            ("save_for_serving", "lambda", "function", "module"),
        ),
        (
            "arguments swapped",
            lambda folder: serving.save_for_serving(str(folder), model()),
            ("model", "str", "Module", "folder"),
        ),
    ],
}
CASES = [
    pytest.param(call, words, id=f"{kind}: {name}")
    for kind, mistakes in MISTAKES.items()
    for name, call, words in mistakes
]


def test_there_are_five_of_each_kind():
    assert {kind: len(mistakes) for kind, mistakes in MISTAKES.items() if len(mistakes) != 5} == {}
    assert len(CASES) == 60


@pytest.mark.parametrize(("call", "words"), CASES)
def test_the_error_says_what_to_do(call: Callable[[Path], object], words: tuple[str, ...], tmp_path: Path):
    with pytest.raises(Exception) as error:
        call(tmp_path)
    message = str(error.value)
    assert [word for word in words if word not in message] == [], message
