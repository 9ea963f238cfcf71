"""The CUDA kernels of split tables and sparse ids, run without a GPU: many shards, and the handling of bad values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from emulation import fixture
from torchsparse_rec.compat._parity.reference import SUM

Launches = Callable[[], int]


@pytest.mark.parametrize("shards", [31, 32, 33, 260])
def test_table_of_many_shards(shards: int, emulated: Launches) -> None:
    """Look up ids in more shards than one kernel's arguments hold."""
    generator = torch.Generator().manual_seed(shards)
    table = torch.randn(3 * shards, 4, generator=generator)
    params = list(table.split(3))
    ids = torch.randint(0, 3 * shards, (500,), generator=generator)
    found = torch.ops.torchsparse_rec.embedding_bag_shards.default(params, ids, None, None, SUM, -1, -1.0, False)
    assert torch.equal(found, table[ids])
    rows = torch.ops.torchsparse_rec.shard_rows.default(ids, [3] * shards, 0, False)
    assert torch.equal(rows, ids % shards * 3 + ids // shards)
    assert emulated() > 0


@pytest.mark.parametrize("default", [None, 1])
def test_bad_entries_are_left_out(default: int | None) -> None:
    """Leave out a row that no bag has and an id that no row has; the offsets still count every entry."""
    ids, rows = torch.tensor([0, 5, 2, 3, 1]), torch.tensor([1, 0, -1, 1, 7])
    arguments = (ids, rows, torch.ones(5), 2, 4, True, default, True)
    weights, indices, offsets, positions = fixture.operator("pruned_bags")(*arguments)
    with pytest.raises(IndexError, match=r"row_ids\[2\] must be in \[0, 2\), got -1"):
        fixture.check_errors()
    if default is None:
        assert indices.tolist() == [4, 0, 3, 4, 4] and offsets.tolist() == [0, 1, 5]
        assert positions.tolist() == [1, 0, 3, 2, 4] and weights.tolist() == [0, 1, 1, 0, 0]
    else:
        assert indices.tolist() == [4, 1, 0, 3, 4, 4, 4] and offsets.tolist() == [0, 2, 7]
        assert positions.tolist() == [2, 0, 5, 3, 6] and weights.tolist() == [0, 1, 1, 1, 0, 0, 0]


def test_bad_ids_of_shards_become_the_mark() -> None:
    rows = fixture.operator("shard_rows")(torch.tensor([4, -1, 5, 3]), [3, 2], 1, False)
    with pytest.raises(IndexError, match=r"ids\[1\] must name a row that its shard has, got -1"):
        fixture.check_errors()
    assert rows.tolist() == [4, 5, 5, 3]
