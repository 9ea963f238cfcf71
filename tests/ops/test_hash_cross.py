"""Hashed crosses: kinds of columns, order, edges, errors, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.hash import fingerprint_cat
from torchsparse_rec.ops.hash_cross import DEFAULT_HASH_KEY

pytestmark = pytest.mark.usefixtures("kernels")

JAGGED = (torch.tensor([7, 8, 9]), torch.tensor([0, 2, 3]))


def by_hand(*values: int, key: int = 0xDECAFCAFFE, buckets: int = 2**63 - 1) -> int:
    for value in values:
        key = fingerprint_cat(key % 2**64, value % 2**64)
    return key % buckets


def test_last_column_changes_fastest() -> None:
    values, offsets = ops.cross_hashed([(torch.tensor([1, 2]), torch.tensor([0, 2])), torch.tensor([[3, 4]])])
    assert values.tolist() == [by_hand(a, b) for a in (1, 2) for b in (3, 4)]
    assert offsets.tolist() == [0, 4]


def test_columns_of_every_kind() -> None:
    expected = ops.cross_hashed([torch.tensor([[1], [2]]), JAGGED], 1000)
    arange = torch.arange(3)
    for column in (
        torch.tensor([1, 2]),
        torch.tensor([1, 2], dtype=torch.uint8),
        np.array([[1], [2]], np.int16),
        (torch.tensor([1, 2]), arange),
    ):
        for actual, wanted in zip(ops.cross_hashed([column, JAGGED], 1000), expected, strict=True):
            assert torch.equal(actual, wanted)
    words = ["a", "é"]
    prints = ops.fingerprint64(words)
    expected = ops.cross_hashed([prints, JAGGED])
    for column in (words, np.array(words), np.array([[w.encode()] for w in words], object), (words, arange)):
        for actual, wanted in zip(ops.cross_hashed([column, JAGGED]), expected, strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.parametrize("key", [0, -1, 2**64 - 1, -(2**63), 5])
def test_keys_and_buckets(key: int) -> None:
    rows = ((5, 2**63 - 1), (-(2**63), -1))
    for buckets in (0, 1, 7, 2**40, 2**63 - 1):
        values, _ = ops.cross_hashed([torch.tensor([5, -(2**63)]), torch.tensor([2**63 - 1, -1])], buckets, key)
        assert values.tolist() == [by_hand(*row, key=key, buckets=buckets or 2**63 - 1) for row in rows], buckets


def test_without_a_key_the_first_value_is_the_hash() -> None:
    values, _ = ops.cross_hashed([torch.tensor([5]), torch.tensor([6])], 0, None)
    assert values.tolist() == [by_hand(6, key=5)]
    assert ops.cross_hashed([torch.tensor([5, -1])], 100, None)[0].tolist() == [5, (2**64 - 1) % 100]


def test_empty_rows_and_sizes() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    for columns in ([empty], [empty, empty], [torch.empty(0, 2, dtype=torch.int64), (empty, torch.tensor([0]))], [[]]):
        values, offsets = ops.cross_hashed(columns)
        assert values.tolist() == [] and offsets.tolist() == [0]
    values, offsets = ops.cross_hashed([JAGGED, (torch.tensor([5]), torch.tensor([0, 0, 1]))])
    assert values.tolist() == [by_hand(9, 5)] and offsets.tolist() == [0, 0, 1]
    values, offsets = ops.cross_hashed([torch.empty(3, 0, dtype=torch.int64), torch.arange(3)])
    assert values.tolist() == [] and offsets.tolist() == [0, 0, 0, 0]


def test_layouts() -> None:
    x = torch.arange(24).reshape(4, 6)
    expected = ops.cross_hashed([x[:, ::2].contiguous(), x[:, 1].contiguous()], 997)
    for actual, wanted in zip(ops.cross_hashed([x[:, ::2], x[:, 1]], 997), expected, strict=True):
        assert torch.equal(actual, wanted)


def raises(text: str) -> Any:
    return pytest.raises(ValueError, match=text)


def test_errors_of_columns() -> None:
    one = torch.ones(2, dtype=torch.int64)
    with raises(r"cross_hashed: columns\[1\] must have an integer dtype, got torch.float32"):
        ops.cross_hashed([one, torch.ones(2)])
    with raises(r"columns\[0\] must have an integer dtype, got torch.bool"):
        ops.cross_hashed([one > 0])
    with raises(r"columns\[1\]\[0\] must be str or bytes, got int: 5"):
        ops.cross_hashed([one, [5, "a"]])
    with raises(r"columns\[0\] must have 1 or 2 dimensions, got 3"):
        ops.cross_hashed([one.reshape(1, 1, 2)])
    with raises("cross_hashed: columns must hold at least one column"):
        ops.cross_hashed([])
    with raises("values must hold 1 to 120 columns, got 121"):
        ops.cross_hashed([one] * 121)
    with raises("all columns must have the 2 rows of the first, got 3 in column 1"):
        ops.cross_hashed([one, torch.arange(3)])
    with raises(r"offsets\[0\] must be an int64 vector, got Int of shape \[2\]"):
        ops.cross_hashed([(one, torch.tensor([0, 2], dtype=torch.int32))])
    with raises(r"offsets\[0\] must be empty, since values are a matrix, got shape \[2\]"):
        ops.cross_hashed([(one.reshape(2, 1), torch.tensor([0, 2]))])
    with raises("num_buckets must be >= 0, got -1"):
        ops.cross_hashed([one], -1)
    with raises(r"num_buckets must be below 2 \*\* 63"):
        ops.cross_hashed([one], 2**63)
    with raises("hash_key must be an integer of 64 bits, got"):
        ops.cross_hashed([one], 1, 2**64)


def offsets_of(*bounds: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.arange(5), torch.tensor([0, 1, 2, 5])), (torch.arange(5), torch.tensor(bounds))]


def test_errors_of_offsets() -> None:
    rule = r"cross_hashed: offsets\[1\] must not decrease or leave \[0, the number of values\], got"
    with raises(f"{rule} 1 at position 2"):
        ops.cross_hashed(offsets_of(0, 3, 1, 9))
    with raises(f"{rule} -2 at position 0"):
        ops.cross_hashed(offsets_of(-2, 3, 4, 5))
    with raises(f"{rule} 6 at position 3"):
        ops.cross_hashed(offsets_of(0, 3, 4, 6))


def test_more_crosses_than_there_are_numbers() -> None:
    """Refuse a row whose product of lengths is beyond 2^63, unless a later column makes the row empty."""
    wide, nothing = torch.zeros(1, 2**20, dtype=torch.int64), torch.empty(1, 0, dtype=torch.int64)
    jagged = (wide[0], torch.tensor([0, 2**20]))
    for columns in ([wide] * 4, [jagged] * 4, [jagged, wide, jagged, wide]):
        with raises(f"values must have at most {2**62} crosses in a row, got more in row 0"):
            ops.cross_hashed(columns)
        values, offsets = ops.cross_hashed([*columns, nothing])
        assert values.tolist() == [] and offsets.tolist() == [0, 0]


def test_a_cross_is_made_of_joined_fingerprints() -> None:
    """Compare with the reference's joined fingerprint too, of numbers with every bit set or none."""
    words, numbers = ops.fingerprint64(["a", "b", "é"]), torch.tensor([-1, 0, -(2**63)])
    key = torch.tensor(DEFAULT_HASH_KEY)
    joined = ops.fingerprint_cat64(ops.fingerprint_cat64(key, words), numbers)
    wanted = [fingerprint_cat(x % 2**64, y % 2**64) for x, y in zip(words.tolist(), numbers.tolist(), strict=True)]
    assert [x % 2**64 for x in ops.fingerprint_cat64(words, numbers).tolist()] == wanted
    crossed, _ = ops.cross_hashed([["a", "b", "é"], numbers], 1000)
    assert [x % 2**64 % 1000 for x in joined.tolist()] == crossed.tolist()
    assert ops.fingerprint_cat64(words[:, None], numbers).shape == (3, 3)
    with pytest.raises(ValueError, match="fingerprint_cat64: y must be an int64 tensor, got torch.int32"):
        ops.fingerprint_cat64(words, numbers.int())
