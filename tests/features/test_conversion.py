"""TensorFlow's columns and Keras's layers as columns and back: the same configurations, the same ids."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from torchsparse_rec import features, initializers, variable
from torchsparse_rec.compat import keras as ours
from torchsparse_rec.compat.converters import (
    feature_column_to_tensorflow,
    feature_column_to_torch,
    keras_layer_to_column,
)
from torchsparse_rec.features import FeatureTransform

USER = features.categorical_column_with_identity("user", 10, default_value=3)
WORD = features.categorical_column_with_vocabulary_list("word", ["a", "b"], num_oov_buckets=2)
AGE = features.numeric_column("age", shape=(2,), default_value=1.5)
COLUMNS = [
    USER,
    features.categorical_column_with_hash_bucket("city", 100),
    features.categorical_column_with_hash_bucket("zip", 100, "int32"),
    WORD,
    features.categorical_column_with_vocabulary_list("n", [3, 4], default_value=1),
    AGE,
    features.bucketized_column(features.numeric_column("years"), [1.0, 2.0]),
    features.crossed_column([USER, "city", features.crossed_column(["a", "b"], 3)], 50, hash_key=9),
    features.weighted_categorical_column(WORD, "w"),
    features.indicator_column(WORD),
    features.embedding_column(USER, 4, "sum", features.RandomUniform(-1.0, 1.0), max_norm=2.0, trainable=False),
    features.embedding_column(WORD, 4),
    features.embedding_column(USER, 4, initializer=features.Constant(1.0)),
    features.embedding_column(USER, 4, initializer=features.RandomNormal(0.0, 2.0)),
    features.sequence_categorical_column_with_identity("user", 10),
    features.sequence_categorical_column_with_hash_bucket("city", 10),
    features.sequence_categorical_column_with_vocabulary_list("word", ["a"]),
    features.sequence_numeric_column("times", shape=2),
]


@pytest.mark.tensorflow
@pytest.mark.parametrize("column", COLUMNS, ids=lambda x: x.name + " " + type(x).__name__)
def test_columns_travel_both_ways(column, tensorflow):
    tensorflow.get_logger().setLevel("ERROR")
    theirs = feature_column_to_tensorflow(column)
    assert type(theirs).__name__ == type(column).__name__ and theirs.name == column.name
    assert feature_column_to_torch(theirs) == column
    from tensorflow.python.feature_column.serialization import serialize_feature_column

    if not isinstance(column, features.EmbeddingColumn) or isinstance(column.initializer, initializers.TruncatedNormal):
        # Configurations, as TensorFlow writes them, are read too.
        assert feature_column_to_torch(serialize_feature_column(theirs)).name == column.name


@pytest.mark.tensorflow
def test_files_and_shared_embeddings_travel(tensorflow, tmp_path):
    file = tmp_path / "words"
    file.write_text("a\nb\n")
    column = features.categorical_column_with_vocabulary_file("word", file, num_oov_buckets=1)
    assert feature_column_to_torch(feature_column_to_tensorflow(column)) == column
    with tensorflow.Graph().as_default():
        pair = [tensorflow.feature_column.categorical_column_with_identity(key, 5) for key in "ab"]
        theirs = tensorflow.feature_column.shared_embeddings(pair, 3, combiner="sum")
        converted = [feature_column_to_torch(column) for column in theirs]
        steps = tensorflow.feature_column.sequence_categorical_column_with_identity("c", 5)
        mixed = tensorflow.feature_column.shared_embeddings([steps, pair[0]], 3)
        converted_mixed = [feature_column_to_torch(column) for column in mixed]
    mine = [features.categorical_column_with_identity(key, 5) for key in "ab"]
    assert converted == features.shared_embeddings(mine, 3, "sum")
    assert [x.name for x in converted] == [x.name for x in theirs]
    own = features.sequence_categorical_column_with_identity("c", 5)
    assert converted_mixed == features.shared_embeddings([own, mine[0]], 3)


@pytest.mark.tensorflow
def test_what_has_no_counterpart_is_refused(tensorflow):
    scaled = tensorflow.feature_column.numeric_column("x", normalizer_fn=lambda x: x / 2)
    with pytest.raises(ValueError, match="column 'x': normalizers must have a function in place of normalizer_fn"):
        feature_column_to_torch(scaled)
    converted = feature_column_to_torch(scaled, normalizers={"x": features.Standardize(0.0, 4.0)})
    assert FeatureTransform([converted])({"x": [4.0]}).dense.item() == 2.0
    for column, message in (
        (features.numeric_column("x", normalizer_fn=features.Log()), "normalizer_fn must be None"),
        (
            features.embedding_column(
                features.categorical_column_with_identity("x", 9), 2, ev_option=variable.EmbeddingVariableOption()
            ),
            "column 'x_embedding': ev_option must be None",
        ),
        (
            features.categorical_column_with_hash_bucket("x", 9, drop_missing=False),
            "column 'x': drop_missing must be True: TensorFlow's columns leave out '' and -1",
        ),
        (features.embedding_column(USER, 2, initializer=torch.nn.init.zeros_), "initializer must be one of"),
        (features.shared_embeddings([USER], 2)[0], "outside of a graph"),
        (features.categorical_column_with_vocabulary_list("x"), "adapt"),
    ):
        with pytest.raises(ValueError, match=message):
            feature_column_to_tensorflow(column)
    with pytest.raises(ValueError, match="column must be a column of tf.feature_column or its configuration, got 3"):
        feature_column_to_torch(3)


def ids(column, batch):
    made = FeatureTransform([], [column])(batch).sparse
    return made.values().tolist()


WORDS = ["b", "z", "a", "[UNK]"]
NUMBERS = [7, 99, 5, 6]


@pytest.mark.parametrize(
    ("layer", "key", "inputs"),
    [
        (ours.Hashing(10), "x", WORDS),
        (ours.HashedCrossing(10), ["x", "y"], WORDS),
        (ours.Discretization([0.0, 6.5]), "x", [7.0, 0.0, float("nan"), -1.0]),
        (ours.StringLookup(vocabulary=["a", "b"]), "x", WORDS),
        (ours.StringLookup(vocabulary=["a", "b"], mask_token="z"), "x", WORDS),
        (ours.StringLookup(vocabulary=["a", "b", "z", "[UNK]"], num_oov_indices=0), "x", WORDS),
        (ours.IntegerLookup(vocabulary=[5, 7]), "x", NUMBERS),
    ],
    ids=lambda x: type(x).__name__,
)
def test_layers_and_their_columns_give_the_same_ids(layer, key, inputs):
    column = keras_layer_to_column(layer, key)
    config = {"class_name": type(layer).__name__, "config": layer.get_config()}
    assert keras_layer_to_column(config, key) == column
    given = (inputs, inputs) if isinstance(key, list) else inputs
    assert ids(column, {"x": inputs, "y": inputs}) == layer(given).tolist()


def test_hashes_of_integers_are_asked_for():
    column = keras_layer_to_column(ours.Hashing(1000), "x", dtype=torch.int64)
    assert ids(column, {"x": NUMBERS}) == ours.Hashing(1000)(NUMBERS).tolist()
    with pytest.raises(ValueError, match="dtype must be given for Hashing alone, got 'int64' for IntegerLookup"):
        keras_layer_to_column(ours.IntegerLookup(vocabulary=[1]), "x", dtype="int64")


MARKS_STRINGS, MARKS_INTEGERS = [["b"], [""], ["a"], ["?"]], [[7], [-1], [5], [6]]


@pytest.mark.parametrize("mode", ["int", "one_hot", "multi_hot", "count"])
@pytest.mark.parametrize("library", ["ours", pytest.param("keras", marks=pytest.mark.tensorflow)])
def test_values_that_mark_missing_ones_keep_the_layers_ids(library, mode, request):
    """TensorFlow's columns leave out the empty string and -1; layers have ids for them, unless they are the mask."""
    if library == "keras":
        request.getfixturevalue("tensorflow")
        import keras

        layers = keras.layers
    else:
        layers = ours
    strings, integers = {"vocabulary": ["a", "b"]}, {"vocabulary": [5, 7]}
    cases = [
        (layers.Hashing(10, output_mode=mode), MARKS_STRINGS, "string"),
        (layers.Hashing(10, output_mode=mode), MARKS_INTEGERS, "int64"),
        (layers.StringLookup(output_mode=mode, **strings), MARKS_STRINGS, "string"),
        (layers.StringLookup(output_mode=mode, vocabulary=["a", "", "b"]), MARKS_STRINGS, "string"),
        (layers.IntegerLookup(output_mode=mode, **integers), MARKS_INTEGERS, "string"),
        (layers.IntegerLookup(output_mode=mode, vocabulary=[5, -1], oov_token=-2), MARKS_INTEGERS, "string"),
        (layers.Discretization([0.0, 6.5], output_mode=mode), MARKS_INTEGERS, "string"),
    ]
    if mode == "int":
        cases += [
            (layers.StringLookup(mask_token="?", **strings), MARKS_STRINGS, "string"),
            (layers.IntegerLookup(mask_token=6, **integers), MARKS_INTEGERS, "string"),
        ]
    if mode in ("int", "one_hot"):
        cases += [(layers.HashedCrossing(10, output_mode=mode), x, "string") for x in (MARKS_STRINGS, MARKS_INTEGERS)]
    for layer, inputs, dtype in cases:
        crosses = type(layer).__name__ == "HashedCrossing"
        column = keras_layer_to_column(layer, ["x", "y"] if crosses else "x", dtype=dtype)
        given = np.array(inputs)
        expected = np.asarray(layer((given, given) if crosses else given))
        saved = features.column_from_config(column.to_config())
        transform = FeatureTransform(*(([], [saved]) if mode == "int" else ([saved],)))
        for x in (given, inputs):
            made = transform({"x": x, "y": x})
            result = made.sparse.values() if mode == "int" else made.dense
            assert result.reshape(expected.shape).tolist() == expected.tolist(), (layer, x)


def test_adapt_counts_the_values_that_a_column_keeps():
    column = features.categorical_column_with_vocabulary_list("x", drop_missing=False)
    assert FeatureTransform([column]).adapt([{"x": ["", "a", ""]}]).columns[0].vocabulary_list == ("", "a")


def test_columns_of_one_call_keep_or_leave_out_each_by_itself():
    columns = [features.categorical_column_with_hash_bucket(x, 9, "int64", drop_missing=x == "a") for x in "ab"]
    transform = FeatureTransform(columns)
    for batch in ({"a": [3, -1], "b": [3, -1]}, {x: torch.tensor([3, -1]) for x in "ab"}):
        assert transform(batch).sparse.lengths().tolist() == [1, 0, 1, 1]


def test_masks_that_columns_leave_out_are_counted_nowhere():
    strings = ours.StringLookup(vocabulary=["a", "b"], mask_token="", output_mode="count")
    integers = ours.IntegerLookup(vocabulary=[3, 4], mask_token=-1, oov_token=-2, output_mode="count")
    for layer, inputs in ((strings, [["", "a"], ["q", "b"]]), (integers, [[-1, 3], [9, 4]])):
        made = FeatureTransform([keras_layer_to_column(layer, "x")])({"x": np.array(inputs)}).dense
        assert made.tolist() == layer(inputs).tolist()


@pytest.mark.tensorflow
def test_layers_of_keras_convert(tensorflow):
    import keras

    lookup = keras.layers.StringLookup()
    lookup.adapt(np.array(["a", "b", "a"]))
    assert ids(keras_layer_to_column(lookup, "x"), {"x": WORDS}) == lookup(WORDS).numpy().tolist()
    normalization = keras.layers.Normalization()
    normalization.adapt(np.array([[1.0, 2.0], [3.0, 8.0]], np.float32))
    x = torch.tensor([[5.0, 5.0]])
    made = FeatureTransform([keras_layer_to_column(normalization, "x")])({"x": x}).dense
    assert torch.allclose(made, torch.from_numpy(np.array(normalization(x.numpy()))), rtol=1e-6)
    counts = keras_layer_to_column(keras.layers.CategoryEncoding(4, output_mode="count"), "x")
    assert FeatureTransform([counts])({"x": [[1, 1, 3]]}).dense.tolist() == [[0, 2, 0, 1]]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (ours.Hashing(10, salt=3), "salt must not be given"),
        (ours.Hashing(10, mask_value="a"), "mask_value must not be given"),
        (ours.HashedCrossing(0), "num_bins must not be 0"),
        (ours.Discretization(num_bins=3), "bin_boundaries must be given"),
        (ours.StringLookup(), "vocabulary must be given"),
        (ours.StringLookup(vocabulary=["a"], num_oov_indices=2), "num_oov_indices must be 0 or 1"),
        (ours.StringLookup(vocabulary=["a"], invert=True), "invert must not be given"),
        (
            ours.StringLookup(vocabulary=["a"], idf_weights=[1.0], output_mode="tf_idf"),
            "output_mode must not be 'tf_idf'",
        ),
        (ours.StringLookup(vocabulary=["a"], oov_token=None), "oov_token must be given"),
        (
            ours.StringLookup(vocabulary=["a"], max_tokens=5, pad_to_max_tokens=True, output_mode="count"),
            "pad_to_max_tokens must not be given",
        ),
        (
            ours.StringLookup(vocabulary=["a"], mask_token="m", output_mode="count"),
            "mask_token of a 'count' must be '' or -1, which columns leave out, got 'm'",
        ),
        (
            ours.IntegerLookup(vocabulary=[1], mask_token=0, output_mode="multi_hot"),
            "mask_token of a 'multi_hot' must be '' or -1",
        ),
        (
            ours.StringLookup(vocabulary=["a", "[UNK]"]),
            "vocabulary must not hold a special token, which no column tells apart, got '[UNK]'",
        ),
        ({"class_name": "Normalization", "config": {"axis": [-1]}}, "mean and variance must be given"),
        ({"class_name": "Dense", "config": {}}, "layer must be one of"),
    ],
    ids=str,
)
def test_layers_without_a_column_are_refused(layer, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        keras_layer_to_column(layer, ["x", "y"] if isinstance(layer, ours.HashedCrossing) else "x")
