"""Sample inputs of the family ``row_update``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from samples.sample import FLOATS, INDICES, Family, Random, Sample

# By the number of the rule in csrc/row_update.h: its name, how many states it has, its hyperparameters.
RULES: list[tuple[str, int, list[float]]] = [
    ("gradient_descent", 0, [0.25]),
    ("momentum", 1, [0.25, 0.75]),
    ("nesterov_momentum", 1, [0.25, 0.75]),
    ("keras_momentum", 1, [0.25, 0.75]),
    ("keras_nesterov_momentum", 1, [0.25, 0.75]),
    ("adagrad", 1, [0.25, 0.0]),
    ("adagrad_frozen", 1, [0.25, 0.125]),
    ("adagrad_da", 2, [0.25, 0.125, 0.5, 3.0]),
    ("adadelta", 2, [0.5, 0.75, 0.125]),
    ("ftrl", 2, [0.25, 0.125, 0.5, 0.25, -0.5]),
    ("ftrl_scaled_linear", 2, [0.25, 0.125, 0.5, 0.25, -0.75]),
    ("proximal_adagrad", 1, [0.25, 0.5, 0.25]),
    ("proximal_gradient_descent", 0, [0.25, 0.5, 0.25]),
    ("rmsprop", 2, [0.25, 0.75, 0.5, 0.125]),
    ("centered_rmsprop", 3, [0.25, 0.75, 0.5, 1.0]),
]
NUMBERS = {name: number for number, (name, _, _) in enumerate(RULES)}


def row_update_sample(
    name: str,
    rule: str,
    rows: int = 7,
    items: int = 12,
    shape: tuple[int, ...] = (3,),
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    hyperparameters: list[float] | None = None,
    representative: bool = False,
    seed: int = 0,
) -> Sample:
    """Return an update of random rows, most of them several times; states in [0.5, 1), as sums of squares may be."""
    random = Random(seed)
    _, states, usual = RULES[NUMBERS[rule]]
    given = [random.integers(64, 128, rows, *shape, dtype=torch.float64) / 128 for _ in range(states)]
    arguments = (
        random.floats(rows, *shape, dtype=dtype),
        *[x.to(dtype) for x in given],
        *[None] * (3 - states),
        random.floats(items, *shape, dtype=dtype),
        random.integers(0, max(rows, 1), items, dtype=index),
        NUMBERS[rule],
        hyperparameters or usual,
    )
    return Sample("row_update", f"{rule}-{name}", arguments, representative)


def _by_hand() -> Sample:
    """Compute by hand for row 1, named twice: 1 - 0.5 * 2 / sqrt(4) = 0.5, then 0.5 - 0.5 * -3 / sqrt(4 + 9)."""
    weight = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    grad = torch.tensor([[2.0, 0.0], [-3.0, 4.0]])
    accumulator = torch.tensor([[0.0, 0.0], [0.0, 9.0]])
    ids = torch.tensor([1, 1])
    arguments = (weight, accumulator, None, None, grad, ids, NUMBERS["adagrad"], [0.5, 0.0])
    return Sample("row_update", "by_hand", arguments, representative=True)


def row_update_samples(operator: str) -> Iterator[Sample]:
    yield _by_hand()
    kinds = itertools.cycle(itertools.product(FLOATS, INDICES))
    dimensions = itertools.cycle((1, 3, 8, 17, 64, 130))
    for seed, (rule, _) in enumerate(itertools.product(NUMBERS, range(4))):
        dtype, index = next(kinds)
        dim = next(dimensions)
        name = f"{dtype}_{dim}_{index}".replace("torch.", "")
        yield row_update_sample(name, rule, shape=(dim,), dtype=dtype, index=index, seed=seed)
    for rule in NUMBERS:
        yield row_update_sample("opcheck", rule, representative=True, seed=1)
    yield row_update_sample("power", "ftrl", hyperparameters=[0.25, 0.125, 0.5, 0.0, -0.25])
    yield row_update_sample("root", "ftrl_scaled_linear", hyperparameters=[0.25, 0.125, 0.5, 0.0, -0.5])
    yield row_update_sample("no_penalty", "proximal_adagrad", hyperparameters=[0.25, 0.0, 0.0])
    yield row_update_sample("no_penalty", "adagrad_da", hyperparameters=[0.25, 0.0, 0.0, 1.0])
    yield row_update_sample("rank_1", "adagrad", shape=())
    yield row_update_sample("rank_4", "centered_rmsprop", shape=(2, 1, 3), dtype=torch.float64)
    yield row_update_sample("no_items", "adagrad", items=0, representative=True)
    yield row_update_sample("no_rows", "adagrad", rows=0, items=0)
    yield row_update_sample("no_columns", "rmsprop", shape=(0,))
    yield row_update_sample("one_row", "momentum", rows=1, items=40, hyperparameters=[0.125, 0.5])
    yield row_update_sample("several_threads", "adagrad", rows=300, items=1000, shape=(300,), seed=2)


FAMILY = Family(samples={"row_update": row_update_samples})
