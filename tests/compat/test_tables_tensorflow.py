"""Tables and slots from and to files of TensorFlow and Keras, which train on the other side with the same results."""

import importlib

import numpy as np
import pytest
import torch

from torchsparse_rec import nn, optim
from torchsparse_rec.compat.checkpoints.format import CheckpointReader
from torchsparse_rec.compat.tensorflow import load_tables, save_tables

from .test_tables import ROWS, WIDTH, Model

# Keras saves its variables by numpy's old protocol.
KERAS_WARNS = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
# TensorFlow's optimizer in tf.compat.v1.train with its arguments, and ours. Rows without gradient stay in all but Adam.
V1 = {
    "Adam": ("AdamOptimizer", {}, optim.Adam, {"tensorflow_eps": True}),
    "Adagrad": ("AdagradOptimizer", {}, optim.Adagrad, {"initial_accumulator_value": 0.1, "eps": 0}),
    "Ftrl": (
        "FtrlOptimizer",
        {"l1_regularization_strength": 0.01, "l2_regularization_strength": 0.02},
        optim.Ftrl,
        {"l1": 0.01, "l2": 0.02},
    ),
    "RMSProp": ("RMSPropOptimizer", {"decay": 0.75}, optim.RMSprop, {"alpha": 0.75, "eps": 0, "lazy": True}),
    "RMSProp momentum": (
        "RMSPropOptimizer",
        {"decay": 0.75, "momentum": 0.5, "centered": True},
        optim.RMSprop,
        {"alpha": 0.75, "eps": 0, "momentum": 0.5, "centered": True, "lazy": True},
    ),
    "Momentum": ("MomentumOptimizer", {"momentum": 0.9}, optim.SGD, {"momentum": 0.9, "lazy": True}),
}
KERAS = {
    "Adam": ("Adam", {}, optim.Adam, {"tensorflow_eps": True, "eps": 1e-7}),
    "Adagrad": ("Adagrad", {"epsilon": 1e-20}, optim.Adagrad, {"initial_accumulator_value": 0.1, "eps": 0}),
    "Ftrl": ("Ftrl", {}, optim.Ftrl, {}),
    "RMSprop": (
        "RMSprop",
        {"rho": 0.75, "momentum": 0.5, "epsilon": 1e-20},
        optim.RMSprop,
        {"alpha": 0.75, "momentum": 0.5, "eps": 0},
    ),
    "SGD": ("SGD", {"momentum": 0.9}, optim.SGD, {"momentum": 0.9}),
}


def batch(seed):
    """Return the ids of a batch, none twice, and the gradients of their rows."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(ROWS)[:4]
    return ids, rng.uniform(0.5, 1, (len(ids), WIDTH)).astype(np.float32)


def step(model, optimizer, seed):
    ids, gradients = batch(seed)
    optimizer.zero_grad()
    (model.tables["users"](torch.from_numpy(ids)) * torch.from_numpy(gradients)).sum().backward()
    optimizer.step()


class Graph:
    """A partitioned variable in a graph of TensorFlow, with its optimizer."""

    def __init__(self, tf, name, given, partitions=3):
        self.v1 = v1 = tf.compat.v1
        with tf.Graph().as_default():
            initializer = v1.random_normal_initializer(seed=1)
            partitioner = v1.fixed_size_partitioner(partitions)
            shape = [ROWS, WIDTH]
            self.table = v1.get_variable(
                "users/embedding_weights", shape, initializer=initializer, partitioner=partitioner
            )
            self.ids, self.gradients = v1.placeholder(tf.int64), v1.placeholder(tf.float32)
            rows = v1.nn.embedding_lookup(self.table, self.ids, partition_strategy="div")
            step = v1.train.get_or_create_global_step()
            optimizer = getattr(v1.train, name)(0.1, **given)
            self.train = optimizer.minimize(tf.reduce_sum(rows * self.gradients), step)
            self.whole = self.table.as_tensor()
            self.saver = v1.train.Saver()
            self.saver_by_name = v1.train.Saver({v.op.name: v for v in v1.global_variables()})
            self.session = v1.Session()
            self.session.run(v1.global_variables_initializer())

    def save(self, path, by_name):
        with self.session.graph.as_default():
            (self.saver_by_name if by_name else self.saver).save(self.session, path)

    def restore(self, path):
        with self.session.graph.as_default():
            self.session.run(self.v1.global_variables_initializer())
            self.saver.restore(self.session, path)

    def step(self, seed):
        ids, gradients = batch(seed)
        self.session.run(self.train, {self.ids: ids, self.gradients: gradients})
        return self.session.run(self.whole)


@pytest.mark.tensorflow
@pytest.mark.parametrize("by_name", [False, True], ids=["slices", "parts by name"])
@pytest.mark.parametrize("name", V1)
def test_training_goes_on_from_tensorflow_1_and_back(tensorflow, tmp_path, name, by_name):
    theirs, given, ours, options = V1[name]
    graph = Graph(tensorflow, theirs, given)
    for seed in range(5):
        graph.step(seed)
    path = str(tmp_path / "model.ckpt")
    graph.save(path, by_name)
    model = Model()
    optimizer = ours(model.parameters(), lr=0.1, **options)
    for seed in range(3):  # a past that must leave nothing
        step(model, optimizer, 100 + seed)
    moves = load_tables(path, model, optimizer=optimizer)
    assert moves[0].source == "users/embedding_weights" and moves[0].parts == 3
    reader = CheckpointReader(path)
    if not by_name:
        assert torch.equal(model.weight, reader.read("users/embedding_weights"))

    # Back, before another step: the same bits under the same names.
    again = str(tmp_path / "again.ckpt")
    count = {"global_step": 5} if name == "Momentum" else {}
    save_tables(again, model, "{}/embedding_weights", optimizer=optimizer, partitions=3, **count)
    theirs_again = tensorflow.train.load_checkpoint(again)
    if not by_name:
        names = set(theirs_again.get_variable_to_shape_map())
        assert names == set(tensorflow.train.load_checkpoint(path).get_variable_to_shape_map())
        for each in names:
            wanted, found = tensorflow.train.load_checkpoint(path).get_tensor(each), theirs_again.get_tensor(each)
            if name == "RMSProp" and each.endswith("_1"):
                assert not found.any()  # a momentum of 0, by which TensorFlow multiplies the last step
            else:
                np.testing.assert_allclose(found, wanted, rtol=1e-6 if name == "RMSProp momentum" else 0)
    graph.restore(again)

    for seed in range(5, 8):
        wanted = graph.step(seed)
        step(model, optimizer, seed)
        np.testing.assert_allclose(model.weight.detach().numpy(), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Ftrl", "RMSProp momentum", "Momentum"])
def test_training_goes_on_from_an_object_based_checkpoint(tensorflow, tmp_path, name):
    theirs, given, ours, options = V1[name]
    tf = tensorflow
    table = tf.Variable(np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32))
    other = getattr(tf.compat.v1.train, theirs)(0.1, **given)

    def their_step(seed):
        ids, gradients = batch(seed)
        other.apply_gradients([(tf.IndexedSlices(gradients, ids, [ROWS, WIDTH]), table)], global_step=count)

    count = tf.Variable(0, dtype=tf.int64)
    for seed in range(4):
        their_step(seed)
    path = tf.train.Checkpoint(model=tf.train.Checkpoint(user_table=table), opt=other).save(str(tmp_path / "model"))
    model = Model()
    optimizer = ours(model.parameters(), lr=0.1, **options)
    load_tables(tmp_path, model, {"users": "user_table"}, optimizer=optimizer)
    assert torch.equal(model.weight, CheckpointReader(path).read("model/user_table/.ATTRIBUTES/VARIABLE_VALUE"))
    for seed in range(4, 6):
        their_step(seed)
        step(model, optimizer, seed)
        np.testing.assert_allclose(model.weight.detach().numpy(), table.numpy(), rtol=2e-5, atol=2e-6)


def keras_model(keras, name="Adam", given=None, layers=1):
    inputs = [keras.Input((1,), name=f"in_{k}") for k in range(layers)]
    rows = [keras.layers.Embedding(ROWS, WIDTH, name=f"users{k or ''}")(x) for k, x in enumerate(inputs)]
    model = keras.Model(inputs, rows)
    model.compile(getattr(keras.optimizers, name)(0.1, **(given or {})), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def keras_step(tf, model, seed):
    ids, gradients = batch(seed)
    slices = [tf.IndexedSlices(gradients, ids, [ROWS, WIDTH]) for _ in model.trainable_variables]
    model.optimizer.apply(slices, model.trainable_variables)
    return [v.value.numpy() for v in model.trainable_variables]


@KERAS_WARNS
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", KERAS)
def test_training_goes_on_from_keras_and_back(tensorflow, tmp_path, name):
    keras = importlib.import_module("keras")
    theirs, given, ours, options = KERAS[name]
    there = keras_model(keras, theirs, given)
    for seed in range(4):
        keras_step(tensorflow, there, seed)
    files = {name: str(tmp_path / name) for name in ("model.weights.h5", "model.keras")}
    there.save_weights(files["model.weights.h5"])
    there.save(files["model.keras"])
    checkpoint = tensorflow.train.Checkpoint(model=there, optimizer=there.optimizer)
    files["checkpoint"] = checkpoint.save(str(tmp_path / "model"))
    models = {}
    for file, path in files.items():
        model = Model()
        optimizer = ours(model.parameters(), lr=0.1, **options)
        load_tables(path, model, optimizer=optimizer)
        assert np.array_equal(model.weight.detach().numpy(), there.trainable_variables[0].value.numpy())
        models[file] = model, optimizer
    saved = str(tmp_path / "again.weights.h5")
    model, optimizer = models["model.keras"]
    save_tables(saved, model, optimizer=optimizer, global_step=4)
    again = keras_model(keras, theirs, given)
    again.load_weights(saved)
    for a, b in zip(again.optimizer.variables, there.optimizer.variables, strict=True):
        np.testing.assert_allclose(a.value.numpy(), b.value.numpy(), rtol=1e-6)
    for seed in range(4, 6):
        wanted = keras_step(tensorflow, there, seed)[0]
        np.testing.assert_allclose(keras_step(tensorflow, again, seed)[0], wanted, rtol=1e-5, atol=1e-6)
        for file, (model, optimizer) in models.items():
            step(model, optimizer, seed)
            np.testing.assert_allclose(model.weight.detach().numpy(), wanted, 2e-5, 2e-6, err_msg=file)


@KERAS_WARNS
@pytest.mark.tensorflow
@pytest.mark.parametrize(("name", "given"), [("RMSprop", {"momentum": 0.9}), ("Nadam", {})])
def test_slots_of_another_optimizer_of_keras(tensorflow, tmp_path, name, given):
    """Refuse slots whose number and names are those of Adam's."""
    there = keras_model(importlib.import_module("keras"), name, given)
    keras_step(tensorflow, there, 0)
    files = [str(tmp_path / file) for file in ("model.weights.h5", "model.keras")]
    there.save_weights(files[0])
    there.save(files[1])
    checkpoint = tensorflow.train.Checkpoint(model=there, optimizer=there.optimizer)
    model = Model()
    optimizer, before = optim.Adam(model.parameters()), model.weight.detach().clone()
    for path in (*files, checkpoint.save(str(tmp_path / "model"))):
        with pytest.raises(ValueError, match="has slots of Keras's '.*(rm_?sprop|nadam).*', not of Adam"):
            load_tables(path, model, optimizer=optimizer)
    assert torch.equal(model.weight, before)


@KERAS_WARNS
@pytest.mark.tensorflow
def test_tables_of_one_shape_in_a_file_of_keras(tensorflow, tmp_path):
    keras = importlib.import_module("keras")
    there = keras_model(keras, layers=2)
    keras_step(tensorflow, there, 0)
    path = str(tmp_path / "model.weights.h5")
    there.save_weights(path)
    model = torch.nn.ModuleDict({name: nn.Embedding(ROWS, WIDTH) for name in ("users", "users1")})
    optimizer = optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="does not say which slots are those of .*: of 4, 4 have its shape"):
        load_tables(path, model, optimizer=optimizer)
    for names in (["users", "users1"], [v.path for v in there.trainable_variables]):
        load_tables(path, model, optimizer=optimizer, variables=names)
        for name, slot in (("users", 2), ("users1", 4)):
            wanted = there.optimizer.variables[slot].value.numpy()
            assert np.array_equal(optimizer.state[model[name].weight]["exp_avg"].numpy(), wanted)
        with pytest.raises(ValueError, match="must be in the order of model.trainable_variables, where '.*' is before"):
            load_tables(path, model, optimizer=optimizer, variables=names[::-1])
    with pytest.raises(ValueError, match="variables must be all 2 that the 4 slots are of, and .* one of them, got 1"):
        load_tables(path, model, optimizer=optimizer, variables=["users"])


@KERAS_WARNS
@pytest.mark.tensorflow
def test_saved_models(tensorflow, tmp_path):
    keras = importlib.import_module("keras")
    there = keras_model(keras)
    tensorflow.saved_model.save(there, str(tmp_path / "saved"))
    there.export(str(tmp_path / "exported"), verbose=False)
    for folder in ("saved", "exported"):
        model = Model()
        load_tables(tmp_path / folder, model)
        assert np.array_equal(model.weight.detach().numpy(), there.trainable_variables[0].value.numpy())


@pytest.mark.tensorflow
def test_variables_of_one_name(tensorflow, tmp_path):
    """TensorFlow calls variables alike that are given no name: their objects' paths tell them apart."""
    tables = {name: tensorflow.Variable(np.full((ROWS, WIDTH), k, np.float32)) for k, name in enumerate(("a", "b"))}
    path = tensorflow.train.Checkpoint(**tables).save(str(tmp_path / "model"))
    for k, name in enumerate(tables):
        model = Model()
        load_tables(path, model, {"users": name})
        assert bool((model.weight == k).all())
    with pytest.raises(ValueError, match="'Variable', for .*, must name one variable, got 'a = Variable', 'b = Var"):
        load_tables(path, Model(), {"users": "Variable"})
