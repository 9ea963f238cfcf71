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

import torchsparse_rec  # noqa: F401  (its operators)
from emulation import fixture
from emulation.test_emulation import ORDERS
from torchsparse_rec.compat._parity.reference import MAX, MEAN, SUM


def _raises_now(kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        fixture.check_errors()
    assert str(caught.value) == text
    fixture.check_errors()  # an error is reported once


TABLE = torch.arange(1.0, 13.0).reshape(4, 3)
NONE = torch.empty(0, dtype=torch.int64)
BYTES = torch.zeros(4, dtype=torch.uint8)
IDS, ROWS = torch.tensor([1, -1, 4, 0]), torch.tensor([0, 0, 1, 2])


def fault(kind: type[Exception], name: str, *arguments: object) -> tuple[type[Exception], str, tuple]:
    """Return a call of an operator with a bad value, and the kind of the error that its kernels record."""
    return kind, name, arguments


def bag_fault(
    kind: type[Exception],
    ids: list[int],
    offsets: list[int],
    weights: list[float] | None = None,
    mode: int = SUM,
    padding_idx: int = -1,
) -> tuple[type[Exception], str, tuple]:
    """Return such a call of embedding_bag."""
    given = None if weights is None else torch.tensor(weights)
    bags = (torch.tensor(ids), torch.tensor(offsets), given, mode, padding_idx, False, False)
    return fault(kind, "embedding_bag", TABLE, *bags)


FAULTS: dict[str, tuple[type[Exception], str, tuple]] = {
    "table_initialize_: rows[2] must be below 4, got 4": fault(
        IndexError, "table_initialize_", TABLE, torch.tensor([3, -1, 4]), torch.arange(3), None, 0, [1.0], 0
    ),
    "table_assign_: rows[1] must be below 4, got 7": fault(
        IndexError, "table_assign_", TABLE, torch.tensor([3, 7, -1, 4]), TABLE
    ),
    "embedding_bag_shards: indices[1] must be in [0, 8), got 8": fault(
        IndexError, "embedding_bag_shards", [TABLE, TABLE], torch.tensor([7, 8, -1]), None, None, SUM, -1, 1.0, False
    ),
    "shard_rows: ids[2] must name a row that its shard has, got 7": fault(
        IndexError, "shard_rows", torch.tensor([0, 6, 7, -1]), [3, 3], 0, True
    ),
    "pruned_bags: ids[2] must be in [0, 4), got 4": fault(
        IndexError, "pruned_bags", IDS, ROWS, None, 3, 4, False, None, True
    ),
    "pruned_bags: row_ids[3] must be in [0, 2), got 2": fault(
        IndexError, "pruned_bags", IDS, ROWS, None, 2, 5, False, 0, True
    ),
    "clip_rows_backward: rows[1] must be in [0, 4), got 4": fault(
        IndexError, "clip_rows_backward", TABLE[:2], [TABLE[:1], TABLE[1:]], torch.tensor([3, 4]), 1.0
    ),
    "embedding: indices[1] must be in [0, 4), got 4": fault(
        IndexError, "embedding", TABLE, torch.tensor([0, 4, -1]), -1, False, False
    ),
    "embedding: indices[0] must be in [0, 4), got 4": fault(
        IndexError, "embedding", TABLE, torch.full((8,), 4), -1, False, False
    ),
    "embedding_bag: indices[3] must be in [0, 4), got -7": bag_fault(IndexError, [0, 1, 2, -7, 9], [0, 2, 5]),
    "embedding_bag: indices[4] must be in [0, 4), got 9": bag_fault(IndexError, [0, 1, 2, 3, 9], [0, 2, 5], mode=MAX),
    "embedding_bag: offsets[0] must be 0, got 1": bag_fault(ValueError, [0, 1], [1, 2]),
    "embedding_bag: offsets must not decrease, got 9 followed by 1 at position 2": bag_fault(
        ValueError, [0, 1], [0, 9, 1, 2]
    ),
    "embedding_bag: offsets[1], the last, must be the number of indices, 2, got 1": bag_fault(
        ValueError, [0, 1], [0, 1]
    ),
    "embedding_bag: per_sample_weights[1] must be a number, got nan": bag_fault(
        ValueError, [0, 1], [0, 2], [1.0, torch.nan]
    ),
    "embedding_bag: per_sample_weights[0] must be a number, got nan": bag_fault(  # also of the row of padding
        ValueError, [1, 0], [0, 2], [torch.nan, 1.0], MEAN, padding_idx=1
    ),
    "embedding_backward: indices[2] must be in [0, 4), got 5": fault(
        IndexError, "embedding_dense_backward", TABLE, torch.tensor([0, 1, 5, 2]), None, None, None, 4, SUM, -1, False
    ),
    "embedding_backward: indices[1] must be in [0, 4), got -1": fault(
        IndexError, "embedding_sparse_backward", TABLE, torch.tensor([0, -1, 5, 2]), None, None, None, 4, SUM, -1, False
    ),
    "embedding_weights_backward: indices[1] must be in [0, 4), got 8": fault(
        IndexError,
        "embedding_weights_backward",
        TABLE[:1],
        TABLE,
        torch.tensor([0, 8]),
        torch.tensor([0, 2]),
        torch.ones(2),
        TABLE[:1],
        MEAN,
        -1,
    ),
    "sparse_segment_reduce: indices[0] must be in [0, 4), got 4": fault(
        IndexError, "sparse_segment_reduce", TABLE, torch.tensor([4, 1]), torch.tensor([0, 1]), None, SUM
    ),
    "sparse_segment_reduce: segment_ids[0] must be >= 0, got -2": fault(
        ValueError, "sparse_segment_reduce", TABLE, torch.tensor([0, 1]), torch.tensor([-2, 1]), 2, SUM
    ),
    "sparse_segment_reduce: segment_ids must be sorted, got 1 followed by 0 at position 2": fault(
        ValueError, "sparse_segment_reduce", TABLE, torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0]), 2, SUM
    ),
    "sparse_segment_reduce: segment_ids must be sorted, got 5 followed by 1 at position 1": fault(
        ValueError, "sparse_segment_reduce", TABLE, torch.tensor([0, 1, 2]), torch.tensor([5, 1, 2]), None, SUM
    ),
    "sparse_segment_reduce: segment_ids[1] must be below num_segments = 2, got 2": fault(
        ValueError, "sparse_segment_reduce", TABLE, torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]), 2, SUM
    ),
    "sparse_segment_reduce_grad: indices[1] must be in [0, 6), got 6": fault(
        IndexError, "sparse_segment_reduce_grad", TABLE, torch.tensor([0, 6]), torch.tensor([0, 1]), 6, MEAN
    ),
    "sparse_segment_reduce_grad: segment_ids[1] must be in [0, 4), got 4": fault(
        IndexError, "sparse_segment_reduce_grad_v2", TABLE, torch.tensor([0, 1, 2]), torch.tensor([0, 4, -1]), 6, MEAN
    ),
    "string_to_hash_bucket_fast: offsets must not decrease, got 2 at position 2 after 3": fault(
        ValueError, "string_to_hash_bucket_fast", BYTES, torch.tensor([0, 3, 2]), 10
    ),
    "string_to_hash_bucket_fast: offsets must be in [0, 4], the number of bytes, got 5 at position 0": fault(
        ValueError, "string_to_hash_bucket_fast", BYTES, torch.tensor([5]), 10
    ),
    "cross_hashed: offsets[0] must not decrease or leave [0, the number of values], got 1 at position 2": fault(
        ValueError,
        "cross_hashed",
        [torch.arange(5), torch.arange(4).reshape(4, 1)],
        [torch.tensor([0, 2, 1, 5, 5]), NONE],
        9,
        0,
    ),
    "cross_hashed: offsets[1] must not decrease or leave [0, the number of values], got -1 at position 0": fault(
        ValueError,
        "cross_hashed",
        [torch.arange(2), torch.arange(5)],
        [torch.tensor([0, 1, 2]), torch.tensor([-1, 0, 2])],
        9,
        0,
    ),
    "cross_hashed: offsets[0] must not decrease or leave [0, the number of values], got 3 at position 2": fault(
        ValueError, "cross_hashed", [torch.arange(2)], [torch.tensor([0, 1, 3])], 9, 0
    ),
    "cross_hashed: values must have at most 2305843009213693952 crosses in a row, got more in row 1": fault(
        ValueError, "cross_hashed", [torch.arange(1000)] * 7, [torch.tensor([0, 0, 1000])] * 7, 9, 0
    ),
    "string_to_hash_bucket_fast: offsets must be at most 4, the number of bytes, got 5 at position 2": fault(
        ValueError, "string_to_hash_bucket_fast", BYTES, torch.tensor([0, 3, 5]), 10
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("text", FAULTS)
def test_bad_value_is_recorded_and_told(text: str, order: str) -> None:
    kind, name, arguments = FAULTS[text]
    fixture.set_order(order)
    fixture.operator(name)(*(map_tensors(torch.clone, x) for x in arguments))
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
from emulation.test_emulation import ORDERS
fixture.operator("unique")(torch.tensor([1]))
"""
    environment = {**os.environ, "TORCHSPARSE_REC_EMULATED_OLD_GPU": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode != 0
    assert run.stderr.strip().endswith(
        "RuntimeError: torchsparse_rec was built without code for this GPU, Pretended, of compute capability 7.5: "
        "build it with TORCH_CUDA_ARCH_LIST naming that, or keep the tensors on the CPU"
    )
