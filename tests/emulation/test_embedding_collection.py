"""
The CUDA kernels of embedding_collection, run without a GPU: they give the bits of the kernels of single lookups.

Many tables of all widths in one launch, long bags, popular rows, keys that several lookups share, senseless ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ops import test_collection_plan
from ops.test_embedding_collection import (
    called,
    check_current,
    check_forward,
    check_gradients,
    check_update,
    check_weights_gradient,
    copies,
    parts_of,
)
from samples.embedding_collection import Collection, random_collection
from samples.row_optimizer import IDLE_RULES, one_of_each_rule
from samples.sample import Random

from emulation import fixture
from torchsparse_rec.compat._parity.reference import MAX, MEAN, MIN, SQRTN, SUM


def collection(
    tables: list[tuple[int, int]], lookups: list[tuple[int, int, int]], lengths: list[list[int]], **more: Any
) -> Collection:
    """Return tables given by (rows, columns), lookups by (table, key, mode), keys by the lengths of their bags."""
    rows, dims = zip(*tables, strict=True)
    of_tables, keys, modes = zip(*lookups, strict=True)
    given = {"rows": rows, "dims": dims, "tables": of_tables, "keys": keys, "modes": modes}
    given |= {"bags": tuple(map(len, lengths)), "lengths": sum(lengths, []), "padding_idx": (-1,) * len(tables)}
    return random_collection("", **(given | more))


LONG = [[3, 300, 0, 1, 129, 17], [0, 1, 2, 700, 16, 128], [1, 1, 1, 1, 1, 1], [20, 2, 140, 1, 0, 5]]
SHORT = [[n % 4 for n in range(70)], [1] * 70, [n % 3 for n in range(70)], [2, 150] + [1] * 68]
TABLES = [(50, 8), (20, 3), (9, 132), (31, 16), (6, 1)]
PLAIN = [(0, 0, SUM), (1, 1, MEAN), (2, 3, SQRTN), (3, 2, SUM), (1, 0, MEAN), (0, 3, SQRTN), (4, 1, SUM)]
EXTREMES = [(0, 0, MAX), (1, 1, MEAN), (2, 3, MIN), (3, 2, SUM), (0, 3, SUM), (1, 1, MAX), (4, 2, MIN)]
CASES = [
    collection(TABLES, lookups, lengths, weighted=weighted, side_by_side=side, dtype=dtype, index=index, **more)
    for lookups, lengths, weighted, side, dtype, index, more in [
        (PLAIN, LONG, False, True, torch.float32, torch.int64, {}),
        (PLAIN, LONG, True, False, torch.float32, torch.int32, {"padding_idx": (7, -1, 9, 0, 2)}),
        (PLAIN, SHORT, True, True, torch.float64, torch.int64, {"padding_idx": (7, -1, 9, 0, -1)}),
        (PLAIN, SHORT, False, False, torch.float16, torch.int32, {}),
        (EXTREMES, LONG, False, False, torch.float32, torch.int64, {"padding_idx": (7, -1, 9, 0, 2)}),
        (EXTREMES, SHORT, False, True, torch.bfloat16, torch.int64, {}),
        (EXTREMES, LONG, False, True, torch.float64, torch.int32, {}),
    ]
]
WANTED = [True, False, True, True, True]


@pytest.mark.parametrize("x", CASES)
def test_lookups_equal_single_ones(x: Collection, emulated: object) -> None:
    check_forward(x)


@pytest.mark.parametrize("tables", [1, 2, 31, 33, 120])
def test_many_tables(tables: int, emulated: object) -> None:
    """Look up more tables than a warp looks through at once, and than one kernel's arguments hold."""
    shapes = [(3 + t % 5, (4, 8, 1, 12)[t % 4]) for t in range(tables)]
    lookups = [(t, (t * 7) % tables, SUM) for t in range(tables)]
    lengths = [[(k + b) % 3 for b in range(3)] for k in range(tables)]
    check_forward(collection(shapes, lookups, lengths, seed=tables))


def test_every_id_of_its_own() -> None:
    """Look up single ids, without offsets, in tables of several widths."""
    lookups = [(0, 0, SUM), (2, 2, SUM), (1, 1, SUM), (1, 2, SUM)]
    lengths = [[1] * 90, [1] * 4, [1] * 50, []]
    x = collection(TABLES, lookups, lengths, most=None, side_by_side=False)
    output, _ = fixture.run_in_every_order("embedding_collection", x.weights, *x.inputs, *x.lists, False)
    ids = x.indices.split(x.bags)
    for table, key, mine in zip(x.tables, x.keys, parts_of(x, output), strict=True):
        assert torch.equal(mine, x.weights[table][ids[key]])


@pytest.mark.parametrize("x", CASES)
def test_gradients_equal_those_of_single_lookups(x: Collection, emulated: object) -> None:
    check_gradients(replace(x, wanted=WANTED))


@pytest.mark.parametrize("x", [x for x in CASES if x.per_sample_weights is not None])
@pytest.mark.parametrize("once", [True, False])
def test_gradients_of_weights(x: Collection, once: bool, emulated: object) -> None:
    """Compare the bits where one lookup reads an item, and the sums of several where more do."""
    if once:
        # Only the first lookup of each key.
        kept = [lookup for lookup, key in enumerate(x.keys) if key not in x.keys[:lookup]]
        tables, keys, modes = ([y[lookup] for lookup in kept] for y in (x.tables, x.keys, x.modes))
        x = replace(x, tables=tables, keys=keys, modes=modes)
        x = replace(x, grad=Random(3).floats(*called(x).shape, dtype=x.grad.dtype))
    check_weights_gradient(x)


# ---- Tables that an optimizer steps ---------------------------------------------------------------------------------

STEPS = 37
RULES = one_of_each_rule("nesterov", "adagrad", "rowwise_adagrad", "adamw", "amsgrad", "partial_rowwise_adam", "lamb")


@pytest.mark.parametrize("x", [CASES[0], CASES[2], CASES[3], CASES[4]])
@pytest.mark.parametrize("name", ["momentum", "adam", "partial_rowwise_adam"])
def test_lookups_of_rows_as_of_now(x: Collection, name: str, emulated: object) -> None:
    check_current(replace(x, weights=copies(x.weights)), name, seed=11, steps=STEPS)


@pytest.mark.parametrize("x", [CASES[1], CASES[3], CASES[4], CASES[6]])
@pytest.mark.parametrize("name", RULES)
def test_updates(x: Collection, name: str, emulated: object) -> None:
    before, x = x.weights, replace(x, weights=copies(x.weights), wanted=WANTED)
    seeds = [5, 6, 7, 8] if x.grad.dtype == torch.bfloat16 else []
    check_update(x, name, name in IDLE_RULES, 11, True, seeds, scale=torch.tensor([0.5]), steps=STEPS)
    assert [not torch.equal(*pair) for pair in zip(x.weights, before, strict=True)] == WANTED


# ---- What only CUDA has ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
def test_rows_beyond_32_bits(mode: int) -> None:
    """Sort the rows of tables that no memory holds; together they need keys of 64 bits."""
    rows = [2**33 + 1, 5, 2**32]
    ids = torch.tensor([2**33, 0, 2**32 - 1, 4, 4, 0, 2**32 - 1, 7, 2**33])
    offsets = torch.tensor([0, 4, 6, 9])
    argmax = torch.tensor([0, 3, 4, -1, 8, 6]) if mode == MAX else None
    lists = ([0, 1, 2], [0, 1, 2], [mode] * 3, [1, 1, 1], [-1, -1, 7], True)
    grad = torch.arange(1.0, 7.0).view(1, 6)
    arguments = (grad, ids, offsets, None, argmax, rows, [2, 2, 2], *lists, [True] * 3)
    ids[3], ids[7], ids[8] = 2**33, 7, 2**32 - 1
    values, found = fixture.run_in_every_order("embedding_collection_sparse_backward", *arguments)
    assert [x.tolist() for x in found] == [[0, 2**32 - 1, 2**33], [0, 4], [2**32 - 1]]
    expected = {
        SUM: [[[1, 2], [1, 2], [2, 4]], [[3, 4], [3, 4]], [[10, 12]]],
        MEAN: [[[0.25, 0.5], [0.25, 0.5], [0.5, 1]], [[1.5, 2], [1.5, 2]], [[5, 6]]],
        MAX: [[[0, 0], [0, 0], [1, 2]], [[0, 0], [3, 0]], [[5, 6]]],
    }
    assert [x.tolist() for x in values] == expected[mode]


def test_launches_do_not_grow_with_the_tables() -> None:
    def launches(tables: int, name: str) -> int:
        x = collection([(5, 4)] * tables, [(t, t, SUM) for t in range(tables)], [[2]] * tables)
        inputs = (x.grad, *x.inputs, None, *x.sizes, *x.lists, x.wanted)
        arguments = inputs if name else (x.weights, *x.inputs, *x.lists, False)
        before = fixture.library().tsr_emulated_launches()
        fixture.operator(f"embedding_collection{name}")(*arguments)
        return fixture.library().tsr_emulated_launches() - before

    for name in ("", "_dense_backward", "_sparse_backward"):
        # Kernels get their data of tables in arguments of 4 KiB, so more tables need few more launches.
        assert launches(60, name) - launches(2, name) <= 5
        assert launches(60, name) < 40


# ---- Plans, which keep what they have sent to the device -------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain_sgd", "adam", "rowwise_adagrad"])
@pytest.mark.parametrize("x", test_collection_plan.CASES)
def test_steps_by_a_plan(x: Collection, name: str) -> None:
    test_collection_plan.check_steps(emulated_operators(), x, name)


def emulated_operators() -> Any:
    fixture.library()
    return torch.ops.torchsparse_rec_emulated


def means(tables: int, lengths: list[int], seed: int = 0) -> Collection:
    """Return means of tables of several widths, each by a feature of its own."""
    shapes, lookups = [(9, 4 + t % 3) for t in range(tables)], [(t, t, MEAN) for t in range(tables)]
    return collection(shapes, lookups, [lengths] * tables, seed=seed)


class Planned:
    """Tables and the plans of their lookup and their step."""

    def __init__(self, tables: int) -> None:
        self.ops, self.x = emulated_operators(), means(tables, [2, 3])
        self.plan = test_collection_plan.plan_of(self.ops, self.x, [], [])
        self.steps = test_collection_plan.plan_of(self.ops, self.x, [], [])

    def step(self, x: Collection | None = None) -> int:
        """Look up and step the tables of x by the plans, compare with calls by lists, and return the launches."""
        x = x or self.x
        lists, bags, theirs = x.lists, (list(x.bags), x.side_by_side), copies(x.weights)
        now = (0, [0.5, 0.0, 0.0, 0.0, 0.0], 1, 0)
        expected = self.ops.embedding_collection.default(theirs, *x.inputs, *lists, False)[0]
        rest = (None, x.grad, *x.inputs, None, *lists, [True] * len(theirs), None, *now, False, [], [])
        self.ops.embedding_collection_update_.default(theirs, [], [], *rest)
        before = copies(x.weights)
        counted = fixture.library().tsr_emulated_launches()
        output = self.ops.planned_collection.default(x.weights, *x.inputs, *bags, self.plan)[0]
        self.ops.planned_collection_update_.default(x.weights, None, x.grad, *x.inputs, None, *bags, *now, self.steps)
        launched = fixture.library().tsr_emulated_launches() - counted
        assert torch.equal(output, expected)
        for weight, other, old in zip(x.weights, theirs, before, strict=True):
            assert torch.equal(weight, other)
            weight.copy_(old)
        return launched


def test_a_step_of_100_tables_sends_nothing_again() -> None:
    planned = Planned(100)
    first = planned.step()
    assert [planned.step(), planned.step()] == [19, 19]
    assert first >= 19 + 15


def test_what_has_changed_is_sent_again() -> None:
    """Step tables of which some have moved, more bags, and again those of before."""
    planned = Planned(8)
    x = planned.x
    planned.step()
    least = planned.step()
    moved = replace(x, weights=[*copies(x.weights[:3]), *x.weights[3:]])
    longer = replace(means(8, [1, 4, 0, 2], seed=3), weights=x.weights)
    for y in (moved, x, longer, x):
        assert planned.step(y) > least
        assert planned.step(y) == least


def test_a_captured_step_keeps_nothing() -> None:
    """Send everything anew where a graph captures it: the graph would read what the plan may let go of."""
    planned = Planned(8)
    all_sent = planned.step()
    least = planned.step()
    fixture.library().tsr_emulated_set_capturing(1)
    try:
        assert [planned.step(), planned.step()] == [all_sent, all_sent]
    finally:
        fixture.library().tsr_emulated_set_capturing(0)
    assert planned.step() == least


def _refused(kind: type[Exception], text: str, name: str, *arguments: Any) -> Any:
    """Return the result of a call after checking, in every order of threads, that its kernels report this error."""
    results = []
    for order in ("descending", "random", "ascending"):
        fixture.set_order(order)
        results.append(fixture.operator(name)(*arguments))
        with pytest.raises(kind) as caught:
            fixture.check_errors()
        assert str(caught.value) == f"{name}: {text}"
        fixture.check_errors()  # an error is reported once
    return results[-1]


BAD_ID = "indices[1] must be in [0, 3), got 7"
NAN = "per_sample_weights[2] must be a number, got nan"


@pytest.mark.parametrize("what", ["id", "nan"])
def test_bad_values_are_skipped_and_recorded(what: str) -> None:
    """Report one error for a key that two tables look up: of the smaller table, whichever lookup finds it first."""
    x = collection([(5, 2), (3, 4)], [(0, 0, SUM), (1, 0, SUM)], [[2, 1]], weighted=True)
    assert x.per_sample_weights is not None
    x.per_sample_weights[:] = 2
    good = replace(x, per_sample_weights=x.per_sample_weights.clone(), indices=x.indices.clone())
    assert good.per_sample_weights is not None
    kind, text, bad = (IndexError, BAD_ID, 1) if what == "id" else (ValueError, NAN, 2)
    if what == "id":
        x.indices[1] = 7
    else:
        x.per_sample_weights[2] = torch.nan
    good.per_sample_weights[bad] = 0

    def both(name: str, call: Callable[[Collection], tuple]) -> tuple[Any, Any]:
        """Return the results of a call that is refused, and of the same call without the bad value."""
        name = f"embedding_collection{name}"
        return _refused(kind, text, name, *call(x)), fixture.run_in_every_order(name, *call(good))

    (output, _), (expected, _) = both("", lambda y: (y.weights, *y.inputs, *y.lists, False))
    assert torch.equal(output, expected)
    sizes = (None, *x.sizes, *x.lists, x.wanted)
    dense, expected = both("_dense_backward", lambda y: (output, *y.inputs, *sizes))
    for mine, of_good in zip(dense, expected, strict=True):
        assert torch.equal(mine, of_good)
    tail = (output, *x.lists, 0, [], 0, 0)
    found, expected = both("_weights_backward", lambda y: (output, y.weights, [], [], None, *y.inputs, *tail))
    kept = torch.arange(3) != bad
    assert torch.equal(found[kept], expected[kept]) and (what == "nan" or found[bad] == 0)

    weights = copies(x.weights)
    tail = (None, *x.lists, x.wanted, None, 0, [1.0, 0.0, 0.0, 0.0, 0.0], 1, 0, False, [])
    fixture.set_order("ascending")
    fixture.operator("embedding_collection_update_")(weights, [], [], None, output, *x.inputs, *tail)
    with pytest.raises(kind) as caught:
        fixture.check_errors()
    assert str(caught.value) == f"embedding_collection_update_: {text}"
    for weight, before, of_good in zip(weights, x.weights, dense, strict=True):
        torch.testing.assert_close(weight, before - of_good)


def test_offsets_without_sense_stay_in_bounds() -> None:
    """Refuse bags that overlap and have more items in all than there are."""
    bags = 12
    ids, offsets = torch.zeros(600, dtype=torch.int64), torch.tensor([0, 600] * bags)[: 2 * bags - 1]
    lists = ([0, 1], [0, 1], [SUM, MEAN], [bags, bags - 2], [-1, -1], False)
    tables = [torch.ones(4, 4), torch.ones(4, 8)]
    text = "offsets must not decrease, got 600 followed by 0 at position 2"
    output, _ = _refused(ValueError, text, "embedding_collection", tables, ids, offsets, None, *lists, False)
    gradient = (output, ids, offsets, None, None, [4, 4], [4, 8], *lists, [True, True])
    for name in ("dense", "sparse"):
        _refused(ValueError, text, f"embedding_collection_{name}_backward", *gradient)
