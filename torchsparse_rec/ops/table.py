"""
Family ``table``: an index, held in tensors, from keys of any range to the rows of a table that grows.

Contract and layout: csrc/table.h. Kernels: csrc/cpu/table.cpp, csrc/cpu/table_rows.cpp, csrc/cuda/table*.cu. The rows
themselves: table_rows.py. These are the parts that :class:`torchsparse_rec.nn.EmbeddingVariable` is made of; most
programs want the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .autograd import not_differentiable

__all__ = [
    "count_min_sketch_",
    "table_erase_",
    "table_find",
    "table_find_or_insert_",
    "table_rehash",
    "tables_find_or_insert_",
]

_ops = torch.ops.torchsparse_rec


class InsertedRows(NamedTuple):
    """The result of :func:`table_find_or_insert_`."""

    #: The row of each key, ``[N]`` int64; -1 where it is missing and was not inserted.
    rows: Tensor
    #: At each position that inserted its key, the inserted row; elsewhere -1; ``[N]`` int64.
    born: Tensor


def table_find(index: Tensor, entries: Tensor, ids: Tensor) -> Tensor:
    """
    Look up the rows of keys in a table's index; -1 where a key is missing.

    Args:
        index: int32, made by :func:`table_rehash`.
        entries: ``[rows, 2]`` int64: each row's key and ``version * 2**32 + frequency``, -1 where it is free.
        ids: the keys, ``[N]``, int32 or int64.

    Returns:
        ``[N]`` int64: rows, -1 where a key is missing.

    Raises:
        ValueError: wrong shapes, dtypes or layouts.

    On CUDA nothing waits for the device.

    Source: ``tf.lookup.experimental.MutableHashTable.lookup``.

    Example:
        >>> entries, counters = torch.full((4, 2), -1), torch.zeros(8, dtype=torch.int64)
        >>> index = table_rehash(entries, counters, 1)
        >>> free = torch.empty(0, dtype=torch.int32)
        >>> table_find_or_insert_(index, entries, counters, free, torch.tensor([70, -5, 70])).rows
        tensor([0, 1, 0])
        >>> table_find(index, entries, torch.tensor([-5, 8]))
        tensor([ 1, -1])
    """
    return _ops.table_find.default(index, entries, ids)


def table_find_or_insert_(
    index: Tensor,
    entries: Tensor,
    counters: Tensor,
    free_rows: Tensor,
    ids: Tensor,
    *,
    allowed: Tensor | None = None,
    frequencies: Tensor | None = None,
    version: int = -1,
    count: bool = False,
) -> InsertedRows:
    """
    Look up the rows of keys in a table's index, and insert the keys that are missing, in place.

    The k-th new key, in the order of first appearance, gets the k-th free row: first from ``free_rows``, then from the
    rows never used. The result and the state do not depend on the number of threads.

    Args:
        index: the argument of :func:`table_find`, written.
        entries: the argument of :func:`table_find`, written.
        counters: ``[8]`` int64, written: the numbers of rows ever used, of ``free_rows`` taken, of times that a key
            found no room, and of keys inserted; the rest is the caller's.
        free_rows: ``[F]`` int32, rows below ``counters[0]`` that are free, ascending.
        ids: the keys, ``[N]``, int32 or int64.
        allowed: ``[N]`` bool: at which positions a missing key is inserted. Default: at all.
        frequencies: ``[N]`` int32: the first frequency of a row that this position inserts. Default: 0. ``count`` adds
            to it.
        version: the new version of all rows that are found or inserted; -1 (default): rows keep theirs, inserted ones
            have 0.
        count: whether every occurrence adds one to its row's frequency. Default False.

    Returns:
        A tuple ``(rows, born)``, ``[N]`` int64 each: the row of each key, -1 where it is missing and was not inserted;
        and the inserted row at each position that inserted its key, elsewhere -1.

    Raises:
        ValueError: wrong shapes, dtypes, layouts or counters; tensors that share memory.

    On CUDA nothing waits for the device. A key that finds no room has row -1, and is counted in ``counters[2]``.

    Source: ``tf.lookup.experimental.DenseHashTable.insert``, DeepRec's ``EmbeddingVariable``.

    Example:
        >>> entries, counters = torch.full((4, 2), -1), torch.zeros(8, dtype=torch.int64)
        >>> index = table_rehash(entries, counters, 1)
        >>> free = torch.empty(0, dtype=torch.int32)
        >>> table_find_or_insert_(index, entries, counters, free, torch.tensor([70, -5, 70]))
        InsertedRows(rows=tensor([0, 1, 0]), born=tensor([ 0,  1, -1]))
    """
    rest = (allowed, frequencies, version, count)
    return InsertedRows(*_ops.table_find_or_insert_.default(index, entries, counters, free_rows, ids, *rest))


def tables_find_or_insert_(
    index: Sequence[Tensor],
    entries: Sequence[Tensor],
    counters: Sequence[Tensor],
    free_rows: Sequence[Tensor],
    ids: Tensor,
    begins: Sequence[int],
    ends: Sequence[int],
    *,
    versions: Sequence[int],
    count: bool = False,
) -> InsertedRows:
    """
    Look up and insert the keys of several tables in one call, in place: each table's keys are a part of ``ids``.

    Args:
        index: the index of each table, as of :func:`table_find_or_insert_`; no two may be the same.
        entries: the entries of each table, likewise.
        counters: the counters of each table, likewise.
        free_rows: the free rows of each table, likewise.
        ids: the keys of all tables, ``[N]``, int32 or int64.
        begins: the start of each table's keys: parts ascend and do not overlap.
        ends: the end of each table's keys.
        versions: the version of each table, as of :func:`table_find_or_insert_`.
        count: the argument of :func:`table_find_or_insert_`.

    Returns:
        A tuple ``(rows, born)``, as of :func:`table_find_or_insert_`; outside of all parts ``rows`` has the ids, and
        ``born`` -1.

    Raises:
        ValueError: wrong shapes, dtypes, layouts or counters; ``begins`` and ``ends`` that are no ascending
            parts of ``ids``; tensors that share memory, as where a table is named twice.

    On CUDA nothing waits for the device.

    Example:
        >>> tables = []
        >>> for _ in range(2):
        ...     entries, counters = torch.full((4, 2), -1), torch.zeros(8, dtype=torch.int64)
        ...     free = torch.empty(0, dtype=torch.int32)
        ...     tables.append((table_rehash(entries, counters, 1), entries, counters, free))
        >>> ids = torch.tensor([70, 70, 5, 8, 70])
        >>> tables_find_or_insert_(*zip(*tables), ids, [0, 3], [2, 5], versions=[-1, -1]).rows
        tensor([0, 0, 5, 0, 1])
    """
    lists = list(index), list(entries), list(counters), list(free_rows)
    return InsertedRows(
        *_ops.tables_find_or_insert_.default(*lists, ids, list(begins), list(ends), list(versions), count)
    )


def table_erase_(index: Tensor, entries: Tensor, ids: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """
    Erase keys from a table's index, in place: their rows become free.

    Args:
        index: the argument of :func:`table_find`, written.
        entries: the argument of :func:`table_find`, written.
        ids: the keys, ``[N]``, int32 or int64; missing and repeated ones are no error.
        mask: ``[N]`` bool: which keys to erase. Default: all.

    Returns:
        ``[N]`` int64: the rows that have become free; -1 where there was nothing to erase.

    Raises:
        ValueError: wrong shapes, dtypes or layouts; tensors that share memory.

    On CUDA nothing waits for the device.

    Source: ``tf.lookup.experimental.MutableHashTable.remove``.

    Example:
        >>> entries, counters = torch.full((4, 2), -1), torch.zeros(8, dtype=torch.int64)
        >>> index = table_rehash(entries, counters, 1)
        >>> free = torch.empty(0, dtype=torch.int32)
        >>> _ = table_find_or_insert_(index, entries, counters, free, torch.tensor([70, -5]))
        >>> table_erase_(index, entries, torch.tensor([-5, 8]))
        tensor([ 1, -1])
    """
    return _ops.table_erase_.default(index, entries, ids, mask)


def table_rehash(entries: Tensor, counters: Tensor, buckets: int, *, seed: int = 0) -> Tensor:
    """
    Make a new index of all keys of a table, of a given number of buckets.

    Without a seed, a reader of this code can tell where a key belongs, and choose keys that fill a part of the index.
    With a secret seed nobody can.

    Args:
        entries: the argument of :func:`table_find`.
        counters: the argument of :func:`table_find_or_insert_`: keys that find no room in the index are counted in its
            third.
        buckets: the number of buckets, of 12 slots each; 9 keys a bucket is a good load.
        seed: the hash's seed, 64 bits, kept in the index. Default 0: the hash of all tables without a seed.

    Returns:
        ``[buckets, 16]`` int32; with a seed ``[(buckets + 1) * 16]``.

    Raises:
        ValueError: wrong shapes, dtypes or layouts; buckets not in [1, 2^40); tensors that share memory.

    On CUDA nothing waits for the device.

    Example:
        >>> entries, counters = torch.tensor([[70, 0], [0, -1], [-5, 0]]), torch.zeros(8, dtype=torch.int64)
        >>> table_find(table_rehash(entries, counters, 2), entries, torch.tensor([-5, 70, 0]))
        tensor([ 2,  0, -1])
    """
    return _ops.table_rehash.default(entries, counters, buckets, seed)


def count_min_sketch_(
    sketch: Tensor, ids: Tensor, *, mask: Tensor | None = None, num_hashes: int = 4, count: bool = True
) -> Tensor:
    """
    Count keys in a counting Bloom filter, in place, and return how often each has occurred at most.

    Args:
        sketch: ``[W]``, int8, int16, int32 or int64, at first zeros: the counters, written. Full ones stay unchanged.
        ids: the keys, ``[N]``, int32 or int64.
        mask: ``[N]`` bool: which keys count. Default: all.
        num_hashes: the number of counters of a key, in [1, 64]. Default 4.
        count: whether to add to the counters; False only reads them. Default True.

    Returns:
        ``[N]`` int32: never less than how often the key has been counted, this call included; more with a probability
        of about ``(1 - exp(-num_hashes * distinct / W)) ** num_hashes``. 0 where masked out.

    Raises:
        ValueError: wrong shapes or dtypes; num_hashes outside [1, 64]; tensors that share memory.

    On CUDA nothing waits for the device.

    Source: DeepRec's ``CBFFilter``; Cormode and Muthukrishnan, "An improved data stream summary", 2005.

    Example:
        >>> sketch = torch.zeros(1000, dtype=torch.int32)
        >>> count_min_sketch_(sketch, torch.tensor([7, 8, 7]))
        tensor([2, 1, 2], dtype=torch.int32)
    """
    return _ops.count_min_sketch_.default(sketch, ids, mask, num_hashes, count)


def _rows_fake(index, entries, ids, *rest):
    return ids.new_empty(ids.shape, dtype=torch.int64)


def _inserted_fake(index, entries, counters, free_rows, ids, *rest):
    return ids.new_empty(ids.shape, dtype=torch.int64), ids.new_empty(ids.shape, dtype=torch.int64)


for _name in ("table_find", "table_erase_"):
    torch.library.register_fake(f"torchsparse_rec::{_name}", _rows_fake)
for _name in ("table_find_or_insert_", "tables_find_or_insert_"):
    torch.library.register_fake(f"torchsparse_rec::{_name}", _inserted_fake)


@torch.library.register_fake("torchsparse_rec::table_rehash")
def _(entries, counters, buckets, seed=0):
    shape = (buckets, 16) if seed == 0 else ((buckets + 1) * 16,)
    return entries.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("torchsparse_rec::count_min_sketch_")
def _(sketch, ids, *rest):
    return ids.new_empty(ids.shape, dtype=torch.int32)


not_differentiable("table_find")
