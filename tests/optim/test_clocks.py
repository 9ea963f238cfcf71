"""Idle rows, frozen periods, schedules and whatever else comes between a table's steps."""

from functools import partial

import pytest
import torch
from optim.cases import (
    BY_NAME,
    ROWS,
    batches,
    both,
    current_rows,
    dense_results,
    distance,
    error_of,
    initial,
    one_of_each,
    owned_table,
    set_gradient,
    step,
    train,
)

from torchsparse_rec import optim
from torchsparse_rec.tables import clock as _clock
from torchsparse_rec.tables.table import table_of

LATER = ["sgd-momentum", "sgd-nesterov-decay", "adam", "amsgrad", "adamw", "partial-rowwise-adam-decay"]
# RMSprop divides by small roots: its errors are larger.
LATER = [name for name in one_of_each(LATER, "weight") if BY_NAME[name].kind != "RMSprop"]
EVERYTHING = torch.arange(ROWS)


@pytest.mark.parametrize("name", LATER)
def test_tables_that_step_at_times(name):
    case = BY_NAME[name]
    ours, mine, theirs, reference = both(partial(case.ours, lr=0.02), partial(case.dense, lr=0.02), tables=4)
    generator = torch.Generator().manual_seed(4)
    for k, batch in enumerate(batches(60)):
        # First all tables have gradients, then all but the second, which is frozen, then random ones.
        some = set(torch.randint(4, (2,), generator=generator).tolist())
        which = {0, 1, 2, 3} if k < 20 else {0, 2, 3} if k < 40 else some
        step(ours, theirs, (mine, reference), batch, which, dense=k % 7 == 6)
    for one, other in zip(ours, theirs, strict=True):
        assert distance(one, other) <= 3e-6
        if "step" in mine.state[one]:
            assert int(mine.state[one]["step"]) == int(reference.state[other]["step"])


def test_tables_that_step_together_share_a_history():
    ours = [owned_table(initial(seed)) for seed in range(3)]
    optimizer = optim.Adam(ours)
    run = batches(3)
    for parameter in ours:
        set_gradient(parameter, run[0], current_rows(parameter, run[0].ids), False)
    optimizer.step()
    clocks = {id(table_of(parameter).rows.clock) for parameter in ours}
    assert len(clocks) == 1
    ours[1].grad = None
    optimizer.step()
    assert table_of(ours[0]).rows.clock is table_of(ours[2]).rows.clock
    assert table_of(ours[0]).rows.clock is not table_of(ours[1]).rows.clock
    assert [int(optimizer.state[parameter]["step"]) for parameter in ours] == [2, 1, 2]


@pytest.mark.parametrize("dead", [False, True])
def test_a_clock_forgets_tables_that_are_gone(dead):
    ours = [owned_table(initial(seed)) for seed in range(2)]
    optimizer = optim.Adam(ours)
    batch = batches(1)[0]
    for parameter in ours:
        set_gradient(parameter, batch, current_rows(parameter, batch.ids), False)
    optimizer.step()
    clock = table_of(ours[0]).rows.clock
    if dead:
        del optimizer.state[ours[1]], optimizer.param_groups[0]["params"][1], parameter
        del ours[1]
    else:
        ours[1].grad = None
    optimizer.step()
    assert (table_of(ours[0]).rows.clock is clock) == dead


def test_added_parameter_groups():
    ours, mine, theirs, reference = both(
        lambda p: optim.Adam(p[:1], lr=0.02), lambda p: torch.optim.Adam(p[:1], lr=0.02), tables=3
    )
    run = batches(60)
    for k, batch in enumerate(run):
        if k == 20:
            for optimizer, parameters in ((mine, ours), (reference, theirs)):
                optimizer.add_param_group({"params": parameters[1:2], "lr": 0.05, "betas": (0.7, 0.9)})
        if k == 40:
            for optimizer, parameters in ((mine, ours), (reference, theirs)):
                optimizer.add_param_group({"params": parameters[2:], "eps": 1e-3})
        step(ours, theirs, (mine, reference), batch, range(1 + k // 20))
    for one, other in zip(ours, theirs, strict=True):
        assert distance(one, other) <= 3e-6


# What each hyperparameter changes to, and back; an optimizer whose states torch makes once begins with them.
OTHER_VALUES = {
    "lr": 0.01,
    "betas": (0.5, 0.9),
    "eps": 0.1,
    "weight_decay": 0.3,
    "momentum": 0.0,
    "dampening": 0.2,
    "nesterov": False,
    "alpha": 0.5,
    "rho": 0.5,
    "lr_decay": 0.1,
    "centered": False,
    "amsgrad": False,
    "maximize": True,
    "lr_power": -0.3,
    "l1": 0.05,
    "l2": 0.3,
    "l2_shrinkage": 0.2,
    "beta": 0.3,
}
OF_EACH_RULE = (
    *("sgd-nesterov-decay", "sgd-momentum-decay-dampening", "adagrad", "rowwise-adagrad", "adam", "amsgrad", "adamw"),
    *("partial-rowwise-adam-decay", "rmsprop-centered-momentum", "adadelta", "ftrl-penalties", "lamb"),
)
OF_EACH_RULE = one_of_each(OF_EACH_RULE, "none", "states", "weight", "")


@pytest.mark.filterwarnings("ignore:.*every step updates all rows")
@pytest.mark.parametrize("name", OF_EACH_RULE)
def test_every_hyperparameter_counts_as_it_was_in_each_step(name):
    """They change one after the other, and back while others differ: rows that are behind take each step as it was."""
    case = BY_NAME[name]
    mine, theirs = owned_table(initial().double()), torch.nn.Parameter(initial().double())
    optimizers = case.ours([mine], lr=case.lr), case.dense([theirs], lr=case.lr)
    before = dict(optimizers[0].param_groups[0])
    left_out = {"nesterov" if before.get("dampening") else "dampening", *([] if before.get("amsgrad") else ["amsgrad"])}
    changes = [(h, value) for h, value in OTHER_VALUES.items() if h in before and h not in left_out]
    # Torch keeps a mean as it was while it is not centered, and then takes roots of numbers below 0.
    ends = {"centered": 99}
    for k, batch in enumerate(batches(4 * len(changes) + 16)):
        for optimizer in optimizers:
            for number, (h, value) in enumerate(changes):
                optimizer.param_groups[0][h] = value if 6 <= k - 4 * number < ends.get(h, 12) else before[h]
        step([mine], [theirs], optimizers, batch)
    assert distance(mine, theirs) <= 1e-10
    for state, value in optimizers[0].state[mine].items():
        if state in optimizers[1].state[theirs]:
            torch.testing.assert_close(value.double(), torch.as_tensor(optimizers[1].state[theirs][state]).double())


def test_amsgrad_that_is_turned_on_later():
    ours, mine, theirs, reference = both(optim.Adam, torch.optim.Adam)
    for k, batch in enumerate(batches(60)):
        if k == 30:
            # torch fails without the maximum. It is set to the average, from which ours starts.
            reference.state[theirs[0]]["max_exp_avg_sq"] = reference.state[theirs[0]]["exp_avg_sq"].clone()
            mine.param_groups[0]["amsgrad"] = reference.param_groups[0]["amsgrad"] = True
        step(ours, theirs, (mine, reference), batch)
    assert distance(ours[0], theirs[0]) <= 1e-6


@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("name", ["adamw", "adamw-amsgrad", "partial-rowwise-adam-decay", "sgd-nesterov-decay"])
def test_a_decay_that_turns_signs(name, factor):
    case = BY_NAME[name]
    kwargs = {"lr": 0.05}
    ours, mine, theirs, reference = both(partial(case.ours, **kwargs), partial(case.dense, **kwargs))
    for k, batch in enumerate(batches(40)):
        for optimizer in (mine, reference):
            optimizer.param_groups[0]["weight_decay"] = factor / 0.05 if k % 13 == 7 else 0.1
        step(ours, theirs, (mine, reference), batch)
    assert distance(ours[0], theirs[0]) <= 1e-5 * max(1.0, theirs[0].abs().max().item())


@pytest.mark.parametrize("name", LATER)
def test_a_full_history_begins_anew(name, monkeypatch):
    monkeypatch.setattr(_clock, "HISTORY_STEPS", 16)
    monkeypatch.setattr(_clock, "_FIRST_STEPS", 2)
    case = BY_NAME[name]
    run = batches(70)
    expected, error = dense_results(case, run)
    parameter = owned_table(initial())
    train(case.ours([parameter], lr=case.lr), parameter, run, case.lr)
    clock = table_of(parameter).rows.clock
    assert (clock.base, clock.step, len(clock.history)) == (64, 70, 32)
    assert error_of(current_rows(parameter, EVERYTHING), expected) <= 1.5 * error


def test_a_growing_history_keeps_the_past(monkeypatch):
    results = []
    for first in (1, 64):
        monkeypatch.setattr(_clock, "_FIRST_STEPS", first)
        parameter = owned_table(initial())
        train(optim.Adam([parameter]), parameter, batches(40), 0.05)
        results.append(current_rows(parameter, EVERYTHING))
    assert torch.equal(*results)
