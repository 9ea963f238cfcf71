"""The sentences of csrc/embedding.h, one test each; its checks are in test_embedding_errors.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from devices import cpu_only
from torch import Tensor
from torch.nn import functional

from torchsparse_rec import ops

pytestmark = pytest.mark.usefixtures("kernels")

TABLE = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64)
INDICES, OFFSETS = torch.tensor([0, 2, 1, 1]), torch.tensor([0, 2, 2, 4])
WEIGHTS = torch.tensor([1.0, 3.0, 2.0, -2.0], dtype=torch.float64)
MODES = ("sum", "mean", "sqrtn", "max")


def gradient(result: Tensor, wanted: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(result, inputs, wanted.to(result.dtype))


# ---- Values by hand -------------------------------------------------------------------------------------------------


def test_embedding_picks_rows_of_ids_of_any_rank() -> None:
    assert ops.embedding(TABLE, torch.tensor(1)).tolist() == [3.0, 4.0]
    assert ops.embedding(TABLE, torch.tensor([[2], [0]])).tolist() == [[[5.0, 6.0]], [[1.0, 2.0]]]
    assert ops.embedding(TABLE, torch.empty(2, 0, dtype=torch.int32)).shape == (2, 0, 2)


@pytest.mark.parametrize(
    ("mode", "plain", "weighted"),
    [
        ("sum", [[6.0, 8.0], [0.0, 0.0], [6.0, 8.0]], [[16.0, 20.0], [0.0, 0.0], [0.0, 0.0]]),
        ("mean", [[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]], [[4.0, 5.0], [0.0, 0.0], [0.0, 0.0]]),
        (
            "sqrtn",
            [[6 / 2**0.5, 8 / 2**0.5], [0.0, 0.0], [6 / 2**0.5, 8 / 2**0.5]],
            [[16 / 10**0.5, 20 / 10**0.5], [0.0, 0.0], [0.0, 0.0]],
        ),
        ("max", [[5.0, 6.0], [0.0, 0.0], [3.0, 4.0]], None),
    ],
)
def test_bags_by_hand(mode: str, plain: list, weighted: list | None) -> None:
    torch.testing.assert_close(ops.embedding_bag(TABLE, INDICES, OFFSETS, mode=mode), torch.tensor(plain).double())
    if weighted is not None:
        result = ops.embedding_bag(TABLE, INDICES, OFFSETS, per_sample_weights=WEIGHTS, mode=mode)
        torch.testing.assert_close(result, torch.tensor(weighted, dtype=torch.float64))


def test_gradients_by_hand() -> None:
    """Compute by hand: row 1 stands twice in the last bag, where its weights give mode mean a zero denominator."""
    table, weights = TABLE.clone().requires_grad_(), WEIGHTS.clone().requires_grad_()
    grad = torch.tensor([[1.0, 10.0], [100.0, 100.0], [2.0, 20.0]], dtype=torch.float64)
    table_grad, weights_grad = gradient(
        ops.embedding_bag(table, INDICES, OFFSETS, per_sample_weights=weights), grad, table, weights
    )
    assert table_grad.tolist() == [[1.0, 10.0], [0.0, 0.0], [3.0, 30.0]]
    assert weights_grad.tolist() == [21.0, 65.0, 86.0, 86.0]
    table_grad, weights_grad = gradient(
        ops.embedding_bag(table, INDICES, OFFSETS, per_sample_weights=weights, mode="mean"), grad, table, weights
    )
    assert table_grad.tolist() == [[0.25, 2.5], [0.0, 0.0], [0.75, 7.5]]
    # <grad, x - pooled> / sum w with pooled [4, 5]: (1*-3 + 10*-3) / 4 and (1*1 + 10*1) / 4; nothing for the last bag.
    assert weights_grad.tolist() == [-8.25, 2.75, 0.0, 0.0]


@pytest.mark.parametrize("mode", ["mean", "sqrtn"])
def test_zero_denominators_give_zeros(mode: str) -> None:
    table, weights = TABLE.clone().requires_grad_(), torch.zeros(4, dtype=torch.float64, requires_grad=True)
    result = ops.embedding_bag(table, INDICES, OFFSETS, per_sample_weights=weights, mode=mode)
    assert torch.equal(result, torch.zeros(3, 2, dtype=torch.float64))
    for grad in gradient(result, torch.ones(3, 2), table, weights):
        assert torch.equal(grad, torch.zeros_like(grad))


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


# ---- Mode max -------------------------------------------------------------------------------------------------------


def _argmax(table: Tensor, indices: Tensor, offsets: Tensor, padding_idx: int = -1) -> Tensor:
    arguments = (table, indices, offsets, None, 3, padding_idx, False, False)
    return torch.ops.torchsparse_rec.embedding_bag.default(*arguments)[1]


def test_max_keeps_the_first_of_equal_values() -> None:
    table = torch.tensor([[1.0, 2.0], [1.0, 5.0], [0.0, 5.0]])
    indices = torch.tensor([2, 1, 0, 1])
    assert _argmax(table, indices, torch.tensor([0, 4])).tolist() == [[1, 0]]
    assert _argmax(table, indices, torch.tensor([0, 0, 4, 4])).tolist() == [[-1, -1], [1, 0], [-1, -1]]
    assert _argmax(table, indices, torch.tensor([0, 4]), padding_idx=1).tolist() == [[2, 0]]


def test_nan_wins_over_everything() -> None:
    table = torch.tensor([[torch.nan], [torch.inf], [-torch.inf]])
    for order, winner in (([1, 0, 2], 1), ([0, 1, 2], 0), ([2, 0, 0], 1), ([1, 1, 2], 0)):
        indices, offsets = torch.tensor(order), torch.tensor([0, 3])
        result = ops.embedding_bag(table, indices, offsets, mode="max")
        assert result.isnan().item() == (0 in order)
        assert _argmax(table, indices, offsets).item() == winner


def test_max_of_minus_infinity_is_minus_infinity() -> None:
    table = torch.full((2, 1), -torch.inf)
    result = ops.embedding_bag(table, torch.tensor([1, 0]), torch.tensor([0, 2, 2]), mode="max")
    assert result.tolist() == [[-torch.inf], [0.0]]
    assert _argmax(table, torch.tensor([1, 0]), torch.tensor([0, 2, 2])).tolist() == [[0], [-1]]


def test_max_gradient_goes_to_the_winner() -> None:
    table = TABLE.clone().requires_grad_()
    result = ops.embedding_bag(table, torch.tensor([0, 2, 1, 1]), OFFSETS, mode="max")
    (grad,) = gradient(result, torch.tensor([[1.0, 2.0], [9.0, 9.0], [3.0, 4.0]]), table)
    assert grad.tolist() == [[0.0, 0.0], [3.0, 4.0], [1.0, 2.0]]


def test_argmax_is_empty_in_other_modes() -> None:
    for mode in range(3):
        arguments = (TABLE, INDICES, OFFSETS, None, mode, -1, False, False)
        argmax = torch.ops.torchsparse_rec.embedding_bag.default(*arguments)[1]
        assert argmax.shape == (0,) and argmax.dtype == torch.int64


def test_argmax_that_is_no_position_wins_nothing() -> None:
    argmax = torch.tensor([[10**12, -5], [4, -1], [2, 3]])
    arguments = (torch.ones(3, 2), INDICES, OFFSETS, None, argmax, 3, 3, -1, False)
    dense = torch.ops.torchsparse_rec.embedding_dense_backward.default(*arguments)
    assert dense.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


# ---- padding_idx, scale_grad_by_freq, sparse ------------------------------------------------------------------------


def test_padding_is_left_out_of_the_bags() -> None:
    indices, offsets = torch.tensor([0, 1, 1, 2, 1]), torch.tensor([0, 2, 4, 5])
    for mode in MODES:
        result = ops.embedding_bag(TABLE, indices, offsets, mode=mode, padding_idx=1)
        assert result.tolist() == [[1.0, 2.0], [5.0, 6.0], [0.0, 0.0]]


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


def test_padding_is_looked_up_all_the_same() -> None:
    assert ops.embedding(TABLE, torch.tensor([1]), padding_idx=1).tolist() == [[3.0, 4.0]]


def test_scale_grad_by_freq_divides_by_the_number_of_entries() -> None:
    table = TABLE.clone().requires_grad_()
    result = ops.embedding(table, torch.tensor([0, 2, 2, 2, 2]), scale_grad_by_freq=True)
    (grad,) = gradient(result, torch.arange(10.0).reshape(5, 2), table)
    assert grad.tolist() == [[0.0, 1.0], [0.0, 0.0], [5.0, 6.0]]


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


def test_rows_of_the_sparse_backward_are_int64_and_only_those_with_entries() -> None:
    for index in (torch.int32, torch.int64):
        indices = torch.tensor([7, 3, 7, 5], dtype=index)
        values, rows = torch.ops.torchsparse_rec.embedding_sparse_backward.default(
            torch.ones(4, 2), indices, None, None, None, 9, 0, 5, False
        )
        assert rows.dtype == torch.int64 and rows.tolist() == [3, 7]
        assert values.tolist() == [[1.0, 1.0], [2.0, 2.0]]


# ---- Sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offset", [torch.int32, torch.int64])
def test_offsets_hold_every_bag(mode: str, offset: torch.dtype) -> None:
    offsets = torch.tensor([0, 0, 4, 4, 4], dtype=offset)
    result = ops.embedding_bag(TABLE, INDICES, offsets, mode=mode)
    assert result.shape == (4, 2) and (result[[0, 2, 3]] == 0).all() and (result[1] != 0).all()
    nothing = torch.empty(0, dtype=torch.int64)
    assert ops.embedding_bag(TABLE, nothing, torch.zeros(1, dtype=offset), mode=mode).shape == (0, 2)
    empty = ops.embedding_bag(TABLE[:0], nothing, torch.zeros(4, dtype=offset), mode=mode)
    assert torch.equal(empty, torch.zeros(3, 2, dtype=torch.float64))


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
