"""Bad values in the CUDA kernels, run without a GPU: skipped, recorded, reported by the next call."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from samples.sample import Random, map_tensors
from torch import Tensor

import torchsparse_rec  # noqa: F401  (its operators)
from emulation import fixture
from torchsparse_rec.compat._parity.reference import MAX, MEAN, SUM

ORDERS = ("ascending", "descending", "random")


def _raises_now(kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        fixture.check_errors()
    assert str(caught.value) == text
    fixture.check_errors()  # an error is reported once


TABLE = torch.arange(1.0, 13.0).reshape(4, 3)
NONE = torch.empty(0, dtype=torch.int64)
BAGS = torch.tensor([0, 2, 5])
IDS, ROWS = torch.tensor([1, -1, 4, 0]), torch.tensor([0, 0, 1, 2])
NO_KEYS, NO_ENTRIES = torch.zeros(2, 16, dtype=torch.int32), torch.full((4, 2), -1)


def _insertion(free_rows: list[int], *, entries: Tensor = NO_ENTRIES, used: int = 4, reused: int = 0) -> tuple:
    """Return an insertion into a table without keys, all of whose four rows were given out once."""
    counters = torch.tensor([used, reused] + [0] * 6)
    rows = torch.tensor(free_rows, dtype=torch.int32)
    return ("table_find_or_insert_", NO_KEYS, entries, counters, rows, IDS, None, None, -1, False)


FAULTS: dict[str, tuple[tuple, type[Exception], str]] = {
    "initialized_row": (
        ("table_initialize_", TABLE, torch.tensor([3, -1, 4]), torch.arange(3), None, 0, [1.0], 0),
        IndexError,
        "table_initialize_: rows[2] must be below 4, got 4",
    ),
    "assigned_row": (
        ("table_assign_", TABLE, torch.tensor([3, 7, -1, 4]), TABLE),
        IndexError,
        "table_assign_: rows[1] must be below 4, got 7",
    ),
    "used_rows": (
        _insertion([], used=5),
        ValueError,
        "table_find_or_insert_: counters[0] must be in [0, 4], got 5",
    ),
    "reused_rows": (
        _insertion([], used=0, reused=-1),
        ValueError,
        "table_find_or_insert_: counters[1] must be in [0, 0], got -1",
    ),
    "free_row_too_large": (
        _insertion([1, 4, 2]),
        ValueError,
        "table_find_or_insert_: free_rows[1] must be in [0, 4), without a key and more than the one before it, got 4",
    ),
    "free_row_negative": (
        _insertion([-1]),
        ValueError,
        "table_find_or_insert_: free_rows[0] must be in [0, 4), without a key and more than the one before it, got -1",
    ),
    "free_row_with_a_key": (
        _insertion([0, 1], entries=torch.tensor([[-1, -1], [9, 0], [-1, -1], [-1, -1]])),
        ValueError,
        "table_find_or_insert_: free_rows[1] must be in [0, 4), without a key and more than the one before it, got 1",
    ),
    "free_row_repeated": (
        _insertion([1, 1]),
        ValueError,
        "table_find_or_insert_: free_rows[1] must be in [0, 4), without a key and more than the one before it, got 1",
    ),
    "shards_index": (
        ("embedding_bag_shards", [TABLE, TABLE], torch.tensor([7, 8, -1]), None, None, SUM, -1, 1.0, False),
        IndexError,
        "embedding_bag_shards: indices[1] must be in [0, 8), got 8",
    ),
    "shard_rows_id_too_large": (
        ("shard_rows", torch.tensor([0, 6, 7, -1]), [3, 3], 0, True),
        IndexError,
        "shard_rows: ids[2] must name a row that its shard has, got 7",
    ),
    "pruned_id_too_large": (
        ("pruned_bags", IDS, ROWS, None, 3, 4, False, None, True),
        IndexError,
        "pruned_bags: ids[2] must be in [0, 4), got 4",
    ),
    "pruned_row": (
        ("pruned_bags", IDS, ROWS, None, 2, 5, False, 0, True),
        IndexError,
        "pruned_bags: row_ids[3] must be in [0, 2), got 2",
    ),
    "clip_row": (
        ("clip_rows_backward", TABLE[:2], [TABLE[:1], TABLE[1:]], torch.tensor([3, 4]), 1.0),
        IndexError,
        "clip_rows_backward: rows[1] must be in [0, 4), got 4",
    ),
    "embedding_index": (
        ("embedding", TABLE, torch.tensor([0, 4, -1]), -1, False, False),
        IndexError,
        "embedding: indices[1] must be in [0, 4), got 4",
    ),
    "embedding_indices": (
        ("embedding", TABLE, torch.full((8,), 4), -1, False, False),
        IndexError,
        "embedding: indices[0] must be in [0, 4), got 4",
    ),
    "bag_index": (
        ("embedding_bag", TABLE, torch.tensor([0, 1, 2, -7, 9]), BAGS, None, SUM, -1, False, False),
        IndexError,
        "embedding_bag: indices[3] must be in [0, 4), got -7",
    ),
    "max_index": (
        ("embedding_bag", TABLE, torch.tensor([0, 1, 2, 3, 9]), BAGS, None, 3, -1, False, False),
        IndexError,
        "embedding_bag: indices[4] must be in [0, 4), got 9",
    ),
    "offsets_not_from_0": (
        ("embedding_bag", TABLE, torch.tensor([0, 1]), torch.tensor([1, 2]), None, SUM, -1, False, False),
        ValueError,
        "embedding_bag: offsets[0] must be 0, got 1",
    ),
    "offsets_decrease": (
        ("embedding_bag", TABLE, torch.tensor([0, 1]), torch.tensor([0, 9, 1, 2]), None, SUM, -1, False, False),
        ValueError,
        "embedding_bag: offsets must not decrease, got 9 followed by 1 at position 2",
    ),
    "offsets_end_early": (
        ("embedding_bag", TABLE, torch.tensor([0, 1]), torch.tensor([0, 1]), None, SUM, -1, False, False),
        ValueError,
        "embedding_bag: offsets[1], the last, must be the number of indices, 2, got 1",
    ),
    "nan_weight": (
        ("embedding_bag", TABLE, torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([1.0, torch.nan]), SUM, -1)
        + (False, False),
        ValueError,
        "embedding_bag: per_sample_weights[1] must be a number, got nan",
    ),
    "nan_weight_of_padding": (
        ("embedding_bag", TABLE, torch.tensor([0, 1]), torch.tensor([0, 2]), torch.tensor([1.0, torch.nan]), MEAN, 1)
        + (False, False),
        ValueError,
        "embedding_bag: per_sample_weights[1] must be a number, got nan",
    ),
    "backward_index": (
        ("embedding_dense_backward", TABLE, torch.tensor([0, 1, 5, 2]), None, None, None, 4, SUM, -1, False),
        IndexError,
        "embedding_backward: indices[2] must be in [0, 4), got 5",
    ),
    "sparse_backward_index": (
        ("embedding_sparse_backward", TABLE, torch.tensor([0, -1, 5, 2]), None, None, None, 4, SUM, -1, False),
        IndexError,
        "embedding_backward: indices[1] must be in [0, 4), got -1",
    ),
    "weights_backward_index": (
        ("embedding_weights_backward", TABLE[:1], TABLE, torch.tensor([0, 8]), torch.tensor([0, 2]), torch.ones(2))
        + (TABLE[:1], MEAN, -1),
        IndexError,
        "embedding_weights_backward: indices[1] must be in [0, 4), got 8",
    ),
    "segment_index": (
        ("sparse_segment_reduce", TABLE, torch.tensor([4, 1]), torch.tensor([0, 1]), None, SUM),
        IndexError,
        "sparse_segment_reduce: indices[0] must be in [0, 4), got 4",
    ),
    "segment_negative": (
        ("sparse_segment_reduce", TABLE, torch.tensor([0, 1]), torch.tensor([-2, 1]), 2, SUM),
        ValueError,
        "sparse_segment_reduce: segment_ids[0] must be >= 0, got -2",
    ),
    "segment_unsorted": (
        ("sparse_segment_reduce", TABLE, torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0]), 2, SUM),
        ValueError,
        "sparse_segment_reduce: segment_ids must be sorted, got 1 followed by 0 at position 2",
    ),
    "segment_unsorted_without_num_segments": (
        ("sparse_segment_reduce", TABLE, torch.tensor([0, 1, 2]), torch.tensor([5, 1, 2]), None, SUM),
        ValueError,
        "sparse_segment_reduce: segment_ids must be sorted, got 5 followed by 1 at position 1",
    ),
    "segment_too_large": (
        ("sparse_segment_reduce", TABLE, torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]), 2, SUM),
        ValueError,
        "sparse_segment_reduce: segment_ids[1] must be below num_segments = 2, got 2",
    ),
    "segment_gradient_index": (
        ("sparse_segment_reduce_grad", TABLE, torch.tensor([0, 6]), torch.tensor([0, 1]), 6, MEAN),
        IndexError,
        "sparse_segment_reduce_grad: indices[1] must be in [0, 6), got 6",
    ),
    "segment_gradient_segment": (
        ("sparse_segment_reduce_grad_v2", TABLE, torch.tensor([0, 1, 2]), torch.tensor([0, 4, -1]), 6, MEAN),
        IndexError,
        "sparse_segment_reduce_grad: segment_ids[1] must be in [0, 4), got 4",
    ),
    "string_offsets_decrease": (
        ("string_to_hash_bucket_fast", torch.zeros(4, dtype=torch.uint8), torch.tensor([0, 3, 2]), 10),
        ValueError,
        "string_to_hash_bucket_fast: offsets must not decrease, got 2 at position 2 after 3",
    ),
    "string_offsets_of_nothing": (
        ("string_to_hash_bucket_fast", torch.zeros(4, dtype=torch.uint8), torch.tensor([5]), 10),
        ValueError,
        "string_to_hash_bucket_fast: offsets must be in [0, 4], the number of bytes, got 5 at position 0",
    ),
    "column_offsets_decrease": (
        ("cross_hashed", [torch.arange(5), torch.arange(4).reshape(4, 1)], [torch.tensor([0, 2, 1, 5, 5]), NONE], 9, 0),
        ValueError,
        "cross_hashed: offsets[0] must not decrease or leave [0, the number of values], got 1 at position 2",
    ),
    "column_offsets_before": (
        ("cross_hashed", [torch.arange(2), torch.arange(5)], [torch.tensor([0, 1, 2]), torch.tensor([-1, 0, 2])], 9, 0),
        ValueError,
        "cross_hashed: offsets[1] must not decrease or leave [0, the number of values], got -1 at position 0",
    ),
    "column_offsets_beyond": (
        ("cross_hashed", [torch.arange(2)], [torch.tensor([0, 1, 3])], 9, 0),
        ValueError,
        "cross_hashed: offsets[0] must not decrease or leave [0, the number of values], got 3 at position 2",
    ),
    "too_many_crosses": (
        ("cross_hashed", [torch.arange(1000)] * 7, [torch.tensor([0, 0, 1000])] * 7, 9, 0),
        ValueError,
        "cross_hashed: values must have at most 2305843009213693952 crosses in a row, got more in row 1",
    ),
    "string_offsets_too_large": (
        ("string_to_hash_bucket_fast", torch.zeros(4, dtype=torch.uint8), torch.tensor([0, 3, 5]), 10),
        ValueError,
        "string_to_hash_bucket_fast: offsets must be at most 4, the number of bytes, got 5 at position 2",
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", FAULTS)
def test_bad_value_is_recorded_and_told(name: str, order: str) -> None:
    (operator, *arguments), kind, text = FAULTS[name]
    fixture.set_order(order)
    fixture.operator(operator)(*(map_tensors(torch.clone, x) for x in arguments))
    _raises_now(kind, text)


def test_negative_last_segment_id_is_told_at_once() -> None:
    """Raise at once: the last segment id is read back anyway, as the number of segments."""
    with pytest.raises(
        ValueError, match=r"sparse_segment_reduce: segment_ids\[2\] must be in \[0, 2\^63 - 2\), got -1"
    ):
        fixture.operator("sparse_segment_reduce")(TABLE, torch.zeros(3).long(), torch.tensor([0, 0, -1]), None, SUM)


def test_bad_value_is_told_by_the_next_call_of_any_operator() -> None:
    fixture.operator("embedding")(TABLE, torch.tensor([0, 4]), -1, False, False)
    with pytest.raises(IndexError, match=r"embedding: indices\[1\] must be in \[0, 4\), got 4"):
        fixture.operator("unique")(torch.tensor([1]))
    fixture.operator("unique")(torch.tensor([1]))


def test_first_of_many_bad_values_is_told(emulated: Callable[[], int]) -> None:
    """Report the bad value at the smallest position, in every order of threads and across blocks."""
    indices = torch.full((5000,), 9)
    indices[:37] = 0
    with pytest.raises(IndexError, match=r"embedding: indices\[37\] must be in \[0, 4\), got 9"):
        torch.ops.torchsparse_rec.embedding.default(TABLE, indices, -1, False, False)


def test_bad_ids_train_no_row() -> None:
    """Leave bad ids out: in the forward their row is zero or does not count, in the backward they change no row."""
    indices = torch.tensor([1, 4, -1, 2])
    out = fixture.operator("embedding")(TABLE, indices, -1, False, False)
    with pytest.raises(IndexError):
        fixture.check_errors()
    assert torch.equal(out, torch.stack([TABLE[1], torch.zeros(3), torch.zeros(3), TABLE[2]]))

    pooled, _ = fixture.operator("embedding_bag")(TABLE, indices, torch.tensor([0, 4]), None, MEAN, -1, False, False)
    with pytest.raises(IndexError):
        fixture.check_errors()
    assert torch.equal(pooled[0], (TABLE[1] + TABLE[2]) / 2)

    backward = (TABLE, indices, None, None, None, 4, SUM, -1, False)
    dense = fixture.operator("embedding_dense_backward")(*backward)
    with pytest.raises(IndexError):
        fixture.check_errors()
    assert torch.equal(dense, torch.stack([torch.zeros(3), TABLE[0], TABLE[3], torch.zeros(3)]))

    values, rows = fixture.operator("embedding_sparse_backward")(*backward)
    with pytest.raises(IndexError):
        fixture.check_errors()
    assert rows.tolist() == [1, 2] and torch.equal(values, TABLE[[0, 3]])


def test_overlapping_bags_are_refused_in_bounds() -> None:
    """Refuse offsets that decrease, which can ask for more pieces than there is room for."""
    table, indices = torch.ones(4, 4), torch.zeros(600, dtype=torch.int64)
    offsets = torch.tensor([0, 600] * 20)
    for order in ORDERS:
        fixture.set_order(order)
        fixture.operator("embedding_bag")(table, indices, offsets, None, SUM, -1, False, False)
        _raises_now(ValueError, "embedding_bag: offsets must not decrease, got 600 followed by 0 at position 2")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
def test_offsets_without_sense_are_told_and_do_no_harm(mode: int, seed: int) -> None:
    """Refuse bags that overlap, run backwards or leave the entries, short and long; access no memory outside."""
    random = Random(seed)
    entries, bags = (700, 90) if seed % 2 else (40, 300)
    table = random.floats(30, 8, dtype=torch.float32)
    indices = random.integers(0, 30, entries, dtype=torch.int64)
    offsets = random.integers(-5, entries + 20, bags + 1, dtype=torch.int64)
    offsets[0] = 0
    weights = random.weights(entries, torch.float32) if mode != MAX and seed % 3 == 0 else None
    bag = (table, indices, offsets, weights, mode, -1, False, False)
    output, argmax = _told("embedding_bag", bag)
    assert output.shape == (bags, 8)
    rest = (weights, argmax.clamp(-1, entries - 1) if mode == MAX else None, 30, mode, -1, False)
    gradient = _told("embedding_dense_backward", (output, indices, offsets, *rest))
    assert gradient.shape == (30, 8)
    if weights is not None:
        _told("embedding_weights_backward", (output, table, indices, offsets, weights, output, mode, -1))


def _told(name: str, arguments: tuple) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Return the result of a call with bad offsets, after checking that check_errors raises the error."""
    result = fixture.operator(name)(*arguments)
    with pytest.raises(ValueError, match="offsets"):
        fixture.check_errors()
    return result


# ---- Streams and devices ---------------------------------------------------------------------------------------------


def test_no_fault_is_lost_that_comes_while_another_is_taken() -> None:
    out = (ctypes.c_float * 64)()
    told = set()
    for seed in range(1, 101):
        fixture.set_order("random", seed)
        assert fixture.library().tsr_emulated_fault(b"take_beside_reports", out) == b""
        told.add(out[0])
    fixture.set_order("ascending")
    assert told == {93.0}


def test_a_gpu_that_the_library_has_no_code_for() -> None:
    program = """
import torch, torchsparse_rec
from emulation import fixture
fixture.operator("unique")(torch.tensor([1]))
"""
    environment = {**os.environ, "TORCHSPARSE_REC_EMULATED_OLD_GPU": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode != 0
    assert run.stderr.strip().endswith(
        "RuntimeError: torchsparse_rec was built without code for this GPU, Pretended, of compute capability 7.5: "
        "build it with TORCH_CUDA_ARCH_LIST naming that, or keep the tensors on the CPU"
    )
