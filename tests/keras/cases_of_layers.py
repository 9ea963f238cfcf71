"""Our layers beside Keras's, and the conversion of models. Run by test_keras.py, in a process of its own."""

import pickle
import zipfile

import keras
import numpy as np
import pytest
import torch

import torchsparse_rec.keras as ours
from torchsparse_rec import nn

ROWS = 30
KERAS_OPTIMIZERS = ("Adagrad", "RMSprop", "Ftrl", "Adadelta", "Adamax", "Lamb", "Adam", "AdamW", "Lion", "Nadam")


def ids(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, ROWS, shape)


def functional(layer=keras.layers.Embedding, **arguments):
    """Return a model with a table that two inputs share, masked, and another table."""
    keras.utils.set_random_seed(0)
    first, second = keras.Input((4,), dtype="int32", name="first"), keras.Input((2,), dtype="int32", name="second")
    shared = layer(ROWS, 3, mask_zero=True, name="shared", **arguments)
    other = layer(ROWS, 5, name="other")
    parts = [
        keras.layers.GlobalAveragePooling1D(name="masked")(shared(first)),
        keras.layers.GlobalAveragePooling1D(name="average")(shared(second)),
        keras.layers.Flatten(name="flat")(other(second)),
    ]
    top = keras.layers.Dense(1, name="top")(keras.layers.Concatenate(name="both")(parts))
    return keras.Model([first, second], top, name="model")


def batches(count=5):
    target = np.random.default_rng(3).random((count, 8, 1), dtype="float32")
    return [((ids(8, 4, seed=k), ids(8, 2, seed=k + 99)), target[k]) for k in range(count)]


def trained(model, optimizer, **options):
    model.compile(optimizer, "mse", **options)
    for batch in batches():
        model.train_on_batch(*batch)
    return model


def check_same(mine, theirs, atol=1e-6):
    for x, y in zip(mine.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(x, y, 1e-5, atol)


def layouts(model):
    return [model.get_layer(name).embeddings.value.grad.layout for name in ("shared", "other")]


# ---- Embedding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16", "float64", "bfloat16"])
@pytest.mark.parametrize("inputs", [ids(2, 3), ids(2, 3).astype("float32"), ids(4, 2, 3).astype("uint8"), ids()])
def test_lookups_are_kerass(dtype, inputs):
    theirs = keras.layers.Embedding(ROWS, 4, mask_zero=True, dtype=dtype)
    mine = ours.Embedding(ROWS, 4, mask_zero=True, dtype=dtype)
    expected = theirs(inputs)
    mine.build()
    mine.set_weights(theirs.get_weights())
    found = mine(inputs)
    assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert torch.equal(mine.compute_mask(inputs), theirs.compute_mask(inputs))
    symbolic = [x(keras.KerasTensor(inputs.shape, "int32")) for x in (mine, theirs)]
    assert symbolic[0].shape == symbolic[1].shape and symbolic[0].dtype == symbolic[1].dtype
    spec = keras.KerasTensor((None, 7), "int32")
    assert mine.compute_output_spec(spec).shape == theirs.compute_output_spec(spec).shape == (None, 7, 4)


@pytest.mark.parametrize("bad", [-1, ROWS])
def test_ids_out_of_range_are_named(bad):
    with pytest.raises(IndexError, match=rf"input\[1\] must be in \[0, {ROWS}\), got {bad}"):
        ours.Embedding(ROWS, 4)(np.array([3, bad]))


def test_config_makes_the_layer_again():
    layer = ours.Embedding(ROWS, 4, "zeros", "l2", "non_neg", True, name="x", trainable=False)
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    assert type(again) is ours.Embedding and again.get_config() == layer.get_config()
    config = keras.layers.Embedding(ROWS, 4, "zeros", "l2", "non_neg", True, name="x", trainable=False).get_config()
    assert config == layer.get_config()


def test_wrong_arguments_are_kerass_errors():
    with pytest.raises(ValueError, match="`input_dim` must be a positive integer"):
        ours.Embedding(0, 4)


@pytest.mark.slow
@pytest.mark.parametrize("argument", [{"embeddings_regularizer": "l2"}, {"embeddings_constraint": "unit_norm"}])
@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_regularizer_and_constraint(argument, name):
    """Keras reads or writes all rows in each step: the gradient is dense, and the results are Keras's."""
    theirs = trained(functional(**argument), getattr(keras.optimizers, name)(0.05))
    mine = trained(functional(ours.Embedding, **argument), getattr(ours.optimizers, name)(0.05))
    assert layouts(mine) == [torch.strided, torch.sparse_coo]
    check_same(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERAS_OPTIMIZERS)
def test_gradients_are_dense_under_kerass_optimizers(name):
    optimizer = getattr(keras.optimizers, name)
    theirs, mine = trained(functional(), optimizer(0.05)), trained(ours.convert(functional()), optimizer(0.05))
    assert layouts(mine) == [torch.strided] * 2
    check_same(mine, theirs, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        *({"momentum": 0.9}, {"clipvalue": 0.1}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}),
        *({"loss_scale_factor": 4.0}, {"gradient_accumulation_steps": 2}, {"use_ema": True}, {"weight_decay": 0.1}),
    ],
)
def test_kerass_sgd(arguments):
    theirs = trained(functional(), keras.optimizers.SGD(0.05, **arguments))
    mine = trained(ours.convert(functional()), keras.optimizers.SGD(0.05, **arguments))
    takes_rows = arguments.keys() <= {"use_ema", "weight_decay"}
    assert layouts(mine) == [torch.sparse_coo if takes_rows else torch.strided] * 2
    check_same(mine, theirs)


def test_kerass_plain_sgd_takes_rows():
    theirs, mine = (trained(model, keras.optimizers.SGD(0.05)) for model in (functional(), ours.convert(functional())))
    assert layouts(mine) == [torch.sparse_coo] * 2
    check_same(mine, theirs)


def test_a_frozen_table_stays():
    model = ours.convert(functional())
    model.get_layer("shared").trainable = False
    before = model.get_layer("shared").get_weights()[0]
    trained(model, ours.optimizers.Adam(0.05))
    assert (model.get_layer("shared").get_weights()[0] == before).all()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_mixed_precision(policy, name):
    keras.config.set_dtype_policy(policy)
    try:
        theirs = trained(functional(), getattr(keras.optimizers, name)(0.05))
        optimizer = getattr(ours.optimizers, name)(0.05)
        if policy == "mixed_float16":
            optimizer = ours.optimizers.LossScaleOptimizer(optimizer)
        mine = trained(ours.convert(functional()), optimizer)
    finally:
        keras.config.set_dtype_policy("float32")
    assert layouts(mine) == [torch.sparse_coo] * 2
    check_same(mine, theirs, 2e-3)


def test_lora_is_kerass():
    mine, theirs = ours.Embedding(ROWS, 4, lora_rank=2), keras.layers.Embedding(ROWS, 4, lora_rank=2)
    for layer in (mine, theirs):
        layer.build()
        for k, variable in enumerate(layer.variables):
            variable.assign(np.random.default_rng(k).random(variable.shape))
    assert torch.equal(mine(ids(2, 3)), theirs(ids(2, 3)))


def test_stateless_calls_read_what_they_are_given():
    model = ours.convert(functional())
    model.compile(ours.optimizers.Adam(0.05), "mse")
    trained(model, model.optimizer)
    inputs = batches(1)[0][0]
    values = [v.value * 2 for v in model.trainable_variables]
    found, _ = model.stateless_call(values, [v.value for v in model.non_trainable_variables], list(inputs))
    model.set_weights([w * 2 for w in model.get_weights()])
    torch.testing.assert_close(found, model(list(inputs)))


@pytest.mark.slow
def test_a_model_of_its_own_class():
    class Model(keras.Model):
        def __init__(self, layer):
            super().__init__(name="model")
            self.table, self.top = layer(ROWS, 3, name="table"), keras.layers.Dense(1, name="top")

        def call(self, inputs):
            return self.top(keras.ops.mean(self.table(inputs), 1))

    results = []
    for layer, optimizer in ((ours.Embedding, ours.optimizers.Adam), (keras.layers.Embedding, keras.optimizers.Adam)):
        keras.utils.set_random_seed(0)
        model = Model(layer)
        model.compile(optimizer(0.05), "mse")
        history = model.fit(ids(64, 3), np.ones((64, 1)), batch_size=8, epochs=2, verbose=0, shuffle=False)
        results.append((model, history.history["loss"]))
    assert results[0][0].table.embeddings.value.grad.is_sparse
    np.testing.assert_allclose(results[0][1], results[1][1], 1e-5)
    check_same(results[0][0], results[1][0])


@pytest.mark.slow
def test_fit_with_callbacks(tmp_path):
    results = []
    for model, optimizers in ((functional(), keras.optimizers), (ours.convert(functional()), ours.optimizers)):
        model.compile(optimizers.Adam(0.05), "mse", metrics=["mae"])
        path = str(tmp_path / f"{type(model.optimizer).__module__}.weights.h5")
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.ModelCheckpoint(path, save_weights_only=True, monitor="loss"),
            keras.callbacks.EarlyStopping(monitor="val_loss", restore_best_weights=True, patience=1),
            keras.callbacks.TerminateOnNaN(),
        ]
        (first, second), target = batches(1)[0]
        inputs = [np.tile(first, (6, 1)), np.tile(second, (6, 1))]
        target = np.tile(target, (6, 1))
        options = {"batch_size": 8, "epochs": 4, "verbose": 0, "shuffle": False, "validation_split": 0.2}
        history = model.fit(inputs, target, callbacks=callbacks, **options).history
        results.append((history, model.evaluate(inputs, target, verbose=0), model.predict(inputs, verbose=0)))
        model.load_weights(path)
    for name, values in results[0][0].items():
        np.testing.assert_allclose(values, results[1][0][name], 1e-4)
    np.testing.assert_allclose(results[0][1], results[1][1], 1e-4)
    np.testing.assert_allclose(results[0][2], results[1][2], 1e-4, 1e-6)


@pytest.mark.slow
def test_a_second_optimizer_takes_the_tables_over():
    theirs, mine = functional(), ours.convert(functional())
    for name in ("Adam", "SGD", "Adam", "RMSprop"):
        trained(theirs, getattr(keras.optimizers, name)(0.05))
        trained(mine, getattr(ours.optimizers, name)(0.05))
    trained(theirs, keras.optimizers.Nadam(0.05))
    trained(mine, keras.optimizers.Nadam(0.05))
    check_same(mine, theirs, 1e-5)


def test_another_optimizer_of_torch():
    """A loop with an optimizer of torch gets dense gradients."""
    results = []
    for model in (functional(), ours.convert(functional())):
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for inputs, target in batches():
            optimizer.zero_grad()
            ((model(list(inputs)) - torch.from_numpy(target)) ** 2).mean().backward()
            optimizer.step()
        results.append(model)
    check_same(*results)


@pytest.mark.slow
def test_compiled_by_torch():
    """In a compiled graph Keras's own lookup runs, also of a table with rows that are behind."""
    model = trained(ours.convert(functional()), ours.optimizers.Adam(0.05))
    layer, inputs = model.get_layer("other"), torch.from_numpy(ids(3, 2))
    expected = layer(inputs)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="eager")(inputs), expected)


@pytest.mark.slow
def test_exported_by_torch():
    model = trained(ours.convert(functional()), ours.optimizers.Adam(0.05))
    layer, inputs = model.get_layer("other"), torch.from_numpy(ids(3, 2))
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"torch.export cannot read a table .*revert\(model\) before"):
            torch.export.export(layer, (inputs,))
        ours.revert(model)
        ours.convert(model)
        exported = torch.export.export(layer, (inputs,))
    assert torch.equal(exported.module()(inputs), layer(inputs))


# ---- Conversion ------------------------------------------------------------------------------------------------------


def test_convert_and_revert_keep_everything():
    model = functional()
    model.compile(keras.optimizers.Adam(0.05), "mse")
    kept = [*model.layers], [*model.variables], model.get_weights(), model.optimizer
    assert ours.convert(model) is model and ours.convert(model) is model
    assert [type(x) for x in model.layers if isinstance(x, keras.layers.Embedding)] == [ours.Embedding] * 2
    trained(model, model.optimizer)
    assert ours.revert(model) is model
    assert [type(x) for x in model.layers if isinstance(x, keras.layers.Embedding)] == [keras.layers.Embedding] * 2
    assert all(x is y for x, y in zip(kept[0], model.layers, strict=True))
    assert all(x is y for x, y in zip(kept[1], model.variables, strict=True))
    assert model.optimizer is kept[3]


@pytest.mark.slow
def test_converted_in_the_middle_of_training():
    theirs, mine = (trained(functional(), keras.optimizers.SGD(0.05)) for _ in range(2))
    ours.convert(mine)
    trained(mine, mine.optimizer)
    trained(theirs, theirs.optimizer)
    assert layouts(mine) == [torch.sparse_coo] * 2
    ours.revert(mine)
    trained(mine, mine.optimizer)
    trained(theirs, theirs.optimizer)
    assert layouts(mine) == [torch.strided] * 2
    check_same(mine, theirs)


def test_a_table_alone_and_a_model_in_a_model():
    assert type(ours.convert(keras.layers.Embedding(3, 2))) is ours.Embedding
    inner = keras.Sequential([keras.layers.Embedding(3, 2)])
    ours.convert(keras.Sequential([inner]))
    assert type(inner.layers[0]) is ours.Embedding


def test_what_is_not_converted_is_named():
    class Mine(keras.layers.Embedding):
        pass

    with pytest.warns(UserWarning, match=r"left unchanged, because their classes extend Keras's: odd \(Mine\)"):
        ours.convert(keras.Sequential([Mine(3, 2, name="odd"), keras.layers.Embedding(3, 2)]))
    with pytest.warns(UserWarning, match="convert: nothing was changed: the model has no keras.layers.Embedding"):
        ours.convert(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(TypeError, match="convert: model must be a model or a layer of Keras, got Linear"):
        ours.convert(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="revert: model must be a model or a layer of Keras, got int"):
        ours.revert(3)


def test_nn_convert_says_where_to_go():
    with pytest.warns(UserWarning, match=r"shared \(Embedding: a layer of Keras: torchsparse_rec.keras.convert"):
        nn.convert(functional())
    with pytest.warns(UserWarning, match="nothing was changed"):
        nn.convert(ours.convert(functional()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RMSprop", "Adadelta", "Adam", "AdamW"])
def test_files_of_a_reverted_model_are_kerass(name, tmp_path):
    """The file names nothing of ours, and training goes on in Keras as in a model that was not reverted."""
    mine, theirs = ours.convert(functional()), functional()
    trained(mine, getattr(ours.optimizers, name)(0.05))
    trained(theirs, getattr(keras.optimizers, name)(0.05))
    ours.revert(mine)
    mine.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        assert b"torchsparse" not in file.read("config.json")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for model in (mine, loaded):
        assert type(model.optimizer) is type(theirs.optimizer)
        assert all(type(x) is keras.Variable for x in model.optimizer.variables)
    for batch in batches():
        losses = [model.train_on_batch(*batch) for model in (mine, loaded, theirs)]
    np.testing.assert_allclose(losses, losses[2], 1e-5)
    check_same(mine, theirs)
    check_same(loaded, theirs)


@pytest.mark.slow
def test_a_scaled_optimizer_is_reverted_too():
    model = functional(ours.Embedding)
    trained(model, ours.optimizers.LossScaleOptimizer(ours.optimizers.Adam(0.05)))
    ours.revert(model)
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    assert type(model.optimizer.inner_optimizer) is type(keras.optimizers.Adam())
    trained(model, model.optimizer)


@pytest.mark.slow
def test_files_of_a_model_with_our_layers_load_where_we_are():
    model = trained(functional(ours.Embedding), ours.optimizers.Adam(0.05))
    again = pickle.loads(pickle.dumps(model))
    assert type(again.get_layer("shared")) is ours.Embedding and type(again.optimizer) is ours.optimizers.Adam
    check_same(again, model, 0)
    clone = keras.models.clone_model(model)
    assert type(clone.get_layer("shared")) is ours.Embedding
    clone.set_weights(model.get_weights())
    check_same(clone, model, 0)


@pytest.mark.parametrize("to_ours", [True, False])
def test_weights_files_both_ways(to_ours, tmp_path):
    first, second = functional(), ours.convert(functional())
    saved, loaded = (first, second) if to_ours else (second, first)
    trained(saved, (keras if to_ours else ours).optimizers.Adam(0.05))
    saved.save_weights(tmp_path / "a.weights.h5")
    loaded.compile((ours if to_ours else keras).optimizers.Adam(0.05), "mse")
    loaded.optimizer.build(loaded.trainable_variables)
    loaded.load_weights(tmp_path / "a.weights.h5")
    check_same(loaded, saved, 0)
    for x, y in zip(loaded.optimizer.variables, saved.optimizer.variables, strict=True):
        assert (x.numpy() == y.numpy()).all()
