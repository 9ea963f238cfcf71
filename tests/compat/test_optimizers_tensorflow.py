"""TensorFlow's optimizers beside ours: long runs, and training that goes on where the other side stopped."""

import importlib

import numpy as np
import pytest
import torch

from torchsparse_rec.compat import tensorflow as compat
from torchsparse_rec.compat._parity import optimizers as family
from torchsparse_rec.compat._parity.compare import compare
from torchsparse_rec.compat._parity.convert import to_tensorflow
from torchsparse_rec.compat._parity.evaluate import run_ours, run_tensorflow
from torchsparse_rec.compat.tensorflow import optimizers
from torchsparse_rec.compat.tensorflow.optimizers import export_slots, import_slots

pytestmark = pytest.mark.tensorflow

STEPS = 32
V1 = [name for name in family.OPERATORS if name.startswith("compat.v1")]
KERAS = [name for name in family.OPERATORS if name.startswith("keras")]
SHAPES = {"table": (9, 3), "kernel": (3, 3), "bias": (3,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("operator", family.OPERATORS)
def test_many_steps(operator, dtype, tensorflow, parity_seed):
    if operator.startswith("compat.v1.train.Proximal") and dtype == torch.float64:
        pytest.skip("TensorFlow fails for dense gradients of float64")
    rng = np.random.default_rng([parity_seed, len(operator)])
    case = family.random_case(rng, operator, 10_000, STEPS, dtype)
    verdict = compare(case, run_ours(case), run_tensorflow(case))
    assert verdict.mismatches == [], (parity_seed, case.arguments)


def gradients(rng, dtype, repeats=True):
    """Return gradients: of a table by slices, of a dense layer by tensors; torch's layer has its weights transposed."""
    count = int(rng.integers(1, 12))
    indices = torch.from_numpy(rng.integers(0, SHAPES["table"][0], count))
    if not repeats:
        indices = indices.unique()
        count = len(indices)
    values = torch.from_numpy(rng.standard_normal((count, SHAPES["table"][1]))).to(dtype)
    slices = compat.IndexedSlices(values, indices, torch.tensor(SHAPES["table"]))
    return [slices, *(torch.from_numpy(rng.standard_normal(SHAPES[n])).to(dtype) for n in ("kernel", "bias"))]


class Theirs:
    """A TensorFlow optimizer of three variables."""

    def __init__(self, tf, operator, given, dtype, rng):
        self.step = tf.Variable(0, dtype=tf.int64, name="global_step")
        start = {name: rng.standard_normal(shape) for name, shape in SHAPES.items()}
        module, _, name = operator.rpartition(".")
        if module.startswith("keras"):
            keras = importlib.import_module("keras")
            self.variables = [keras.Variable(value, dtype=dtype, name=n) for n, value in start.items()]
            self.optimizer = getattr(keras.optimizers, name)(0.0625, **given)
            self.optimizer.build(self.variables)
        else:
            further = {"global_step": self.step} if name == "AdagradDAOptimizer" else {}
            self.variables = [tf.Variable(value, dtype=dtype, name=n) for n, value in start.items()]
            self.optimizer = getattr(tf.compat.v1.train, name)(0.0625, **further, **given)

    def apply(self, gradients):
        step = {} if hasattr(self.optimizer, "iterations") else {"global_step": self.step}
        self.optimizer.apply_gradients(list(zip(map(to_tensorflow, gradients), self.variables, strict=True)), **step)

    def values(self):
        table, kernel, bias = (np.array(v.numpy()) for v in self.variables)
        return [table, kernel.T, bias]


class Ours:
    """An optimizer of this package, with the same parameters as a ``Theirs``."""

    def __init__(self, theirs, operator, given):
        self.parameters = [torch.nn.Parameter(torch.from_numpy(value.copy())) for value in theirs.values()]
        module, _, name = operator.rpartition(".")
        module = compat.optimizers.keras if module.startswith("keras") else compat.optimizers.v1
        further = {"global_step": int(theirs.step)} if name == "AdagradDAOptimizer" else {}
        self.optimizer = getattr(module, name)(self.parameters, 0.0625, **further, **given)
        self.transposed = [self.parameters[1]]

    def apply(self, gradients):
        table, kernel, bias = gradients
        self.optimizer.apply_gradients(list(zip([table, kernel.T, bias], self.parameters, strict=True)))

    def differs(self, theirs, dtype):
        tolerance = family.UNITS * torch.finfo(dtype).eps
        pairs = zip(self.parameters, theirs.values(), strict=True)
        worst = max(float(np.abs(p.detach().numpy() - v).max() / max(1, np.abs(v).max())) for p, v in pairs)
        return worst > tolerance and (worst, tolerance)


def configuration(operator, rng):
    given = family._hyperparameters(rng, operator)
    # If averages replaced the weights now and then, comparing the weights would say less.
    return {n: v for n, v in given.items() if n != "ema_overwrite_frequency"}


def sources(theirs, names):
    """Return every form in which a TensorFlow optimizer's state may come."""
    optimizer = theirs.optimizer
    if hasattr(optimizer, "get_slot"):
        slots = {v.name: v.numpy() for v in optimizer.variables()} | {"global_step:0": theirs.step.numpy()}
        return [(optimizer, theirs.variables), (slots, names)]
    by_path = {v.path: v.numpy() for v in optimizer.variables}
    by_number = {str(i): v.numpy() for i, v in enumerate(optimizer.variables)}
    shuffled = dict(reversed(by_path.items()))
    return [
        (optimizer, None),
        (optimizer.variables, theirs.variables),
        (by_path, None),
        (by_number, None),
        (shuffled, names),
    ]


@pytest.mark.parametrize("operator", family.OPERATORS)
def test_training_goes_on_as_it_was(operator, tensorflow, parity_seed):
    dtype = torch.float32 if "Proximal" in operator else torch.float64
    rng = np.random.default_rng([parity_seed, 1, len(operator)])
    given = configuration(operator, rng)
    theirs = Theirs(tensorflow, operator, given, str(dtype).removeprefix("torch."), rng)
    # Keras's own division of slices by slices reads beyond its values if a row is repeated, and raises.
    repeats = operator != "keras.optimizers.RMSprop"
    for _ in range(7):
        theirs.apply(gradients(rng, dtype, repeats))
    all_ours = []
    for source, variables in sources(theirs, list(SHAPES)):
        ours = Ours(theirs, operator, given)
        import_slots(ours.optimizer, source, variables, ours.transposed)
        all_ours.append(ours)
    again = Ours(theirs, operator, given)
    exported = export_slots(all_ours[0].optimizer, list(SHAPES), all_ours[0].transposed)
    import_slots(again.optimizer, exported, list(SHAPES), again.transposed)
    all_ours.append(again)
    for _ in range(8):
        step = gradients(rng, dtype, repeats)
        for side in (theirs, *all_ours):
            side.apply(step)
    for ours in all_ours:
        assert not ours.differs(theirs, dtype), (parity_seed, given)


@pytest.mark.parametrize("operator", KERAS)
def test_keras_goes_on_as_it_was_here(operator, tensorflow):
    rng = np.random.default_rng(3)
    given = configuration(operator, rng)
    theirs = Theirs(tensorflow, operator, given, "float32", rng)
    ours = Ours(theirs, operator, given)
    for _ in range(6):
        ours.apply(gradients(rng, torch.float32))
    table, kernel, bias = (p.detach().numpy() for p in ours.parameters)
    for variable, value in zip(theirs.variables, (table, kernel.T, bias), strict=True):
        variable.assign(value)
    exported = export_slots(ours.optimizer, theirs.variables, ours.transposed)
    paths = [v.path.split("/")[-1] for v in theirs.optimizer.variables]
    assert [key.split("/")[-1] for key in exported][: len(SHAPES) + 2] == paths[: len(SHAPES) + 2]
    theirs.optimizer.set_weights(list(exported.values()))
    for _ in range(6):
        step = gradients(rng, torch.float32)
        ours.apply(step)
        theirs.apply(step)
    assert not ours.differs(theirs, torch.float32)


# ---- Checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [name for name in V1 if "GradientDescent" not in name])
def test_a_checkpoint_of_a_session(operator, tensorflow, tmp_path):
    v1, name = tensorflow.compat.v1, operator.rpartition(".")[2]
    given = {"momentum": 0.5} if name == "MomentumOptimizer" else {}
    given |= {"centered": True} if name == "RMSPropOptimizer" else {}
    start, gradient = np.ones((4, 2), np.float32), np.arange(8, dtype=np.float32).reshape(4, 2) - 3.5
    with v1.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("scope/emb", initializer=start)
        step = v1.train.get_or_create_global_step()
        further = {"global_step": step} if name == "AdagradDAOptimizer" else {}
        optimizer = getattr(v1.train, name)(0.25, **further, **given)
        train = optimizer.apply_gradients([(v1.constant(gradient), variable)], global_step=step)
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run(train)
        path = v1.train.Saver().save(session, str(tmp_path / "model"))
        before = session.run(variable)
        session.run(train)
        after = session.run(variable)
    further = {"global_step": 0} if name == "AdagradDAOptimizer" else {}
    for source in (tensorflow.train.load_checkpoint(path), path, tmp_path):
        parameter = torch.nn.Parameter(torch.from_numpy(before.copy()))
        ours = getattr(compat.optimizers.v1, name)([parameter], 0.25, **further, **given)
        import_slots(ours, source, ["scope/emb"])
        assert ours.iterations == 3
        ours.apply_gradients([(torch.from_numpy(gradient), parameter)])
        np.testing.assert_allclose(parameter.detach().numpy(), after, rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match="source has no 'other/"):
            import_slots(ours, source, ["other"])


@pytest.mark.parametrize("operator", ["compat.v1.train.AdamOptimizer", "keras.optimizers.Adam"])
def test_a_checkpoint_of_objects(operator, tensorflow, tmp_path):
    rng = np.random.default_rng(5)
    theirs = Theirs(tensorflow, operator, {}, "float32", rng)
    for _ in range(3):
        theirs.apply(gradients(rng, torch.float32))
    objects = dict(zip(SHAPES, theirs.variables, strict=True))
    is_keras = operator.startswith("keras")
    path = tensorflow.train.Checkpoint(optimizer=theirs.optimizer, **objects).save(str(tmp_path / "model"))
    variables = None if is_keras else list(SHAPES)
    all_ours = [Ours(theirs, operator, {}) for _ in range(2)]
    for ours, source in zip(all_ours, (tensorflow.train.load_checkpoint(path), path), strict=True):
        import_slots(ours.optimizer, source, variables, ours.transposed)
    step = gradients(rng, torch.float32)
    for side in (theirs, *all_ours):
        side.apply(step)
    assert not any(ours.differs(theirs, torch.float32) for ours in all_ours)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_keras_file(tensorflow, tmp_path):
    keras, h5py = (importlib.import_module(name) for name in ("keras", "h5py"))
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Embedding(5, 2), keras.layers.Flatten()])
    model.compile(keras.optimizers.RMSprop(0.25, momentum=0.5), loss="mse")
    x, y = np.array([[1], [1], [3]]), np.ones((3, 2), np.float32)
    model.fit(x, y, epochs=3, batch_size=3, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = compat.optimizers.keras.RMSprop(embedding.parameters(), 0.5, momentum=0.5)
    with torch.no_grad():
        embedding.weight.copy_(torch.from_numpy(np.array(model.get_weights()[0])))
    paths = [v.path for v in model.trainable_variables]
    with h5py.File(tmp_path / "model.weights.h5") as file:
        for source in (tmp_path / "model.keras", str(tmp_path / "model.weights.h5"), file["optimizer/vars"]):
            for variables in (None, paths):
                optimizer = compat.optimizers.keras.RMSprop(embedding.parameters(), 0.5, momentum=0.5)
                import_slots(optimizer, source, variables)
                assert optimizer.iterations == 3 and optimizer.learning_rate == 0.25
                wanted = np.array(model.optimizer.variables[2])
                assert np.array_equal(optimizer.state[embedding.weight]["velocity"].numpy(), wanted)
    with pytest.raises(ValueError, match="model.keras has no variable 'other/embeddings'"):
        import_slots(optimizer, tmp_path / "model.keras", ["other/embeddings"])
    model.fit(x, y, epochs=3, batch_size=3, verbose=0)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(embedding(torch.from_numpy(x))[:, 0], torch.from_numpy(y)).backward()
        assert not embedding.weight.grad.is_coalesced()
        optimizer.step()
    np.testing.assert_allclose(embedding.weight.detach().numpy(), model.get_weights()[0], rtol=1e-5, atol=1e-6)


# ---- Two parameters -------------------------------------------------------------------------------------------------


def test_the_global_norm_is_that_of_all_gradients(tensorflow):
    rng = np.random.default_rng(7)
    for given in ({"global_clipnorm": 0.5}, {"global_clipnorm": 100.0}):
        theirs = Theirs(tensorflow, "keras.optimizers.Adagrad", given, "float32", rng)
        ours = Ours(theirs, "keras.optimizers.Adagrad", given)
        for _ in range(3):
            step = gradients(rng, torch.float32)
            ours.apply(step)
            theirs.apply(step)
        assert not ours.differs(theirs, torch.float32)


def test_a_schedule_of_keras(tensorflow):
    keras = importlib.import_module("keras")
    schedule = keras.optimizers.schedules.ExponentialDecay(0.25, 2, 0.5)
    variable = keras.Variable(np.ones(3, np.float32))
    theirs = keras.optimizers.SGD(schedule, momentum=0.5)
    parameter = torch.nn.Parameter(torch.ones(3))
    ours = compat.optimizers.keras.SGD([parameter], schedule, momentum=0.5)
    mine = torch.nn.Parameter(torch.ones(3))
    same = compat.optimizers.keras.SGD([mine], lambda step: 0.25 * 0.5 ** (step / 2), momentum=0.5)
    for _ in range(4):
        gradient = torch.tensor([1.0, -2.0, 0.5])
        theirs.apply_gradients([(to_tensorflow(gradient), variable)])
        ours.apply_gradients([(gradient, parameter)])
        same.apply_gradients([(gradient, mine)])
    for value in (parameter, mine):
        np.testing.assert_allclose(value.detach().numpy(), variable.numpy(), rtol=1e-6)
    again = compat.optimizers.keras.SGD([mine], schedule, momentum=0.5)
    import_slots(again, theirs)
    assert again.iterations == 4
    assert torch.allclose(again.state[mine]["momentum"], ours.state[parameter]["momentum"])


@pytest.mark.parametrize("kind", ["dense", "slices"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "Ftrl"])
def test_gradients_of_another_dtype(name, kind, tensorflow):
    import keras

    table, gradient = np.array([[1.0], [2.0], [3.0]], np.float32), np.array([[0.1], [0.3], [0.7]], np.float16)
    variable, parameter = keras.Variable(table), torch.nn.Parameter(torch.from_numpy(table.copy()))
    theirs = getattr(keras.optimizers, name)(0.1, clipvalue=0.5)
    own = getattr(optimizers.keras, name)([parameter], 0.1, clipvalue=0.5)
    given = tensorflow.constant(gradient), torch.from_numpy(gradient)
    if kind == "slices":
        given = tensorflow.IndexedSlices(given[0], [2, 0, 2], [3, 1]), compat.IndexedSlices(given[1], [2, 0, 2], [3, 1])
    theirs.apply_gradients([(given[0], variable)])
    own.apply_gradients([(given[1], parameter)])
    assert parameter.dtype == torch.float32
    np.testing.assert_allclose(parameter.detach().numpy(), variable.numpy(), rtol=1e-6)
    with pytest.raises(ValueError, match="must have the dtype and device of its parameter"):
        optimizers.v1.GradientDescentOptimizer([parameter], 0.1).apply_gradients([(given[1], parameter)])
