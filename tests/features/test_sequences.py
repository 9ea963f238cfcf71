"""Sequences: every step in its place as in TensorFlow; steps without an id; sparse tensors as inputs."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from torchsparse_rec import features
from torchsparse_rec.compat.tensorflow import RaggedTensor, SparseTensor
from torchsparse_rec.features import FeatureTransform
from torchsparse_rec.nn import EmbeddingCollection

IDENTITY = features.sequence_categorical_column_with_identity("x", 5)
WORDS = features.sequence_categorical_column_with_vocabulary_list("x", ["a", "b"])
HASHED = features.sequence_categorical_column_with_hash_bucket("x", 50)

# The second step of the first row is bad or missing, and the last one of the second; the third row has none.
PADDED = np.array([[3, -1, 4], [2, -1, -1], [-1, -1, -1]])
BAD = np.array([[3, -2, 4], [2, 1, -7], [-1, -1, -1]])
TEXT = np.array([[b"a", b"?", b"b"], [b"", b"a", b""], [b"", b"", b""]], object)
HOLES = SparseTensor([[0, 1], [0, 4], [2, 0]], torch.tensor([3, 4, -1]), [4, 6])
CASES: dict[str, tuple[Any, Any]] = {
    "padded": (IDENTITY, PADDED),
    "bad ids": (IDENTITY, BAD),
    "words": (WORDS, TEXT),
    "hashed words": (HASHED, TEXT),
    "holes": (IDENTITY, HOLES),
    "rank 3": (IDENTITY, SparseTensor([[0, 1, 0], [0, 3, 0], [2, 0, 0]], torch.tensor([3, 4, 1]), [4, 6, 1])),
}


def padded(collection: EmbeddingCollection, made: Any) -> tuple[torch.Tensor, list[int]]:
    rows = collection(made.sequence)["x"]
    return rows.to_padded_dense(), rows.lengths().tolist()


def filled(transform: FeatureTransform, columns: int) -> EmbeddingCollection:
    """Return tables whose rows all differ, and which can be trained."""
    collection = EmbeddingCollection(transform.embedding_configs(), grad_mode="dense")
    (config,) = transform.embedding_configs()
    with torch.no_grad():
        rows = torch.arange(1.0, (config.num_embeddings - 1) * columns + 1).reshape(-1, columns)
        next(collection.parameters())[:-1] = rows
    return collection


def test_a_bad_id_keeps_its_place() -> None:
    transform = FeatureTransform([features.embedding_column(IDENTITY, 1)])
    made = transform({"x": [[3, -2, 4], [], [-1]]})
    assert made.sequence.values().tolist() == [3, 5, 4, 5] and made.sequence.lengths().tolist() == [3, 0, 1]
    collection = filled(transform, 1)
    steps, lengths = padded(collection, made)
    assert steps.squeeze(2).tolist() == [[4, 0, 5], [0, 0, 0], [0, 0, 0]] and lengths == [3, 0, 1]
    steps.sum().backward()
    assert next(collection.parameters()).grad.flatten().tolist() == [0, 0, 0, 1, 1, 0]


def test_missing_steps_keep_their_places_and_trailing_ones_end_the_row() -> None:
    transform = FeatureTransform([IDENTITY])
    for x in (PADDED, [[3, None, 4], [2, None], [None]]):
        made = transform({"x": x}).sequence
        assert made.values().tolist() == [3, 5, 4, 2] and made.lengths().tolist() == [3, 1, 0]
    numbers = features.sequence_numeric_column("x", default_value=0.5)
    steps = FeatureTransform([numbers])({"x": [[1, None, 3, None], [None], [None, 2]]}).sequence_dense["x"]
    assert steps.values().flatten().tolist() == [1, 0.5, 3, 0.5, 2] and steps.lengths().tolist() == [3, 0, 2]
    pairs = features.sequence_numeric_column("x", shape=2, default_value=-1)
    steps = FeatureTransform([pairs])({"x": [[1, 2, 3, None], [None, None]]}).sequence_dense["x"]
    assert steps.values().tolist() == [[1, 2], [3, -1]] and steps.lengths().tolist() == [2, 0]


def test_an_id_that_is_too_large_is_refused_by_the_lookup() -> None:
    """Refuse the id of the row of zeros behind the table."""
    transform = FeatureTransform([features.embedding_column(IDENTITY, 2)])
    for bad in (5, 6):
        with pytest.raises(IndexError, match=r"in \[0, 6\), got 6"):
            EmbeddingCollection(transform.embedding_configs())(transform({"x": [[1, bad]]}).sequence)


def test_indicators_of_sequences() -> None:
    transform = FeatureTransform([features.indicator_column(IDENTITY), features.numeric_column("y")])
    made = transform({"x": [[3, -2], [7]], "y": [1.0, 2.0]})
    assert made.dense.shape == (2, 1) and transform.dense_width == 1
    steps = made.sequence_dense["x_indicator"]
    assert steps.values().tolist() == [[0, 0, 0, 1, 0], [0] * 5, [0] * 5] and steps.lengths().tolist() == [2, 1]


def test_sparse_and_ragged_tensors_are_rows() -> None:
    column = features.categorical_column_with_identity("x", 9)
    ragged = RaggedTensor.from_row_lengths([3, 1, 4], [2, 0, 1])
    words = features.categorical_column_with_vocabulary_list("x", ["a", "b"])
    for given in (ragged, ragged.to_sparse(), SparseTensor([[0, 0, 4], [0, 0, 6], [2, 0, 0]], [3, 1, 4], [3, 1, 7])):
        assert FeatureTransform([column])({"x": given}).sparse["x"].to_dense()[0].tolist() == [3, 1]
        assert FeatureTransform([column])({"x": given}).sparse.lengths().tolist() == [2, 0, 1]
    made = FeatureTransform([words])({"x": SparseTensor([[1, 3]], ["b"], [2, 4])})
    assert made.sparse.values().tolist() == [1] and made.sparse.lengths().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (SparseTensor([[0, 0], [3, 0]], [1, 2], [3, 1]), r"rows \[0, 3\) and not negative, got \[3, 0\] at position 1"),
        (SparseTensor([[0, -1]], [1], [3, 1]), r"got \[0, -1\] at position 0"),
        (SparseTensor([[1, 0], [0, 0]], [1, 2], [3, 1]), "indices must be sorted by row"),
        (SparseTensor([[0, 0, 0]], [1], [3, 2, 2]), r"must have the shape .* got \[3, 2, 2\]"),
        (SparseTensor([[0, 1], [0, 1]], [1, 2], [3, 2]), "at most one value, got 2 in step 1 of example 0"),
    ],
    ids=["row", "negative", "order", "rank 3", "twice"],
)
def test_sparse_tensors_that_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"column 'x': .*{message}"):
        FeatureTransform([IDENTITY])({"x": given})
    with pytest.raises(ValueError, match="column 'x': must hold 1 numbers per example, got a sparse tensor with holes"):
        FeatureTransform([features.numeric_column("x")])({"x": HOLES})


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", CASES)
def test_embeddings_and_indicators_of_sequences_are_tensorflows(tensorflow: Any, name: str) -> None:
    tf, (column, given) = tensorflow, CASES[name]
    v2 = importlib.import_module("tensorflow.python.feature_column.feature_column_v2")
    converters = importlib.import_module("torchsparse_rec.compat.converters")
    theirs = converters.feature_column_to_tensorflow(column)
    if isinstance(given, SparseTensor):
        x = tf.SparseTensor(given.indices.numpy(), given.values.numpy(), given.dense_shape.numpy())
    else:
        x = tf.constant(given)
    cache = v2.FeatureTransformationCache({"x": x})
    transform = FeatureTransform([features.embedding_column(column, 2), features.indicator_column(column)])
    collection, made = filled(transform, 2), transform({"x": given})
    ids = theirs.get_sparse_tensors(cache, None).id_tensor
    table = next(collection.parameters()).detach().numpy()[:-1]
    wanted = tf.nn.safe_embedding_lookup_sparse(tf.constant(table), ids, combiner="mean").numpy()
    indicator, lengths = tf.feature_column.indicator_column(theirs).get_sequence_dense_tensor(cache, None)
    steps, own_lengths = padded(collection, made)
    assert own_lengths == lengths.numpy().tolist()
    longest = max(own_lengths)
    assert steps.tolist() == wanted[:, :longest].tolist()
    hot = made.sequence_dense["x_indicator"].to_padded_dense()
    assert hot.tolist() == indicator.numpy()[:, :longest].tolist()


def test_a_sparse_row_may_end_within_a_step():
    transform = FeatureTransform([features.sequence_numeric_column("x", shape=(2,), default_value=7.0)])
    indices = torch.tensor([[0, 0], [0, 1], [0, 2], [0, 3], [1, 0]])
    batch = {"x": SparseTensor(indices, torch.arange(5.0), torch.tensor([2, 4]))}
    steps = transform(batch).sequence_dense["x"]
    assert steps.lengths().tolist() == [2, 1] and steps.values().tolist() == [[0, 1], [2, 3], [4, 7]]


# ---- A table of sequences and of other columns ----------------------------------------------------------------------

KINDS = {
    "identity": ("categorical_column_with_identity", [5], [[3, -1, 4], [2, 2, 1]], [[2, -1], [-1, -1], [0, 4], [1, 1]]),
    "words": (
        "categorical_column_with_vocabulary_list",
        [["a", "b", "c"]],
        [["a", "?", "c"], ["b", "", ""]],
        [["c", "?"], ["", ""], ["b", "b"], ["a", ""]],
    ),
    "hashed words": (
        "categorical_column_with_hash_bucket",
        [7],
        [["a", "?", "c"], ["b", "", ""]],
        [["c", "?"], ["", ""], ["b", "b"], ["a", ""]],
    ),
}


@pytest.mark.tensorflow
@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
@pytest.mark.parametrize("name", KINDS)
def test_a_sequence_and_another_column_share_a_table_as_in_tensorflow(
    tensorflow: Any, name: str, combiner: str
) -> None:
    """Look up the layout of DIN: the steps of a history, and a candidate, here of several ids, in one table."""
    tf, (function, arguments, history, item) = tensorflow, KINDS[name]
    history = [*history, *history]
    batch = {"history": np.array(history), "item": np.array(item)}
    if batch["item"].dtype.kind == "U":
        batch = {key: np.char.encode(x).astype(object) for key, x in batch.items()}
    v2 = importlib.import_module("tensorflow.python.feature_column.feature_column_v2")

    def columns(module: Any) -> Any:
        steps = getattr(module, f"sequence_{function}")("history", *arguments)
        return module.shared_embeddings([steps, getattr(module, function)("item", *arguments)], 2, combiner)

    transform = FeatureTransform(columns(features))
    (config,) = transform.embedding_configs()
    assert config.feature_names == ["history", "item"] and transform.embedding_bag_configs() == []
    collection = filled(transform, 2)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        steps, pooled = columns(tf.feature_column)
        cache = v2.FeatureTransformationCache({key: tf.constant(x.tolist()) for key, x in batch.items()})
        found = steps.get_sequence_dense_tensor(cache, None), pooled.get_dense_tensor(cache, None)
        (table,) = tf.compat.v1.global_variables()
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.tables_initializer()])
        session.run(table.assign(next(collection.parameters()).detach().numpy()[:-1]))
        (wanted, lengths), wanted_item = session.run(found)
    made = transform(batch)
    rows = collection(made.sequence)
    assert rows["history"].lengths().tolist() == lengths.tolist()
    longest = int(lengths.max())
    assert rows["history"].to_padded_dense().tolist() == wanted[:, :longest].tolist()
    ours = transform.dense_features(made, sequence=rows)
    np.testing.assert_allclose(ours.detach().numpy(), wanted_item, rtol=1e-6)
    ours.sum().backward()  # the one table learns from both columns, and its row of zeros from none
    assert next(collection.parameters()).grad[-1].tolist() == [0, 0]


def test_a_column_beside_a_sequence_has_no_row_of_zeros() -> None:
    """Refuse its ids that are too large, leave out negative ones, and ask for the rows that are to be pooled."""
    item = features.categorical_column_with_identity("item", 5)
    transform = FeatureTransform(features.shared_embeddings([IDENTITY, item], 2))
    made = transform({"x": [[3, -2], []], "item": [-1, 4]})
    assert made.sparse is None and made.sequence.keys() == ["x", "item"]
    assert made.sequence.values().tolist() == [3, 5, 4] and made.sequence.lengths().tolist() == [2, 0, 0, 1]
    with pytest.raises(ValueError, match="sequence must hold the result of column 'item_shared_embedding', got None"):
        transform.dense_features(made)
    with pytest.raises(IndexError, match=r"in \[0, 6\), got 6"):
        EmbeddingCollection(transform.embedding_configs())(transform({"x": [[1], []], "item": [1, 5]}).sequence)
