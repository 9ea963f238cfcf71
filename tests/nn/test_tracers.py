"""torch.jit, torch.fx and torch.ao: our modules give right results there, or refuse and say what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nn.exported import IDS, KINDS, MODES, Model, trained

from torchsparse_rec import nn

# torch.jit and torch.ao are deprecated. Tracing warns of each condition on a size.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore:torch.quantize_per_tensor:UserWarning"
)
WAY_OUT = "torch.jit cannot compile this lookup: use torch.export with .* torchsparse_rec.nn.revert"
REFUSED = [
    *(("bag", mode) for mode in MODES),
    *((kind, mode) for kind in ("collection", "variable") for mode in MODES),
    ("table", "sparse"),
    ("table", "fused"),
]
MORE = torch.tensor([[0, 1], [2, 3], [19, 19]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad_mode", MODES)
def test_scripts(kind: str, grad_mode: str | None) -> None:
    model = Model(kind, grad_mode)
    with pytest.raises(RuntimeError, match=WAY_OUT):
        torch.jit.script(torch.nn.Sequential(model.table))


@pytest.mark.parametrize("grad_mode", [None, "dense", "sparse", "auto"])
@pytest.mark.parametrize("kind", ["table", "bag"])
def test_plain_lookups_without_gradients_are_traced(kind: str, grad_mode: str | None) -> None:
    model, _optimizer = trained(kind, grad_mode)
    with torch.no_grad():
        traced = torch.jit.trace(model.eval(), (IDS,))
    for ids in (IDS, MORE, torch.tensor([[0, 5, 5]])):
        assert torch.equal(traced(ids), model(ids))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("kind", "grad_mode"), REFUSED)
def test_other_lookups_refuse_to_be_traced(kind: str, grad_mode: str | None, training: bool) -> None:
    model, _optimizer = trained(kind, grad_mode)  # in train() rows may be stale
    with pytest.raises(RuntimeError, match=WAY_OUT):
        torch.jit.trace(model.train(training), (IDS,))


def test_a_large_lookup_refuses_to_be_traced_with_gradients() -> None:
    with pytest.raises(RuntimeError, match=WAY_OUT):
        torch.jit.trace(nn.Embedding(20, 3), (torch.zeros(10_000, dtype=torch.int64),))


@pytest.mark.parametrize("kind", ["table", "bag"])
@pytest.mark.parametrize("grad_mode", MODES)
def test_reverted_tables_are_scripted_and_traced(kind: str, grad_mode: str | None) -> None:
    model, _optimizer = trained(kind, grad_mode)
    want = model.eval()(MORE).detach()
    table = nn.revert(model).table
    for made in (torch.jit.script(table), torch.jit.trace(table, (IDS,))):
        assert torch.equal(made(MORE), want)


class OfLeaves(torch.fx.Tracer):
    """A tracer as docs/embeddings.md advises it."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Say whether a module is called as it is, instead of being traced."""
        return m.__module__.startswith("torchsparse_rec.nn") or super().is_leaf_module(m, module_qualified_name)


@pytest.mark.parametrize("kind", KINDS)
def test_fx(kind: str) -> None:
    model, _optimizer = trained(kind, "sparse")
    model.eval()
    with pytest.raises(TypeError, match="got a torch.fx.Proxy: use torch.export, or a torch.fx.Tracer whose is_leaf"):
        torch.fx.symbolic_trace(model)
    graph = torch.fx.GraphModule(model, OfLeaves().trace(model))
    assert torch.equal(graph(MORE), model(MORE))


def test_a_tracer_of_leaves_keeps_training() -> None:
    model, optimizer = trained("table", "fused")
    graph: Any = torch.fx.GraphModule(model, OfLeaves().trace(model))
    before = copy.deepcopy(model.state_dict())
    optimizer.zero_grad()
    graph(IDS).sum().backward()
    optimizer.step()
    assert not torch.equal(before["table.weight"], model.state_dict()["table.weight"])


def test_reverted_tables_are_quantised() -> None:
    model, _optimizer = trained("bag", "sparse")
    flat, offsets = MORE.flatten(), torch.tensor([0, 2, 4])
    table = model.eval().table
    table.mode = "sum"  # torch's quantised bags take these
    want = table(flat, offsets).detach()
    nn.revert(model)
    quantised = torch.ao.quantization.quantize_dynamic(
        model, {torch.nn.EmbeddingBag: torch.ao.quantization.float_qparams_weight_only_qconfig}
    )
    assert "quantized" in type(quantised.table).__module__
    torch.testing.assert_close(quantised.table(flat, offsets), want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_of_ours_are_not_left_unquantised_without_a_word(kind: str) -> None:
    model = Model(kind, "sparse").eval()
    what = {torch.nn.EmbeddingBag: torch.ao.quantization.float_qparams_weight_only_qconfig}
    with pytest.warns(UserWarning, match="this table: to quantise tables, call torchsparse_rec.nn.revert"):
        left = torch.ao.quantization.quantize_dynamic(model, what)
    assert type(left.table) is type(model.table) and not hasattr(left.table, "qconfig")
    assert torch.equal(left(MORE), model(MORE))
