"""Our optimizers beside Keras's: the same weights and slots after the same steps. Run by test_keras.py."""

import gc
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import torch

import torchsparse_rec.keras as ours

ROWS, STEPS = 40, 12
OPTIMIZERS = {
    "SGD": {"learning_rate": 0.05},
    "Adagrad": {"learning_rate": 0.05},
    "RMSprop": {"learning_rate": 0.05, "rho": 0.8},
    "Adadelta": {"learning_rate": 1.0, "rho": 0.8},
    "Adam": {"learning_rate": 0.05},
    "AdamW": {"learning_rate": 0.05, "weight_decay": 0.1},
    "Lion": {"learning_rate": 0.01},
}
ARGUMENTS = {
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True, "clipnorm": 0.02}),
    "momentum with a schedule": (
        "SGD",
        {"momentum": 0.8, "learning_rate": keras.optimizers.schedules.PiecewiseConstantDecay([4], [0.1, 0.3])},
    ),
    "centered": ("RMSprop", {"centered": True}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "decay": ("Adam", {"weight_decay": 0.1}),
    "decay beyond zero": ("AdamW", {"weight_decay": 24.0}),
    "schedule": ("Adam", {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.7)}),
    "schedule of RMSprop": ("RMSprop", {"learning_rate": keras.optimizers.schedules.CosineDecay(0.1, 8)}),
    "decay of Lion": ("Lion", {"weight_decay": 0.1}),
    "clipnorm": ("Adam", {"clipnorm": 0.02}),
    "clipvalue": ("Adagrad", {"clipvalue": 0.004}),
    "global_clipnorm": ("AdamW", {"global_clipnorm": 0.03}),
    "scale": ("Adadelta", {"loss_scale_factor": 8.0}),
    "scale of Adam": ("Adam", {"loss_scale_factor": 8.0}),
    "average": ("Adam", {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 5}),
}
DENSE = {
    "decay of SGD": ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
    "momentum of RMSprop": ("RMSprop", {"momentum": 0.9}),
    "decay of Adagrad": ("Adagrad", {"weight_decay": 0.1}),
    "accumulation": ("Adam", {"gradient_accumulation_steps": 3}),
}


def batches(count=STEPS, seed=0):
    random = np.random.default_rng(seed)
    # Few of the rows, so that most are behind at any time; some ids twice in a batch.
    return [(random.integers(0, ROWS, (4, 3)), random.random((4, 1), dtype="float32")) for _ in range(count)]


def model(optimizer, layer=ours.Embedding, dtype=None):
    keras.utils.set_random_seed(0)
    rows, top = layer(ROWS, 5, name="table", dtype=dtype), keras.layers.Dense(1, name="top", dtype=dtype)
    made = keras.Sequential([rows, keras.layers.Flatten(), top], name="model")
    made.build((None, 3))
    made.compile(optimizer, "mse")
    return made


def pair(name, dtype=None, **arguments):
    """Return a model with our optimizer, and Keras's."""
    name, arguments = ("SGD", {"momentum": 0.9}) if name == "momentum" else (name, {**OPTIMIZERS[name], **arguments})
    return (
        model(getattr(ours.optimizers, name)(**arguments), dtype=dtype),
        model(getattr(keras.optimizers, name)(**arguments), keras.layers.Embedding, dtype=dtype),
    )


def train(made, data):
    return [made.train_on_batch(*batch) for batch in data]


def grad_of(made):
    return made.get_layer("table").embeddings.value.grad


def check_same(mine, theirs, rtol=1e-5, atol=1e-6):
    for x, y in zip(mine.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(x, y, rtol, atol)
    assert len(mine.optimizer.variables) == len(theirs.optimizer.variables)
    for x, y in zip(mine.optimizer.variables, theirs.optimizer.variables, strict=True):
        assert x.path.split("/")[1:] == y.path.split("/")[1:]
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol, atol)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_results_are_kerass_and_gradients_have_rows(name):
    mine, theirs = pair(name)
    for part in (batches()[:7], batches()[7:]):  # reading slots on the way changes nothing
        np.testing.assert_allclose(train(mine, part), train(theirs, part), 1e-5)
        assert grad_of(mine).layout is torch.sparse_coo and grad_of(theirs).layout is torch.strided
        check_same(mine, theirs)


def check_training(layout, name, *tolerances, **arguments):
    mine, theirs = pair(name, **arguments)
    train(mine, batches())
    train(theirs, batches())
    assert grad_of(mine).layout is layout
    check_same(mine, theirs, *tolerances)


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case):
    name, arguments = ARGUMENTS[case]
    check_training(torch.sparse_coo, name, **arguments)


@pytest.mark.parametrize("case", DENSE)
def test_without_a_rule_by_rows_the_gradient_is_dense(case):
    name, arguments = DENSE[case]
    check_training(torch.strided, name, 0, 0, **arguments)


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "SGD"])
def test_float64(name):
    check_training(torch.sparse_coo, name, 1e-7, 1e-9, dtype="float64")  # Keras's learning rate is float32


# What is changed in mid-run, and what it was before.
CHANGES = {
    "rho of RMSprop": ("RMSprop", {}, {"rho": 0.5}),
    "rho of a centered one": ("RMSprop", {"centered": True}, {"rho": 0.5}),
    "rho of Adadelta": ("Adadelta", {}, {"rho": 0.5}),
    "centered": ("RMSprop", {"centered": True}, {"centered": False}),
    "momentum of RMSprop": ("RMSprop", {"momentum": 0.9}, {"momentum": 0.0, "rho": 0.5}),
    "momentum of SGD": ("SGD", {"momentum": 0.9}, {"momentum": 0.0}),
    "nesterov": ("SGD", {"momentum": 0.9}, {"nesterov": True, "momentum": 0.5}),
    "decay of SGD": ("SGD", {"momentum": 0.9}, {"weight_decay": 0.1}),
    "decay": ("Adam", {}, {"weight_decay": 0.1}),
    "betas": ("AdamW", {}, {"beta_1": 0.5, "beta_2": 0.7, "weight_decay": 0.3}),
    "amsgrad": ("Adam", {"amsgrad": True}, {"amsgrad": False}),
    "epsilon of Adam": ("Adam", {}, {"epsilon": 0.1, "learning_rate": 0.2}),
    "epsilon of RMSprop": ("RMSprop", {}, {"epsilon": 0.1, "learning_rate": 0.2}),
    "epsilon of Adadelta": ("Adadelta", {}, {"epsilon": 0.1}),
    "epsilon of Adagrad": ("Adagrad", {}, {"epsilon": 0.1, "learning_rate": 0.2}),
    "clipping": ("Adadelta", {}, {"clipnorm": 0.02, "rho": 0.5}),
}


def stepped(module, name, arguments, settings):
    """Step a table of 12 rows, with a few rows' gradient and the given attributes at each step; return it and slots."""
    layer = ours.Embedding(12, 2, dtype="float64")
    layer(torch.tensor([0]))
    layer.set_weights([np.linspace(-1, 1, 24).reshape(12, 2)])
    table = layer.embeddings
    optimizer = getattr(module.optimizers, name)(**OPTIMIZERS[name] | arguments)
    optimizer.build([table])
    for step, its in enumerate(settings):
        for h, value in its.items():
            setattr(optimizer, h, value)
        values = torch.sin(torch.arange(6.0, dtype=torch.float64) + step).view(3, 2)
        grad = torch.sparse_coo_tensor([[(step * k) % 12 for k in (1, 2, 5)]], values, (12, 2), check_invariants=True)
        optimizer.apply([grad if module is ours else grad.to_dense()], [table])
    return [x.numpy() for x in (table, *optimizer.variables)]


def check_stepped(name, arguments, settings):
    for x, y in zip(*(stepped(m, name, arguments, settings) for m in (ours, keras)), strict=True):
        np.testing.assert_allclose(x, y, 1e-7, 1e-7)  # Keras's learning rate is float32


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("first", [False, True])
def test_arguments_that_change_count_as_they_were_in_each_step(case, first):
    """They change at step 5 and back at step 9; with ``first`` what they change to is there from the first step on."""
    name, arguments, change = CHANGES[case]
    config = getattr(keras.optimizers, name)(**OPTIMIZERS[name] | arguments).get_config()
    before = {h: config[h] for h in change}
    check_stepped(name, arguments, [change if (5 <= step < 9) is not first else before for step in range(14)])


@pytest.mark.parametrize("name", ["RMSprop", "Adadelta"])
def test_a_schedule_of_rho(name):
    """It has another value in each step, of more steps than those whose values are kept."""
    check_stepped(name, {}, [{"rho": 0.7 + 0.004 * step} for step in range(70)])


def test_amsgrad_after_the_slots_were_made():
    with pytest.raises(ValueError, match="^Adam: amsgrad must be set before the optimizer is built, got True after$"):
        stepped(ours, "Adam", {}, [{}, {"amsgrad": True}])


def test_excluded_from_weight_decay():
    mine, theirs = pair("AdamW")
    for made in (mine, theirs):
        made.optimizer.exclude_from_weight_decay(var_names=["embeddings"])
        train(made, batches())
    check_same(mine, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_takes_any_coo_gradient(name):
    """A COO gradient for which there is no rule by rows steps all rows."""
    values = {"learning_rate": 0.5, "gradient_accumulation_steps": 2}
    gradient = torch.sparse_coo_tensor([[1, 1, 2]], torch.ones(3, 2), (4, 2), check_invariants=True)
    results = []
    for module, grad in ((ours.optimizers, gradient), (keras.optimizers, gradient.to_dense())):
        variable, optimizer = keras.Variable(torch.ones(4, 2)), getattr(module, name)(**values)
        for _ in range(4):
            optimizer.apply([grad], [variable])
        results.append(variable.numpy())
    np.testing.assert_allclose(*results)


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "momentum"])
def test_steps_without_a_gradient_and_with_a_dense_one(name):
    """Rows stay in step with Keras's where a table is left out of a step, or gets a dense gradient."""
    first = torch.sparse_coo_tensor([[1, 3]], torch.tensor([[1.0], [2.0]]), (5, 1), check_invariants=True)
    second = torch.sparse_coo_tensor([[0, 3]], torch.tensor([[-1.0], [0.5]]), (5, 1), check_invariants=True)
    other = torch.tensor([1.0])
    results = []
    for module, is_dense in ((ours.optimizers, False), (keras.optimizers, True)):
        layer = ours.Embedding(5, 1, embeddings_initializer="ones")
        layer.build()
        layer(torch.tensor([0]))
        variables = [layer.embeddings, keras.Variable(torch.zeros(1))]
        optimizer = module.SGD(0.1, momentum=0.9) if name == "momentum" else getattr(module, name)(0.1)
        for grad in (first, second, None, None, second, first.to_dense(), first, second):
            if is_dense and grad is not None and grad.layout is torch.sparse_coo:
                grad = grad.to_dense()
            with pytest.warns(UserWarning, match="Gradients do not exist") if grad is None else nullcontext():
                optimizer.apply([grad, other], variables)
        results.append([x.numpy() for x in (*variables, *optimizer.variables)])
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, 1e-5, 1e-7)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "momentum"])
def test_state_goes_to_keras_and_back(name, tmp_path):
    """Weights and slots that either has saved in the middle give the run that neither interrupted."""
    data = batches()
    whole = pair(name)
    train(whole[0], data)
    mine, theirs = pair(name)
    train(mine, data[:5])
    mine.save_weights(tmp_path / "first.weights.h5")
    theirs.optimizer.build(theirs.trainable_variables)
    theirs.load_weights(tmp_path / "first.weights.h5")
    train(theirs, data[5:8])
    theirs.save_weights(tmp_path / "second.weights.h5")
    mine.load_weights(tmp_path / "second.weights.h5")
    assert int(mine.optimizer.iterations) == 8
    train(mine, data[8:])
    check_same(mine, whole[0])


@pytest.mark.parametrize("name", ["Adam", "momentum"])
def test_weights_and_slots_set_in_between(name):
    mine, theirs = pair(name)
    for made in (mine, theirs):
        train(made, batches()[:4])
        made.set_weights([w * 0.5 for w in made.get_weights()])
        made.optimizer.variables[2].assign(made.optimizer.variables[2] * 2)
        made.optimizer.learning_rate = 0.02
        train(made, batches()[4:])
    check_same(mine, theirs)


def test_a_loop_of_ones_own():
    """An optimizer of ours that has been built is known to the layers; so is a second one, made later."""
    table = ours.Embedding(ROWS, 2)
    made = keras.Sequential([table, keras.layers.Dense(1)])
    made.build((None, 3))
    made(torch.tensor([[1, 2, 3]])).sum().backward()
    assert table.embeddings.value.grad.layout is torch.strided
    for optimizer in (ours.optimizers.Adam(), ours.optimizers.SGD()):
        optimizer.build(made.trainable_variables)
        made.zero_grad()
        made(torch.tensor([[1, 2, 3]])).sum().backward()
        assert table.embeddings.value.grad.layout is torch.sparse_coo
        optimizer.apply([v.value.grad for v in made.trainable_variables])
    del optimizer
    gc.collect()
    made.zero_grad()
    made(torch.tensor([[1, 2, 3]])).sum().backward()
    assert table.embeddings.value.grad.layout is torch.strided


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_batch_without_ids(name):
    """It is a step like others, in which no row has a gradient."""
    results = []
    for module in (ours, keras):
        layer = (ours if module is ours else keras.layers).Embedding(4, 2, embeddings_initializer="ones")
        layer.build()
        optimizer = getattr(module.optimizers, name)(**OPTIMIZERS[name])
        optimizer.build(layer.trainable_variables)
        for batch in ([1, 3], [], [3], []):
            layer.zero_grad()
            layer(torch.tensor(batch, dtype=torch.int64)).sum().backward()
            optimizer.apply([layer.embeddings.value.grad])
        results.append([x.numpy() for x in (layer.embeddings, *optimizer.variables)])
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, 1e-5, 1e-7)


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "momentum"])
def test_slots_are_up_to_date_for_whoever_reads_them(name):
    reads = [repr, np.array, lambda slot: slot.numpy().tolist(), lambda slot: (slot + 0).tolist()]
    whole, _ = pair(name)
    train(whole, batches())
    number = next(k for k, x in enumerate(whole.optimizer.variables) if "table" in x.path)
    for read in reads:
        mine, _ = pair(name)
        train(mine, batches())
        theirs = keras.Variable(whole.optimizer.variables[number].numpy(), name="x")
        assert str(read(mine.optimizer.variables[number]))[-99:] == str(read(theirs))[-99:]


def test_a_stateless_step_leaves_the_state_alone():
    mine, theirs = pair("Adam")
    grads = [torch.ones(tuple(v.shape)) for v in theirs.trainable_variables]
    results = []
    for made in (mine, theirs):
        train(made, batches())
        before = [x.numpy() for x in made.optimizer.variables]
        state = [torch.tensor(x) for x in before], [v.value.detach().clone() for v in made.trainable_variables]
        results.append(made.optimizer.stateless_apply(state[0], grads, state[1]))
        assert all((x == y.numpy()).all() for x, y in zip(before, made.optimizer.variables, strict=True))
    for x, y in zip(*(x + y for x, y in results), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_holds_other_tables_is_not_asked():
    table, optimizer = ours.Embedding(ROWS, 2), ours.optimizers.Adam()
    table.build()
    optimizer.build([keras.Variable(torch.ones(2))])
    table(torch.tensor([1])).sum().backward()
    assert table.embeddings.value.grad.layout is torch.strided


@pytest.mark.parametrize("scaler", [ours.optimizers.LossScaleOptimizer, keras.optimizers.LossScaleOptimizer])
def test_loss_scale_optimizer(scaler):
    """Both give Keras's results, ours by rows; steps whose gradients are not finite are left out."""
    theirs = model(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05)), keras.layers.Embedding)
    mine = model(scaler(ours.optimizers.Adam(0.05)))
    data = batches()
    data[3][1][0] = np.inf
    for made in (mine, theirs):
        train(made, data)
    is_ours = scaler is ours.optimizers.LossScaleOptimizer
    assert grad_of(mine).layout is (torch.sparse_coo if is_ours else torch.strided)
    assert int(mine.optimizer.iterations) == STEPS - 1
    check_same(mine, theirs)


def test_config_and_copies():
    optimizer = ours.optimizers.Adam(0.25, beta_1=0.5, clipnorm=2.0)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is ours.optimizers.Adam and again.get_config() == optimizer.get_config()
    assert isinstance(optimizer, keras.optimizers.Adam)


def test_every_class_names_kerass_of_the_same_name():
    for name in ours.optimizers.__all__:
        cls = getattr(ours.optimizers, name)
        assert issubclass(cls, getattr(keras.optimizers, name))
