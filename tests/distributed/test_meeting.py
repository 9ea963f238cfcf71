"""Where the ranks of a job meet, although ranks of an earlier start have left their addresses there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from torchsparse_rec.distributed.torchrun import meet


def test_ranks_meet_where_no_earlier_ones_have_been() -> None:
    store, places = dist.HashStore(), []
    with ThreadPoolExecutor(3) as threads:
        for ranks in (3, 3, 2, 1, 3):
            stores = list(threads.map(lambda rank, ranks=ranks: meet(store, rank, ranks), range(ranks)))
            stores[0].set("address", "of rank 0")
            assert all(each.check(["address"]) for each in stores)
            assert not any(each.check(["address"]) for each in places)
            stores[0].delete_key("address")
            places.append(stores[0])


def test_a_rank_that_does_not_come_is_not_waited_for_forever() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: meet(store, rank, 2), range(2)))
    for rank in (0, 1):  # the other's name is an old one
        with pytest.raises(RuntimeError, match=f"rank {rank} of 2: not all ranks have come within"):
            meet(store, rank, 2, timedelta(seconds=0.2))
