"""Parity check of ``tf.raw_ops.ResourceSparseApply*``, the optimizers of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import draw
from .case import FLOATS, INF, NAN, Case, Operator, Outcome, Reference
from .draw import ints
from .reference import row_update as formulas
from .reference.numbers import wide
from .reference.rounded import Precision, Rounded

_PRECISIONS = {
    torch.float16: Precision(2.0**-11, 2.0**-24),
    torch.bfloat16: Precision(2.0**-8, 2.0**-126),
    torch.float32: Precision(2.0**-24, 2.0**-126),
    torch.float64: Precision(2.0**-53, 2.0**-1022),
}
# How often one row may occur at most: the reference takes the items of a row one by one.
_MOST_REPEATS = 40
# TensorFlow's Adagrad deals larger batches out to threads, which then write the same row at once (PARITY.md).
_RACY_ELEMENTS = 4096

# ---- Rules ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """One optimizer of rows: its formula, slots and arguments."""

    #: The end of the name of its function in compat.tensorflow.
    ours: str
    step: Callable[..., list[Rounded]]
    #: Names of TensorFlow's arguments, with spaces between them.
    slot_names: str
    numbers: str
    #: The name of its flag, if it has one, and the dtypes that TensorFlow has kernels for.
    flag: str | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATS

    @property
    def slots(self) -> list[str]:
        return self.slot_names.split()

    @property
    def hyperparameters(self) -> list[str]:
        return self.numbers.split()


_WIDE = (torch.float32, torch.float64)
_NO_BFLOAT16 = (torch.float16, *_WIDE)
_SUMS = "gradient_accumulator gradient_squared_accumulator"
_DECAYS = "lr rho momentum epsilon"
_FTRL = "multiply_linear_by_lr"
_RULES = {
    "Adagrad": _Rule("adagrad", formulas.adagrad, "accum", "lr", "update_slots"),
    "AdagradV2": _Rule("adagrad_v2", formulas.adagrad, "accum", "lr epsilon", "update_slots"),
    "AdagradDA": _Rule("adagrad_da", formulas.adagrad_da, _SUMS, "lr l1 l2", dtypes=_WIDE),
    "Adadelta": _Rule("adadelta", formulas.adadelta, "accum accum_update", "lr rho epsilon"),
    "Ftrl": _Rule("ftrl", formulas.ftrl, "accum linear", "lr l1 l2 lr_power", _FTRL),
    "FtrlV2": _Rule("ftrl_v2", formulas.ftrl, "accum linear", "lr l1 l2 l2_shrinkage lr_power", _FTRL),
    "ProximalAdagrad": _Rule("proximal_adagrad", formulas.proximal_adagrad, "accum", "lr l1 l2", dtypes=_WIDE),
    "ProximalGradientDescent": _Rule(
        "proximal_gradient_descent", formulas.proximal_gradient_descent, "", "alpha l1 l2", dtypes=_WIDE
    ),
    "RMSProp": _Rule("rms_prop", formulas.rmsprop, "ms mom", _DECAYS, dtypes=_NO_BFLOAT16),
    "CenteredRMSProp": _Rule("centered_rms_prop", formulas.centered_rmsprop, "mg ms mom", _DECAYS, dtypes=_NO_BFLOAT16),
    "Momentum": _Rule("momentum", formulas.momentum, "accum", "lr momentum", "use_nesterov"),
    "KerasMomentum": _Rule("keras_momentum", formulas.keras_momentum, "accum", "lr momentum", "use_nesterov"),
}
_PREFIX = "raw_ops.ResourceSparseApply"
# The range from which each hyperparameter is drawn; epsilon keeps the centered variance away from zero.
_RANGES = {
    "lr": (0.01, 0.5),
    "alpha": (0.01, 0.5),
    "epsilon": (1.0, 2.0),
    "rho": (0.5, 0.99),
    "momentum": (0.0, 0.9),
    "l1": (0.0, 0.2),
    "l2": (0.0, 0.2),
    "l2_shrinkage": (0.0, 0.2),
}


def _rule(operator: str) -> _Rule:
    return _RULES[operator.removeprefix(_PREFIX)]


def _arguments(
    rng: np.random.Generator, operator: str, dtype: torch.dtype, rows: int, inner: tuple[int, ...], indices: Tensor
) -> dict[str, Any]:
    """Draw the arguments of a call with these rows."""
    rule = _rule(operator)
    shape = (rows, *inner)
    arguments: dict[str, Any] = {"var": torch.from_numpy(rng.standard_normal(shape)).to(dtype)}
    for slot in rule.slots:
        arguments[slot] = torch.from_numpy(rng.uniform(0.25, 1.0, shape)).to(dtype)
    grad = rng.standard_normal((indices.shape[0], *inner)) * 10.0 ** rng.uniform(-2, 0.5)
    arguments |= {"grad": torch.from_numpy(grad).to(dtype), "indices": indices}
    for name in rule.hyperparameters:
        if name == "lr_power":
            number = -0.5 if rng.random() < 0.6 else float(rng.choice([-0.25, -0.75, -1.0, 0.0]))
        else:
            number = float(rng.uniform(*_RANGES[name])) if name[0] != "l" or rng.random() < 0.8 else 0.0
        number = max(number, 0.01) if name == "lr" else number
        arguments[name] = torch.tensor(number, dtype=dtype)
    if operator.endswith("AdagradDA"):
        arguments["global_step"] = torch.tensor(int(rng.integers(1, 100)))
    if rule.flag is not None and rng.random() < 0.5:
        arguments[rule.flag] = bool(rng.random() < 0.7)
    return arguments


def _random(rng: np.random.Generator, operator: str, elements: int) -> Case:
    inner = draw.inner_shape(rng)
    inner = inner if np.prod(inner) else (3,)  # TensorFlow refuses rows without elements
    limit = draw.rows_limit(elements, inner)
    rows, count = max(draw.size(rng, limit), 1), draw.size(rng, min(limit, 4000))
    indices = draw.ids(rng, count, rows)
    indices = indices[formulas.occurrences(indices) < _MOST_REPEATS]
    if "Adagrad" in operator and len(indices) * np.prod(inner) > _RACY_ELEMENTS:
        indices = rng.permutation(np.unique(indices))
    dtype = draw.one_of(rng, _rule(operator).dtypes)
    given = torch.from_numpy(indices).to(draw.index_dtype(rng))
    arguments = _arguments(rng, operator, dtype, rows, inner, given)
    arguments["grad"] = draw.with_specials(rng, arguments["grad"])
    note = _spoil(rng, arguments) if rng.random() < 1 / 6 else "random"
    return Case(operator, arguments, note)


def _spoil(rng: np.random.Generator, arguments: dict[str, Any]) -> str:
    """Make one argument wrong and return which (not a dtype: TensorFlow would end the process)."""
    ways = ["length", "index rank", "index dtype", *(["width"] if arguments["var"].dim() > 1 else [])]
    ways += ["index"] * 3 if len(arguments["indices"]) else []
    ways += ["slot"] if any(name in arguments for name in ("accum", "ms")) else []
    way = str(rng.choice(ways))
    indices, grad = arguments["indices"], arguments["grad"]
    if way == "length":
        arguments["indices"] = torch.cat([indices, indices.new_zeros(1)])
    elif way == "index rank":
        arguments["indices"] = indices.unsqueeze(0)
    elif way == "index dtype":
        arguments["indices"] = indices.to(torch.float32)
    elif way == "width":
        arguments["grad"] = torch.cat([grad, grad[:, :1]], dim=1)
    elif way == "index":
        arguments["indices"] = indices.clone()
        bad = int(rng.choice([-1, arguments["var"].shape[0], 2**31 - 1, -(2**31)]))
        arguments["indices"][int(rng.integers(len(indices)))] = bad
    else:
        slot = "accum" if "accum" in arguments else "ms"
        arguments[slot] = torch.cat([arguments[slot], arguments[slot][:1]])
    return f"bad {way}"


def _picked(operator: str) -> list[Case]:
    rule = _rule(operator)
    rng = np.random.default_rng(0)
    cases: list[Case] = []

    def add(
        note: str,
        indices: Tensor,
        changed: Mapping[str, Any] | None = None,
        *,
        inner: tuple[int, ...] = (3,),
        rows: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        arguments = _arguments(np.random.default_rng(len(cases)), operator, dtype, rows, inner, indices)
        cases.append(Case(operator, {**arguments, **(changed or {})}, note))

    grad = torch.from_numpy(rng.standard_normal((3, 3))).float()
    add("duplicates", ints(2, 0, 2, 2))
    add("int64 indices", ints(2, 0, 2, dtype=torch.int64))
    add("rank 1", ints(1, 3, 1), inner=())
    add("one column", ints(1, 3, 1), inner=(1,))
    add("rank 4", ints(1, 0, 1), inner=(2, 3, 2))
    add("no items", ints())
    add("no rows", ints(), rows=0)
    for bad in (4, -1, 2**31 - 1):
        add(f"index {bad}", ints(0, bad, 1))
    add("lengths differ", ints(0, 1, 2), {"grad": grad[:2]})
    add("another width", ints(0, 1, 2), {"grad": grad[:, :2]})
    add("indices of rank 2", ints(0, 1, 2).unsqueeze(0), {"grad": grad})
    add("indices float", torch.zeros(3), {"grad": grad})
    for special in (NAN, INF, -INF):
        add(f"a gradient of {special}", ints(1, 1, 2), {"grad": grad.clone().index_fill(1, torch.tensor([1]), special)})
    add("gradients of zero", ints(1, 1, 2), {"grad": grad * 0})
    for slot in rule.slots:
        add(f"{slot} of another shape", ints(0), {slot: torch.ones(3, 3)})
    for name in rule.hyperparameters:
        add(f"{name} 0", ints(2, 1, 2), {name: torch.tensor(0.0)})
        add(f"{name} negative", ints(2, 1, 2), {name: torch.tensor(-0.25)})
        add(f"{name} a vector", ints(2, 1, 2), {name: torch.tensor([0.25])})
    if "lr_power" in rule.hyperparameters:
        add("lr_power positive", ints(2, 1, 2), {"lr_power": torch.tensor(0.25)})
    if rule.flag is not None:
        for value in (False, True):
            add(f"{rule.flag} {value}", ints(2, 1, 2), {rule.flag: value})
            add(f"{rule.flag} {value}, lr 0", ints(2, 1), {rule.flag: value, "lr": torch.tensor(0.0)})
    for dtype in rule.dtypes:
        add("every dtype", ints(3, 0, 3, 3), dtype=dtype)
    return cases


# ---- References and calls -------------------------------------------------------------------------------------------


def _references(case: Case, theirs: Outcome) -> dict[str, Reference]:
    """Compute the results with bounds: one occurrence of every row at a time, each operation rounded once."""
    rule, given = _rule(case.operator), case.arguments
    names = ("var", *rule.slots)
    precision = _PRECISIONS[given["var"].dtype]
    numbers: dict[str, Any] = {name: np.longdouble(wide(given[name])) for name in rule.hyperparameters}
    if "global_step" in given:
        numbers["global_step"] = np.longdouble(int(given["global_step"]))
    if rule.flag in given:
        numbers[rule.flag] = given[rule.flag]
    tables = [Rounded.exact(wide(given[name]), precision) for name in names]
    grad, indices = Rounded.exact(wide(given["grad"]), precision), given["indices"].numpy().astype(np.int64)
    formulas.step_items(partial(rule.step, **numbers), tables, grad, indices)
    # TensorFlow has other formulas for rows of one element, which round in other places.
    wider = 2 if given["var"][:1].numel() == 1 else 1
    results = dict(zip(names if rule.slots else ("output",), tables, strict=True))
    return {name: Reference(x.value, x.error, x.error * wider) for name, x in results.items()}


def _run_tensorflow(tf: Any, arguments: dict[str, Any], *, operator: str) -> Any:
    """Run the operator on variables and return their values."""
    names = ("var", *_rule(operator).slots)
    variables = {name: tf.Variable(arguments[name]) for name in names}
    handles = {name: variable.handle for name, variable in variables.items()}
    getattr(tf.raw_ops, operator.removeprefix("raw_ops."))(**{**arguments, **handles})
    values = {name: tf.identity(variable) for name, variable in variables.items()}
    return values if len(names) > 1 else values["var"]


def _run_ours(compat: Any, arguments: dict[str, Any], *, operator: str) -> Any:
    return getattr(compat, f"sparse_apply_{_rule(operator).ours}")(**arguments)


OPERATORS = {
    name: Operator(
        _random,
        _picked,
        _references,
        run_tensorflow=partial(_run_tensorflow, operator=name),
        run_ours=partial(_run_ours, operator=name),
    )
    for name in (_PREFIX + rule for rule in _RULES)
}
