"""Write prebatched files: the types of the columns, the checksums, and the index."""

from __future__ import annotations

import base64
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
import torch

from .._progress import progress_bar
from ..files import PathLike, whole_file
from ..ops import crc32c
from . import _index
from ._arrow import arrow
from ._planes import Encoder, decoded_bytes, most_bytes, to_directory
from ._prebatched_file import PrebatchedFile
from ._rows import check_names
from ._types import cast_stored, narrowest, stored_type, wider
from .tensors import to_record_batch

if TYPE_CHECKING:
    import pyarrow


def write_prebatched(
    path: PathLike,
    batches: Iterable[pyarrow.RecordBatch | Mapping[str, Any]],
    *,
    compression: Literal["zstd"] | None = None,
    level: int | None = None,
    min_saving: float = 0.125,
    narrow: bool = True,
    progress: bool | None = None,
) -> int:
    """
    Write training batches to a prebatched file, one record batch for each.

    The batches are taken one at a time. The file bears its name only once it is complete: whatever fails, no partial
    file is left under the name.

    Args:
        path: the name of the file.
        batches: the batches, at least one, all with the columns of the first: record batches, or mappings as for
            :func:`to_record_batch`.
        compression: None (default), for files that are mapped into memory; or ``"zstd"``, for smaller files that are
            decoded: each buffer is cut into byte planes, and each plane stored unchanged, as the few bits that its
            bytes need, or compressed by zstd.
        level: zstd's compression level. Default None: pyarrow's default.
        min_saving: the share of a plane's bytes, from 0 to 1, that a codec must save to be used: packing into few bits
            over the unchanged plane, zstd over the smaller of these two. Default 0.125; 0 makes the smallest files.
        narrow: whether to store integers in the narrowest of int8, int16, int32, int64 (uint64 for larger values) that
            holds a column's values in the whole file. Where later batches need wider types, the whole file is written
            again in the end, and until then a copy lies beside it. Default True. False: the types stay, and must be the
            same in all batches.
        progress: whether to show a progress bar, by tqdm. Default None: if tqdm is installed and stderr is a terminal.

    Returns:
        The number of rows.

    Raises:
        ImportError: without pyarrow.
        ValueError: no batches; columns that differ between batches, or of a type that cannot be stored; an unknown
            compression.
        OSError: the file cannot be written.

    Example:
        >>> import tempfile, torch
        >>> from torchsparse_rec.data import PrebatchedDataset, write_prebatched
        >>> path = f"{tempfile.mkdtemp()}/train.arrow"
        >>> write_prebatched(path, [{"id": torch.tensor([7, 8])}, {"id": torch.tensor([9])}])
        3
        >>> [batch["id"] for batch in PrebatchedDataset(path)]
        [tensor([7, 8], dtype=torch.int8), tensor([9], dtype=torch.int8)]
    """
    pa = arrow("write_prebatched")
    if compression not in (None, "zstd"):
        raise ValueError(f"write_prebatched: compression must be None or 'zstd', got {compression!r}")
    if level is not None and compression is None:
        raise ValueError(f"write_prebatched: level needs compression='zstd', got {level} without")
    if not 0.0 <= min_saving <= 1.0:
        raise ValueError(f"write_prebatched: min_saving must be in [0, 1], got {min_saving}")
    encoder = None if compression is None else _encoder(level, min_saving)
    rows = 0
    with whole_file(path) as file:
        growing: _GrowingFile | None = None
        try:
            for i, batch in enumerate(progress_bar(batches, Path(path).name, "batch", progress)):
                given = batch if isinstance(batch, pa.RecordBatch) else to_record_batch(batch)
                if growing is None:
                    growing = _GrowingFile(file, given, encoder, narrow)
                growing.write(given, i)
                rows += given.num_rows
            if growing is None:
                raise ValueError("write_prebatched: batches must have at least one batch, got none")
            growing.close()
        finally:
            if growing is not None:
                growing.clean()
    return rows


def _encoder(level: int | None, min_saving: float) -> Encoder:
    try:
        return Encoder(level, min_saving)
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"write_prebatched: level must be one of zstd's, got {level!r}: {error}") from None


class _GrowingFile:
    """
    A file whose columns of integers may have to be widened.

    An Arrow file has one schema. Where a batch needs wider columns, the file so far is put aside as a segment in a
    folder beside it, and a new one begins. In the end all segments are written into the file, each once.
    """

    def __init__(self, file: BinaryIO, first: Any, encoder: Encoder | None, narrow: bool) -> None:
        self.file, self.encoder, self.narrow = file, encoder, narrow
        check_names("write_prebatched", first.schema.names)
        self.metadata = first.schema.metadata
        self.sink = _Sink(file, self._schema(first, 0), encoder)
        self.folder: tempfile.TemporaryDirectory | None = None
        self.segments: list[Path] = []

    def _schema(self, batch: Any, i: int) -> Any:
        """Return the schema in which this batch, given as number i, would be stored by itself."""
        pa = arrow("write_prebatched")
        fields = []
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                kind = stored_type(name, column.type)
                if column.type != kind:
                    column = column.cast(kind)
            except (ValueError, pa.ArrowException) as error:
                raise ValueError(f"write_prebatched: batches[{i}]: {error}") from None
            fields.append(pa.field(name, narrowest(column) if self.narrow else kind))
        return pa.schema(fields, metadata=self.metadata)

    def write(self, batch: Any, i: int) -> None:
        """Write a batch, after widening the schema if the batch needs it; i is its number, for errors."""
        known = self.sink.schema
        if batch.schema.names != known.names:
            raise ValueError(
                f"write_prebatched: batches[{i}] must have the columns of the first, {known.names}, got "
                f"{batch.schema.names}"
            )
        pa, fields = arrow("write_prebatched"), []
        for old, new in zip(known, self._schema(batch, i), strict=True):
            kind = wider(old.type, new.type) if self.narrow else (old.type if old.type == new.type else None)
            if kind is None:
                raise ValueError(
                    f"write_prebatched: column {old.name!r} of batches[{i}] must be {old.type} as in those before, got "
                    f"{new.type}"
                )
            fields.append(pa.field(old.name, kind))
        schema = pa.schema(fields, metadata=self.metadata)
        if not schema.equals(known):
            self._begin_segment(schema)
        self.sink.write(self._cast(batch, i), i)

    def _cast(self, batch: Any, i: int) -> Any:
        pa = arrow("write_prebatched")
        columns = []
        for field, column in zip(self.sink.schema, batch.columns, strict=True):
            try:
                columns.append(cast_stored(column, field.type))
            except (ValueError, pa.ArrowException) as error:
                raise ValueError(
                    f"write_prebatched: column {field.name!r} of batches[{i}] cannot be stored as {field.type}: {error}"
                ) from None
        return pa.RecordBatch.from_arrays(columns, schema=self.sink.schema)

    def _begin_segment(self, schema: Any) -> None:
        """Put the batches written so far aside as a segment, and begin the file anew with another schema."""
        self.sink.close()
        if self.folder is None:
            folder = Path(self.file.name).parent
            self.folder = tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=".partial")
        self.segments.append(Path(self.folder.name) / str(len(self.segments)))
        shutil.copyfile(self.file.name, self.segments[-1])
        self.file.seek(0)
        self.file.truncate()
        self.sink = _Sink(self.file, schema, self.encoder)

    def close(self) -> None:
        """Write the segments into the file, and complete it."""
        if self.segments:
            self._begin_segment(self.sink.schema)
        i = 0
        for path in self.segments:
            segment = PrebatchedFile(path, verify="never")
            for k in range(len(segment.rows())):
                self.sink.write(self._cast(segment.read(k), i), i)
                i += 1
        self.sink.close()

    def clean(self) -> None:
        """Remove the segments."""
        if self.folder is not None:
            self.folder.cleanup()


class _Sink:
    """Writes batches of one schema: Arrow's file, then the index."""

    def __init__(self, file: BinaryIO, schema: Any, encoder: Encoder | None) -> None:
        pa = arrow("write_prebatched")
        self.pa, self.file, self.schema, self.encoder = pa, file, schema, encoder
        layout = b"plain" if encoder is None else b"planes"
        metadata = {**(schema.metadata or {}), _index.FORMAT_KEY: _index.FORMAT, _index.VERSION_KEY: _index.VERSION}
        metadata[_index.LAYOUT_KEY] = layout
        fields = list(schema)
        if encoder is not None:
            metadata[_index.SCHEMA_KEY] = base64.b64encode(schema.serialize())
            fields = [pa.field(field.name, pa.large_binary(), nullable=False) for field in fields]
        self.physical = pa.schema(fields, metadata=metadata)
        self.entries: list[tuple[int, int, int, int, int]] = []
        # The byte at which the last batch ends.
        self.end = 0
        self.python_file = pa.PythonFile(file, mode="w")
        self.writer = pa.ipc.new_file(self.python_file, self.physical)

    def write(self, batch: Any, i: int) -> None:
        """Write a batch of the file's schema; i is its number, for errors."""
        # The batch as the file will hold it: slices copied out, every buffer from its beginning.
        stored, metadata = self._compact(batch, self.schema), {}
        if self.encoder is not None:
            stored, metadata[_index.PARTS_KEY] = self._encode(stored, self.encoder, i)
        metadata[_index.CHECKSUMS_KEY] = _checksums(stored)
        self.writer.write_batch(stored, custom_metadata=metadata)
        self.file.flush()
        end = self.file.tell()
        with open(self.file.name, "rb") as written:
            # Arrow writes the schema together with the first batch.
            start = self.end or 8 + _message_length(written, 8)
            length = _message_length(written, start)
            written.seek(start)
            crc = _index.checksum(written.read(length))
        self.end = end
        self.entries.append((start, length, crc, end - start - length, batch.num_rows))

    def _compact(self, batch: Any, schema: Any) -> Any:
        return self.pa.ipc.read_record_batch(batch.serialize(), schema)

    def _encode(self, batch: Any, encoder: Encoder, i: int) -> tuple[Any, str]:
        parts, columns = [], []
        for column in batch.columns:
            directory, stored = encoder.encode(column)
            parts.append(directory)
            columns.append(self.pa.array([stored], self.pa.large_binary()))
        size, most = sum(map(decoded_bytes, parts)), most_bytes(sum(column.nbytes for column in columns))
        if size > most:
            raise ValueError(
                f"write_prebatched: batches[{i}] may have {most} bytes, for their compressed size, got {size}: make "
                "smaller batches"
            )
        packed = self.pa.RecordBatch.from_arrays(columns, schema=self.physical)
        return self._compact(packed, self.physical), to_directory(parts)

    def close(self) -> None:
        """Complete Arrow's file, and insert the index."""
        self.writer.close()
        _index.write_index(self.file, np.array(self.entries, _index.ENTRY))


def _message_length(file: BinaryIO, start: int) -> int:
    """Return the bytes of an Arrow message before its data: a marker, the metadata's length, and the metadata."""
    file.seek(start)
    return 8 + int.from_bytes(file.read(8)[4:], "little")


def _checksums(batch: Any) -> str:
    """
    Return the CRC-32C of each buffer of each column, in order, as hexadecimal text.

    Each is 8 digits, its bytes in little-endian order; 0 for an absent or empty buffer.
    """
    empty = torch.empty(0, dtype=torch.uint8)
    buffers = [buffer for column in batch.columns for buffer in column.buffers()]
    # A copy, since torch warns of buffers that are read-only.
    tensors = [
        torch.from_numpy(np.frombuffer(b, np.uint8).copy()) if b is not None and b.size else empty for b in buffers
    ]
    return crc32c(tensors).numpy().astype("<u4").tobytes().hex()
