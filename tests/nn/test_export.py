"""torch.export of trained modules: a program has plain lookups of the tables, and runs where nothing else is known."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchsparse_rec import nn, optim

MODES = (None, "dense", "sparse", "fused", "auto")
KINDS = ("table", "bag", "collection", "variable")
IDS = torch.tensor([[1, 2], [3, 19]])


class Model(torch.nn.Module):
    """A table of 20 rows, called with ids ``[B, 2]``."""

    def __init__(self, kind: str, grad_mode: str | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        if kind == "table":
            self.table: torch.nn.Module = nn.Embedding(20, 3, grad_mode=grad_mode)
        elif kind == "bag":
            self.table = nn.EmbeddingBag(20, 3, grad_mode=grad_mode)
        elif kind == "collection":
            config = nn.EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=3, feature_names=["f"])
            self.table = nn.EmbeddingBagCollection([config], grad_mode=grad_mode)
        else:
            self.table = nn.EmbeddingVariable(3, initializer=0.5, grad_mode=grad_mode)

    def forward(self, ids: Tensor) -> Tensor:
        """What is looked up."""
        return self.table({"f": ids}).values() if self.kind == "collection" else self.table(ids)


def trained(kind: str, grad_mode: str | None) -> tuple[Model, optim.Adam]:
    """A model of which rows are behind, where its mode leaves any, and its optimizer."""
    model = Model(kind, grad_mode)
    optimizer = optim.Adam(model.parameters(), lr=0.1, in_backward=True)
    for k in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[k, k + 1]])).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("grad_mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_has_plain_lookups(kind: str, grad_mode: str | None, enabled: bool) -> None:
    model, optimizer = trained(kind, grad_mode)
    if kind == "variable":
        optimizer.flush()
    model.eval()
    with torch.set_grad_enabled(enabled):
        program = torch.export.export(model, (IDS,), dynamic_shapes=[{0: torch.export.Dim("B", min=1)}])
    assert "torchsparse_rec_nn" not in str(program.graph)
    for ids in (IDS, torch.tensor([[0, 1], [2, 3], [19, 19]])):
        torch.testing.assert_close(program.module()(ids), model(ids), rtol=0, atol=0)


@pytest.mark.parametrize("grad_mode", ["sparse", "fused", "auto"])
@pytest.mark.parametrize("kind", ["table", "bag", "collection"])
def test_a_model_in_training_is_refused(kind: str, grad_mode: str) -> None:
    model, _optimizer = trained(kind, grad_mode)
    with pytest.raises(RuntimeError, match="cannot be exported in train.*call eval"):
        torch.export.export(model, (IDS,))


@pytest.mark.parametrize(("grad_mode", "sparse"), [(None, False), ("dense", False), (None, True)])
def test_dense_gradients_may_be_exported_in_training(grad_mode: str | None, sparse: bool) -> None:
    table = nn.Embedding(20, 3, sparse=sparse, grad_mode=grad_mode)
    if sparse:
        with pytest.raises(RuntimeError, match="grad_mode='sparse' cannot be exported in train"):
            torch.export.export(table, (IDS,))
    else:
        assert torch.equal(torch.export.export(table, (IDS,)).module()(IDS), table(IDS))


def test_what_a_table_that_grows_must_be() -> None:
    model, optimizer = trained("variable", "sparse")
    with pytest.raises(RuntimeError, match="a program cannot insert keys: call eval"):
        torch.export.export(model, (IDS,))
    with pytest.raises(RuntimeError, match="rows are behind: call flush"):
        torch.export.export(model.eval(), (IDS,))
    optimizer.flush()
    assert torch.equal(torch.export.export(model, (IDS,)).module()(IDS), model(IDS))


_LOAD = """
import sys
import torch
if sys.argv[1] == "with":
    import torchsparse_rec
for path in sys.argv[2:]:
    program = torch.export.load(path)
    print(program.module()(torch.tensor([[1, 2], [3, 19]])).flatten().tolist())
"""


def test_a_program_runs_in_a_fresh_process_that_imports_the_package(tmp_path: Path) -> None:
    paths, want = [], []
    for kind in ("collection", "variable"):
        model, optimizer = trained(kind, "fused")
        optimizer.flush()
        paths.append(str(tmp_path / f"{kind}.pt2"))
        torch.export.save(torch.export.export(model.eval(), (IDS,)), paths[-1])
        want.append(str(model(IDS).flatten().tolist()))
    runs = {
        how: subprocess.run([sys.executable, "-c", _LOAD, how, *paths], capture_output=True, text=True, check=False)
        for how in ("with", "without")
    }
    assert runs["with"].returncode == 0, runs["with"].stderr
    assert runs["with"].stdout.splitlines() == want
    assert runs["without"].returncode != 0 and "torchsparse_rec" in runs["without"].stderr
