"""Models with tables of fewer bytes, served from a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serving.test_folder import IDS, KEYED, values

from torchsparse_rec import nn, serving


def model_of(name: str) -> tuple[torch.nn.Module, object]:
    if name == "bag":
        return torch.nn.Sequential(nn.EmbeddingBag(1000, 16), torch.nn.Linear(16, 1)), IDS
    if name == "growing":
        table = nn.EmbeddingVariable(16)
        table(IDS)
        return table, IDS + 1
    config = nn.EmbeddingBagConfig(name="t", num_embeddings=1000, embedding_dim=16, feature_names=["f"])
    return nn.EmbeddingBagCollection([config]), KEYED


@pytest.mark.parametrize("rows", ["int8", "int4", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["bag", "collection", "growing"])
def test_it_is_the_quantised_model(name: str, rows: str, tmp_path: Path) -> None:
    model, ids = model_of(name)
    sizes = []
    for version in (1, 2):
        assert serving.save_for_serving(model, tmp_path) == version
        sizes.append((tmp_path / "model.pt").stat().st_size)
        model = nn.quantize(model.eval(), rows) if version == 1 else model
    served = serving.load_for_serving(tmp_path)
    assert torch.equal(values(served(ids)), values(model(ids))) and served.version == 2
    assert name == "growing" or sizes[1] < 0.8 * sizes[0]
