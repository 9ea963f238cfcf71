"""The coalesced mark of sparse gradients, and their conversion to dense ones."""

import copy
from collections import OrderedDict, namedtuple

import pytest
import torch
from devices import cpu_only
from torch.utils._python_dispatch import TorchDispatchMode

from torchsparse_rec import KeyedJaggedTensor, nn, optim
from torchsparse_rec.nn.gradients import CoalescedMark

pytestmark = pytest.mark.usefixtures("kernels")

A, B = torch.tensor([3, 3, 9, 1]), torch.tensor([9, 2, 3, 2])


def table(**kwargs):
    return nn.Embedding(12, 2, grad_mode="sparse", **kwargs)


def counts(*lookups):
    """Return the gradient of the sum of all results: how often each row was looked up."""
    total = torch.bincount(torch.cat(lookups), minlength=12).float()
    return total[:, None].expand(12, 2)


def hooks_of(weight):
    return [hook for hook in weight._post_accumulate_grad_hooks.values() if isinstance(hook, CoalescedMark)]


def test_one_lookup_gives_unique_sorted_rows_marked_coalesced():
    module = table()
    for _ in range(2):
        module.zero_grad()
        module(A).sum().backward()
        grad = module.weight.grad
        assert grad.is_coalesced() and grad.indices().tolist() == [[1, 3, 9]]
        assert torch.equal(grad.to_dense(), counts(A))


@cpu_only
@pytest.mark.cuda
def test_on_a_gpu_the_mark_is_for_our_optimizers():
    module = table().cuda()
    for kind in (torch.optim.SGD, optim.SGD):
        optimizer = kind(module.parameters(), lr=1.0)
        before = module.weight.detach().clone()
        module(A.cuda()).sum().backward()
        assert module.weight.grad.is_coalesced() == (kind is optim.SGD)
        optimizer.step()
        assert torch.equal(module.weight, before - counts(A).cuda())
        optimizer.zero_grad()


def test_accumulation_over_two_backwards():
    module = table()
    module(A).sum().backward()
    module(B).sum().backward()
    assert torch.equal(module.weight.grad.coalesce().to_dense(), counts(A, B))
    module(A).sum().backward()
    assert torch.equal(module.weight.grad.coalesce().to_dense(), counts(A, B, A))
    module.zero_grad()
    loss = module(A).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(module.weight.grad.coalesce().to_dense(), counts(A, A))


def test_accumulation_into_a_gradient_with_repeated_rows():
    module = table()
    repeated = torch.sparse_coo_tensor([[5, 5]], torch.ones(2, 2), (12, 2), check_invariants=True)
    module.weight.grad = repeated
    module(A).sum().backward()
    assert not module.weight.grad.is_coalesced()
    assert torch.equal(module.weight.grad.to_dense(), counts(A, torch.tensor([5, 5])))


def test_autograd_grad_between_backwards():
    module = table()
    (grad,) = torch.autograd.grad(module(B).sum(), module.weight)
    assert grad.is_coalesced() and module.weight.grad is None
    module.weight.grad = torch.sparse_coo_tensor([[5]], torch.ones(1, 2), (12, 2), check_invariants=True)
    torch.autograd.grad(module(A).sum(), module.weight)
    module(A).sum().backward()
    assert torch.equal(module.weight.grad.coalesce().to_dense(), counts(A, torch.tensor([5])))


@pytest.mark.parametrize("first", ["dense", "sparse"])
@pytest.mark.parametrize("together", [True, False])
def test_dense_and_sparse_contributions_mix(first, together):
    module = table()
    module.grad_mode = first
    one = module(A).sum()
    if not together:
        one.backward()
    module.grad_mode = "sparse" if first == "dense" else "dense"
    two = module(B).sum()
    (one + two if together else two).backward()
    grad = module.weight.grad
    assert torch.equal(grad.to_dense() if grad.is_sparse else grad, counts(A, B))


def test_shared_and_copied_parameters_have_one_hook():
    one, two = table(), table()
    two.weight = one.weight
    for _ in range(3):
        one(A), two(A)
    assert len(hooks_of(one.weight)) == 1
    other = copy.deepcopy(one)
    other(A)
    assert len(hooks_of(other.weight)) == 1 and hooks_of(other.weight)[0] is not hooks_of(one.weight)[0]
    one.weight = torch.nn.Parameter(torch.zeros(12, 2))
    one(A).sum().backward()
    assert one.weight.grad.is_coalesced()


@cpu_only
def test_no_hooks_without_a_sparse_gradient():
    module = table()
    with torch.no_grad():
        module(A)
    nn.Embedding.from_pretrained(module.weight.detach(), sparse=True)(A)
    module.grad_mode = "dense"
    module(A)
    assert not module.weight._post_accumulate_grad_hooks


def test_the_gradient_is_moved_not_copied():
    module = table()
    seen = []
    module(A)
    module.weight.register_hook(lambda grad: seen.append(grad._values().data_ptr()))
    module(A).sum().backward()
    assert seen == [module.weight.grad._values().data_ptr()]


def test_padding_only_and_empty_lookups():
    module = table(padding_idx=4)
    module(torch.tensor([4, 4])).sum().backward()
    assert module.weight.grad._nnz() == 0
    module(torch.zeros(0, dtype=torch.int64)).sum().backward()
    assert not module.weight.grad.to_dense().any()


# ---- The mark in collections -----------------------------------------------------------------------------------------


def collection(**kwargs):
    configs = [
        nn.EmbeddingBagConfig(name=name, num_embeddings=12, embedding_dim=2, feature_names=[name], **kwargs)
        for name in "ab"
    ]
    return nn.EmbeddingBagCollection(configs, grad_mode="sparse")


def weights_of(tables):
    return [tables.embedding_bags[name].weight for name in "ab"]


def looked_up(tables, a=A, b=B):
    ids, lengths = torch.cat([a, b]), torch.tensor([len(a), len(b)])
    return tables(KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)).values().sum()


def is_marked_truly(grad):
    assert not grad.is_coalesced() or grad.indices()[0].diff().gt(0).all()
    return grad.is_coalesced()


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam, torch.optim.SGD])
def test_a_collection_tells_its_marks_what_arrives(optimizer):
    """Under Adam rows are stale from the second step on."""
    tables = collection()
    optimizer = optimizer(tables.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        looked_up(tables).backward()
        for weight, ids in zip(weights_of(tables), (A, B), strict=True):
            assert is_marked_truly(weight.grad) and not weight._backward_hooks
            assert torch.equal(weight.grad.to_dense(), counts(ids))
        optimizer.step()


def test_a_single_table_with_stale_rows_tells_its_mark():
    module = table()
    optimizer = optim.Adam(module.parameters(), lr=0.1)
    for ids in (A, B, A):
        optimizer.zero_grad()
        module(ids).sum().backward()
        assert is_marked_truly(module.weight.grad) and not module.weight._backward_hooks
        optimizer.step()


def test_marks_of_a_collection_follow_its_tables():
    tables = collection()
    looked_up(tables).backward()
    one, other = weights_of(tables)
    marks = hooks_of(one)
    looked_up(tables)
    assert hooks_of(one) == marks
    copied = copy.deepcopy(tables)
    looked_up(copied).backward()
    assert all(is_marked_truly(weight.grad) for weight in weights_of(copied))
    assert hooks_of(weights_of(copied)[0]) != marks
    one.requires_grad_(False)
    tables.embedding_bags["b"].weight = torch.nn.Parameter(torch.zeros(12, 2))
    tables.zero_grad()
    looked_up(tables).backward()
    assert one.grad is None and is_marked_truly(weights_of(tables)[1].grad)
    frozen = collection().requires_grad_(False)
    looked_up(frozen)
    frozen.requires_grad_()
    looked_up(frozen).backward()
    assert all(is_marked_truly(weight.grad) for weight in weights_of(frozen))
    tables.double()
    tables.zero_grad()
    looked_up(tables).backward()
    assert is_marked_truly(weights_of(tables)[1].grad)


def test_several_lookups_of_a_collection_in_one_backward():
    tables = collection()
    for step, ids in enumerate((A, torch.zeros(0, dtype=torch.int64), B, torch.tensor([9, 2]))):
        tables.zero_grad()
        (looked_up(tables, a=B) + looked_up(tables, a=ids)).backward()
        grad = weights_of(tables)[0].grad
        assert is_marked_truly(grad) or step == 0 or grad.is_cuda
        assert torch.equal(grad.to_dense(), counts(B, ids))


@pytest.mark.parametrize("sparse", [False, True])
def test_a_table_of_a_collection_that_others_look_up_too(sparse):
    tables, alone = collection(), table()
    alone.weight = shared = weights_of(tables)[0]
    others = [lambda ids: alone(ids), lambda ids: torch.nn.functional.embedding(ids, shared, sparse=sparse)]
    for other in [*others, *reversed(others)]:
        for ids in (B, A, torch.tensor([9, 9]), torch.tensor([1, 3, 9])):
            for first in (True, False):
                tables.zero_grad()
                losses = [looked_up(tables), other(ids).sum()]
                sum(losses if first else losses[::-1]).backward()
                found = shared.grad
                assert torch.equal(found.to_dense() if found.is_sparse else found, counts(A, ids))
                if found.is_sparse:
                    is_marked_truly(found)


def test_hooks_on_a_table_of_a_collection():
    """A hook may come at any time, and change rows: a mark is set where no hook comes after the one that looks."""

    def swapped(grad):
        rows, values = grad._indices().flip(1), grad._values().flip(0)
        return torch.sparse_coo_tensor(rows, values, grad.shape, check_invariants=False)

    tables = collection()
    first, second = weights_of(tables)
    loss = looked_up(tables)
    first.register_hook(swapped)
    loss.backward()
    assert not first.grad.is_coalesced() and is_marked_truly(second.grad)
    handle = second.register_hook(lambda grad: grad * 2)
    for step in range(4):
        tables.zero_grad()
        looked_up(tables).backward()
        assert not first.grad.is_coalesced()
        assert torch.equal(second.grad.to_dense(), 2 * counts(B) if step < 2 else counts(B))
        is_marked_truly(second.grad)
        if step == 1:
            handle.remove()
            second.register_hook(swapped)
        assert not (step >= 2 and second.grad.is_coalesced())


def test_gradients_that_a_mode_sees_are_marked():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    tables = collection()
    with Seen():
        looked_up(tables).backward()
    looked_up(tables).backward()
    assert all(is_marked_truly(weight.grad) for weight in weights_of(tables))
    assert torch.equal(weights_of(tables)[0].grad.to_dense(), counts(A, A))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_a_collection_have_their_tables_dtype(dtype):
    tables = collection().to(dtype)
    optimizer = optim.SGD(tables.parameters(), lr=1.0)
    before = [weight.detach().clone() for weight in weights_of(tables)]
    looked_up(tables).backward()
    optimizer.step()
    for weight, was, ids in zip(weights_of(tables), before, (A, B), strict=True):
        assert is_marked_truly(weight.grad) and weight.grad.dtype == dtype
        torch.testing.assert_close(weight.detach(), was - counts(ids).to(dtype))


# ---- sparse_to_dense_grads -------------------------------------------------------------------------------------------


def sparse_grad():
    return torch.sparse_coo_tensor([[1, 0, 1]], torch.tensor([[1.0], [2.0], [3.0]]), (3, 1), check_invariants=True)


DENSE = torch.tensor([[2.0], [4.0], [0.0]])


@cpu_only
def test_parameters_are_converted_in_place():
    module = torch.nn.Embedding(3, 1, sparse=True)
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    module(torch.tensor([0, 1, 0, 1, 1, 1])).sum().backward()
    parameters = nn.sparse_to_dense_grads(iter([module.weight, frozen]))
    assert parameters[0] is module.weight and parameters[1] is frozen and frozen.grad is None
    assert torch.equal(module.weight.grad, DENSE)
    assert nn.sparse_to_dense_grads(module.weight) is module.weight
    torch.optim.Adam(parameters[:1]).step()


@cpu_only
def test_gradients_and_containers():
    dense = torch.ones(3)
    got = nn.sparse_to_dense_grads([sparse_grad(), None, dense])
    assert isinstance(got, list) and torch.equal(got[0], DENSE) and got[1] is None and got[2] is dense
    got = nn.sparse_to_dense_grads((sparse_grad(), sparse_grad()))
    assert isinstance(got, tuple) and all(torch.equal(g, DENSE) for g in got)
    got = nn.sparse_to_dense_grads(OrderedDict(a=sparse_grad(), b=[None]))
    assert torch.equal(got["a"], DENSE) and got["b"] == [None]
    Grads = namedtuple("Grads", ["x", "y"])
    got = nn.sparse_to_dense_grads(Grads(sparse_grad(), None))
    assert isinstance(got, Grads) and torch.equal(got.x, DENSE) and got.y is None
    assert nn.sparse_to_dense_grads([]) == [] and nn.sparse_to_dense_grads(None) is None


@cpu_only
def test_pairs():
    parameter, other = torch.nn.Parameter(torch.zeros(3, 1)), torch.nn.Parameter(torch.zeros(2))
    parameter.grad = sparse_grad()
    got = nn.sparse_to_dense_grads([(sparse_grad(), parameter), (None, other)])
    assert torch.equal(got[0][0], DENSE) and got[0][1] is parameter and got[1] == (None, other)
    assert parameter.grad.is_sparse
    nn.sparse_to_dense_grads((other, parameter))
    assert torch.equal(parameter.grad, DENSE)


@cpu_only
@pytest.mark.parametrize("x", [3, "weights", [1.0]])
def test_other_things_are_errors(x):
    with pytest.raises(TypeError, match="must hold parameters, gradients or pairs, got (int|str|float)"):
        nn.sparse_to_dense_grads(x)


@cpu_only
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("grad_mode", ["dense", "sparse", "fused"])
def test_gradients_of_weights_are_not_differentiated_again(grad_mode, stale):
    """Refuse it also where the loss is linear, so that the table alone makes the gradient depend on anything."""
    bag = nn.EmbeddingBag(20, 3, mode="sum", grad_mode=grad_mode)
    optimizer = optim.Adam(bag.parameters(), lr=0.1, in_backward=grad_mode == "fused")
    for k in range(2 * stale):
        optimizer.zero_grad()
        bag(torch.tensor([[k]])).sum().backward()
        optimizer.step()
    weights = torch.ones(1, 2, requires_grad=True)
    pooled = bag(torch.tensor([[0, 1]]), per_sample_weights=weights)
    (gradient,) = torch.autograd.grad(pooled.sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="have no second derivatives: look rows up with ops.embedding"):
        gradient.sum().backward()
