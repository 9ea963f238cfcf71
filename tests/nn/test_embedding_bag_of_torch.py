"""torch's own tests of ``EmbeddingBag``, restated for ours in every gradient mode: see test_embedding_of_torch.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from nn.of_torch import FLOATS, IDS, MODES, POOLINGS, close, gradient, pooled
from pairs import in_pairs
from torch import Tensor

from torchsparse_rec import nn, optim

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=MODES)
def grad_mode(request: pytest.FixtureRequest) -> str:
    """Return each gradient mode, where a test does not say which."""
    return request.param


def test_a_maximum_over_a_nan_is_nan_in_torch_where_it_comes_first(grad_mode: str) -> None:
    """docs/embeddings.md names the difference."""
    rows, ids = torch.tensor([[1.0], [torch.nan], [2.0]]), torch.tensor([[1, 0], [0, 1], [2, 0]])
    results = []
    for cls, options in ((nn.EmbeddingBag, {"grad_mode": grad_mode}), (torch.nn.EmbeddingBag, {})):
        results.append(cls.from_pretrained(rows, mode="max", **options)(ids).flatten().tolist())
    assert str(results) == "[[nan, nan, 2.0], [nan, 1.0, 2.0]]"


def test_pretrained_bags_are_renormalised_where_they_lie(grad_mode: str) -> None:
    """Restate test_embeddingbag_from_pretrained_options."""
    rows = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    before = rows.clone()
    bags = nn.EmbeddingBag.from_pretrained(rows, max_norm=2.0, norm_type=0.5, mode="max", grad_mode=grad_mode)
    assert torch.equal(bags(torch.tensor([[0, 1]])), rows.amax(0, keepdim=True))
    assert (rows != before).all() and (rows.norm(p=0.5, dim=1) <= 2).all()


def test_rows_of_padding_that_are_not_there(grad_mode: str) -> None:
    """Restate test_embedding_bag_padding_idx_error."""
    for padding in range(-6, 6):
        if -4 <= padding < 4:
            bags = nn.EmbeddingBag(4, 3, padding_idx=padding, grad_mode=grad_mode).eval()
            assert not bags(torch.tensor([[padding % 4] * 2])).any()
            continue
        with pytest.raises(ValueError, match=rf"EmbeddingBag: padding_idx must be None or in \[-4, 4\), got {padding}"):
            nn.EmbeddingBag(4, 3, padding_idx=padding, grad_mode=grad_mode)


def reference_gradient(weight: Tensor, of: Callable[[Tensor], Tensor], cotangent: Tensor) -> Tensor:
    """Compute the gradient of a table in float64."""
    leaf = weight.detach().double().requires_grad_()
    of(leaf).backward(cotangent.double())
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def check_bags(bags: torch.nn.Module, ids: Tensor, offsets: Tensor | None, ends: Tensor) -> None:
    """Compare a lookup's result and gradient with the reference; ``ends``: the offsets and the number of ids."""
    dtype = bags.weight.dtype

    def reference(weight: Tensor) -> Tensor:
        return pooled(weight, ids.flatten(), ends, bags.mode, None, bags.padding_idx)

    want = reference(bags.weight.detach().double())
    cotangent = torch.rand(want.shape).to(dtype)
    results = []

    def run() -> Tensor:
        results.append(bags(ids, offsets))
        return results[0]

    grad = gradient(bags, run, cotangent)
    assert results[0].dtype == dtype
    close(results[0].detach(), want, dtype)
    close(grad, reference_gradient(bags.weight, reference, cotangent), dtype, factor=5)


def random_bags(random: torch.Generator, every: bool) -> tuple[Tensor, Tensor]:
    """Draw ten bags of up to ten ids below 100, one full and one empty, and their ends; all ids are 1 if ``every``."""
    lengths = torch.randint(1, 10, (10,), generator=random)
    lengths[torch.randperm(10, generator=random)[:2]] = torch.tensor([0, 10])
    ids = torch.randint(100, (int(lengths.sum()),), generator=random)
    return torch.ones_like(ids) if every else ids, torch.cat([torch.tensor([0]), lengths.cumsum(0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padding_in_bags(dtype: torch.dtype, grad_mode: str) -> None:
    """Restate test_embedding_bag_1D_padding_idx."""
    random = torch.Generator().manual_seed(0)
    for mode, last, every in itertools.product(POOLINGS, (False, True), (False, True)):
        ids, ends = random_bags(random, every)
        for padding in (int(ids[0]), int(ids[-1]), None):
            options = {"mode": mode, "padding_idx": padding, "include_last_offset": last, "dtype": dtype}
            bags = nn.EmbeddingBag(100, 3, grad_mode=grad_mode, **options)
            torch.nn.init.normal_(bags.weight)
            check_bags(bags, ids, ends if last else ends[:-1], ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_padding_in_bags_of_one_length(dtype: torch.dtype, grad_mode: str) -> None:
    """Restate test_embedding_bag_2D_padding_idx."""
    random = torch.Generator().manual_seed(1)
    for mode, every, count in itertools.product(POOLINGS, (False, True), (1, 10)):
        ids = torch.ones(count, 10, dtype=torch.int64) if every else torch.randint(10, (count, 10), generator=random)
        ids[-1] = ids[-1, 0]
        for padding in {int(ids[0, 0]), int(ids[-1, 0])}:
            bags = nn.EmbeddingBag(10, 3, mode=mode, padding_idx=padding, dtype=dtype, grad_mode=grad_mode)
            torch.nn.init.normal_(bags.weight)
            check_bags(bags, ids, None, torch.arange(0, 10 * count + 1, 10))


@in_pairs(dtype=FLOATS, ids_dtype=IDS, offsets_dtype=IDS, grad_mode=MODES)
def test_tables_that_are_not_contiguous(
    dtype: torch.dtype, ids_dtype: torch.dtype, offsets_dtype: torch.dtype, grad_mode: str
) -> None:
    """Restate test_embedding_bag_non_contiguous_weight."""
    rows = torch.randn(3, 4).to(dtype)[:, :3]
    arguments = torch.tensor([0, 1, 2], dtype=ids_dtype), torch.tensor([0, 2], dtype=offsets_dtype)
    for mode in POOLINGS:
        spread = nn.EmbeddingBag.from_pretrained(rows, mode=mode, grad_mode=grad_mode)
        dense = nn.EmbeddingBag.from_pretrained(rows.contiguous(), mode=mode, grad_mode=grad_mode)
        assert not spread.weight.is_contiguous() and torch.equal(spread(*arguments), dense(*arguments))


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("weights_trainable", [True, False])
def test_which_gradients_are_asked_for(weights_trainable: bool, trainable: bool, grad_mode: str) -> None:
    """Restate test_embedding_bag_per_sample_weights_grad."""
    bags = nn.EmbeddingBag(256, 256, mode="sum", grad_mode=grad_mode)
    optimizer = optim.SGD(bags.parameters(), lr=0.1, in_backward=True)
    bags.requires_grad_(trainable)
    weights = torch.rand(3, 4, requires_grad=weights_trainable)
    output = bags(torch.arange(1, 5).expand(3, -1), per_sample_weights=weights.softmax(-1))
    assert optimizer.in_backward and output.shape == (3, 256)
    if trainable or weights_trainable:
        before = bags.weight.detach().clone()
        output.sum().backward()
        optimizer.step()
        assert torch.equal(bags.weight, before) != trainable and (weights.grad is not None) == weights_trainable
