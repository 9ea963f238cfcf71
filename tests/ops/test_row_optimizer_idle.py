"""Flushing stale rows of the family ``row_optimizer``: hyperparameters at their bounds, gaps of every length."""

from __future__ import annotations

import math

import pytest
import torch
from calls import assert_same_bits
from optim.dense_optimizers import Dense
from samples.row_optimizer import ROW_STATES, ruled
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.row_optimizer import states_of

_UNUSUAL = {"beta1": {"beta1": 0.0}, "lr": {"lr": 0.0}, "forgetful": {"beta1": 0.5, "beta2": 0.6}}


@pytest.mark.parametrize("name", ["adam", "amsgrad", "partial_rowwise_adam"])
@pytest.mark.parametrize("changed", _UNUSUAL.values(), ids=_UNUSUAL)
def test_idleness_without_eps(name: str, changed: dict[str, float], kernels: str) -> None:
    """Divide by the second moment alone: in a gap that moves nothing, and in one that float32 cannot hold."""
    values = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99} | changed
    lr, beta1, beta2 = values.values()
    rule, h = ruled(name, **values)
    steps = 400
    history = ops.new_history(steps)
    for step in range(1, steps + 1):
        ops.row_optimizer_advance_(history, rule=rule, hyperparameters=h, step=step)
    weight, last = torch.full((steps, 1), 0.5), torch.arange(steps, dtype=torch.int32)
    states = [torch.full((steps, 1), 0.25), *(torch.ones(steps, 1) for _ in range(states_of(rule, h) - 1))]
    if name == "partial_rowwise_adam":
        states[1] = states[1][:, 0]
    given = {"rule": rule, "hyperparameters": h, "step": steps}
    actual = ops.row_optimizer_current(weight, states, last, history, torch.arange(steps), **given)
    wanted = []
    for row in range(steps):
        # AMSGrad's largest second moment does not shrink.
        shrinks = 1.0 if name == "amsgrad" else beta2
        w, m, root = 0.5, 0.25, 1.0
        for step in range(row + 1, steps + 1):
            m, root = beta1 * m, math.sqrt(shrinks) * root
            w -= lr / (1 - beta1**step) * m / (root / math.sqrt(1 - beta2**step))
        wanted.append(w)
    torch.testing.assert_close(actual[:, 0].double(), torch.tensor(wanted, dtype=torch.float64), rtol=3e-7, atol=0)


def test_a_gap_does_not_depend_on_the_call() -> None:
    """Flush rows one by one and all together, with gaps that are kept in a list and gaps that are not."""
    rule, h = ruled("adam", lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8)
    steps = 1100
    history = ops.new_history(steps)
    for step in range(1, steps + 1):
        ops.row_optimizer_advance_(history, rule=rule, hyperparameters=h, step=step)
    rows = torch.randperm(steps + 1, generator=torch.Generator().manual_seed(0))
    weight, states = torch.full((steps + 1, 2), 0.5), [torch.full((steps + 1, 2), 0.25) for _ in range(2)]
    last = torch.arange(steps + 1, dtype=torch.int32)

    def current(rows: Tensor) -> Tensor:
        given = {"rule": rule, "hyperparameters": h, "step": steps}
        return ops.row_optimizer_current(weight, states, last, history, rows, **given)

    assert_same_bits(torch.cat([current(row) for row in rows.split(1)]), current(rows))


# Rules whose second moments decay to nothing within a gap of the test.
OVERFLOWING = {
    "adam": ruled("adam", lr=0.01, beta1=0.5, beta2=0.5, eps=1e-8),
    "adamw": ruled("adam", lr=0.01, beta1=0.5, beta2=0.5, eps=1e-8, weight_decay=0.1, decoupled=1.0),
    "amsgrad": ruled("amsgrad", lr=0.01, beta1=0.5, beta2=0.5, eps=1e-8),
    "partial_rowwise_adam": ruled("partial_rowwise_adam", lr=0.01, beta1=0.5, beta2=0.5, eps=1e-8, weight_decay=0.1),
    "rmsprop": ruled("rmsprop", lr=0.01, alpha=0.5, eps=1e-8, momentum=0.5),
    "rmsprop_centered": ruled("rmsprop", lr=0.01, alpha=0.9, eps=1e-8, centered=1.0),
    "adadelta": ruled("adadelta", lr=1.0, rho=0.5, eps=1e-6),
}


@pytest.mark.parametrize("gap", [1, 3, 200])
@pytest.mark.parametrize("rule", OVERFLOWING)
def test_an_overflowed_second_moment_moves_nothing(rule: str, gap: int, kernels: str) -> None:
    """Keep the moment infinite, as step by step, also if its factor is too small for float32; weights stay finite."""
    number, h = OVERFLOWING[rule]
    weight, last = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.zeros(2, dtype=torch.int32)
    states = [torch.zeros(2, 3) for _ in range(states_of(number, h))]
    if number in ROW_STATES:
        states[1] = torch.zeros(2)
    dense, history = Dense(number, weight.clone(), [x.clone() for x in states]), ops.new_history(gap + 2)
    everything, ones = torch.tensor([0, 1]), torch.ones(2, 3)
    overflows = torch.tensor([[1e20, 1.0, -2.0], [1.0, 1.0, 1.0]])
    plan = [(everything, overflows), *[(everything[1:], ones[1:])] * gap, (everything, ones)]
    for step, (rows, values) in enumerate(plan, start=1):
        given = {"rule": number, "hyperparameters": h, "step": step}
        ops.row_optimizer_update_([weight], states, [last], history, [rows], [values], **given)
        ops.row_optimizer_advance_(history, **given)
        dense.step(torch.zeros(2, 3).index_copy(0, rows, values), h)
        if step > gap:
            current = ops.row_optimizer_current(weight, states, last, history, everything, **given)
            assert torch.isfinite(dense.weight).all() and any(torch.isinf(x).any() for x in states)
            torch.testing.assert_close(current, dense.weight, rtol=1e-5, atol=1e-6)


def test_deviations_from_an_average_whose_square_overflows_too(kernels: str) -> None:
    """Use centered RMSprop: the average of squares is infinite, and the square of the average would be."""
    weight, last = torch.tensor([[1.0, 2.0]]), torch.zeros(1, dtype=torch.int32)
    states, history = [torch.zeros(1, 2) for _ in range(2)], ops.new_history(2)
    rule, h = ruled("rmsprop", lr=0.01, alpha=0.9, eps=1e-8, centered=1.0)
    for step, values in enumerate(([1e30, -1e30], [1.0, 1.0]), start=1):
        given = {"rule": rule, "hyperparameters": h, "step": step}
        ops.row_optimizer_update_(
            [weight], states, [last], history, [torch.tensor([0])], [torch.tensor([values])], **given
        )
        ops.row_optimizer_advance_(history, **given)
        assert weight.tolist() == [[1.0, 2.0]] and torch.isinf(states[0]).all() and torch.isfinite(states[1]).all()


@pytest.mark.parametrize("gap", [1, 2, 7])
def test_an_infinite_momentum_stays_infinite(gap: int, kernels: str) -> None:
    """Move the weight into its infinity, where nothing pulls it back."""
    rule, h = ruled("sgd", lr=0.1, momentum=0.9)
    given, history = {"rule": rule, "hyperparameters": h, "base": 1}, ops.new_history(gap)
    for step in range(2, gap + 2):  # step 1 fills the momentum buffer
        ops.row_optimizer_advance_(history, step=step, **given)
    weight, buffer = torch.tensor([[1.0, 1.0, -torch.inf]]), torch.tensor([[torch.inf, -torch.inf, torch.inf]])
    last = torch.zeros(1, dtype=torch.int32)
    ops.row_optimizer_make_current_([weight], [buffer], [last], history, step=gap + 1, **given)
    assert weight.tolist() == [[-torch.inf, torch.inf, -torch.inf]]
    assert buffer.tolist() == [[torch.inf, -torch.inf, torch.inf]]


@pytest.mark.parametrize("rule", ["adam", "partial_rowwise_adam", "rmsprop", "adadelta"])
def test_a_thousand_fadings_of_one_row(rule: str, kernels: str) -> None:
    """Flush after every step, as a lookup of everything does: the error of a rounded factor must not add up."""
    number, h = OVERFLOWING[rule]
    h = [0.999 if x == 0.5 else x for x in h]
    steps = 1000
    history, weight, last = ops.new_history(steps), torch.zeros(1, 1), torch.zeros(1, dtype=torch.int32)
    states = [torch.full((1, 1), 0.7) for _ in range(states_of(number, h))]
    if number in ROW_STATES:
        states[1] = states[1][:, 0].clone()
    for step in range(1, steps + 1):
        given = {"rule": number, "hyperparameters": h, "step": step}
        ops.row_optimizer_advance_(history, **given)
        ops.row_optimizer_make_current_([weight], states, [last], history, **given)
    square = states[1 if "adam" in rule else 0]
    torch.testing.assert_close(
        square.double().flatten(), torch.tensor([0.7 * 0.999**steps]).double(), rtol=3e-6, atol=0
    )


@pytest.mark.parametrize("beta2", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("beta1", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lion_moves_by_a_sign_that_does_not_fade(beta1: float, beta2: float, dtype: torch.dtype, kernels: str) -> None:
    """
    Move a row for long by averages that no number of the dtype holds any more, flushed often and seldom.

    Compare with steps of all rows, and with the formula as it is in real numbers, where an average never becomes 0.
    """
    steps, gap = 3_000 if kernels == "cpu" else 200, 37
    rule, h = ruled("lion", lr=1e-3, beta1=beta1, beta2=beta2, weight_decay=0.01)
    average = torch.tensor([[1.0, -2.0, 0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-30]], dtype=dtype)
    tables = [[torch.ones(1, 8, dtype=dtype), average.clone(), torch.zeros(1, dtype=torch.int32)] for _ in range(3)]
    history, nothing = ops.new_history(steps), torch.zeros(1, 8, dtype=dtype)
    for step in range(1, steps + 1):
        given = {"rule": rule, "hyperparameters": h, "step": step}
        ops.row_optimizer_advance_(history, **given)
        if step % gap == 0:
            weight, state, last = tables[1]
            ops.row_optimizer_make_current_([weight], [state], [last], history, **given)
        weight, state, _ = tables[2]
        ops.row_optimizer_update_([weight], [state], [], None, None, [nothing], **given)
    for weight, state, last in tables[:2]:
        ops.row_optimizer_make_current_([weight], [state], [last], history, **given)
    moving = steps if beta1 and beta2 else 1 if beta1 else 0
    kept = 1 - 1e-3 * 0.01
    signs = torch.sign(average.double())
    wanted = kept**steps - signs * 1e-3 * sum(kept ** (steps - 1 - k) for k in range(moving))
    for weight, state, _ in tables:
        tolerance = 1e-12 if dtype == torch.float64 else 2e-3 if weight is tables[2][0] else 2e-4
        torch.testing.assert_close(weight.double(), wanted, rtol=tolerance, atol=tolerance)
        if beta2:
            assert torch.equal(torch.sign(state), signs.to(dtype))
            least = max(3 * beta2**steps, torch.finfo(dtype).tiny)
            assert state[0, 3:5].isinf().all()
            assert (state[0, [0, 1, 6, 7]].abs() <= least).all()
        else:
            assert state[0, [0, 1, 2, 6, 7]].tolist() == [0.0] * 5 and state[0, 3:5].isnan().all()
        assert state[0, 5].isnan()
