"""
Benchmark rows of the sparse part of Wide & Deep.

It has 40 features, three of them with ten ids in a bag, each with a table of 16 columns (mean) and one of a single
column (sum).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from .many_tables import Problem, Shape, Side, reference_tables, small
from .many_tables_sides import TENSORFLOW_FORMS, fbgemm_side, our_side, tensorflow_side, torch_side
from .rows import Case, Make, Options, Row, UnavailableError

SHAPE = Shape((10,) * 3 + (1,) * 37, 400_000, 16_384, ((16, "mean"), (1, "sum")))

MakeSide = Callable[[Problem], Side]


def check_sides(shape: Shape, device: str, rule: str, sides: dict[str, MakeSide]) -> None:
    """Compare the tables that each side that can run here trains in a small model with the formulas'."""
    steps = 3
    expected = reference_tables(Problem(small(shape), device), rule, steps)
    for name, make in sides.items():
        try:
            side = make(Problem(small(shape), device))
        except UnavailableError:
            continue
        for _ in range(steps):
            side.step()
        for table, wanted in zip(side.tables(), expected, strict=True):
            difference = f"{name}: " + "{}"
            torch.testing.assert_close(table, wanted, rtol=0, atol=2e-6, msg=difference.format)


def peers(options: Options, rule: str, forms: tuple[str, ...]) -> dict[str, MakeSide]:
    """Return the peers of ours. TensorFlow has no row-wise Adagrad."""
    made: dict[str, MakeSide] = {}
    if rule != "rowwise_adagrad":
        for form in forms:
            made[f"TensorFlow {form}"] = partial(tensorflow_side, options, rule, form)
    made["torch sparse EmbeddingBags"] = partial(torch_side, rule)
    made["FBGEMM TBE"] = partial(fbgemm_side, options, rule)
    return made


def row(name: str, what: str, shape: Shape, rule: str, forms: tuple[str, ...], targets: dict[str, float]) -> Row:
    """Make a benchmark row for one model and one rule."""

    def build(options: Options) -> Case:
        given = small(shape) if options.quick else shape
        problem, ours, others = Problem(given, options.device), partial(our_side, rule), peers(options, rule, forms)

        def call(make: MakeSide) -> Make:
            return lambda: make(problem).step

        return Case(
            call(ours),
            {name: call(make) for name, make in others.items()},
            lambda: check_sides(shape, options.device, rule, {"ours": ours, **others}),
            given.bytes_moved(rule),
            samples=given.batch,
            ids=given.ids(),
            sizes=given.sizes(),
        )

    return Row(name, what, build, targets)


def wide_deep(rule: str, name: str, ratio: float, forms: tuple[str, ...]) -> Row:
    """Make a benchmark row for one rule. The target ratio is that to every peer."""
    what = f"forward, backward and update with {name}: 40 features, batch 16,384"
    others = [f"TensorFlow {form}" for form in forms] + ["torch sparse EmbeddingBags", "FBGEMM TBE"]
    return row(f"wide_deep/{rule}", what, SHAPE, rule, forms, dict.fromkeys(others, ratio))


ROWS = [
    wide_deep("sgd", "SGD", 6.0, TENSORFLOW_FORMS),
    wide_deep("adagrad", "Adagrad", 4.5, TENSORFLOW_FORMS[1:]),
    wide_deep("rowwise_adagrad", "row-wise Adagrad", 4.5, ()),
]
