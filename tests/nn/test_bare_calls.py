"""The short way of single tables' lookups: wherever it is taken, it gives what the complete way gives, to the bit."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import get_args

import pytest
import torch
from calls import assert_same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchsparse_rec import nn, ops
from torchsparse_rec.typing import Pooling

pytestmark = pytest.mark.usefixtures("kernels")

IDS = torch.tensor([2, 0, 2, 3, 1, 2, 5])
STARTS = torch.tensor([0, 2, 2, 5])
COUNT = len(IDS)


class Watched(TorchDispatchMode):
    """A mode that changes nothing, but wants to see the operators: their short way is closed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: D105
        return func(*args, **(kwargs or {}))


WAYS = (nullcontext(), True), (Watched(), False)  # and whether it is the short one


def weight(dtype: torch.dtype = torch.float32, dim: int = 5) -> Tensor:
    return torch.randn(6, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)


def is_short(result: Tensor) -> bool:
    return type(result.grad_fn).__name__ == "_EagerLookupBackward"


def assert_same_both_ways(module: torch.nn.Module, *arguments: Tensor | None) -> None:
    """Look up and step by both ways, and compare results and gradients."""
    results, grads = [], []
    for mode, short in WAYS:
        module.zero_grad()
        with mode:
            result = module(*arguments)
            assert is_short(result) == short
            result.backward(torch.linspace(-2, 3, result.numel(), dtype=result.dtype).reshape(result.shape))
        results.append(result.detach())
        grads.append(module.weight.grad)
    assert_same_bits(*results)
    short, complete = grads
    assert short.layout == complete.layout and short.shape == complete.shape
    if short.layout is torch.sparse_coo:
        assert short.is_coalesced() and complete.is_coalesced()
        assert_same_bits(short.indices(), complete.indices())
        short, complete = short.values(), complete.values()
    assert_same_bits(short, complete)


@pytest.mark.parametrize("sparse", [False, True])
def test_bags_give_the_same_both_ways(sparse: bool) -> None:
    for mode, dtype, index, padding, include_last in itertools.product(
        get_args(Pooling), (torch.float32, torch.bfloat16), (torch.int64, torch.int32), (None, 2), (False, True)
    ):
        module = nn.EmbeddingBag(
            6, 5, mode=mode, sparse=sparse, padding_idx=padding, include_last_offset=include_last, _weight=weight(dtype)
        )
        offsets = torch.cat([STARTS, torch.tensor([COUNT])]) if include_last else STARTS
        assert_same_both_ways(module, IDS.to(index), offsets.to(index))


@pytest.mark.parametrize("sparse", [False, True])
def test_bags_of_nothing_and_by_frequency(sparse: bool) -> None:
    module = nn.EmbeddingBag(6, 5, sparse=sparse, scale_grad_by_freq=True, _weight=weight())
    assert_same_both_ways(module, IDS, STARTS)
    assert_same_both_ways(module, IDS[:0], torch.zeros(3, dtype=torch.int64))
    assert_same_both_ways(module, IDS[:0], IDS[:0])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shape", [(7,), (), (0,), (7, 1)])
def test_single_ids_give_the_same_both_ways(shape: tuple[int, ...], sparse: bool) -> None:
    for padding, by_frequency in itertools.product((None, 2), (False, True)):
        # Small dense lookups are torch's own, but for half types.
        table = weight(torch.float32 if sparse else torch.bfloat16)
        module = nn.Embedding(6, 5, padding, sparse=sparse, scale_grad_by_freq=by_frequency, _weight=table)
        assert_same_both_ways(module, IDS[: torch.Size(shape).numel()].reshape(shape))


@pytest.mark.parametrize("sparse", [False, True])
def test_weights_without_a_gradient(sparse: bool) -> None:
    offsets = torch.cat([STARTS, torch.tensor([COUNT])])
    weights = torch.tensor([0.5, 2.0, 1.0, -1.5, 1.0, 3.0, 0.25])
    grads = []
    for needs_grad in (False, True):
        table = weight().requires_grad_()
        given = weights.clone().requires_grad_(needs_grad)
        result = ops.embedding_bag(table, IDS, offsets, per_sample_weights=given, mode="mean", sparse=sparse)
        assert is_short(result) != needs_grad
        result.square().sum().backward()
        grads.append(table.grad.to_dense())
    assert_same_bits(*grads)


@pytest.mark.parametrize("sparse", [False, True])
def test_second_derivatives_take_the_complete_way(sparse: bool) -> None:
    module = nn.EmbeddingBag(6, 5, sparse=sparse, _weight=weight())
    seconds = []
    for mode, short in WAYS:
        upstream = torch.ones(4, 5, requires_grad=True)
        with mode:
            result = module(IDS, STARTS)
        assert is_short(result) == short
        (first,) = torch.autograd.grad(result, module.weight, upstream, create_graph=True)
        seconds += torch.autograd.grad((first.to_dense() ** 2).sum(), upstream)
    assert_same_bits(*seconds)


def test_gradients_in_a_batch() -> None:
    module = nn.EmbeddingBag(6, 5, _weight=weight())
    result = module(IDS, STARTS)
    upstream = torch.randn(3, 4, 5)
    (batch,) = torch.autograd.grad(result, module.weight, upstream, retain_graph=True, is_grads_batched=True)
    one_by_one = [torch.autograd.grad(result, module.weight, x, retain_graph=True)[0] for x in upstream]
    torch.testing.assert_close(batch, torch.stack(one_by_one), rtol=0, atol=0)


def test_a_graph_is_used_once_and_ids_must_not_change() -> None:
    module = nn.EmbeddingBag(6, 5, _weight=weight())
    result = module(IDS, STARTS)
    result.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        result.sum().backward()
    ids = IDS.clone()
    result = module(ids, STARTS)
    ids[0] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_hooks_of_saved_tensors_see_the_ids() -> None:
    seen: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        assert is_short(nn.EmbeddingBag(6, 5, _weight=weight())(IDS, STARTS))
    assert any(x is IDS for x in seen)


def test_a_tensor_of_an_ended_transform_keeps_its_gradient() -> None:
    table, left = weight().requires_grad_(), []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(table)
    result = ops.embedding(left[0], IDS)
    (gradient,) = torch.autograd.grad(result.sum(), table)
    assert torch.equal(gradient, torch.bincount(IDS, minlength=6).float()[:, None].expand(6, 5))


def test_functions_of_modules_and_transforms() -> None:
    module = nn.EmbeddingBag(6, 5, _weight=weight())

    def loss(table: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": table}, (IDS, STARTS)).square().sum()

    actual = torch.func.grad(loss)(module.weight.detach())
    module(IDS, STARTS).square().sum().backward()
    torch.testing.assert_close(actual, module.weight.grad, rtol=0, atol=0)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_lookup_and_an_operators_meet_in_one_backward(sparse: bool) -> None:
    """The mark says the truth also where a gradient comes that nobody tells of."""
    module = nn.EmbeddingBag(6, 5, mode="sum", sparse=True, _weight=weight())
    ends = torch.tensor([0, 3])
    for ids in (torch.tensor([2, 2, 0]), IDS[:3], torch.tensor([4, 5, 1])):
        module.zero_grad()
        both = module(IDS[:3], torch.tensor([0])) + ops.embedding_bag(module.weight, ids, ends, sparse=sparse)
        both.sum().backward()
        found = module.weight.grad
        wanted = torch.bincount(torch.cat([IDS[:3], ids]), minlength=6).float()[:, None].expand(6, 5)
        if found.layout is torch.sparse_coo and found.is_coalesced():
            assert found.indices()[0].diff().gt(0).all()
        assert torch.equal(found.to_dense(), wanted)


def test_the_mark_with_torchs_own_sparse_gradient() -> None:
    module = nn.Embedding(6, 5, sparse=True, _weight=weight())
    theirs = torch.nn.functional.embedding
    for ids in (torch.tensor([5, 5, 1]), torch.zeros(0, dtype=torch.int64)):
        module.zero_grad()
        (module(IDS[:3]).sum() + theirs(ids, module.weight, sparse=True).sum()).backward()
        assert module.weight.grad.is_coalesced() == (len(ids) == 0)
    # What one backward has told says nothing of the next, whose gradient has as many rows.
    torch.autograd.grad(module(IDS[:3]).sum(), module.weight)
    module.zero_grad()
    theirs(torch.tensor([5, 5]), module.weight, sparse=True).sum().backward()
    assert not module.weight.grad.is_coalesced()


def test_a_hook_that_changes_a_gradient_is_not_overlooked() -> None:
    module = nn.Embedding(6, 5, sparse=True, _weight=weight())

    def swapped(grad: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(grad._indices().flip(1), grad._values(), grad.shape, check_invariants=False)

    result = module(IDS[:3])
    module.weight.register_hook(swapped)  # after the lookup
    result.sum().backward()
    assert not module.weight.grad.is_coalesced()
    module.zero_grad()
    module(IDS[:3]).sum().backward()
    assert not module.weight.grad.is_coalesced()


def test_two_lookups_of_a_table_are_marked_from_the_second_backward_on() -> None:
    module = nn.Embedding(6, 5, sparse=True, _weight=weight())
    for step in range(3):
        module.zero_grad()
        (module(IDS[:3]).sum() + module(IDS[3:]).sum()).backward()
        assert module.weight.grad.is_coalesced() or step == 0 or module.weight.is_cuda


@pytest.mark.parametrize("include_last", [False, True])
def test_errors_are_those_of_the_complete_way(include_last: bool) -> None:
    module = nn.EmbeddingBag(6, 5, include_last_offset=include_last, _weight=weight())
    last = [COUNT] * include_last
    cases = [
        (torch.tensor([2, 6, 2, 3, 1, 2, 5]), torch.tensor([0, 2, *last])),
        (IDS, torch.tensor([1, 2, *last])),
        (IDS, torch.tensor([0, COUNT + 1, *last])),
        (IDS, torch.tensor([0, 3, 2, *last])),
        (IDS, torch.tensor(last, dtype=torch.int64)),
        (IDS.float(), torch.tensor([0, *last])),
        (IDS, torch.tensor([[0], *[last] * include_last])),
    ]
    for case in cases:
        texts = []
        for mode, _ in WAYS:
            with mode, pytest.raises((IndexError, ValueError)) as error:
                module(*case)
            texts.append((error.type, str(error.value)))
        assert texts[0] == texts[1]
