"""Features, rows and damaged files: what the tests of TFRecord files share."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from torchsparse_rec.compat._parity.reference.record import entry, example, framed, list_of
from torchsparse_rec.data import DataError, FixedLenFeature, TFRecordReader, VarLenFeature

FEATURES = {
    "id": FixedLenFeature([], "int64"),
    "small": FixedLenFeature([], "int32"),
    "price": FixedLenFeature((), "float32"),
    "pair": FixedLenFeature([2], "int64"),
    "name": FixedLenFeature([], "str"),
    "raw": FixedLenFeature([2], "bytes"),
    "clicks": VarLenFeature("int64"),
    "words": VarLenFeature("str"),
    "maybe": FixedLenFeature([], "int64", nullable=True),
}
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "small": pa.int32(),
        "price": pa.float32(),
        "pair": pa.list_(pa.int64(), 2),
        "name": pa.large_string(),
        "raw": pa.list_(pa.large_binary(), 2),
        "clicks": pa.large_list(pa.int64()),
        "words": pa.large_list(pa.large_string()),
        "maybe": pa.int64(),
    }
)


def rows(start: int, count: int, nulls: bool = True) -> pa.RecordBatch:
    """Return rows numbered from ``start`` that differ in all columns."""
    numbers = range(start, start + count)
    columns = {
        "id": [i * 10**12 - 5 for i in numbers],
        "small": [-i for i in numbers],
        "price": [i / 4 for i in numbers],
        "pair": [[i, i + 1] for i in numbers],
        "name": [f"n\xe4me {i}" for i in numbers],
        "raw": [[b"\xff%d" % i, b""] for i in numbers],
        "clicks": [list(range(i % 5)) for i in numbers],
        "words": [["w"] * (i % 3) for i in numbers],
        "maybe": [None if nulls and i % 3 == 0 else i for i in numbers],
    }
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in SCHEMA], schema=SCHEMA)


def table(batches: Any) -> list[dict[str, Any]]:
    return pa.Table.from_batches(list(batches)).to_pylist()


def reading(path: Path, features: dict[str, Any] | None = None, **keywords: Any) -> tuple[list[Any], DataError]:
    """Return the rows before the damage, and the error."""
    found = []
    with pytest.raises(DataError) as error:
        for batch in TFRecordReader(path, features or {"x": FixedLenFeature([], "int64")}, 1, **keywords):
            found += batch.to_pylist()
    assert error.value.path == str(path) and str(error.value).startswith(f"{path}: ")
    assert pickle.loads(pickle.dumps(error.value)).args == error.value.args
    return found, error.value


def ids(count: int) -> list[bytes]:
    """Return ``count`` records of 9 bytes, each of which its frame makes 25."""
    return [example([entry(b"x", list_of("int64", [i]))]) for i in range(count)]


SIZE = len(ids(1)[0]) + 16


def damaged(tmp_path: Path, change: Any, count: int = 20) -> Path:
    content = bytearray(framed(ids(count)))
    path = tmp_path / "x.tfrecord"
    path.write_bytes(bytes(change(content) or content))
    return path
