"""The pools that the other tests run on: results and errors of every rank; ranks that end, or hang."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from distributed.pool import Ended, FromRank, Pool


def add_up(x: torch.Tensor) -> torch.Tensor:
    x = x * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return x


def one_raises(text: str) -> int:
    if dist.get_rank() == 1:
        raise IndexError(text)
    return 5


def all_raise() -> None:
    raise IndexError(f"by {dist.get_rank()}")


def one_kills_itself() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def one_aborts() -> None:
    if dist.get_rank() == 1:
        os.abort()


def one_hangs_here() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def raise_what_cannot_be_pickled() -> None:
    raise type("Local", (ValueError,), {})("text")


def threads() -> tuple[int, int]:
    return torch.get_num_threads(), len(os.listdir("/proc/self/task"))


def number() -> int:
    return os.getpid()


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_of_all_ranks(pool_of, ranks: int) -> None:
    got = pool_of(ranks).run(add_up, torch.arange(3))
    assert len(got) == ranks and all(torch.equal(x, torch.arange(3) * sum(range(ranks + 1))) for x in got)


def test_processes_live_on_with_one_thread_of_computing(two: Pool) -> None:
    assert two.run(number) == two.run(number)
    assert [computing for computing, _ in two.run(threads)] == [1, 1]


def test_an_error_of_one_rank_is_raised_with_its_traceback_and_closes_the_pool(pool_of) -> None:
    pool = pool_of(2)
    with pytest.raises(IndexError, match="^what it says$") as caught:
        pool.run(one_raises, "what it says")
    assert isinstance(caught.value.__cause__, FromRank)
    told = str(caught.value.__cause__)
    assert "rank 0 returned" in told and "rank 1 raised an error" in told and "in one_raises" in told
    assert not pool.alive and pool_of(2).run(number) != []


def test_errors_of_all_ranks(two: Pool) -> None:
    assert [str(error) for error in two.errors(all_raise)] == ["by 0", "by 1"]
    assert two.alive
    with pytest.raises(RuntimeError, match="^Local: text$"):
        two.run(raise_what_cannot_be_pickled)


def test_an_error_that_one_rank_alone_has(two: Pool) -> None:
    with pytest.raises(AssertionError, match="every rank must raise an error") as caught:
        two.errors(one_raises, "text")
    assert "rank 0 returned" in str(caught.value.__cause__)


@pytest.mark.parametrize(("function", "code"), [(one_kills_itself, -9), (one_aborts, -6)])
def test_a_rank_that_ends(two: Pool, function, code: int) -> None:
    with pytest.raises(Ended, match=f"^rank 1 ended with the exit code {code}") as caught:
        two.run(function)
    assert not two.alive
    if code == -6:
        assert "in one_aborts" in str(caught.value)


def test_a_rank_that_hangs_says_where(two: Pool) -> None:
    with pytest.raises(Ended, match="^rank 1 did not return$") as caught:
        two.run(one_hangs_here, seconds=1)
    assert "in one_hangs_here" in str(caught.value.__cause__)
    assert not two.alive
