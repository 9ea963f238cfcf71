"""``max_norm`` of tables: rows are clipped when they are read, in every mode, as TensorFlow's columns do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from torchsparse_rec import features, optim
from torchsparse_rec.compat.tensorflow import SparseTensor, nn
from torchsparse_rec.features import FeatureTransform
from torchsparse_rec.nn import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

TABLE = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.3, 0.4], [-6.0, 8.0]])
IDS = {"x": (torch.tensor([0, 2, 3, 3, 1]), torch.tensor([0, 3, 3, 5]))}


def clipped(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows = table[ids]
    return rows * (2.0 / rows.norm(dim=1, keepdim=True).clamp(min=2.0))


def collection(pooling: str, mode: str | None, **arguments: Any) -> EmbeddingBagCollection:
    names = {"clipped": 2.0, "plain": None}
    configs = [
        EmbeddingBagConfig(4, 2, name, feature_names=["x"], pooling=pooling, max_norm=norm)
        for name, norm in names.items()
    ]
    made = EmbeddingBagCollection(configs, grad_mode=mode, **arguments)
    with torch.no_grad():
        for table in made.embedding_bags.values():
            table.weight.copy_(TABLE)
    return made


@pytest.mark.parametrize(
    ("pooling", "weighted"), [*((x, y) for x in ("sum", "mean", "sqrtn") for y in (False, True)), ("max", False)]
)
def test_rows_are_clipped_before_they_are_pooled(pooling: str, weighted: bool) -> None:
    bags = collection(pooling, "dense", is_weighted=weighted)
    weights = torch.tensor([0.5, 1.0, 2.0, 1.0, 3.0])
    features_ = {"x": (*IDS["x"], weights) if weighted else IDS["x"]}
    made = bags(features_)
    both = EmbeddingBagCollection([EmbeddingBagConfig(5, 2, "t", feature_names=["x"], pooling=pooling)], weighted)
    with torch.no_grad():
        next(both.parameters()).copy_(clipped(TABLE, IDS["x"][0]))
    entries = {"x": (torch.arange(5), *features_["x"][1:])}
    torch.testing.assert_close(made["x@clipped"], both(entries)["x"])
    assert torch.equal(bags.embedding_bags["clipped"].weight, TABLE)


@pytest.mark.parametrize("mode", [None, "dense", "sparse", "auto"])
def test_training_goes_through_the_clip(mode: str | None) -> None:
    """Train by torch's optimizers."""
    bags = collection("sum", mode)
    table = TABLE.clone().requires_grad_()
    optimizer, other = torch.optim.SGD([bags.embedding_bags["clipped"].weight], 0.1), torch.optim.SGD([table], 0.1)
    if mode == "auto":
        bags.use_optimizer(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        bags(IDS)["x@clipped"].square().sum().backward()
        rows = clipped(table, IDS["x"][0])
        (rows[:3].sum(0).square().sum() + rows[3:].sum(0).square().sum()).backward()
        optimizer.step()
        other.step()
    torch.testing.assert_close(bags.embedding_bags["clipped"].weight, table)


@pytest.mark.parametrize("mode", ["dense", "sparse", "fused"])
def test_training_by_our_optimizers(mode: str) -> None:
    bags, table = collection("mean", mode), TABLE.clone().requires_grad_()
    optimizer, other = optim.Adam(bags.parameters(), lr=0.1, in_backward=True), torch.optim.Adam([table], lr=0.1)
    for ids in ([0, 2, 3], [3, 3], [0, 1, 2]):
        optimizer.zero_grad()
        other.zero_grad()
        bags({"x": (torch.tensor(ids), torch.tensor([0, len(ids)]))})["x@clipped"].square().sum().backward()
        clipped(table, torch.tensor(ids)).mean(0).square().sum().backward()
        optimizer.step()
        other.step()
    bags.eval()
    torch.testing.assert_close(bags.embedding_bags["clipped"].weight, table, rtol=1e-5, atol=1e-5)


def test_padding_and_features_of_several_sizes() -> None:
    configs = [EmbeddingBagConfig(4, 2, "t", feature_names=["x", "y"], pooling="mean", padding_idx=2, max_norm=2.0)]
    bags = EmbeddingBagCollection(configs)
    with torch.no_grad():
        bags.embedding_bags["t"].weight.copy_(TABLE)
    made = bags.lookup({"x": IDS["x"], "y": torch.tensor([[3], [2]])})
    torch.testing.assert_close(made["x"][0], clipped(TABLE, torch.tensor([0, 3])).mean(0))
    torch.testing.assert_close(made["y"], torch.tensor([[-1.2, 1.6], [0.0, 0.0]]))


def test_rows_of_sequences_and_half_tables() -> None:
    rows = EmbeddingCollection([EmbeddingConfig(4, 2, "t", "FP16", ["x"], max_norm=2.0)])
    with torch.no_grad():
        next(rows.parameters()).copy_(TABLE * 1000)
    found = rows(IDS)["x"].values()
    assert found.dtype == torch.float16
    torch.testing.assert_close(found[:2].float(), torch.tensor([[1.2, 1.6], [1.2, 1.6]]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), 1e20, "1"])
def test_norms_that_are_none(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"tables\[0\].max_norm must be None, for no limit, or above 0 and at most 1e"):
        EmbeddingBagCollection([EmbeddingBagConfig(4, 2, "t", feature_names=["x"], max_norm=bad)])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_columns_with_max_norm(combiner: str) -> None:
    """Compare with the safe lookup that TensorFlow's column makes; other tests compare that lookup with TensorFlow."""
    word = features.weighted_categorical_column(features.categorical_column_with_identity("x", 4), "w")
    transform = FeatureTransform([features.embedding_column(word, 2, combiner, max_norm=2.0)])
    (config,) = transform.weighted_embedding_bag_configs()
    bags = EmbeddingBagCollection([config], is_weighted=True)
    with torch.no_grad():
        next(bags.parameters()).copy_(TABLE)
    x = {"x": [[0, 2], [], [3, -1, 1]], "w": [[0.5, 1.0], [], [2.0, 1.0, -1.0]]}
    places = np.array([[0, 0], [0, 1], [2, 0], [2, 1], [2, 2]])
    ids, weights = (SparseTensor(places, np.concatenate(x[key]), [3, 3]) for key in ("x", "w"))
    ids = ids.with_values(ids.values.long())
    wanted = nn.safe_embedding_lookup_sparse(
        TABLE, ids, weights.with_values(weights.values.float()), combiner=combiner, max_norm=2.0
    )
    torch.testing.assert_close(bags(transform(x).weighted).values(), wanted)
