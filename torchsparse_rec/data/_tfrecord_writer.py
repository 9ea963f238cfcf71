"""Write TFRecord files; tfrecord.py reads them."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .. import ops
from ..files import PathLike, whole_file
from ..typing import RecordCompression
from ._arrow import arrow
from ._tfrecord_columns import example_columns
from ._tfrecord_prebatched import as_one_record

if TYPE_CHECKING:
    import pyarrow


class TFRecordWriter:
    """
    Writes record batches as a TFRecord file of examples.

    The file bears its name only once it is closed; if a ``with`` block raises, there is none. Integers and booleans
    become int64, floats float32, strings bytes. A null is a feature that is absent, which reads as an empty list where
    a feature may have any number of values. A double is rounded to float32; it is refused if float32 makes infinity or
    0 of it, or another number from 2^24 on.

    With ``prebatched`` a record holds a whole batch, which takes less space and is read several times as fast. Each
    feature has the values of all rows, so that ``tf.io.FixedLenFeature([rows, k], ...)`` reads it. A column of lists
    also has a feature ``<name>/row_lengths``, for ``tf.io.RaggedFeature``.

    Args:
        path: the name of the file.
        compression: ``"gzip"``, ``"zlib"`` or None (default).
        prebatched: whether a record is a batch. Default False: a row.
        level: the compression level, 1 to 9. Default 6.

    Raises:
        ImportError: without pyarrow.
        ValueError: an argument that does not fit.
        OSError: a file that cannot be written.

    Source:
        ``tf.io.TFRecordWriter``.

    Example:
        >>> import tempfile, pyarrow as pa
        >>> from torchsparse_rec.data import TFRecordReader
        >>> path = f"{tempfile.mkdtemp()}/train.tfrecord"
        >>> with TFRecordWriter(path, prebatched=True) as writer:
        ...     writer.write(pa.record_batch({"id": [7, 8, 9]}))
        >>> next(iter(TFRecordReader(path, prebatched=True))).to_pydict()
        {'id': [7, 8, 9]}
    """

    def __init__(
        self, path: PathLike, *, compression: RecordCompression | None = None, prebatched: bool = False, level: int = 6
    ) -> None:
        arrow("TFRecordWriter")
        if compression not in (None, "gzip", "zlib"):
            raise ValueError(f"TFRecordWriter: compression must be None, 'gzip' or 'zlib', got {compression!r}")
        if not hasattr(level, "__index__") or not 1 <= operator.index(level) <= 9:
            raise ValueError(f"TFRecordWriter: level must be an integer in [1, 9], got {level}")
        bits = {"gzip": 31, "zlib": 15}
        self._deflate: Any = None if compression is None else zlib.compressobj(level, zlib.DEFLATED, bits[compression])
        self._prebatched = prebatched
        self._context = whole_file(path)
        self._file = self._context.__enter__()
        self._open = True

    def write(self, batch: pyarrow.RecordBatch) -> None:
        """
        Add the rows of a batch: a record for each row, or with ``prebatched`` one record for all.

        Raises:
            TypeError: ``batch`` is not a ``pyarrow.RecordBatch``.
            ValueError: a type that no Example can hold, an integer beyond int64, or a double that float32 does not
                hold. Also a null within a list or in a record that holds a batch, a record of 2 GiB or more, and a
                closed writer.
            OSError: a full disk.
        """
        pa = arrow("TFRecordWriter")
        if not self._open:
            raise ValueError("TFRecordWriter: the file is closed")
        if not isinstance(batch, pa.RecordBatch):
            raise TypeError(f"TFRecordWriter: batch must be a pyarrow.RecordBatch, got {type(batch).__name__}")
        columns, values = example_columns(batch)
        rows = batch.num_rows
        if self._prebatched:
            columns, values = as_one_record(columns, values)
            rows = 1
        framed = ops.tfrecord_framed(*ops.encode_examples(values, columns, rows)).numpy().data
        self._put(framed)

    def close(self) -> None:
        """Finish the file and give it its name."""
        if not self._open:
            return
        if self._deflate is not None:
            self._put(None)
        self._open = False
        self._context.__exit__(None, None, None)

    def _put(self, data: memoryview | None) -> None:
        """
        Write bytes, through the compressor if there is one; None: write the rest that the compressor has kept back.

        If writing fails or is interrupted, the file would lack a part, and is removed.
        """
        try:
            if self._deflate is not None:
                self._file.write(self._deflate.flush() if data is None else self._deflate.compress(data))
            elif data is not None:
                self._file.write(data)
        except BaseException as error:
            self._abort(error)
            raise

    def _abort(self, error: BaseException) -> None:
        self._open = False
        with suppress(type(error)):
            self._context.__exit__(type(error), error, error.__traceback__)

    def __enter__(self) -> TFRecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._open:
            self._abort(error)


def write_tfrecord(
    path: PathLike,
    batches: Iterable[pyarrow.RecordBatch],
    *,
    compression: RecordCompression | None = None,
    prebatched: bool = False,
) -> int:
    """
    Write record batches as a TFRecord file: :class:`TFRecordWriter` as a function.

    Args:
        path, compression, prebatched: the arguments of :class:`TFRecordWriter`.
        batches: record batches of one schema.

    Returns:
        The number of rows.

    Raises:
        ValueError: batches with different columns; and as :class:`TFRecordWriter` raises it.
        OSError: as :class:`TFRecordWriter` raises it.

    Example:
        >>> import tempfile, pyarrow as pa
        >>> write_tfrecord(f"{tempfile.mkdtemp()}/train.tfrecord", [pa.record_batch({"id": [7, 8]})])
        2
    """
    rows = 0
    columns = None
    with TFRecordWriter(path, compression=compression, prebatched=prebatched) as writer:
        for i, batch in enumerate(batches):
            writer.write(batch)
            found = {field.name: field.type for field in batch.schema}
            columns = found if columns is None else columns
            if found != columns:
                wanted = _listed(columns)
                raise ValueError(
                    f"write_tfrecord: batches must be of one schema, {wanted}, got {_listed(found)} in {i}"
                )
            rows += batch.num_rows
    return rows


def _listed(columns: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {kind}" for name, kind in columns.items()) or "no columns"
