"""Lookups in several embedding variables and fixed tables at once, by SOK's function and by collections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nn.of_torch import pooled as pooled_by_hand
from torch import Tensor

from torchsparse_rec import optim
from torchsparse_rec.jagged import KeyedJaggedTensor
from torchsparse_rec.nn import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingVariable,
    lookup_sparse,
)
from torchsparse_rec.variable import EmbeddingVariableOption, InitializerOption

# ---- SOK's lookups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grad_mode", "combiner", "weighs"),
    [
        *(("sparse", combiner, weighs) for combiner in ("sum", "mean", "sqrtn") for weighs in (False, True)),
        ("dense", "mean", True),
        ("fused", "sqrtn", True),
    ],
)
def test_lookups_of_sok(combiner: str, weighs: bool, grad_mode: str) -> None:
    """Compare two variables and a fixed table with torch."""
    sizes, dims, hotness, batch = [65536, 33, 33], [128, 4, 4], [10, 3, 3], 16
    generator = torch.Generator().manual_seed(3)
    fixed = torch.nn.Parameter(torch.randn(33, 4, generator=generator))
    tables: list[Any] = [EmbeddingVariable(dim, name=f"t{dim}", grad_mode=grad_mode) for dim in dims[:2]]
    dense = [torch.randn(v, d, generator=generator) for v, d in zip(sizes[:2], dims, strict=False)]
    for table, rows in zip(tables, dense, strict=True):
        table.insert(torch.arange(len(rows)), rows)
    dense.append(fixed.detach().clone())
    optimizer = optim.SGD([*(p for table in tables for p in table.parameters()), fixed], lr=0.5, in_backward=True)
    for x in dense:
        x.requires_grad_()
    for _ in range(2):
        indices: list[Any] = []
        weights = []
        for size, hot in zip(sizes, hotness, strict=True):
            lengths = torch.randint(0, hot + 1, (batch,), generator=generator)
            ids = torch.randint(0, size, (int(lengths.sum()),), generator=generator)
            indices.append((ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])))
            weights.append(torch.rand(len(ids), generator=generator) + 0.5 if weighs else torch.ones(len(ids)))
        made = lookup_sparse([*tables, fixed], indices, [combiner] * 3, weights if weighs else None)
        wanted = [
            pooled_by_hand(rows, ids, offsets, combiner, w)
            for rows, (ids, offsets), w in zip(dense, indices, weights, strict=True)
        ]
        optimizer.zero_grad()
        for x, y in zip(made, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        sum(x.square().sum() for x in made).backward()  # type: ignore[union-attr]
        grads = torch.autograd.grad(sum(y.square().sum() for y in wanted), dense)  # type: ignore[arg-type]
        optimizer.step()
        with torch.no_grad():
            for x, grad in zip(dense, grads, strict=True):
                x -= 0.5 * grad
    for table, rows in zip(tables, dense, strict=False):
        found = table.lookup(torch.arange(len(rows)))
        torch.testing.assert_close(found, rows.detach(), rtol=1e-4, atol=1e-5)


def test_errors_of_lookup_sparse() -> None:
    table = EmbeddingVariable(2, key_dtype=torch.int32)
    ids = torch.tensor([1]), torch.tensor([0, 1])
    with pytest.raises(TypeError, match=r"sp_weights\[0\] must be a tensor, None or have values\(\), got list"):
        lookup_sparse([table], [ids], ["sum"], [[1.0]])
    with pytest.raises(ValueError, match="must be of the key_dtype, int32, got 1099511627776"):
        lookup_sparse(table, (torch.tensor([2**40]), torch.tensor([0, 1])), "sum")
    assert table.total_count() == 0
    lookup_sparse(table, ids, "sum")
    assert table.export().keys.tolist() == [1]


# ---- Collections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_mode", [None, "sparse", "dense", "fused", "auto"])
@pytest.mark.parametrize("pooled", [True, False])
def test_collections_beside_fixed_tables(grad_mode: str | None, pooled: bool) -> None:
    config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    collection: Any = EmbeddingBagCollection if pooled else EmbeddingCollection
    option = EmbeddingVariableOption(init_option=InitializerOption(initializer=1.0))

    def new(grows: bool) -> Any:
        return collection(
            [
                config(4 if grows else 400, 2, name="a", feature_names=["f", "g"], ev_option=option if grows else None),
                config(10, 3, name="b", feature_names=["f", "h"]),
            ],
            grad_mode=grad_mode,
        )

    growing, fixed = new(True), new(False)
    tables = ("embedding_bags" if pooled else "embeddings"), "a", "b"
    with torch.no_grad():
        getattr(fixed, tables[0])["a"].weight.fill_(1)
        getattr(fixed, tables[0])["b"].weight.copy_(getattr(growing, tables[0])["b"].weight)
    optimizers = [optim.Adagrad(x.parameters(), lr=0.1, in_backward=True) for x in (growing, fixed)]

    def values(x: Any, features: KeyedJaggedTensor) -> list[Tensor]:
        made = x(features)
        return [made.values()] if pooled else [made[key].values() for key in made]

    for k in range(3):
        ids = torch.tensor([1, 2, k, 100 * k, 100 * k + 1, 3, 1, 2, 3])
        features = KeyedJaggedTensor(["f", "g", "h"], ids, lengths=torch.tensor([2, 1, 3, 0, 1, 2]))
        both = [values(growing, features), values(fixed, features)]
        for x, y in zip(*both, strict=True):
            torch.testing.assert_close(x, y)
        for results, optimizer in zip(both, optimizers, strict=True):
            optimizer.zero_grad()
            sum(x.square().sum() for x in results).backward()  # type: ignore[union-attr]
            optimizer.step()
    assert getattr(growing, tables[0])["a"].total_count() == 8
    other = new(True)
    other.load_state_dict(growing.state_dict())
    for x in (growing, other):
        x.eval()
        for n in range(1, 30):
            with torch.no_grad():
                x(KeyedJaggedTensor(["f", "g", "h"], torch.arange(3 * n) % 10, lengths=torch.full((3,), n)))
    assert len(growing._plans) < 10
