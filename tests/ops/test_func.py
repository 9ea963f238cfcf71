"""torch.func's gradients and forward-mode derivatives, above all of operators whose tables are lists of tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from calls import assert_same_bits
from torch import Tensor
from torch.autograd import forward_ad

from torchsparse_rec import ops

IDS, OFFSETS = torch.tensor([0, 1, 4, 2, 5, 0]), torch.tensor([0, 2, 3, 5, 6])
MODES = [("sum", "mean"), ("max", "sqrtn")]


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return two tables and weights of the ids."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.rand(*size, generator=generator, dtype=torch.float64) for size in ((5, 4), (6, 3), (6,)))


def _collection(first: Tensor, second: Tensor, weights: Tensor | None = None, modes: tuple = MODES[0]) -> Tensor:
    return ops.embedding_collection(
        [first, second], IDS, OFFSETS, tables=[0, 1], keys=[0, 1], modes=modes, bags=[2, 2], per_sample_weights=weights
    )


def _bag(weight: Tensor) -> Tensor:
    return ops.embedding_bag(weight, IDS[:3], OFFSETS[:3])


@pytest.mark.parametrize(("modes", "weighted"), [(MODES[0], True), (MODES[0], False), (MODES[1], False)])
def test_gradients_of_a_collection(modes: tuple, weighted: bool) -> None:
    inputs = list(_inputs()[: 3 if weighted else 2])

    def loss(*inputs: Tensor) -> Tensor:
        return _collection(*inputs, modes=modes).pow(3).sum()

    gradient = torch.func.grad(loss, tuple(range(len(inputs))))
    given = [x.clone().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(loss(*given), given)
    for actual, right in zip(gradient(*inputs), wanted, strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-14, atol=0)
    batches = [torch.stack([x, 2 * x]) for x in inputs]
    for actual, right in zip(torch.vmap(gradient)(*batches), wanted, strict=True):
        torch.testing.assert_close(actual[0], right, rtol=1e-14, atol=0)
    with pytest.raises(RuntimeError, match="_backward: .* have no second derivatives"):
        torch.func.grad(lambda *x: sum(each.sum() for each in gradient(*x)))(*inputs)


def test_a_sparse_gradient_of_a_collection() -> None:
    first, second, _ = _inputs()
    lists = {"tables": [0, 1], "keys": [0, 1], "modes": MODES[0], "bags": [2, 2]}
    gradient = torch.func.grad(
        lambda x: ops.embedding_collection([x, second], IDS, OFFSETS, **lists, sparse=True).sum()
    )
    dense = torch.func.grad(lambda x: ops.embedding_collection([x, second], IDS, OFFSETS, **lists).sum())
    assert gradient(first).is_sparse
    assert_same_bits(gradient(first).to_dense(), dense(first))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func.jvp calls it
@pytest.mark.parametrize("call", [_collection, _bag])
def test_forward_derivatives_are_refused(call: Callable[..., Tensor]) -> None:
    """Raise, since there are no forward derivatives: they must not be taken for zero."""
    inputs = _inputs()[: 2 if call is _collection else 1]
    ones = tuple(torch.ones_like(x) for x in inputs)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(call, inputs, ones)
    with forward_ad.dual_level():
        assert_same_bits(call(*inputs), call(*inputs).clone())
        with pytest.raises(NotImplementedError, match="jvp"):
            call(*(forward_ad.make_dual(x, one) for x, one in zip(inputs, ones, strict=True)))


def test_forward_derivatives_by_two_backward_ones() -> None:
    """Compute a forward derivative as docs/embeddings.md shows."""
    weight = _inputs()[0]
    tangent = torch.linspace(-1, 1, weight.numel(), dtype=weight.dtype).reshape(weight.shape)

    def sums(weight: Tensor) -> Tensor:
        return ops.segment_sum(ops.embedding(weight, IDS[:3]), offsets=OFFSETS[:3])

    output, backward = torch.func.vjp(sums, weight)
    _, forward = torch.func.vjp(lambda grad: backward(grad)[0], torch.zeros_like(output))
    torch.testing.assert_close(forward(tangent)[0], sums(tangent), rtol=1e-14, atol=0)
