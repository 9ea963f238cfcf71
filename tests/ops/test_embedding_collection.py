"""A collection equals the loop of single lookups bit for bit, and its update the optimizer's on sparse gradients."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import compress, count
from typing import Any

import pytest
import torch
from calls import assert_same_bits
from samples.embedding_collection import SHARED, Collection, optimizer_of, random_collection
from samples.row_optimizer import IDLE_RULES, OTHER_RULES, ROW_STATES
from samples.sample import FLOATS, INDICES
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference import EXTREMES, MEAN, POOLING, SQRTN, SUM
from torchsparse_rec.compat._parity.reference.row_optimizer import states_of

_ops = torch.ops.torchsparse_rec
MODES = {number: word for word, number in POOLING.items()}
DIMS = (1, 2, 3, 7, 16, 64, 130)


# ---- The same with single lookups -----------------------------------------------------------------------------------


def drawn(seed: int, most_bags: int = 7, rows: tuple[int, ...] = (1, 5, 40, 300)) -> Collection:
    """Draw a collection whose properties are all random."""
    pick = random.Random(seed)
    tables, keys, lookups = pick.randint(1, 4), pick.randint(1, 4), pick.randint(1, 6)
    weighted, side_by_side = pick.random() < 0.4, pick.random() < 0.5
    count = pick.randint(0, most_bags)
    sizes = [pick.choice(rows) for _ in range(tables)]
    return random_collection(
        f"drawn_{seed}",
        rows=tuple(sizes),
        dims=tuple(pick.choice(DIMS) for _ in sizes),
        tables=tuple(pick.randrange(tables) for _ in range(lookups)),
        keys=tuple(pick.randrange(keys) for _ in range(lookups)),
        modes=tuple(pick.choice((SUM, MEAN, SQRTN) if weighted else tuple(MODES)) for _ in range(lookups)),
        bags=tuple(count if side_by_side else pick.randint(0, most_bags) for _ in range(keys)),
        padding_idx=tuple(pick.choice((-1, -1, 0, size)) for size in sizes),
        most=pick.choice((1, 5)),
        dtype=pick.choice(FLOATS),
        index=pick.choice(INDICES),
        offset=pick.choice(INDICES),
        weighted=weighted,
        side_by_side=side_by_side,
        seed=seed,
    )


def parts_of(x: Collection, results: Tensor) -> list[Tensor]:
    """Split a tensor of the output's shape into the part of each lookup."""
    sizes = [(x.bags[key], x.weights[table].shape[1]) for table, key in zip(x.tables, x.keys, strict=True)]
    if x.side_by_side:
        return list(results.split([dim for _, dim in sizes], 1))
    flat = results.split([count * dim for count, dim in sizes])
    return [part.view(size) for part, size in zip(flat, sizes, strict=True)]


def bags_of(x: Collection, key: int) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Return a key's ids, the offsets of its bags, its weights, and the position of the first id."""
    first = sum(x.bags[:key])
    assert x.offsets is not None
    offsets = x.offsets[first : first + x.bags[key] + 1]
    begin, end = int(offsets[0]), int(offsets[-1])
    weights = None if x.per_sample_weights is None else x.per_sample_weights[begin:end]
    return x.indices[begin:end], offsets - begin, weights, begin


def called(x: Collection, sparse: bool = False) -> Tensor:
    return ops.embedding_collection(
        x.weights,
        x.indices,
        x.offsets,
        tables=x.tables,
        keys=x.keys,
        modes=[MODES[mode] for mode in x.modes],
        bags=x.bags,
        per_sample_weights=x.per_sample_weights,
        padding_idx=[row if row >= 0 else None for row in x.padding_idx],
        side_by_side=x.side_by_side,
        sparse=sparse,
    )


def single(x: Collection, table: int, key: int, mode: int) -> Tensor:
    ids, offsets, weights, _ = bags_of(x, key)
    padding = x.padding_idx[table] if x.padding_idx[table] >= 0 else None
    return ops.embedding_bag(
        x.weights[table], ids, offsets, per_sample_weights=weights, mode=MODES[mode], padding_idx=padding
    )


def check_forward(x: Collection) -> None:
    for part, *lookup in zip(parts_of(x, called(x)), x.tables, x.keys, x.modes, strict=True):
        assert_same_bits(part, single(x, *lookup))
    argmax = _ops.embedding_collection.default(x.weights, *x.inputs, *x.lists, False)[1]
    assert_same_bits(argmax, x.argmax() if {*EXTREMES} & {*x.modes} else torch.empty(0, dtype=torch.int64))


def table_gradient(x: Collection, table: int) -> tuple[Tensor, Tensor]:
    """Return values and rows of one lookup of all the table's bags, lookup by lookup. The modes must be the same."""
    mine = [lookup for lookup, other in enumerate(x.tables) if other == table]
    grads = parts_of(x, x.grad)
    ids, lengths, weights, argmax, begin = [], [], [], [], 0
    for lookup in mine:
        own_ids, offsets, own_weights, _ = bags_of(x, x.keys[lookup])
        ids.append(own_ids)
        lengths.append(offsets.diff())
        weights.append(own_weights)
        if x.modes[lookup] in EXTREMES:
            bag = (x.weights[table], own_ids, offsets, None, x.modes[lookup], x.padding_idx[table], False, False)
            winners = _ops.embedding_bag.default(*bag)[1]
            argmax.append(torch.where(winners < 0, winners, winners + begin))
        begin += own_ids.shape[0]
    joined = torch.cat(lengths)
    offsets = torch.cat([joined.new_zeros(1), joined.cumsum(0)])
    return _ops.embedding_sparse_backward.default(
        torch.cat([grads[lookup] for lookup in mine]),
        torch.cat(ids),
        offsets,
        None if x.per_sample_weights is None else torch.cat(weights),
        torch.cat(argmax) if argmax else None,
        x.weights[table].shape[0],
        x.modes[mine[0]],
        x.padding_idx[table],
        False,
    )


def check_gradients(x: Collection) -> None:
    """Compare dense, sparse and COO gradients; if a table's lookups have one mode, also with those of one lookup."""
    inputs = (x.grad, *x.inputs, x.argmax(), *x.sizes, *x.lists, x.wanted)
    dense = _ops.embedding_collection_dense_backward.default(*inputs)
    values, rows = _ops.embedding_collection_sparse_backward.default(*inputs)
    coo = _ops.embedding_collection_coo_backward.default(*inputs)
    for table, weight in enumerate(x.weights):
        modes = {mode for mode, other in zip(x.modes, x.tables, strict=True) if other == table}
        if not modes or not x.wanted[table]:
            assert rows[table].shape == (0,) and not dense[table].any()
            continue
        assert_same_bits(rows[table], rows[table].unique())
        assert coo[table].is_coalesced() and coo[table].shape == weight.shape
        assert_same_bits(coo[table]._indices(), rows[table][None])
        assert_same_bits(coo[table]._values(), values[table])
        assert_same_bits(dense[table], torch.zeros_like(weight).index_copy_(0, rows[table], values[table]))
        if len(modes) == 1:
            wanted, at = table_gradient(x, table)
            assert_same_bits(rows[table], at)
            assert_same_bits(values[table], wanted)


def check_weights_gradient(x: Collection) -> None:
    """Compare the bits for keys that are looked up once: a sum over several lookups is rounded once."""
    if x.per_sample_weights is None:
        return
    output = called(x)
    inputs = (x.grad, x.weights, [], [], None, *x.inputs, output, *x.lists, 0, [], 0, 0)
    result = _ops.embedding_collection_weights_backward.default(*inputs)
    found: dict[int, list[Tensor]] = {key: [] for key in range(len(x.bags))}
    parts = zip(x.tables, x.keys, x.modes, parts_of(x, x.grad), parts_of(x, output), strict=True)
    for table, key, mode, grad, pooled in parts:
        ids, offsets, weights, _ = bags_of(x, key)
        bag = (x.weights[table], ids, offsets, weights, pooled, mode, x.padding_idx[table])
        found[key].append(_ops.embedding_weights_backward.default(grad, *bag))
    for key, of_lookups in found.items():
        ids, _, _, begin = bags_of(x, key)
        mine = result[begin : begin + ids.shape[0]]
        if len(of_lookups) == 1:
            assert_same_bits(mine, of_lookups[0])
        elif not of_lookups:
            assert not mine.any()
        elif x.grad.dtype in (torch.float32, torch.float64):
            torch.testing.assert_close(mine, sum(of_lookups), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_equals_single_lookups(seed: int) -> None:
    x = drawn(seed)
    check_forward(x)
    check_gradients(x)
    check_weights_gradient(x)


@pytest.mark.parametrize("seed", range(100, 108))
def test_equals_single_lookups_on_several_threads(seed: int, restore_threads: None) -> None:
    torch.set_num_threads(3)
    x = drawn(seed, most_bags=9000, rows=(50, 3000, 70_000))
    check_forward(x)
    check_gradients(x)
    check_weights_gradient(x)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_the_public_function(sparse: bool) -> None:
    x = random_collection("", weighted=True, dtype=torch.float64, **SHARED)
    table = x.weights[0].requires_grad_()
    assert x.per_sample_weights is not None
    x.per_sample_weights.requires_grad_()
    found = torch.autograd.grad(called(x, sparse), (table, x.per_sample_weights), x.grad)
    assert found[0].layout == (torch.sparse_coo if sparse else torch.strided)
    assert not sparse or found[0].is_coalesced()
    loop = [single(x, *lookup) for lookup in zip(x.tables, x.keys, x.modes, strict=True)]
    grads = torch.autograd.grad(torch.cat(loop, 1), (table, x.per_sample_weights), x.grad)
    torch.testing.assert_close(found[0].to_dense(), grads[0])
    torch.testing.assert_close(found[1], grads[1])


def test_a_table_that_needs_no_gradient_is_not_read_for_one() -> None:
    """Keep for the backward only what the gradient of weights reads again: tables may change in between."""
    x = random_collection("", **SHARED)
    x.weights[0].requires_grad_()
    output = called(x)
    for weight in x.weights:
        weight.data.zero_()
        weight.detach().add_(1)
    output.backward(x.grad)
    assert x.weights[0].grad is not None


# ---- Tables of an optimizer -----------------------------------------------------------------------------------------

RULES = IDLE_RULES | OTHER_RULES


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in tensors]


def check_update(x: Collection, name: str, idle: bool, seed: int, *how: Any, scale: Any = None, steps: int = 3) -> None:
    """Compare the bits, for half types too, whose sparse gradient is that of float32 numbers, and of whole tables."""
    rule, h = RULES[name]
    states, last_steps, history = optimizer_of(x, list(compress(count(), x.wanted)), rule, h, seed, idle, steps)
    wide = torch.float64 if x.grad.dtype == torch.float64 else torch.float32
    weights = None if x.per_sample_weights is None else x.per_sample_weights.to(wide)
    gradients = _ops.embedding_collection_sparse_backward.default(
        x.grad.to(wide), x.indices, x.offsets, weights, x.argmax(), *x.sizes, *x.lists, x.wanted
    )
    values, rows, mine = (list(compress(y, x.wanted)) for y in (*gradients, x.weights))
    step = (scale, rule, h, 4 + steps, 3, *how)
    theirs = copies(mine), copies(states), copies(last_steps)
    _ops.row_optimizer_update_.default(*theirs, history, rows, values, *step)
    inputs = (history, x.grad, *x.inputs, x.argmax(), *x.lists, x.wanted)
    _ops.embedding_collection_update_.default(x.weights, states, last_steps, *inputs, *step)
    for actual, wanted in zip((mine, states, last_steps), theirs, strict=True):
        for one, other in zip(actual, wanted, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "idle"), [(name, False) for name in RULES] + [(name, True) for name in IDLE_RULES])
def test_update_is_the_optimizers_on_sparse_gradients(name: str, idle: bool, seed: int) -> None:
    x = drawn(200 + 7 * seed + len(name), most_bags=40)
    whole = [2 * seed] * len(x.weights) if idle else []
    scale = torch.tensor(0.75, dtype=torch.float32) if seed else None
    check_update(x, name, idle, seed, bool(seed % 2), [], whole, scale=scale)


def check_current(x: Collection, name: str, seed: int, steps: int = 3) -> None:
    """Compare with lookups in tables that have been brought up to date, and with the gradients of their weights."""
    rule, h = RULES[name]
    tables = (x.weights, *optimizer_of(x, list(range(len(x.weights))), rule, h, seed, steps=steps))
    _, states, last_steps, history = tables
    before = copies([*x.weights, *states, *last_steps])
    now = (rule, h, 3 + steps, 3)
    step = (history, *x.inputs, *x.lists, *now)
    pooled, argmax = _ops.embedding_collection_current.default(*tables[:3], *step)
    weights_grad = None
    if x.per_sample_weights is not None:
        inputs = (x.grad, *tables, *x.inputs, pooled, *x.lists)
        weights_grad = _ops.embedding_collection_weights_backward.default(*inputs, *now)
    for after, then in zip([*x.weights, *states, *last_steps], before, strict=True):
        assert_same_bits(after, then)
    # Rows of tables may be any distance apart.
    wider = ([y.repeat_interleave(2, 0)[::2] for y in group] for group in tables[:3])
    assert_same_bits(_ops.embedding_collection_current.default(*wider, *step)[0], pooled)
    _ops.row_optimizer_make_current_.default(*tables, *now, [])
    wanted, winners = _ops.embedding_collection.default(x.weights, *x.inputs, *x.lists, False)
    assert_same_bits(pooled, wanted)
    assert_same_bits(argmax, winners)
    if weights_grad is not None:
        inputs = (x.grad, x.weights, [], [], None, *x.inputs, wanted, *x.lists, 0, [], 0, 0)
        assert_same_bits(weights_grad, _ops.embedding_collection_weights_backward.default(*inputs))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", IDLE_RULES)
def test_current_lookup_is_that_of_tables_made_current(name: str, seed: int) -> None:
    check_current(drawn(300 + 5 * seed + len(name), most_bags=60), name, seed)


@pytest.mark.parametrize("dim", [3, 130, 300])
@pytest.mark.parametrize("name", ["lamb", "ftrl", "adamw", "rowwise_adagrad"])
def test_update_leaves_rows_alone_whose_gradients_add_up_to_zeros(name: str, dim: int, kernels: str) -> None:
    """Give rows 0 and 1 zeros, row 2 one number in its last column, row 3 gradients that cancel."""
    rule, h = RULES[name]
    weight, grad = torch.ones(5, dim), torch.zeros(3, dim)
    states = [torch.ones(5) if ROW_STATES.get(rule) == s else torch.ones(5, dim) for s in range(states_of(rule, h))]
    grad[0, 0], grad[1, -1], grad[2] = -0.0, 0.5, 0.75
    items = (torch.tensor([0, 1, 2, 3, 3]), torch.tensor([0, 2, 3, 5]), torch.tensor([1.0, 1.0, 1.0, 0.5, -0.5]))
    lists = ([0], [0], [SUM], [3], [-1], True, [True])
    arguments = ([weight], states, [], None, grad, *items, None, *lists, None, rule, h, 3, 0, False, [])
    _ops.embedding_collection_update_.default(*arguments)
    for x in (weight, *states):
        assert (x[[0, 1, 3, 4]] == 1).all() and (x[2] != 1).any()


# ---- Memory and compilation -----------------------------------------------------------------------------------------

_PEAK = """
import resource, torch
import torchsparse_rec
update = torch.ops.torchsparse_rec.embedding_collection_update_.default
bags, hot, dim, rows = 4_000, 50, 128, 200_000
weight, grad = torch.zeros(rows, dim), torch.randn(bags, dim)
def step(bags):
    indices, offsets = torch.arange(bags * hot) % rows, torch.arange(0, bags * hot + 1, hot)
    lists = ([0], [0], [1], [bags], [-1], True)
    inputs = (None, grad[:bags], indices, offsets, None, None, *lists, [True])
    update([weight], [], [], *inputs, None, 0, [0.1, 0, 0, 0, 0], 1, 0, False, [])
step(2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(bags)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_update_has_no_temporary_of_all_rows() -> None:
    """Use 8 bytes an id, and more for its bag: [U, D], like [N, D], would take 102 MB here."""
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    assert int(done.stdout) / 1024 < 16


def test_compiles_in_one_graph() -> None:
    """Compile once for any number of tables, bags and ids, with the bits of eager mode."""

    def model(weights: list[Tensor], ids: Tensor, offsets: Tensor, per_sample_weights: Tensor) -> Tensor:
        count = (offsets.shape[0] - 1) // 2
        return ops.embedding_collection(
            weights,
            ids,
            offsets,
            tables=[0, 1, 0],
            keys=[0, 1, 1],
            modes=["sum", "mean", "sqrtn"],
            bags=[count, count],
            per_sample_weights=per_sample_weights,
        )

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (4, 7):
        x = random_collection(
            "",
            dims=(3, 8),
            rows=(9, 9),
            tables=(0, 1, 0),
            keys=(0, 1, 1),
            bags=(size, size),
            padding_idx=(-1, -1),
            weighted=True,
            seed=size,
        )
        inputs = [*x.weights, x.per_sample_weights]
        results = []
        for function in (model, compiled):
            fresh = [value.clone().requires_grad_() for value in inputs]
            output = function(fresh[:2], x.indices, x.offsets, fresh[2])
            output.backward(x.grad)
            results.append([output.detach(), *(value.grad for value in fresh)])
        for actual, wanted in zip(*results, strict=True):
            assert_same_bits(actual, wanted)
