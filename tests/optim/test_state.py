"""Checkpoints and copies of optimizers, and what torch's optimizers make of them."""

import copy
import gc
from functools import partial

import pytest
import torch
from kinds import saved
from optim.cases import (
    BY_NAME,
    DIM,
    REFERENCES,
    ROWS,
    batches,
    both,
    current_rows,
    distance,
    initial,
    one_of_each,
    owned_table,
    set_gradient,
    step,
    train,
    train_densely,
)

from torchsparse_rec import optim
from torchsparse_rec.optim import row_optimizer as _row_optimizer
from torchsparse_rec.tables.gradients import update
from torchsparse_rec.tables.table import Gradient, table_if_any, table_of

TORCH = ["sgd-momentum", "adagrad", "adam", "amsgrad", "adamw", "rmsprop-centered-momentum", "adadelta"]
ALL = [*TORCH, "sgd-nesterov-decay", "rowwise-adagrad", "partial-rowwise-adam-decay", "rmsprop", "ftrl", "lamb"]
ALL = one_of_each(ALL, "none", "states", "weight", "")
TORCH = [name for name in ALL if BY_NAME[name].kind not in REFERENCES and name not in ("sgd-nesterov-decay", "rmsprop")]
EVERYTHING = torch.arange(ROWS)
# Adamax says what it costs.
pytestmark = pytest.mark.filterwarnings("ignore:Adamax.*every step updates all rows")


def names_shapes_dtypes(optimizer, parameter):
    return {k: (v.shape, v.dtype) for k, v in optimizer.state[parameter].items()}


@pytest.mark.parametrize("name", TORCH)
def test_states_are_those_of_torch(name):
    case, run = BY_NAME[name], batches(3)
    parameter, other = owned_table(initial()), torch.nn.Parameter(initial())
    mine, torchs = case.ours([parameter], lr=0.05), case.dense([other], lr=0.05)
    train(mine, parameter, run, 0.05)
    train_densely(torchs, other, run, 0.05)
    assert names_shapes_dtypes(mine, parameter) == names_shapes_dtypes(torchs, other)
    groups = [optimizer.state_dict()["param_groups"][0] for optimizer in (mine, torchs)]
    assert groups[0].keys() - groups[1].keys() - {"tensorflow_eps", "decay"} == {"lazy", "stochastic_rounding"}
    assert isinstance(mine, type(torchs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
def test_a_state_that_another_optimizer_goes_on_with_is_copied(name, dtype):
    def trained_on(copied):
        case, run, tables = BY_NAME[name], batches(9), [owned_table(initial().to(dtype)) for _ in range(2)]
        first, second = (case.ours([table], lr=0.05) for table in tables)
        others = [torch.nn.Parameter(initial().to(dtype))]  # no table: torch's own step updates its state
        first.add_param_group({"params": others})
        second.add_param_group({"params": [torch.nn.Parameter(initial().to(dtype))]})
        others[0].grad = torch.ones_like(others[0])
        train(first, tables[0], run[:3], 0.05)
        state = first.state_dict()
        second.load_state_dict(copy.deepcopy(state) if copied else state)
        for k in range(3, 9):
            train(first, tables[0], run[k : k + 1], 0.05)
            train(second, tables[1], run[k - 3 : k - 2], 0.05)
        return [*tables, *others]

    for shared, copied in zip(trained_on(False), trained_on(True), strict=True):
        assert torch.equal(shared, copied)


@pytest.mark.parametrize("name", TORCH)
def test_a_run_that_moves_from_torch_and_back(name):
    case, run = BY_NAME[name], batches(60)
    reference = torch.nn.Parameter(initial().double())
    whole = case.dense([reference], lr=0.02)
    train_densely(whole, reference, run[:20], 0.02)
    first = torch.nn.Parameter(initial())
    torchs = case.dense([first], lr=0.02)
    train_densely(torchs, first, run[:20], 0.02)

    parameter = owned_table(first.detach())
    mine = case.ours([parameter], lr=1.0)
    mine.load_state_dict(saved(torchs.state_dict()))
    assert mine.param_groups[0]["lazy"] is False
    train(mine, parameter, run[20:40], 0.02)
    train_densely(whole, reference, run[20:40], 0.02)

    state = saved(mine.state_dict())
    last = torch.nn.Parameter(parameter.detach().clone())
    torchs = case.dense([last], lr=1.0)
    torchs.load_state_dict(state)
    train_densely(torchs, last, run[40:], 0.02)
    train_densely(whole, reference, run[40:], 0.02)
    assert (last.double() - reference).abs().max() <= 1e-5


def test_states_of_older_torches():
    parameter = owned_table(initial())
    mine = optim.Adam([parameter])
    train(mine, parameter, batches(7), 0.05)
    state = copy.deepcopy(mine.state_dict())
    state["state"][0]["step"] = 7
    for key in ("lazy", "stochastic_rounding", "decoupled_weight_decay", "fused", "capturable"):
        del state["param_groups"][0][key]
    mine.load_state_dict(state)
    assert mine.param_groups[0]["lazy"] is mine.param_groups[0]["decoupled_weight_decay"] is False
    train(mine, parameter, batches(1), 0.05)
    assert mine.state[parameter]["step"].item() == 8.0

    sgd = optim.SGD([torch.nn.Parameter(initial())], momentum=0.9)
    sgd.load_state_dict({"state": {0: {"momentum_buffer": None}}, "param_groups": sgd.state_dict()["param_groups"]})
    other = sgd.param_groups[0]["params"][0]
    other.grad = torch.ones_like(other)
    sgd.step()
    assert torch.equal(sgd.state[other]["momentum_buffer"], other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_a_resumed_run_has_the_same_bits(name, dtype):
    case, run = BY_NAME[name], batches(60, "mixed")
    parameter = owned_table(initial().to(dtype))
    mine = case.ours([parameter], lr=case.lr, stochastic_rounding=True)
    train(mine, parameter, run[:33], case.lr)
    table_of(parameter).flush()
    state, weight = saved(mine.state_dict()), parameter.detach().clone()

    resumed = owned_table(weight)
    other = case.ours([resumed], lr=case.lr, stochastic_rounding=True)
    other.load_state_dict(state)
    for optimizer, table in ((mine, parameter), (other, resumed)):
        train(optimizer, table, run[33:], case.lr, first=33)
    assert torch.equal(current_rows(parameter, EVERYTHING), current_rows(resumed, EVERYTHING))
    mine, other = mine.state_dict(), other.state_dict()
    assert torch.equal(parameter, resumed)
    for key, value in mine["state"][0].items():
        assert value.dtype == torch.float32 and torch.equal(value, other["state"][0][key]), key
    assert mine["param_groups"] == other["param_groups"]


def test_foreign_half_tables_keep_float32_states():
    run, weight = batches(20), initial().bfloat16()

    def go(optimizer, parameter, some):
        for batch in some:
            set_gradient(parameter, batch, parameter.detach()[batch.ids], False)
            optimizer.step()

    parameter = torch.nn.Parameter(weight.clone())
    mine = optim.Adagrad([parameter], lr=0.1)
    go(mine, parameter, run[:10])
    resumed = torch.nn.Parameter(parameter.detach().clone())
    other = optim.Adagrad([resumed], lr=0.1)
    other.load_state_dict(saved(mine.state_dict()))
    assert torch.equal(other.state_dict()["state"][0]["sum"], mine.state[parameter]["sum"])
    go(mine, parameter, run[10:])
    go(other, resumed, run[10:])
    assert torch.equal(parameter, resumed) and torch.equal(mine.state[parameter]["sum"], other.state[resumed]["sum"])


def test_loaded_states_of_half_tables_do_not_come_back():
    parameter, other = owned_table(initial().bfloat16()), torch.nn.Parameter(initial().bfloat16())
    torchs = torch.optim.Adam([other])
    train_densely(torchs, other, batches(3), 0.05)
    mine = optim.Adam([parameter])
    mine.load_state_dict(torchs.state_dict())
    grad = Gradient(EVERYTHING, torch.ones(ROWS, DIM))
    for _ in range(3):
        mine.step_tables([(parameter, grad)])  # as a fused backward does, so that step() is never called
    before = mine.state[parameter]["exp_avg"].clone()
    table_of(parameter).release()  # as happens when another optimizer takes the table over
    mine.step_tables([(parameter, grad)])
    torch.testing.assert_close(mine.state[parameter]["exp_avg"], 0.9 * before + 0.1)


def test_unused_tables_have_no_state():
    mine = optim.SGD([owned_table(initial())], momentum=0.9)
    assert mine.state_dict()["state"] == {}
    plain = optim.SGD([parameter := owned_table(initial())])
    train(plain, parameter, batches(3), 0.05)
    assert plain.state_dict()["state"] == {}


# ---- Copies ----------------------------------------------------------------------------------------------------------


def test_copies_of_a_model_have_no_tables_and_no_optimizer():
    model = torch.nn.Embedding(ROWS, 4, _weight=initial())
    table_of(model.weight).mark_owned()
    mine = optim.Adam(model.parameters())
    train(mine, model.weight, batches(3), 0.05)
    twin = copy.deepcopy(model)
    assert table_if_any(twin.weight) is None
    assert table_of(twin.weight).optimizer is None
    optim.Adam(twin.parameters())


@pytest.mark.parametrize("name", ["sgd-momentum", "adam", "rmsprop-centered-momentum"])
def test_a_table_that_changes_its_dtype_goes_on(name):
    case, run = BY_NAME[name], batches(40)
    expected = torch.nn.Parameter(initial().double())
    train_densely(case.dense([expected], lr=0.02), expected, run, 0.02)
    parameter = owned_table(initial())
    mine = case.ours([parameter], lr=0.02)
    train(mine, parameter, run[:20], 0.02)
    table_of(parameter).flush()  # as a module does before it changes its parameters
    parameter.grad = None
    parameter.data = parameter.data.double()
    train(mine, parameter, run[20:], 0.02, first=20)
    assert {value.dtype for key, value in mine.state[parameter].items() if key != "step"} == {torch.float64}
    assert (current_rows(parameter, EVERYTHING) - expected).abs().max() <= 3e-6


# ---- Several optimizers ----------------------------------------------------------------------------------------------


def test_the_last_optimizer_made_is_the_tables():
    parameter = owned_table(initial())
    first = optim.Adam([parameter])
    second = optim.SGD([parameter])
    assert table_of(parameter).optimizer is second
    del first, second
    third = optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    third.add_param_group({"params": [parameter]})
    assert table_of(parameter).optimizer is third


def test_a_table_that_left_its_clock_keeps_its_own_count_of_steps():
    tables, mine, references, torchs = both(partial(optim.Adam, lr=0.05), partial(torch.optim.Adam, lr=0.05), tables=2)
    optimizers = (mine, torchs), (optim.Adam(tables[:1], lr=0.05), torch.optim.Adam(references[:1], lr=0.05))
    turns = [(0, (0, 1)), (1, (0,)), *[(0, (1,))] * 5, (0, (0,))]
    for batch, (turn, which) in zip(batches(len(turns)), turns, strict=True):
        step(tables, references, optimizers[turn], batch, which)
    for k, steps in enumerate([2, 6]):
        assert mine.state[tables[k]]["step"] == torchs.state[references[k]]["step"] == steps
        assert distance(tables[k], references[k]) <= 3e-6


def test_a_step_that_raises_halfway_leaves_every_table_before_or_after_it(monkeypatch):
    run = batches(4)
    tables, references = [owned_table(initial()) for _ in range(2)], [owned_table(initial()) for _ in range(2)]
    mine, theirs = optim.Adam(tables, lr=0.05), [optim.Adam([parameter], lr=0.05) for parameter in references]

    def go(batch, which, optimizers):
        for parameters in (tables, references):
            for k, parameter in enumerate(parameters):
                parameter.grad = None
                if k in which:
                    set_gradient(parameter, batch, current_rows(parameter, batch.ids), dense=False)
        for optimizer in optimizers:
            optimizer.step()

    go(run[0], (0,), [mine, *theirs])  # from here on the two tables have separate clocks

    def update_of_the_first(group, gradients):
        if group.parameters[0] is tables[1]:
            raise RuntimeError("on purpose")
        update(group, gradients)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="on purpose"):
        patched.setattr(_row_optimizer, "update", update_of_the_first)
        go(run[1], (0, 1), [theirs[0], mine])
    for batch in run[2:]:
        go(batch, (0, 1), [mine, *theirs])
    for parameter, reference in zip(tables, references, strict=True):
        assert torch.equal(current_rows(parameter, EVERYTHING), current_rows(reference, EVERYTHING))


def test_tables_do_not_keep_optimizers_or_parameters_alive():
    parameter = owned_table(initial())
    mine = optim.Adam([parameter])
    train(mine, parameter, batches(3), 0.05)
    gc.disable()
    try:
        table = table_of(parameter)
        del mine
        assert table.optimizer is None
        del parameter
        assert table._parameter() is None
    finally:
        gc.enable()


def test_a_table_made_after_its_optimizers_is_that_of_the_last():
    parameters = [torch.nn.Parameter(initial()) for _ in range(4)]
    optimizers = [optim.SGD(parameters) for _ in range(16)]
    optimizers[0].load_state_dict(optimizers[0].state_dict())
    others = optim.Adam([torch.nn.Parameter(initial())])
    assert all(table_of(parameter).optimizer is optimizers[-1] for parameter in parameters)
    assert table_of(others.param_groups[0]["params"][0]).optimizer is others


# ---- States that no optimizer goes on from ---------------------------------------------------------------------------


def without(name):
    return lambda its: its.pop(name)


def instead(name, value):
    return lambda its: its.update({name: value})


@pytest.mark.parametrize(
    ("where", "change", "text"),
    [
        ("group", without("lr"), "group 0 must have an option 'lr' like 0.01.*, got nothing"),
        ("group", instead("lr", "x"), "group 0 must have an option 'lr' like 0.01.*, got 'x'"),
        ("group", instead("betas", [0.9]), "group 0 must have an option 'betas' like"),
        ("group", instead("betas", [0.9, None]), "group 0 must have an option 'betas' like"),
        ("group", instead("amsgrad", 7), "group 0 must have an option 'amsgrad' like False, got 7"),
        ("state", without("step"), "the state of parameter 0 of group 0 must have a number 'step', got None"),
        ("state", instead("step", torch.zeros(2)), "must have a number 'step'"),
        ("state", instead("exp_avg", torch.zeros(ROWS + 1, DIM)), "exp_avg must be a tensor .*, got "),
        ("state", instead("exp_avg", torch.zeros(ROWS)), "exp_avg must be a tensor .*, got "),
        ("state", instead("exp_avg_sq", 3), "exp_avg_sq must be a tensor .*, got 3"),
        ("states", instead(0, [3]), "the state of parameter 0 of group 0 must be a mapping, got "),
    ],
)
@pytest.mark.parametrize("is_table", [True, False])
def test_what_no_optimizer_goes_on_from_is_refused_before_anything_changes(where, change, text, is_table):
    case, run = BY_NAME["adam"], batches(3)
    parameter = owned_table(initial()) if is_table else torch.nn.Parameter(initial())
    mine = case.ours([parameter], lr=0.05)
    (train if is_table else train_densely)(mine, parameter, run, 0.05)
    before, odd = copy.deepcopy(mine.state_dict()), copy.deepcopy(mine.state_dict())
    change({"group": odd["param_groups"][0], "state": odd["state"][0], "states": odd["state"]}[where])
    with pytest.raises(ValueError, match=f"Adam.load_state_dict: .*{text}"):
        mine.load_state_dict(odd)
    after = mine.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)
    mine.load_state_dict(before)
