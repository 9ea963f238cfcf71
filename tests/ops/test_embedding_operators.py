"""The sentences of csrc/embedding.h that no sample shows; its checks are in test_embedding_errors.py."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from devices import cpu_only
from torch import Tensor
from torch.nn import functional

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import EXTREMES, MAX, POOLING

pytestmark = pytest.mark.usefixtures("kernels")

TABLE = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
INDICES, OFFSETS = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, 2, 4])
MODES = tuple(POOLING)


def gradient(result: Tensor, wanted: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(result, inputs, wanted.to(result.dtype))


# ---- Sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_accumulate_in_float32(dtype: torch.dtype) -> None:
    large = 2048.0 if dtype == torch.float16 else 256.0
    table = torch.tensor([[large], [1.0]], dtype=dtype)
    indices, offsets = torch.tensor([0] + [1] * 8), torch.tensor([0, 9])
    assert ops.embedding_bag(table, indices, offsets).tolist() == [[large + 8]]
    backward = torch.ops.torchsparse_rec.embedding_dense_backward.default
    same_row = torch.zeros(9, dtype=torch.int64)
    assert backward(table[indices], same_row, None, None, None, 1, 0, -1, False).tolist() == [[large + 8]]


def test_entries_are_added_in_order() -> None:
    """Add in float32, where 1e8 + 1 is 1e8: only the given order makes ((1e8 + 1) - 1e8) + 1 equal to 1."""
    table = torch.tensor([[1e8], [1.0], [-1e8]])
    order, same_row = torch.tensor([0, 1, 2, 1]), torch.zeros(4, dtype=torch.int64)
    assert ops.embedding_bag(table, order, torch.tensor([0, 4])).item() == 1.0
    for offsets in (None, torch.arange(5)):
        arguments = (table[order], same_row, offsets, None, None, 1, 0, -1, False)
        assert torch.ops.torchsparse_rec.embedding_dense_backward.default(*arguments).item() == 1.0
        assert torch.ops.torchsparse_rec.embedding_sparse_backward.default(*arguments)[0].item() == 1.0


# ---- Extremes -------------------------------------------------------------------------------------------------------


def test_nan_wins_over_everything() -> None:
    table = torch.tensor([[torch.nan], [torch.inf], [-torch.inf]])
    for (order, winner), mode in itertools.product(
        (([1, 0, 2], 1), ([0, 1, 2], 0), ([2, 0, 0], 1), ([1, 1, 2], 0)), EXTREMES
    ):
        signed = table if mode == MAX else -table
        bag = (signed, torch.tensor(order), torch.tensor([0, 3]), None, mode, -1, False, False)
        result, argmax = torch.ops.torchsparse_rec.embedding_bag.default(*bag)
        assert result.isnan().item() == (0 in order)
        assert argmax.item() == winner


def test_least_numbers_of_bags() -> None:
    table = torch.tensor([[3.0, -1.0], [2.0, 5.0], [4.0, -1.0]], requires_grad=True)
    pooled = ops.embedding_bag(table, torch.tensor([2, 0, 1]), torch.tensor([0, 2, 2, 3]), mode="min")
    assert pooled.tolist() == [[3.0, -1.0], [0.0, 0.0], [2.0, 5.0]]
    assert not pooled.signbit()[1].any()
    assert gradient(pooled, torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), table)[0].tolist() == [
        [1.0, 0.0],
        [5.0, 6.0],
        [0.0, 2.0],  # the first of equals
    ]


def test_argmax_that_is_no_position_wins_nothing() -> None:
    argmax = torch.tensor([[10**12, -5], [4, -1], [2, 3]])
    arguments = (torch.ones(3, 2), INDICES, OFFSETS, None, argmax, 3, 3, -1, False)
    dense = torch.ops.torchsparse_rec.embedding_dense_backward.default(*arguments)
    assert dense.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


# ---- padding_idx, scale_grad_by_freq, sparse ------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
def test_padding_receives_no_gradient(sparse: bool) -> None:
    table = TABLE.clone().requires_grad_()
    indices, offsets = torch.tensor([0, 1, 1, 2, 1]), torch.tensor([0, 2, 4, 5])
    for result in (
        ops.embedding(table, indices, padding_idx=1, sparse=sparse),
        ops.embedding_bag(table, indices, offsets, padding_idx=1, sparse=sparse),
    ):
        (grad,) = gradient(result, torch.ones_like(result), table)
        if sparse:
            assert grad.indices().tolist() == [[0, 2]]
        assert grad.to_dense().tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", ["per_id", *MODES])
def test_sparse_gradient(mode: str, index: torch.dtype) -> None:
    """Return unique, sorted rows of exactly the ids, marked coalesced, with the dense gradient's bits."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 1000, (300,), generator=generator).to(index)
    offsets = torch.arange(0, 301, 3)
    grads = []
    for sparse in (True, False):
        table = torch.randn(1000, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if mode == "per_id":
            result = ops.embedding(table, indices, sparse=sparse)
        else:
            result = ops.embedding_bag(table, indices, offsets, mode=mode, sparse=sparse)
        result.square().sum().backward()
        grads.append(table.grad)
    assert grads[0].layout == torch.sparse_coo and grads[1].layout == torch.strided
    rows = grads[0]._indices()
    assert rows.dtype == torch.int64 and torch.equal(rows[0], indices.long().unique())
    assert torch.equal(grads[0].to_dense(), grads[1])
    table = torch.zeros(1000, 5, requires_grad=True)
    (direct,) = gradient(ops.embedding(table, indices, sparse=True), torch.ones(300, 5), table)
    assert direct.is_coalesced()


# ---- Sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
def test_gradient_of_nothing(sparse: bool) -> None:
    table = TABLE.clone().requires_grad_()
    nothing = torch.empty(0, dtype=torch.int64)
    for result in (
        ops.embedding(table, nothing, sparse=sparse),
        ops.embedding_bag(table, nothing, torch.zeros(3, dtype=torch.int64), sparse=sparse),
    ):
        (grad,) = gradient(result, torch.ones_like(result), table)
        assert torch.equal(grad.to_dense(), torch.zeros_like(TABLE))


_PEAK = """
import resource, torch
import torchsparse_rec
backward = getattr(torch.ops.torchsparse_rec, "{name}").default
entries, dim, rows, bag = 1_000_000, 128, 1_000, 200
indices, offsets = torch.randint(0, rows, (entries,)), torch.arange(0, entries + 1, bag)
grad = torch.randn(entries // bag, dim)
few = (grad[:2].clone(), indices[: 2 * bag], offsets[:3])
backward(*few, None, None, rows, 1, -1, False)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
backward(grad, indices, offsets, None, None, rows, 1, -1, False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@cpu_only
@pytest.mark.parametrize("name", ["embedding_dense_backward", "embedding_sparse_backward"])
def test_backward_has_no_temporary_of_all_entries(name: str) -> None:
    """Use memory that grows with N alone: [N, D] would be 512 MB here."""
    done = subprocess.run([sys.executable, "-c", _PEAK.format(name=name)], capture_output=True, text=True, check=True)
    assert int(done.stdout) / 1024 < 64


# ---- Against torch and TensorFlow -----------------------------------------------------------------------------------


@pytest.mark.parametrize("frequency", [False, True])
@pytest.mark.parametrize("padding", [None, 4])
def test_equals_torch_embedding(padding: int | None, frequency: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(20, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(0, 20, (5, 9), generator=generator)
    flags = {"padding_idx": padding, "scale_grad_by_freq": frequency}
    results = ops.embedding(table, indices, **flags), functional.embedding(indices, table, **flags)
    grads = [gradient(result, results[1].detach() + 1, table)[0] for result in results]
    assert torch.equal(*results)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)])
def test_equals_torch_embedding_bag(mode: str, weighted: bool, padding: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(20, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(0, 20, (40,), generator=generator)
    offsets = torch.tensor([0, 0, 7, 8, 30, 40])
    weights = torch.randn(40, generator=generator, dtype=torch.float64, requires_grad=True) if weighted else None
    inputs = [table] + ([weights] if weighted else [])
    flags = {"per_sample_weights": weights, "mode": mode, "padding_idx": padding}
    ours = ops.embedding_bag(table, indices, offsets, **flags)
    theirs = functional.embedding_bag(indices, table, offsets, include_last_offset=True, **flags)
    torch.testing.assert_close(ours, theirs)
    for pair in zip(gradient(ours, theirs + 1, *inputs), gradient(theirs, theirs + 1, *inputs), strict=True):
        torch.testing.assert_close(*pair)
