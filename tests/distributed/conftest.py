"""The pools of ranks, which live for the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from devices import HARDWARE
from distributed.pool import Pool


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[tuple[int, str], Pool]]:
    pools: dict[tuple[int, str], Pool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=HARDWARE)
def device(request: pytest.FixtureRequest) -> str:
    """Return the device of each rank's tensors."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def pool_of(_pools: dict[tuple[int, str], Pool], device: str) -> Callable[[int], Pool]:
    """Return a function that gives the session's pool of so many ranks: a new one where the last is closed."""

    def find(ranks: int) -> Pool:
        if device == "cuda" and torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs")
        if (ranks, device) not in _pools or not _pools[ranks, device].alive:
            _pools[ranks, device] = Pool(ranks, device)
        return _pools[ranks, device]

    return find


@pytest.fixture
def two(pool_of: Callable[[int], Pool]) -> Pool:
    """Return the session's pool of two ranks."""
    return pool_of(2)
