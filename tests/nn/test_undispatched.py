"""Functions that torch does not dispatch: what reads a table's parameter through them finds its rows up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nn.cases import DIM, ROWS, beside, pair, train_beside, train_step
from nn.test_stale import close, stored
from torch import Tensor
from torch.func import functional_call, functionalize, grad, hessian, jacrev, vjp, vmap
from torch.nn import Module, Parameter

from torchsparse_rec import nn, optim
from torchsparse_rec.tables.stale import StaleParameter

MODES = ["sparse", "fused"]
IDS = torch.arange(ROWS)[:, None]
# Torch warns of copies, of its prototypes and of TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def beside_torch(grad_mode: str):
    """Return our model and torch's with their optimizers, after the same steps: rows of ours are stale."""
    sides = beside(*pair(grad_mode))
    train_beside(sides)
    assert type(next(sides[0][0].table.parameters())) is StaleParameter
    return sides


def elements(weight: Tensor) -> Tensor:
    """Return a weight's elements."""
    return weight * 1.0


def halve_(weight: Tensor) -> Tensor:
    """Halve a weight."""
    return weight.mul_(0.5)


READERS = {
    "tensor": lambda m: torch.tensor(m.weight),
    "as_tensor": lambda m: torch.as_tensor(m.weight, dtype=torch.float64).float(),
    "asarray": lambda m: torch.asarray(m.weight, copy=True),
    "new_tensor": lambda m: torch.zeros(1).new_tensor(m.weight),
    "FloatTensor": lambda m: torch.FloatTensor(m.weight).clone(),
    "as_subclass": lambda m: m.weight.as_subclass(Tensor).clone(),
    "_make_subclass": lambda m: Parameter._make_subclass(Parameter, m.weight, False).clone(),
    "sparse_coo_tensor": lambda m: torch.sparse_coo_tensor(IDS.t(), m.weight, (ROWS, DIM)).to_dense(),
    "nested_tensor": lambda m: torch.nested.nested_tensor([m.weight]).unbind()[0],
    "to_dlpack": lambda m: torch.from_dlpack(torch.utils.dlpack.to_dlpack(m.weight.detach())),
    "Parameter": lambda m: Parameter(m.weight),
    "scripted": lambda m: torch.jit.script(elements)(m.weight),
    "traced": lambda m: torch.jit.trace(elements, torch.zeros(ROWS, DIM))(m.weight),
    "by name": lambda m: torch.tensor(getattr(m, "weight")),  # noqa: B009
    "in two steps": lambda m: [torch.tensor(w) for w in [m.weight]][0],
}


@pytest.mark.parametrize("grad_mode", MODES)
@pytest.mark.parametrize("reader", READERS)
def test_readers_of_a_module_see_current_rows(reader: str, grad_mode: str) -> None:
    (ours, _), (theirs, _) = beside_torch(grad_mode)
    close(READERS[reader](ours.table), READERS[reader](theirs.table))


def set_(module: Module) -> None:
    with torch.no_grad():
        module.weight.set_(torch.full((ROWS, DIM), 0.3))


def scripted_(module: Module) -> None:
    with torch.no_grad():
        torch.jit.script(halve_)(module.weight)


@pytest.mark.parametrize("grad_mode", MODES)
@pytest.mark.parametrize("write", [set_, scripted_])
def test_writers_of_a_module_write_on_current_rows(write, grad_mode: str) -> None:
    sides = beside_torch(grad_mode)
    for model, _ in sides:
        write(model.table)
    train_beside(sides)
    close(sides[0][0].table.weight, sides[1][0].table.weight)


@pytest.mark.parametrize("of", ["module", "parameters"])
def test_a_table_that_grows_is_read_so_too(of: str) -> None:
    table = nn.EmbeddingVariable(DIM)
    optimizer = optim.Adam(table.parameters(), lr=0.1)
    for ids in (IDS, IDS[:3], IDS[:3]):
        train_step(optimizer, lambda ids=ids: table(ids).square().sum())
    before = stored(table._parameters["weight"])
    rows, dtype = table.weight.shape[0], table.weight.dtype
    assert rows >= ROWS and dtype is torch.float32 and torch.equal(stored(table._parameters["weight"]), before)
    got = torch.tensor(table.weight) if of == "module" else next(table.parameters()).clone().detach()
    assert not torch.equal(got, before)
    optimizer.flush()
    assert torch.equal(got, stored(table._parameters["weight"]))


@pytest.mark.parametrize("grad_mode", MODES)
def test_asking_a_module_for_what_reads_no_element_flushes_nothing(grad_mode: str) -> None:
    (model, _), _ = beside_torch(grad_mode)
    table, (parameter,) = model.table, model.table.parameters()
    before = stored(parameter)
    # Not in the assertions, where pytest keeps what each attribute gives.
    asked = [table.weight.shape, table.weight.size(0), table.weight.dim(), table.weight.device.type, table.weight.dtype]
    asked += [table.weight.requires_grad, table.weight.is_leaf, table.weight.numel()]
    table.weight.grad = None
    table.weight.requires_grad = True
    table.weight.register_hook(print).remove()
    asked += [table.weight.grad, *((p.shape, p.grad) for p in table.parameters())]
    assert asked[:5] == [(ROWS, DIM), ROWS, 2, "cpu", torch.float32]
    assert asked[5:] == [True, True, ROWS * DIM, None, ((ROWS, DIM), None)]
    assert torch.equal(stored(parameter), before)
    close(torch.tensor(table.weight), table.weight)
    assert not torch.equal(stored(parameter), before)


# ---- torch.func ------------------------------------------------------------------------------------------------------


def functional_loss(model: Module):
    """Return the squared rows by a call of the table, and a scalar that reads the parameter itself."""
    return lambda parameters: functional_call(model.table, parameters, (IDS,)).square().sum()


def of_parameters(parameters: dict[str, Tensor]) -> Tensor:
    """Return a loss that calls no module."""
    return parameters["weight"].pow(3).sum()


def tied(model: Module):
    """Return a loss of rows by the table's own weight."""

    def scores(parameters: dict[str, Tensor]) -> Tensor:
        rows = functional_call(model.table, parameters, (IDS,))
        return (rows @ parameters["weight"].t()).logsumexp(1).sum()

    return scores


LOSSES = {"call": functional_loss, "pure": lambda _: of_parameters, "tied": tied}
TRANSFORMS = {
    "grad": lambda loss, parameters: grad(loss)(parameters)["weight"],
    "vjp": lambda loss, parameters: vjp(loss, parameters)[1](torch.ones(()))[0]["weight"],
    "jacrev": lambda loss, parameters: jacrev(loss)(parameters)["weight"],
}


@pytest.mark.parametrize("grad_mode", ["dense", *MODES])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_named_parameters_see_current_rows(transform: str, loss: str, grad_mode: str) -> None:
    sides = beside(*pair(grad_mode))
    train_beside(sides)
    if transform == "jacrev" and grad_mode == "sparse" and loss != "pure":  # torch has no batches of sparse gradients
        ours = sides[0][0]
        with pytest.raises(NotImplementedError, match="'SparseCPU' backend"):
            jacrev(LOSSES[loss](ours))(dict(ours.table.named_parameters()))
        return
    got, want = (TRANSFORMS[transform](LOSSES[loss](m), dict(m.table.named_parameters())) for m, _ in sides)
    close(got.to_dense() if got.is_sparse else got, want)
    train_beside(sides)
    close(sides[0][0].table.weight, sides[1][0].table.weight)


@pytest.mark.parametrize("grad_mode", MODES)
@pytest.mark.parametrize("transform", ["hessian", "functionalize", "vmap", "grad of grad"])
def test_transforms_of_a_kept_parameter_see_current_rows(transform: str, grad_mode: str) -> None:
    transforms = {
        "hessian": lambda w: hessian(lambda x: x.pow(3).sum())(w).flatten(0, 1),
        "functionalize": functionalize(lambda x: x * 2),
        "vmap": vmap(lambda row: row * 2),
        "grad of grad": lambda w: grad(lambda x: grad(lambda y: y.pow(4).sum())(x).sum())(w),
    }
    sides = beside_torch(grad_mode)
    got, want = (transforms[transform](next(m.table.parameters())) for m, _ in sides)
    close(got, want)


@pytest.mark.parametrize("grad_mode", MODES)
def test_a_parameter_that_a_transformed_function_captures_is_current(grad_mode: str) -> None:
    x, found = torch.linspace(0, 1, DIM), []
    for model, _ in beside_torch(grad_mode):
        (parameter,) = model.table.parameters()
        found.append(grad(lambda x, weight=parameter: (weight @ x).square().sum())(x))
    close(*found)


def test_compiled_transforms_see_current_rows() -> None:
    (ours, _), (theirs, _) = beside_torch("sparse")
    torch._dynamo.reset()
    compiled = torch.compile(lambda p: grad(of_parameters)(p)["weight"], backend="aot_eager")
    close(
        compiled(dict(ours.table.named_parameters())),
        grad(of_parameters)(dict(theirs.table.named_parameters()))["weight"],
    )


# ---- All of torch ----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_all_that_torch_does_not_dispatch_is_named_in_the_docs() -> None:
    tests = Path(__file__).resolve().parents[1]
    program = subprocess.run([sys.executable, "-m", "nn.readers"], cwd=tests, capture_output=True, text=True)
    assert program.returncode == 0, program.stderr
    readers = {name.rpartition(".")[2] for name in program.stdout.split()}
    limits = (tests.parent / "docs/embeddings.md").read_text().partition("\n## Limits\n")[2].partition("\n## ")[0]
    assert {"tensor", "new_tensor", "_add_batch_dim", "_to_dlpack", "nested_tensor"} <= readers
    assert readers <= set(re.findall(r"`(\w+)`", limits))
