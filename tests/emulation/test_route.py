"""The CUDA kernels of route, run without a GPU in every order of threads: the CPU's bits."""

from __future__ import annotations

import pytest
import torch
from samples.route import ids_of, starts_of

from emulation.fixture import check, run_in_every_order
from emulation.test_unique import colliding


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 5, 70, 5000])
def test_route_of_every_size(ranks: int, distinct: bool) -> None:
    """Use sizes near warps and tiles, tables without ids, and the same ids in several tables."""
    rows, lengths = [50, 7, 300, 0, 2**31 - 1, 50, 9000], [33, 1025, 31, 0, 700, 1999, 400]
    for dtype in (torch.int64, torch.int32):
        ids = ids_of(rows, lengths, dtype)
        check("route", ids, starts_of(lengths), rows, [2, 1, 16, 1, 4096, 4, 512], ranks, distinct)
        check("route_keys", ids, starts_of(lengths), ranks, distinct)


def test_route_of_keys_made_to_collide() -> None:
    """Share slot and tag in each of the tables."""
    keys = colliding(300, 0)
    check("route_keys", torch.cat([keys, keys.flip(0), keys[:100]]), [0, 350, 500, 700], 3, True)


def test_route_of_one_id_in_many_tables() -> None:
    """Meet tables whose hashes share a tag with their neighbours': the same id of another table is another row."""
    starts = list(range(3001))
    check("route_keys", torch.zeros(3000, dtype=torch.int64), starts, 2, True)
    check("route", torch.zeros(3000, dtype=torch.int64), starts, [1] * 3000, [1] * 3000, 2, True)


@pytest.mark.parametrize("position", [0, 5, 999])
@pytest.mark.parametrize("bad", [-1, 40, 2**40])
def test_route_tells_the_first_bad_id(position: int, bad: int) -> None:
    ids = ids_of([40, 40], [500, 500], torch.int64)
    ids[position:] = bad
    words = rf"^route: ids\[{position}\] must be in \[0, 40\), as of table {position // 500}, got {bad}$"
    for distinct in (True, False):
        with pytest.raises(IndexError, match=words):
            run_in_every_order("route", ids, [0, 500, 1000], [40, 40], [2, 2], 2, distinct)
