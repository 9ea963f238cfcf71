"""Embedding beside torch.nn.Embedding: results, gradients, state, copies, errors."""

import copy
import pickle

import pytest
import torch
from kinds import saved
from pairs import in_pairs

from torchsparse_rec import nn
from torchsparse_rec.nn import _lookup

GRAD_MODES = ("dense", "sparse")


@pytest.fixture(params=("small", "large", "emulated"))
def lookup_size(request, monkeypatch):
    """Make lookups take torch's kernels, which small ones do, ours, and the emulated CUDA kernels."""
    if request.param != "small":
        monkeypatch.setattr(_lookup, "_SMALL_LOOKUP", -1)
    if request.param == "emulated":
        request.getfixturevalue("emulated")
    return request.param


def pair(*args, grad_mode=None, **kwargs):
    """Make one of our modules and torch's, with the same table."""
    ours = nn.Embedding(*args, grad_mode=grad_mode, **kwargs)
    theirs = torch.nn.Embedding(*args, **kwargs)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def gradients(module, input, cotangent):
    """Return the output and the dense gradient of one lookup."""
    module.zero_grad()
    output = module(input)
    (output * cotangent).sum().backward()
    grad = module.weight.grad
    return output.detach(), grad.to_dense() if grad.is_sparse else grad


SHAPES = [(), (7,), (4, 5), (2, 3, 4), (0,), (0, 3)]
OPTIONS = [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}]


@in_pairs(shape=SHAPES, kwargs=OPTIONS, lookup_size=("small", "large", "emulated"), grad_mode=GRAD_MODES)
def test_agrees_with_torch(shape, kwargs, lookup_size, grad_mode):
    generator = torch.Generator().manual_seed(1)
    ours, theirs = pair(11, 3, grad_mode=grad_mode, dtype=torch.float64, **kwargs)
    assert ours.padding_idx == theirs.padding_idx
    for dtype in (torch.int64, torch.int32):
        input = torch.randint(11, shape, generator=generator, dtype=dtype)
        cotangent = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
        got, want = gradients(ours, input, cotangent), gradients(theirs, input, cotangent)
        assert torch.equal(got[0], want[0])
        torch.testing.assert_close(got[1], want[1], rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_and_large_lookups_have_the_same_bits(monkeypatch, dtype):
    generator = torch.Generator().manual_seed(2)
    module = nn.Embedding(50, 8, padding_idx=3, dtype=dtype)
    input = torch.randint(50, (2000,), generator=generator)
    cotangent = torch.randn(2000, 8, generator=generator, dtype=dtype)
    small = gradients(module, input, cotangent)
    monkeypatch.setattr(_lookup, "_SMALL_LOOKUP", -1)
    large = gradients(module, input, cotangent)
    assert torch.equal(small[0], large[0]) and torch.equal(small[1], large[1])


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_max_norm_changes_the_table_as_torch_does(grad_mode, norm_type):
    ours, theirs = pair(9, 4, grad_mode=grad_mode, max_norm=0.7, norm_type=norm_type)
    input = torch.tensor([[1, 4], [4, 8]])
    for module in (ours, theirs):
        torch.nn.init.ones_(module.weight)
    before = ours.weight.detach().clone()
    cotangent = torch.randn(2, 2, 4)
    got, want = gradients(ours, input, cotangent), gradients(theirs, input, cotangent)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    assert torch.equal(ours.weight, theirs.weight)
    assert not torch.equal(ours.weight[1], before[1]) and torch.equal(ours.weight[0], before[0])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_tables_are_summed_in_float32(grad_mode, dtype):
    module = nn.Embedding(4, 5, grad_mode=grad_mode, dtype=dtype)
    input = torch.arange(1000) % 3
    cotangent = torch.rand(1000, 5, generator=torch.Generator().manual_seed(3)).to(dtype)
    _, grad = gradients(module, input, cotangent)
    want = torch.zeros(4, 5).index_add(0, input, cotangent.float()).to(dtype)
    assert grad.dtype is dtype
    torch.testing.assert_close(grad, want, rtol=1e-3 if dtype is torch.float16 else 8e-3, atol=0)


def test_nested_input():
    module = nn.Embedding(6, 3)
    parts = [torch.tensor([1, 2, 5]), torch.tensor([4])]
    output = module(torch.nested.nested_tensor(parts, layout=torch.jagged))
    for got, part in zip(output.unbind(), parts, strict=True):
        assert torch.equal(got, module(part))


# ---- Construction, state and copies ----------------------------------------------------------------------------------


def test_constructor_and_repr_follow_torch():
    args = (5, 3, -2, 1.5, 1.0, True, True)
    ours, theirs = nn.Embedding(*args), torch.nn.Embedding(*args)
    for name in torch.nn.Embedding.__constants__:
        assert getattr(ours, name) == getattr(theirs, name)
    assert repr(ours) == repr(theirs)
    assert repr(nn.Embedding(5, 3, grad_mode="auto")) == "Embedding(5, 3, grad_mode='auto', 60 bytes)"
    assert isinstance(ours, torch.nn.Embedding)


def test_same_seed_draws_the_same_table():
    torch.manual_seed(5)
    ours = nn.Embedding(5, 3, padding_idx=1)
    torch.manual_seed(5)
    theirs = torch.nn.Embedding(5, 3, padding_idx=1)
    assert torch.equal(ours.weight, theirs.weight) and not ours.weight[1].any()


def test_given_weight_freeze_and_from_pretrained():
    table = torch.randn(4, 2)
    module = nn.Embedding(4, 2, _weight=table, _freeze=True)
    assert module.weight.data_ptr() == table.data_ptr() and not module.weight.requires_grad
    module = nn.Embedding.from_pretrained(table, padding_idx=1, sparse=True, grad_mode="dense")
    assert isinstance(module, nn.Embedding) and module.grad_mode == "dense" and module.padding_idx == 1
    assert not module.weight.requires_grad and not module(torch.tensor([1])).requires_grad
    assert nn.Embedding.from_pretrained(table, freeze=False).weight.requires_grad


def test_meta_device():
    module = nn.Embedding(4, 2, device="meta")
    assert module(torch.zeros(3, dtype=torch.int64, device="meta")).shape == (3, 2)


@pytest.mark.parametrize("direction", ["to torch", "from torch"])
@pytest.mark.parametrize("name", ["Embedding", "EmbeddingBag"])
def test_state_dict_round_trip(name, direction):
    ours, theirs = getattr(nn, name)(5, 3, grad_mode="auto"), getattr(torch.nn, name)(5, 3)
    ours(torch.tensor([[1, 2]]))
    source, target = (ours, theirs) if direction == "to torch" else (theirs, ours)
    assert list(source.state_dict()) == list(target.state_dict()) == ["weight"]
    target.load_state_dict(saved(source.state_dict(), weights_only=True))
    assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_independent_and_complete(copier):
    module = nn.Embedding(5, 3, grad_mode="sparse")
    module(torch.tensor([1, 1])).sum().backward()
    other = copier(module)
    other.zero_grad()
    other(torch.tensor([4, 0, 4])).sum().backward()
    assert other.weight.grad.is_coalesced() and other.weight.grad.indices().tolist() == [[0, 4]]
    assert module.weight.grad.is_coalesced() and module.weight.grad.indices().tolist() == [[1]]


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookup_size", ["small", "large"], indirect=True)  # the check for max_norm sees the ids first
@pytest.mark.parametrize("kwargs", [{"grad_mode": "dense"}, {"grad_mode": "sparse"}, {"max_norm": 1.0}])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 5, 9], r"Embedding: input\[1\] must be in \[0, 5\), got 5"),
        ([[0, 1], [2, -1]], r"Embedding: input\[1, 1\] must be in \[0, 5\), got -1"),
        (-3, r"Embedding: input must be in \[0, 5\), got -3"),
    ],
)
def test_id_out_of_range(lookup_size, kwargs, ids, message):
    with pytest.raises(IndexError, match=message):
        nn.Embedding(5, 3, **kwargs)(torch.tensor(ids))


def test_any_id_is_out_of_range_of_an_empty_table(lookup_size):
    module = nn.Embedding(0, 3, _weight=torch.zeros(0, 3))
    assert module(torch.zeros(0, dtype=torch.int64)).shape == (0, 3)
    with pytest.raises(IndexError, match=r"input\[0\] must be in \[0, 0\), got 2"):
        module(torch.tensor([2]))


def test_other_bad_input():
    module = nn.Embedding(5, 3)
    with pytest.raises(ValueError, match="input must be int32 or int64, got torch.float32"):
        module(torch.tensor([1.0]))
    with pytest.raises(TypeError, match="input must be a tensor of int32 or int64, got list"):
        module([1])
    with pytest.raises(ValueError, match="grad_mode must be one of .*'auto', got 'fast'"):
        nn.Embedding(5, 3, grad_mode="fast")
    with pytest.raises(ValueError, match="got 'Sparse'"):
        module.grad_mode = "Sparse"
    wide = nn.Embedding(5, 3, _weight=torch.zeros(5, 3, dtype=torch.complex64))
    with pytest.raises(ValueError, match="weight must be"):
        wide(torch.tensor([1] * (_lookup._SMALL_LOOKUP)))
