"""torch.export of trained modules: a program has plain lookups, and runs in a process that only imports the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nn.cases import squares, train_step
from nn.exported import IDS, KINDS, MODES, trained
from torch import Tensor

from torchsparse_rec import KeyedJaggedTensor, nn, optim
from torchsparse_rec.variable import EmbeddingVariableOption


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
    with pytest.raises(RuntimeError, match="cannot be exported in train.*Call eval"):
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
    model, _optimizer = trained("variable", "sparse")
    with pytest.raises(RuntimeError, match="a program cannot insert keys: call eval"):
        torch.export.export(model, (IDS,))
    program = torch.export.export(model.eval(), (IDS,))  # which first reads the table, with all rows up to date
    assert torch.equal(program.module()(IDS), model(IDS))


class Growing(torch.nn.Module):
    """A collection of a table that grows, with two features, and of one that does not; or ``lookup_sparse`` of such."""

    def __init__(self, kind: str, grad_mode: str | None, max_norm: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = nn.EmbeddingConfig if kind == "rows" else nn.EmbeddingBagConfig
        of, grows = {"num_embeddings": 20, "max_norm": max_norm}, {"ev_option": EmbeddingVariableOption()}
        tables = [
            config(name="grows", embedding_dim=3, feature_names=["a", "b"], **of, **grows),
            config(name="fixed", embedding_dim=2, feature_names=["b"], **of),
        ]
        if kind == "lookup_sparse":
            fixed = nn.EmbeddingBag(20, 2, grad_mode=grad_mode)
            self.tables = torch.nn.ModuleList([nn.EmbeddingVariable(3, name="grows", grad_mode=grad_mode), fixed])
        else:
            of_kind = nn.EmbeddingCollection if kind == "rows" else nn.EmbeddingBagCollection
            self.tables = of_kind(tables, grad_mode=grad_mode)
        self.kind = kind

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return all rows of ids, ``[B, L]`` each, in one row."""
        if self.kind == "lookup_sparse":
            grows, fixed = self.tables
            return torch.cat(nn.lookup_sparse([grows, grows, fixed], [a, b, b], ["sum", "mean", "sum"]), 1).reshape(-1)
        found = self.tables({"a": a, "b": b})
        rows = found.values() if self.kind == "rows" else [found.values()]
        return torch.cat([(x if isinstance(x, Tensor) else x.values()).reshape(-1) for x in rows])


OTHERS = torch.tensor([[4, 0], [3, 11]])


def grown(kind: str, grad_mode: str | None, max_norm: float | None = None) -> tuple[Growing, optim.Adam]:
    model = Growing(kind, grad_mode, max_norm)
    optimizer = optim.Adam(model.parameters(), lr=0.1, in_backward=True)
    for k in range(3):
        train_step(optimizer, squares, model, (IDS + k) % 20, OTHERS)
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "grad_mode", "max_norm"),
    [(kind, mode, None) for kind in ("bags", "rows", "lookup_sparse") for mode in ("fused", None)]
    + [("bags", "sparse", 0.3), ("rows", "auto", 0.3)],
)
def test_tables_that_grow_beside_others(kind: str, grad_mode: str | None, max_norm: float | None) -> None:
    model, _optimizer = grown(kind, grad_mode, max_norm)
    with pytest.raises(
        RuntimeError, match="'grows' cannot be exported as it is: a program cannot insert keys: call eval"
    ):
        torch.export.export(model, (IDS, OTHERS))
    model.eval()
    sizes = [{0: torch.export.Dim("B", min=1)}] * 2
    program = torch.export.export(model, (IDS, OTHERS), dynamic_shapes=sizes)
    for a in (IDS, torch.tensor([[0, 2**40], [2, 3], [19, 19]])):
        assert torch.equal(program.module()(a, a % 20), model(a, a % 20))


@pytest.mark.parametrize("kind", ["bags", "rows"])
def test_a_program_has_jagged_features_of_any_lengths(kind: str) -> None:
    model, optimizer = grown(kind, "sparse")
    optimizer.flush()
    tables = model.eval().tables

    class Jagged(torch.nn.Module):
        def forward(self, values: Tensor, lengths: Tensor) -> list[Tensor]:
            found = tables(KeyedJaggedTensor(["a", "b"], values, lengths=lengths))
            return [found.values()] if kind == "bags" else [x.values() for x in found.values()]

    given = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 0, 2, 2])
    jagged = Jagged()
    jagged.tables = tables
    program = torch.export.export(jagged, given, dynamic_shapes=[{0: torch.export.Dim("N")}, {}]).module()
    for batch in (given, (torch.tensor([1, 2, 99, 0, 3, 3]), torch.tensor([3, 0, 1, 2]))):
        torch.testing.assert_close(program(*batch), jagged(*batch), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["bags", "rows", "lookup_sparse", "variable"])
def test_compilers_leave_tables_that_grow_out_of_the_graph(kind: str) -> None:
    if kind == "variable":
        model, given = trained(kind, "fused")[0], (IDS,)
    else:
        model, given = grown(kind, "fused")[0], (IDS, OTHERS)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="table that grows .*: compile without fullgraph"):
        torch.compile(model, backend="eager", fullgraph=True)(*given)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(model.eval(), backend="eager")(*given), model(*given))


_LOAD = """
import sys
import torch
if sys.argv[1] == "with":
    import torchsparse_rec
for path in sys.argv[2:]:
    program = torch.export.load(path)
    print(program.module()(torch.tensor([[1, 2], [3, 19]])).flatten().tolist())
"""


def run_both(program: str, paths: list[str], want: list[str]) -> str:
    """Run a program with our package, where it must print these lines, and without it; return the error there."""
    runs = {
        how: subprocess.run([sys.executable, "-c", program, how, *paths], capture_output=True, text=True, check=False)
        for how in ("with", "without")
    }
    assert runs["with"].returncode == 0, runs["with"].stderr
    assert runs["with"].stdout.splitlines() == want
    assert runs["without"].returncode != 0
    return runs["without"].stderr


def test_a_program_runs_in_a_fresh_process_that_imports_the_package(tmp_path: Path) -> None:
    paths, want = [], []
    for kind in ("collection", "variable"):
        model, optimizer = trained(kind, "fused")
        optimizer.flush()
        paths.append(str(tmp_path / f"{kind}.pt2"))
        torch.export.save(torch.export.export(model.eval(), (IDS,)), paths[-1])
        want.append(str(model(IDS).flatten().tolist()))
    assert "torchsparse_rec" in run_both(_LOAD, paths, want)


# ---- AOTInductor -----------------------------------------------------------------------------------------------------

_LOAD_COMPILED = """
import sys
import torch
if sys.argv[1] == "with":
    import torchsparse_rec
compiled = torch._inductor.aoti_load_package(sys.argv[2])
for ids in ([[1, 2], [3, 19]], [[0, 1], [2, 3], [19, 19]]):
    print(compiled(torch.tensor(ids)).flatten().tolist())
"""


class AllModes(torch.nn.Module):
    """A trained model of each kind in each mode, side by side."""

    def __init__(self) -> None:
        super().__init__()
        made = [trained(kind, mode) for kind in KINDS for mode in MODES]
        for _, optimizer in made:
            optimizer.flush()
        self.models = torch.nn.ModuleList(model for model, _ in made)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the looked-up rows, ``[B, elements]``."""
        return torch.cat([model(ids).flatten(1) for model in self.models], 1)  # type: ignore[operator]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # warnings that Inductor causes
def test_a_compiled_program_runs_in_a_fresh_process_that_imports_the_package(tmp_path: Path) -> None:
    model = AllModes().eval()  # gradients are enabled, as in a program that has just trained
    program = torch.export.export(model, (IDS,), dynamic_shapes=[{0: torch.export.Dim("B", min=1)}])
    path = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    want = [str(model(ids).flatten().tolist()) for ids in (IDS, torch.tensor([[0, 1], [2, 3], [19, 19]]))]
    assert "Could not find schema for torchsparse_rec::" in run_both(_LOAD_COMPILED, [path], want)
