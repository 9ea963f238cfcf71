"""
The CUDA kernels of embedding_collection, run without a GPU: they give the bits of the kernels of single lookups.

Many tables of all widths in one launch, long bags, popular rows, keys that several lookups share, senseless ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from samples.sample import Random
from torch import Tensor

from emulation import fixture
from emulation.collection_cases import CASES, TABLES, Case, make_case
from torchsparse_rec.compat._parity.reference import MAX, MEAN, SUM


def _forward(case: Case) -> tuple[Tensor, Tensor]:
    arguments = (case.weights, case.indices, case.offsets, case.item_weights, *case.lists, False)
    return fixture.run_in_every_order("embedding_collection", *arguments)


def _single(case: Case, lookup: int) -> tuple[Tensor, Tensor]:
    ids, ends, item_weights, first = case.lookup(lookup)
    table = case.tables[lookup]
    arguments = (case.weights[table], ids, ends, item_weights, case.modes[lookup], case.padding[table], False, False)
    pooled, argmax = fixture.operator("embedding_bag")(*arguments)
    return pooled, torch.where(argmax < 0, argmax, argmax + first)


@pytest.mark.parametrize("case", CASES)
def test_lookups_equal_single_ones(case: Case) -> None:
    """Compare the bits; the positions of maxima count in the indices of all lookups."""
    output, argmax = _forward(case)
    of_max = [argmax for lookup, mode in enumerate(case.modes) for argmax in _single(case, lookup)[1:] if mode == MAX]
    for lookup, mine in enumerate(case.parts(output)):
        assert torch.equal(mine, _single(case, lookup)[0]), lookup
    assert torch.equal(argmax, torch.cat([torch.empty(0, dtype=torch.int64), *(x.flatten() for x in of_max)]))


@pytest.mark.parametrize("tables", [1, 2, 31, 33, 120])
def test_many_tables(tables: int) -> None:
    """Look up more tables than a warp looks through at once, and than one kernel's arguments hold."""
    shapes = [(3 + t % 5, (4, 8, 1, 12)[t % 4]) for t in range(tables)]
    lookups = [(t, (t * 7) % tables, SUM) for t in range(tables)]
    lengths = [[(k + b) % 3 for b in range(3)] for k in range(tables)]
    case = make_case(shapes, lookups, lengths, seed=tables)
    for lookup, mine in enumerate(case.parts(_forward(case)[0])):
        assert torch.equal(mine, _single(case, lookup)[0]), lookup


def test_every_id_of_its_own() -> None:
    """Look up single ids, without offsets, in tables of several widths."""
    case = make_case(TABLES, [(0, 0, SUM), (2, 2, SUM), (1, 1, SUM), (1, 2, SUM)], [[1] * 90, [1] * 4, [1] * 50, []])
    case.offsets, case.side_by_side = None, False
    output, _ = _forward(case)
    ids = case.indices.split(case.bags)
    for table, key, mine in zip(case.tables, case.keys, case.parts(output), strict=True):
        assert torch.equal(mine, case.weights[table][ids[key]])


# ---- Gradients ------------------------------------------------------------------------------------------------------


def _backward(case: Case, grad: Tensor, argmax: Tensor | None, wanted: list[bool], name: str) -> Any:
    shapes = [list(dims) for dims in zip(*(weight.shape for weight in case.weights), strict=True)]
    arguments = (grad, case.indices, case.offsets, case.item_weights, argmax, *shapes, *case.lists, wanted)
    return fixture.run_in_every_order(f"embedding_collection_{name}_backward", *arguments)


def _gradients(case: Case, wanted: list[bool]) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Return a gradient, argmax, and the tables' dense gradients, after checking that the sparse ones are equal."""
    output, argmax = _forward(case)
    grad = Random(3).floats(*output.shape, dtype=output.dtype)
    given = argmax if MAX in case.modes else None
    dense = _backward(case, grad, given, wanted, "dense")
    values, rows = _backward(case, grad, given, wanted, "sparse")
    for table, (of_table, of_rows, those) in enumerate(zip(dense, values, rows, strict=True)):
        shape = (case.weights[table].shape[0] if wanted[table] else 0, case.weights[table].shape[1])
        assert torch.equal(torch.zeros(shape, dtype=grad.dtype).index_copy(0, those, of_rows), of_table)
        assert torch.equal(those, those.unique())
    return grad, given, dense


def _one_bag_operator(case: Case, table: int, grad: Tensor, argmax: Tensor | None) -> Tensor:
    """Return a table's gradient by the operator of one lookup, over the bags of all its lookups, all of one mode."""
    ids, ends, item_weights, rows, winners = [], [torch.zeros(1, dtype=torch.int64)], [], [], []
    won_at, items = 0, 0
    for lookup, of_lookup in enumerate(case.parts(grad)):
        if case.tables[lookup] == table:
            of_key, offsets, weights, first = case.lookup(lookup)
            if argmax is not None and case.modes[lookup] == MAX:
                mine = argmax[won_at : won_at + of_lookup.numel()].view(of_lookup.shape)
                winners.append(torch.where(mine < 0, mine, mine - first + items))
            ids.append(of_key)
            ends.append(offsets[1:] + items)
            item_weights += [] if weights is None else [weights]
            rows.append(of_lookup)
            items += len(of_key)
        if case.modes[lookup] == MAX:
            won_at += of_lookup.numel()
    mode = next(mode for mode, of_table in zip(case.modes, case.tables, strict=True) if of_table == table)
    return fixture.operator("embedding_dense_backward")(
        torch.cat(rows),
        torch.cat(ids),
        torch.cat(ends),
        torch.cat(item_weights) if item_weights else None,
        torch.cat(winners) if winners else None,
        case.weights[table].shape[0],
        mode,
        case.padding[table],
        False,
    )


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_those_of_single_lookups(case: Case) -> None:
    """Compare the bits where a table's lookups are of one mode: their bags are then those of one call."""
    wanted = [table != 1 for table in range(len(case.weights))]
    grad, argmax, dense = _gradients(case, wanted)
    compared = 0
    for table in range(len(case.weights)):
        modes = {mode for mode, of_table in zip(case.modes, case.tables, strict=True) if of_table == table}
        if wanted[table] and len(modes) == 1:
            assert torch.equal(dense[table], _one_bag_operator(case, table, grad, argmax)), table
            compared += 1
    assert compared >= 3


def _weights_backward(case: Case, grad: Tensor, output: Tensor) -> Tensor:
    assert case.item_weights is not None
    arguments = (grad, case.weights, [], [], None, case.indices, case.offsets, case.item_weights, output, *case.lists)
    return fixture.run_in_every_order("embedding_collection_weights_backward", *arguments, 0, [], 0, 0)


WEIGHTED = [case for case in CASES if case.item_weights is not None]


@pytest.mark.parametrize("case", WEIGHTED)
@pytest.mark.parametrize("once", [True, False])
def test_gradients_of_weights(case: Case, once: bool) -> None:
    """Compare the bits where one lookup reads an item, and the sums of several where more do."""
    if once:
        # Only the first lookup of each key.
        kept = [lookup for lookup, key in enumerate(case.keys) if key not in case.keys[:lookup]]
        tables, keys, modes = ([x[lookup] for lookup in kept] for x in (case.tables, case.keys, case.modes))
        case = replace(case, tables=tables, keys=keys, modes=modes)
    output, _ = _forward(case)
    grad = Random(3).floats(*output.shape, dtype=output.dtype)
    found = _weights_backward(case, grad, output)
    expected = torch.zeros_like(found)
    for lookup, (rows, pooled) in enumerate(zip(case.parts(grad), case.parts(output), strict=True)):
        ids, ends, item_weights, first = case.lookup(lookup)
        table = case.tables[lookup]
        arguments = (
            rows,
            case.weights[table],
            ids,
            ends,
            item_weights,
            pooled,
            case.modes[lookup],
            case.padding[table],
        )
        expected[first : first + len(ids)] += fixture.operator("embedding_weights_backward")(*arguments)
    if once:
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# ---- Tables that an optimizer steps ---------------------------------------------------------------------------------

STEPS = 37
RULES = {
    "sgd": (0, [0.1, 0.9, 0.0, 1.0, 0.01]),
    "adagrad": (1, [0.1, 0.0, 1e-8, 0.0]),
    "rowwise_adagrad": (2, [0.1, 0.0, 1e-8, 0.0]),
    "adam": (3, [0.01, 0.9, 0.99, 1e-8, 0.1, 1.0, 0.0]),
    "amsgrad": (4, [0.01, 0.9, 0.99, 1e-8, 0.0, 0.0, 0.0]),
    "partial_rowwise_adam": (5, [0.01, 0.9, 0.99, 1e-8, 0.1]),
    "lamb": (9, [0.01, 0.9, 0.99, 1e-8, 0.1]),
}
STATES = {"sgd": 1, "adagrad": 1, "adam": 2, "amsgrad": 3, "partial_rowwise_adam": 2, "lamb": 2, "rowwise_adagrad": 1}
OF_ROWS = {"rowwise_adagrad": 0, "partial_rowwise_adam": 1}
IDLE = ("sgd", "adam", "amsgrad", "partial_rowwise_adam")


@dataclass
class Optimizer:
    """The optimizer's arguments, with rows last updated at different steps."""

    states: list[Tensor]
    last_steps: list[Tensor]
    history: Tensor | None
    rule: tuple[int, list[float]]

    def clone(self) -> Optimizer:
        return replace(self, states=[x.clone() for x in self.states], last_steps=[x.clone() for x in self.last_steps])


def _optimizer(name: str, weights: list[Tensor]) -> Optimizer:
    random = Random(11)
    dtype = torch.float64 if weights[0].dtype == torch.float64 else torch.float32
    rule = RULES[name]
    history = torch.zeros(2 * 64, 8, dtype=torch.float64)
    states, last_steps = [], []
    for weight in weights:
        for k in range(STATES[name]):
            shape = weight.shape[:1] if OF_ROWS.get(name) == k else weight.shape
            states.append(random.floats(*shape, dtype=dtype).abs())
        last_steps.append(random.integers(0, STEPS, len(weight), dtype=torch.int32))
    if name not in IDLE:
        return Optimizer(states, [], None, rule)
    for step in range(1, STEPS + 1):
        fixture.operator("row_optimizer_advance_")(history, *rule, step, 0)
    return Optimizer(states, last_steps, history, rule)


def _current_tables(case: Case, of: Optimizer) -> list[Tensor]:
    """Bring the tables up to date one at a time, by the operator of a single table."""
    per_table = len(of.states) // len(case.weights)
    tables = []
    for k, weight in enumerate(case.weights):
        states = of.states[k * per_table : (k + 1) * per_table]
        arguments = (weight, states, of.last_steps[k], of.history, torch.arange(len(weight)), *of.rule, STEPS, 0)
        tables.append(fixture.operator("row_optimizer_current")(*arguments))
    return tables


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3], CASES[4]])
@pytest.mark.parametrize("name", ["sgd", "adam", "partial_rowwise_adam"])
def test_lookups_of_rows_as_of_now(case: Case, name: str) -> None:
    """Compare the bits with those of lookups in tables that have been brought up to date."""
    of = _optimizer(name, case.weights)
    current = replace(case, weights=_current_tables(case, of))
    items = (case.indices, case.offsets, case.item_weights, *case.lists)
    tables = (case.weights, of.states, of.last_steps, of.history)
    found = fixture.run_in_every_order("embedding_collection_current", *tables, *items, *of.rule, STEPS, 0)
    expected = _forward(current)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    if case.item_weights is not None:
        grad = Random(3).floats(*found[0].shape, dtype=found[0].dtype)
        operands = (grad, *tables, *items[:3], found[0], *case.lists, *of.rule, STEPS, 0)
        weights = fixture.run_in_every_order("embedding_collection_weights_backward", *operands)
        assert torch.equal(weights, _weights_backward(current, grad, expected[0]))


@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[4], CASES[6]])
@pytest.mark.parametrize("name", RULES)
def test_updates(case: Case, name: str) -> None:
    """Compare with the optimizer's own operator, given the sparse gradient in the accumulator's dtype, to the bit."""
    wanted = [table != 1 for table in range(len(case.weights))]
    chosen = [k for k, wants in enumerate(wanted) if wants]
    output, argmax = _forward(case)
    grad = Random(3).floats(*output.shape, dtype=output.dtype)
    given = argmax if MAX in case.modes else None
    wide = torch.float64 if output.dtype == torch.float64 else torch.float32
    in_wide = replace(case, item_weights=None if case.item_weights is None else case.item_weights.to(wide))
    values, rows = _backward(in_wide, grad.to(wide), given, wanted, "sparse")

    of = _optimizer(name, [case.weights[k] for k in chosen])
    seeds = [5, 6, 7, 8] if output.dtype == torch.bfloat16 else []
    tail = (torch.tensor([0.5]), *of.rule, STEPS + 1, 0, True, seeds)
    expected, expected_of = [case.weights[k].clone() for k in chosen], of.clone()
    fixture.operator("row_optimizer_update_")(
        expected,
        expected_of.states,
        expected_of.last_steps,
        of.history,
        [rows[k] for k in chosen],
        [values[k] for k in chosen],
        *tail,
    )
    weights = [weight.clone() for weight in case.weights]
    tables = (weights, of.states, of.last_steps, of.history)
    items = (grad, case.indices, case.offsets, case.item_weights, given)
    fixture.run_in_every_order("embedding_collection_update_", *tables, *items, *case.lists, wanted, *tail)
    for k, table in zip(chosen, expected, strict=True):
        assert torch.equal(weights[k], table)
        assert not torch.equal(table, case.weights[k])
    assert torch.equal(weights[1], case.weights[1])
    for mine, theirs in zip(of.states + of.last_steps, expected_of.states + expected_of.last_steps, strict=True):
        assert torch.equal(mine, theirs)


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


def test_nothing_to_look_up() -> None:
    """Look up keys without bags or items, in a table without rows, and with no table's gradient wanted."""
    case = make_case([(4, 3), (0, 8), (2, 5)], [(0, 0, MEAN), (1, 1, SUM), (2, 2, SUM)], [[], [0, 0], [3]])
    case.side_by_side = False
    output, _ = _forward(case)
    assert output.shape == (21,) and not output[:16].any() and output[16:].any()
    for wanted in ([True] * 3, [False] * 3):
        dense = _backward(case, output, None, wanted, "dense")
        values, rows = _backward(case, output, None, wanted, "sparse")
        sizes = ([4, 0, 2], [0, 0, len(case.indices.unique())]) if wanted[0] else ([0] * 3, [0] * 3)
        assert [len(x) for x in dense] == sizes[0]
        assert [len(x) for x in values] == [len(x) for x in rows] == sizes[1]
        assert not wanted[0] or (not dense[0].any() and dense[2].any())
    case = make_case([(4, 3)], [(0, 0, SUM)], [[]])
    assert _forward(case)[0].shape == (0, 3)


def test_launches_do_not_grow_with_the_tables() -> None:
    def launches(tables: int, name: str) -> int:
        case = make_case([(5, 4)] * tables, [(t, t, SUM) for t in range(tables)], [[2]] * tables)
        before = fixture.library().tsr_emulated_launches()
        output, _ = _forward(case)
        if name != "forward":
            before = fixture.library().tsr_emulated_launches()
            _backward(case, output, None, [True] * tables, name)
        return (fixture.library().tsr_emulated_launches() - before) // 3

    for name in ("forward", "dense", "sparse"):
        # Kernels get their data of tables in arguments of 4 KiB, so more tables need few more launches.
        assert launches(60, name) - launches(2, name) <= 5
        assert launches(60, name) < 40


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
    case = make_case([(5, 2), (3, 4)], [(0, 0, SUM), (1, 0, SUM)], [[2, 1]], weighted=True)
    assert case.item_weights is not None
    case.item_weights[:] = 2
    good = replace(case, item_weights=case.item_weights.clone(), indices=case.indices.clone())
    assert good.item_weights is not None
    kind, text, bad = (IndexError, BAD_ID, 1) if what == "id" else (ValueError, NAN, 2)
    if what == "id":
        case.indices[1] = 7
    else:
        case.item_weights[2] = torch.nan
    good.item_weights[bad] = 0

    arguments = (case.weights, case.indices, case.offsets, case.item_weights, *case.lists, False)
    output, _ = _refused(kind, text, "embedding_collection", *arguments)
    assert torch.equal(output, _forward(good)[0])

    items = (case.indices, case.offsets, case.item_weights)
    lists = (None, [5, 3], [2, 4], *case.lists, [True] * 2)
    dense = _refused(kind, text, "embedding_collection_dense_backward", output, *items, *lists)
    for mine, of_good in zip(dense, _backward(good, output, None, [True] * 2, "dense"), strict=True):
        assert torch.equal(mine, of_good)
    of_items = (output, case.weights, [], [], None, *items, output, *case.lists, 0, [], 0, 0)
    found = _refused(kind, text, "embedding_collection_weights_backward", *of_items)
    expected = _weights_backward(good, output, output)
    kept = torch.arange(3) != bad
    assert torch.equal(found[kept], expected[kept]) and (what == "nan" or found[bad] == 0)

    weights = [weight.clone() for weight in case.weights]
    tail = (*lists[:1], *case.lists, [True] * 2, None, 0, [1.0, 0.0, 0.0, 0.0, 0.0], 1, 0, False, [])
    fixture.set_order("ascending")
    fixture.operator("embedding_collection_update_")(weights, [], [], None, output, *items, *tail)
    with pytest.raises(kind) as caught:
        fixture.check_errors()
    assert str(caught.value) == f"embedding_collection_update_: {text}"
    for weight, before, of_good in zip(weights, case.weights, dense, strict=True):
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


def test_only_the_sparse_gradient_is_read_back() -> None:
    case = CASES[0]
    output, _ = _forward(case)
    tables = [True] * len(case.weights)
    capturing = fixture.library().tsr_emulated_set_capturing
    capturing(1)
    try:
        _forward(case)
        _backward(case, output, None, tables, "dense")
        weights = [weight.clone() for weight in case.weights]
        arguments = (weights, [], [], None, output, case.indices, case.offsets, None, None, *case.lists, tables, None)
        rule = (0, [1.0, 0.0, 0.0, 0.0, 0.0], 1, 0, False, [])
        fixture.run_in_every_order("embedding_collection_update_", *arguments, *rule)
        with pytest.raises(ValueError, match="the number of rows that have entries is read back"):
            _backward(case, output, None, tables, "sparse")
    finally:
        capturing(0)
