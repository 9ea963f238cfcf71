"""Bags and collections beside Keras's layers with pooling after them. Run by test_keras.py."""

import keras
import numpy as np
import pytest
import torch

import torchsparse_rec.keras as ours
from torchsparse_rec import nn

from .cases_of_layers import ROWS, batches, ids


def reference(table, bags, combiner, weights, mask_zero):
    out = []
    for row, its in zip(bags, weights, strict=True):
        its = np.where(row == 0, 0, its) if mask_zero else its
        total = {"sum": 1, "mean": its.sum(), "sqrtn": np.sqrt((its**2).sum())}[combiner]
        out.append((table[row] * its[:, None]).sum(0) / total if total else np.zeros(table.shape[1]))
    return np.array(out)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("mask_zero", [False, True])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_bags(combiner, mask_zero, is_weighted):
    layer = ours.EmbeddingBag(ROWS, 4, combiner, mask_zero=mask_zero)
    bags = ids(5, 3) % 4
    bags[2] = 0
    weights = np.random.default_rng(1).random((5, 3), dtype="float32") if is_weighted else np.ones((5, 3), "float32")
    found = layer(bags, weights) if is_weighted else layer(bags)
    expected = reference(layer.get_weights()[0], bags, combiner, weights, mask_zero)
    np.testing.assert_allclose(found.detach(), expected, 1e-5, 1e-7)
    values = [layer.embeddings.value * 2]
    arguments = (bags, weights) if is_weighted else (bags,)
    stateless, _ = layer.stateless_call(values, [], *arguments)
    np.testing.assert_allclose(stateless.detach(), expected * 2, 1e-5, 1e-7)


def test_a_bag_without_ids_is_zeros():
    assert not ours.EmbeddingBag(ROWS, 4)(np.zeros((3, 0), "int64")).any()


TABLES = [
    {"num_embeddings": ROWS, "embedding_dim": 2, "name": "a", "feature_names": ["x", "y"], "pooling": "mean"},
    nn.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=3, name="b", feature_names=["x"], padding_idx=0),
]


def bag_model(kind, is_ours):
    """Return a model with bags, of our layer or of Keras's layers."""
    keras.utils.set_random_seed(0)
    inputs = {"x": keras.Input((4,), dtype="int32", name="x"), "y": keras.Input((2,), dtype="int32", name="y")}
    if kind == "bag":
        layer = ours.EmbeddingBag(ROWS, 3, name="bag")(inputs["x"])
        if not is_ours:
            layer = keras.ops.mean(keras.layers.Embedding(ROWS, 3, name="bag")(inputs["x"]), 1)
    elif is_ours:
        layer = ours.EmbeddingBagCollection(TABLES, name="bags")(inputs)
    else:
        a, b = keras.layers.Embedding(ROWS, 2, name="a"), keras.layers.Embedding(ROWS, 3, name="b")
        mask = keras.ops.cast(keras.ops.not_equal(inputs["x"], 0), "float32")[:, :, None]
        parts = [keras.ops.mean(a(inputs[x]), 1) for x in ("x", "y")]
        layer = keras.ops.concatenate([*parts, keras.ops.sum(b(inputs["x"]) * mask, 1)], 1)
    return keras.Model(inputs, keras.layers.Dense(1, name="top")(layer))


def in_order(mine, theirs):
    """Return pairs of variables: the two models make them in different orders."""
    return zip(*(sorted(variables, key=lambda x: x.shape) for variables in (mine, theirs)), strict=True)


@pytest.mark.parametrize("kind", ["bag", "collection"])
@pytest.mark.parametrize("name", ["Adam", "SGD", "Adagrad"])
def test_models_of_bags_train_as_kerass(kind, name):
    mine, theirs = bag_model(kind, True), bag_model(kind, False)
    for x, y in in_order(mine.variables, theirs.variables):
        x.assign(y)
    for model, module in ((mine, ours), (theirs, keras)):
        model.compile(getattr(module.optimizers, name)(0.05), "mse")
        for (x, y), target in batches():
            model.train_on_batch({"x": x, "y": y}, target)
    assert all(v.value.grad.is_sparse for v in mine.trainable_variables if v.shape[0] == ROWS)
    for x, y in in_order(mine.variables + mine.optimizer.variables, theirs.variables + theirs.optimizer.variables):
        np.testing.assert_allclose(x.numpy(), y.numpy(), 1e-4, 1e-6)
    clone = keras.models.clone_model(mine)
    clone.set_weights(mine.get_weights())
    (x, y), _ = batches(1)[0]
    np.testing.assert_allclose(clone.predict({"x": x, "y": y}, verbose=0), mine.predict({"x": x, "y": y}, verbose=0))
    with pytest.warns(UserWarning, match="revert: left unchanged, because Keras has no such layer: bag"):
        ours.revert(mine)


def test_bags_without_our_optimizer_have_dense_gradients():
    for kind in ("bag", "collection"):
        model = bag_model(kind, True)
        model.compile("adam", "mse")
        (x, y), target = batches(1)[0]
        model.train_on_batch({"x": x, "y": y}, target)
        assert not any(v.value.grad.is_sparse for v in model.trainable_variables)


def test_stateless_calls_of_a_collection():
    layer = ours.EmbeddingBagCollection(TABLES)
    features = {"x": torch.from_numpy(ids(5, 4)), "y": torch.from_numpy(ids(5))}
    expected = layer(features)
    found, _ = layer.stateless_call([v.value * 2 for v in layer.trainable_variables], [], features)
    torch.testing.assert_close(found, expected * 2)
    assert not torch.equal(*[v.value[:, :2] for v in layer.tables])


def test_errors_of_bags():
    with pytest.raises(ValueError, match="EmbeddingBag: combiner must be one of 'sum', 'mean', 'sqrtn', got 'max'"):
        ours.EmbeddingBag(3, 2, "max")
    with pytest.raises(ValueError, match="EmbeddingBag: output_dim must be a positive integer, got 0"):
        ours.EmbeddingBag(3, 0)
    with pytest.raises(ValueError, match=r"EmbeddingBag: inputs must have rank 2, \[B, L\], got shape \(2,\)"):
        ours.EmbeddingBag(3, 2)(np.array([1, 2]))
    with pytest.raises(ValueError, match=r"per_sample_weights must have the shape of input"):
        ours.EmbeddingBag(3, 2)(np.array([[1, 2]]), np.array([[1.0]]))
    with pytest.raises(IndexError, match=r"input\[0, 1\] must be in \[0, 3\), got 7"):
        ours.EmbeddingBag(3, 2)(np.array([[1, 7]]))
    make, table = ours.EmbeddingBagCollection, TABLES[0]
    with pytest.raises(ValueError, match=r"tables\[0\] may have num_embeddings, .* got max_norm"):
        make([{**table, "max_norm": 1.0}])
    with pytest.raises(ValueError, match=r"tables\[1\].max_norm must be left out in a layer of Keras, got 2.0"):
        make([table, nn.EmbeddingBagConfig(3, 2, "t", feature_names=["f"], max_norm=2.0)])
    with pytest.raises(ValueError, match=r"tables\[0\].pooling must be one of 'sum', 'mean', 'sqrtn', got 'max'"):
        make([{**table, "pooling": "max"}])
    with pytest.raises(ValueError, match=r"inputs must be a dict with the features \['x', 'y'\], got \['x'\]"):
        make([table])({"x": np.array([1])})
    with pytest.raises(ValueError, match=r"tables\[1\].name must be distinct"):
        make([table, table])
