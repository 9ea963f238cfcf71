"""
Benchmark rows of the ``record`` family: TFRecord files of Wide & Deep's rows, read into columns.

A row is a label, 10 floats, 37 ids and 3 features of ten ids. All files lie in the page cache.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torchsparse_rec.data import FixedLenFeature, TFRecordReader, write_tfrecord

from .rows import Call, Case, CudaTargets, Make, Options, Row, tensorflow

FILES = 4
ROWS_OF_A_TABLE = 400_000
FEATURES = {
    "label": FixedLenFeature([], "int64"),
    **{f"float_{i}": FixedLenFeature([], "float32") for i in range(10)},
    **{f"id_{i}": FixedLenFeature([], "int64") for i in range(37)},
    **{f"ids_{i}": FixedLenFeature([10], "int64") for i in range(3)},
}


class Files:
    """Files of random rows. They are removed with this object."""

    def __init__(self, batch_size: int, batches: int, prebatched: bool) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="torchsparse_rec-benchmark-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.paths = [str(self.folder / str(i)) for i in range(FILES)]
        generator = np.random.default_rng(0)
        for path in self.paths:
            write_tfrecord(path, [_batch(generator, batch_size) for _ in range(batches)], prebatched=prebatched)


def _batch(generator: np.random.Generator, rows: int) -> Any:
    import pyarrow as pa

    def column(feature: FixedLenFeature) -> Any:
        if feature.dtype == "float32":
            return pa.array(generator.random(rows, dtype=np.float32))
        ids = pa.array(generator.integers(0, ROWS_OF_A_TABLE, rows * feature.size))
        return pa.FixedSizeListArray.from_arrays(ids, feature.size) if feature.shape else ids

    return pa.record_batch({name: column(feature) for name, feature in FEATURES.items()})


def ours(files: Files, batch_size: int, prebatched: bool) -> Call:
    """Yield every batch of the files, read by this library."""
    reader = TFRecordReader(files.paths, FEATURES, None if prebatched else batch_size, prebatched=prebatched)
    return lambda: sum(batch.num_rows for batch in reader)


def their_batches(tf: Any, files: Files, batch_size: int, prebatched: bool) -> Any:
    """Yield the files' batches by tf.data, parallel wherever it can be: files, batches, parsing, prefetching."""
    auto = tf.data.AUTOTUNE
    rows = [batch_size] if prebatched else []
    types = {"int64": tf.int64, "float32": tf.float32}
    features = {
        name: tf.io.FixedLenFeature([*rows, *feature.shape], types[feature.dtype]) for name, feature in FEATURES.items()
    }
    records = tf.data.TFRecordDataset(files.paths, buffer_size=16 << 20, num_parallel_reads=auto)
    if prebatched:
        parsed = records.map(lambda x: tf.io.parse_single_example(x, features), num_parallel_calls=auto)
    else:
        batches = records.batch(batch_size, num_parallel_calls=auto)
        parsed = batches.map(lambda x: tf.io.parse_example(x, features), num_parallel_calls=auto)
    options = tf.data.Options()
    options.deterministic = False
    return parsed.with_options(options).prefetch(auto)


def theirs(tf: Any, files: Files, batch_size: int, prebatched: bool) -> Call:
    """Read every batch of the files by tf.data."""
    batches = their_batches(tf, files, batch_size, prebatched)
    return lambda: sum(int(batch["label"].shape[0]) for batch in batches)


def sums_of(batches: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the sum of each column, which shows whether two sides have read the same."""
    sums = dict.fromkeys(FEATURES, 0.0)
    for batch in batches:
        for name, values in batch.items():
            sums[name] += float(np.sum(values, dtype=np.float64))
    return sums


def check(files: Files, batch_size: int, prebatched: bool, theirs_too: Callable[[], Any] | None) -> None:
    """Check that as many rows are read as were written, and compare the sums with TensorFlow's."""
    reader = TFRecordReader(files.paths, FEATURES, None if prebatched else batch_size, prebatched=prebatched)
    batches = list(reader)
    assert all(batch.num_rows == batch_size for batch in batches)
    read = sums_of({name: _numbers(batch.column(name)) for name in FEATURES} for batch in batches)
    if theirs_too is not None:
        wanted = sums_of({name: x.numpy() for name, x in batch.items()} for batch in theirs_too())
        assert np.allclose(list(read.values()), list(wanted.values()), rtol=1e-9)


def _numbers(column: Any) -> Any:
    return (column.flatten() if hasattr(column.type, "value_type") else column).to_numpy()


def build(prebatched: bool, options: Options) -> Case:
    """Build files of several batches, of 16,384 rows in full size."""
    batch_size = options.size(16_384, 64)
    files = Files(batch_size, 2 if options.quick else 1, prebatched)
    rows = FILES * batch_size * (2 if options.quick else 1)

    def of_tensorflow() -> Any:
        return their_batches(tensorflow(options), files, batch_size, prebatched)

    def peer() -> Call:
        return theirs(tensorflow(options), files, batch_size, prebatched)

    def checked() -> None:
        has_tensorflow = options.device == "cpu" and importlib.util.find_spec("tensorflow") is not None
        check(files, batch_size, prebatched, of_tensorflow if has_tensorflow else None)

    peers: dict[str, Make] = {"tf.data": peer}
    return Case(
        ours=lambda: ours(files, batch_size, prebatched),
        peers=peers,
        check=checked,
        samples=rows,
        sizes=f"{rows} rows in {FILES} files, batch {batch_size}",
    )


ROWS = [
    Row(
        "record/rows",
        "TFRecord, an example per row, into columns",
        partial(build, False),
        {"tf.data": 3.0},
        cuda=CudaTargets(fastest_peer=None),
    ),
    Row(
        "record/prebatched",
        "TFRecord, an example per batch, into columns",
        partial(build, True),
        cuda=CudaTargets(fastest_peer=None),
    ),
]
