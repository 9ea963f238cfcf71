"""``parse_example_features``: the description of what columns read from files of examples."""

from __future__ import annotations

import pytest

from torchsparse_rec import features
from torchsparse_rec.features import FeatureTransform, parse_example_features

data = pytest.importorskip("torchsparse_rec.data")


def test_every_kind_of_column():
    weighted = features.weighted_categorical_column(features.categorical_column_with_identity("i", 5), "w")
    inner = features.categorical_column_with_identity("y", 3)
    found = parse_example_features(
        [
            features.numeric_column("a", shape=(2,), default_value=1.5),
            features.numeric_column("n", dtype="int32", default_value=3),
            features.embedding_column(features.crossed_column(["x", inner, "z"], 9), 4),
            weighted,
            features.bucketized_column(features.numeric_column("b"), [1.0]),
            features.sequence_categorical_column_with_hash_bucket("q", 3),
            features.sequence_numeric_column("t"),
            features.categorical_column_with_vocabulary_list("v", [1, 2]),
        ]
    )
    assert found == {
        "a": data.FixedLenFeature((2,), "float32", [1.5, 1.5]),
        "n": data.FixedLenFeature((), "int64", 3),
        "x": data.VarLenFeature("bytes"),
        "z": data.VarLenFeature("bytes"),
        "y": data.VarLenFeature("int64"),
        "i": data.VarLenFeature("int64"),
        "w": data.VarLenFeature("float32"),
        "b": data.FixedLenFeature((), "float32"),
        "q": data.VarLenFeature("bytes"),
        "t": data.VarLenFeature("float32"),
        "v": data.VarLenFeature("int64"),
    }


def test_two_ways_to_read_one_feature_are_refused():
    columns = [features.numeric_column("a"), features.categorical_column_with_identity("a", 5)]
    with pytest.raises(ValueError, match="columns must read feature 'a' in one way"):
        parse_example_features(columns)


def test_one_column_and_what_is_none():
    assert list(parse_example_features(features.numeric_column("a"))) == ["a"]
    with pytest.raises(ValueError, match="columns must hold a Column in each place, got 'b' at position 1"):
        parse_example_features([features.numeric_column("a"), "b"])


def test_a_file_through_the_columns(tmp_path):
    pa = pytest.importorskip("pyarrow")
    rows = {"age": pa.array([1.0, 2.0], pa.float32()), "city": pa.array([[b"Oslo"], []], pa.list_(pa.binary()))}
    data.write_tfrecord(tmp_path / "x.tfrecord", [pa.RecordBatch.from_pydict(rows)])
    city = features.categorical_column_with_hash_bucket("city", 10)
    columns = [features.numeric_column("age"), features.embedding_column(city, 2)]
    (batch,) = data.TFRecordReader(tmp_path / "x.tfrecord", parse_example_features(columns), batch_size=2)
    made = FeatureTransform(columns)(batch)
    assert made.dense.tolist() == [[1.0], [2.0]] and made.sparse.lengths().tolist() == [1, 0]
