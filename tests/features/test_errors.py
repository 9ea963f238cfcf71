"""Errors of columns and of batches: each names the column, the argument, the value and what was expected."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from torchsparse_rec import JaggedTensor, features
from torchsparse_rec.features import FeatureTransform
from torchsparse_rec.nn import EmbeddingBagCollection

identity = features.categorical_column_with_identity
hashed = features.categorical_column_with_hash_bucket
listed = features.categorical_column_with_vocabulary_list
bucketized = features.bucketized_column
numeric = features.numeric_column
from_config = features.column_from_config
embedded = features.embedding_column
crossed = features.crossed_column
indicator = features.indicator_column
in_file = features.categorical_column_with_vocabulary_file

SHAPE = "default_value must be numbers of the column's shape (1,), got "
IDENTITY = identity("x", 10)
HASHED = hashed("x", 10)
NUMBER = numeric("x")
WEIGHTED = features.weighted_categorical_column(IDENTITY, "w")
SEQUENCE = features.sequence_categorical_column_with_identity("x", 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: numeric(3), "key must be a string that is not empty, got 3"),
        (lambda: numeric(""), "key must be a string that is not empty, got ''"),
        (lambda: numeric("x", shape=0), "column 'x': shape must be an integer of at least 1, got 0"),
        (lambda: numeric("x", shape=(2.5,)), "shape must be an integer of at least 1, got 2.5"),
        (lambda: numeric("x", dtype="string"), "dtype must be an integer or a float, got 'string'"),
        (lambda: numeric("x", dtype="complex64"), "dtype must be 'string', an integer or a float"),
        (lambda: numeric("x", default_value=[1.0, 2.0]), SHAPE + "[1.0, 2.0]"),
        (lambda: numeric("x", default_value=["a"]), SHAPE + "['a']"),
        (lambda: numeric("x", default_value=0.5, dtype="int64"), "default_value must be of the dtype int64"),
        (lambda: numeric("x", normalizer_fn=3), "normalizer_fn must be callable, or the configuration"),
        (lambda: features.Standardize(1.0), "mean and variance must both be given"),
        (lambda: features.Standardize([1.0] * 3, [1.0] * 2), "mean and variance must have as many numbers"),
        (lambda: features.Standardize(1.0, [1.0, -1.0]), "Standardize: variance must be a number or numbers that are"),
        (lambda: features.Standardize("a", 1.0), "Standardize: mean must be a number or numbers, got 'a'"),
        (
            lambda: features.sequence_numeric_column("x", normalizer_fn=features.Standardize()),
            "column 'x': normalizer_fn must have its mean and variance, got Standardize(mean=None",
        ),
        (
            lambda: numeric("x", normalizer_fn=features.Compose(*[features.Standardize()] * 2)),
            "column 'x': normalizer_fn must have its mean and variance, got Compose(",
        ),
        (
            lambda: numeric("x", 2, normalizer_fn=features.Standardize([1.0] * 3, [1.0] * 3)),
            "normalizer_fn must have one mean and variance for each of the 2 elements of an example, got 3",
        ),
        (lambda: bucketized(IDENTITY, [1.0]), "source_column must be a numeric_column"),
        (lambda: bucketized(numeric("x", (1, 2)), [1.0]), "must have one dimension"),
        (lambda: bucketized(NUMBER, []), "boundaries must be a list that is not empty"),
        (lambda: bucketized(NUMBER, [2, 1]), "ascending, got 2 followed by 1 at position 1"),
        (lambda: bucketized(NUMBER, [1.0, float("nan")]), "boundaries must be numbers, got nan at position 1"),
        (lambda: bucketized(NUMBER), "either boundaries or num_bins must be given"),
        (lambda: bucketized(NUMBER, num_bins=0), "num_bins must be an integer of at least 1, got 0"),
        (lambda: bucketized(NUMBER, num_bins=2, epsilon=1.5), "epsilon must be in (0, 1), got 1.5"),
        (lambda: identity("x", 0), "num_buckets must be an integer of at least 1, got 0"),
        (lambda: identity("x", 2**63), "num_buckets must be an integer below 2 ** 63, got 9223372036854775808"),
        (lambda: identity("x", 2, 2), "default_value must be in [0, 2), got 2"),
        (lambda: identity("x", 2, -1), "default_value must be an integer of at least 0"),
        (lambda: hashed("x", None), "hash_bucket_size must be an integer"),
        (lambda: hashed("x", 2**63), "hash_bucket_size must be an integer"),
        (lambda: hashed("x", 2, torch.float32), "dtype must be 'string' or an integer"),
        (lambda: listed("x", []), "vocabulary_list must not be empty"),
        (lambda: listed("x", ["a", 1]), "and not both, got 1 at position 1"),
        (lambda: listed("x", [1, 2, 1]), "got 1 at positions 0 and 2"),
        (lambda: listed("x", ["a", b"a"]), "got 'a' at positions 0 and 1"),
        (lambda: listed("x", [2**63]), "must hold integers of 64 bits"),
        (lambda: listed("x", ["\ud800"]), "strings that can be encoded"),
        (lambda: listed("x", ["a"], "int64"), "dtype must be that of vocabulary"),
        (lambda: listed("x", ["a"], None, 1, 1), "must not both be given, got 1"),
        (lambda: listed("x", ["a"], None, 1.5), "must be an integer, got 1.5"),
        (lambda: listed("x", ["a"], num_oov_buckets=-1), "num_oov_buckets"),
        (lambda: listed("x", max_tokens=0), "max_tokens must be an integer"),
        (lambda: in_file("x", ""), "vocabulary_file must be given"),
        (lambda: in_file("x", "no-file"), "must be a file that can be read, got no-f"),
        (lambda: in_file("x", "f", 1, file_format="tfrecord_gzip"), "file_format"),
        (lambda: crossed(["a"], 5), "keys must be a list of at least two, got ['a']"),
        (lambda: crossed("ab", 5), "keys must be a list of at least two, got 'ab'"),
        (lambda: crossed(["a", 3], 5), "features' names or categorical columns, got 3 at position 1"),
        (lambda: crossed(["a", HASHED], 5), "keys must not be hashed already"),
        (lambda: crossed(["a", WEIGHTED], 5), "keys must not be weighted or sequences"),
        (lambda: crossed(["a", "b"], 0), "column 'a_X_b': hash_bucket_size must be an integer"),
        (lambda: crossed(["a", "b"], 1, 2**64), "hash_key must be an integer of 64 bits"),
        (lambda: features.weighted_categorical_column(NUMBER, "w"), "must be a categorical column, got NumericColumn"),
        (lambda: features.weighted_categorical_column(WEIGHTED, "w"), "must not be weighted or a sequence"),
        (lambda: features.weighted_categorical_column(IDENTITY, "w", "string"), "dtype must be a number's"),
        (lambda: indicator(5), "indicator_column: categorical_column must be a categorical column, got 5"),
        (lambda: features.SequenceCategoricalColumn(WEIGHTED), "must be a plain one"),
        (lambda: embedded(IDENTITY, 0), "column 'x': dimension must be an integer of at least 1, got 0"),
        (lambda: embedded(IDENTITY, 2, "max"), "combiner must be one of ('sum', 'mean', 'sqrtn')"),
        (lambda: embedded(IDENTITY, 2, max_norm=0.0), "max_norm must be above 0, got 0.0"),
        (lambda: embedded(IDENTITY, 2, initializer=1.0), "initializer must be callable"),
        (lambda: features.shared_embeddings([], 2), "categorical_columns must hold a column, got none"),
        (lambda: features.shared_embeddings([IDENTITY, HASHED], 2), "must be of one kind with the same num_buckets"),
        (lambda: from_config({"class_name": "X", "config": {}}), "class_name must be one of"),
        (lambda: bucketized(NUMBER, [float("nan")]), "boundaries must be numbers, got nan at position 0"),
        (lambda: bucketized(NUMBER, ["a", "b"]), "boundaries must be numbers, got 'a' at position 0"),
        (lambda: bucketized(NUMBER, num_bins=2, epsilon="a"), "epsilon must be in (0, 1), got 'a'"),
        (lambda: crossed(["a", "b"], 1, "k"), "hash_key must be an integer of 64 bits, got 'k'"),
        (lambda: embedded(IDENTITY, 2, max_norm="a"), "max_norm must be above 0, got 'a'"),
        (
            lambda: features.shared_embeddings([listed(key) for key in "ab"], 2),
            "shared_embeddings: categorical_columns must be complete, got VocabularyList",
        ),
        (lambda: from_config([1]), "config must be a dict of class_name and config, got [1]"),
        (lambda: from_config({"class_name": "NumericColumn", "x": 1}), "config must be a dict of class_n"),
        (lambda: from_config({"config": {}, "x": 1}), "config must be a dict of class_name and config"),
        (lambda: from_config({"class_name": [1], "config": {}}), "class_name must be one of ['Bucketiz"),
        (lambda: from_config({"class_name": "LeafColumn", "config": {}}), "got 'LeafColumn'"),
        (lambda: from_config({"class_name": "Column", "config": {}}), "got 'Column'"),
        (
            lambda: from_config({"class_name": "NumericColumn", "config": [1]}),
            "NumericColumn: config must be a dict of its fields, got [1]",
        ),
        (
            lambda: from_config({"class_name": "NumericColumn", "config": {}}),
            "NumericColumn: a configuration must have the field 'key', got {}",
        ),
        (
            lambda: numeric("x", normalizer_fn={"class_name": "Log", "config": {"x": 1}}),
            "normalizer_fn: a configuration must have the arguments of its class",
        ),
        (
            lambda: numeric("x", normalizer_fn={"class_name": "Log"}),
            "normalizer_fn must be callable, or the configuration of one of",
        ),
        (
            lambda: from_config({"class_name": "NumericColumn", "config": {"key": "x", "size": 1}}),
            "NumericColumn: a configuration must have the fields",
        ),
        (
            lambda: numeric("x", normalizer_fn=abs).to_config(),
            "NumericColumn 'x': normalizer_fn must have a to_config()",
        ),
        (lambda: features.Compose((abs,)).to_config(), "Compose: normalizers must have a to_config()"),
        (lambda: FeatureTransform([]), "columns must hold at least one column, got none"),
        (lambda: FeatureTransform([3]), "columns must hold a Column in each place, got 3 at position 0"),
        (lambda: FeatureTransform([NUMBER], [NUMBER]), "linear_columns must hold a CategoricalColumn in each place"),
        (lambda: FeatureTransform([NUMBER, NUMBER]), "columns must have distinct names, got 'x'"),
        (lambda: FeatureTransform([IDENTITY], [HASHED]), "columns of ids must have distinct names, got 'x'"),
        (lambda: FeatureTransform([NUMBER], linear_combiner="max"), "linear_combiner must be one of"),
        (lambda: FeatureTransform([], [SEQUENCE]), "linear_columns must not hold sequences"),
    ],
)
def test_columns_refuse(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("columns", "batch", "message"),
    [
        ([IDENTITY], [1], "a frame or a batch of Arrow's, such as pyarrow's RecordBatch, got list"),
        ([IDENTITY], {"y": [1]}, "batch must have every feature, got none named 'x': ['y']"),
        ([WEIGHTED], {"x": [1]}, "none named 'w', which column 'x_weighted_by_w' reads: ['x']"),
        ([IDENTITY], {"x": 3}, "column 'x': must be a tensor, a numpy array"),
        ([IDENTITY], {"x": torch.tensor(3)}, "must be strided numbers of shape [B] or [B, k], got torch.int64"),
        (
            [IDENTITY],
            {"x": torch.zeros(1, 1, 1)},
            "column 'x': 'x' must be of shape [B] or [B, k], got one of shape [1, 1, 1]",
        ),
        ([IDENTITY], {"x": torch.zeros(2, 2).to_sparse()}, "must be strided numbers"),
        ([IDENTITY], {"x": np.zeros((1, 1, 1))}, "must be of shape [B] or [B, k], got one of shape [1, 1, 1]"),
        ([IDENTITY], {"x": np.zeros(())}, "an array must have shape [B] or [B, k], got []"),
        ([numeric("x", (2, 2))], {"x": torch.zeros(1, 4, 1)}, "4 numbers per example, got numbers of shape [4, 1]"),
        ([IDENTITY], {"x": np.zeros(1, np.complex64)}, "must hold numbers or strings, got numpy complex64"),
        ([IDENTITY], {"x": [1, "a"]}, "column 'x': must hold numbers or strings, and not both, got 'a' at position 1"),
        ([HASHED], {"x": ["a", 1]}, "must hold str or bytes that can be encoded, got 1 at position 1"),
        ([HASHED], {"x": ["\ud800"]}, "must hold str or bytes that can be encoded"),
        ([IDENTITY], {"x": [[1], 2]}, "a list must hold values or lists, and not both, got 2 at position 1"),
        ([IDENTITY], {"x": [[[1]]]}, "must hold numbers or strings"),
        (
            [IDENTITY],
            {"x": [1, 2**70]},
            "must hold numbers or strings, and not both, got 1180591620717411303424 at pos",
        ),
        ([IDENTITY], {"x": [None, {}]}, "column 'x': must hold numbers or strings, and not both, got {} at position 1"),
        ([IDENTITY], {"x": ["a"]}, "column 'x': must hold integers, got strings"),
        ([IDENTITY], {"x": [0.5]}, "column 'x': must hold integers, got floats, torch.float64"),
        ([IDENTITY], {"x": [True]}, "column 'x': must hold integers, got bools"),
        ([HASHED], {"x": [1]}, "column 'x': must hold strings, got integers"),
        ([NUMBER], {"x": ["a"]}, "column 'x': must hold numbers, got strings"),
        ([NUMBER], {"x": torch.zeros(2, 3)}, "column 'x': must hold 1 numbers per example, got 3"),
        ([NUMBER], {"x": [[1.0], []]}, "column 'x': must hold 1 numbers per example, got 0 in example 1"),
        (
            [NUMBER],
            {"x": [1.0, None]},
            "column 'x': a number is missing in example 1, and the column has no default_value",
        ),
        ([IDENTITY], {"x": ([1, 2], torch.tensor([0, 1]))}, "offsets must rise from 0 to the number of values, 2"),
        ([IDENTITY], {"x": ([1, 2], torch.tensor([0.0, 2.0]))}, "offsets must be a vector of int32 or int64"),
        (
            [IDENTITY],
            {"x": (np.array(["a"]), np.array(["b"]))},
            "column 'x': offsets must be a vector of int32 or int64",
        ),
        (
            [numeric("x", 2)],
            {"x": JaggedTensor(torch.zeros(5), offsets=torch.tensor([0, 2, 4]))},
            "column 'x': must hold 2 numbers per example, got 5 for 2 examples",
        ),
        (
            [IDENTITY],
            {"x": ([[1, 2]], torch.tensor([0, 2]))},
            "the values of (values, offsets) must be one-dimensional",
        ),
        ([IDENTITY], {"x": JaggedTensor(torch.zeros(2, 2), lengths=torch.tensor([2]))}, "values must have rank 1"),
        (
            [IDENTITY, numeric("y")],
            {"x": [1, 2], "y": [1.0]},
            "columns must have the same number of examples, got 2 in 'x' and 1 in 'y'",
        ),
        ([crossed(["x", "y"], 5)], {"x": ["a"], "y": [0.5]}, "'y' must hold strings or integers, got floats"),
        (
            [IDENTITY],
            {"x": JaggedTensor(torch.tensor([1]), torch.tensor([0.5]), lengths=torch.tensor([1]))},
            "column 'x': a JaggedTensor must have no weights, got some",
        ),
        (
            [numeric("x", normalizer_fn=lambda x: x[:, :0])],
            {"x": [1.0]},
            "column 'x': normalizer_fn must keep the shape, got [1, 0]",
        ),
    ],
)
def test_batches_are_refused(columns, batch, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        FeatureTransform(columns)(batch)


def test_pyarrow_columns_are_refused():
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(
        ValueError, match=r"column 'x': must hold numbers or strings, or lists of them, got timestamp\[s\]"
    ):
        FeatureTransform([IDENTITY])({"x": pa.array([1], pa.timestamp("s"))})
    with pytest.raises(ValueError, match="column 'x': must be a pyarrow Array or ChunkedArray, got Int64Scalar"):
        FeatureTransform([IDENTITY])({"x": pa.scalar(1)})
    with pytest.raises(ValueError, match="column 'x': must hold integers, got strings"):
        FeatureTransform([IDENTITY])(pa.table({"x": ["a"]}))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            features.shared_embeddings([IDENTITY], 2, shared_embedding_collection_name="t")
            + features.shared_embeddings([identity("y", 10)], 3, shared_embedding_collection_name="t"),
            "table 't': its columns must have the same dimension, got 2 and 3",
        ),
        (
            features.shared_embeddings([IDENTITY], 2, shared_embedding_collection_name="t")
            + features.shared_embeddings([identity("y", 11)], 2, shared_embedding_collection_name="t"),
            "table 't': its columns must have the same num_buckets, got 10 and 11",
        ),
        (
            features.shared_embeddings(
                [
                    features.weighted_categorical_column(IDENTITY, "w"),
                    features.sequence_categorical_column_with_identity("y", 10),
                ],
                2,
            ),
            "shared_embeddings 'x_weighted_by_w_y_shared_embedding': columns must not be weighted beside sequences",
        ),
    ],
)
def test_tables_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        FeatureTransform(columns).embedding_bag_configs()


@pytest.mark.parametrize("kind", ["sparse", "weighted", "sequence"])
def test_columns_of_ids_without_a_table_are_named(kind):
    column, calls = {
        "sparse": (IDENTITY, "embedding_bag_configs"),
        "weighted": (features.weighted_categorical_column(IDENTITY, "w"), "weighted_embedding_bag_configs"),
        "sequence": (features.sequence_categorical_column_with_identity("s", 10), "embedding_configs"),
    }[kind]
    transform = FeatureTransform([column])
    message = rf"columns must hold embedding_column\(column, dimension\) for tables of {kind} ids, got '{column.name}'"
    with pytest.raises(ValueError, match=message):
        getattr(transform, calls)()
    other = identity("other", 5)
    for columns in ([column, embedded(column, 2)], [column, numeric("n")]):
        transform = FeatureTransform(columns, linear_columns=[other])
        assert len(transform.linear_bag_configs()) == 1
    assert getattr(FeatureTransform([column, embedded(column, 2)]), calls)()[0].embedding_dim == 2
    assert getattr(FeatureTransform([numeric("n")], linear_columns=[other]), calls)() == []


def test_tables_that_only_dots_tell_apart_are_refused():
    columns = [identity(key, 3) for key in ("a.b", "a_b")]
    message = "tables must have names that differ in more than dots, which become _, got 'a.b_"
    with pytest.raises(ValueError, match=message):
        FeatureTransform([embedded(column, 2) for column in columns])
    with pytest.raises(ValueError, match=message):
        FeatureTransform([], columns)


def test_ids_beyond_a_table_are_found_by_the_lookup():
    transform = FeatureTransform([embedded(IDENTITY, 2)])
    bags = EmbeddingBagCollection(transform.embedding_bag_configs())
    for wrong in (10, 2**40):
        with pytest.raises(IndexError, match=rf"must be in \[0, 10\), got {wrong}"):
            bags(transform({"x": [1, wrong]}).sparse)


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (b"", {}, "must hold a word, got none"),
        (b"a\nb\n", {"vocabulary_size": 3}, r"must have 3 lines \(vocabulary_size\), got 2"),
        (b"a\n\nb\n", {}, "must have no empty line, got one: line 2"),
        (b"a\nb\na\n", {}, "must not hold a word twice, got b'a' at positions 0 and 2"),
        (b"1_0\n", {"dtype": "int64"}, "must hold integers of 64 bits, got b'1_0' in line 1"),
        (b"9223372036854775808\n", {"dtype": "int64"}, "must hold integers of 64 bits"),
        (b"1\nx\n", {"dtype": "int64"}, "must hold integers of 64 bits, got b'x' in line 2"),
    ],
)
def test_vocabulary_files_are_refused(tmp_path, text, arguments, message):
    file = tmp_path / "words"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        FeatureTransform([in_file("x", file, **arguments)])
