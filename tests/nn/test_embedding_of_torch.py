"""
torch's own tests of ``torch.nn.Embedding``, restated for ours in every gradient mode.

They are, with those of ``EmbeddingBag`` in test_embedding_bag_of_torch.py, from ``test/nn/test_embedding.py`` of torch
(commit 013a59d): what test_embedding.py, test_embedding_bag.py and the random programs do not say already. Each test
names torch's. Classes of errors are not compared: ours are ValueError and IndexError.
"""

from __future__ import annotations

import pytest
import torch
from nn.of_torch import MODES, close, gradient
from torch import Tensor

from torchsparse_rec import nn

pytestmark = [pytest.mark.parametrize("grad_mode", MODES), pytest.mark.usefixtures("one_thread")]


def test_tables_without_rows_or_columns(grad_mode: str) -> None:
    """Restate test_embedding_sparse_empty_tensor."""
    for rows, ids in ((0, torch.tensor([], dtype=torch.int64)), (10, torch.tensor([[0, 2, 4, 5], [4, 3, 0, 9]]))):
        table = nn.Embedding(rows, 0, grad_mode=grad_mode)
        assert gradient(table, lambda table=table, ids=ids: table(ids)).shape == (rows, 0)


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
    """Restate what test_embedding_padding_idx has beside gradients: a first row of zeros, and refused places."""
    for padding, row in ((0, 0), (-2, 8)):
        table = nn.Embedding(10, 20, padding_idx=padding, grad_mode=grad_mode).eval()
        output = table(torch.tensor([[row, 2, 4, 5], [4, 3, row, 9]]))
        assert not output[0, 0].any() and not output[1, 2].any() and output[0, 1].all()
    for padding in (25, -25):
        with pytest.raises(ValueError, match=rf"padding_idx must be None or in \[-10, 10\), got {padding}"):
            nn.Embedding(10, 20, padding_idx=padding, grad_mode=grad_mode)
