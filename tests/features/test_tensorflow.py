"""``FeatureTransform`` against TensorFlow's own layers, in graphs: ``input_layer`` and ``linear_model``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchsparse_rec import features
from torchsparse_rec.compat.converters import feature_column_to_tensorflow
from torchsparse_rec.features import FeatureTransform
from torchsparse_rec.nn import EmbeddingBagCollection

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:.layer.add_variable. is deprecated"),
]

BATCH = {
    "age": np.array([17.0, 42.0, 30.0, 65.5], np.float32),
    "user": np.array([3, -1, 99, 7], np.int64),
    "city": np.array([b"Oslo", b"", b"Lima", b"Oslo"], object),
    "tags": np.array([[b"a", b"b", b""], [b"", b"", b""], [b"c", b"z", b"a"], [b"b", b"b", b"b"]], object),
}


def columns() -> tuple[list[features.Column], list[features.Column]]:
    """Return the columns of the deep part and of the wide part."""
    age = features.numeric_column("age")
    years = features.bucketized_column(age, [18, 30, 65])
    user = features.categorical_column_with_identity("user", 100)
    city = features.categorical_column_with_hash_bucket("city", 50)
    tags = features.categorical_column_with_vocabulary_list("tags", ["a", "b", "c"], num_oov_buckets=2)
    deep = [
        age,
        years,
        features.embedding_column(user, 3, max_norm=0.8),
        features.embedding_column(tags, 2, "sqrtn"),
        features.indicator_column(tags),
        features.indicator_column(city),
    ]
    return deep, [years, user, tags, features.crossed_column([user, "city"], 200)]


def run(tf, make):
    """Return what a graph with its own features computes, and its variables by name."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        features_ = {name: tf.constant(x) for name, x in BATCH.items()}
        result = make(v1.feature_column, features_)
        variables = {variable.name: variable for variable in v1.global_variables()}
        session.run(v1.global_variables_initializer())
        session.run(v1.tables_initializer())
        rng = np.random.default_rng(0)
        for variable in variables.values():
            session.run(variable.assign(rng.standard_normal(variable.shape).astype(np.float32)))
        return session.run(result), {name: session.run(variable) for name, variable in variables.items()}


def test_the_input_layer_of_tensorflow(tensorflow):
    tensorflow.get_logger().setLevel("ERROR")
    deep, _ = columns()
    theirs = [feature_column_to_tensorflow(column) for column in deep]
    expected, variables = run(tensorflow, lambda module, x: module.input_layer(x, theirs))
    transform = FeatureTransform(deep)
    bags = EmbeddingBagCollection(transform.embedding_bag_configs())
    with torch.no_grad():
        for config in transform.embedding_bag_configs():
            (name,) = [x for x in variables if f"/{config.name}/" in x]
            bags.embedding_bags[config.name].weight.copy_(torch.from_numpy(variables[name]))
        made = transform(BATCH)
        pooled = bags(made.sparse)
        ours = transform.dense_features(made, pooled)
    assert torch.allclose(ours, torch.from_numpy(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_the_linear_model_of_tensorflow(tensorflow, combiner):
    tensorflow.get_logger().setLevel("ERROR")
    _, wide = columns()
    theirs = [feature_column_to_tensorflow(column) for column in wide]
    expected, variables = run(tensorflow, lambda module, x: module.linear_model(x, theirs, sparse_combiner=combiner))
    transform = FeatureTransform([], wide, linear_combiner=combiner)
    bags = EmbeddingBagCollection(transform.linear_bag_configs())
    with torch.no_grad():
        for config in transform.linear_bag_configs():
            column = config.name.removesuffix("_weights")
            bags.embedding_bags[config.name].weight.copy_(
                torch.from_numpy(variables[f"linear_model/{column}/weights:0"])
            )
        ours = bags(transform(BATCH).sparse).values().sum(1, keepdim=True)
    ours = ours + torch.from_numpy(variables["linear_model/bias_weights:0"])
    assert torch.allclose(ours, torch.from_numpy(expected), rtol=1e-5, atol=1e-5)
