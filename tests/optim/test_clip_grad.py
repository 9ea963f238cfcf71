"""Clipping gradients of every layout as torch clips dense ones."""

import math

import pytest
import torch
from optim.cases import DIM, ROWS, initial

from torchsparse_rec import optim
from torchsparse_rec.optim._tables import Gradient, Pending, table_of

IDS = torch.tensor([5, 3, 5, 9])
NORMS = [2.0, 1.0, math.inf]


class Waiting(Pending):
    """A gradient of unique rows, as a fused backward leaves it."""

    def __init__(self, rows, values):
        self.rows, self.values, self.factor = rows, values, torch.ones(())

    def take(self):
        return Gradient(self.rows, self.values, self.factor)

    def norm(self, norm_type):
        return torch.linalg.vector_norm(self.values, norm_type) * self.factor if len(self.rows) else None

    def scale(self, factor):
        self.factor = self.factor * factor

    def clamp(self, limit):
        self.values, self.factor = (self.values * self.factor).clamp(-limit, limit), torch.ones(())


def parameters(dtype=torch.float32, waiting=True):
    """The same gradient with repeated rows, with unique ones, strided, and waiting; and as dense ones."""
    generator = torch.Generator().manual_seed(3)
    mine = [torch.nn.Parameter(initial().to(dtype)) for _ in range(4 if waiting else 3)]
    dense = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    values = torch.randn(4, DIM, generator=generator).to(dtype)
    mine[0].grad = torch.sparse_coo_tensor(IDS[None], values, mine[0].shape, check_invariants=True)
    mine[1].grad = mine[0].grad.coalesce()
    mine[2].grad = mine[0].grad.to_dense()
    if waiting:
        unique = mine[1].grad.clone()
        table_of(mine[3]).pending = Waiting(unique.indices()[0], unique.values())
    for p in dense:
        p.grad = mine[2].grad.clone()
    return mine, dense


def as_dense(parameter):
    grad = parameter.grad
    if grad is None:
        rows, values, factor = table_of(parameter).take_pending()
        return torch.zeros(ROWS, DIM).index_copy_(0, rows, values * factor)
    return grad.to_dense() if grad.is_sparse else grad


@pytest.mark.parametrize("max_norm", [0.5, 1e4])
@pytest.mark.parametrize("norm_type", NORMS)
def test_norms(norm_type, max_norm):
    mine, dense = parameters()
    got = optim.clip_grad_norm_(iter(mine), max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(dense, max_norm, norm_type)
    assert got.shape == () and torch.allclose(got, expected)
    for one, other in zip(mine, dense, strict=True):
        assert torch.allclose(as_dense(one), other.grad, rtol=1e-5, atol=1e-7)


def test_values():
    mine, dense = parameters()
    optim.clip_grad_value_(mine, 0.7)
    torch.nn.utils.clip_grad_value_(dense, 0.7)
    for one, other in zip(mine, dense, strict=True):
        assert torch.allclose(as_dense(one), other.grad)


def test_half_gradients():
    mine, dense = parameters(torch.float16, waiting=False)
    got = optim.clip_grad_norm_(mine, 0.5)
    expected = torch.nn.utils.clip_grad_norm_(dense, 0.5)
    assert got.dtype == expected.dtype and torch.allclose(got, expected, rtol=1e-2)
    assert mine[0].grad.dtype == torch.float16 and torch.allclose(as_dense(mine[0]), dense[0].grad, rtol=1e-2)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_dense_gradients_have_the_bits_of_torch(foreach):
    _, one = parameters()
    _, other = parameters()
    got = optim.clip_grad_norm_(one, 0.5, foreach=foreach)
    assert torch.equal(got, torch.nn.utils.clip_grad_norm_(other, 0.5, foreach=foreach))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(one, other, strict=True))


def test_one_parameter_none_and_no_gradient():
    mine, dense = parameters()
    assert torch.allclose(optim.clip_grad_norm_(mine[0], 0.5), torch.nn.utils.clip_grad_norm_(dense[0], 0.5))
    optim.clip_grad_value_(mine[1], 0.5)
    assert mine[1].grad.values().abs().max() == 0.5
    assert optim.clip_grad_norm_([], 1.0) == 0
    assert optim.clip_grad_norm_([torch.nn.Parameter(torch.zeros(2))], 1.0) == 0
    optim.clip_grad_value_([], 1.0)
    mine, _ = parameters()
    table_of(mine[3]).pending.rows = torch.zeros(0, dtype=torch.int64)
    assert optim.clip_grad_norm_(mine[3:], 1.0) == 0


@pytest.mark.parametrize("where", range(4))
def test_a_norm_that_is_not_finite(where):
    mine, _ = parameters()
    grad = mine[where].grad
    values = table_of(mine[3]).pending.values if grad is None else grad._values() if grad.is_sparse else grad
    values[0, 0] = math.inf
    before = as_dense(mine[1]).clone()
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        optim.clip_grad_norm_(mine, 0.5, error_if_nonfinite=True)
    assert torch.equal(as_dense(mine[1]), before)
    assert optim.clip_grad_norm_(mine, 0.5).isinf()


def test_anchors_count_once():
    mine, dense = parameters()
    anchor = torch.nn.Parameter(torch.ones(()))
    anchor._torchsparse_rec_anchor = True
    anchor.grad = table_of(mine[3]).pending.norm(2.0)
    got = optim.clip_grad_norm_([anchor, *mine], 0.5)
    assert torch.allclose(got, torch.nn.utils.clip_grad_norm_(dense, 0.5))
