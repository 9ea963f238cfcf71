"""compat.tensorflow.optimizers without TensorFlow: as torch optimizers, LazyAdam, state, arguments."""

import copy

import numpy as np
import pytest
import torch
from kinds import saved

from torchsparse_rec.compat import keras as compat_keras
from torchsparse_rec.compat import tensorflow as tf
from torchsparse_rec.compat._parity.reference.row_optimizer import adam
from torchsparse_rec.compat.tensorflow.optimizers import LazyAdam, export_slots, import_slots, keras, v1

#: Every optimizer with arguments under which it has all its slots.
MADE = {
    v1.GradientDescentOptimizer: {},
    v1.MomentumOptimizer: {"momentum": 0.5, "use_nesterov": True},
    v1.AdagradOptimizer: {},
    v1.AdagradDAOptimizer: {"global_step": 0},
    v1.AdamOptimizer: {},
    v1.RMSPropOptimizer: {"momentum": 0.5, "centered": True},
    v1.AdadeltaOptimizer: {},
    v1.FtrlOptimizer: {"l1_regularization_strength": 0.01, "beta": 0.5},
    v1.ProximalAdagradOptimizer: {"l1_regularization_strength": 0.01},
    v1.ProximalGradientDescentOptimizer: {"l2_regularization_strength": 0.01},
    keras.SGD: {"momentum": 0.5, "weight_decay": 0.01},
    keras.Adagrad: {"use_ema": True},
    keras.Adam: {"amsgrad": True},
    keras.AdamW: {"clipnorm": 1.0},
    keras.RMSprop: {"momentum": 0.5, "centered": True},
    keras.Adadelta: {"gradient_accumulation_steps": 2},
    keras.Ftrl: {},
    keras.Adamax: {},
    keras.Nadam: {},
    keras.Lion: {},
    LazyAdam: {},
}
everyone = pytest.mark.parametrize("kind", MADE, ids=lambda kind: f"{kind.__module__.split('.')[-1]}.{kind.__name__}")
#: The optimizers that leave the rows outside a sparse gradient as they are.
SPARSE = [
    kind
    for kind in MADE
    if kind.__module__.endswith(("_v1", "_v1_penalties", "_lazy_adam")) and kind is not v1.AdamOptimizer
]


def made(kind, params, **further):
    return kind(params, 0.125, **{**MADE[kind], **further})


def train(optimizer, parameters, seed, steps=4):
    """Train parameters of two dimensions by unmerged gradients of three rows, and the others by dense gradients."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        for parameter in parameters:
            gradient = torch.from_numpy(rng.standard_normal(tuple(parameter.shape))).to(parameter)
            if parameter.dim() == 2:
                rows = torch.from_numpy(rng.integers(0, parameter.shape[0], 3)).to(parameter.device)
                gradient = torch.sparse_coo_tensor(rows[None], gradient[:3], parameter.shape, check_invariants=True)
            parameter.grad = gradient
        optimizer.step()


def parameters(device="cpu"):
    rng = np.random.default_rng(0)
    shapes = ((5, 3), (4, 2), (3,))
    return [torch.nn.Parameter(torch.from_numpy(rng.standard_normal(s)).float().to(device)) for s in shapes]


# ---- As torch optimizers --------------------------------------------------------------------------------------------


@everyone
def test_a_state_dict_goes_on(kind):
    ours = parameters()
    optimizer = made(kind, ours)
    train(optimizer, ours, 1, 3)
    kept = saved(optimizer.state_dict(), weights_only=True)
    others = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    other = made(kind, others)
    other.load_state_dict(kept)
    copied, parts = copy.deepcopy((optimizer, ours))
    for each, tables in ((optimizer, ours), (other, others), (copied, parts)):
        train(each, tables, 2)
    assert optimizer.iterations == other.iterations == copied.iterations == 7
    for one, two, three in zip(ours, others, parts, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    assert copied.name == optimizer.name


@everyone
def test_uncoalesced_gradients_are_indexed_slices(kind, device):
    ours, others = parameters(device), parameters(device)
    optimizer, other = made(kind, ours), made(kind, others)
    train(optimizer, ours, 3)
    rng = np.random.default_rng(3)
    for _ in range(4):
        pairs = []
        for parameter in others:
            gradient = torch.from_numpy(rng.standard_normal(tuple(parameter.shape))).to(parameter)
            if parameter.dim() == 2:
                rows = torch.from_numpy(rng.integers(0, parameter.shape[0], 3)).int().to(parameter.device)
                gradient = tf.IndexedSlices(gradient[:3], rows)
            pairs.append((gradient, parameter))
        other.apply_gradients([*pairs[::-1], (None, others[0])])
    assert all(torch.equal(one, two) for one, two in zip(ours, others, strict=True))


@everyone
def test_coalesced_gradients_are_the_sums(kind):
    table, other = (torch.nn.Parameter(torch.ones(6, 2)) for _ in range(2))
    slices = torch.sparse_coo_tensor(
        [[4, 1, 4]], torch.tensor([[1.0, 2], [3, 4], [5, -6]]), (6, 2), check_invariants=True
    )
    summed = tf.IndexedSlices(torch.tensor([[3.0, 4], [6, -4]]), torch.tensor([1, 4]))
    optimizer = made(kind, [table])
    table.grad = slices.coalesce()
    optimizer.step()
    made(kind, [other]).apply_gradients([(summed, other)])
    assert torch.equal(table, other)


@pytest.mark.parametrize("kind", SPARSE, ids=lambda kind: kind.__name__)
def test_rows_outside_the_gradient_stay(kind):
    table = torch.nn.Parameter(torch.ones(6, 2))
    optimizer = made(kind, [table])
    optimizer.apply_gradients([(torch.ones(6, 2), table)])
    before, slots = table.detach().clone(), copy.deepcopy(dict(optimizer.state[table]))
    optimizer.apply_gradients([(tf.IndexedSlices(torch.ones(2, 2), torch.tensor([1, 1])), table)])
    moved = [0, 2, 3, 4, 5]
    assert torch.equal(table[moved], before[moved]) and not torch.equal(table[1], before[1])
    assert all(torch.equal(optimizer.state[table][n][moved], slot[moved]) for n, slot in slots.items())


@everyone
def test_any_strides_and_no_dimensions(kind):
    start = torch.arange(6, dtype=torch.float32).reshape(2, 3) / 4
    whole, turned, scalar = (torch.nn.Parameter(x) for x in (start.clone(), start.T.contiguous().T, torch.tensor(0.5)))
    one, two = made(kind, [whole]), made(kind, [turned, scalar])
    assert not turned.is_contiguous()
    for _ in range(3):
        gradient = start - 0.5
        one.apply_gradients([(gradient, whole)])
        two.apply_gradients([(gradient.T.contiguous().T, turned), (torch.tensor(2.0), scalar)])
    assert torch.equal(whole, turned) and scalar != 0.5


@everyone
def test_schedulers_and_functions_set_the_learning_rate(kind):
    rates, now = [0.125, 0.0625, 0.03125], [0]
    results = []
    for rate in (lambda step: rates[step], lambda: rates[now[0]], 0.125):
        table = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([table], rate, **MADE[kind])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if rate == 0.125 else None
        for now[0] in range(3):
            table.grad = torch.tensor([1.0, -0.5, 0.25])
            optimizer.step()
            if scheduler:
                scheduler.step()
        now[0] = 0
        results.append(table.detach().clone())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_groups_have_hyperparameters_of_their_own():
    one, two = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = keras.SGD(
        [{"params": [one]}, {"params": [two], "lr": 0.5, "weight_decay": None}], 0.25, weight_decay=0.5
    )
    optimizer.apply_gradients([(torch.ones(2), one), (torch.ones(2), two)])
    assert one.tolist() == [1 - 0.125 - 0.25] * 2 and two.tolist() == [0.5] * 2
    three = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [three]})
    assert optimizer.param_groups[2]["iterations"] == 1
    optimizer.learning_rate = 1.0
    assert [group["lr"] for group in optimizer.param_groups] == [1.0] * 3
    with pytest.raises(TypeError, match="is a function"):
        keras.SGD([one], lambda: 0.5).learning_rate = 0.25


def test_a_closure_and_a_step_without_gradients():
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = keras.SGD([weight], 0.25)
    assert optimizer.step() is None and optimizer.iterations == 0

    def closure():
        optimizer.zero_grad()
        loss = (weight * weight).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert weight.item() == 1.0 and optimizer.iterations == 1


def test_the_steps_of_adam_are_counted_in_powers_of_float32():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = v1.AdamOptimizer([weight])
    power = np.float32(0.999)
    for _ in range(100):
        optimizer.apply_gradients([(torch.ones(2, dtype=torch.float64), weight)])
        power = np.float32(power * np.float32(0.999))
    assert optimizer.param_groups[0]["beta2_power"] == power


def test_global_steps_grow():
    step, weight = torch.tensor(5), torch.nn.Parameter(torch.ones(1))
    optimizer = v1.AdagradDAOptimizer([weight], 0.5, step)
    optimizer.apply_gradients([(torch.ones(1), weight)], global_step=step)
    assert step == 6 == optimizer.iterations


def test_averages_are_written_back_and_losses_scaled():
    weight, other = torch.nn.Parameter(torch.tensor([2.0])), torch.nn.Parameter(torch.tensor([8.0]))
    optimizer = keras.SGD([weight, other], 1.0, use_ema=True, ema_momentum=0.5, loss_scale_factor=4.0)
    for _ in range(2):
        weight.grad = optimizer.scale_loss(torch.tensor([1.0]))
        optimizer.step()
    assert weight.item() == 0.0 and optimizer.state[weight]["average"].item() == 0.5
    optimizer.finalize_variable_values()
    assert weight.item() == 0.5 and other.item() == 8.0


def test_names():
    assert tf.compat.v1.train.AdagradOptimizer is tf.optimizers.v1.AdagradOptimizer
    assert compat_keras.optimizers.Adam is tf.optimizers.keras.Adam


# ---- LazyAdam -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lazy_adam(dtype, device):
    """Compare with the reference of Adam; TensorFlow Addons does not run beside Keras 3."""
    rng = np.random.default_rng(5)
    w = torch.from_numpy(rng.standard_normal((7, 3)))
    tables = [w, torch.zeros_like(w), torch.zeros_like(w)]
    beta_1, beta_2, lr, epsilon = (float(np.float32(x)) for x in (0.75, 0.99, 0.05, 1e-3))
    table = torch.nn.Parameter(w.to(device, dtype, copy=True))
    optimizer = LazyAdam([table], lr, beta_1, beta_2, epsilon)
    for step in range(1, 31):
        count = int(rng.integers(0, 9))
        rows, values = torch.from_numpy(rng.integers(0, 7, count)), torch.from_numpy(rng.standard_normal((count, 3)))
        dense = torch.zeros_like(w).index_add_(0, rows, values)
        is_dense = step % 5 == 0
        touched = torch.arange(7) if is_dense else rows.unique()
        stepped = adam([x[touched] for x in tables], dense[touched], step, lr, beta_1, beta_2, epsilon, 0.0, 0.0, 1.0)
        for x, after in zip(tables, stepped, strict=True):
            x[touched] = after
        gradient = dense.to(table) if is_dense else tf.IndexedSlices(values.to(table), rows.to(device))
        optimizer.apply_gradients([(gradient, table)])
    tolerance = 200 * torch.finfo(dtype).eps
    for ours, expected in zip((table, *optimizer.state[table].values()), tables, strict=True):
        torch.testing.assert_close(ours.detach().cpu().double(), expected, rtol=tolerance, atol=tolerance)
    with pytest.raises(ValueError, match="amsgrad must be False"):
        LazyAdam([table], amsgrad=True)


# ---- Slots ----------------------------------------------------------------------------------------------------------


@everyone
def test_exported_slots_go_on(kind):
    ours = parameters()
    optimizer = made(kind, ours)
    train(optimizer, ours, 1, 4)
    exported = export_slots(optimizer, ["a", "b/c", "d"], transposed=[ours[1]])
    others = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    other = made(kind, others)
    import_slots(other, exported, ["a", "b/c", "d"], transposed=[others[1]])
    for each, tables in ((optimizer, ours), (other, others)):
        train(each, tables, 2)
    assert all(torch.equal(one, two) for one, two in zip(ours, others, strict=True))


def test_the_names_of_slots():
    weight = torch.nn.Parameter(torch.ones(2))

    def names(optimizer):
        return list(export_slots(optimizer, ["x/w"]))

    assert names(v1.AdamOptimizer([weight])) == ["x/w/Adam", "x/w/Adam_1", "beta1_power", "beta2_power", "global_step"]
    assert names(v1.FtrlOptimizer([weight], 1.0))[:2] == ["x/w/Ftrl", "x/w/Ftrl_1"]
    assert names(v1.FtrlOptimizer([weight], 1.0, linear_name="Z"))[:2] == ["x/w/Ftrl", "x/w/Z"]
    assert names(v1.RMSPropOptimizer([weight], 1.0, name="R"))[:2] == ["x/w/R", "x/w/R_1"]
    assert names(keras.Adam([weight]))[1:] == ["adam/learning_rate", "adam/x_w_momentum", "adam/x_w_velocity"]
    assert names(LazyAdam([weight])) == ["LazyAdam/x/w/m", "LazyAdam/x/w/v", "LazyAdam/iter"]


def test_half_slots_come_and_go():
    for dtype in (torch.float16, torch.bfloat16):
        weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        optimizer = v1.AdagradOptimizer([weight], 0.5, 0.25)
        exported = export_slots(optimizer, ["w"])
        import_slots(optimizer, exported, ["w"])
        assert optimizer.state[weight]["accumulator"].dtype == dtype


def test_slots_that_do_not_fit():
    one, two = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    optimizer = v1.AdagradOptimizer([one, two], 0.5)
    good = export_slots(optimizer, ["one", "two"])
    with pytest.raises(ValueError, match="variables must say what TensorFlow calls the parameters"):
        import_slots(optimizer, good)
    with pytest.raises(ValueError, match="variables must be 2, as the parameters are, got 1"):
        import_slots(optimizer, good, ["one"])
    with pytest.raises(ValueError, match="variables must be 2, as the parameters are, got 1"):
        export_slots(optimizer, ["one"])
    with pytest.raises(ValueError, match="source has no 'three/Adagrad'; it has global_step, one/Adagrad, two/Adagrad"):
        import_slots(optimizer, good, ["one", "three"])
    with pytest.raises(ValueError, match=r"accumulator of parameter 0 must have its shape, \[2\], got \[3\]"):
        import_slots(optimizer, good, ["two", "one"])
    with pytest.raises(ValueError, match="source must be an optimizer, a mapping, a reader or a path, got int"):
        import_slots(optimizer, 5, ["one", "two"])
    nothing_changed = optimizer.state[one]["accumulator"].tolist() == [np.float32(0.1)] * 2
    assert nothing_changed
    adam = keras.Adam([one])
    with pytest.raises(
        ValueError, match="source must have 4 values, iteration, learning_rate, momentum, velocity; got 2"
    ):
        import_slots(adam, [0, 0.5])
    with pytest.raises(ValueError, match="source has no 'one_momentum'"):
        import_slots(adam, {"adam/iteration": 3}, ["one"])


# ---- Arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@everyone
def test_gradients_that_do_not_fit_change_nothing(kind):
    table, bias = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(()))
    optimizer = made(kind, [table, bias])
    one, slices = torch.ones(()), tf.IndexedSlices
    ids = torch.tensor([0, 1])
    for error, match, gradient in [
        (ValueError, r"gradient 1 must have the shape \[4, 2\], got \[4, 3\]", torch.ones(4, 3)),
        (ValueError, "gradient 1 must have the dtype and device of its parameter", torch.ones(4, 2).long()),
        (ValueError, "gradient 1 must be a tensor or IndexedSlices, got str", "1"),
        (ValueError, "gradient 1 must be strided, sparse COO or IndexedSlices", torch.ones(4, 2).to_sparse_csr()),
        (ValueError, "gradient 1 must have one sparse dimension", torch.ones(4, 2).to_sparse()),
        (ValueError, "gradient 1 must have int32 or int64 indices", slices(torch.ones(2, 2), ids.float())),
        (ValueError, r"gradient 1 must have the shape \[2, 2\], got \[3, 2\]", slices(torch.ones(3, 2), ids)),
        (IndexError, r"gradient 1: indices\[1\] must be in \[0, 4\), got 4", slices(torch.ones(2, 2), ids * 4)),
        (IndexError, r"gradient 1: indices\[1\] must be in \[0, 4\), got -1", slices(torch.ones(2, 2), -ids)),
    ]:
        with pytest.raises(error, match=match):
            optimizer.apply_gradients([(one, bias), (gradient, table)])
    with pytest.raises(ValueError, match="gradient 0 must be strided, as its parameter is a scalar"):
        optimizer.apply_gradients([(slices(torch.ones(2), ids), bias)])
    with pytest.raises(ValueError, match=r"grads_and_vars\[1\]: the tensor is no parameter of this optimizer"):
        optimizer.apply_gradients([(one, bias), (one, torch.ones(()))])
    with pytest.raises(ValueError, match="grads_and_vars must have a gradient, got none"):
        optimizer.apply_gradients([(None, bias)])
    assert optimizer.iterations == 0 and bias == 1 and torch.equal(table, torch.ones(4, 2))


@pytest.mark.parametrize(
    ("kind", "given", "match"),
    [
        (v1.AdagradOptimizer, {"learning_rate": "fast"}, "learning_rate must be a number or a function"),
        (v1.AdagradOptimizer, {"initial_accumulator_value": 0.0}, "initial_accumulator_value must be positive"),
        (
            v1.ProximalAdagradOptimizer,
            {"initial_accumulator_value": -1.0},
            "initial_accumulator_value must be positive",
        ),
        (
            v1.AdagradDAOptimizer,
            {"global_step": 0, "initial_gradient_squared_accumulator_value": 0.0},
            "initial_gradient_squared_accumulator_value must be positive",
        ),
        (v1.FtrlOptimizer, {"learning_rate_power": 0.5}, "learning_rate_power must not be positive"),
        (v1.FtrlOptimizer, {"l2_regularization_strength": -0.5}, "l2_regularization_strength must not be negative"),
        (keras.Ftrl, {"learning_rate_power": 0.5}, "learning_rate_power must not be positive"),
        (keras.Ftrl, {"initial_accumulator_value": -0.5}, "initial_accumulator_value must not be negative"),
        (keras.SGD, {"momentum": 1.5}, r"momentum must be in \[0, 1\]"),
        (keras.Lion, {"beta_1": 0.0}, r"beta_1 must be in \(0, 1\]"),
        (keras.AdamW, {"weight_decay": None}, "weight_decay must be a number"),
        (keras.Adam, {"clipnorm": 1.0, "clipvalue": 1.0}, "only one of clipnorm, clipvalue and global_clipnorm"),
        (keras.Adam, {"gradient_accumulation_steps": 1}, "gradient_accumulation_steps must be at least 2"),
        (keras.Adam, {"use_ema": True, "ema_momentum": 2.0}, r"ema_momentum must be in \[0, 1\]"),
        (keras.Adam, {"use_ema": True, "ema_overwrite_frequency": 0}, "ema_overwrite_frequency must be at least 1"),
    ],
)
def test_arguments_outside_their_range(kind, given, match):
    with pytest.raises(ValueError, match=match):
        kind([torch.nn.Parameter(torch.ones(2))], **{"learning_rate": 0.5, **given})
