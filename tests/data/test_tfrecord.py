"""Reading TFRecord files: there and back in every form, batches across files, shards, arguments, inferred features."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from data.tfrecord_cases import FEATURES, SCHEMA, rows, table

from torchsparse_rec import data
from torchsparse_rec.compat._parity.reference import record as reference
from torchsparse_rec.compat._parity.reference.record import entry, example, framed, list_of
from torchsparse_rec.data import FixedLenFeature, TFRecordReader, TFRecordWriter, VarLenFeature
from torchsparse_rec.data import _tfrecord_blocks as blocks_module

# ---- There and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prebatched", [False, True])
@pytest.mark.parametrize("compression", [None, "gzip", "zlib"])
def test_there_and_back(tmp_path: Path, compression: str | None, prebatched: bool, small_chunks: None) -> None:
    path = tmp_path / "x.tfrecord"
    batches = [rows(0, 20, not prebatched), rows(20, 1, not prebatched), rows(21, 0), rows(21, 30, not prebatched)]
    assert data.write_tfrecord(path, batches, compression=compression, prebatched=prebatched) == 51
    assert sorted(tmp_path.iterdir()) == [path]
    for given in ("auto", compression):
        reader = TFRecordReader(path, FEATURES, 13, prebatched=prebatched, compression=given)
        assert reader.schema == SCHEMA
        read = list(reader)
        assert [batch.num_rows for batch in read] == [13, 13, 13, 12]
        assert all(batch.schema == SCHEMA for batch in read)
        for batch in read:
            batch.validate(full=True)
        assert table(read) == table(batches)
        assert table(reader) == table(read)  # every iteration begins anew


def test_prebatched_records_are_batches_as_they_were_stored(tmp_path: Path) -> None:
    batches = [rows(0, 7, False), rows(7, 0), rows(7, 4, False)]
    data.write_tfrecord(tmp_path / "x", batches, prebatched=True)
    assert [batch.num_rows for batch in TFRecordReader(tmp_path / "x", FEATURES, prebatched=True)] == [7, 0, 4]


def test_batches_cross_files(tmp_path: Path, small_chunks: None) -> None:
    paths = [tmp_path / f"{i}" for i in range(4)]
    for path, (start, count) in zip(paths, [(0, 5), (5, 0), (5, 1), (6, 9)], strict=True):
        data.write_tfrecord(path, [rows(start, count)], compression="gzip" if start else None)
    read = list(TFRecordReader(paths, FEATURES, 4))
    assert [batch.num_rows for batch in read] == [4, 4, 4, 3]
    assert table(read) == table([rows(0, 15)])


@pytest.mark.parametrize("shard_by", ["record", "file"])
@pytest.mark.parametrize("prebatched", [False, True])
def test_shards_are_disjoint_and_whole(tmp_path: Path, shard_by: str, prebatched: bool, small_chunks: None) -> None:
    paths = [tmp_path / f"{i}" for i in range(5)]
    for i, path in enumerate(paths):
        data.write_tfrecord(path, [rows(7 * i + j, 1, False) for j in range(7)], prebatched=prebatched)
    found: list[list[int]] = []
    for index in range(3):
        reader = TFRecordReader(paths, FEATURES, 4, prebatched=prebatched, num_shards=3, index=index, shard_by=shard_by)
        found.append([row["pair"][0] for row in table(reader)])
    if shard_by == "record":
        assert found == [list(range(index, 35, 3)) for index in range(3)]
    else:
        assert found[1] == [*range(7, 14), *range(28, 35)] and found[2] == list(range(14, 21))
    assert sorted(itertools.chain(*found)) == list(range(35))


def test_defaults_and_nulls(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(framed([example([entry(b"a", list_of("int64", [4, 5]))]), b""]))
    features = {
        "a": FixedLenFeature([2], "int64", [8, 9]),
        "b": FixedLenFeature([3], "float32", 0.5),
        "c": FixedLenFeature([], "str", "none"),
        "d": FixedLenFeature([2], "bytes", nullable=True),
        "e": VarLenFeature("bytes"),
    }
    assert table(TFRecordReader(tmp_path / "x", features)) == [
        {"a": [4, 5], "b": [0.5] * 3, "c": "none", "d": None, "e": []},
        {"a": [8, 9], "b": [0.5] * 3, "c": "none", "d": None, "e": []},
    ]
    record = example([entry(b"a", list_of("int64", [4, 5, 6, 7])), entry(b"e/row_lengths", list_of("int64", [0, 0]))])
    (tmp_path / "y").write_bytes(framed([record]))
    assert table(TFRecordReader(tmp_path / "y", features, prebatched=True)) == [
        {"a": [4, 5], "b": [0.5] * 3, "c": "none", "d": None, "e": []},
        {"a": [6, 7], "b": [0.5] * 3, "c": "none", "d": None, "e": []},
    ]


def test_without_checksums(tmp_path: Path) -> None:
    content = bytearray(framed([b"", b""]))
    content[8] ^= 1
    content[16 + 12] ^= 1
    (tmp_path / "x").write_bytes(content)
    features = {"x": FixedLenFeature([], "int64", 3)}
    assert table(TFRecordReader(tmp_path / "x", features, verify=False)) == [{"x": 3}, {"x": 3}]


def test_gzip_in_several_members_and_padding(tmp_path: Path, small_chunks: None) -> None:
    content = framed([example([entry(b"x", list_of("int64", [i]))]) for i in range(9)])
    members = [gzip.compress(content[a:b]) for a, b in ((0, 50), (50, 50), (50, len(content)))]
    for ending in (b"", b"\0" * 300):
        (tmp_path / "x").write_bytes(b"".join(members) + ending)
        assert [row["x"] for row in table(TFRecordReader(tmp_path / "x"))] == list(range(9))


def test_a_length_that_looks_like_gzip_is_none(tmp_path: Path) -> None:
    """Recognise by its checksum a record of 0x88b1f bytes, which begins like a gzip file."""
    size = 0x88B1F
    padding = reference.field(9, b"\0" * (size - 4))
    assert len(padding) == size
    (tmp_path / "x").write_bytes(framed([padding[:0]]) + framed([]))
    content = b"".join([len(padding).to_bytes(8, "little"), b"", b""])
    header = content + reference.masked_crc32c(content).to_bytes(4, "little")
    assert blocks_module.compression_of(header) is None
    assert blocks_module.compression_of(gzip.compress(b"")[:12]) == "gzip"
    assert blocks_module.compression_of(zlib.compress(b"abc")[:12]) == "zlib"
    assert blocks_module.compression_of(b"") is None


def test_a_generator_is_closed_in_the_middle(tmp_path: Path) -> None:
    data.write_tfrecord(tmp_path / "x", [rows(0, 9)])
    stream: Iterator[Any] = iter(TFRecordReader(tmp_path / "x", FEATURES, 2))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    (tmp_path / "x").unlink()


# ---- Arguments ------------------------------------------------------------------------------------------------------


def test_arguments_say_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "x"
    data.write_tfrecord(path, [rows(0, 2)])
    for match, keywords in (
        ("paths must have at least one file, got none", {"paths": []}),
        ("compression must be 'auto', 'gzip', 'zlib' or None, got 'zstd'", {"compression": "zstd"}),
        ("batch_size must be at least 1, an integer, got 0", {"batch_size": 0}),
        (r"index must be in \[0, num_shards\), got 2 of 2", {"num_shards": 2, "index": 2}),
        ("batch_size must be at least 1, an integer, got 1.5", {"batch_size": 1.5}),
        ("num_shards must be at least 1, an integer, got 1.5", {"num_shards": 1.5}),
        (r"index must be in \[0, num_shards\), got 0.5 of 1", {"index": 0.5}),
        ("shard_by must be 'record' or 'file', got 'row'", {"shard_by": "row"}),
        ("features must have at least one feature, got none", {"features": {}}),
        (r"features\['id'\] must be a FixedLenFeature or a VarLenFeature, got 'int64'", {"features": {"id": "int64"}}),
    ):
        with pytest.raises(ValueError, match="TFRecordReader: " + match):
            TFRecordReader(**{"paths": path, **keywords})
    for match, keywords in (
        ("compression must be None, 'gzip' or 'zlib', got 'auto'", {"compression": "auto"}),
        (r"level must be an integer in \[1, 9\], got 0", {"level": 0}),
    ):
        with pytest.raises(ValueError, match="TFRecordWriter: " + match):
            TFRecordWriter(path, **keywords)
    with pytest.raises(ValueError, match="infer_features: records must be at least 1, an integer, got 0"):
        data.infer_features(path, records=0)
    with pytest.raises(TypeError, match="TFRecordReader: paths must be a file's name or several, got NoneType"):
        TFRecordReader(None)  # type: ignore[arg-type]
    assert len(table(TFRecordReader(bytes(path), FEATURES))) == 2  # type: ignore[arg-type]
    text = "must be a pyarrow.RecordBatch, got dict"
    with TFRecordWriter(tmp_path / "y") as writer, pytest.raises(TypeError, match=text):
        writer.write({"x": [1]})  # type: ignore[arg-type]
    double = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(ValueError, match="the columns of a batch must have distinct names, got 'x' twice"):
        data.write_tfrecord(tmp_path / "z", [double])
    with pytest.raises(ValueError, match=r"read_tfrecord: columns must be among clicks, .*, got 'nothing'"):
        data.read_tfrecord(path, columns=["nothing"])
    with pytest.raises(FileNotFoundError):
        list(TFRecordReader(tmp_path / "nothing", FEATURES))


def test_specifications_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"FixedLenFeature: shape must be \(\) or \(k,\), got \[2, 3\]"):
        FixedLenFeature([2, 3], "int64")
    with pytest.raises(ValueError, match="dtype must be int64, int32, float32, bytes or str, got 'float64'"):
        VarLenFeature("float64")
    with pytest.raises(ValueError, match=r"default must be 2 values, got \[1\]"):
        FixedLenFeature([2], "int64", [1])
    with pytest.raises(ValueError, match="default must be None, since nullable is set"):
        FixedLenFeature([2], "int64", 1, nullable=True)
    for shape, dtype in (([2**62], "bytes"), ([2**31], "int64"), ([2.5], "int64")):
        with pytest.raises(ValueError, match=r"size must be an integer in \[0, 2147483647\] or None"):
            FixedLenFeature(shape, dtype, nullable=True)
    with pytest.raises(ValueError, match=r"default must be strings, got \[3\]"):
        FixedLenFeature([], "bytes", 3)
    assert FixedLenFeature(3, np.dtype("float32")) == FixedLenFeature([3], float) == FixedLenFeature((3,), "float32")


def test_features_are_inferred(tmp_path: Path) -> None:
    data.write_tfrecord(tmp_path / "x", [rows(0, 12)])
    wanted = {
        name: type(feature)(*(["bytes" if p == "str" else "int64" if p == "int32" else p for p in parts]))
        for name, feature in sorted(FEATURES.items())
        for parts in [[feature.dtype] if isinstance(feature, VarLenFeature) else
                      [feature.shape, feature.dtype, None, feature.nullable]]
    }  # fmt: skip
    assert data.infer_features(tmp_path / "x") == wanted
    assert data.infer_features(tmp_path / "x", records=1)["clicks"] == VarLenFeature("int64")
    data.write_tfrecord(tmp_path / "y", [rows(0, 12, False)], prebatched=True)
    inferred = data.infer_features(tmp_path / "y", prebatched=True)
    assert inferred == {**wanted, "maybe": FixedLenFeature([], "int64")}
    plain = rows(0, 12, False).drop_columns(["clicks", "words"])
    data.write_tfrecord(tmp_path / "z", [plain], prebatched=True)
    assert set(data.infer_features(tmp_path / "z", prebatched=True)) == set(plain.schema.names)
    assert [row["pair"] for row in table(TFRecordReader(tmp_path / "z", prebatched=True))] == [
        [i, i + 1] for i in range(12)
    ]
    assert next(data.read_tfrecord(tmp_path / "x", columns=["pair", "id"])).schema.names == ["pair", "id"]


def test_lengths_of_rows_are_read_beside_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "x"
    data.write_tfrecord(path, [pa.record_batch({"x": [[1], [2, 3], [4, 5, 6]]})], prebatched=True)
    lists, lengths = VarLenFeature("int64"), FixedLenFeature([], "int64")
    for features in ({"x": lists, "x/row_lengths": lengths}, {"x/row_lengths": lengths, "x": lists}):
        read = table(TFRecordReader(path, features, prebatched=True))
        assert read == [{"x": [1], "x/row_lengths": 1}, {"x": [2, 3], "x/row_lengths": 2},
                        {"x": [4, 5, 6], "x/row_lengths": 3}]  # fmt: skip
    for bad in (
        FixedLenFeature([], "int32"),
        FixedLenFeature([], "float32"),
        FixedLenFeature([1], "int64"),
        VarLenFeature("int64"),
    ):
        for features in ({"x": lists, "x/row_lengths": bad}, {"x/row_lengths": bad, "x": lists}):
            text = r"features\['x/row_lengths'\] must be FixedLenFeature\(\(\), 'int64'\)"
            with pytest.raises(ValueError, match=text):
                TFRecordReader(path, features, prebatched=True)
