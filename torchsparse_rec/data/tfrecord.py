"""Read and write TFRecord files of ``tf.train.Example`` messages, without TensorFlow."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from .. import ops
from ..files import PathLike
from ..typing import RecordCompression, ShardBy
from ._arrow import arrow
from ._lists import with_lists
from ._rows import check_known, path_list, rebatched
from ._tfrecord_ahead import ahead, mapped
from ._tfrecord_blocks import Records, blocks
from ._tfrecord_features import Feature, FixedLenFeature, VarLenFeature, arrow_schema, checked_features, to_array
from ._tfrecord_infer import MalformedError, features_of, infer, infer_prebatched
from ._tfrecord_prebatched import by_rows, check_features, whole_columns
from ._tfrecord_records import check_text, joined, parse
from ._tfrecord_writer import TFRecordWriter, write_tfrecord
from .errors import DataError

if TYPE_CHECKING:
    import pyarrow

__all__ = [
    "FixedLenFeature",
    "TFRecordReader",
    "TFRecordWriter",
    "VarLenFeature",
    "infer_features",
    "read_tfrecord",
    "write_tfrecord",
]

#: The default number of rows of a batch.
BATCH_SIZE = 16_384
#: The bytes of a file that are read at once.
_CHUNK = 32 << 20
#: The most batches that are parsed at once: each takes memory.
_MOST_THREADS = 8
_COMPRESSIONS = ("auto", None, "gzip", "zlib")


class TFRecordReader:
    """
    Reads TFRecord files of examples as record batches.

    Every iteration begins with the first record. Lengths and data are compared with their checksums. The records of all
    files are one stream: a batch may have rows of two files. One thread reads, decompresses and checks the next
    records. Other threads, as many as torch may use but eight at most, parse one batch each before it is asked for.

    Args:
        paths: a file, or several that are read in order.
        features: a mapping from the names of the features to read to :class:`FixedLenFeature`, :class:`VarLenFeature`
            or TensorFlow's specifications. Default None: all that :func:`infer_features` finds in the first file.
        batch_size: rows of a batch; the last may have fewer. Default None: 16,384, or with ``prebatched`` as stored.
        prebatched: whether a record holds a whole batch: see :class:`TFRecordWriter`. Default False.
        compression: ``"gzip"``, ``"zlib"``, None, or ``"auto"`` (default): by each file's first bytes.
        verify: whether to compare the checksums. Default True. Lengths must fit the file, and messages must be
            Examples, in any case.
        num_shards, index: the number of shards and this one's: every ``num_shards``-th record (or file) is read,
            beginning with number ``index``.
        shard_by: ``"record"`` (default) or ``"file"``.

    Raises:
        ImportError: without pyarrow.
        ValueError: an argument that does not fit.
        DataError: while reading, with file and byte: a record whose checksum is wrong or that is cut off, or damaged
            compressed data. Also a message that is no Example, a missing feature, or one of the wrong dtype or size.
        OSError: a file that cannot be read.

    Yields:
        ``pyarrow.RecordBatch``: ``int64``, ``int32``, ``float32``, ``large_binary`` or ``large_string``; fixed-size
        lists for features of a shape, large lists for those of any length. An absent feature is null if it is
        nullable, else its default.

    Source:
        ``tf.data.TFRecordDataset``, ``tf.io.parse_example``.

    Example:
        >>> import tempfile, pyarrow as pa
        >>> path = f"{tempfile.mkdtemp()}/train.tfrecord"
        >>> write_tfrecord(path, [pa.record_batch({"id": [7, 8, 9], "words": [["a"], [], ["b", "c"]]})])
        3
        >>> features = {"id": FixedLenFeature([], "int64"), "words": VarLenFeature("str")}
        >>> for batch in TFRecordReader(path, features, batch_size=2):
        ...     print(batch.to_pydict())
        {'id': [7, 8], 'words': [['a'], []]}
        {'id': [9], 'words': [['b', 'c']]}
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        features: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        *,
        prebatched: bool = False,
        compression: RecordCompression | Literal["auto"] | None = "auto",
        verify: bool = True,
        num_shards: int = 1,
        index: int = 0,
        shard_by: ShardBy = "record",
    ) -> None:
        arrow("TFRecordReader")
        self.paths = _checked_paths("TFRecordReader", paths, compression)
        if batch_size is not None:
            batch_size = _count("TFRecordReader", "batch_size", batch_size)
        num_shards = _count("TFRecordReader", "num_shards", num_shards)
        if not hasattr(index, "__index__") or not 0 <= operator.index(index) < num_shards:
            raise ValueError(f"TFRecordReader: index must be in [0, num_shards), got {index} of {num_shards}")
        if shard_by not in ("record", "file"):
            raise ValueError(f"TFRecordReader: shard_by must be 'record' or 'file', got {shard_by!r}")
        self.batch_size, self.prebatched = batch_size, prebatched
        self._compression, self._verify = compression, verify
        self._by_file = shard_by == "file"
        self._num_shards, self._index = num_shards, index
        if features is None:
            features = infer_features(self.paths[0], prebatched=prebatched, compression=compression)
        if not features:
            raise ValueError("TFRecordReader: features must have at least one feature, got none")
        self.features: dict[str, Feature] = checked_features("TFRecordReader", features)
        if prebatched:
            check_features("TFRecordReader", self.features)
        self.schema: pyarrow.Schema = arrow_schema(self.features)

    def __iter__(self) -> Iterator[pyarrow.RecordBatch]:
        if not self.prebatched:
            yield from self._mapped(self._rows, self.batch_size or BATCH_SIZE)
            return
        stored = self._mapped(self._batch, 1)
        yield from stored if self.batch_size is None else rebatched(stored, self.batch_size)

    def _mapped(self, read: Callable[[list[Records]], Any], count: int) -> Iterator[pyarrow.RecordBatch]:
        """Return an iterator over the batches that ``read`` makes of ``count`` records each."""
        return mapped(read, joined(ahead(self._records()), count), min(torch.get_num_threads(), _MOST_THREADS))

    def _records(self) -> Iterator[Records]:
        """Yield this shard's records, in blocks."""
        paths = self.paths[self._index :: self._num_shards] if self._by_file else self.paths
        step = 1 if self._by_file else self._num_shards
        before = 0
        for path in paths:
            for block in blocks(path, self._compression, self._verify, _CHUNK):
                first = (self._index - before) % step if step > 1 else 0
                before += block.size()
                if step == 1:
                    yield block
                elif first < block.size():
                    # A batch's records come from many blocks: without a copy, all of these would stay in memory.
                    yield block.part(slice(first, None, step)).gathered()

    def _rows(self, records: list[Records]) -> pyarrow.RecordBatch:
        columns = {name: feature.column() for name, feature in self.features.items()}
        rows = sum(each.size() for each in records)
        return self._arrays(records, rows, parse(records, columns))

    def _batch(self, records: list[Records]) -> pyarrow.RecordBatch:
        whole = parse(records, whole_columns(self.features))
        try:
            rows, values = by_rows(self.features, whole)
        except ValueError as error:
            raise records[0].fault(0, records[0].begin(), str(error)) from error
        return self._arrays(records, rows, values)

    def _arrays(
        self, records: list[Records], rows: int, values: Mapping[str, ops.ExampleValues]
    ) -> pyarrow.RecordBatch:
        pa = arrow("TFRecordReader")
        arrays = [to_array(field.type, rows, values[field.name]) for field in self.schema]
        for name, array in zip(self.schema.names, arrays, strict=True):
            if self.features[name].dtype == "str":
                check_text(name, array, records)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def read_tfrecord(
    paths: PathLike | Sequence[PathLike],
    features: Mapping[str, Any] | None = None,
    *,
    batch_size: int | None = None,
    columns: Sequence[str] | None = None,
    prebatched: bool = False,
    compression: RecordCompression | Literal["auto"] | None = "auto",
    split: Mapping[str, str] | None = None,
) -> Iterator[pyarrow.RecordBatch]:
    """
    Read TFRecord files of examples: :class:`TFRecordReader` as a function.

    Args:
        paths, features, batch_size, prebatched, compression: the arguments of :class:`TFRecordReader`.
        columns: the names of the features to read, in this order. Default None: all.
        split: the argument of :func:`read_parquet`.

    Yields:
        ``pyarrow.RecordBatch``, as :class:`TFRecordReader` does.

    Raises:
        ValueError: an unknown column; and all that :class:`TFRecordReader` raises.

    Example:
        >>> import tempfile, pyarrow as pa
        >>> path = f"{tempfile.mkdtemp()}/train.tfrecord.gz"
        >>> write_tfrecord(path, [pa.record_batch({"id": [7, 8], "price": [0.5, 1.5]})], compression="gzip")
        2
        >>> next(read_tfrecord(path, columns=["price"])).to_pydict()
        {'price': [0.5, 1.5]}
    """
    reader = TFRecordReader(paths, features, batch_size, prebatched=prebatched, compression=compression)
    if columns is not None:
        check_known("read_tfrecord", columns, reader.features)
        chosen = {name: reader.features[name] for name in columns}
        reader = TFRecordReader(paths, chosen, batch_size, prebatched=prebatched, compression=compression)
    return with_lists(reader, "read_tfrecord", split)


def infer_features(
    path: PathLike,
    *,
    records: int = 100,
    prebatched: bool = False,
    compression: RecordCompression | Literal["auto"] | None = "auto",
) -> dict[str, Feature]:
    """
    Infer the features of a TFRecord file from its first records.

    A feature with the same number of values in each record is a :class:`FixedLenFeature`, nullable if some records lack
    it. A feature with different numbers of values, or with none, is a :class:`VarLenFeature`. The number of rows of a
    record that holds a batch is the length of a ``<name>/row_lengths``, or else the greatest common divisor of the
    features' numbers of values.

    Args:
        path: the name of the file.
        records: the number of records to look at, at least 1. Default 100; with ``prebatched`` always one.
        prebatched, compression: the arguments of :class:`TFRecordReader`.

    Returns:
        A dict of the features, in the order of their names.

    Raises:
        DataError: a file without records, a record that is no Example, or a feature that has values of two dtypes.
        OSError: a file that cannot be read.

    Example:
        >>> import tempfile, pyarrow as pa
        >>> path = f"{tempfile.mkdtemp()}/train.tfrecord"
        >>> write_tfrecord(path, [pa.record_batch({"id": [7, 8], "words": [["a"], ["b", "c"]]})])
        2
        >>> for name, feature in infer_features(path).items():
        ...     print(name, feature)
        id FixedLenFeature(shape=(), dtype='int64', default_value=None, nullable=False)
        words VarLenFeature(dtype='bytes')
    """
    (name,) = _checked_paths("infer_features", path, compression)
    wanted = 1 if prebatched else _count("infer_features", "records", records)
    found: list[dict[str, tuple[str, int]]] = []
    for block in blocks(name, compression, True, _CHUNK):
        for i, (begin, end) in enumerate(block.ranges[: wanted - len(found)].tolist()):
            try:
                found.append(features_of(block.data[begin:end].numpy().tobytes()))
            except MalformedError as error:
                raise block.fault(i, begin + error.offset, str(error)) from error
        if len(found) >= wanted:
            break
    if not found:
        raise DataError(name, None, "there are no records, from which to tell their features")
    try:
        return infer_prebatched(found[0]) if prebatched else infer(found)
    except ValueError as error:
        raise DataError(name, None, str(error)) from error


def _checked_paths(reader: str, paths: PathLike | Sequence[PathLike], compression: str | None) -> list[str]:
    if not isinstance(paths, (str, bytes, os.PathLike, Sequence)):
        raise TypeError(f"{reader}: paths must be a file's name or several, got {type(paths).__name__}")
    names = [os.fsdecode(path) for path in path_list(paths)]
    if not names:
        raise ValueError(f"{reader}: paths must have at least one file, got none")
    if compression not in _COMPRESSIONS:
        raise ValueError(f"{reader}: compression must be 'auto', 'gzip', 'zlib' or None, got {compression!r}")
    return names


def _count(reader: str, name: str, value: Any) -> int:
    """Return ``value`` as an int, or raise ``ValueError`` unless it is an integer of at least 1."""
    if not hasattr(value, "__index__") or operator.index(value) < 1:
        raise ValueError(f"{reader}: {name} must be at least 1, an integer, got {value!r}")
    return operator.index(value)
