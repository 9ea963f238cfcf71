"""
Benchmark rows of tables that grow: lookups, insertions, training, the SSD tier, saving.

Peers are TensorFlow's hash tables and fixed tables of ours. Keys are random 63-bit integers, rows are random floats.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchsparse_rec import initializers, nn, optim, variable

from . import tiers
from .ids import zipf_ids
from .rows import Call, Case, CudaTargets, Options, Row, tensorflow

KEYS = 1_000_000
DIM = 32
LOOKED_UP = 200_000


def random_keys(n: int) -> Tensor:
    """Draw ``n`` distinct keys."""
    keys = torch.randint(0, 2**63 - 1, (n + n // 8 + 8,), generator=torch.Generator().manual_seed(0))
    return keys.unique()[torch.randperm(len(keys.unique()), generator=torch.Generator().manual_seed(1))][:n]


def filled(keys: Tensor, values: Tensor, device: str) -> nn.EmbeddingVariable:
    """Make a table with the given rows."""
    table = nn.EmbeddingVariable(values.shape[1], capacity=len(keys), device=device)
    table.insert(keys, values)
    return table


def _their_table(tf: Any, name: str, dim: int, keys: int) -> Any:
    if name == "DenseHashTable":
        # This is the number of buckets to which the table would grow at its limit of the load, 0.8: it does not grow
        # while it is filled.
        buckets = 1 << (int(keys / 0.8)).bit_length()
        return tf.lookup.experimental.DenseHashTable(
            tf.int64, tf.float32, default_value=tf.zeros(dim), empty_key=-1, deleted_key=-2, initial_num_buckets=buckets
        )
    return tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, default_value=tf.zeros(dim))


def build_lookup(options: Options) -> Case:
    """Build a lookup of keys that the table has, in random order."""
    keys = random_keys(options.size(KEYS, 2000))
    values = torch.rand(len(keys), DIM)
    ids = keys[torch.randint(0, len(keys), (options.size(LOOKED_UP, 500),))]
    table = filled(keys, values, options.device)
    here = ids.to(options.device)

    def theirs(name: str) -> Call:
        tf = tensorflow(options)
        peer = _their_table(tf, name, DIM, len(keys))
        peer.insert(tf.constant(keys.numpy()), tf.constant(values.numpy()))
        wanted = tf.constant(ids.numpy())
        return lambda: peer.lookup(wanted)

    def check() -> None:
        place = {int(key): k for k, key in enumerate(keys)}
        wanted = values[torch.tensor([place[int(key)] for key in ids])]
        assert torch.equal(table.lookup(here).cpu(), wanted)

    return Case(
        ours=lambda: lambda: table.lookup(here),
        peers={name: partial(theirs, name) for name in ("DenseHashTable", "MutableHashTable")},
        check=check,
        samples=len(ids),
        sizes=f"{len(ids)} of {len(keys)} keys, dim {DIM}",
        bytes_moved=len(ids) * (2 * DIM * 4 + 64 + 16 + 8),
    )


def build_insert(options: Options) -> Case:
    """Build the insertion of given rows into a new table."""
    keys = random_keys(options.size(KEYS, 2000))
    values = torch.rand(len(keys), DIM)
    here = keys.to(options.device), values.to(options.device)

    def ours() -> Call:
        def run() -> nn.EmbeddingVariable:
            table = nn.EmbeddingVariable(DIM, device=options.device)
            table.insert(*here)
            return table

        return run

    def theirs(name: str) -> Call:
        tf = tensorflow(options)
        its_keys, its_values = tf.constant(keys.numpy()), tf.constant(values.numpy())

        def run() -> Any:
            table = _their_table(tf, name, DIM, len(keys))
            table.insert(its_keys, its_values)
            # TensorFlow would keep the table, and memory would run out.
            weakref.finalize(table, tf.raw_ops.DestroyResourceOp, resource=table.resource_handle)
            return table

        return run

    return Case(
        ours=ours,
        peers={name: partial(theirs, name) for name in ("DenseHashTable", "MutableHashTable")},
        check=lambda: _check_inserted(ours()(), keys, values),
        samples=len(keys),
        sizes=f"{len(keys)} keys, dim {DIM}",
    )


def _check_inserted(table: nn.EmbeddingVariable, keys: Tensor, values: Tensor) -> None:
    assert table.total_count() == len(keys)
    assert torch.equal(table.lookup(keys.to(table.weight.device)).cpu(), values)


def build_first_lookup(options: Options) -> Case:
    """Build the first lookup in training, of keys that are all new, beside the insertion of given rows."""
    keys = random_keys(options.size(KEYS, 2000)).to(options.device)
    values = torch.rand(len(keys), DIM, device=options.device)

    def first() -> Tensor:
        with torch.no_grad():
            return nn.EmbeddingVariable(DIM, initializer=initializers.Uniform(-0.1, 0.1), device=options.device)(keys)

    def insert() -> nn.EmbeddingVariable:
        table = nn.EmbeddingVariable(DIM, device=options.device)
        table.insert(keys, values)
        return table

    def check() -> None:
        assert len(first()) == len(keys) and bool((first().abs() <= 0.1).all())

    return Case(
        ours=lambda: first,
        peers={"insert of given rows": lambda: insert},
        check=check,
        samples=len(keys),
        sizes=f"{len(keys)} keys, dim {DIM}",
    )


def build_step(options: Options) -> Case:
    """Build a training step of one table: Adagrad, fused, 65,536 Zipf ids."""
    rows, batch = options.size(KEYS, 2000), options.size(65_536, 256)
    keys = random_keys(rows)
    places = [zipf_ids(batch, rows, "cpu", seed=k) for k in range(8)]

    def step_of(table: torch.nn.Module, batches: list[Tensor]) -> Call:
        optimizer = optim.Adagrad(table.parameters(), lr=0.01, in_backward=True)
        turn = 0

        def run() -> None:
            nonlocal turn
            turn += 1
            optimizer.zero_grad()
            table(batches[turn % len(batches)]).backward(torch.ones((), device=options.device).expand(batch, DIM))
            optimizer.step()

        return run

    def ours() -> Call:
        table = nn.EmbeddingVariable(DIM, capacity=rows, device=options.device, grad_mode="fused")
        table.insert(keys.to(options.device), torch.rand(rows, DIM, device=options.device))
        return step_of(table, [keys[p].to(options.device) for p in places])

    def fixed() -> Call:
        table = nn.Embedding(rows, DIM, device=options.device, grad_mode="fused")
        return step_of(table, [p.to(options.device) for p in places])

    return Case(
        ours=ours,
        peers={"fixed table": fixed},
        check=lambda: ours()(),
        samples=batch,
        sizes=f"{rows} keys, dim {DIM}, batch {batch}",
    )


def build_ssd(engine: str, options: Options) -> Case:
    """Build lookups of Zipf ids in a table with a tenth of its rows in memory, beside an engine with all rows."""
    keys, dim = options.size(20_000_000, 20_000), 16
    batch = options.size(tiers.BATCH, 512)
    folder = Path(tempfile.mkdtemp(prefix="torchsparse_rec-benchmark-"))
    ids = [zipf_ids(batch, keys, "cpu", seed=k, exponent=1.05) for k in range(8)]

    def ours() -> Call:
        hot = (keys // 10) * (4 * dim + 24)
        option = variable.EmbeddingVariableOption(
            storage_option=variable.StorageOption("DRAM_SSD", storage_path=str(folder), storage_size=[hot])
        )
        table = nn.EmbeddingVariable(dim, ev_option=option, capacity=1024)
        weakref.finalize(table, shutil.rmtree, folder, ignore_errors=True)
        for begin in range(0, keys, 1 << 19):
            some = torch.arange(begin, min(begin + (1 << 19), keys))
            table.insert(some, _row_values(some, dim))
        with torch.no_grad():
            for k in range(64):  # Lookups move the rows into the tiers where training would have them.
                table(zipf_ids(batch, keys, "cpu", seed=100 + k, exponent=1.05))
                table.global_step += 1
        turn = 0

        def run() -> Tensor:
            nonlocal turn
            turn += 1
            return table.lookup(ids[turn % len(ids)])

        assert torch.equal(table.lookup(ids[0]), _row_values(ids[0], dim))
        return run

    def theirs() -> Call:
        opened = tiers.ENGINES[engine](keys, 4 * dim)
        multi_get = opened.__enter__()
        turn = 0

        def run() -> Tensor:
            nonlocal turn
            turn += 1
            return tiers.lookup_all(multi_get, ids[turn % len(ids)])

        weakref.finalize(run, opened.__exit__, None, None, None)
        return run

    return Case(
        ours=ours,
        peers={engine: theirs},
        check=lambda: None,
        samples=batch,
        sizes=f"{keys} keys, a tenth in memory, dim {dim}, batch {batch}, Zipf 1.05",
    )


def _row_values(keys: Tensor, dim: int) -> Tensor:
    return keys.float().unsqueeze(1) + torch.arange(dim)


def build_delta(options: Options) -> Case:
    """Build a delta of a hundredth of the rows, beside a full checkpoint. The time is how long training waits."""
    rows, dim = options.size(10_000_000, 20_000), 16
    folder = Path(tempfile.mkdtemp(prefix="torchsparse_rec-benchmark-"))
    table = nn.EmbeddingVariable(dim, capacity=rows, device=options.device)
    weakref.finalize(table, shutil.rmtree, folder, ignore_errors=True)
    for begin in range(0, rows, 1 << 20):
        some = torch.arange(begin, min(begin + (1 << 20), rows), device=options.device)
        table.insert(some, torch.rand(len(some), dim, device=options.device))
    optimizer = optim.Adagrad(table.parameters(), lr=0.01)

    def change() -> None:
        table(torch.randint(0, rows, (rows // 100,), device=options.device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    change()
    table.save(folder, keep=1)

    def delta() -> Call:
        change()

        def run() -> None:
            table.save_delta(folder, keep=1)
            change()

        return run

    return Case(
        ours=delta,
        peers={"full save": lambda: lambda: table.save(folder, keep=1)},
        check=lambda: None,
        samples=rows // 100,
        sizes=f"{rows} rows, dim {dim}, Adagrad",
    )


def row(name: str, what: str, build: Callable[[Options], Case], targets: dict[str, float]) -> Row:
    """Make a benchmark row, which on a GPU has no peer to be faster than."""
    return Row(f"embedding_variable/{name}", what, build, targets, CudaTargets(fastest_peer=None))


def ssd_row(engine: str) -> Row:
    """Make a benchmark row beside an engine that has all rows."""
    what = f"rows of which a tenth is in memory, against {engine}"
    return row(f"ssd-{engine.lower()}", what, partial(build_ssd, engine), {engine: 5.0})


_DELTA = "delta of a hundredth of the rows, and the step that changes them"
ROWS = [
    row("lookup", "lookup of present keys", build_lookup, {"DenseHashTable": 2.0}),
    row("insert", "a table made and filled", build_insert, {"DenseHashTable": 2.0}),
    row("first-lookup", "first lookup of new keys, initial rows included", build_first_lookup, {}),
    row("step", "training step, against a fixed table", build_step, {"fixed table": 1 / 1.4}),
    row("delta", _DELTA, build_delta, {"full save": 20.0}),
    ssd_row("LMDB"),
    ssd_row("RocksDB"),
]
