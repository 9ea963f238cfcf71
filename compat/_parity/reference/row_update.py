"""The slow, obvious meaning of the family ``row_update``: one item after another, by the formulas of the papers."""

from __future__ import annotations

import torch
from torch import Tensor


def _shrunk(x: Tensor, by: Tensor | float) -> Tensor:
    """``x`` moved towards zero by ``by``, but not beyond."""
    return x.sign() * (x.abs() - by).relu()


def gradient_descent(w: Tensor, g: Tensor, lr: float) -> list[Tensor]:
    return [w - lr * g]


def momentum(w: Tensor, m: Tensor, g: Tensor, lr: float, decay: float, *, nesterov: bool) -> list[Tensor]:
    m = decay * m + g
    return [w - lr * (g + decay * m) if nesterov else w - lr * m, m]


def keras_momentum(w: Tensor, m: Tensor, g: Tensor, lr: float, decay: float, *, nesterov: bool) -> list[Tensor]:
    m = decay * m - lr * g
    return [w + decay * m - lr * g if nesterov else w + m, m]


def adagrad(w: Tensor, a: Tensor, g: Tensor, lr: float, eps: float, *, grow: bool) -> list[Tensor]:
    a = a + g**2 if grow else a
    return [w - lr * g / (a.sqrt() + eps), a]


def adagrad_da(
    w: Tensor, s: Tensor, q: Tensor, g: Tensor, lr: float, l1: float, l2: float, step: float
) -> list[Tensor]:
    s, q = s + g, q + g**2
    return [-lr * _shrunk(s, l1 * step) / (l2 * step * lr + q.sqrt()), s, q]


def adadelta(w: Tensor, v: Tensor, u: Tensor, g: Tensor, lr: float, rho: float, eps: float) -> list[Tensor]:
    v = rho * v + (1 - rho) * g**2
    d = ((u + eps) / (v + eps)).sqrt() * g
    return [w - lr * d, v, rho * u + (1 - rho) * d**2]


def ftrl(
    w: Tensor,
    a: Tensor,
    z: Tensor,
    g: Tensor,
    lr: float,
    l1: float,
    l2: float,
    l2_shrinkage: float,
    lr_power: float,
    *,
    scaled: bool,
) -> list[Tensor]:
    z = z / lr if scaled else z
    after = a + g**2
    z = z + g + 2 * l2_shrinkage * w - (after**-lr_power - a**-lr_power) / lr * w
    w = (z.clamp(-l1, l1) - z) / (after**-lr_power / lr + 2 * l2)
    return [w, after, lr * z if scaled else z]


def proximal_adagrad(w: Tensor, a: Tensor, g: Tensor, lr: float, l1: float, l2: float) -> list[Tensor]:
    a = a + g**2
    rate = lr / a.sqrt()
    return [_shrunk(w - rate * g, rate * l1) / (1 + rate * l2), a]


def proximal_gradient_descent(w: Tensor, g: Tensor, lr: float, l1: float, l2: float) -> list[Tensor]:
    return [_shrunk(w - lr * g, lr * l1) / (1 + lr * l2)]


def rmsprop(
    w: Tensor, v: Tensor, m: Tensor, g: Tensor, lr: float, rho: float, decay: float, eps: float
) -> list[Tensor]:
    v = rho * v + (1 - rho) * g**2
    m = decay * m + lr * g / (v + eps).sqrt()
    return [w - m, v, m]


def centered_rmsprop(
    w: Tensor, a: Tensor, v: Tensor, m: Tensor, g: Tensor, lr: float, rho: float, decay: float, eps: float
) -> list[Tensor]:
    a, v = rho * a + (1 - rho) * g, rho * v + (1 - rho) * g**2
    m = decay * m + lr * g / (v - a**2 + eps).sqrt()
    return [w - m, a, v, m]


# By the number of the rule in csrc/row_update.h.
RULES = [
    (gradient_descent, {}),
    (momentum, {"nesterov": False}),
    (momentum, {"nesterov": True}),
    (keras_momentum, {"nesterov": False}),
    (keras_momentum, {"nesterov": True}),
    (adagrad, {"grow": True}),
    (adagrad, {"grow": False}),
    (adagrad_da, {}),
    (adadelta, {}),
    (ftrl, {"scaled": False}),
    (ftrl, {"scaled": True}),
    (proximal_adagrad, {}),
    (proximal_gradient_descent, {}),
    (rmsprop, {}),
    (centered_rmsprop, {}),
]


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
    """Half types are computed in float32 and rounded after every item."""
    function, choices = RULES[rule]
    tensors = [x.clone() for x in (weight, state0, state1, state2) if x is not None]
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    for item, row in enumerate(indices.tolist()):
        results = function(*(x[row].to(wide) for x in tensors), grad[item].to(wide), *hyperparameters, **choices)
        for x, result in zip(tensors, results, strict=True):
            x[row] = result.to(x.dtype)
    return tuple(tensors)


FUNCTIONS = (row_update,)
