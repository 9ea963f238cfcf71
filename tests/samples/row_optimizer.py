"""Sample inputs of the family ``row_optimizer``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from samples.sample import FLOATS, Family, Random, Sample
from torch import Tensor

from torchsparse_rec.compat._parity.reference.row_optimizer import history_of, states_of

# By name: the rule's number and hyperparameters. The rules of the first list can flush stale rows.
IDLE_RULES: dict[str, tuple[int, list[float]]] = {
    "sgd": (0, [0.25, 0.0, 0.0, 0.0, 0.125]),
    "momentum": (0, [0.25, 0.75, 0.25, 0.0, 0.125]),
    "nesterov": (0, [0.25, 0.75, 0.0, 1.0, 0.125]),
    "adam": (3, [0.125, 0.75, 0.875, 1e-3, 0.0, 0.0, 0.0]),
    "adamw": (3, [0.125, 0.75, 0.875, 1e-3, 0.25, 1.0, 0.0]),
    "adam_tensorflow": (3, [0.125, 0.75, 0.875, 1e-3, 0.25, 1.0, 1.0]),
    "amsgrad": (4, [0.125, 0.75, 0.875, 1e-3, 0.25, 1.0, 0.0]),
    "partial_rowwise_adam": (5, [0.125, 0.75, 0.875, 1e-3, 0.25]),
    "rmsprop": (6, [0.125, 0.75, 1e-3, 0.0, 0.0, 0.0]),
    "rmsprop_momentum": (6, [0.125, 0.75, 1e-3, 0.0, 0.5, 0.0]),
    "rmsprop_centered": (6, [0.125, 0.75, 1e-3, 0.0, 0.0, 1.0]),
    "rmsprop_both": (6, [0.125, 0.75, 1e-3, 0.0, 0.5, 1.0]),
    "adadelta": (8, [0.5, 0.75, 1e-3, 0.0]),
}
OTHER_RULES: dict[str, tuple[int, list[float]]] = {
    "plain_sgd": (0, [0.25, 0.0, 0.0, 0.0, 0.0]),
    "adagrad": (1, [0.25, 0.125, 1e-3, 0.125]),
    "rowwise_adagrad": (2, [0.25, 0.125, 1e-3, 0.125]),
    "coupled_adam": (3, [0.125, 0.75, 0.875, 1e-3, 0.25, 0.0, 0.0]),
    "coupled_rmsprop": (6, [0.125, 0.75, 1e-3, 0.25, 0.5, 0.0]),
    "ftrl": (7, [0.25, -0.5, 0.125, 0.25, 0.125, 0.5]),
    "ftrl_power": (7, [0.25, -0.25, 0.125, 0.25, 0.0, 0.0]),
    "coupled_adadelta": (8, [0.5, 0.75, 1e-3, 0.25]),
    "lamb": (9, [0.125, 0.75, 0.875, 1e-3, 0.25]),
}
RULES = IDLE_RULES | OTHER_RULES
# The state that is one number per row, by the number of the rule.
ROW_STATES = {2: 0, 5: 1}


def states_for(random: Random, rule: int, h: list[float], rows: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Return states in [0.5, 1); averages of gradients are smaller, so that centered variances are positive."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = [(rows,) if ROW_STATES.get(rule) == s else (rows, dim) for s in range(states_of(rule, h))]
    states = [random.integers(64, 128, *shape, dtype=torch.float64).to(wide) / 128 for shape in shapes]
    if rule == 6 and h[5]:
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
    for rule in ("adamw", "momentum", "lamb"):
        yield update_sample("zeros_of_all_rows", rule, catch_up=False, zeros=True, all_rows=True)
        yield update_sample("zeros_caught_up", rule, zeros=True)
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
