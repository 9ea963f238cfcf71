"""
Lookups in LMDB and RocksDB by themselves: the cost for a table that kept all its rows in such an engine.

``python -m benchmarks.tiers KEYS RECORD_BYTES [LMDB|RocksDB]`` prints their rows a second.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .ids import zipf_ids
from .interrupt import run_command
from .rows import UnavailableError

# How many rows are written in one transaction while an engine is filled.
FILL = 1 << 16
# How many ids a batch has.
BATCH = 65_536

# Reads the rows of ids, uint8 [N, record_bytes].
MultiGet = Callable[[Tensor], Tensor]


def _key_list(ids: Tensor) -> list[bytes]:
    """Return keys of eight bytes in the order of the ids."""
    return (ids.numpy().view(np.uint64) ^ np.uint64(1 << 63)).byteswap().view("V8").tolist()


def rows_of(ids: Tensor, record_bytes: int) -> Tensor:
    """Return the rows of ids: uint8 ``[N, record_bytes]``, whose first eight bytes are the id."""
    rows = torch.zeros(len(ids), record_bytes // 8, dtype=torch.int64)
    rows[:, 0] = ids
    return rows.view(torch.uint8)


def _chunks(keys: int, record_bytes: int) -> Iterator[list[tuple[bytes, bytes]]]:
    """Yield all rows in ascending order of their ids ``[0, keys)``, which both engines store fastest."""
    for begin in range(0, keys, FILL):
        ids = torch.arange(begin, min(begin + FILL, keys))
        records = rows_of(ids, record_bytes).numpy().view(f"V{record_bytes}").ravel().tolist()
        yield list(zip(_key_list(ids), records, strict=True))


def _joined(values: list[bytes], record_bytes: int) -> Tensor:
    # The bytes are copied because frombuffer's tensors of bytes are read-only.
    return torch.from_numpy(np.frombuffer(b"".join(values), np.uint8).reshape(-1, record_bytes).copy())


@contextmanager
def plain_lmdb(keys: int, record_bytes: int, folder: str | None = None) -> Iterator[MultiGet]:
    """Fill LMDB with rows for the ids ``[0, keys)``, and yield its multi-get of ascending ids."""
    lmdb = _module("lmdb")
    with tempfile.TemporaryDirectory(dir=folder) as path:
        with lmdb.open(path, map_size=keys * (record_bytes + 64) * 2 + (1 << 26), sync=False, readahead=False) as env:
            for chunk in _chunks(keys, record_bytes):
                with env.begin(write=True) as transaction:
                    transaction.cursor().putmulti(chunk, append=True)

            def multi_get(ids: Tensor) -> Tensor:
                with env.begin() as transaction:
                    found = transaction.cursor().getmulti(_key_list(ids))
                return _joined([value for _, value in found], record_bytes)

            yield multi_get


@contextmanager
def plain_rocksdb(keys: int, record_bytes: int, folder: str | None = None) -> Iterator[MultiGet]:
    """Fill RocksDB as LMDB (one level, uncompressed, Bloom filters, everything cached), and yield its multi-get."""
    rocksdict = _module("rocksdict")
    table = rocksdict.BlockBasedOptions()
    table.set_bloom_filter(10, False)
    table.set_block_cache(rocksdict.Cache(keys * (record_bytes + 64) * 2 + (1 << 26)))
    options = rocksdict.Options(raw_mode=True)
    options.set_block_based_table_factory(table)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.increase_parallelism(2)
    unlogged = rocksdict.WriteOptions()
    unlogged.disable_wal = True
    with tempfile.TemporaryDirectory(dir=folder) as path:
        database = rocksdict.Rdict(path, options)
        try:
            for chunk in _chunks(keys, record_bytes):
                batch = rocksdict.WriteBatch(raw_mode=True)
                for key, value in chunk:
                    batch.put(key, value)
                database.write(batch, unlogged)
            database.flush()
            database.compact_range(None, None)
            yield lambda ids: _joined(database.get(_key_list(ids)), record_bytes)
        finally:
            database.close()


ENGINES: dict[str, Callable[..., Any]] = {"LMDB": plain_lmdb, "RocksDB": plain_rocksdb}


def _module(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        raise UnavailableError(f"{name} is not installed")
    return importlib.import_module(name)


def lookup_all(multi_get: MultiGet, ids: Tensor) -> Tensor:
    """Return the rows of ids in any order. Each occurrence is fetched, sorted first, which suits both engines."""
    order = torch.from_numpy(ids.numpy().argsort())
    rows = multi_get(ids[order])
    return torch.empty_like(rows).index_copy_(0, order, rows)


def lookup_distinct(multi_get: MultiGet, ids: Tensor) -> Tensor:
    """Return the rows of ids in any order. Each distinct id is fetched once."""
    distinct, inverse = np.unique(ids.numpy(), return_inverse=True)
    return multi_get(torch.from_numpy(distinct)).index_select(0, torch.from_numpy(inverse))


LOOKUPS = {"each occurrence": lookup_all, "distinct ids": lookup_distinct}


def zipf_batches(keys: int, count: int, batch: int = BATCH) -> list[Tensor]:
    """Draw batches of ids in ``[0, keys)`` by Zipf's law with exponent 1.05; popular ids are scattered."""
    return list(zipf_ids(count * batch, keys, "cpu").split(batch))


def rows_per_second(lookup: Callable[[Tensor], Tensor], batches: list[Tensor], warm: int) -> float:
    """Return the ids looked up per second in the median batch of those after the first ``warm``."""
    seconds = []
    for ids in batches:
        start = time.perf_counter()
        lookup(ids)
        seconds.append(time.perf_counter() - start)
    return len(batches[0]) / float(np.median(seconds[warm:]))


def main() -> None:
    """Fill each engine, check a batch, and time its lookups."""
    torch.set_num_threads(2)
    keys, record_bytes = int(float(sys.argv[1])), int(sys.argv[2])
    batches = zipf_batches(keys, 40)
    distinct = sum(len(ids.unique()) for ids in batches) / len(batches)
    print(f"{keys:,} keys of {record_bytes} bytes; batches of {BATCH:,} ids, {distinct:,.0f} of them distinct")
    for name in sys.argv[3:] or ENGINES:
        start = time.perf_counter()
        with ENGINES[name](keys, record_bytes, os.environ.get("TMPDIR")) as multi_get:
            print(f"{name}: filled in {time.perf_counter() - start:.0f} s", flush=True)
            for which, lookup in LOOKUPS.items():
                assert torch.equal(lookup(multi_get, batches[0]), rows_of(batches[0], record_bytes))
                rate = rows_per_second(lambda ids, lookup=lookup: lookup(multi_get, ids), batches, 20)  # type: ignore[misc]
                print(f"{name}: {which}: {rate / 1e6:.2f} M rows/s", flush=True)


if __name__ == "__main__":
    run_command(main)
