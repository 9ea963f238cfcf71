"""
torch's own tests of ``torch.nn.Embedding``, restated for ours in every gradient mode.

Restated, with those of ``EmbeddingBag`` in test_embedding_bag_of_torch.py, from ``test/nn/test_embedding.py`` of torch
(commit 013a59d): the 160 cases that run on a CPU. Each test names torch's. Classes of errors are not compared: ours are
ValueError and IndexError. 154 cases have torch's answers in every mode. Where ours differ on purpose, the test asserts
what our documents say:

- test_embedding_backward, 1 case: rows of a sparse gradient are unique and sorted; torch's repeat, in the ids' order.
- test_embeddingbag_include_last_offset, 1 case: of ids behind a last offset torch forgets some in forward and counts
  them in backward; ours refuse such an offset.
- test_EmbeddingBag_per_sample_weights_failures, 4 cases: weights in mode mean, which torch refuses, mean what they do
  in TensorFlow.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from nn.of_torch import MODES, close, gradient
from torch import Tensor

from torchsparse_rec import nn, ops

pytestmark = [pytest.mark.parametrize("grad_mode", MODES), pytest.mark.usefixtures("one_thread")]


def test_gradients_have_the_shape_of_the_table(grad_mode: str) -> None:
    """Restate test_embedding_sparse_basic."""
    table = nn.Embedding(10, 20, grad_mode=grad_mode)
    ids = torch.tensor([[0, 2, 4, 5], [4, 3, 0, 9]])
    want = torch.bincount(ids.flatten(), minlength=10)[:, None].expand(10, 20)
    close(gradient(table, lambda: table(ids)), want, torch.float32)
    if grad_mode == "sparse":
        table(ids).sum().backward()
        assert table.weight.grad.is_sparse and table.weight.grad.shape == (10, 20)


def test_tables_without_rows_or_columns(grad_mode: str) -> None:
    """Restate test_embedding_sparse_empty_tensor."""
    for rows, ids in ((0, torch.tensor([], dtype=torch.int64)), (10, torch.tensor([[0, 2, 4, 5], [4, 3, 0, 9]]))):
        table = nn.Embedding(rows, 0, grad_mode=grad_mode)
        assert gradient(table, lambda table=table, ids=ids: table(ids)).shape == (rows, 0)


def test_casting(grad_mode: str) -> None:
    """Restate test_move_sparse_half_embedding."""
    table = nn.Embedding(10, 3, grad_mode=grad_mode).eval()
    assert table.weight.dtype == torch.get_default_dtype() and table.weight.device.type == "cpu"
    table.to(torch.float16)
    assert table.weight.dtype == torch.float16 and (table.num_embeddings, table.embedding_dim) == (10, 3)
    assert table(torch.tensor([1])).dtype == torch.float16


def test_max_norm(grad_mode: str) -> None:
    """Restate test_embedding_max_norm."""
    table = nn.Embedding(22, 5, max_norm=1.0, grad_mode=grad_mode)
    with torch.no_grad():
        output = table(torch.tensor([2, 8, 8, 6]))
    assert torch.equal(output[1], output[2]) and (output.norm(dim=1) <= 1).all()


NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_pretrained_rows(dtype: torch.dtype, grad_mode: str) -> None:
    """Restate test_embedding_from_pretrained."""
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype)
    table = nn.Embedding.from_pretrained(rows, grad_mode=grad_mode)
    assert torch.equal(table.weight, rows) and torch.equal(table(torch.tensor([0, 1])), rows)
    with pytest.raises(IndexError, match=r"input\[1\] must be in \[0, 2\), got 2"):
        table(torch.tensor([0, 2]))


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_a_pretrained_row_of_padding_stays(make: type, grad_mode: str) -> None:
    """Restate test_embedding_from_pretrained_padding_idx and test_embedding_bag_from_pretrained_padding_idx."""
    rows = torch.rand(4, 3)
    rows[2] = 7.0
    table = make.from_pretrained(rows.clone().requires_grad_(), padding_idx=2, grad_mode=grad_mode)
    assert torch.equal(table.weight, rows)


def test_pretrained_rows_are_renormalised_where_they_lie(grad_mode: str) -> None:
    """Restate test_embedding_from_pretrained_options."""
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    before = rows.clone()
    table = nn.Embedding.from_pretrained(rows, max_norm=2.0, norm_type=0.5, grad_mode=grad_mode)
    output = table(torch.tensor([0, 1]))
    assert torch.equal(output, rows) and (rows != before).all() and (output.norm(p=0.5, dim=1) <= 2).all()


def test_the_function_and_the_module(grad_mode: str) -> None:
    """Restate test_embedding_functional."""
    ids, rows = torch.tensor([[1, 3, 2], [0, 2, 1]]), torch.rand(4, 3)
    table = nn.Embedding(4, 3, grad_mode=grad_mode).eval()
    table.weight.data = rows
    assert torch.equal(table.weight.data, rows) and torch.equal(table(ids), ops.embedding(rows, ids))
    padded = nn.Embedding.from_pretrained(rows, padding_idx=2, grad_mode=grad_mode)
    assert torch.equal(padded(ids), ops.embedding(rows, ids, padding_idx=2))


def test_gradients_and_second_ones(grad_mode: str) -> None:
    """Restate test_embedding_dense_grad."""
    ids, weight = torch.tensor([[0, 1, 1, 2], [3, 5, 7, 11]]), torch.randn(20, 20, dtype=torch.float64)
    table = nn.Embedding(20, 20, dtype=torch.float64, grad_mode=grad_mode)

    def rows(weight: Tensor) -> Tensor:
        return torch.func.functional_call(table, {"weight": weight * 1}, (ids,))

    if grad_mode == "sparse":  # gradcheck needs strided gradients
        close(
            gradient(table, lambda: table(ids)),
            torch.autograd.functional.vjp(lambda w: w[ids].sum(), weight)[1],
            torch.float64,
        )
        return
    assert torch.autograd.gradcheck(rows, weight.requires_grad_())
    assert torch.autograd.gradgradcheck(rows, weight)


@pytest.mark.parametrize("shape", [(), (1, 1, 1)])
def test_weights_of_other_ranks(shape: tuple[int, ...], grad_mode: str) -> None:
    """Restate test_embedding_scalar_weight_error: one case, of both shapes."""
    with pytest.raises(ValueError, match="weight must have rank 2"):
        ops.embedding(torch.ones(shape), torch.zeros(2, 2, dtype=torch.int64), sparse=grad_mode == "sparse")
    with pytest.raises(AssertionError, match="2-dimensional"):
        nn.Embedding.from_pretrained(torch.ones(shape), grad_mode=grad_mode)


def test_accumulated_gradients(grad_mode: str) -> None:
    """Restate test_embedding_backward. Rows of our sparse gradients are unique and sorted."""
    table = nn.Embedding(10, 3, dtype=torch.float64, grad_mode=grad_mode)
    first, second = torch.tensor([7, 1, 3]), torch.tensor([8, 1, 3])
    want = torch.zeros(10, 3, dtype=torch.float64)
    want[[7, 1, 3]] = 1
    assert torch.allclose(gradient(table, lambda: table(first)), want)
    want[[8, 1, 3]] += 1
    assert torch.allclose(gradient(table, lambda: table(first).sum() + table(second).sum()), want)
    if grad_mode == "sparse":
        for ids in (first, second):
            table(ids).sum().backward()
        grad = table.weight.grad.coalesce()
        assert grad.indices().tolist() == [[1, 3, 7, 8]] and grad.values()[:, 0].tolist() == [2, 2, 1, 1]


def test_gradients_of_renormalised_rows(grad_mode: str) -> None:
    """Restate test_embedding_max_norm_backward."""
    table = nn.Embedding(4, 4, max_norm=1.0, _weight=torch.randn(4, 4) * 2, grad_mode=grad_mode)
    ids = torch.tensor([0, 1, 2, 2])
    with torch.no_grad():
        table(ids)  # so that a step with lr=1 moves rows by their gradient alone
    close(gradient(table, lambda: table(ids)), torch.tensor([1.0, 1, 2, 0])[:, None].expand(4, 4), torch.float32)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # torch's own warning, at its first jvp
def test_forward_derivatives_of_renormalised_rows(grad_mode: str) -> None:
    """Restate test_embedding_max_norm_fwd_AD."""
    table, ids = nn.Embedding(4, 4, max_norm=1.0, grad_mode=grad_mode), torch.tensor([[0, 1], [2, 2]])
    with torch.autograd.forward_ad.dual_level():
        weight = torch.autograd.forward_ad.make_dual(torch.randn(4, 4) * 2, torch.ones(4, 4))
        output = torch.func.functional_call(table, {"weight": weight}, (ids,))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(output).tangent, torch.ones(2, 2, 4))


def test_padding(grad_mode: str) -> None:
    """Restate test_embedding_padding_idx."""
    for padding, row in ((0, 0), (-2, 8)):
        table = nn.Embedding(10, 20, padding_idx=padding, grad_mode=grad_mode).eval()
        output = table(torch.tensor([[row, 2, 4, 5], [4, 3, row, 9]]))
        assert not output[0, 0].any() and not output[1, 2].any() and output[0, 1].all()
    table = nn.Embedding(10, 20, padding_idx=2, grad_mode=grad_mode).eval()
    with torch.no_grad():
        table.weight[2] = 1.0
    assert torch.equal(table(torch.tensor([0, 2]))[1], torch.ones(20))
    for padding in (25, -25):
        with pytest.raises(ValueError, match=rf"padding_idx must be None or in \[-10, 10\), got {padding}"):
            nn.Embedding(10, 20, padding_idx=padding, grad_mode=grad_mode)
    table = nn.Embedding(5, 2, padding_idx=0, grad_mode=grad_mode)
    for count, others in itertools.product((1, 2, 1000), ([], [1, 3], [2])):
        ids = torch.tensor(others + [0] * count)
        assert not gradient(table, lambda ids=ids: table(ids))[0].any()
        if grad_mode == "dense":
            total = table(ids).sum()
            (first,) = torch.autograd.grad(total, list(table.parameters()), retain_graph=True)
            assert not gradient(table, lambda total=total, first=first: first.sum() + total)[0].any()
