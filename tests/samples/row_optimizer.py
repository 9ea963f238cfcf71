"""Sample inputs of the family ``row_optimizer``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from samples.sample import FLOATS, Family, Random, Sample
from torch import Tensor

from torchsparse_rec.compat._parity.reference.row_optimizer import history_of, states_of
from torchsparse_rec.ops.row_optimizer_rules import HYPERPARAMETERS, OPTIMIZER_RULES, rule_words


def ruled(rule: str, **values: float) -> tuple[int, list[float]]:
    """Return a rule's number and its hyperparameters, 0 where nothing is given."""
    assert values.keys() <= {*HYPERPARAMETERS[rule]}
    return OPTIMIZER_RULES[rule], [values.get(name, 0.0) for name in HYPERPARAMETERS[rule]]


_ADAM = {"lr": 0.125, "beta1": 0.75, "beta2": 0.875, "eps": 1e-3}
_DECOUPLED = {"weight_decay": 0.25, "decoupled": 1.0}
_RMSPROP = {"lr": 0.125, "alpha": 0.75, "eps": 1e-3}
RULES: dict[str, tuple[int, list[float]]] = {
    "sgd": ruled("sgd", lr=0.25, weight_decay=0.125),
    "momentum": ruled("sgd", lr=0.25, momentum=0.75, dampening=0.25, weight_decay=0.125),
    "nesterov": ruled("sgd", lr=0.25, momentum=0.75, nesterov=1.0, weight_decay=0.125),
    "adam": ruled("adam", **_ADAM),
    "adamw": ruled("adam", **_ADAM, **_DECOUPLED),
    "adam_tensorflow": ruled("adam", **_ADAM, **_DECOUPLED, tensorflow_eps=1.0),
    "amsgrad": ruled("amsgrad", **_ADAM, **_DECOUPLED),
    "partial_rowwise_adam": ruled("partial_rowwise_adam", **_ADAM, weight_decay=0.25),
    "rmsprop": ruled("rmsprop", **_RMSPROP),
    "rmsprop_momentum": ruled("rmsprop", **_RMSPROP, momentum=0.5),
    "rmsprop_centered": ruled("rmsprop", **_RMSPROP, centered=1.0),
    "rmsprop_both": ruled("rmsprop", **_RMSPROP, momentum=0.5, centered=1.0),
    "adadelta": ruled("adadelta", lr=0.5, rho=0.75, eps=1e-3),
    "plain_sgd": ruled("sgd", lr=0.25),
    "adagrad": ruled("adagrad", lr=0.25, lr_decay=0.125, eps=1e-3, weight_decay=0.125),
    "rowwise_adagrad": ruled("rowwise_adagrad", lr=0.25, lr_decay=0.125, eps=1e-3, weight_decay=0.125),
    "coupled_adam": ruled("adam", **_ADAM, weight_decay=0.25),
    "coupled_rmsprop": ruled("rmsprop", **_RMSPROP, weight_decay=0.25, momentum=0.5),
    "seen_adam": ruled("adam", **_ADAM, weight_decay=0.25, decay_seen=1.0),
    "seen_adamw": ruled("adam", **_ADAM, **_DECOUPLED, decay_seen=1.0),
    "seen_rmsprop": ruled("rmsprop", **_RMSPROP, weight_decay=0.25, centered=1.0, decay_seen=1.0),
    "seen_adagrad": ruled("adagrad", lr=0.25, eps=1e-3, weight_decay=0.125, decay_seen=1.0),
    "seen_rowwise_adagrad": ruled("rowwise_adagrad", lr=0.25, eps=1e-3, weight_decay=0.125, decay_seen=1.0),
    "ftrl": ruled("ftrl", lr=0.25, lr_power=-0.5, l1=0.125, l2=0.25, l2_shrinkage=0.125, beta=0.5),
    "ftrl_power": ruled("ftrl", lr=0.25, lr_power=-0.25, l1=0.125, l2=0.25),
    "coupled_adadelta": ruled("adadelta", lr=0.5, rho=0.75, eps=1e-3, weight_decay=0.25),
    "lamb": ruled("lamb", **_ADAM, weight_decay=0.25),
    "lion": ruled("lion", lr=0.125, beta1=0.75, beta2=0.875, weight_decay=0.25),
    "adamax": ruled("adamax", **_ADAM, weight_decay=0.25),
}
# Those that flush stale rows, and the others.
IDLE_RULES = {name: rule for name, rule in RULES.items() if rule_words(*rule).motion in ("states", "weight")}
OTHER_RULES = {name: rule for name, rule in RULES.items() if name not in IDLE_RULES}
# The state that is one number per row, by the number of the rule.
ROW_STATES = {OPTIMIZER_RULES["rowwise_adagrad"]: 0, OPTIMIZER_RULES["partial_rowwise_adam"]: 1}


def one_of_each_rule(*names: str) -> list[str]:
    """Return these samples of rules, and one of each rule that none of them is of."""
    numbers = {RULES[name][0] for name in names}
    others = {number: name for name, (number, _) in reversed(RULES.items()) if number not in numbers}
    return [*names, *others.values()]


def by_name(rule: int, h: Sequence[float]) -> dict[str, float]:
    """Return a rule's hyperparameters by their names."""
    return dict(zip([*HYPERPARAMETERS.values()][rule], h, strict=True))


def states_for(random: Random, rule: int, h: list[float], rows: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Return states in [0.5, 1); averages of gradients are smaller, so that centered variances are positive."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = [(rows,) if ROW_STATES.get(rule) == s else (rows, dim) for s in range(states_of(rule, h))]
    states = [random.integers(64, 128, *shape, dtype=torch.float64).to(wide) / 128 for shape in shapes]
    if by_name(rule, h).get("centered"):
        states[-1] *= 0.25
    return states


def changing(h: list[float], steps: int) -> list[list[float]]:
    """Return hyperparameters for each step: the first one, the learning rate, changes from step to step."""
    return [[h[0] * (1 + (i % 5) / 8), *h[1:]] for i in range(steps)]


def last_steps_for(random: Random, rows: int, steps: int) -> Tensor:
    return random.integers(0, steps + 1, rows, dtype=torch.int32)


def update_sample(
    name: str,
    rule: str,
    shapes: tuple[tuple[int, int], ...] = ((7, 3),),
    dtype: torch.dtype = torch.float32,
    steps: int = 12,
    base: int = 0,
    catch_up: bool = True,
    all_rows: bool = False,
    scale: Tensor | None = None,
    maximize: bool = False,
    narrow: bool = False,
    seeds: list[int] | None = None,
    zeros: bool = False,
    representative: bool = False,
    seed: int = 0,
) -> Sample:
    """
    Return an update of about half of each table's rows at step ``base + steps + 1``; stale rows are flushed first.

    With ``zeros`` every second gradient is zero, and so is all but one column of the others.
    """
    random = Random(seed)
    number, h = RULES[rule]
    catch_up = catch_up and rule in IDLE_RULES
    weights = [random.floats(rows, dim, dtype=dtype) for rows, dim in shapes]
    states = [x for rows, dim in shapes for x in states_for(random, number, h, rows, dim, dtype)]
    last = [last_steps_for(random, rows, steps) for rows, _ in shapes] if catch_up else []
    rows = [random.integers(0, max(rows, 1), (rows + 1) // 2, dtype=torch.int64).unique() for rows, _ in shapes]
    counts = [n for n, _ in shapes] if all_rows else [x.shape[0] for x in rows]
    wide = dtype if narrow or dtype == torch.float64 else torch.float32
    values = [random.floats(n, dim, dtype=wide) for n, (_, dim) in zip(counts, shapes, strict=True)]
    for x in values if zeros else ():
        x *= -0.0
        x[::2, -1] = 0.75
    arguments = (
        weights,
        states,
        last,
        history_of(number, changing(h, steps), base) if catch_up else None,
        [] if all_rows else rows,
        values,
        scale,
        number,
        h,
        base + steps + 1,
        base,
        maximize,
        seeds or [],
    )
    return Sample("row_optimizer_update_", f"{rule}-{name}", arguments, representative)


def _by_hand() -> Sample:
    """Compute by hand: a row misses two steps, momentum 1/2, lr 1: 3 - 2 - 1 = 0, buffer 1; then 1/2 + 1, 0 - 3/2."""
    weight, buffer, last = torch.tensor([[9.0], [3.0]]), torch.tensor([[9.0], [4.0]]), torch.tensor([0, 1]).int()
    h = [1.0, 0.5, 0.0, 0.0, 0.0]
    history = history_of(0, [h] * 3, 0)
    tables = ([weight], [buffer], [last], history, [torch.tensor([1])], [torch.tensor([[1.0]])])
    return Sample("row_optimizer_update_", "by_hand", (*tables, None, 0, h, 4, 0, False, []), representative=True)


_MANY = ((5, 8), (0, 4), (9, 17), (3, 0), (4, 64))


def update_samples(operator: str) -> Iterator[Sample]:
    yield _by_hand()
    kinds = itertools.cycle(FLOATS)
    dimensions = itertools.cycle((1, 3, 8, 17, 64, 130))
    for seed, (rule, _) in enumerate(itertools.product(RULES, range(2))):
        dtype, dim = next(kinds), next(dimensions)
        name = f"{dtype}_{dim}".replace("torch.", "")
        yield update_sample(name, rule, ((9, dim),), dtype=dtype, seed=seed, base=seed % 3, narrow=seed % 2 == 0)
    for rule in RULES:
        yield update_sample("opcheck", rule, representative=True, seed=1)
        yield update_sample("tables", rule, _MANY, seed=2, dtype=next(kinds))
        yield update_sample("all_rows", rule, ((5, 3), (2, 70)), all_rows=True, seed=3)
    for rule in ("momentum", "adamw", "rmsprop_both"):
        yield update_sample("lazy", rule, catch_up=False, representative=True)
        yield update_sample("first_step", rule, steps=0)
        yield update_sample("long", rule, ((3, 5),), steps=70, base=2, seed=4, dtype=torch.float64)
        yield update_sample("maximize", rule, maximize=True)
    for rule, dim in zip(RULES, itertools.cycle((3, 130)), strict=False):
        yield update_sample("zeros", rule, ((9, dim), (4, 1)), catch_up=False, zeros=True, dtype=next(kinds))
    for rule in ("adamw", "momentum", "lamb", *(name for name in RULES if name.startswith("seen_"))):
        chosen = rule in ("seen_adam", "seen_rowwise_adagrad")
        yield update_sample("zeros_of_all_rows", rule, catch_up=False, zeros=True, all_rows=True, representative=chosen)
        yield update_sample("zeros_caught_up", rule, zeros=True, representative=chosen)
    yield update_sample("zeros_wide", "lamb", ((9, 300),), zeros=True, scale=torch.tensor(-2.0), representative=True)
    yield update_sample("zero_scale", "ftrl", scale=torch.tensor(0.0))
    yield update_sample("scaled", "adam", scale=torch.tensor(0.25))
    yield update_sample("scaled", "adamw", scale=torch.tensor([0.125]), dtype=torch.float64, representative=True)
    shapes = ((6, 9), (2, 3))
    yield update_sample("by_chance", "adamw", shapes, dtype=torch.bfloat16, seeds=[3, -5], representative=True)
    yield update_sample("by_chance", "adagrad", ((6, 9),), dtype=torch.float16, seeds=[2**40])
    yield update_sample("no_tables", "adam", (), representative=True)
    yield update_sample("no_rows", "adam", ((0, 3),))
    yield update_sample("one_row", "lamb", ((1, 200),))


def advance_samples(operator: str) -> Iterator[Sample]:
    for seed, (rule, (number, h)) in enumerate(IDLE_RULES.items()):
        for steps, base in ((0, 0), (7, 0), (3, 5), (20, seed)):
            history = torch.cat([history_of(number, changing(h, steps), base), torch.zeros(3, 8, dtype=torch.float64)])
            arguments = (history, number, h, base + steps + 1, base)
            yield Sample(operator, f"{rule}-{steps}_{base}", arguments, representative=steps == 7)


def _tables(rule: str, shapes: tuple[tuple[int, int], ...], dtype: torch.dtype, steps: int, base: int, seed: int):
    random = Random(seed)
    number, h = RULES[rule]
    weights = [random.floats(rows, dim, dtype=dtype) for rows, dim in shapes]
    states = [x for rows, dim in shapes for x in states_for(random, number, h, rows, dim, dtype)]
    last = [last_steps_for(random, rows, steps) for rows, _ in shapes]
    return weights, states, last, history_of(number, changing(h, steps), base), number, h, base + steps, base


def current_samples(operator: str) -> Iterator[Sample]:
    dimensions = itertools.cycle((1, 3, 8, 17, 64, 130))
    for seed, (rule, dtype) in enumerate(itertools.product(IDLE_RULES, FLOATS)):
        steps, base = (0, 1, 13, 40)[seed % 4], seed % 3
        weights, states, last, *rest = _tables(rule, ((9, next(dimensions)),), dtype, steps, base, seed)
        rows = Random(seed).integers(0, 9, 12, dtype=torch.int64)
        name = f"{rule}-{dtype}_{steps}".replace("torch.", "")
        arguments = (weights[0], states, last[0], rest[0], rows, *rest[1:])
        yield Sample(operator, name, arguments, representative=dtype == torch.float32)
    weights, states, last, *rest = _tables("adam", ((4, 3),), torch.float32, 5, 0, 0)
    arguments = (weights[0], states, last[0], rest[0], torch.empty(0, dtype=torch.int64), *rest[1:])
    yield Sample(operator, "no_rows", arguments)
    outside = torch.tensor([-7, 9, 5, 2], dtype=torch.int32)
    arguments = (weights[0], states, outside, rest[0], torch.arange(4), *rest[1:])
    yield Sample(operator, "last_steps_outside", arguments)


def make_current_samples(operator: str) -> Iterator[Sample]:
    shapes = ((5, 8), (0, 4), (9, 17), (3, 0), (4, 65))
    for seed, (rule, dtype) in enumerate(itertools.product(IDLE_RULES, FLOATS)):
        steps, base = (0, 1, 13, 40)[seed % 4], seed % 3
        arguments = (*_tables(rule, shapes, dtype, steps, base, seed), [])
        name = f"{rule}-{dtype}_{steps}".replace("torch.", "")
        yield Sample(operator, name, arguments, representative=dtype == torch.float32)
    arguments = (*_tables("adamw", ((6, 9), (2, 3)), torch.float16, 9, 0, 1), [1, 2])
    yield Sample(operator, "by_chance", arguments)
    weights, states, _, _, *rest = arguments
    yield Sample(operator, "lazy", (weights, states, [], None, *rest))


FAMILY = Family(
    samples={
        "row_optimizer_update_": update_samples,
        "row_optimizer_advance_": advance_samples,
        "row_optimizer_current": current_samples,
        "row_optimizer_make_current_": make_current_samples,
    }
)
