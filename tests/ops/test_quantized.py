"""Lookups in tables of fewer bytes: torch's bytes, the bits of the decoded table, bounds of errors, and messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from calls import assert_same_bits
from devices import cpu_only
from samples.sample import Random
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import EXTREMES, POOLING
from torchsparse_rec.compat._parity.reference.quantized import decoded
from torchsparse_rec.ops.quantized import ROW_FORMATS

pytestmark = pytest.mark.usefixtures("kernels")

FORMATS = tuple(ROW_FORMATS)
TORCHS: dict[str, Callable[[Tensor], Tensor]] = {
    "int8": torch.ops.quantized.embedding_bag_byte_prepack,
    "int4": torch.ops.quantized.embedding_bag_4bit_prepack,
    "float16": lambda table: table.half(),
    "bfloat16": lambda table: table.bfloat16(),
}


def table_of(dim: int, rows: int = 60, seed: int = 0) -> Tensor:
    return Random(seed).floats(rows, dim, dtype=torch.float32)


# ---- Formats --------------------------------------------------------------------------------------------------------


@cpu_only
@pytest.mark.parametrize("rows", FORMATS)
def test_the_bytes_are_torchs(rows: str) -> None:
    table = table_of(18)
    for given in (table, table.half(), table.double(), table.t().contiguous().t()):
        assert_same_bits(ops.quantize_rows(given, rows), TORCHS[rows](given.float().contiguous()))
    assert ops.quantize_rows(table[:0], rows).shape == (0, ROW_FORMATS[rows].width(18))
    assert not ops.quantize_rows(table.clone().requires_grad_(), rows).requires_grad


@pytest.mark.parametrize("rows", ["int8", "int4"])
def test_pooled_rows_are_torchs_to_rounding(rows: str) -> None:
    table = ops.quantize_rows(table_of(64), rows)
    random = Random(1)
    ids, offsets = random.integers(0, 60, 200, dtype=torch.int64), torch.tensor([0, 7, 7, 90, 200])
    theirs = getattr(torch.ops.quantized, f"embedding_bag_{'byte' if rows == 'int8' else '4bit'}_rowwise_offsets")
    for weights in (None, random.weights(200, torch.float32)):
        wanted = theirs(table, ids, offsets, False, 0, False, weights, None, True)
        actual = ops.quantized_embedding_bag(table, ids, offsets, rows=rows, per_sample_weights=weights)
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-4)


def _rows_of_all_kinds() -> Tensor:
    """Return rows that are large, small, far from zero, nearly or wholly constant, and zero."""
    random = Random(3)
    table = random.floats(400, 32, dtype=torch.float32)
    scales = 10.0 ** random.integers(-9, 5, 400, 1, dtype=torch.float32).clamp_max(3)
    table = table * scales + random.floats(400, 1, dtype=torch.float32) * 10.0 ** random.integers(
        -4, 4, 400, 1, dtype=torch.float32
    )
    table[0], table[1], table[2, 1:] = 0.0, -3.25, 1e-8
    return table


@cpu_only
@pytest.mark.parametrize("rows", FORMATS)
def test_errors_are_within_the_bounds(rows: str) -> None:
    table = _rows_of_all_kinds()
    found = ops.quantized_embedding(ops.quantize_rows(table, rows), torch.arange(400), rows=rows).double()
    exact = table.double()
    low, high = exact.amin(1, keepdim=True), exact.amax(1, keepdim=True)
    rounding = 2 * 2.0**-23 * torch.maximum(low.abs(), high.abs())
    bounds = {
        "int8": (high - low) / 510 + 1e-8 + rounding,
        "int4": (high - low) / 30 * (1 + 2.0**-11) + low.abs() * 2.0**-11 + 1e-6 + rounding,
        "float16": torch.maximum(exact.abs() * 2.0**-11, torch.full_like(exact, 2.0**-25)),
        "bfloat16": exact.abs() * 2.0**-8,
    }
    error, bound = (found - exact).abs(), bounds[rows].expand_as(exact)
    assert bool((error <= bound).all()) and bool((error > bound / 2).any())


# ---- Lookups --------------------------------------------------------------------------------------------------------


@cpu_only
@pytest.mark.parametrize("rows", FORMATS)
@pytest.mark.parametrize("dim", [2, 6, 16, 30, 32, 64, 100, 128, 200])
def test_the_bits_are_those_of_the_decoded_table(rows: str, dim: int) -> None:
    random = Random(dim)
    table = ops.quantize_rows(table_of(dim), rows)
    plain = decoded(table, ROW_FORMATS[rows].bits)
    ids, offsets = (
        random.integers(0, 60, 1500, dtype=torch.int32),
        torch.tensor([0, 700, 700, 716, 733, 734, 990, 1500]),
    )
    assert_same_bits(ops.quantized_embedding(table, ids, rows=rows), ops.embedding(plain, ids))
    weights = random.floats(1500, dtype=torch.float32).abs()
    for mode, given, padding in itertools.product(POOLING, (None, weights), (None, 7)):
        if POOLING[mode] in EXTREMES and given is not None:
            continue
        rest = {"per_sample_weights": given, "mode": mode, "padding_idx": padding}
        actual = ops.quantized_embedding_bag(table, ids, offsets, rows=rows, **rest)
        assert_same_bits(actual, ops.embedding_bag(plain, ids, offsets, **rest))


def test_some_of_the_bags() -> None:
    """Read the chosen bags alone: another may have ids of another table."""
    table = ops.quantize_rows(table_of(5, rows=4))
    ids, offsets = torch.tensor([900, 3, 1, 3, -7]), torch.tensor([0, 1, 1, 4, 5])
    call = torch.ops.torchsparse_rec.quantized_embedding_bag.default
    actual = call(table, ids, offsets, None, 8, 0, -1, True, 1, 2)
    wanted = ops.quantized_embedding_bag(table, ids[1:4], torch.tensor([0, 0, 3]))
    assert_same_bits(actual, wanted)
    with pytest.raises(IndexError, match=r"quantized_embedding_bag: indices\[4\] must be in \[0, 4\), got -7"):
        call(table, ids, offsets, None, 8, 0, -1, True, 1, None)


# ---- Messages -------------------------------------------------------------------------------------------------------

TABLE = ops.quantize_rows(table_of(4, rows=3))
IDS, OFFSETS = torch.tensor([2, 0]), torch.tensor([0, 2])


@cpu_only
@pytest.mark.parametrize(
    "weight, rows, text",
    [
        (torch.ones(3), "int8", r"weight must be \[V, D\] of floats, got torch.float32 of shape \(3,\)"),
        (torch.ones(3, 2).int(), "int8", r"weight must be \[V, D\] of floats, got torch.int32"),
        (torch.ones(3, 0), "int8", r"weight must have at least one column, got shape \(3, 0\)"),
        (torch.ones(3, 5), "int4", r"weight must have an even number of columns for rows='int4', got shape \(3, 5\)"),
        (torch.ones(3, 5), "int5", "rows must be one of 'int8', 'int4', 'float16', 'bfloat16', got 'int5'"),
        (torch.tensor([[1.0], [torch.nan]]), "int8", "rows='int8' can hold, got a row 1 from nan to nan"),
        (torch.tensor([[1.0], [torch.inf]]), "bfloat16", "rows='bfloat16' can hold, got a row 1 from inf to inf"),
        (torch.tensor([[-3e38, 3e38]]), "int8", "rows='int8' can hold, got a row 0 from -3e"),
        (torch.tensor([[0.0, 1e6], [0, 1e5]]), "int4", "rows='int4' can hold, got a row 0 from 0 to 1e"),
        (torch.tensor([[-1e5, 1.0]]), "int4", "rows='int4' can hold, got a row 0 from -100000 to 1"),
        (torch.tensor([[7e4, 1.0]]), "float16", "rows='float16' can hold, got a row 0 from 1 to 7"),
        (torch.tensor([[3.4e38, 1.0]]), "bfloat16", "rows='bfloat16' can hold, got a row 0 from 1 to 3.4e"),
    ],
)
def test_tables_that_cannot_be_held(weight: Tensor, rows: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^quantize_rows: .*{text}"):
        ops.quantize_rows(weight, rows)


@pytest.mark.parametrize(
    "weight, bits, text",
    [
        (TABLE, 3, "bits must be 4, 8 or 16, got 3"),
        (TABLE[0], 8, r"weight must have rank 2, got shape \[12\]"),
        (TABLE, 16, "weight must be float16 or bfloat16 where bits is 16, got Byte"),
        (TABLE.float(), 8, "weight must be uint8 where bits is 8, got Float"),
        (TABLE[:, :7], 8, r"rows of weight must have at least 8 bytes where bits is 8, got shape \[3, 7\]"),
        (TABLE[:, :3], 4, r"rows of weight must have at least 4 bytes where bits is 4, got shape \[3, 3\]"),
    ],
)
def test_tables_of_other_forms(weight: Tensor, bits: int, text: str) -> None:
    call = torch.ops.torchsparse_rec
    with pytest.raises(ValueError, match=f"^quantized_embedding: {text}"):
        call.quantized_embedding.default(weight, IDS, bits)
    with pytest.raises(ValueError, match=f"^quantized_embedding_bag: {text}"):
        call.quantized_embedding_bag.default(weight, IDS, OFFSETS, None, bits, 0, -1)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"indices": IDS.float()}, "indices must be int32 or int64, got Float"),
        ({"indices": IDS.view(1, 2)}, r"indices must have rank 1, got shape \[1, 2\]"),
        ({"offsets": OFFSETS[:0]}, "offsets must have one element more than there are bags, got none"),
        (
            {"per_sample_weights": torch.ones(3)},
            r"must be float32 of shape \[2\], as indices, got Float of",
        ),
        ({"per_sample_weights": torch.ones(2).half()}, r"must be float32 of shape \[2\], as indices, got Half of"),
        ({"per_sample_weights": torch.ones(2), "mode": 4}, "per_sample_weights must be None in mode min"),
        ({"mode": 5}, r"reduction must be in \[0, 4\], got 5"),
        ({"padding_idx": 4}, "padding_idx must be <= 3, got 4"),
        ({"first_bag": 2}, r"first_bag must be in \[0, 1\], got 2"),
        ({"first_bag": -1}, r"first_bag must be in \[0, 1\], got -1"),
        ({"bags": 2}, r"bags must be in \[0, 1\], those from first_bag on, got 2"),
        ({"offsets": torch.tensor([1, 2])}, r"offsets\[0\] must be 0, got 1"),
        ({"offsets": torch.tensor([0, 2, 1, 2])}, "offsets must not decrease, got 2 followed by 1 at position 2"),
        ({"offsets": torch.tensor([0, 1])}, r"offsets\[1\], the last, must be the number of indices, 2, got 1"),
        ({"offsets": torch.tensor([1, 2, 2]), "bags": 1}, r"offsets\[0\] must be 0, got 1"),
        ({"offsets": torch.tensor([0, 2, 1, 2]), "first_bag": 1, "bags": 1}, "got 2 followed by 1 at position 2"),
        (
            {"offsets": torch.tensor([0, 1, 1]), "first_bag": 1},
            r"offsets\[2\], the last, must be the number of indices, 2",
        ),
        ({"per_sample_weights": torch.tensor([1.0, torch.nan])}, r"per_sample_weights\[1\] must be a number, got nan"),
    ],
)
def test_messages_of_bags(change: dict, text: str) -> None:
    given = {"weight": TABLE, "indices": IDS, "offsets": OFFSETS, "per_sample_weights": None, "bits": 8, "mode": 0}
    with pytest.raises(ValueError, match=f"^quantized_embedding_bag: .*{text}"):
        torch.ops.torchsparse_rec.quantized_embedding_bag.default(**{**given, "padding_idx": -1, **change})


@cpu_only
def test_an_offset_beyond_the_ids() -> None:
    with pytest.raises(ValueError, match=r"offsets\[1\] must be at most the number of indices, 2, got 9"):
        torch.ops.torchsparse_rec.quantized_embedding_bag.default(
            TABLE, IDS, torch.tensor([0, 9, 2]), None, 8, 0, -1, True, 0, 1
        )


def test_bad_ids_are_named() -> None:
    with pytest.raises(IndexError, match=r"^quantized_embedding: indices\[1\] must be in \[0, 3\), got 3"):
        ops.quantized_embedding(TABLE, torch.tensor([0, 3]))
    with pytest.raises(IndexError, match=r"^quantized_embedding_bag: indices\[0\] must be in \[0, 3\), got -1"):
        ops.quantized_embedding_bag(TABLE, torch.tensor([-1, 3]), OFFSETS)


def test_messages_of_functions() -> None:
    with pytest.raises(ValueError, match="^quantized_embedding: weight must be torch.float16 where rows='float16'"):
        ops.quantized_embedding(TABLE, IDS, rows="float16")
    with pytest.raises(ValueError, match="^quantized_embedding_bag: rows must be one of 'int8'.*got 'byte'"):
        ops.quantized_embedding_bag(TABLE, IDS, OFFSETS, rows="byte")
    with pytest.raises(ValueError, match="mode must be one of 'sum', 'mean', .*, got 'prod'"):
        ops.quantized_embedding_bag(TABLE, IDS, OFFSETS, mode="prod")
    weights = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="per_sample_weights must not require a gradient.*torch.no_grad"):
        ops.quantized_embedding_bag(TABLE, IDS, OFFSETS, per_sample_weights=weights)
    with torch.no_grad():
        ops.quantized_embedding_bag(TABLE, IDS, OFFSETS, per_sample_weights=weights)
