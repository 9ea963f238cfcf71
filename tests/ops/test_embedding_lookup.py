"""TensorFlow's lookups as public operators: edge cases, errors, and properties of inputs that change nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from calls import assert_same_bits
from devices import KERNELS
from pairs import in_pairs
from samples.sample import FLOATS
from torch import Tensor

from torchsparse_rec import ops

pytestmark = pytest.mark.usefixtures("kernels")

_ops = torch.ops.torchsparse_rec
TABLE = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [6.0, 8.0]])
IDS, ROWS = torch.tensor([0, 4, 2, 3]), torch.tensor([0, 0, 2, 2])


# ---- Shards ---------------------------------------------------------------------------------------------------------


def split(table: Tensor, shards: int, strategy: str) -> list[Tensor]:
    if strategy == "mod":
        return [table[shard::shards] for shard in range(shards)]
    return [part.clone() for part in table.tensor_split(shards)]


@in_pairs(strategy=["mod", "div"], shards=[1, 2, 3, 7, 40], kernels=KERNELS)
def test_shards_give_the_bits_of_one_table(strategy: str, shards: int) -> None:
    generator = torch.Generator().manual_seed(shards)
    table = torch.randn(31, 6, generator=generator)
    ids, rows = torch.randint(0, 31, (90,), generator=generator), torch.randint(0, 25, (90,), generator=generator)
    parts = [part.requires_grad_() for part in split(table, shards, strategy)]
    whole = table.clone().requires_grad_()
    for max_norm in (None, 1.5):
        arguments = {"num_rows": 25, "max_norm": max_norm, "default_id": 3}
        mine = ops.safe_embedding_lookup_sparse(parts, ids, rows, partition_strategy=strategy, **arguments)
        wanted = ops.safe_embedding_lookup_sparse(whole, ids, rows, **arguments)
        assert_same_bits(mine, wanted)
        grads = torch.autograd.grad(mine.square().sum(), parts)
        (grad,) = torch.autograd.grad(wanted.square().sum(), whole)
        for own, right in zip(grads, split(grad, shards, strategy), strict=True):
            assert_same_bits(own, right)


def test_ids_of_any_shape_and_rows_of_any_shape() -> None:
    table = torch.arange(24.0).reshape(4, 3, 2).requires_grad_()
    picked = ops.embedding_lookup([table[:2], table[2:]], torch.tensor([[3], [0]]), partition_strategy="div")
    assert torch.equal(picked, table[torch.tensor([[3], [0]])])
    numbers = torch.arange(4.0)
    assert ops.embedding_lookup(numbers, torch.tensor(2)).shape == ()
    pooled = ops.embedding_lookup_sparse(table, IDS[:2] // 2, ROWS[:2], num_rows=2, combiner="sum")
    assert torch.equal(pooled, torch.stack([table[0] + table[2], torch.zeros(3, 2)]))
    for rows in (table, numbers.requires_grad_()):
        for max_norm in (None, 2.0):
            out = [ops.embedding_lookup(rows, IDS[1:] - 1, max_norm=max_norm, sparse=kind) for kind in (False, True)]
            dense, sparse = (torch.autograd.grad(each.square().sum(), rows)[0] for each in out)
            assert sparse.is_sparse and torch.equal(sparse.to_dense(), dense)
    assert ops.embedding_lookup_sparse(numbers, IDS[:1], ROWS[:1], num_rows=3).tolist() == [0.0, 0.0, 0.0]


def test_sparse_gradients_of_shards_are_their_rows() -> None:
    parts = [torch.randn(3, 2, requires_grad=True) for _ in range(3)]
    ids = torch.tensor([8, 0, 0, 4])
    for grad in torch.autograd.grad(ops.embedding_lookup(parts, ids, sparse=True, max_norm=0.1).sum(), parts):
        assert grad.is_sparse and grad.is_coalesced()
    dense = torch.autograd.grad(ops.embedding_lookup(parts, ids, max_norm=0.1).sum(), parts)
    sparse = torch.autograd.grad(ops.embedding_lookup(parts, ids, sparse=True, max_norm=0.1).sum(), parts)
    for mine, wanted in zip(sparse, dense, strict=True):
        assert_same_bits(mine.to_dense(), wanted)
    assert sparse[0].indices().tolist() == [[0]]


# ---- The clip -------------------------------------------------------------------------------------------------------


def test_clip_at_its_edges() -> None:
    table = TABLE.clone().requires_grad_()
    clipped = ops.embedding_lookup(table, torch.tensor([0, 1, 2, 4]), max_norm=5.0)
    assert torch.equal(clipped, torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [3.0, 4.0]]))
    clipped.backward(torch.tensor([[3.0, 4.0], [1.0, 2.0], [1.0, 1.0], [4.0, -3.0]]))
    # At the norm itself the derivative is that of the clip: nothing is left along the row.
    wanted = torch.tensor([[0.0, 0.0], [1.0, 2.0], [1.0, 1.0], [0.0, 0.0], [2.0, -1.5]])
    torch.testing.assert_close(table.grad, wanted, rtol=0, atol=1e-6)


def test_clip_to_nothing() -> None:
    for max_norm in (0.0, -3.0):
        rows = ops.embedding_lookup(TABLE, torch.tensor([0, 1]), max_norm=max_norm)
        assert rows[0].tolist() == [0.0, 0.0] and rows[1].isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
def test_clip_of_rows_that_are_no_numbers(value: float) -> None:
    table = torch.tensor([[1.0, value], [2.0, 0.0]])
    rows = ops.embedding_lookup(table, torch.tensor([0, 1]), max_norm=1.0)
    # The norm of 1e30 overflows, like that of infinity.
    wanted = {torch.nan: [torch.nan, torch.nan], torch.inf: [0.0, torch.nan], 1e30: [0.0, 0.0]}
    key = value if value == value else torch.nan
    assert torch.equal(rows[0].nan_to_num(7.0), torch.tensor(wanted[key]).nan_to_num(7.0))
    assert rows[1].tolist() == [1.0, 0.0]


# ---- Bags -----------------------------------------------------------------------------------------------------------


def test_offsets_and_rows_say_the_same() -> None:
    offsets = torch.tensor([0, 2, 2, 4])
    for function in (ops.embedding_lookup_sparse, ops.safe_embedding_lookup_sparse):
        by_rows = function(TABLE, IDS, ROWS, num_rows=3, combiner="sqrtn")
        assert_same_bits(function(TABLE, IDS, offsets=offsets, combiner="sqrtn"), by_rows)
        assert_same_bits(function(TABLE, IDS.int(), ROWS.int(), num_rows=3, combiner="sqrtn"), by_rows)
        matrix = torch.stack([torch.full_like(ROWS, 99), ROWS, IDS], 1)
        assert_same_bits(function(TABLE, IDS, matrix[:, 1], num_rows=3, combiner="sqrtn"), by_rows)


def test_order_of_rows_does_not_matter_to_the_safe_form() -> None:
    generator = torch.Generator().manual_seed(0)
    ids, weights = torch.randint(-1, 5, (400,), generator=generator), torch.rand(400, generator=generator) - 0.2
    rows = torch.randint(0, 60, (400,), generator=generator)
    arguments = {"num_rows": 70, "default_id": 2}
    order = rows.sort(stable=True).indices
    sorted_ = ops.safe_embedding_lookup_sparse(TABLE, ids[order], rows[order], weights=weights[order], **arguments)
    assert_same_bits(ops.safe_embedding_lookup_sparse(TABLE, ids, rows, weights=weights, **arguments), sorted_)


def test_what_is_left_out_depends_on_the_combiner() -> None:
    ids, rows = torch.tensor([0, 2, -1, 4]), torch.tensor([0, 0, 1, 2])
    weights = torch.tensor([2.0, -1.0, 1.0, 0.0], requires_grad=True)
    arguments = {"num_rows": 4, "weights": weights, "default_id": 3}
    mean = ops.safe_embedding_lookup_sparse(TABLE, ids, rows, **arguments)
    assert mean.tolist() == [[3.0, 4.0], [0.0, 2.0], [0.0, 2.0], [0.0, 2.0]]
    total = ops.safe_embedding_lookup_sparse(TABLE, ids, rows, combiner="sum", **arguments)
    assert total.tolist() == [[5.0, 8.0], [0.0, 2.0], [0.0, 0.0], [0.0, 2.0]]
    (grad,) = torch.autograd.grad(total.sum(), weights)
    assert grad.tolist() == [7.0, 1.0, 0.0, 14.0]
    (grad,) = torch.autograd.grad(mean.sum(), weights)
    assert grad.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_nothing_at_all() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert ops.embedding_lookup(TABLE[:0], nothing).shape == (0, 2)
    assert ops.embedding_lookup([TABLE, TABLE[:0]], nothing.reshape(0, 3), max_norm=1.0).shape == (0, 3, 2)
    assert ops.embedding_lookup_sparse(TABLE, nothing, nothing, num_rows=0).shape == (0, 2)
    assert not ops.safe_embedding_lookup_sparse(TABLE[:0], nothing, nothing, num_rows=2).any()


def test_gradient_of_pruned_weights_must_be_asked_for() -> None:
    weights = torch.ones(4, requires_grad=True)
    kept, *_ = _ops.pruned_bags.default(IDS, ROWS, weights, 3, 5, True, None, False)
    with pytest.raises(RuntimeError, match="with_positions"):
        kept.sum().backward()


# ---- Errors ---------------------------------------------------------------------------------------------------------


def test_bad_ids_are_named() -> None:
    for bad in (-1, 5, 2**40):
        ids = IDS.clone()
        ids[2] = bad
        with pytest.raises(IndexError, match=rf"indices\[2\].*5.*{bad}"):
            ops.embedding_lookup_sparse(TABLE, ids, ROWS, num_rows=3)
        with pytest.raises(IndexError, match=rf"indices\[2\].*5.*{bad}"):
            ops.embedding_lookup(TABLE, ids, max_norm=1.0)
        with pytest.raises(IndexError, match=rf"ids\[2\].*{bad}"):
            ops.embedding_lookup([TABLE[:3], TABLE[3:]], ids, partition_strategy="div")
        if bad > 0:
            with pytest.raises(IndexError, match=rf"ids\[2\].*5.*{bad}"):
                ops.safe_embedding_lookup_sparse(TABLE, ids, ROWS, num_rows=3)


def test_an_id_whose_row_its_shard_lacks() -> None:
    with pytest.raises(IndexError, match=r"ids\[1\].*4"):
        ops.embedding_lookup([TABLE[:1], TABLE[:4]], torch.tensor([0, 4]), partition_strategy="mod")
    with pytest.raises(IndexError, match=r"ids\[0\].*4"):  # more shards than ids: the fifth has none
        ops.embedding_lookup([TABLE[:1], TABLE[:1], TABLE[:2], TABLE[:0], TABLE[:0]], torch.tensor([4]))


@in_pairs(position=[0, 1, 70_000, 74_999, 149_999], dtype=[torch.int64, torch.int32], kernels=KERNELS)
def test_bad_rows_are_named(position: int, dtype: torch.dtype) -> None:
    rows = (torch.arange(150_000) // 10).to(dtype)
    for bad in (-1, -70_000, 15_000):
        wrong = rows.clone()
        wrong[position] = bad
        with pytest.raises((IndexError, ValueError), match=rf"row_ids.*({bad}|sorted)"):
            _ops.row_ids_to_offsets.default(wrong, 15_000)
        with pytest.raises(IndexError, match=rf"row_ids\[{position}\] must be in \[0, 15000\), got {bad}"):
            _ops.pruned_bags.default(wrong, wrong, None, 15_000, 20_000, False, None, False)
    wrong = rows.clone()
    wrong[position] = 7 if position > 100 else 14_999
    with pytest.raises(ValueError, match="row_ids must be sorted, got"):
        _ops.row_ids_to_offsets.default(wrong, 15_000)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ops.embedding_lookup([], IDS), "params must hold at least one tensor"),
        (
            lambda: ops.embedding_lookup([TABLE, TABLE[:, :1]], IDS),
            r"rows of one shape, got shapes \[\[5, 2\], \[5, 1\]",
        ),
        (lambda: ops.embedding_lookup(torch.tensor(1.0), IDS), "rank >= 1"),
        (lambda: ops.embedding_lookup([TABLE, TABLE.double()], IDS), r"params\[1\].*dtype of params\[0\].*Double"),
        (lambda: ops.embedding_lookup([TABLE, TABLE], IDS, partition_strategy="rows"), "'mod' or 'div', got 'rows'"),
        (lambda: ops.embedding_lookup(TABLE, IDS, max_norm=torch.nan), "max_norm must be a number, got nan"),
        (lambda: ops.embedding_lookup([TABLE, TABLE], IDS.float()), "ids must be int32 or int64, got Float"),
        (lambda: ops.embedding_lookup_sparse(TABLE, IDS), "either offsets, or row_ids and num_rows"),
        (lambda: ops.embedding_lookup_sparse(TABLE, IDS, ROWS), "either offsets, or row_ids and num_rows"),
        (lambda: ops.embedding_lookup_sparse(TABLE, IDS, ROWS, offsets=ROWS), "must be None where offsets are given"),
        (lambda: ops.embedding_lookup_sparse(TABLE, IDS, ROWS, num_rows=-1), r"num_rows must be in .*, got -1"),
        (lambda: ops.embedding_lookup_sparse(TABLE, IDS, ROWS[:, None], num_rows=3), r"row_ids must have rank 1"),
        (lambda: ops.embedding_lookup_sparse(TABLE, IDS, ROWS.half(), num_rows=3), "row_ids must be int32 or int64"),
        (lambda: ops.embedding_lookup_sparse(TABLE, IDS, ROWS, num_rows=3, combiner="max"), "'sqrtn', got 'max'"),
        (lambda: ops.embedding_lookup_sparse(TABLE, IDS, ROWS[:3], num_rows=3), "number of indices, 4, got 3"),
        (
            lambda: ops.embedding_lookup_sparse(TABLE, IDS, ROWS, num_rows=3, weights=torch.ones(3)),
            "per_sample_weights must have the length of indices, 4, got 3",
        ),
        (lambda: ops.safe_embedding_lookup_sparse(TABLE, IDS, ROWS[:3], num_rows=3), "row_ids must have the length of"),
        (
            lambda: ops.safe_embedding_lookup_sparse(TABLE, IDS, ROWS, num_rows=3, weights=torch.ones(5)),
            "weights must have the length of ids, 4, got 5",
        ),
        (lambda: _ops.pruned_bags.default(IDS, ROWS, None, 3, 5, True, None, False), "prune_weights needs weights"),
        (
            lambda: _ops.pruned_bags.default(IDS.int(), ROWS, None, 3, 2**31, False, None, False),
            "ids must be int64 for",
        ),
        (lambda: _ops.pruned_bags.default(IDS, ROWS, None, 3, -1, False, None, False), "num_embeddings must be >= 0"),
        (lambda: _ops.shard_rows.default(IDS, [], 0, False), "at least one shard, got none"),
        (lambda: _ops.shard_rows.default(IDS, [3, -2], 0, False), r"shard_sizes\[1\] must be >= 0, got -2"),
        (lambda: _ops.shard_rows.default(IDS.int(), [2**31, 1], 0, False), "ids must be int64 for the sum"),
        (lambda: _ops.shard_rows.default(IDS, [5], 2, False), r"0 \(mod\) or 1 \(div\), got 2"),
        (
            lambda: _ops.embedding_bag_shards.default([TABLE], IDS, None, None, 1, -1, -1.0, False),
            "without offsets, mode must be sum",
        ),
        (
            lambda: _ops.embedding_bag_shards.default([TABLE], IDS, torch.tensor([0, 4]), None, 3, -1, -1.0, False),
            r"reduction must be in \[0, 2\], got 3",
        ),
        (
            lambda: _ops.embedding_bag_shards.default([TABLE], IDS, None, None, 0, 6, -1.0, False),
            "padding_idx must be <= 5, got 6",
        ),
        (lambda: _ops.clip_rows_backward.default(TABLE, [TABLE], None, -1.0), "max_norm must be >= 0, got -1"),
        (lambda: _ops.clip_rows_backward.default(TABLE[:3], [TABLE], None, 1.0), "grad must have 5 rows, got 3"),
        (lambda: _ops.clip_rows_backward.default(TABLE.half(), [TABLE.half()], None, 1.0), "grad must be Float"),
        (lambda: _ops.clip_rows_backward.default(TABLE, [TABLE], ROWS.int(), 1.0), "rows must be int64, got Int"),
    ],
)
def test_checks(call: Callable, text: str) -> None:
    # Some calls are refused before an operator is called; the last line calls one, as the fixture requires.
    with pytest.raises(ValueError, match=text):
        call()
    _ops.row_ids_to_offsets.default(ROWS, 3)


def test_bad_positions_in_bounds_checks() -> None:
    with pytest.raises(IndexError, match=r"default_id must be in \[0, 5\), got 5"):
        ops.safe_embedding_lookup_sparse(TABLE, IDS, ROWS, num_rows=3, default_id=5)
    with pytest.raises(IndexError, match=r"rows\[1\] must be in \[0, 5\), got 5"):
        _ops.clip_rows_backward.default(TABLE[:2], [TABLE], torch.tensor([0, 5]), 1.0)


@in_pairs(shape=[(5, 0), (5, 0, 2), (0, 0)], sparse=[False, True], kernels=KERNELS)
def test_tables_without_columns_have_gradients(shape: tuple[int, ...], sparse: bool) -> None:
    table = torch.zeros(shape, requires_grad=True)
    ids = torch.tensor([0, 3, 3][: 3 * bool(shape[0])], dtype=torch.int64)
    lookups = [
        ops.embedding_lookup_sparse(table, ids, torch.zeros_like(ids), num_rows=2, sparse=sparse),
        ops.safe_embedding_lookup_sparse(table, ids, torch.zeros_like(ids), num_rows=2, sparse=sparse),
    ]
    if len(shape) == 2:
        lookups += [ops.embedding(table, x, sparse=sparse) for x in (ids, ids.unsqueeze(0), ids[:1].reshape(-1, 1, 1))]
    for rows in lookups:
        (grad,) = torch.autograd.grad(rows.sum(), table)
        assert grad.shape == shape and grad.is_sparse == sparse


# ---- Weights of other dtypes, and NaN among them --------------------------------------------------------------------

WEIGHTS = torch.tensor([0.3, 2.0, 1e-3, 0.5])


@in_pairs(dtype=FLOATS, combiner=["sum", "mean", "sqrtn"], safe=[False, True])
def test_weights_of_another_dtype(dtype: torch.dtype, combiner: str, safe: bool) -> None:
    """Compute half tables in float32, so that weights lose nothing; for other tables cast the weights."""
    call: Callable[..., Tensor] = ops.safe_embedding_lookup_sparse if safe else ops.embedding_lookup_sparse
    for other in (torch.float32, torch.float64, torch.float16):
        table, weights = TABLE.clone().to(dtype).requires_grad_(), WEIGHTS.clone().to(other).requires_grad_()
        arguments: dict = {"num_rows": 4, "combiner": combiner, "max_norm": 5.0}
        made = call(table, IDS, ROWS, weights=weights, **arguments)
        half = dtype in (torch.float16, torch.bfloat16) and other != dtype
        wide = table.detach().float() if half else table.detach()
        plain = call(wide, IDS, ROWS, weights=weights.detach().to(wide.dtype), **arguments)
        assert made.dtype == dtype and torch.equal(made, plain.to(dtype))
        made.sum().backward()
        assert table.grad is not None and weights.grad is not None and weights.grad.dtype == other


@pytest.mark.parametrize("shards", [1, 2])
def test_half_tables_keep_sparse_gradients_with_other_weights(shards: int) -> None:
    parts = [part.half().requires_grad_() for part in split(TABLE, shards, "mod")]
    ids = torch.tensor([0, -1, 2, 2])
    made = ops.safe_embedding_lookup_sparse(parts, ids, ROWS, num_rows=3, weights=WEIGHTS, combiner="sum", sparse=True)
    gradients = torch.autograd.grad(made.sum(), parts)
    rows = [gradient.indices().flatten().tolist() for gradient in gradients]
    assert rows == ([[0, 2]] if shards == 1 else [[0, 1], []])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_nan_weights_by_a_switch(combiner: str) -> None:
    weights = torch.tensor([torch.nan, 2.0, 3.0, 0.0], requires_grad=True)
    table = TABLE.clone().requires_grad_()
    with pytest.raises(ValueError, match="nan"):
        ops.embedding_lookup_sparse(TABLE, IDS, ROWS, num_rows=4, weights=weights, combiner=combiner)
    made = ops.embedding_lookup_sparse(
        table, IDS, ROWS, num_rows=4, weights=weights, combiner=combiner, nan_weights=True
    )
    assert made[0].isnan().all()
    plain = ops.embedding_lookup_sparse(TABLE, IDS[2:], ROWS[2:], num_rows=4, weights=weights[2:], combiner=combiner)
    torch.testing.assert_close(made[1:], plain[1:])
    made[2].sum().backward()
    assert table.grad is not None and table.grad[3].tolist() == [0.0, 0.0]


def test_safe_lookups_leave_nan_weights_out_unless_they_add_up() -> None:
    weights = torch.tensor([torch.nan, 2.0, 3.0, 0.0])
    arguments = {"num_rows": 4, "weights": weights, "nan_weights": True}
    assert not ops.safe_embedding_lookup_sparse(TABLE, IDS, ROWS, **arguments).isnan().any()
    summed = ops.safe_embedding_lookup_sparse(TABLE, IDS, ROWS, combiner="sum", **arguments)
    assert summed[0].isnan().all() and not summed[1:].isnan().any()
