"""Lookups of split tables that have stale rows: what they ask of each table, and of ``torch.export``."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from distributed.pool import Pool

from torchsparse_rec import distributed, nn, optim
from torchsparse_rec.tables.stale import StaleParameter
from torchsparse_rec.variable import EmbeddingVariableOption

TABLES = 30
IDS = torch.tensor([[1, 2], [3, 4]])


def calls_of_a_lookup(plan: Any, training: bool) -> int:
    """Return how often a lookup calls the method by which the parts of tables are seen."""
    configs = [
        nn.EmbeddingBagConfig(name=f"t{k}", num_embeddings=40, embedding_dim=4, feature_names=["f"])
        for k in range(TABLES)
    ]
    module = distributed.shard(nn.EmbeddingBagCollection(configs, grad_mode="fused"), plan=plan)
    optimizer = optim.Adam(module.parameters(), lr=0.1, in_backward=True)
    for step in range(2):
        module({"f": IDS + step}).values().sum().backward()
        optimizer.step()
    module.train(training)
    assert all(type(table.stored_weight()) is StaleParameter for table in module._tables)
    original, count = StaleParameter.__dict__["__torch_function__"], 0

    def counted(cls: type, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        return original.__func__(cls, *arguments)

    StaleParameter.__torch_function__ = classmethod(counted)  # type: ignore[assignment, method-assign]
    try:
        module({"f": IDS})
    finally:
        StaleParameter.__torch_function__ = original  # type: ignore[method-assign]
    return count


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("plan", ["row_wise", "data_parallel"])
def test_a_lookup_asks_tables_below_their_class(two: Pool, plan: str, training: bool) -> None:
    assert two.run(calls_of_a_lookup, plan, training) == [0, 0]


def frames_of_lookups(plan: str) -> list[int]:
    """Return how many calls of Python a lookup makes in the package: of a few tables, and of many."""
    folder, counts = str(Path(distributed.__file__).parent), []
    for tables in (6, TABLES):
        configs = [
            nn.EmbeddingBagConfig(name=f"t{k}", num_embeddings=40, embedding_dim=4, feature_names=[f"f{k}"])
            for k in range(tables)
        ]
        module = distributed.shard(nn.EmbeddingBagCollection(configs, grad_mode="sparse"), plan=plan)
        features, count = {f"f{k}": IDS for k in range(tables)}, 0

        def seen(frame: FrameType, event: str, _: Any) -> None:
            nonlocal count
            count += event == "call" and frame.f_code.co_filename.startswith(folder)

        module(features)
        sys.setprofile(seen)
        module(features)
        sys.setprofile(None)
        counts.append(count)
    return counts


@pytest.mark.parametrize("plan", ["row_wise", "table_wise", "data_parallel"])
def test_more_tables_are_no_more_calls(two: Pool, plan: str) -> None:
    for few, many in two.run(frames_of_lookups, plan):
        assert many <= few + 2 < 120  # columns of many tables may need a lookup, see Columns


def refused(kind: str) -> str:
    if kind == "collection":
        config = nn.EmbeddingBagConfig(name="t", num_embeddings=40, embedding_dim=4, feature_names=["f"])
        module: Any = nn.EmbeddingBagCollection([config])
    elif kind == "growing":
        grows = EmbeddingVariableOption()
        config = nn.EmbeddingConfig(name="t", num_embeddings=40, embedding_dim=4, feature_names=["f"], ev_option=grows)
        module = nn.EmbeddingCollection([config])
    else:
        module = {"table": nn.Embedding(40, 4), "bags": nn.EmbeddingBag(40, 4), "variable": nn.EmbeddingVariable(4)}[
            kind.removeprefix("lookup_sparse of ")
        ]
    module = distributed.shard(module).eval()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, ids: torch.Tensor) -> Any:
            if kind.startswith("lookup"):
                return nn.lookup_sparse(self.module, ids, "sum")
            return self.module({"f": ids} if kind in ("collection", "growing") else ids)

    try:
        torch.export.export(Model(), (IDS,))
    except RuntimeError as error:
        Model()(IDS)  # ranks go on
        return str(error)
    return "exported"


@pytest.mark.parametrize(
    "kind",
    ["table", "bags", "collection", "growing", "variable", "lookup_sparse of table", "lookup_sparse of variable"],
)
def test_split_tables_are_not_exported(two: Pool, kind: str) -> None:
    for said in two.run(refused, kind):
        assert "cannot be exported: its tables are split over ranks" in said
        assert "full_state_dict() into a model of whole tables" in said
