"""EmbeddingBag beside torch.nn.EmbeddingBag, and beside plain formulas where torch has none."""

import copy
import pickle
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from devices import cpu_only
from nn.of_torch import pooled
from pairs import in_pairs

from torchsparse_rec import nn
from torchsparse_rec.typing import Pooling

pytestmark = pytest.mark.usefixtures("kernels")

GRAD_MODES = ("dense", "sparse")
POOLINGS = ("sum", "sum-weighted", "mean", "mean-weighted", "sqrtn", "sqrtn-weighted", "max", "min")
V, D = 12, 3
OFFSETS = torch.tensor([0, 3, 3, 4, 9])  # the second and the last bag are empty


def ids(n=9, seed=0, dtype=torch.int64):
    return torch.randint(V, (n,), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(function, parameters, cotangent):
    """Return the output, and the gradients of ``parameters`` as dense tensors."""
    output = function()
    grads = torch.autograd.grad((output * cotangent).sum(), parameters)
    return [output.detach(), *(g.to_dense() if g.is_sparse else g for g in grads)]


@in_pairs(pooling=POOLINGS, grad_mode=GRAD_MODES, padding_idx=[None, 4], two_d=[False, True])
def test_agrees_with_the_formulas(pooling, grad_mode, padding_idx, two_d):
    mode, _, weighted = pooling.partition("-")
    module = nn.EmbeddingBag(V, D, mode=mode, padding_idx=padding_idx, grad_mode=grad_mode, dtype=torch.float64)
    input, offsets = (ids(20), torch.arange(0, 20, 5)) if two_d else (ids(), OFFSETS)
    ends = torch.cat([offsets, torch.tensor([len(input)])])
    weights = torch.randn(len(input), dtype=torch.float64, requires_grad=True) if weighted else None
    shape = (-1, 5) if two_d else (-1,)
    arguments = (input.reshape(shape), None if two_d else offsets, weights.reshape(shape) if weighted else None)
    leaves = [module.weight, weights] if weighted else [module.weight]
    cotangent = torch.randn(len(offsets), D, dtype=torch.float64)
    got = run(lambda: module(*arguments), leaves, cotangent)
    want = run(lambda: pooled(module.weight, input, ends, mode, weights, padding_idx), leaves, cotangent)
    if padding_idx is not None:
        assert not got[1][padding_idx].any()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
def test_scale_grad_by_freq_divides_by_the_number_of_occurrences(grad_mode):
    # The reference is not torch: its CPU kernel divides the third row of ids 0, 1, 1, 2, 2, 2 by 2.
    for mode in get_args(Pooling):
        plain = nn.EmbeddingBag(V, D, mode=mode, dtype=torch.float64)
        scaled = nn.EmbeddingBag(V, D, mode=mode, dtype=torch.float64, grad_mode=grad_mode, scale_grad_by_freq=True)
        scaled.load_state_dict(plain.state_dict())
        cotangent = torch.randn(len(OFFSETS), D, dtype=torch.float64)
        want = run(partial(plain, ids(), OFFSETS), [plain.weight], cotangent)[1]
        got = run(partial(scaled, ids(), OFFSETS), [scaled.weight], cotangent)[1]
        count = torch.bincount(ids(), minlength=V).clamp_min(1)
        torch.testing.assert_close(got, want / count[:, None], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("mode", ["mean", "sqrtn"])
def test_zero_denominators_give_zero(mode):
    module = nn.EmbeddingBag(V, D, mode=mode)
    weights = torch.tensor([0.0, 0.0, 1.0] if mode == "sqrtn" else [1.0, -1.0, 1.0], requires_grad=True)
    output = module(torch.tensor([1, 2, 3]), torch.tensor([0, 2]), weights)
    assert not output[0].any() and output[1].any()
    output.sum().backward()
    assert not weights.grad[:2].any() and not module.weight.grad[1:3].any()


def test_max_norm_changes_the_table_as_torch_does():
    ours, theirs = nn.EmbeddingBag(V, D, max_norm=0.5), torch.nn.EmbeddingBag(V, D, max_norm=0.5)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(ids(), OFFSETS), theirs(ids(), OFFSETS))
    assert torch.equal(ours.weight, theirs.weight)


def test_nested_input():
    module = nn.EmbeddingBag(V, D, mode="sum")
    parts = [torch.tensor([1, 2, 5]), torch.tensor([4])]
    weights = [torch.tensor([1.0, 2.0, 0.5]), torch.tensor([3.0])]
    nested = [torch.nested.nested_tensor(x, layout=torch.jagged) for x in (parts, weights)]
    want = module(torch.cat(parts), torch.tensor([0, 3]), torch.cat(weights))
    assert torch.equal(module(nested[0], None, nested[1]), want)


def test_bags_without_ids():
    module = nn.EmbeddingBag(V, D)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(module(nothing, torch.zeros(2, dtype=torch.int64)), torch.zeros(2, D))
    assert torch.equal(module(nothing.reshape(3, 0)), torch.zeros(3, D))
    assert module(nothing.reshape(0, 4)).shape == (0, D)
    assert module(nothing, nothing).shape == (0, D)


# ---- Construction and copies -----------------------------------------------------------------------------------------


@cpu_only
def test_constructor_and_repr_follow_torch():
    args = (5, 3, 1.5, 1.0, True, "sum", True, None, True, -2)
    ours, theirs = nn.EmbeddingBag(*args), torch.nn.EmbeddingBag(*args)
    for name in torch.nn.EmbeddingBag.__constants__:
        assert getattr(ours, name) == getattr(theirs, name)
    assert repr(ours) == repr(theirs)
    text = "EmbeddingBag(5, 3, mode='mean', grad_mode='sparse', 60 bytes)"
    assert repr(nn.EmbeddingBag(5, 3, grad_mode="sparse")) == text
    assert isinstance(ours, torch.nn.EmbeddingBag)


@cpu_only
def test_from_pretrained():
    table = torch.randn(4, 2)
    module = nn.EmbeddingBag.from_pretrained(table, mode="sqrtn", padding_idx=1, grad_mode="sparse")
    assert (module.mode, module.padding_idx, module.grad_mode) == ("sqrtn", 1, "sparse")
    assert module.weight.data_ptr() == table.data_ptr() and not module.weight.requires_grad


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies(copier):
    module = nn.EmbeddingBag(V, D, mode="sqrtn", grad_mode="sparse")
    module(ids(), OFFSETS).sum().backward()
    other = copier(module)
    assert torch.equal(other(ids(), OFFSETS), module(ids(), OFFSETS)) and repr(other) == repr(module)


# ---- Errors ----------------------------------------------------------------------------------------------------------


@cpu_only
@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_id_out_of_range(grad_mode, max_norm):
    module = nn.EmbeddingBag(V, D, grad_mode=grad_mode, max_norm=max_norm)
    with pytest.raises(IndexError, match=r"EmbeddingBag: input\[2\] must be in \[0, 12\), got 12"):
        module(torch.tensor([0, 1, 12]), torch.tensor([0]))
    with pytest.raises(IndexError, match=r"EmbeddingBag: input\[\d, ?1\]|input\[.*\] must be in \[0, 12\), got -7"):
        module(torch.tensor([[0, 1], [2, -7]]))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 3], r"offsets\[0\] must be 0, got 1"),
        ([0, 5, 3], r"offsets"),
        ([0, 10], r"offsets"),
        ([0, -1], r"offsets"),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_bad_offsets(offsets, message, last):
    offsets = [*offsets, 9] if last else offsets
    with pytest.raises(ValueError, match=message):
        nn.EmbeddingBag(V, D, include_last_offset=last)(ids(), torch.tensor(offsets))


@pytest.mark.parametrize("end", [0, 2, 5, 10])
def test_a_last_offset_that_is_not_the_end_of_the_ids(end):
    with pytest.raises(ValueError, match=rf"offsets\[2\], the last, must be the number of indices, 9, got {end}"):
        nn.EmbeddingBag(V, D, include_last_offset=True)(ids(), torch.tensor([0, 0, end]))


@cpu_only
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor([1.0]), torch.tensor([0])), "input must be int32 or int64, got torch.float32"),
        ((torch.zeros(1, 1, 1, dtype=torch.int64),), r"input must have rank 1 or 2, got shape \(1, 1, 1\)"),
        ((torch.tensor([1]),), "offsets must be given when input has rank 1"),
        ((torch.tensor([[1]]), torch.tensor([0])), "offsets must be None when input has rank 2"),
        ((torch.tensor([1]), torch.tensor([[0]])), r"offsets must have rank 1, got shape \(1, 1\)"),
        ((torch.tensor([1]), torch.tensor([0.0])), "offsets must be"),
        ((ids(), OFFSETS, torch.ones(8)), r"per_sample_weights must have the shape of input, \(9,\), got \(8,\)"),
        ((torch.tensor([1, 2]), torch.tensor([0]), torch.tensor([1.0, float("nan")])), r"per_sample_weights\[1\].*nan"),
        ((ids(), [0, 2]), r"offsets must be a tensor, got list: torch.tensor\(...\) makes"),
        ((ids(), OFFSETS, np.ones(9)), r"per_sample_weights must be a tensor, got ndarray: torch.from_numpy"),
    ],
)
def test_other_bad_input(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        nn.EmbeddingBag(V, D)(*arguments)


@cpu_only
def test_a_mode_that_there_is_not():
    with pytest.raises(ValueError, match="mode must be one of 'sum', 'mean', .*, got 'median'"):
        nn.EmbeddingBag(V, D, mode="median")
