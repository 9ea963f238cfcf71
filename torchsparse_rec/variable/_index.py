"""The index of a table that grows: how large it is, and its hash."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from .. import ops

__all__ = ["MOST_HASHES", "crowded", "new_index", "seed_of", "unforeseen"]

# Keys in each bucket, on average, when a table is full: three quarters of its 12 slots.
_LOAD = 9
_BUCKET_WORDS = 16
# Buckets of a region, where there are at least two regions. All get equally many keys, so all have the same size.
_REGION_BUCKETS = 64
# How many hashes are tried before keys that collide are an error.
MOST_HASHES = 4


def new_index(owner: str, entries: Tensor, counters: Tensor, seed: int = 0) -> Tensor:
    """
    Make an index of all keys of a table, see :func:`ops.table_rehash`. On CUDA it waits for the device.

    Args:
        owner: the table's name, for errors.
        entries: the entries of the table.
        counters: the counters of the table.
        seed: the seed of the index's hash. Default: 0, none. Where keys find no room, further hashes get unpredictable
            seeds.

    Raises:
        RuntimeError: keys collide under every hash.
    """
    rows = entries.shape[0]
    before = counters[2].clone()
    for _ in range(MOST_HASHES):
        index = ops.table_rehash(entries, counters, _buckets_for(rows), seed=seed)
        failed = int(counters[2] - before)
        if not failed:
            return index
        counters[2] = before
        seed = unforeseen()
    raise crowded(owner, failed, rows)


def crowded(owner: str, failed: int, rows: int) -> RuntimeError:
    """Return the error for keys that find no room in the index of a table of ``rows`` rows under any hash."""
    return RuntimeError(
        f"{owner}: {failed} keys collide with others in an index of {_buckets_for(rows)} buckets for {rows} rows, "
        f"under each of {MOST_HASHES} hashes: they must have been chosen by one who knew them"
    )


def _buckets_for(rows: int) -> int:
    buckets = max(1, -(-rows // _LOAD))
    return buckets if buckets < 2 * _REGION_BUCKETS else -(-buckets // _REGION_BUCKETS) * _REGION_BUCKETS


def seed_of(index: Tensor) -> int:
    """Return the seed of an index's hash; 0: it has none. On CUDA it waits for the device."""
    return 0 if index.dim() == 2 else int(index[-_BUCKET_WORDS:].view(torch.int64)[0])


def unforeseen() -> int:
    """Return an unpredictable random seed; never 0."""
    return int.from_bytes(os.urandom(8), "little", signed=True) | 1
