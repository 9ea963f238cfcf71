"""Clipping of gradients of every layout, as torch clips dense ones."""

import math
from types import SimpleNamespace

import pytest
import torch
from optim.cases import DIM, initial

from torchsparse_rec import nn, optim

IDS = torch.tensor([5, 3, 5, 9])
NORMS = [2.0, 1.0, math.inf]


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
    mine, dense = parameters(torch.float16)
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


@pytest.mark.parametrize("norm_type", NORMS)
def test_gradients_without_rows_count_as_zeros(norm_type):
    """Clip the gradient of a table that a batch has not looked up, of which torch computes no largest element."""
    mine, dense = parameters()
    nothing = torch.sparse_coo_tensor(IDS[None, :0], torch.zeros(0, DIM), mine[0].shape, check_invariants=True)
    mine[1].grad, dense[1].grad = nothing, nothing.to_dense()
    got = optim.clip_grad_norm_(mine, 0.5, norm_type)
    assert torch.allclose(got, torch.nn.utils.clip_grad_norm_(dense, 0.5, norm_type))
    for one, other in zip(mine, dense, strict=True):
        assert torch.allclose(as_dense(one), other.grad, rtol=1e-5, atol=1e-7)
    assert optim.clip_grad_norm_(mine[1], 0.5, norm_type) == 0


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


# ---- The lines of docs/embeddings.md for clients that clip by calls of their own -------------------------------------


def pair():
    """Make a model whose table has sparse gradients, and one with torch's table; and an optimizer for each."""
    models = []
    for table in (nn.Embedding(20, DIM, grad_mode="sparse"), torch.nn.Embedding(20, DIM)):
        torch.manual_seed(0)
        torch.nn.init.normal_(table.weight)
        models.append(torch.nn.Sequential(table, torch.nn.Linear(DIM, 1)))
    return models, [optim.Adam(models[0].parameters(), lr=0.1), torch.optim.Adam(models[1].parameters(), lr=0.1)]


def same(models):
    for one, other in zip(*(model.state_dict().values() for model in models), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_lightning_clips_by_its_hook():
    # Lightning's optimizer.step(closure) runs forward, backward and the hook, in this order.
    models, optimizers = pair()

    def hook(module, clip, *_):  # configure_gradient_clipping(self, optimizer, gradient_clip_val, algorithm)
        clip(module.parameters(), 0.1)

    for step in range(4):
        for model, optimizer, clip in zip(
            models, optimizers, [optim.clip_grad_norm_, torch.nn.utils.clip_grad_norm_], strict=True
        ):

            def closure(model=model, optimizer=optimizer, clip=clip, step=step):
                optimizer.zero_grad()
                loss = model(IDS + step).square().sum()
                loss.backward()
                hook(model, clip, optimizer, 0.1, "norm")
                return loss

            optimizer.step(closure)
    same(models)


@pytest.mark.parametrize("max_norm", [0.1, math.inf])  # the Trainer's max_grad_norm=0 asks for a norm by inf
def test_accelerate_and_the_trainer_clip_by_the_accelerators_method(max_norm):
    models, optimizers = pair()
    accelerator = SimpleNamespace(clip_grad_norm_=optim.clip_grad_norm_)
    for step in range(4):
        norms = []
        for model, optimizer, clip in zip(
            models, optimizers, [accelerator.clip_grad_norm_, torch.nn.utils.clip_grad_norm_], strict=True
        ):
            optimizer.zero_grad()
            model(IDS + step).square().sum().backward()
            norms.append(clip(model.parameters(), max_norm, norm_type=2).item())
            optimizer.step()
        assert math.isclose(*norms, rel_tol=1e-5)
    same(models)
