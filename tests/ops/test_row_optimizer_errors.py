"""Bad arguments of the family ``row_optimizer``, refused before anything is written; autograd and compilation."""

from __future__ import annotations

import pytest
import torch
from calls import assert_same_bits, call
from devices import cpu_only
from samples.row_optimizer import IDLE_RULES, OTHER_RULES, ROW_STATES, RULES, by_name, ruled, update_sample
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torchsparse_rec import ops
from torchsparse_rec.compat._parity.reference.row_optimizer import history_of, states_of
from torchsparse_rec.ops.row_optimizer_rules import OPTIMIZER_RULES

_ADAMW = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1, "decoupled": 1.0}
_, ADAMW = ruled("adam", **_ADAMW)


def _changed(**values: float) -> dict[str, list[float]]:
    return {"hyperparameters": ruled("adam", **(_ADAMW | values))[1]}


def _arguments() -> dict:
    """Return the arguments of a valid step: AdamW on two tables, two steps after the base."""
    return {
        "weights": [torch.ones(4, 3), torch.ones(2, 5)],
        "states": [torch.ones(4, 3), torch.ones(4, 3), torch.ones(2, 5), torch.ones(2, 5)],
        "last_steps": [torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)],
        "history": history_of(3, [ADAMW] * 2, 1),
        "rows": [torch.tensor([0, 2, 3]), torch.tensor([1])],
        "values": [torch.ones(3, 3), torch.ones(1, 5)],
        "rule": 3,
        "hyperparameters": ADAMW,
        "step": 4,
        "base": 1,
    }


def _second(argument: str, x: Tensor) -> dict:
    return {argument: [*_arguments()[argument][:1], x]}


_IDS, _NARROW = torch.tensor([1]), [torch.ones(4, 3).half(), torch.ones(2, 5).half()]
BAD = {
    f"rule must be in [0, {len(OPTIMIZER_RULES)}), got 99": {"rule": 99},
    "hyperparameters must be 8 for adam, got 5": {"hyperparameters": ADAMW[:5]},
    "lr must be >= 0, got -1": _changed(lr=-1.0),
    "lr must be >= 0, got nan": _changed(lr=torch.nan),
    "beta1 must be in [0, 1), got 1": _changed(beta1=1.0),
    "beta2 must be in [0, 1), got -0.5": _changed(beta2=-0.5),
    "decoupled must be 0 or 1, got 0.5": _changed(decoupled=0.5),
    "weight_decay must be at most 1 / lr, got 11 with lr 0.1": _changed(weight_decay=11.0),
    "weight_decay must be 0 or decoupled, as it enters the second moment of idle rows, got 0.1": _changed(decoupled=0),
    "base must be >= 0, got -1": {"base": -1},
    "step must be in [base + 1, base + 2^31), got 1 with base 1": {"step": 1},
    f"step must be in [base + 1, base + 2^31), got 0 with base {2**63 - 1}": {"base": 2**63 - 1, "step": 0},
    "history must have shape [at least 8, 8], got [4, 8]": {"step": 6},
    "history must have shape [at least 4, 8], got [4, 7]": {"history": torch.zeros(4, 7).double()},
    "history must be Double, got Float": {"history": torch.zeros(4, 8)},
    "history must be given with last_steps, got None": {"history": None},
    "weights[0] must be float16, bfloat16, float32 or float64, got Long": {"weights": [torch.ones(4, 3).long()] * 2},
    "weights[1] must have shape [V, D], got [2]": _second("weights", torch.ones(2)),
    "weights[1] must be Float, got Double": _second("weights", torch.ones(2, 5).double()),
    "weights[1] must have rows that are contiguous": _second("weights", torch.ones(5, 2).t()),
    "states must be 2 for each of the 2 tables, got 3": {"states": _arguments()["states"][:3]},
    "exp_avg_sq[1] must have the shape of weights[1], [2, 5], got shape [2, 4]": {
        "states": [*_arguments()["states"][:3], torch.ones(2, 4)]
    },
    "exp_avg[1] must be Float, got Double": {
        "states": [*_arguments()["states"][:2], torch.ones(2, 5).double(), torch.ones(2, 5)]
    },
    "exp_avg_sq[1] must have rows that are contiguous": {"states": [*_arguments()["states"][:3], torch.ones(5, 2).t()]},
    "last_steps must be none, or one for each of the 2 tables, got 1": {"last_steps": _arguments()["last_steps"][:1]},
    "last_steps[1] must be Int, got Long": _second("last_steps", torch.zeros(2, dtype=torch.int64)),
    "last_steps[1] must have one value for each row of weights[1], [2, 5], got shape [3]": _second(
        "last_steps", torch.zeros(3, dtype=torch.int32)
    ),
    "last_steps[1] must be contiguous": _second("last_steps", torch.zeros(4, dtype=torch.int32)[::2]),
    "rows must be none, or one for each of the 2 tables, got 1": {"rows": [_IDS]},
    "rows[1] must be Long, got Int": _second("rows", _IDS.int()),
    "rows[1] must have rank 1, got shape [1, 1]": _second("rows", _IDS[None]),
    "values must be one for each of the 2 tables, got 1": {"values": [torch.ones(3, 3)]},
    "values[1] must have shape [1, 5], got [1, 4]": _second("values", torch.ones(1, 4)),
    "values[1] must have shape [2, 5], got [1, 5]": {"rows": None, "values": [torch.ones(4, 3), torch.ones(1, 5)]},
    "values[1] must be Float or the dtype of weights[1], Float, got Half": _second("values", torch.ones(1, 5).half()),
    "values[1] must be Float or the dtype of weights[1], Half, got BFloat16": {
        "weights": _NARROW,
        "values": [torch.ones(3, 3).half(), torch.ones(1, 5).bfloat16()],
    },
    "grad_scale must have one element, got shape [2]": {"grad_scale": torch.ones(2)},
    "grad_scale must be Float or Float, got Double": {"grad_scale": torch.ones(1).double()},
    "rounding_seeds must be none for weights that are Float": {"rounding_seeds": [1, 2]},
    "rounding_seeds must be none, or one for each of the 2 tables, got 1": {"weights": _NARROW, "rounding_seeds": [1]},
    "whole must be none, or one for each of the 2 last_steps, got 1": {"whole": [1]},
    "whole[1] must be >= 0, got -1": {"whole": [1, -1]},
}
# Refused on the CPU alone, where the values of rows are checked before anything is written.
BAD_ROWS = {
    "rows[0] must increase strictly, got 2 after 2 at position 1": {"rows": [torch.tensor([2, 2, 3]), _IDS]},
    "rows[1] must increase strictly, got 0 after 1 at position 1": {
        "rows": [torch.tensor([0, 2, 3]), torch.tensor([1, 0])],
        "values": [torch.ones(3, 3), torch.ones(2, 5)],
    },
}


def _written(arguments: dict) -> list[Tensor]:
    return [*arguments["weights"], *arguments["states"], *arguments["last_steps"]]


def _refused(changed: dict, error: type[Exception]) -> str:
    """Return the error that the update raises, after checking that it has written nothing."""
    arguments = _arguments() | changed
    before = [x.clone() for x in _written(arguments)]
    with pytest.raises(error) as caught:
        ops.row_optimizer_update_(**arguments)
    for x, y in zip(_written(arguments), before, strict=True):
        assert torch.equal(x, y)
    assert str(caught.value).startswith("row_optimizer_update_: ")
    return str(caught.value)


def test_the_arguments_are_right_otherwise(kernels: str) -> None:
    ops.row_optimizer_update_(**_arguments())
    ops.row_optimizer_update_(**(_arguments() | {"rows": None, "values": [torch.ones(4, 3), torch.ones(2, 5)]}))


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message: str, kernels: str) -> None:
    assert message in _refused(BAD[message], ValueError)


@pytest.mark.parametrize("message", BAD_ROWS)
def test_bad_rows(message: str) -> None:
    assert message in _refused(BAD_ROWS[message], ValueError)


@pytest.mark.parametrize("row", [-1, 2, 2**40])
def test_a_row_outside(row: int) -> None:
    message = _refused({"rows": [torch.tensor([0, 2, 3]), torch.tensor([row])]}, IndexError)
    assert message == f"row_optimizer_update_: rows[1][0] must be in [0, 2), got {row}"


def test_bad_rows_are_skipped_by_emulated_kernels(emulated: object) -> None:
    """Update the good rows, and report the first bad one."""
    from emulation import fixture

    wanted = _arguments() | {"rows": [torch.tensor([1, 3]), torch.tensor([1])]}
    wanted["values"] = [torch.ones(2, 3), torch.ones(1, 5)]
    ops.row_optimizer_update_(**wanted)
    for bad in ([1, 3, 9], [1, 1, 3], [-1, 1, 3]):
        actual = _arguments() | {"rows": [torch.tensor(bad), torch.tensor([1])]}
        if bad[0] < 0:
            actual["values"][0][0] = torch.nan
        arguments = [*actual.values()]
        fixture.operator("row_optimizer_update_")(*arguments[:6], None, *arguments[6:], False, [])
        with pytest.raises((IndexError, ValueError), match="^row_optimizer_update_: rows"):
            fixture.check_errors()
        for x, y in zip(_written(actual), _written(wanted), strict=True):
            assert_same_bits(x, y)


# By error: an argument and a position in it, and the argument and position whose tensor it is given.
SHARED = {
    "weights[1] must not share memory with weights[0]": ("weights", 1, "weights", 0),
    "exp_avg[1] must not share memory with exp_avg_sq[0]": ("states", 2, "states", 1),
    "weights[1] must not share memory with exp_avg[0]": ("states", 0, "weights", 1),
    "last_steps[1] must not share memory with last_steps[0]": ("last_steps", 1, "last_steps", 0),
    "values[0] must not share memory with exp_avg_sq[1]": ("values", 0, "states", 3),
    "values[1] must not share memory with weights[0]": ("values", 1, "weights", 0),
}


@pytest.mark.parametrize("message", SHARED)
def test_tables_must_not_share_memory(message: str, kernels: str) -> None:
    arguments = _arguments()
    arguments["weights"][1], arguments["last_steps"][1] = torch.ones(4, 3), torch.zeros(4, dtype=torch.int32)
    arguments["states"][2:] = [torch.ones(4, 3), torch.ones(4, 3)]
    arguments |= {"rows": None, "values": [torch.ones(4, 3), torch.ones(4, 3)]}
    taker, place, giver, given = SHARED[message]
    arguments[taker][place] = arguments[giver][given]
    assert message in _refused(arguments, ValueError)


def test_a_part_of_a_table_is_shared_memory_too(kernels: str) -> None:
    """Refuse tables that share two rows, or columns; allow tables that lie side by side."""
    memory = torch.ones(6, 8)
    given = {"rule": 0, "hyperparameters": [0.5, 0.0, 0.0, 0.0, 0.0], "step": 1}

    def step(first: Tensor, second: Tensor, scale: Tensor | None = None) -> None:
        values = [torch.ones_like(first), torch.ones_like(second)]
        ops.row_optimizer_update_([first, second], [], [], None, None, values, **given, grad_scale=scale)

    step(memory[:4], memory[4:])
    step(memory[:, :5], memory[:, 5:])
    step(memory[2:3, :4], memory[:, 4:])
    left = torch.zeros(6, 8)
    left[2, :4] = left[:, 4:] = -0.5
    assert torch.equal(memory, left)
    for first, second in ((memory[:4], memory[2:]), (memory[:, :5], memory[:, 4:]), (memory[:, 4:], memory[3:4, :5])):
        with pytest.raises(ValueError, match="must not share memory with weights"):
            step(first, second)
    with pytest.raises(ValueError, match=r"grad_scale must not share memory with weights\[1\]"):
        step(memory[:2], memory[2:], memory[5, 7:])


@pytest.mark.parametrize("rule", ["adagrad", "ftrl", "lamb"])
def test_rules_without_idle_maps_take_no_last_steps(rule: str, kernels: str) -> None:
    number, h = OTHER_RULES[rule]
    states = [torch.ones(2, 1) for _ in range(states_of(number, h))]
    arguments = ([torch.ones(2, 1)], states, [torch.zeros(2, dtype=torch.int32)], ops.new_history(1))
    with pytest.raises(ValueError, match="last_steps must be none for a rule that has no idle maps, got 1"):
        ops.row_optimizer_update_(*arguments, [_IDS], [torch.ones(1, 1)], rule=number, hyperparameters=h, step=1)
    with pytest.raises(ValueError, match=f"rule must be one whose idle rows move by a map, got {number}"):
        ops.row_optimizer_advance_(ops.new_history(1), rule=number, hyperparameters=h, step=1)


@pytest.mark.parametrize("rule", ["coupled_adam", "coupled_rmsprop", "coupled_adadelta"])
def test_coupled_decay_has_no_idle_maps(rule: str, kernels: str) -> None:
    number, h = OTHER_RULES[rule]
    message = "weight_decay must be 0 or decoupled, as it enters the second moment of idle rows, got 0.25"
    with pytest.raises(ValueError, match=f"row_optimizer_advance_: {message}"):
        ops.row_optimizer_advance_(ops.new_history(1), rule=number, hyperparameters=h, step=1)
    with pytest.raises(ValueError, match="must have a closed form, got weight_decay in the second moment"):
        ops.idle_motion(number, h)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("sgd", {"nesterov": 1.0, "momentum": 0.0}, "nesterov must come with momentum > 0 and dampening 0"),
        ("momentum", {"nesterov": 1.0}, "nesterov must come with momentum > 0 and dampening 0"),
        ("sgd", {"dampening": torch.nan}, "dampening must be a number, got nan"),
        ("adagrad", {"lr_decay": -1.0}, "lr_decay must be >= 0, got -1"),
        ("ftrl", {"lr": 0.0}, "lr must be > 0, got 0"),
        ("ftrl", {"lr_power": 0.5}, "lr_power must be <= 0, got 0.5"),
        ("adadelta", {"rho": 1.5}, r"rho must be in \[0, 1\], got 1.5"),
        ("rmsprop", {"centered": 2.0}, "centered must be 0 or 1, got 2"),
        ("partial_rowwise_adam", {"weight_decay": 9.0}, "weight_decay must be at most 1 / lr, got 9 with lr 0.125"),
    ],
)
def test_hyperparameters_outside_their_range(name: str, changed: dict, message: str, kernels: str) -> None:
    rule, h = RULES[name]
    h = [*(by_name(rule, h) | changed).values()]
    with pytest.raises(ValueError, match=message):
        ops.row_optimizer_advance_(ops.new_history(1), rule=rule, hyperparameters=h, step=1)


def test_no_tables_are_nothing_to_do() -> None:
    """Return at once: without a tensor the dispatcher does not know whose operator to call."""
    given = {"rule": 3, "hyperparameters": ADAMW, "step": 1}
    ops.row_optimizer_update_([], [], [], None, [], [], **given)
    ops.row_optimizer_make_current_([], [], [], None, **given)


def test_history_must_have_room(kernels: str) -> None:
    given = {"rule": 3, "hyperparameters": ADAMW, "base": 3}
    history = ops.new_history(2)
    ops.row_optimizer_advance_(history, step=4, **given)
    ops.row_optimizer_advance_(history, step=5, **given)
    with pytest.raises(ValueError, match=r"row_optimizer_advance_: history must have shape \[at least 6, 8\], got \[4"):
        ops.row_optimizer_advance_(history, step=6, **given)
    with pytest.raises(ValueError, match="history must be contiguous, as it is written in place"):
        ops.row_optimizer_advance_(torch.zeros(4, 16).double()[:, ::2], step=4, **given)
    arguments = ([torch.ones(2, 1)], [torch.ones(2, 1)] * 2)
    last = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"row_optimizer_current: history must have shape \[at least 6, 8\]"):
        ops.row_optimizer_current(arguments[0][0], arguments[1], last, history, _IDS, step=6, **given)
    states = [torch.ones(2, 1), torch.ones(2, 1)]
    with pytest.raises(ValueError, match=r"row_optimizer_make_current_: history must have shape \[at least 6, 8\]"):
        ops.row_optimizer_make_current_(arguments[0], states, [last], history, step=6, **given)


@cpu_only
def test_current_checks_its_rows(kernels: str) -> None:
    tables = (torch.ones(2, 1), [torch.ones(2, 1)] * 2, torch.zeros(2, dtype=torch.int32), ops.new_history(1))
    given = {"rule": 3, "hyperparameters": ADAMW, "step": 0}
    with pytest.raises(IndexError, match=r"row_optimizer_current: rows\[1\] must be in \[0, 2\), got 2"):
        ops.row_optimizer_current(*tables, torch.tensor([0, 2]), **given)
    with pytest.raises(ValueError, match="row_optimizer_current: rows must be Long, got Int"):
        ops.row_optimizer_current(*tables, torch.tensor([0]).int(), **given)


# ---- Idle motion ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_idle_motion_says_what_idle_steps_change(rule: str) -> None:
    """Compare with what the dense rule changes, given a gradient of zero."""
    from torchsparse_rec.compat._parity.reference.row_optimizer import RULES as STEPS
    from torchsparse_rec.compat._parity.reference.row_optimizer import for_formula

    number, h = RULES[rule]
    row = [torch.full((1, 2), 0.5, dtype=torch.float64) for _ in range(1 + states_of(number, h))]
    if number in ROW_STATES:
        row[-1] = row[-1][:, 0]
    if rule == "ftrl" or rule == "ftrl_power":
        # Rows without gradient keep their value: TensorFlow's rule for sparse gradients.
        assert ops.idle_motion(number, h) == "none"
        return
    if rule in OTHER_RULES and not rule.startswith(("plain_", "seen_")):
        with pytest.raises(ValueError, match="must have a closed form"):
            ops.idle_motion(number, h)
        return
    after = STEPS[number](row, torch.zeros(1, 2, dtype=torch.float64), 3, *for_formula(number, h, zeros=True).values())
    moved = [not torch.equal(x, y) for x, y in zip(row, after, strict=True)]
    assert ops.idle_motion(number, h) == ("weight" if moved[0] else "states" if any(moved) else "none")


def test_adagrad_without_decay_has_no_idle_motion() -> None:
    for name in ("adagrad", "rowwise_adagrad"):
        assert ops.idle_motion(*ruled(name, lr=0.1, eps=1e-8)) == "none"


def test_idle_motion_checks_its_arguments() -> None:
    rules = len(OPTIMIZER_RULES)
    for rule in (-1, rules):
        with pytest.raises(ValueError, match=rf"idle_motion: rule must be in \[0, {rules}\), got {rule}"):
            ops.idle_motion(rule, [0.1])
    for rule, h in RULES.values():
        with pytest.raises(ValueError, match=f"hyperparameters must be {len(h)} for [a-z_]+, got {len(h) - 1}"):
            ops.idle_motion(rule, h[:-1])


@pytest.mark.parametrize("rule", RULES)
def test_what_a_rule_says_depends_on_zeros_alone(rule: str) -> None:
    """Compare with what C++ says of other values: Python remembers its words by which hyperparameters are zero."""
    number, h = RULES[rule]
    say = torch.ops.torchsparse_rec.row_optimizer_rule.default
    assert torch.equal(say(number, h), say(number, [2 * x for x in h]))
    assert torch.equal(say(number, h), say(number, [float(x != 0) for x in h]))


def test_rules_under_fake_tensors() -> None:
    with FakeTensorMode():
        assert ops.idle_motion(*ruled("rmsprop", lr=0.1, eps=0.5, centered=1.0)) == "states"


# ---- Autograd and compilation ---------------------------------------------------------------------------------------


def test_gradients_are_refused_as_torch_does() -> None:
    arguments = _arguments()
    arguments["weights"][0].requires_grad_()
    with pytest.raises(RuntimeError, match=r"not differentiable: call it under torch\.no_grad\(\)"):
        ops.row_optimizer_update_(**arguments)
    tables = {name: arguments[name] for name in ("weights", "states", "last_steps", "history", "rule", "base")}
    given = {"hyperparameters": ADAMW, "step": 3}
    with pytest.raises(RuntimeError, match="not differentiable"):
        ops.row_optimizer_make_current_(**tables, **given)
    with torch.no_grad():
        ops.row_optimizer_update_(**arguments)
    with torch.inference_mode():
        ops.row_optimizer_update_(**_arguments())


def test_current_values_have_no_gradient() -> None:
    tables = _arguments()
    weight = tables["weights"][0].requires_grad_()
    given = {"rule": 3, "hyperparameters": ADAMW, "step": 3, "base": 1}
    states, last, history = tables["states"][:2], tables["last_steps"][0], tables["history"]
    assert not ops.row_optimizer_current(weight, states, last, history, _IDS, **given).requires_grad


def test_a_graph_notices_that_its_tensors_were_written() -> None:
    arguments = _arguments()
    weight = arguments["weights"][0].requires_grad_()
    loss = (weight * weight).sum()
    with torch.no_grad():
        ops.row_optimizer_update_(**arguments)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("rule", [*IDLE_RULES][:4])
def test_compiled_code_writes_its_inputs(rule: str) -> None:
    sample = update_sample("", rule)
    operator = torch.ops.torchsparse_rec.row_optimizer_update_.default
    step = torch.compile(lambda *arguments: operator(*arguments), backend="aot_eager", fullgraph=True)
    arguments = sample.to("cpu").arguments
    step(*arguments)
    for x, y in zip([x for group in arguments[:3] for x in group], call(sample), strict=True):
        assert_same_bits(x, y)
