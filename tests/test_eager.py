"""The short way of eager calls gives what the operators give, and stands aside for whatever looks on."""

from __future__ import annotations

import pytest
import torch
from test_operators import assert_same_bits
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from torchsparse_rec import ops

_ops = torch.ops.torchsparse_rec
IDS, OFFSETS = torch.tensor([3, 0, 3, 1]), torch.tensor([0, 3, 3, 4])


def table(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(4, 2, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()


def weights() -> Tensor:
    return torch.tensor([0.5, 2.0, 1.0, -1.5], dtype=torch.float64, requires_grad=True)


def bag(x: Tensor, w: Tensor) -> Tensor:
    return ops.embedding_bag(x, IDS, OFFSETS, per_sample_weights=w, mode="mean")


@pytest.mark.parametrize("sparse", [False, True])
def test_same_bits_as_the_operators(sparse: bool) -> None:
    x, w = table(), weights()
    mine = ops.embedding_bag(x, IDS, OFFSETS, per_sample_weights=w, mode="mean", sparse=sparse)
    wanted, _ = _ops.embedding_bag.default(x, IDS, OFFSETS, w, 1, -1, False, sparse)
    assert "eager" in type(mine.grad_fn).__name__ and "eager" not in type(wanted.grad_fn).__name__
    assert_same_bits(mine, wanted)
    grads = [torch.autograd.grad(out.square().sum(), [x, w]) for out in (mine, wanted)]
    for own, right in zip(*grads, strict=True):
        assert own.layout == right.layout
        assert_same_bits(own.to_dense(), right.to_dense())


def test_gradients_of_gradients() -> None:
    assert torch.autograd.gradgradcheck(bag, (table(), weights()))
    assert torch.autograd.gradgradcheck(lambda x: ops.embedding(x, IDS), (table(),))


def test_no_graph_without_need() -> None:
    x = table()
    assert bag(x.detach(), weights().detach()).grad_fn is None
    with torch.no_grad():
        assert not bag(x, weights()).requires_grad
    with torch.inference_mode():
        assert bag(x, weights()).is_inference()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # from inside torch.func
def test_transforms_and_tracing_see_the_operators() -> None:
    x, w = table(), weights().detach()
    wanted = torch.autograd.grad(bag(x, w).sum(), x)[0]
    assert_same_bits(torch.func.grad(lambda y: bag(y, w).sum())(x.detach()), wanted)
    targets = {node.target for node in make_fx(bag)(x.detach(), w).graph.nodes}
    assert _ops.embedding_bag.default in targets


def test_export_sees_the_operators() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return bag(x, w)

    exported = torch.export.export(Model(), (table().detach(), weights().detach()))
    assert any(node.target == _ops.embedding_bag.default for node in exported.graph.nodes)
