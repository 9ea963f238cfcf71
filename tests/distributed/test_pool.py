"""The pools that the other tests run on: what they say of an error that one rank alone has, and of one that hangs."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from distributed.pool import Ended, FromRank, Pool


def one_raises(text: str) -> int:
    if dist.get_rank() == 1:
        raise IndexError(text)
    return 5


def one_hangs_here() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_an_error_of_one_rank_is_raised_with_its_traceback_and_closes_the_pool(pool_of) -> None:
    pool = pool_of(2)
    with pytest.raises(IndexError, match="^what it says$") as caught:
        pool.run(one_raises, "what it says")
    assert isinstance(caught.value.__cause__, FromRank)
    told = str(caught.value.__cause__)
    assert "rank 0 returned" in told and "rank 1 raised an error" in told and "in one_raises" in told
    assert not pool.alive and pool_of(2).alive


def test_an_error_that_one_rank_alone_has(two: Pool) -> None:
    with pytest.raises(AssertionError, match="every rank must raise an error") as caught:
        two.errors(one_raises, "text")
    assert "rank 0 returned" in str(caught.value.__cause__)


def test_a_rank_that_hangs_says_where(two: Pool) -> None:
    with pytest.raises(Ended, match="^rank 1 did not return$") as caught:
        two.run(one_hangs_here, seconds=1)
    assert "in one_hangs_here" in str(caught.value.__cause__)
    assert not two.alive
