"""
Uses of the library, right ones and wrong ones, of which mypy and pyright must refuse exactly the latter: `make lint`.

A comment that ignores an error where there is none is an error itself (mypy's warn_unused_ignores, pyright's
reportUnnecessaryTypeIgnoreComment). Nothing here is run. `compat` is left out: checkers find it only in a wheel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

from torchsparse_rec import JaggedTensor, KeyedJaggedTensor, KeyedTensor, data, distributed, features, nn, ops, optim
from torchsparse_rec.checkpoint import CheckpointStore
from torchsparse_rec.typing import Combiner, GradMode

ids = torch.tensor([1, 2])
weight = torch.rand(9, 4)


class Model(torch.nn.Module):
    """A model of a user's."""

    def __init__(self, grad_mode: GradMode | None) -> None:
        super().__init__()
        self.users = nn.Embedding(9, 4, grad_mode=grad_mode)

    def embed(self, users: Tensor) -> Tensor:
        """Look up users: what the table returns is known."""
        return self.users(users)


# ---- Gradient modes ------------------------------------------------------------------------------------------------


def grad_modes(word: str, modes: list[GradMode]) -> None:
    """Set the modes of tables."""
    for mode in modes:
        nn.EmbeddingBag(9, 4, grad_mode=mode)
    table = nn.Embedding(9, 4, grad_mode="fused")
    assert_type(table.grad_mode, "GradMode | None")
    table.grad_mode = "dense"
    table.grad_mode = None
    nn.EmbeddingVariable(4, grad_mode="sparse")
    nn.EmbeddingBagCollection([], grad_mode="auto")
    Model("auto")
    nn.Embedding(9, 4, grad_mode="spares")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nn.Embedding(9, 4, grad_mode=word)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nn.EmbeddingBag(9, 4, grad_mode=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nn.EmbeddingVariable(4, grad_mode="none")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nn.EmbeddingCollection([], grad_mode="")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Model("Auto")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    table.grad_mode = "fast"  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]


# ---- What calls return ---------------------------------------------------------------------------------------------


def calls(batch: KeyedJaggedTensor, columns: features.FeatureTransform) -> None:
    """Call modules."""
    assert_type(nn.Embedding(9, 4)(ids), Tensor)
    assert_type(nn.EmbeddingBag(9, 4)(ids, ids), Tensor)
    assert_type(nn.EmbeddingVariable(4)(ids), Tensor)
    assert_type(nn.EmbeddingBagCollection([])(batch), KeyedTensor)
    assert_type(nn.EmbeddingCollection([])(batch), dict[str, JaggedTensor])
    assert_type(columns({}).dense, "Tensor | None")
    assert_type(nn.Embedding.from_pretrained(weight)(ids), Tensor)
    nn.Embedding(9, 4)(ids).sum().backward()
    nn.Embedding(9, 4)([1, 2])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nn.Embedding(9, 4)()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    nn.EmbeddingBag(9, 4)(ids, offset=ids)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    nn.EmbeddingBagCollection([])(batch).sum()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    nn.Embedding(9, 4)(ids).rows  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue] # noqa: B018


# ---- Conversion ----------------------------------------------------------------------------------------------------


def conversions(model: Model) -> None:
    """Convert models, which keep their types."""
    assert_type(nn.convert(model), Model)
    assert_type(nn.convert(torch.nn.Sequential()), torch.nn.Sequential)
    assert_type(nn.convert(torch.nn.Embedding(9, 4), grad_mode="sparse"), torch.nn.Embedding)
    assert_type(nn.revert(model), Model)
    assert_type(nn.revert(nn.Embedding(9, 4)), torch.nn.Embedding)
    assert_type(distributed.shard(model, plan={"users": "row_wise"}), Model)
    nn.convert(model).embed(ids)
    nn.convert(model, grad_mode="fsued")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nn.convert(model).embedded(ids)  # type: ignore[operator]  # pyright: ignore[reportCallIssue]
    assert_type(nn.quantize(model, "int4"), Model)
    nn.quantize(model, rows="int2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    nn.convert([model])  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    nn.revert(nn.Embedding(9, 4)).explain()  # type: ignore[operator]  # pyright: ignore[reportCallIssue]
    distributed.shard(model, plan="rowwise")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ---- Other words ---------------------------------------------------------------------------------------------------


def words(combiner: Combiner, word: str) -> None:
    """Give words to functions and layers."""
    ops.embedding_bag(weight, ids, ids, mode="sqrtn")
    ops.embedding_lookup_sparse(weight, ids, row_ids=ids, num_rows=3, combiner=combiner)
    ops.embedding_lookup(weight, ids, partition_strategy="div")
    ops.ExampleColumn("bytes")
    data.PrebatchedDataset("f", verify="never")
    data.read_tfrecord("f", compression=None)
    data.convert("a.csv", "b", target_format="parquet")
    CheckpointStore("folder").writer("delta")
    user = features.categorical_column_with_identity("user", 9)
    features.embedding_column(user, 4, combiner=combiner)
    nn.EmbeddingBag(9, 4, mode="mul")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ops.embedding_bag(weight, ids, ids, mode=word)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ops.embedding_lookup(weight, ids, partition_strategy="rows")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ops.ExampleColumn("string")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    data.PrebatchedDataset("f", verify="last")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    data.read_tfrecord("f", compression="zip")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    data.convert("a", "b", target_format="xml")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    CheckpointStore("folder").writer("half")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    features.embedding_column(user, 4, "max")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def optimizers(model: Model) -> None:
    """Make optimizers."""
    optim.Adam(model.parameters(), lr=0.1).step()
    optim.Adam(model.parameters(), lr="0.1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
