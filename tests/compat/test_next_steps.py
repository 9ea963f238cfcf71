"""The table of docs/tensorflow.md that says with which optimizer the next step is TensorFlow's: each row beside it."""

import ast
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

from torchsparse_rec import nn, optim
from torchsparse_rec.compat import tensorflow as compat
from torchsparse_rec.compat.tensorflow import load_tables
from torchsparse_rec.compat.tensorflow.optimizers import import_slots

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_decay:UserWarning"),
]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tensorflow.md"
ROWS, WIDTH, LR = 16, 2, 0.125
# Gradients of the rows 0, 1, 2, 3, and so on, again and again.
SIZES = np.array([1, 1e-3, 1e-6, 1e-9])
# Without repeated ids, of which Keras's rules differ: before the file is written, and after it. Rows 12 to 15 are never
# looked up, rows 8 to 11 before it alone, rows 4 to 7 after it alone.
BEFORE, AFTER = np.r_[0:4, 8:12], np.r_[0:8]

# Numbers that float32 has, in which TensorFlow makes 1 - beta2.
BETAS = {"beta1": 0.75, "beta2": 1 - 2**-10}
KERAS_BETAS = {"beta_1": 0.75, "beta_2": 1 - 2**-10}
PENALTIES = {"l1_regularization_strength": 2**-6, "l2_regularization_strength": 2**-5, "beta": 0.5}
SHRINKAGE = {"l2_shrinkage_regularization_strength": 0.25}
RMSPROP = {"momentum": 0.5, "centered": True}

#: What each row is run with: TensorFlow's hyperparameters. The names of ``optim`` are those of ``OPTIM``.
RUNS = {
    "v1.train.AdamOptimizer": [BETAS, {**BETAS, "epsilon": 1e-3}],
    "LazyAdam": [{**KERAS_BETAS, "epsilon": 1e-7}, {**KERAS_BETAS, "epsilon": 1e-3}],
    "v1.train.AdagradOptimizer": [{}, {"initial_accumulator_value": 1e-12}],
    "v1.train.FtrlOptimizer": [
        {},
        {**PENALTIES, **SHRINKAGE, "learning_rate_power": -0.75, "initial_accumulator_value": 0.5},
    ],
    "v1.train.MomentumOptimizer": [{"momentum": 0.5}, {"momentum": 0.75, "use_nesterov": True}],
    "v1.train.RMSPropOptimizer": [{}, {**RMSPROP, "decay": 0.75, "epsilon": 1e-6}],
    "keras.optimizers.SGD": [{}, {"momentum": 0.75}, {"momentum": 0.75, "nesterov": True}],
    "keras.optimizers.Adam": [
        KERAS_BETAS,
        {**KERAS_BETAS, "epsilon": 1e-3, "amsgrad": True},
        {**KERAS_BETAS, "weight_decay": 0.25},
    ],
    "keras.optimizers.AdamW": [KERAS_BETAS, {**KERAS_BETAS, "weight_decay": 0.25}],
    "keras.optimizers.Adagrad": [{}, {"initial_accumulator_value": 0.0, "epsilon": 1e-6}],
    "keras.optimizers.RMSprop": [{}, {**RMSPROP, "rho": 0.75, "epsilon": 1e-6}],
    "keras.optimizers.Ftrl": [
        {},
        {**PENALTIES, "learning_rate_power": -0.75, "initial_accumulator_value": 0.5},
        {**PENALTIES, **SHRINKAGE},
    ],
}
OPTIM = {
    "epsilon": "eps",
    "l1_regularization_strength": "l1",
    "l2_regularization_strength": "l2",
    "l2_shrinkage_regularization_strength": "l2_shrinkage",
    "learning_rate_power": "lr_power",
    "use_nesterov": "nesterov",
}
#: Rows whose optimizer of ``optim`` has no such hyperparameters: load_tables refuses it with them.
REFUSED = {("keras.optimizers.Ftrl", "l2_shrinkage_regularization_strength")}


def rows_of_page():
    """Return the rows of the table: the name, the expression of ``optim``, and that of the compat optimizers."""
    table = PAGE.read_text().split("| TensorFlow | `torchsparse_rec.optim`")[1].split("\n\n")[0]
    rows = [[cell.strip().strip("`") for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def call_of(text):
    """Return the function and the keyword arguments of a call in a cell."""
    call = ast.parse(text, mode="eval").body
    return ast.unparse(call.func), {x.arg: ast.literal_eval(x.value) for x in call.keywords}


def gradients(seed, ids, repeats):
    """Return the ids of a batch and a gradient for each; ``repeats``: some of them twice."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([ids, ids[: len(ids) // 2]]) if repeats else rng.permutation(ids)
    return ids, rng.uniform(0.5, 1, (len(ids), WIDTH)) * SIZES[ids % 4, None]


class LazyAdam:
    """``LazyAdam`` of TensorFlow Addons, as its source has it, over the operators of TensorFlow."""

    def __init__(self, tf, lr, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
        self.tf, self.numbers, self.step, self.slots = tf, (lr, beta_1, beta_2, epsilon), 0, None

    def apply_gradients(self, pairs):
        tf, (lr, beta1, beta2, epsilon) = self.tf, self.numbers
        ((slices, table),) = pairs
        self.step += 1
        self.slots = self.slots or [tf.Variable(tf.zeros_like(table)) for _ in range(2)]
        m, v = self.slots
        ids, where = tf.unique(slices.indices)
        g = tf.math.unsorted_segment_sum(slices.values, where, len(ids))
        new_m = beta1 * tf.gather(m, ids) + (1 - beta1) * g
        new_v = beta2 * tf.gather(v, ids) + (1 - beta2) * g * g
        rate = lr * (1 - beta2**self.step) ** 0.5 / (1 - beta1**self.step)
        m.scatter_update(tf.IndexedSlices(new_m, ids))
        v.scatter_update(tf.IndexedSlices(new_v, ids))
        table.scatter_sub(tf.IndexedSlices(rate * new_m / (tf.sqrt(new_v) + epsilon), ids))


class Theirs:
    """A table of TensorFlow, or of a model of Keras, and its optimizer."""

    def __init__(self, tf, name, given):
        self.tf, start = tf, np.random.default_rng(0).normal(size=(ROWS, WIDTH))
        self.is_keras = name.startswith("keras")
        if self.is_keras:
            keras = importlib.import_module("keras")
            layer = keras.layers.Embedding(ROWS, WIDTH, name="users", dtype="float64")
            self.model = keras.Sequential([keras.Input((1,)), layer])
            self.model.compile(getattr(keras.optimizers, name.rpartition(".")[2])(LR, **given), "mse")
            self.optimizer, self.table = self.model.optimizer, layer.embeddings
            self.optimizer.build(self.model.trainable_variables)
            self.table.assign(start)
            return
        self.table = tf.Variable(start)
        kind = name.rpartition(".")[2]
        optimizers = tf.compat.v1.train
        self.optimizer = LazyAdam(tf, LR, **given) if kind == "LazyAdam" else getattr(optimizers, kind)(LR, **given)

    def step(self, ids, values):
        slices = self.tf.IndexedSlices(values, ids, [ROWS, WIDTH])
        self.optimizer.apply_gradients([(slices, self.table)])
        return np.array(self.table.numpy())

    def save(self, folder):
        """Return the path of a file, and what it calls the table."""
        if self.is_keras:
            self.model.save_weights(folder / "model.weights.h5")
            return folder / "model.weights.h5", [self.table.path]
        path, tf = str(folder / "model"), self.tf
        if isinstance(self.optimizer, LazyAdam):
            # The names of tf.contrib, and those of TensorFlow Addons, which compat's LazyAdam takes.
            m, v = self.optimizer.slots
            step = tf.constant(self.optimizer.step, tf.int64)
            named = {"users": self.table, "users/Adam": m, "users/Adam_1": v, "global_step": step}
            named |= {"LazyAdam/users/m": m, "LazyAdam/users/v": v, "LazyAdam/iter": step}
            tensors = [tf.convert_to_tensor(x) for x in named.values()]
            tf.raw_ops.SaveV2(prefix=path, tensor_names=[*named], shape_and_slices=[""] * len(named), tensors=tensors)
            return path, ["users"]
        return tf.train.Checkpoint(users=self.table, opt=self.optimizer).save(path), ["users"]


class Ours:
    """A table and its optimizer, taken over from a file."""

    def __init__(self, cell, given, path, variables):
        kind, options = call_of(cell)
        self.model = torch.nn.ModuleDict({"users": nn.Embedding(ROWS, WIDTH, grad_mode="sparse", dtype=torch.float64)})
        self.weight = self.model["users"].weight
        self.takes_slices = "." in kind or kind == "LazyAdam"
        if self.takes_slices:
            self.optimizer = eval(f"optimizers.{kind}", vars(compat))([self.weight], LR, **options, **given)
            load_tables(path, self.model)
            import_slots(self.optimizer, path, variables)
            return
        given = {OPTIM.get(name, name): value for name, value in given.items()}
        if "beta1" in given or "beta_1" in given:
            given["betas"] = tuple(given.pop(x) for x in list(given) if x.startswith("beta"))
        if "weight_decay" in given and kind == "Adam":
            given["decoupled_weight_decay"] = True
        self.optimizer = getattr(optim, kind)([self.weight], lr=LR, **{**options, **given})
        load_tables(path, self.model, optimizer=self.optimizer)

    def step(self, ids, values):
        ids, values = torch.from_numpy(ids), torch.from_numpy(values)
        if self.takes_slices:
            self.optimizer.apply_gradients([(compat.IndexedSlices(values, ids, (ROWS, WIDTH)), self.weight)])
        else:
            self.optimizer.zero_grad()
            (self.model["users"](ids) * values).sum().backward()
            self.optimizer.step()
        return self.model["users"].weight.detach().numpy().copy()


def test_each_row_has_a_run():
    rows = rows_of_page()
    assert rows.keys() == RUNS.keys()
    assert all(always for _, always in rows.values()), "each row names an optimizer that has TensorFlow's results"


@pytest.mark.parametrize("repeats", [False, True], ids=["", "repeats"])
@pytest.mark.parametrize(
    ("name", "number"), [(name, k) for name, runs in RUNS.items() for k in range(len(runs))], ids=str
)
def test_the_next_steps(name, number, repeats, tensorflow, tmp_path):
    """Gradients of 1 to 1e-9, rows that are idle before or after the file is written, or ever; ids that repeat."""
    given = RUNS[name][number]
    in_optim, always = rows_of_page()[name]
    theirs = Theirs(tensorflow, name, given)
    # Keras's RMSprop divides slices by slices, and raises or reads beyond its values where a row is repeated.
    repeats_here = repeats and name != "keras.optimizers.RMSprop"
    for seed in range(3):
        before = theirs.step(*gradients(seed, BEFORE, repeats_here))
    path, variables = theirs.save(tmp_path)
    ours = {"always": Ours(always, given, path, variables)}
    is_refused = any((name, x) in REFUSED for x in given)
    if in_optim and is_refused:
        with pytest.raises(ValueError, match="into that of compat.tensorflow.optimizers.keras"):
            Ours(in_optim, given, path, variables)
    elif in_optim and not (repeats and theirs.is_keras and "SGD" not in name):
        ours["optim"] = Ours(in_optim, given, path, variables)
    old = dict.fromkeys(ours, before)
    for seed in range(3, 6):
        batch = gradients(seed, AFTER, repeats_here)
        now = theirs.step(*batch)
        for which, its in ours.items():
            found = its.step(*batch)
            message = f"{which}, step {seed}"
            np.testing.assert_allclose(found - old[which], now - before, rtol=1e-5, atol=1e-14, err_msg=message)
            old[which] = found
        before = now
