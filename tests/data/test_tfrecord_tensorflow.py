"""TFRecord files that TensorFlow writes or reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from data.tfrecord_cases import rows, table

from torchsparse_rec import data
from torchsparse_rec.data import TFRecordReader


def their_features(tf: Any) -> dict[str, Any]:
    return {
        "id": tf.io.FixedLenFeature([], tf.int64),
        "price": tf.io.FixedLenFeature([], tf.float32),
        "pair": tf.io.FixedLenFeature([2], tf.int64),
        "raw": tf.io.FixedLenFeature([2], tf.string),
        "clicks": tf.io.VarLenFeature(tf.int64),
    }


@pytest.mark.tensorflow
@pytest.mark.parametrize("compression", [None, "gzip", "zlib"])
def test_tensorflow_reads_our_files(tensorflow: Any, tmp_path: Path, compression: str | None) -> None:
    tf = tensorflow
    batch, path = rows(0, 50), str(tmp_path / "x")
    data.write_tfrecord(path, [batch], compression=compression)
    stored = tf.data.TFRecordDataset(path, compression_type=(compression or "").upper())
    parsed = next(iter(stored.batch(100).map(lambda x: tf.io.parse_example(x, their_features(tf)))))
    for name in ("id", "price", "pair", "raw"):
        assert parsed[name].numpy().tolist() == batch.column(name).to_pylist()
    lists = tf.RaggedTensor.from_sparse(parsed["clicks"]).to_list()
    assert lists == batch.column("clicks").to_pylist()


@pytest.mark.tensorflow
@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_we_read_tensorflows_files(tensorflow: Any, tmp_path: Path, compression: str) -> None:
    tf = tensorflow
    path, batch = str(tmp_path / "x"), rows(0, 50)
    with tf.io.TFRecordWriter(path, compression) as writer:
        for row in batch.to_pylist():
            lists = {name: row[name] if isinstance(row[name], list) else [row[name]] for name in their_features(tf)}
            features = {
                name: tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
                if name == "raw"
                else tf.train.Feature(float_list=tf.train.FloatList(value=values))
                if name == "price"
                else tf.train.Feature(int64_list=tf.train.Int64List(value=values))
                for name, values in lists.items()
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    # The reader takes TensorFlow's own specifications of features.
    read = pa.Table.from_batches(list(TFRecordReader(path, their_features(tf), 16)))
    assert read.to_pylist() == batch.select(list(their_features(tf))).to_pylist()
    assert table(TFRecordReader(path))[3]["pair"] == [3, 4]


@pytest.mark.tensorflow
def test_tensorflow_reads_our_prebatched_files(tensorflow: Any, tmp_path: Path) -> None:
    tf = tensorflow
    path, batch = str(tmp_path / "x"), rows(0, 50, False)
    data.write_tfrecord(path, [batch], prebatched=True)
    features = {
        "id": tf.io.FixedLenFeature([50], tf.int64),
        "pair": tf.io.FixedLenFeature([50, 2], tf.int64),
        "clicks": tf.io.RaggedFeature(tf.int64, "clicks", [tf.io.RaggedFeature.RowLengths("clicks/row_lengths")]),
        "words": tf.io.RaggedFeature(tf.string, "words", [tf.io.RaggedFeature.RowLengths("words/row_lengths")]),
    }
    parsed = tf.io.parse_single_example(next(iter(tf.data.TFRecordDataset(path))), features)
    assert parsed["id"].numpy().tolist() == batch.column("id").to_pylist()
    assert parsed["pair"].numpy().tolist() == batch.column("pair").to_pylist()
    assert parsed["clicks"].to_list() == batch.column("clicks").to_pylist()
    assert parsed["words"].to_list() == [[w.encode() for w in row] for row in batch.column("words").to_pylist()]
