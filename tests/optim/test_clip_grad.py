"""Clipping of gradients of every layout, as torch clips dense ones."""

import math

import pytest
import torch
from kinds import WithHead, loss_of
from optim.cases import DIM, initial

from torchsparse_rec import optim

IDS = torch.tensor([5, 3, 5, 9])
NORMS = [2.0, 1.0, math.inf]
CLIPS = [optim.clip_grad_norm_, torch.nn.utils.clip_grad_norm_]


def parameters(dtype=torch.float32):
    """Make parameters with one gradient, with repeated rows, with unique ones and strided; and ones with it dense."""
    generator = torch.Generator().manual_seed(3)
    mine = [torch.nn.Parameter(initial().to(dtype)) for _ in range(3)]
    dense = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    values = torch.randn(4, DIM, generator=generator).to(dtype)
    mine[0].grad = torch.sparse_coo_tensor(IDS[None], values, mine[0].shape, check_invariants=True)
    mine[1].grad = mine[0].grad.coalesce()
    mine[2].grad = mine[0].grad.to_dense()
    for p in dense:
        p.grad = mine[2].grad.clone()
    return mine, dense


def as_dense(parameter):
    grad = parameter.grad
    return grad.to_dense() if grad.is_sparse else grad


@pytest.mark.parametrize("max_norm", [0.5, 1e4, math.inf])  # transformers' Trainer asks for a norm by inf
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("clip", CLIPS)
def test_norms(clip, norm_type, max_norm):
    mine, dense = parameters()
    got = clip(iter(mine), max_norm, norm_type)
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


@pytest.mark.parametrize("clip", CLIPS)
def test_half_gradients(clip):
    mine, dense = parameters(torch.float16)
    got = clip(mine, 0.5)
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


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("clip", CLIPS)
def test_gradients_without_rows_count_as_zeros(clip, norm_type):
    """Clip the gradient of a table that a batch has not looked up, of which torch computes no largest element."""
    mine, dense = parameters()
    nothing = torch.sparse_coo_tensor(IDS[None, :0], torch.zeros(0, DIM), mine[0].shape, check_invariants=True)
    mine[1].grad, dense[1].grad = nothing, nothing.to_dense()
    got = clip(mine, 0.5, norm_type)
    assert torch.allclose(got, torch.nn.utils.clip_grad_norm_(dense, 0.5, norm_type))
    for one, other in zip(mine, dense, strict=True):
        assert torch.allclose(as_dense(one), other.grad, rtol=1e-5, atol=1e-7)
    assert clip(mine[1], 0.5, norm_type) == 0


def test_the_norm_of_a_sparse_tensor_is_that_of_all_its_elements():
    """Elements that are not stored are zeros: to least elements, and to the norms of rows."""
    mine, dense = parameters()
    assert torch.linalg.vector_norm(mine[0].grad, 3).allclose(torch.linalg.vector_norm(dense[0].grad, 3))
    wide = torch.linalg.vector_norm(mine[0].grad, dtype=torch.float64)
    assert wide.dtype == torch.float64 and wide.allclose(torch.linalg.vector_norm(dense[0].grad.double()))
    for how in ({"ord": -1}, {"ord": -math.inf}, {"dim": 0}, {"dim": 1, "keepdim": True}, {"keepdim": True}):
        got, expected = (torch.linalg.vector_norm(x[0].grad, **how) for x in (mine, dense))
        assert got.shape == expected.shape and got.allclose(expected)


@pytest.mark.parametrize("where", range(3))
def test_a_norm_that_is_not_finite(where):
    mine, _ = parameters()
    grad = mine[where].grad
    values = grad._values() if grad.is_sparse else grad
    values[0, 0] = math.inf
    before = as_dense(mine[1]).clone()
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        optim.clip_grad_norm_(mine, 0.5, error_if_nonfinite=True)
    assert torch.equal(as_dense(mine[1]), before)
    assert optim.clip_grad_norm_(mine, 0.5).isinf()


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
@pytest.mark.parametrize("kind", ["table", "collection", "variable"])
def test_torchs_clipping_of_what_a_backward_has_stepped_is_an_error(kind: str, name: str, clip) -> None:
    model = WithHead(kind, "fused")
    optimizer = getattr(optim, name)(model.parameters(), lr=0.1, in_backward=True)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        with pytest.raises(RuntimeError, match="already updated a table in grad_mode='fused' for this step"):
            clip(model.parameters(), 1.0)
        optimizer.step()
        clip(model.parameters(), 1.0)  # the head's gradients alone are left
