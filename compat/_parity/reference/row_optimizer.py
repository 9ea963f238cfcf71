"""
Slow, obvious references of the family ``row_optimizer``: torch.optim's formulas, in float64.

A row's steps without gradient are taken one by one, each by the leaf of the history that describes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from ....ops.row_optimizer_rules import HYPERPARAMETERS, OPTIMIZER_RULES, rule_words
from . import row_update

Row = list[Tensor]  # rows of the weight [U, D] and of its states, [U, D] or [U]

# ---- Steps ----------------------------------------------------------------------------------------------------------


def _by_element(state: Tensor) -> Tensor:
    """Return a state of one number per row in a shape that broadcasts over the row's elements."""
    return state.unsqueeze(-1)


def _mean(x: Tensor) -> Tensor:
    """Return the mean of each row's elements; 0 for rows without elements."""
    return x.sum(-1) / max(x.shape[-1], 1)


def sgd(
    row: Row, g: Tensor, step: int, lr: float, momentum: float, dampening: float, nesterov: float, decay: float
) -> Row:
    w = row[0]
    g = g + decay * w
    if momentum == 0:
        return [w - lr * g]
    buffer = g if step == 1 else momentum * row[1] + (1 - dampening) * g
    return [w - lr * (g + momentum * buffer if nesterov else buffer), buffer]


def adagrad(row: Row, g: Tensor, step: int, lr: float, lr_decay: float, eps: float, decay: float) -> Row:
    w, total = row
    return row_update.adagrad(w, total, g + decay * w, lr / (1 + (step - 1) * lr_decay), eps)


def rowwise_adagrad(row: Row, g: Tensor, step: int, lr: float, lr_decay: float, eps: float, decay: float) -> Row:
    w, total = row
    g = g + decay * w
    total = total + _mean(g**2)
    return [w - lr / (1 + (step - 1) * lr_decay) * g / (_by_element(total.sqrt()) + eps), total]


def adam(
    row: Row,
    g: Tensor,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    decoupled: float,
    tensorflow_eps: float,
) -> Row:
    w, m, v, *most = row
    if decoupled:
        w = w * (1 - lr * decay)
    else:
        g = g + decay * w
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
    most = [torch.maximum(x, v) for x in most]
    unbias = sqrt(1 - beta2**step)
    root = (most[0] if most else v).sqrt() / unbias
    return [w - lr / (1 - beta1**step) * m / (root + (eps / unbias if tensorflow_eps else eps)), m, v, *most]


def partial_rowwise_adam(
    row: Row, g: Tensor, step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float
) -> Row:
    w, m, v = row
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * _mean(g**2)
    root = _by_element(v.sqrt()) / sqrt(1 - beta2**step)
    return [w * (1 - lr * decay) - lr / (1 - beta1**step) * m / (root + eps), m, v]


def rmsprop(
    row: Row, g: Tensor, step: int, lr: float, alpha: float, eps: float, decay: float, momentum: float, centered: float
) -> Row:
    w, square, *others = row
    g = g + decay * w
    square = alpha * square + (1 - alpha) * g**2
    variance, averages = square, []
    if centered:
        averages = [alpha * others[-1] + (1 - alpha) * g]
        variance = square - averages[0] ** 2
    move = g / (variance.sqrt() + eps)
    if momentum == 0:
        return [w - lr * move, square, *averages]
    buffer = momentum * others[0] + move
    return [w - lr * buffer, square, buffer, *averages]


def ftrl(
    row: Row, g: Tensor, step: int, lr: float, power: float, l1: float, l2: float, shrinkage: float, beta: float
) -> Row:
    w, total, linear = row
    return row_update.ftrl(w, total, linear, g, lr, l1, l2 + beta / (2 * lr), shrinkage, power)


def adadelta(row: Row, g: Tensor, step: int, lr: float, rho: float, eps: float, decay: float) -> Row:
    w, square, deltas = row
    return row_update.adadelta(w, square, deltas, g + decay * w, lr, rho, eps)


def lamb(row: Row, g: Tensor, step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float) -> Row:
    w, m, v = row
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
    move = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + eps) + decay * w
    sizes, lengths = w.norm(dim=-1), move.norm(dim=-1)
    trust = torch.where((sizes == 0) | (lengths == 0), 1.0, sizes / lengths)
    return [w - lr * _by_element(trust) * move, m, v]


def lion(row: Row, g: Tensor, step: int, lr: float, beta1: float, beta2: float, decay: float) -> Row:
    w, m = row
    return [w * (1 - lr * decay) - lr * torch.sign(beta1 * m + (1 - beta1) * g), beta2 * m + (1 - beta2) * g]


def adamax(row: Row, g: Tensor, step: int, lr: float, beta1: float, beta2: float, eps: float, decay: float) -> Row:
    w, m, most = row
    g = g + decay * w
    m, most = beta1 * m + (1 - beta1) * g, torch.maximum(beta2 * most, g.abs() + eps)
    return [w - lr / (1 - beta1**step) * m / most, m, most]


_FORMULAS = (sgd, adagrad, rowwise_adagrad, adam, partial_rowwise_adam, rmsprop, ftrl, adadelta, lamb, lion, adamax)
_BY_NAME = {formula.__name__: formula for formula in _FORMULAS} | {"amsgrad": adam}
# By the rule's number.
RULES = tuple(_BY_NAME[name] for name in OPTIMIZER_RULES)
AMSGRAD = OPTIMIZER_RULES["amsgrad"]


def _by_name(rule: int, h: Sequence[float]) -> dict[str, float]:
    return dict(zip([*HYPERPARAMETERS.values()][rule], h, strict=True))


def for_formula(rule: int, h: Sequence[float], zeros: bool) -> dict[str, float]:
    """Return the values that a rule's formula takes: no decay for a row of zeros where only rows seen decay."""
    at = _by_name(rule, h)
    if at.pop("decay_seen", 0.0) and zeros:
        at["weight_decay"] = 0.0
    return at


def states_of(rule: int, h: Sequence[float]) -> int:
    """Return the number of states that a rule keeps for a table."""
    return len(rule_words(rule, h).states)


# ---- Steps without gradient -----------------------------------------------------------------------------------------


def idle_step(rule: int, leaf: Sequence[float], eps: float, row: Row) -> Row:
    """Take one step without gradient, as a leaf of the history describes it."""
    w, *states = row
    if RULES[rule] in (adam, partial_rowwise_adam):
        beta1, root2, keeps, n0, n1 = leaf[:5]
        m, v, *most = states
        m, v = beta1 * m, root2**2 * v
        if n0 == 0:
            return [keeps * w, m, v, *most]
        rate, root = n0 / beta1, (most[0] if most else v).sqrt() * n1 / n0 / (1 if most else root2)
        root = root if root.shape == w.shape else _by_element(root)
        return [keeps * w - rate * m / (root + eps), m, v, *most]
    w_w, w_b, b_w, b_b, p = leaf[:5]
    if RULES[rule] is lion:
        return [w_w * w + w_b * torch.sign(states[0]), p * states[0]]
    if RULES[rule] is adadelta or not states:
        return [w_w * w, *(p * x for x in states)]
    place = 1 if RULES[rule] is rmsprop else 0
    if len(states) <= place or (RULES[rule] is rmsprop and w_b == b_b == 0):
        return [w, *(p * x for x in states)]
    buffer = states[place]
    others = [p * x for x in states]
    others[place] = b_w * w + b_b * buffer
    return [w_w * w + w_b * buffer, *others]


def leaf_of(rule: int, h: Sequence[float], step: int) -> list[float]:
    """Return the row of the history that describes what step ``step`` does to rows without gradient."""
    at = for_formula(rule, h, zeros=True)
    if RULES[rule] in (adam, partial_rowwise_adam):
        lr, beta1, beta2 = at["lr"], at["beta1"], at["beta2"]
        keeps = 1 - lr * at["weight_decay"] if at.get("decoupled", 1.0) else 1.0
        unbias = sqrt(1 - beta2**step)
        tensorflow_eps = bool(at.get("tensorflow_eps"))
        factor = (1 if rule == AMSGRAD else sqrt(beta2)) / (1 if tensorflow_eps else unbias)
        rate = lr / (1 - beta1**step) * beta1 * (unbias if tensorflow_eps else 1)
        return [beta1, sqrt(beta2), keeps, *(rate * factor**k for k in range(5))]
    if RULES[rule] is adadelta:
        return [1.0, 0.0, 0.0, 1.0, at["rho"], 0.0, 0.0, 0.0]
    if RULES[rule] is lion:
        lr, beta1, beta2, decay = h
        return [1 - lr * decay, -lr * (beta1 > 0), 0.0, float(beta2 > 0), beta2, 0.0, 0.0, 0.0]
    if RULES[rule] is rmsprop:
        return [1.0, -at["lr"] * at["momentum"], 0.0, at["momentum"], at["alpha"], 0.0, 0.0, 0.0]
    # The step is linear: its effects on only a weight of 1 and on only a buffer of 1 determine it.
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    if at["momentum"] == 0:
        return [float(sgd([one], zero, step, *h)[0]), 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    (w_w, b_w), (w_b, b_b) = sgd([one, zero], zero, step, *h), sgd([zero, one], zero, step, *h)
    return [float(w_w), float(w_b), float(b_w), float(b_b), 1.0, 0.0, 0.0, 0.0]


def _block(rule: int, leaves: list[list[float]]) -> list[float]:
    """Combine several steps into one row of the history, by the definition of its numbers."""
    if RULES[rule] in (adam, partial_rowwise_adam):
        p1, shrinking, root2, moments = 1.0, 1.0, 1.0, [0.0] * 5
        for u, (beta1, root, _, *n) in enumerate(leaves):
            kept = 1.0
            for later in leaves[u + 1 :]:
                kept *= later[2]
            moments = [x + kept * p1 * shrinking**k * n[k] for k, x in enumerate(moments)]
            p1, root2 = p1 * beta1, root2 * root
            shrinking = 1.0 if rule == AMSGRAD else root2
        keeps = 1.0
        for leaf in leaves:
            keeps *= leaf[2]
        return [p1, root2, keeps, *moments]
    matrix, p = torch.eye(2, dtype=torch.float64), 1.0
    for leaf in leaves:
        matrix = torch.tensor(leaf[:4], dtype=torch.float64).reshape(2, 2) @ matrix
        p *= leaf[4]
    return [*matrix.flatten().tolist(), p, 0.0, 0.0, 0.0]


def row_optimizer_advance_(history: Tensor, rule: int, h: list[float], step: int, base: int) -> Tensor:
    history = history.clone()
    at = step - base - 1
    history[2 * at] = torch.tensor(leaf_of(rule, h, step), dtype=torch.float64)
    steps = 2
    while (at + 1) % steps == 0:
        leaves = [history[2 * i].tolist() for i in range(at + 1 - steps, at + 1)]
        history[2 * at + 1 - steps] = torch.tensor(_block(rule, leaves), dtype=torch.float64)
        steps *= 2
    return history


def history_of(rule: int, hyperparameters: Sequence[Sequence[float]], base: int) -> Tensor:
    """Return the history of the steps from ``base`` on."""
    history = torch.zeros(2 * len(hyperparameters), 8, dtype=torch.float64)
    for i, h in enumerate(hyperparameters):
        history = row_optimizer_advance_(history, rule, list(h), base + i + 1, base)
    return history


# ---- Operators ------------------------------------------------------------------------------------------------------


def _eps(rule: int, h: Sequence[float]) -> float:
    return _by_name(rule, h)["eps"] if RULES[rule] in (adam, partial_rowwise_adam) else 0.0


def _caught_up(rule: int, h: Sequence[float], row: Row, last: int, history: Tensor, now: int) -> Row:
    for step in range(min(max(last, 0), now), now):
        row = idle_step(rule, history[2 * step].tolist(), _eps(rule, h), row)
    return row


class _Tables:
    """Tables in float64, and the last step of each of their rows."""

    def __init__(self, rule: int, h: Sequence[float], weights: list[Tensor], states: list[Tensor], last: list[Tensor]):
        n = states_of(rule, h)
        self.given = weights, states, last
        self.tables = [
            [x.to(torch.float64, copy=True) for x in (w, *states[k * n : (k + 1) * n])] for k, w in enumerate(weights)
        ]
        self.last = [x.clone() for x in last]

    def row(self, k: int, row: int) -> Row:
        return [x[row] for x in self.tables[k]]

    def write(self, k: int, row: int, values: Row, now: int) -> None:
        for x, value in zip(self.tables[k], values, strict=True):
            x[row] = value
        if self.last:
            self.last[k][row] = now

    def results(self) -> tuple[Tensor, ...]:
        weights, states, _ = self.given
        kept = [x for table in self.tables for x in table[1:]]
        return (
            *(table[0].to(w.dtype) for table, w in zip(self.tables, weights, strict=True)),
            *(x.to(like.dtype) for x, like in zip(kept, states, strict=True)),
            *self.last,
        )


def row_optimizer_update_(
    weights: list[Tensor],
    states: list[Tensor],
    last_steps: list[Tensor],
    history: Tensor | None,
    rows: list[Tensor],
    values: list[Tensor],
    grad_scale: Tensor | None,
    rule: int,
    h: list[float],
    step: int,
    base: int,
    maximize: bool,
    rounding_seeds: list[int],
    whole: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    tables = _Tables(rule, h, weights, states, last_steps)
    scale = (-1.0 if maximize else 1.0) * (1.0 if grad_scale is None else float(grad_scale.flatten()[0]))
    for k, weight in enumerate(weights):
        mine, its_values = rows[k].tolist() if rows else range(weight.shape[0]), values[k].double()
        if whole and rows and mine and weight.shape[0] <= whole[k] * len(mine):
            its_values = torch.zeros_like(weight, dtype=torch.float64).index_copy_(0, rows[k], its_values)
            mine = range(weight.shape[0])
        for u, index in enumerate(mine):
            row, g = tables.row(k, index), scale * its_values[u]
            if last_steps:
                assert history is not None
                row = _caught_up(rule, h, row, int(last_steps[k][index]), history, step - 1 - base)
            elif rows and not g.any():
                continue
            row = RULES[rule](row, g, step, *for_formula(rule, h, zeros=not g.any()).values())
            tables.write(k, index, row, step - base)
    return tables.results()


def row_optimizer_make_current_(
    weights: list[Tensor],
    states: list[Tensor],
    last_steps: list[Tensor],
    history: Tensor | None,
    rule: int,
    h: list[float],
    step: int,
    base: int,
    rounding_seeds: list[int],
) -> tuple[Tensor, ...]:
    tables = _Tables(rule, h, weights, states, last_steps)
    for k, last in enumerate(last_steps):
        assert history is not None
        for index, at in enumerate(last.tolist()):
            if at < step - base:
                row = _caught_up(rule, h, tables.row(k, index), at, history, step - base)
                tables.write(k, index, row, step - base)
    return tables.results()


def row_optimizer_current(
    weight: Tensor,
    states: list[Tensor],
    last_step: Tensor,
    history: Tensor,
    rows: Tensor,
    rule: int,
    h: list[float],
    step: int,
    base: int,
) -> Tensor:
    return row_optimizer_make_current_([weight], states, [last_step], history, rule, h, step, base, [])[0][rows]


FUNCTIONS = (row_optimizer_update_, row_optimizer_advance_, row_optimizer_current, row_optimizer_make_current_)
