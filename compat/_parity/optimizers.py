"""
Parity check of optimizers, over several steps with dense and sparse gradients and changing learning rates.

A step inherits the errors of the steps before it, which no bound can follow. Therefore the final variable and slots are
compared with TensorFlow's, within some units in the last place of the largest number of each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tensorflow import IndexedSlices
from . import draw
from .case import FLOATS, Case, Operator, Outcome, Reference
from .draw import ints
from .reference.numbers import wide

_V1, _KERAS = "compat.v1.train.", "keras.optimizers."
#: Units in the last place allowed. For float32 and float64 a few were seen; half types are rounded in other places.
UNITS = 32
#: Units in the last place of a sum's largest term, for sums whose terms cancel.
UNITS_OF_TERMS = 2
#: The dtypes without the half types: TensorFlow has no kernels for some of those.
_NARROW = (torch.float32, torch.float64)

Draw = Callable[[np.random.Generator], Any]


def _uniform(low: float, high: float) -> Draw:
    return lambda rng: float(rng.uniform(low, high))


def _choice(*choices: Any) -> Draw:
    return lambda rng: choices[int(rng.integers(len(choices)))]


_BETAS = _choice(0.9, 0.5, 0.0), _choice(0.999, 0.9, 0.5)
_PENALTY = _choice(0.0, 0.01, 0.1)


@dataclass(frozen=True)
class _Rule:
    """The hyperparameters and dtypes to try with one optimizer."""

    #: Draws of the hyperparameters; each is given or left at its default.
    hyperparameters: Mapping[str, Draw]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    #: Arguments that have no default.
    required: tuple[str, ...] = ()


_PENALTIES = {"l1_regularization_strength": _PENALTY, "l2_regularization_strength": _PENALTY}
_FTRL = _Rule(
    {
        "learning_rate_power": _choice(-0.5, -0.25, -1.0, 0.0),
        "initial_accumulator_value": _uniform(0.01, 1),
        **_PENALTIES,
        "l2_shrinkage_regularization_strength": _PENALTY,
        "beta": _PENALTY,
    },
)
_RULES: dict[str, _Rule] = {
    f"{_V1}GradientDescentOptimizer": _Rule({}),
    f"{_V1}MomentumOptimizer": _Rule(
        {"momentum": _uniform(0, 0.95), "use_nesterov": _choice(True)}, required=("momentum",)
    ),
    f"{_V1}AdagradOptimizer": _Rule({"initial_accumulator_value": _uniform(0.01, 1)}),
    f"{_V1}AdagradDAOptimizer": _Rule(
        {"initial_gradient_squared_accumulator_value": _uniform(0.01, 1), **_PENALTIES},
        _NARROW,
    ),
    f"{_V1}AdamOptimizer": _Rule({"beta1": _BETAS[0], "beta2": _BETAS[1], "epsilon": _choice(1e-3, 0.1)}),
    f"{_V1}RMSPropOptimizer": _Rule(
        {
            "decay": _uniform(0.5, 0.99),
            "momentum": _uniform(0, 0.95),
            "epsilon": _choice(1e-3, 0.1),
            "centered": _choice(True),
        },
        (*_NARROW, torch.float16),
    ),
    f"{_V1}AdadeltaOptimizer": _Rule({"rho": _uniform(0.5, 0.99), "epsilon": _choice(1e-3, 0.1)}),
    f"{_V1}FtrlOptimizer": _FTRL,
    f"{_V1}ProximalAdagradOptimizer": _Rule(
        {"initial_accumulator_value": _uniform(0.01, 1), **_PENALTIES},
        (torch.float32,),
    ),
    f"{_V1}ProximalGradientDescentOptimizer": _Rule(_PENALTIES, (torch.float32,)),
    f"{_KERAS}SGD": _Rule({"momentum": _uniform(0, 0.95), "nesterov": _choice(True)}),
    f"{_KERAS}Adagrad": _Rule({"initial_accumulator_value": _uniform(0.01, 1), "epsilon": _choice(1e-3, 0.1)}),
    f"{_KERAS}Adam": _Rule(
        {"beta_1": _BETAS[0], "beta_2": _BETAS[1], "epsilon": _choice(1e-3, 0.1), "amsgrad": _choice(True)}
    ),
    f"{_KERAS}AdamW": _Rule({"beta_1": _BETAS[0], "beta_2": _BETAS[1], "amsgrad": _choice(True)}),
    f"{_KERAS}RMSprop": _Rule(
        {
            "rho": _uniform(0.5, 0.99),
            "momentum": _uniform(0, 0.95),
            # Keras fails if rounding makes the variance of a row negative; repeated rows may do that too (see _once).
            "epsilon": _choice(0.1, 0.5),
            "centered": _choice(True),
        },
        required=("epsilon",),
    ),
    f"{_KERAS}Adadelta": _Rule({"rho": _uniform(0.5, 0.99), "epsilon": _choice(1e-3, 0.1)}),
    f"{_KERAS}Ftrl": _FTRL,
    f"{_KERAS}Adamax": _Rule({"beta_1": _BETAS[0], "beta_2": _BETAS[1], "epsilon": _choice(1e-3, 0.1)}),
    f"{_KERAS}Nadam": _Rule({"beta_1": _BETAS[0], "beta_2": _BETAS[1], "epsilon": _choice(1e-3, 0.1)}),
    # In half types rounding may change a sign.
    f"{_KERAS}Lion": _Rule({"beta_1": _choice(0.9, 0.5), "beta_2": _choice(0.99, 0.5)}, _NARROW),
}

#: Options of every Keras optimizer; a case has at most one option that clips.
_OPTIONS: dict[str, Draw] = {
    "weight_decay": _uniform(0, 0.1),
    "use_ema": _choice(True),
    "ema_momentum": _uniform(0.5, 0.99),
    "ema_overwrite_frequency": _choice(2, 3),
    "gradient_accumulation_steps": _choice(2, 3),
}
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


# ---- Cases ----------------------------------------------------------------------------------------------------------


def _gradient(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, most: int
) -> Tensor | IndexedSlices:
    """Draw a gradient: dense in a quarter of the steps, else slices with repeated rows."""
    if rng.random() < 0.25:
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)
    count = draw.size(rng, min(most, 30))
    indices = torch.from_numpy(draw.ids(rng, count, shape[0])).to(draw.index_dtype(rng))
    # Sums of few eighths are exact: if rounded in another order, a sum near zero would change Adam's step.
    values = torch.from_numpy(np.round(rng.standard_normal((count, *shape[1:])) * 8) / 8).to(dtype)
    return IndexedSlices(values, indices, torch.tensor(shape))


def _once(gradient: Tensor | IndexedSlices) -> Tensor | IndexedSlices:
    """
    Return the gradient with only the first slice of each row.

    Keras adds up the squares of a row's slices, and does not square their sum: its variance of the row may then be
    negative. The division by its root, a NaN, then fails with an index that no argument has.
    """
    if isinstance(gradient, Tensor):
        return gradient
    firsts = torch.from_numpy(np.sort(np.unique(gradient.indices.numpy(), return_index=True)[1]))
    return IndexedSlices(gradient.values[firsts], gradient.indices[firsts], gradient.dense_shape)


def _hyperparameters(rng: np.random.Generator, operator: str) -> dict[str, Any]:
    rule = _RULES[operator]
    given = {
        name: choose(rng)
        for name, choose in rule.hyperparameters.items()
        if name in rule.required or rng.random() < 0.6
    }
    if operator.startswith(_KERAS):
        given |= {name: choose(rng) for name, choose in _OPTIONS.items() if rng.random() < 0.2}
        if rng.random() < 0.4:
            given[_CLIPPING[int(rng.integers(3))]] = float(rng.uniform(0.2, 2))
    return given


def random_case(
    rng: np.random.Generator, operator: str, elements: int, steps: int | None = None, dtype: torch.dtype | None = None
) -> Case:
    """Draw some steps of a variable of up to so many elements."""
    dtype = dtype or draw.one_of(rng, _RULES[operator].dtypes)
    steps = steps or int(rng.integers(1, 6))
    columns = int(rng.integers(1, 6))
    rows = 1 + draw.size(rng, min(max(elements // (columns * steps), 1), 200))
    shape = (rows,) if columns == 5 else (rows, columns)
    arguments: dict[str, Any] = {"var": torch.from_numpy(rng.standard_normal(shape)).to(dtype)}
    arguments["gradients"] = [_gradient(rng, shape, dtype, rows) for _ in range(steps)]
    arguments["learning_rates"] = [float(rng.uniform(0.02, 0.3)) for _ in range(steps)]
    given = _hyperparameters(rng, operator)
    if operator.startswith(_KERAS) and given.get("centered"):
        arguments["gradients"] = [_once(gradient) for gradient in arguments["gradients"]]
    if operator == f"{_V1}AdadeltaOptimizer" and dtype is torch.float16:
        given.setdefault("epsilon", 1e-3)  # TensorFlow's default is 0 in float16: NaN if a square underflows
    return Case(operator, arguments | given, "random")


def _picked(operator: str) -> list[Case]:
    rule = _RULES[operator]
    cases = []
    needed = {name: rule.hyperparameters[name](np.random.default_rng(0)) for name in rule.required}

    def add(note: str, gradients: list[Any], **given: Any) -> None:
        shape = tuple(gradients[0].shape)
        var = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).reshape(shape) / 4
        names = (given.pop("names"),) if "names" in given else None
        dtype = gradients[0].dtype
        arguments = {"var": var.to(dtype), "gradients": gradients, "learning_rates": [0.25] * len(gradients)}
        cases.append(Case(operator, arguments | needed | given, note, names=names))

    def slices(*rows: int, dtype: torch.dtype = torch.float32) -> IndexedSlices:
        values = torch.arange(len(rows) * 2, dtype=torch.float32).reshape(-1, 2) - 1.25
        return IndexedSlices(values.to(dtype), ints(*rows), ints(4, 2, dtype=torch.int64))

    dense = torch.tensor([[1.0, 0.0], [-2.0, 0.5], [0.0, 0.0], [3.0, -1.0]])
    add("a repeated row", [slices(2, 0, 2), slices(2, 2)])
    add("rows come and go", [slices(1), slices(3, 0), slices(1, 3)])
    add("no slices", [slices(0), slices()])
    add("dense", [dense, -dense])
    add("dense and sparse", [dense, slices(3, 3), dense])
    add("a vector", [dense[:, 0], IndexedSlices(dense[:2, 0], ints(1, 1), ints(4, dtype=torch.int64))])
    add("a scalar", [dense[0, 0], dense[1, 0]])
    for dtype in rule.dtypes:
        add("every dtype", [slices(2, 0, 2, dtype=dtype), dense.to(dtype), slices(1, 1, dtype=dtype)])
    for name, choose in rule.hyperparameters.items():
        add(name, [slices(2, 0, 2), dense, slices(3)], **{name: choose(np.random.default_rng(1))})
    add("too large", [slices(0, 4)], names="indices[1]")
    if operator.startswith(_KERAS):
        for name, choose in _OPTIONS.items():
            more = {"use_ema": True} if name.startswith("ema") else {}
            value = {name: choose(np.random.default_rng(1))}
            add(name, [slices(2, 0, 2), slices(3, 3), dense, slices(3), slices(0)], **more, **value)
        for name in _CLIPPING:
            add(name, [slices(2, 0, 2, 1, 2), dense], **{name: 0.75})
        add("two that clip", [dense], clipnorm=1.0, clipvalue=1.0, names="clipnorm")
        add("one step", [dense], gradient_accumulation_steps=1, names="gradient_accumulation_steps")
    for name in ("initial_accumulator_value", "l1_regularization_strength"):
        if name in rule.hyperparameters and "Ftrl" in operator:
            add(f"{name} negative", [dense], **{name: -0.5}, names=name)
    return cases


# ---- References and calls -------------------------------------------------------------------------------------------


def _largest_term_of_linear(case: Case, theirs: Outcome) -> float:
    """
    Return the largest term of Ftrl's sum ``linear += g - var * (new**-power - old**-power) / lr``.

    Little may be left of the sum: if the variable's first values are far above Ftrl's, roundings have the size of this
    term, not of the result. TensorFlow's and ours were seen half a unit in its last place off the exact sum.
    """
    accumulator = next(value for name, value in theirs.values.items() if name.startswith("accum"))
    power = -case.arguments.get("learning_rate_power", -0.5)
    variable = np.abs(wide(case.arguments["var"])).max(initial=0)
    return float(variable * np.abs(wide(accumulator)).max(initial=0) ** power / min(case.arguments["learning_rates"]))


def _references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    """Return TensorFlow's own results with the tolerances."""
    references = {}
    for name, value in theirs.values.items():
        exact = wide(value)
        largest = np.abs(exact).max(initial=1, where=np.isfinite(exact))
        units = UNITS * largest
        if name == "linear":
            units = max(units, UNITS_OF_TERMS * _largest_term_of_linear(case, theirs))
        tolerance = torch.finfo(value.dtype).eps * units
        references[name] = Reference(exact, np.full_like(exact, tolerance))
    return references


def _split(arguments: dict[str, Any]) -> tuple[Any, list[Any], list[float], dict[str, Any]]:
    """Return the variable, gradients, learning rates and hyperparameters."""
    given = dict(arguments)
    return given.pop("var"), given.pop("gradients"), given.pop("learning_rates"), given


def _run_tensorflow(tf: Any, arguments: dict[str, Any], *, operator: str) -> dict[str, Any]:
    value, gradients, rates, given = _split(arguments)
    if operator.startswith(_KERAS):
        keras = importlib.import_module("keras")
        variable = keras.Variable(value, dtype=value.dtype.name, name="var")
        optimizer = getattr(keras.optimizers, operator.removeprefix(_KERAS))(rates[0], **given)
        for gradient, rate in zip(gradients, rates, strict=True):
            optimizer.learning_rate = rate
            optimizer.apply_gradients([(gradient, variable)])
        slots = [v for v in optimizer.variables if v.name not in ("iteration", "learning_rate")]
        # Nadam's product is called variable, or variable_1 if there are other variables of that name.
        names = ["u_product" if v.name.startswith("variable") else v.name.removeprefix("var_") for v in slots]
        return {"var": variable.value} | {name: v.value for name, v in zip(names, slots, strict=True)}
    variable, rate_now = tf.Variable(value, name="var"), tf.Variable(rates[0])
    step = tf.Variable(0, dtype=tf.int64)
    # The learning rate is a variable: not every optimizer takes a function.
    further = {"global_step": step} if operator.endswith("DAOptimizer") else {}
    optimizer = getattr(tf.compat.v1.train, operator.removeprefix(_V1))(rate_now, **further, **given)
    for gradient, rate in zip(gradients, rates, strict=True):
        rate_now.assign(rate)
        optimizer.apply_gradients([(gradient, variable)], global_step=step)
    values = {name: optimizer.get_slot(variable, name) for name in optimizer.get_slot_names()}
    values |= {v.name.split(":")[0]: v for v in optimizer.variables() if "power" in v.name}
    return {name: tf.identity(value) for name, value in {"var": variable, **values}.items()}


def _run_ours(compat: Any, arguments: dict[str, Any], *, operator: str) -> dict[str, Any]:
    value, gradients, rates, given = _split(arguments)
    module = compat.optimizers.keras if operator.startswith(_KERAS) else compat.optimizers.v1
    further = {"global_step": 0} if operator.endswith("DAOptimizer") else {}
    parameter = torch.nn.Parameter(value.clone())
    optimizer = getattr(module, operator.split(".")[-1])([parameter], rates[0], **further, **given)
    for gradient, rate in zip(gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.apply_gradients([(gradient, parameter)])
    group = optimizer.param_groups[0]
    optimizer.slots_of(parameter, group)
    numbers = {"beta1_power": torch.float32, "beta2_power": torch.float32, "u_product": value.dtype}
    others = {name: torch.tensor(group[name], dtype=dtype) for name, dtype in numbers.items() if name in group}
    return {"var": parameter.detach(), **optimizer.state[parameter], **others}


OPERATORS: dict[str, Operator] = {
    name: Operator(
        random_case,
        _picked,
        _references,
        run_tensorflow=partial(_run_tensorflow, operator=name),
        run_ours=partial(_run_ours, operator=name),
    )
    for name in _RULES
}
