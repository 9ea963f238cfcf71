"""What rows of the family ``row_optimizer`` have missed: hyperparameters at their bounds, gaps of every length."""

from __future__ import annotations

import math

import pytest
import torch
from calls import assert_same_bits
from torch import Tensor

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.row_optimizer import states_of


@pytest.mark.parametrize("rule", [3, 4, 5])
@pytest.mark.parametrize("changed", [{1: 0.0}, {0: 0.0}, {1: 0.5, 2: 0.6}], ids=["beta1", "lr", "forgetful"])
def test_idleness_without_eps(rule: int, changed: dict[int, float], kernels: str) -> None:
    """Nothing but the second moment to divide by: a gap that moves nothing, and one that float32 cannot hold."""
    h = [0.01, 0.9, 0.99, 0.0, 0.0, 1.0, 0.0][: 5 if rule == 5 else 7]
    for place, value in changed.items():
        h[place] = value
    steps = 400
    history = ops.new_history(steps)
    for step in range(1, steps + 1):
        ops.row_optimizer_advance_(history, rule=rule, hyperparameters=h, step=step)
    weight, last = torch.full((steps, 1), 0.5), torch.arange(steps, dtype=torch.int32)
    states = [torch.full((steps, 1), 0.25), *(torch.ones(steps, 1) for _ in range(states_of(rule, h) - 1))]
    if rule == 5:
        states[1] = states[1][:, 0]
    given = {"rule": rule, "hyperparameters": h, "step": steps}
    actual = ops.row_optimizer_current(weight, states, last, history, torch.arange(steps), **given)
    wanted = []
    for row in range(steps):
        # The largest second moment does not shrink.
        beta2 = 1.0 if rule == 4 else h[2]
        w, m, root = 0.5, 0.25, 1.0
        for step in range(row + 1, steps + 1):
            m, root = h[1] * m, math.sqrt(beta2) * root
            w -= h[0] / (1 - h[1] ** step) * m / (root / math.sqrt(1 - h[2] ** step))
        wanted.append(w)
    torch.testing.assert_close(actual[:, 0].double(), torch.tensor(wanted, dtype=torch.float64), rtol=3e-7, atol=0)


def test_a_gap_does_not_depend_on_the_call() -> None:
    """Rows one by one and all together, with gaps that are kept in a list and gaps that are not."""
    rule, h = 3, [1e-3, 0.9, 0.999, 1e-8, 0.0, 0.0, 0.0]
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
