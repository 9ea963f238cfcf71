"""The family ``row_optimizer`` equals dense optimizers, however stale rows are; rounding, threads, autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from calls import among_columns, assert_same_bits, call
from devices import KERNELS
from optim.dense_optimizers import Dense
from pairs import in_pairs
from samples.row_optimizer import (
    IDLE_RULES,
    ROW_STATES,
    RULES,
    by_name,
    last_steps_for,
    ruled,
    states_for,
    update_sample,
)
from samples.sample import Random
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.row_optimizer import states_of

Hyperparameters = list[float]


class Table:
    """A table that is updated row by row, and can be read at any time."""

    def __init__(self, rule: int, h: Hyperparameters, weight: Tensor, steps: int) -> None:
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.rule, self.weight = rule, weight.clone()
        rows, dim = weight.shape
        shapes = [(rows,) if ROW_STATES.get(rule) == s else (rows, dim) for s in range(states_of(rule, h))]
        self.states = [torch.zeros(shape, dtype=wide) for shape in shapes]
        self.last, self.history, self.steps = torch.zeros(rows, dtype=torch.int32), ops.new_history(steps), 0

    def step(self, rows: Tensor, values: Tensor, h: Hyperparameters) -> None:
        self.steps += 1
        given = {"rule": self.rule, "hyperparameters": h, "step": self.steps}
        ops.row_optimizer_update_([self.weight], self.states, [self.last], self.history, [rows], [values], **given)
        ops.row_optimizer_advance_(self.history, **given)
        self.h = h

    def current(self, rows: Tensor | None = None) -> Tensor:
        rows = torch.arange(self.weight.shape[0]) if rows is None else rows
        given = {"rule": self.rule, "hyperparameters": self.h, "step": self.steps}
        return ops.row_optimizer_current(self.weight, self.states, self.last, self.history, rows, **given)

    def flush(self) -> None:
        given = {"rule": self.rule, "hyperparameters": self.h, "step": self.steps}
        ops.row_optimizer_make_current_([self.weight], self.states, [self.last], self.history, **given)


# ---- Equal to dense optimizers --------------------------------------------------------------------------------------

# Usual hyperparameters, and hard ones: slow first moments, second moments that decay faster than the first, complex
# eigenvalues, an eps that matters.
TRAINED: dict[str, tuple[int, Hyperparameters]] = {
    "sgd_decay": ruled("sgd", lr=1e-2, weight_decay=1e-2),
    "momentum": ruled("sgd", lr=1e-2, momentum=0.9),
    "dampening": ruled("sgd", lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=1e-3),
    "nesterov": ruled("sgd", lr=1e-2, momentum=0.9, nesterov=1.0, weight_decay=1e-2),
    "complex_eigenvalues": ruled("sgd", lr=1.0, momentum=0.9, weight_decay=1e-2),
    "complex_nesterov": ruled("sgd", lr=1.0, momentum=0.9, nesterov=1.0, weight_decay=1e-2),
    "adam": ruled("adam", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8),
    "adamw": ruled("adam", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, decoupled=1.0),
    "adam_slow": ruled("adam", lr=1e-3, beta1=0.99, beta2=0.999, eps=1e-8),
    "adam_fast_second": ruled("adam", lr=1e-3, beta1=0.9, beta2=0.9, eps=1e-8),
    "adam_no_first": ruled("adam", lr=1e-3, beta2=0.999, eps=1e-8),
    "adam_eps": ruled("adam", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-2),
    "adam_tensorflow": ruled("adam", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-2, tensorflow_eps=1.0),
    "amsgrad_tensorflow": ruled(
        "amsgrad", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-2, weight_decay=1e-2, decoupled=1.0, tensorflow_eps=1.0
    ),
    "amsgrad": ruled("amsgrad", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8),
    "amsgradw": ruled("amsgrad", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2, decoupled=1.0),
    "partial_rowwise_adam": ruled("partial_rowwise_adam", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2),
    "rmsprop": ruled("rmsprop", lr=1e-3, alpha=0.99, eps=1e-8),
    "rmsprop_momentum": ruled("rmsprop", lr=1e-3, alpha=0.99, eps=1e-8, momentum=0.9),
    "rmsprop_centered": ruled("rmsprop", lr=1e-3, alpha=0.99, eps=1e-6, momentum=0.9, centered=1.0),
    "adadelta": ruled("adadelta", lr=1.0, rho=0.9, eps=1e-6),
    "lion": ruled("lion", lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=1e-2),
    "lion_fast": ruled("lion", lr=1e-3, beta1=0.5, beta2=0.75),
    "lion_no_first": ruled("lion", lr=1e-3, beta2=0.99),
    "lion_no_second": ruled("lion", lr=1e-3, beta1=0.9),
}


def _scheduled(rule: int, h: Hyperparameters, step: int, last: int) -> Hyperparameters:
    """Return a step's hyperparameters: the learning rate warms up and swings, and Adam's beta1 changes half way."""
    now = by_name(rule, h)
    now["lr"] *= min(step / 10, 1) * (1 + 0.5 * math.sin(step / 7))
    if now.get("beta1") == 0.9 and 2 * step > last:
        now["beta1"] = 0.85
    return [*now.values()]


def _zero_states(rule: int, h: Hyperparameters, weight: Tensor) -> list[Tensor]:
    rows = weight.shape[0]
    return [
        torch.zeros(rows if ROW_STATES.get(rule) == s else weight.shape, dtype=weight.dtype)
        for s in range(states_of(rule, h))
    ]


def _train(rule: int, h: Hyperparameters, plan: Sequence[Sequence[int]], dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """
    Train for as many steps as ``plan`` has lists; each list names the rows of a step.

    Returns:
        The rows, up to date, now and then and in the end: of the table, and of dense optimizers in float64 and float32.
    """
    random = Random(len(plan))
    rows = max(row for rows in plan for row in rows) + 1
    weight = random.floats(rows, dim, dtype=torch.float32)
    table = Table(rule, h, weight, len(plan))
    dense = [Dense(rule, x, _zero_states(rule, h, x)) for x in (weight.double(), weight)]
    seen: list[list[Tensor]] = [[], [], []]
    for step, ids in enumerate(plan, start=1):
        now = _scheduled(rule, h, step, len(plan))
        named = torch.tensor(ids, dtype=torch.int64)
        values = random.floats(len(ids), dim, dtype=torch.float32)
        table.step(named, values, now)
        for each in dense:
            each.step(torch.zeros(rows, dim).index_add_(0, named, values), now)
        if step in (len(plan) // 3, len(plan)):
            for found, x in zip(seen, (table.current(), dense[0].weight, dense[1].weight), strict=True):
                found.append(x.double())
    read = table.current()
    table.flush()
    assert_same_bits(read, table.weight)
    return tuple(torch.stack(x) for x in seen)


def _with_gaps(rows: int, steps: int, seed: int) -> list[list[int]]:
    """Return a plan: row r is named about every 3 ** (r % 7) steps, and the last rows only at first and in the end."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(steps, rows, generator=generator)
    rates = 3.0 ** -(torch.arange(rows) % 7)
    named = draws < rates
    named[:, -3:] = False
    named[:3, -3:] = named[-1, -3:] = True
    return [x.nonzero().flatten().tolist() for x in named]


@pytest.mark.parametrize("rule", TRAINED)
def test_equals_the_dense_optimizer(rule: str) -> None:
    """Allow 1.5 times the error of float32, for gaps from 0 to 1,200 steps."""
    ours, exact, float32 = _train(*TRAINED[rule], _with_gaps(60, 1200, seed=1), dim=8)
    for place in (0, 1):
        error, allowed = (ours - exact)[place].abs(), (float32 - exact)[place].abs()
        assert error.max() <= 1.5 * allowed.max()
        assert error.square().mean() <= 1.5**2 * allowed.square().mean()


@pytest.mark.parametrize("gap", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("rule", ["momentum", "complex_eigenvalues", "adam", "adamw", "amsgrad", "rmsprop_centered"])
def test_one_gap(rule: str, gap: int) -> None:
    """Update all rows at two steps and none in between, from early in training and from later on."""
    for before in (1, 200) if gap < 1000 else (1,):
        everything = list(range(20))
        plan = [everything] * before + [[0]] * gap + [everything]
        ours, exact, float32 = _train(*TRAINED[rule], plan, dim=4)
        error, allowed = (ours - exact)[1].abs().max(), (float32 - exact)[1].abs().max()
        assert error <= max(1.5 * allowed, 2e-7 * exact.abs().max())


def _replayed(w: float, m: float, v: float, h: Hyperparameters, steps: int, start: int) -> float:
    """Take AdamW's steps without gradient one by one, and return the weight."""
    lr, beta1, beta2, eps, decay, *_ = h
    for step in range(start + 1, start + steps + 1):
        m, v = beta1 * m, beta2 * v
        root = math.sqrt(v) / math.sqrt(1 - beta2**step)
        w = w * (1 - lr * decay) - lr / (1 - beta1**step) * m / (root + eps)
    return w


@pytest.mark.parametrize("start", [0, 1, 40])
@pytest.mark.parametrize("steps", [1, 1023, 1024, 1025, 65_000])
def test_very_long_idleness(steps: int, start: int) -> None:
    """Flush rows whose second moments have roots from 1e-1 to 1e-11, in float32 and float64."""
    rule, h = TRAINED["adamw"]
    roots = torch.tensor([[10.0**-k for k in range(1, 12)]], dtype=torch.float64)
    history = ops.new_history(steps)
    given = {"rule": rule, "hyperparameters": h, "base": start}
    for step in range(start + 1, start + steps + 1):
        ops.row_optimizer_advance_(history, step=step, **given)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 3e-7)):
        weight = torch.full_like(roots, 0.5, dtype=dtype)
        # The first and second moments that come with such roots.
        states = [(roots * 0.7).to(dtype), (roots**2).to(dtype)]
        last = torch.zeros(1, dtype=torch.int32)
        rows = torch.zeros(1, dtype=torch.int64)
        actual = ops.row_optimizer_current(weight, states, last, history, rows, step=start + steps, **given)
        m, v = (x[0].tolist() for x in states)
        replayed = [_replayed(0.5, m[k], v[k], h, steps, start) for k in range(roots.shape[1])]
        wanted = torch.tensor(replayed, dtype=torch.float64)
        torch.testing.assert_close(actual[0].double(), wanted, rtol=tolerance, atol=tolerance)


def test_a_new_base_changes_nothing() -> None:
    """Flush all rows, and begin the history there."""
    rule, h = TRAINED["adamw"]
    random = Random(3)
    weight = random.floats(6, 3, dtype=torch.float64)
    tables = [Table(rule, h, weight, 40) for _ in range(2)]
    values = random.floats(1, 3, dtype=torch.float64)
    for step in range(1, 41):
        for restarts, table in enumerate(tables):
            base = 17 if restarts and step > 17 else 0
            given = {"rule": rule, "hyperparameters": h, "step": step, "base": base}
            rows = [torch.tensor([step * step % 6])]
            tensors = ([table.weight], table.states, [table.last])
            ops.row_optimizer_update_(*tensors, table.history, rows, [values], **given)
            ops.row_optimizer_advance_(table.history, **given)
            if restarts and step == 17:
                ops.row_optimizer_make_current_(*tensors, table.history, **given)
                table.last.zero_()
                table.history.zero_()
    results = []
    for restarts, table in enumerate(tables):
        given = {"rule": rule, "hyperparameters": h, "step": 40, "base": 17 * restarts}
        rows = torch.arange(6)
        results.append(ops.row_optimizer_current(table.weight, table.states, table.last, table.history, rows, **given))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_more_room_for_history() -> None:
    rule, h = TRAINED["adam"]
    small, large = ops.new_history(8), ops.new_history(20)
    for step in range(1, 9):
        ops.row_optimizer_advance_(small, rule=rule, hyperparameters=h, step=step)
    large[:16] = small
    for step in range(9, 21):
        ops.row_optimizer_advance_(large, rule=rule, hyperparameters=h, step=step)
    at_once = ops.new_history(20)
    for step in range(1, 21):
        ops.row_optimizer_advance_(at_once, rule=rule, hyperparameters=h, step=step)
    assert_same_bits(large, at_once)


_COUPLED = {
    "adagrad": ruled("adagrad", lr=1e-2, lr_decay=1e-3, eps=1e-8, weight_decay=1e-2),
    "coupled_adam": ruled("adam", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2),
    "coupled_amsgrad": ruled("amsgrad", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2),
    "coupled_rmsprop": ruled("rmsprop", lr=1e-3, alpha=0.99, eps=1e-8, weight_decay=1e-2, momentum=0.9),
    "coupled_adadelta": ruled("adadelta", lr=1.0, rho=0.9, eps=1e-6, weight_decay=1e-2),
}


@pytest.mark.parametrize("rule", [*_COUPLED, "nesterov", "dampening", "adamw", "amsgrad", "rmsprop_centered"])
def test_all_rows_are_a_dense_optimizer(rule: str) -> None:
    number, h = (TRAINED | _COUPLED)[rule]
    random = Random(8)
    weight = random.floats(7, 5, dtype=torch.float64)
    states = [torch.zeros(7, 5, dtype=torch.float64) for _ in range(states_of(number, h))]
    dense, ours = Dense(number, weight.clone(), states), weight.clone()
    for step in range(1, 30):
        grad = random.floats(7, 5, dtype=torch.float64)
        dense.step(grad, h)
        given = {"rule": number, "hyperparameters": h, "step": step}
        ops.row_optimizer_update_([ours], states, [], None, None, [grad], **given)
    torch.testing.assert_close(ours, dense.weight, rtol=1e-12, atol=1e-12)


# ---- Rounding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_half_types_are_rounded_once(rule: str, dtype: torch.dtype) -> None:
    """Flush and update in float32, and round the result once to the nearest number."""
    sample = update_sample("", rule, ((9, 70),), dtype=dtype, seed=5)
    wide = sample.arguments
    narrow = call(sample)
    widened = call(type(sample)(sample.operator, "", ([x.float() for x in wide[0]], *wide[1:])))
    assert_same_bits(narrow[0], widened[0].to(dtype))
    for x, y in zip(narrow[1:], widened[1:], strict=True):
        assert_same_bits(x, y)


def _by_chance(weight: Tensor, moves: Tensor, seed: int, step: int = 1, rows: Tensor | None = None) -> Tensor:
    """Return ``weight - moves``, rounded stochastically."""
    result = weight.clone()
    given = {"rule": 0, "hyperparameters": [1.0, 0.0, 0.0, 0.0, 0.0], "step": step, "rounding_seeds": [seed]}
    named = None if rows is None else [rows]
    ops.row_optimizer_update_([result], [], [], None, named, [moves], **given)
    return result


@in_pairs(
    value=[1.0, -1.5, 3e-5, 2.0**-23, -1.5 * 2.0**-14, 60000.0], dtype=[torch.float16, torch.bfloat16], kernels=KERNELS
)
def test_rounding_by_chance_is_right_on_average(value: float, dtype: torch.dtype, kernels: str) -> None:
    """Round normal and subnormal numbers of both signs; a third of the way to the next number."""
    count = 4000
    weight = torch.full((count // 50, 50), value, dtype=dtype)
    exponent = max(math.floor(math.log2(abs(value))), -14 if dtype == torch.float16 else -126)
    spacing = 2.0 ** (exponent - (10 if dtype == torch.float16 else 7))
    start = float(weight[0, 0])
    result = _by_chance(weight, torch.full(weight.shape, -spacing / 3), seed=9).double()
    up = (result - start) / spacing
    assert set(up.flatten().tolist()) == {0.0, 1.0}
    assert abs(up.mean() - 1 / 3) < 4 * math.sqrt(2 / 9 / count)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_by_chance_depends_on_seed_step_row_and_column(dtype: torch.dtype, kernels: str) -> None:
    weight, moves = torch.ones(6, 40, dtype=dtype), torch.full((6, 40), 2.0**-12)
    first = _by_chance(weight, moves, seed=1)
    assert_same_bits(_by_chance(weight, moves, seed=1), first)
    rows = torch.tensor([1, 4])
    assert_same_bits(_by_chance(weight, moves[rows], seed=1, rows=rows)[rows], first[rows])
    for other in (_by_chance(weight, moves, seed=2), _by_chance(weight, moves, seed=1, step=2)):
        assert not torch.equal(other, first)
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[:, 0], first[:, 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_by_chance_keeps_what_is_exact(dtype: torch.dtype, kernels: str) -> None:
    numbers = [0.0, -0.0, 1.5, -3.25, 2.0**-20, 256.0, torch.inf, -torch.inf, torch.nan]
    weight = torch.tensor([numbers], dtype=dtype)
    assert_same_bits(_by_chance(weight, torch.zeros(1, len(numbers)), seed=3), weight)


# ---- Gradients and rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_scale_and_direction_belong_to_the_gradient(rule: str, kernels: str) -> None:
    sample = update_sample("", rule)
    place = {x.name: i for i, x in enumerate(torch.ops.torchsparse_rec.row_optimizer_update_.default._schema.arguments)}

    def changed(**given: object) -> tuple[Tensor, ...]:
        arguments = list(sample.arguments)
        for name, x in given.items():
            arguments[place[name]] = x
        return call(type(sample)(sample.operator, "", tuple(arguments)))

    values = sample.arguments[place["values"]]
    wanted = changed(values=[-0.25 * x for x in values])
    for x, y in zip(changed(grad_scale=torch.tensor(0.25), maximize=True), wanted, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize("rule", RULES)
def test_other_rows_keep_their_bits(rule: str, kernels: str) -> None:
    sample = update_sample("", rule)
    rows = sample.arguments[4][0]
    others = torch.ones(7, dtype=torch.bool).index_fill(0, rows, False)
    assert others.any()
    weights, states, last = sample.arguments[:3]
    for before, after in zip((*weights, *states, *last), call(sample), strict=True):
        assert_same_bits(after[others], before[others])
        assert not torch.equal(after[rows], before[rows])


@in_pairs(rule=RULES, dim=[3, 200], kernels=KERNELS)
def test_a_gradient_of_zeros_leaves_its_row_alone(rule: str, dim: int, kernels: str) -> None:
    """Leave named rows and their states alone, if none is stale. NaN is no zero, nor is one column among many."""
    sample = update_sample("", rule, ((9, dim),), catch_up=False)
    rows, values = torch.tensor([0, 2, 3, 5, 8]), torch.zeros(5, dim)
    values[1] *= -1
    values[2, -1], values[3, 0], values[4] = 0.5, torch.nan, 0.5
    arguments = (*sample.arguments[:4], [rows], [values], *sample.arguments[6:])
    after = call(type(sample)(sample.operator, "", arguments))
    for before, x in zip((*sample.arguments[0], *sample.arguments[1]), after, strict=True):
        assert_same_bits(x[[0, 1, 2, 4, 6, 7]], before[[0, 1, 2, 4, 6, 7]])
        assert not any(torch.equal(x[row], before[row]) for row in (3, 5, 8))


@pytest.mark.parametrize("rule", ["momentum", "adamw", "lamb"])
def test_a_step_of_all_rows_steps_zeros_too(rule: str, kernels: str) -> None:
    sample = update_sample("", rule, all_rows=True, catch_up=False, zeros=True)
    for before, after in zip((*sample.arguments[0], *sample.arguments[1]), call(sample), strict=True):
        assert not any(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rule", IDLE_RULES)
def test_a_table_stepped_whole_has_the_bits_of_a_step_of_all_rows(rule: str, dtype: torch.dtype) -> None:
    """Of three tables the second has one row too many, and the last no row that is named."""
    shapes = ((10, 5), (11, 5), (3, 5))
    sample = update_sample("", rule, shapes, dtype=dtype)
    weights, states, last, history, *_ = sample.arguments
    rows = [torch.tensor([2, 9]), torch.tensor([0, 10]), torch.tensor([], dtype=torch.int64)]
    values = [torch.full((len(row), 5), 0.5).to(states[0].dtype if states else dtype) for row in rows]
    given = (weights, states, last, history, rows, values, *sample.arguments[6:], [5, 5, 5])
    each = len(states) // 3
    after = call(type(sample)(sample.operator, "", given))
    tables, of_states, lasts = after[:3], after[3:-3], after[-3:]
    for k in range(3):
        is_whole = k == 0
        its = [weights[k]], states[k * each : (k + 1) * each], [last[k]], history
        everything = torch.zeros(shapes[k]).to(values[k].dtype).index_copy_(0, rows[k], values[k])
        named = ([], [everything]) if is_whole else ([rows[k]], [values[k]])
        expected = call(type(sample)(sample.operator, "", (*its, *named, *sample.arguments[6:])))
        actual = (tables[k], *of_states[k * each : (k + 1) * each], lasts[k])
        for x, y in zip(actual, expected, strict=True):
            assert_same_bits(x, y)
        assert bool((lasts[k] == sample.arguments[9] - sample.arguments[10]).all()) == is_whole


@in_pairs(rule=RULES, bad=[torch.nan, torch.inf], kernels=KERNELS)
def test_a_gradient_without_sense_stays_in_its_row(rule: str, bad: float, kernels: str) -> None:
    sample = update_sample("", rule, ((5, 6),), all_rows=True, catch_up=False)
    clean = call(sample)
    values = sample.arguments[5][0].clone()
    values[3, 2] = bad
    arguments = (*sample.arguments[:5], [values], *sample.arguments[6:])
    others = [0, 1, 2, 4]
    for spoilt, same in zip(call(type(sample)(sample.operator, "", arguments)), clean, strict=True):
        assert_same_bits(spoilt[others], same[others])


@pytest.mark.parametrize("layout", [among_columns, lambda x: x.repeat_interleave(2, 0)[::2]])
def test_written_rows_may_be_any_distance_apart(layout: Callable[[Tensor], Tensor], kernels: str) -> None:
    sample = update_sample("", "adamw", ((7, 8),))
    weights, states, last, *rest = (x if not isinstance(x, list) else list(x) for x in sample.arguments)
    spread = [layout(x) for x in (*weights, *states)]
    torch.ops.torchsparse_rec.row_optimizer_update_.default(spread[:1], spread[1:], [last[0].clone()], *rest)
    for actual, wanted in zip(spread, call(sample), strict=False):
        assert_same_bits(actual.contiguous(), wanted)


def test_states_may_lie_beside_the_weight(kernels: str) -> None:
    sample = update_sample("", "adamw", ((7, 8),))
    weights, states, last, *rest = sample.arguments
    together = torch.cat([*weights, *states], dim=1)
    weight, *others = together.split(8, dim=1)
    torch.ops.torchsparse_rec.row_optimizer_update_.default([weight], others, [last[0].clone()], *rest)
    for actual, wanted in zip((weight, *others), call(sample), strict=False):
        assert_same_bits(actual.contiguous(), wanted)


# ---- Threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_row_moves_by_its_own_values(dtype: torch.dtype, kernels: str) -> None:
    """Update by whole numbers at a learning rate of 1, in tables of many rows and of few."""
    tables = [torch.zeros(n, dim, dtype=dtype) for n, dim in ((1500, 3), (5, 2), (700, 8))]
    rows = [torch.arange(0, len(table), 2) for table in tables]
    values = [(3 * x[:, None] + torch.arange(table.shape[1])) % 127 for table, x in zip(tables, rows, strict=True)]
    ops.row_optimizer_update_(
        tables, [], [], None, rows, [x.to(dtype) for x in values], rule=0, hyperparameters=[1.0, 0, 0, 0, 0], step=1
    )
    for table, its_rows, its_values in zip(tables, rows, values, strict=True):
        assert torch.equal(table, torch.zeros_like(table).index_copy(0, its_rows, -its_values.to(dtype)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["momentum", "adamw", "lamb"])
def test_threads_do_not_change_the_bits(rule: str, dtype: torch.dtype, restore_threads: None) -> None:
    """Update two large tables and a small one, whose rows are stale by few steps and by many."""
    random = Random(4)
    number, h = RULES[rule]
    sizes, steps = ((3000, 40), (5, 3), (2000, 67)), 1500
    history = None
    if rule in IDLE_RULES:
        history = ops.new_history(steps)
        for step in range(1, steps + 1):
            ops.row_optimizer_advance_(history, rule=number, hyperparameters=h, step=step)
    weights = [random.floats(*size, dtype=dtype) for size in sizes]
    states = [x for size in sizes for x in states_for(random, number, h, *size, dtype)]
    last = [last_steps_for(random, rows, steps) for rows, _ in sizes] if history is not None else []
    rows = [torch.arange(0, n, 2) for n, _ in sizes]
    values = [random.floats(x.shape[0], dim, dtype=torch.float32) for x, (_, dim) in zip(rows, sizes, strict=True)]
    seeds = [1, 2, 3] if dtype == torch.bfloat16 else []
    results = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        tensors = [[x.clone() for x in group] for group in (weights, states, last)]
        given = {"rule": number, "hyperparameters": h, "rounding_seeds": seeds}
        ops.row_optimizer_update_(*tensors, history, rows, values, step=steps + 1, **given)
        ops.row_optimizer_make_current_(*tensors, history, step=steps, **given)
        results.append([x for group in tensors for x in group])
    for other in results[1:]:
        for x, y in zip(other, results[0], strict=True):
            assert_same_bits(x, y)
