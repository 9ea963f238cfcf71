"""Writing TFRecord files: columns of every type, values that no Example holds, files that are whole or absent."""

from __future__ import annotations

import gzip
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from data.tfrecord_cases import rows, table

from torchsparse_rec import data
from torchsparse_rec.data import TFRecordReader, TFRecordWriter, VarLenFeature


def test_columns_of_other_types(tmp_path: Path) -> None:
    batch = pa.record_batch(
        {
            "flag": pa.array([True, False, None]),
            "small": pa.array([1, None, 255], pa.uint8()),
            "wide": pa.array([2**63 - 1, 0, 1], pa.uint64()),
            "double": pa.array([0.1, np.inf, -0.5], pa.float64()),
            "half": pa.array(np.array([0.5, 1, 2], np.float16)),
            "text": pa.array(["a", None, "c"], pa.string()).dictionary_encode(),
            "view": pa.array([b"xy", b"", b"a longer one that is not inline"], pa.binary_view()),
            "lists": pa.array([[1, 2], None, []], pa.list_(pa.int32())),
            "pairs": pa.array([[1.5, 2.5], None, [3.5, 4.5]], pa.list_(pa.float32(), 2)),
            "codes": pa.array([["p"], ["q", "p"], None], pa.list_(pa.string())),
        }
    )
    wanted = [
        {"flag": 1, "small": 1, "wide": 2**63 - 1, "double": np.float32(0.1), "half": 0.5, "text": b"a",
         "view": b"xy", "lists": [1, 2], "pairs": [1.5, 2.5], "codes": [b"p"]},
        {"flag": 0, "small": None, "wide": 0, "double": np.inf, "half": 1, "text": None, "view": b"",
         "lists": [], "pairs": None, "codes": [b"q", b"p"]},
        {"flag": None, "small": 255, "wide": 1, "double": -0.5, "half": 2, "text": b"c",
         "view": b"a longer one that is not inline", "lists": [], "pairs": [3.5, 4.5], "codes": []},
    ]  # fmt: skip
    data.write_tfrecord(tmp_path / "x", [batch])
    read = table(TFRecordReader(tmp_path / "x"))
    assert [{name: row[name] for name in wanted[0]} for row in read] == wanted
    # A part of a batch has offsets into its columns.
    data.write_tfrecord(tmp_path / "y", [batch.slice(1)])
    parts = table(TFRecordReader(tmp_path / "y", data.infer_features(tmp_path / "x")))
    assert [{name: row[name] for name in wanted[0]} for row in parts] == wanted[1:]


def test_lists_under_nulls_are_not_written(tmp_path: Path) -> None:
    """Leave out values that Arrow keeps in a null list."""
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, None, 5]))
    hidden = pa.Array.from_buffers(lists.type, 3, [pa.py_buffer(b"\x05"), lists.buffers()[1]], children=[lists.values])
    for prebatched in (False, True):
        data.write_tfrecord(tmp_path / "x", [pa.record_batch({"x": hidden})], prebatched=prebatched)
        reader = TFRecordReader(tmp_path / "x", {"x": VarLenFeature("int64")}, prebatched=prebatched)
        assert [row["x"] for row in table(reader)] == [[1, 2], [], [5]]


@pytest.mark.parametrize(
    ("column", "match"),
    [
        (pa.array([2**63], pa.uint64()), r"column 'x' must fit into int64: "),
        (pa.array([0.5, 1700000047.0]), r"column 'x' has 1700000047.0, of which float32, .*, makes 1700000000.0: cast"),
        (pa.array([[None], [0.5, -1e300]])[1:], r"column 'x' has -1e\+300, of which float32, .*, makes -inf: cast"),
        (pa.array([[0.5, 1e-300]], pa.list_(pa.float64(), 2)), r"column 'x' has 1e-300, of which .* makes 0.0"),
        (pa.array([[1, None]]), r"column 'x' has a null within a list, which no Example can hold"),
        (pa.array([[1, None]], pa.list_(pa.int64(), 2)), r"column 'x' has a null within a list"),
        (pa.array([{"a": 1}]), r"column 'x' must hold numbers, .* got struct<a: int64>; cast it first"),
        (pa.array([[[1]]]), r"column 'x' must hold numbers, .*, got list<item: int64>; cast it first"),
        (pa.array([1], pa.timestamp("s")), r"column 'x' must hold numbers, .*, got timestamp\[s\]; with_time_parts"),
    ],
)  # fmt: skip
def test_what_no_example_holds(tmp_path: Path, column: pa.Array, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        data.write_tfrecord(tmp_path / "x", [pa.record_batch({"x": column})])
    assert list(tmp_path.iterdir()) == []


def test_the_file_bears_its_name_once_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"before")
    writer = TFRecordWriter(path, compression="gzip")
    writer.write(rows(0, 3))
    assert path.read_bytes() == b"before"
    writer.close()
    writer.close()
    assert gzip.decompress(path.read_bytes()) and sorted(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="TFRecordWriter: the file is closed"):
        writer.write(rows(0, 1))
    kept = path.read_bytes()
    with pytest.raises(KeyError), TFRecordWriter(path) as other:
        other.write(rows(0, 3))
        raise KeyError
    assert path.read_bytes() == kept and sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("most", [0, 50_000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, compression: str | None, most: int) -> None:
    """Limit the size of this process's files, so that writing fails, early or when the file is closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            data.write_tfrecord(tmp_path / "x", (rows(start, 500) for start in range(0, 5000, 500)))
        writer = TFRecordWriter(tmp_path / "x", compression=compression, level=1)
        with pytest.raises(OSError, match="File too large"):
            for start in range(0, 50_000 if most else 1, 1000):
                writer.write(rows(start, 1000))
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    """Discard the file: the data that the compressor has already taken is lost, so the file would be damaged."""

    class Interrupted:
        def compress(self, data: Any) -> bytes:
            raise KeyboardInterrupt

    writer = TFRecordWriter(tmp_path / "x", compression="gzip")
    writer.write(rows(0, 3))
    writer._deflate = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        writer.write(rows(3, 3))
    writer.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="TFRecordWriter: the file is closed"):
        writer.write(rows(0, 1))


def test_what_a_prebatched_record_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"column 'x' has nulls, which a record that holds a batch cannot store"):
        data.write_tfrecord(tmp_path / "x", [pa.record_batch({"x": [1, None]})], prebatched=True)
    batch = pa.record_batch({"x": [[1], [2, 3]], "x/row_lengths": [10, 20]})
    with pytest.raises(ValueError, match=r"column 'x/row_lengths' has the name under which the lengths of the rows of"):
        data.write_tfrecord(tmp_path / "x", [batch], prebatched=True)
    assert data.write_tfrecord(tmp_path / "x", [batch]) == 2
    plain = pa.record_batch({"x": [1, 2], "x/row_lengths": [10, 20]})
    assert data.write_tfrecord(tmp_path / "x", [plain], prebatched=True) == 2


def test_batches_of_several_schemas(tmp_path: Path) -> None:
    batches = [pa.record_batch({"x": [1]}), pa.record_batch({"x": [1.5]})]
    with pytest.raises(ValueError, match="batches must be of one schema, x: int64, got x: double in 1"):
        data.write_tfrecord(tmp_path / "x", batches)
    assert list(tmp_path.iterdir()) == []
