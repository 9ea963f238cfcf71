"""
Benchmark rows of prebatched files: reading a Wide & Deep model's examples, beside tf.data on TFRecords of them.

A row of a file has a label, 10 floats and 40 ids of tables with 400,000 rows, three of them ten times. All sides sum
every value of every column in a warm page cache, and read as fast as they can. TensorFlow maps in parallel and
prefetches. Ours sums on one thread, beside the threads that decode.
"""

from __future__ import annotations

import math
import tempfile
import weakref
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchsparse_rec.data import PrebatchedDataset, to_record_batch, write_prebatched, write_tfrecord

from .ids import EXPONENT, scatter, uniform_ids
from .rows import Call, Case, Fact, Make, Options, Row, tensorflow

ROWS_FULL, ROWS_QUICK, BATCH_FULL, BATCH_QUICK = 1_000_000, 2_000, 16_384, 512
TABLE_ROWS, FLOATS, SINGLE, TENFOLD = 400_000, 10, 37, 3

#: For each distribution of ids, how many times the bytes of TensorFlow's prebatched file the compressed one may take.
SPREADS = {"uniform": 0.85, "zipf": 0.95}
EXAMPLES, BATCHES = "tf.data, an example a record", "tf.data, a batch a record"


@cache
def _distribution() -> Tensor:
    """Return Zipf's distribution function over the rows of a table."""
    weights = torch.arange(1, TABLE_ROWS + 1, dtype=torch.float64).pow_(-EXPONENT)
    weights.cumsum_(0)
    return weights.div_(weights[-1].clone())


def draw_ids(spread: str, count: int, seed: int) -> Tensor:
    """Draw ``count`` ids. Popular ids of ``zipf`` lie scattered over the table."""
    if spread == "uniform":
        return uniform_ids(count, TABLE_ROWS, "cpu", seed)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(count, dtype=torch.float64, generator=generator)
    ranks = torch.searchsorted(_distribution(), drawn).clamp_max_(TABLE_ROWS - 1)
    return scatter(ranks, TABLE_ROWS)


def draw_batches(spread: str, rows: int, batch: int) -> Iterator[dict[str, Tensor]]:
    """Yield the rows a batch at a time, the same ones at each call."""
    for number, begin in enumerate(range(0, rows, batch)):
        size = min(batch, rows - begin)
        generator = torch.Generator().manual_seed(number)
        columns = {"label": torch.randint(0, 2, (size,), generator=generator)}
        for i in range(FLOATS):
            columns[f"f{i}"] = torch.randn(size, generator=generator)
        for i in range(SINGLE + TENFOLD):
            ids = draw_ids(spread, size * (1 if i < SINGLE else 10), 1000 * (number + 1) + i)
            columns[f"c{i}"] = ids if i < SINGLE else ids.view(size, 10)
        yield columns


class Files:
    """Files of the same rows in each format. Their folder is removed with this object."""

    def __init__(self, spread: str, options: Options) -> None:
        self.spread, self.options = spread, options
        self.rows, self.batch = options.size(ROWS_FULL, ROWS_QUICK), options.size(BATCH_FULL, BATCH_QUICK)
        folder = tempfile.TemporaryDirectory(prefix="torchsparse_rec-")
        weakref.finalize(self, folder.cleanup)
        self.folder = Path(folder.name)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the files' rows as batches."""
        return draw_batches(self.spread, self.rows, self.batch)

    def _ours(self, name: str, compression: Literal["zstd"] | None) -> Path:
        path = self.folder / name
        write_prebatched(path, self.batches(), compression=compression, progress=False)
        return path

    @cached_property
    def mapped(self) -> Path:
        """Our uncompressed file."""
        return self._ours("mapped.arrow", None)

    @cached_property
    def compressed(self) -> Path:
        """Our compressed file: byte planes and zstd."""
        return self._ours("compressed.arrow", "zstd")

    @cached_property
    def batch_records(self) -> Path:
        """TensorFlow's prebatched file: a serialized Example for each batch."""
        return self._records("batches.tfrecord", prebatched=True)

    @cached_property
    def example_records(self) -> Path:
        """TensorFlow's file with a serialized Example for each row."""
        return self._records("examples.tfrecord", prebatched=False)

    def _records(self, name: str, prebatched: bool) -> Path:
        """Write a TFRecord file by this library, in seconds. TensorFlow's own file of these rows has as many bytes."""
        path = self.folder / name
        write_tfrecord(path, (to_record_batch(columns) for columns in self.batches()), prebatched=prebatched)
        return path


# ---- Reading --------------------------------------------------------------------------------------------------------

Sums = tuple[int, float]


def our_sums(dataset: PrebatchedDataset) -> Sums:
    """Return the sum of all integers and the sum of all floats."""
    threads = torch.get_num_threads()
    # Columns are too small for two threads to be faster, and on a busy machine threads wait long for one another.
    torch.set_num_threads(1)
    try:
        return _sums(dataset)
    finally:
        torch.set_num_threads(threads)


def _sums(dataset: PrebatchedDataset) -> Sums:
    integers: list[Tensor] = []
    floats: list[Tensor] = []
    # torch sums int64. Without this buffer each column would take new memory.
    wide = torch.empty(10 * BATCH_FULL, dtype=torch.int64)
    for batch in dataset:
        for column in batch.values():
            if column.dtype.is_floating_point:
                floats.append(column.sum())
            else:
                integers.append(wide[: column.numel()].copy_(column.view(-1)).sum())
    return int(torch.stack(integers).sum()), float(torch.stack(floats).sum(dtype=torch.float64))


def tensorflow_sums(files: Files, peer: str) -> Call:
    """
    Return a call of tf.data at its best, in one graph from the file to the sums.

    Records of batches are parsed in parallel and prefetched. Records of examples are read in parallel pieces of the
    file's order, parsed a batch at a time by the vectorised parser, and prefetched.
    """
    tf = tensorflow(files.options)
    threads, batch = files.options.threads, files.batch
    ragged = tf.io.RaggedFeature
    if peer == BATCHES:
        features: dict[str, Any] = {"label": ragged(tf.int64)}
        features |= {f"f{i}": ragged(tf.float32) for i in range(FLOATS)}
        features |= {f"c{i}": ragged(tf.int64) for i in range(SINGLE + TENFOLD)}
        records = tf.data.TFRecordDataset(str(files.batch_records), buffer_size=8 << 20)
        parsed = records.map(lambda x: tf.io.parse_single_example(x, features), num_parallel_calls=threads)
    else:
        fixed = tf.io.FixedLenFeature
        features = {"label": fixed([], tf.int64)}
        features |= {f"f{i}": fixed([], tf.float32) for i in range(FLOATS)}
        features |= {f"c{i}": fixed([] if i < SINGLE else [10], tf.int64) for i in range(SINGLE + TENFOLD)}
        records = tf.data.TFRecordDataset(str(files.example_records), buffer_size=8 << 20).batch(batch)
        parsed = records.map(lambda x: tf.io.parse_example(x, features), num_parallel_calls=threads)
    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    options.deterministic = True

    def summed(columns: dict[str, Any]) -> tuple[Any, Any]:
        integers = tf.add_n([tf.reduce_sum(x) for x in columns.values() if x.dtype == tf.int64])
        floats = tf.add_n([tf.reduce_sum(x) for x in columns.values() if x.dtype == tf.float32])
        return integers, tf.cast(floats, tf.float64)

    dataset = parsed.prefetch(threads).with_options(options)

    @tf.function
    def run() -> Any:
        def add(state: Any, columns: Any) -> Any:
            integers, floats = summed(columns)
            return state[0] + integers, state[1] + floats

        return dataset.reduce((tf.constant(0, tf.int64), tf.constant(0.0, tf.float64)), add)

    return run


def check(files: Files) -> None:
    """Compare the sums of all files."""
    expected_integers, expected_floats = 0, 0.0
    for columns in files.batches():
        for column in columns.values():
            if column.dtype.is_floating_point:
                expected_floats += float(column.sum(dtype=torch.float64))
            else:
                expected_integers += int(column.sum())
    found = {"mapped": our_sums(PrebatchedDataset(files.mapped))}
    found["compressed"] = our_sums(PrebatchedDataset(files.compressed))
    for name, (integers, floats) in found.items():
        assert integers == expected_integers, f"{name}: the integers sum to {integers}, expected {expected_integers}"
        bound = 1e-3 * math.sqrt(files.rows * FLOATS)
        assert abs(floats - expected_floats) < bound, f"{name}: the floats sum to {floats}, expected {expected_floats}"


# ---- Rows -----------------------------------------------------------------------------------------------------------


def row(spread: str, compressed: bool) -> Row:
    """Make a benchmark row: reading one of our files beside TensorFlow's two."""
    name = "compressed" if compressed else "mapped"

    def build(options: Options) -> Case:
        files = Files(spread, options)

        def ours() -> Call:
            path = files.compressed if compressed else files.mapped
            dataset = PrebatchedDataset(path, threads=options.threads)
            our_sums(dataset)  # Checksums are left out of the time: they are compared once.
            return lambda: our_sums(dataset)

        def peer(kind: str) -> Make:
            return lambda: tensorflow_sums(files, kind)

        def facts() -> list[Fact]:
            size = (files.compressed if compressed else files.mapped).stat().st_size
            found = [Fact("size", size / 1e6, "MB")]
            if "batch_records" in vars(files):
                theirs = files.batch_records.stat().st_size
                limit = SPREADS[spread] * 100 if compressed and not options.quick else None
                found.append(Fact("size of TensorFlow's", theirs / 1e6, "MB"))
                found.append(Fact("size, of TensorFlow's", 100 * size / theirs, "%", limit))
            return found

        return Case(
            ours,
            {kind: peer(kind) for kind in (EXAMPLES, BATCHES)},
            lambda: check(files),
            samples=files.rows,
            sizes=f"{files.rows:,} rows, batch {files.batch:,}",
            facts=facts,
        )

    targets = {EXAMPLES: 15.0, BATCHES: 1.5} if compressed else {EXAMPLES: 30.0, BATCHES: 3.0}
    return Row(f"prebatched/{name}-{spread}", f"read and sum a {name} prebatched file, {spread} ids", build, targets)


ROWS = [row(spread, compressed) for spread in SPREADS for compressed in (False, True)]
