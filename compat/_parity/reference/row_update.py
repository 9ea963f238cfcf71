"""
Slow, obvious references of the family ``row_update``: one row of a gradient after another, by the papers' formulas.

The numbers carry bounds on how far the same operations in a float dtype may be off (rounded.py). The operations are in
TensorFlow's order, so that its results can be compared too. The formulas that are torch's as well take tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from torch import Tensor

from .numbers import narrow, wide
from .rounded import Precision, Rounded

Number = float  # or np.longdouble
Numbers = TypeVar("Numbers", Rounded, Tensor)

# ---- Formulas: the row and its states after a step ------------------------------------------------------------------


def gradient_descent(w: Rounded, g: Rounded, lr: Number) -> list[Rounded]:
    return [w - g * lr]


def momentum(
    w: Rounded, m: Rounded, g: Rounded, lr: Number, momentum: Number, use_nesterov: bool = False
) -> list[Rounded]:
    m = m * momentum + g
    return [w - (g * lr + m * momentum * lr if use_nesterov else m * lr), m]


def keras_momentum(
    w: Rounded, m: Rounded, g: Rounded, lr: Number, momentum: Number, use_nesterov: bool = False
) -> list[Rounded]:
    m = m * momentum - g * lr
    return [w + (m * momentum - g * lr if use_nesterov else m), m]


def adagrad(
    w: Numbers, a: Numbers, g: Numbers, lr: Number, epsilon: Number = 0.0, update_slots: bool = True
) -> list[Numbers]:
    a = a + g * g if update_slots else a
    root = a**0.5
    return [w - g * lr / (root + epsilon if epsilon else root), a]


def adagrad_da(
    w: Rounded, s: Rounded, q: Rounded, g: Rounded, lr: Number, l1: Number, l2: Number, global_step: Number
) -> list[Rounded]:
    s, q = s + g, q + g * g
    mean = s / global_step
    return [-(mean.shrunk(l1) if l1 > 0 else mean) / (q**0.5 / (lr * global_step) + l2), s, q]


def adadelta(w: Numbers, v: Numbers, u: Numbers, g: Numbers, lr: Number, rho: Number, epsilon: Number) -> list[Numbers]:
    v = v * rho + g * g * (1 - rho)
    d = (u + epsilon) ** 0.5 * (v + epsilon) ** -0.5 * g
    return [w - d * lr, v, u * rho + d * d * (1 - rho)]


def ftrl(
    w: Numbers,
    a: Numbers,
    z: Numbers,
    g: Numbers,
    lr: Number,
    l1: Number,
    l2: Number,
    l2_shrinkage: Number = 0.0,
    lr_power: Number = -0.5,
    multiply_linear_by_lr: bool = False,
) -> list[Numbers]:
    scale, lr = (lr, 1.0) if multiply_linear_by_lr else (1.0, lr)
    after = a + g * g
    power = after**-lr_power
    g = g + w * (2 * l2_shrinkage) if l2_shrinkage else g
    z = z + (g * scale - (power - a**-lr_power) / lr * w)
    return [(z.clamp(-l1 * scale, l1 * scale) - z) / (power / lr + 2 * l2 * scale), after, z]


def _proximal(w: Rounded, g: Rounded, rate: Rounded, l1: Number, l2: Number) -> Rounded:
    w = w - g * rate
    return (w.shrunk(rate * l1) if l1 > 0 else w) / (rate * l2 + 1)


def proximal_adagrad(w: Rounded, a: Rounded, g: Rounded, lr: Number, l1: Number, l2: Number) -> list[Rounded]:
    a = a + g * g
    return [_proximal(w, g, a**-0.5 * lr, l1, l2), a]


def proximal_gradient_descent(w: Rounded, g: Rounded, alpha: Number, l1: Number, l2: Number) -> list[Rounded]:
    return [_proximal(w, g, g.like(1.0) * alpha, l1, l2)]


def rmsprop(
    w: Rounded, v: Rounded, m: Rounded, g: Rounded, lr: Number, rho: Number, momentum: Number, epsilon: Number
) -> list[Rounded]:
    v = v * rho + g * g * (1 - rho)
    m = m * momentum + (v + epsilon) ** -0.5 * lr * g
    return [w - m, v, m]


def centered_rmsprop(
    w: Rounded,
    a: Rounded,
    v: Rounded,
    m: Rounded,
    g: Rounded,
    lr: Number,
    rho: Number,
    momentum: Number,
    epsilon: Number,
) -> list[Rounded]:
    a, v = a * rho + g * (1 - rho), v * rho + g * g * (1 - rho)
    m = m * momentum + (v + epsilon - a * a) ** -0.5 * lr * g
    return [w - m, a, v, m]


# In the order of the rules' numbers in csrc/row_update.h.
RULES: list[Callable[..., list[Rounded]]] = [
    gradient_descent,
    momentum,
    partial(momentum, use_nesterov=True),
    keras_momentum,
    partial(keras_momentum, use_nesterov=True),
    adagrad,
    partial(adagrad, update_slots=False),
    adagrad_da,
    adadelta,
    ftrl,
    partial(ftrl, multiply_linear_by_lr=True),
    proximal_adagrad,
    proximal_gradient_descent,
    rmsprop,
    centered_rmsprop,
]

# ---- Items ----------------------------------------------------------------------------------------------------------


def occurrences(indices: np.ndarray) -> np.ndarray:
    """Return how many items of the same row come before each item."""
    order = np.argsort(indices, kind="stable")
    ranks = np.arange(len(indices))
    starts = np.searchsorted(indices[order], indices[order])
    result = np.empty_like(ranks)
    result[order] = ranks - starts
    return result


def step_items(
    step: Callable[..., list[Rounded]],
    tables: Sequence[Rounded],
    grad: Rounded,
    indices: np.ndarray,
    stored: Callable[[Rounded], Rounded] = lambda x: x,
) -> None:
    """Change the tables by each item, in order for items of one row; ``stored`` rounds a row in writing."""
    turns = occurrences(indices)
    with np.errstate(all="ignore"):
        for turn in range(turns.max(initial=-1) + 1):
            items = np.flatnonzero(turns == turn)
            rows = indices[items]
            for table, after in zip(tables, step(*(x[rows] for x in tables), grad[items]), strict=True):
                table[rows] = stored(after)


def row_update(
    weight: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    state2: Tensor | None,
    grad: Tensor,
    indices: Tensor,
    rule: int,
    hyperparameters: list[float],
) -> tuple[Tensor, ...]:
    """Return the written tables; every item's results are rounded to half types."""
    exact = Precision(0.0, 0.0)
    dtype = weight.dtype
    tables = [Rounded.exact(wide(x), exact) for x in (weight, state0, state1, state2) if x is not None]

    def stored(x: Rounded) -> Rounded:
        return Rounded.exact(wide(narrow(x.value, dtype)), exact) if dtype.itemsize == 2 else x

    def step(*rows: Rounded) -> list[Rounded]:
        return RULES[rule](*rows, *hyperparameters)

    step_items(step, tables, Rounded.exact(wide(grad), exact), indices.numpy().astype(np.int64), stored)
    return tuple(narrow(x.value, dtype) for x in tables)


FUNCTIONS = (row_update,)
