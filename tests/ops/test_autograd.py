"""The shortcut into differentiable operators: wherever it is not allowed, the registered derivative is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from torchsparse_rec import ops

IDS = torch.tensor([2, 0, 2, 3, 1])
OFFSETS = torch.tensor([0, 2, 2, 5])
SEGMENT_IDS = torch.tensor([0, 0, 2, 2, 2])

CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda weight: ops.embedding(weight, IDS),
    "embedding_bag": lambda weight: ops.embedding_bag(weight, IDS, OFFSETS, mode="mean"),
    "segment_reduce": lambda weight: ops.segment_prod(weight, SEGMENT_IDS[1:]),
    "unsorted_segment_reduce": lambda weight: ops.unsorted_segment_max(weight, IDS[:4], 4),
    "sparse_segment_reduce": lambda weight: ops.sparse_segment_mean(weight, IDS, SEGMENT_IDS, 3),
}

each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def _weight() -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


@each_call
def test_eager_calls_take_the_short_way(call: Callable[[Tensor], Tensor], device: str) -> None:
    assert "eager" in type(call(_weight()).grad_fn).__name__.lower()


@each_call
def test_without_a_gradient_nothing_is_recorded(call: Callable[[Tensor], Tensor]) -> None:
    assert call(_weight().detach()).grad_fn is None
    with torch.no_grad():
        assert call(_weight()).grad_fn is None


@each_call
def test_inference_mode_is_kept(call: Callable[[Tensor], Tensor]) -> None:
    with torch.inference_mode():
        assert call(_weight()).is_inference()


@pytest.mark.parametrize("sparse", [False, True])
def test_same_bits_as_the_registered_way(sparse: bool, device: str) -> None:
    weight = _weight()
    weights = torch.tensor([0.5, 2.0, 1.0, -1.5, 1.0], dtype=torch.float64, requires_grad=True)
    short = ops.embedding_bag(weight, IDS, OFFSETS, per_sample_weights=weights, mode="mean", sparse=sparse)
    operator = torch.ops.torchsparse_rec.embedding_bag.default
    long, _ = operator(weight, IDS, OFFSETS, weights, 1, -1, False, sparse)
    assert type(short.grad_fn) is not type(long.grad_fn)
    for actual, wanted in zip(
        torch.autograd.grad(short.square().sum(), [weight, weights]),
        torch.autograd.grad(long.square().sum(), [weight, weights]),
        strict=True,
    ):
        assert actual.layout == wanted.layout
        assert torch.equal(actual.to_dense(), wanted.to_dense())


@each_call
def test_tracing_and_export_see_the_operator(call: Callable[[Tensor], Tensor]) -> None:
    name = next(name for name, one in CALLS.items() if one is call)
    operator = getattr(torch.ops.torchsparse_rec, name).default

    class Model(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return call(weight)

    weight = _weight().detach()
    assert operator in {node.target for node in make_fx(call)(weight).graph.nodes}
    assert operator in {node.target for node in torch.export.export(Model(), (weight,)).graph.nodes}


@each_call
def test_first_and_second_derivatives(call: Callable[[Tensor], Tensor], device: str) -> None:
    assert torch.autograd.gradcheck(call, _weight())
    assert torch.autograd.gradgradcheck(call, _weight())


@each_call
def test_functional_transforms_take_the_registered_derivative(call: Callable[[Tensor], Tensor]) -> None:
    weight = _weight()
    (wanted,) = torch.autograd.grad(call(weight).square().sum(), weight)
    actual = torch.func.grad(lambda w: call(w).square().sum())(weight.detach())
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


@each_call
def test_dispatch_modes_see_the_operator(call: Callable[[Tensor], Tensor], request: pytest.FixtureRequest) -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        call(_weight()).sum().backward()
    name = next(name for name, one in CALLS.items() if one is call)
    assert f"torchsparse_rec.{name}.default" in seen
