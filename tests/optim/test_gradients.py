"""The sources and layouts of a table's gradient; warnings and errors."""

import inspect
import re
import warnings

import pytest
import torch
from optim.cases import (
    BY_NAME,
    DIM,
    REFERENCES,
    ROWS,
    batches,
    current_rows,
    initial,
    one_of_each,
    owned_table,
    set_gradient,
    train,
)

from torchsparse_rec import optim
from torchsparse_rec.tables.table import Gradient, table_if_any, table_of

IDS = torch.tensor([5, 3, 5, 9])
EVERYTHING = torch.arange(ROWS)


def coo(values, ids=IDS, rows=ROWS):
    return torch.sparse_coo_tensor(ids[None], values, (rows, *values.shape[1:]), check_invariants=True)


# ---- Foreign tables --------------------------------------------------------------------------------------------------

MOVES = ["sgd-momentum", "sgd-decay", "adam", "amsgrad", "adamw", "partial-rowwise-adam", "rmsprop-momentum"]
MOVES = one_of_each(MOVES, "weight")
STAYS = ["sgd", "adagrad", "rowwise-adagrad", "rmsprop", "rmsprop-centered", "adadelta", "ftrl", "lamb"]
STAYS = one_of_each(STAYS, "none", "states")


@pytest.mark.parametrize("name", [*MOVES, *STAYS])
def test_sparse_gradients_of_foreign_parameters(name):
    case, run = BY_NAME[name], batches(30)
    parameter, other = torch.nn.Parameter(initial()), torch.nn.Parameter(initial().double())
    mine, reference = case.ours([parameter], lr=0.02), case.dense([other], lr=0.02)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in run:
            # The parameter's readers do not know this library: its stored rows must be right.
            set_gradient(parameter, batch, parameter.detach()[batch.ids], False)
            set_gradient(other, batch, other.detach()[batch.ids], True)
            mine.step()
            reference.step()
            assert (parameter.double() - other).abs().max() <= 1e-5
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == (name in MOVES)
    assert all("nn.convert(model)" in text for text in texts)
    steps_all_rows = table_of(parameter).rows.last_step is None and name in MOVES
    assert steps_all_rows == (name in MOVES)


def test_a_foreign_table_that_is_converted_goes_on():
    parameter, other = torch.nn.Parameter(initial()), torch.nn.Parameter(initial().double())
    mine, reference = optim.Adam([parameter]), torch.optim.Adam([other])
    for k, batch in enumerate(batches(30)):
        if k == 10:
            table_of(parameter).mark_owned()
        set_gradient(parameter, batch, current_rows(parameter, batch.ids), 0 < k < 5)
        set_gradient(other, batch, other.detach()[batch.ids], True)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore",
                "Adam: a table with a sparse gradient is looked up by a module that is not of torchsparse_rec.nn",
            )
            mine.step()
        reference.step()
    assert table_of(parameter).is_stale()
    assert (current_rows(parameter, EVERYTHING).double() - other).abs().max() <= 1e-6


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 2, 3), (ROWS, 1)])
def test_parameters_of_any_rank(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for cls in (optim.Adagrad, optim.RowWiseAdagrad):
        parameter, dense = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
        mine, theirs = cls([parameter], lr=0.1), cls([dense], lr=0.1)
        for _ in range(3):
            parameter.grad = coo(torch.randn(4, *shape[1:]))
            dense.grad = parameter.grad.to_dense()
            mine.step()
            theirs.step()
        assert table_if_any(dense) is None
        assert torch.allclose(parameter, dense, atol=1e-6)
        assert mine.state[parameter]["sum"].shape == theirs.state[dense]["sum"].shape


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        (optim.Adam, {"lr": 0.01}),
        (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (optim.Adagrad, {"lr": 0.1}),
    ],
)
def test_torchs_fused_kernel_steps_a_table_until_a_gradient_leaves_rows_out(cls, arguments):
    parameter, dense = owned_table(initial()), torch.nn.Parameter(initial().double())
    mine = cls([parameter], fused=True, **arguments)
    reference = getattr(torch.optim, cls.__name__)([dense], **arguments)
    for number, batch in enumerate(batches(8)):
        set_gradient(parameter, batch, current_rows(parameter, batch.ids), number < 4)
        set_gradient(dense, batch, dense.detach()[batch.ids], True)
        mine.step()
        reference.step()
        assert (table_of(parameter).rows is None) == (number < 4)
    assert (current_rows(parameter, EVERYTHING).double() - dense).abs().max() <= 1e-6


# ---- Layouts ---------------------------------------------------------------------------------------------------------


def test_a_sparse_gradient_is_left_as_it_was():
    parameter = owned_table(initial())
    parameter.grad = grad = coo(torch.randn(4, DIM))
    optim.Adam([parameter]).step()
    assert parameter.grad is grad and not grad.is_coalesced()


def test_repeated_rows_of_half_gradients_are_added_in_float32():
    parameter = owned_table(torch.zeros(ROWS, 1, dtype=torch.float16))
    parameter.grad = coo(torch.tensor([[2048.0], [0.0], [1.0], [0.0]], dtype=torch.float16))
    optimizer = optim.SGD([parameter], lr=1.0, momentum=0.9)
    optimizer.step()
    assert optimizer.state[parameter]["momentum_buffer"][5].item() == 2049.0


def test_gradients_that_are_not_contiguous():
    parameter, other = owned_table(initial()), owned_table(initial())
    parameter.grad = torch.randn(DIM, ROWS).t()
    other.grad = parameter.grad.contiguous()
    for p in (parameter, other):
        optim.Adam([p]).step()
    assert torch.equal(parameter, other)


def test_empty_gradients_count_as_steps():
    ours, theirs = owned_table(initial()), owned_table(initial())
    mine, reference = optim.Adam([ours]), optim.Adam([theirs])
    for parameter, optimizer in ((ours, mine), (theirs, reference)):
        train(optimizer, parameter, batches(3), 0.05)
    ours.grad = coo(torch.zeros(0, DIM), IDS[:0])
    theirs.grad = torch.zeros(ROWS, DIM)
    mine.step()
    reference.step()
    assert mine.state[ours]["step"].item() == 4
    assert torch.allclose(current_rows(ours, EVERYTHING), theirs, atol=1e-6)


def test_more_than_one_sparse_dimension_is_an_error():
    parameter = owned_table(initial())
    parameter.grad = torch.ones(ROWS, DIM).to_sparse()
    text = "Adam: a sparse gradient must have one sparse dimension, its rows, got 2"
    with pytest.raises(ValueError, match=re.escape(text)):
        optim.Adam([parameter]).step()


# ---- Gradients given elsewhere than in .grad -------------------------------------------------------------------------


def test_an_engine_may_step_by_itself():
    run = batches(10)
    parameter, other = owned_table(initial()), owned_table(initial())
    mine, reference = optim.Adam([parameter]), optim.Adam([other])
    for batch in run:
        for p in (parameter, other):
            set_gradient(p, batch, current_rows(p, batch.ids), False)
        grad, parameter.grad = parameter.grad.coalesce(), None
        mine.step_tables([(parameter, Gradient(grad.indices()[0], grad.values()))])
        mine.step()
        reference.step()
    assert torch.equal(current_rows(parameter, EVERYTHING), current_rows(other, EVERYTHING))


# ---- The optimizer as torch's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [optim.SGD, optim.LAMB])
def test_a_module_in_place_of_its_parameters(cls):
    with pytest.raises(TypeError, match=f"{cls.__name__}: params must be .* got the module Linear itself"):
        cls(torch.nn.Linear(1, 1))


OUR_ARGUMENTS = "lazy", "decay", "stochastic_rounding", "in_backward", "tensorflow_eps"


@pytest.mark.parametrize("name", sorted({case.kind for case in BY_NAME.values()} - {*REFERENCES}))
def test_signatures_are_those_of_torch(name):
    ours = inspect.signature(getattr(optim, name)).parameters
    theirs = inspect.signature(getattr(torch.optim, name)).parameters
    assert [p for p in ours if p not in OUR_ARGUMENTS] == list(theirs)
    for key, parameter in theirs.items():
        assert (ours[key].default, ours[key].kind) == (parameter.default, parameter.kind)


DENSE = ["sgd-momentum", "adagrad", "adam", "adamw", "rmsprop", "adadelta"]
DENSE += ["rowwise-adagrad", "partial-rowwise-adam-decay"]
# LAMB and Ftrl have another rule there.
DENSE = [name for name in one_of_each(DENSE, "none", "states", "weight", "") if name not in ("lamb", "ftrl")]


@pytest.mark.parametrize("name", DENSE)
def test_parameters_that_are_no_tables(name):
    case = BY_NAME[name]
    parameter, other = torch.nn.Parameter(initial()), torch.nn.Parameter(initial())
    mine, reference = case.ours([parameter], lr=0.02), case.dense([other], lr=0.02)
    for _ in range(5):
        parameter.grad = torch.randn(ROWS, DIM)
        other.grad, other.touched = parameter.grad.clone(), None
        mine.step()
        reference.step()
    assert table_if_any(parameter) is None
    assert torch.allclose(parameter, other, atol=1e-6)
    assert case.kind in REFERENCES or torch.equal(parameter, other)


def test_lamb_and_ftrl_of_parameters_that_are_no_tables():
    w, g = torch.tensor([3.0, 4.0]), torch.tensor([1.0, -1.0])
    parameter = torch.nn.Parameter(w.clone())
    parameter.grad = g.clone()
    optim.LAMB([parameter], lr=0.1, eps=0.0).step()
    # The first direction is the gradient's sign, whose length is sqrt(2). LAMB scales it to the length of the weight,
    # 5.
    assert torch.allclose(parameter, w - 0.1 * 5 / 2**0.5 * g)

    bias = torch.nn.Parameter(torch.zeros(2))
    bias.grad = torch.tensor([2.0, 0.5])
    optim.Ftrl([bias], lr=0.5, initial_accumulator_value=0.0, l1=1.0).step()
    assert torch.equal(bias, torch.tensor([-0.25, 0.0]))

    climbing = torch.nn.Parameter(torch.zeros(2))
    climbing.grad = torch.ones(2)
    optim.LAMB([climbing], lr=0.1, maximize=True).step()
    assert torch.allclose(climbing, torch.full((2,), 0.1))


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("cls", [optim.SGD, optim.Adagrad, optim.Adam, optim.AdamW])
def test_flags_of_torch_concern_the_others(cls, flags):
    parameter, bias = owned_table(initial()), torch.nn.Parameter(torch.zeros(3))
    twin, twin_bias = owned_table(initial()), torch.nn.Parameter(torch.zeros(3))
    mine, plain = cls([parameter, bias], lr=0.1, **flags), cls([twin, twin_bias], lr=0.1)
    batch = batches(1)[0]
    for table, other, optimizer in ((parameter, bias, mine), (twin, twin_bias, plain)):
        set_gradient(table, batch, current_rows(table, batch.ids), False)
        other.grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(parameter, twin) and torch.allclose(bias, twin_bias)


def test_hooks_run_once_and_closures_give_the_loss():
    calls = []
    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]).step()  # now torch's own step has hooks around it, too
    parameter, bias = owned_table(initial()), torch.nn.Parameter(torch.zeros(3))
    mine = optim.Adam([parameter, bias])
    mine.register_step_pre_hook(lambda *_: calls.append("before"))
    mine.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        assert torch.is_grad_enabled()
        mine.zero_grad()
        loss = torch.nn.functional.embedding(IDS, parameter, sparse=True).sum() + bias.sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert mine.step(closure).requires_grad
    assert calls == ["before", "after"]
    assert (bias != 0).all() and (parameter[5] != initial()[5]).all()


def test_writes_are_seen_by_autograd():
    parameter = owned_table(initial())
    loss = (parameter * parameter).sum()
    parameter.grad = coo(torch.ones(4, DIM))
    optim.SGD([parameter], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_stochastic_rounding_keeps_small_steps(dtype):
    totals = []
    for stochastic in (False, True):
        parameter = owned_table(torch.ones(ROWS, 64, dtype=dtype))
        optimizer = optim.SGD([parameter], lr=1e-5, stochastic_rounding=stochastic)
        for _ in range(50):
            parameter.grad = coo(torch.ones(2, 64, dtype=dtype), torch.tensor([1, 2]))
            optimizer.step()
        totals.append(parameter[1].float().mean().item())
    assert totals[0] == 1.0
    assert abs(totals[1] - (1 - 50e-5)) < 3e-4


# ---- GradScaler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("explicit", [False, True])
def test_grad_scaler(explicit, flags):
    parameter, bias = owned_table(initial()), torch.nn.Parameter(torch.zeros(DIM))
    twin, twin_bias = torch.nn.Parameter(initial()), torch.nn.Parameter(torch.zeros(DIM))
    mine, reference = optim.Adam([parameter, bias], **flags), torch.optim.Adam([twin, twin_bias])
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in range(2))
    for k, batch in enumerate(batches(12)):
        for table, vector, optimizer, scales, dense in (
            (parameter, bias, mine, scaler, False),
            (twin, twin_bias, reference, other, True),
        ):
            rows = current_rows(table, batch.ids) if not dense else table.detach()[batch.ids]
            set_gradient(table, batch, rows, dense)
            scale = scales.scale(torch.ones(())).item()
            table.grad = table.grad * scale * (float("inf") if k == 5 else 1.0)
            vector.grad = scale * rows.mean(0)
            if explicit:
                scales.unscale_(optimizer)
                (optim.clip_grad_norm_ if not dense else torch.nn.utils.clip_grad_norm_)([table, vector], 3.0)
            scales.step(optimizer)
            scales.update()
    assert scaler.get_scale() == other.get_scale()
    assert mine.state[parameter]["step"] == reference.state[twin]["step"] == 11
    assert torch.allclose(current_rows(parameter, EVERYTHING), twin, atol=1e-6) and torch.allclose(bias, twin_bias)


# ---- Errors ----------------------------------------------------------------------------------------------------------

ERRORS = {
    "LAMB: lazy must be True, got False": lambda p: optim.LAMB(p, lazy=False),
    "LAMB: eps must be at least 0, got -1": lambda p: optim.LAMB(p, eps=-1),
    "LAMB: betas must be two numbers in [0, 1), got (0.9, 1.0)": lambda p: optim.LAMB(p, betas=(0.9, 1.0)),
    "RowWiseAdagrad: lr must be at least 0, got -0.1": lambda p: optim.RowWiseAdagrad(p, lr=-0.1),
    "PartialRowWiseAdam: weight_decay must be at least 0, got nan": lambda p: optim.PartialRowWiseAdam(
        p, weight_decay=float("nan")
    ),
    "PartialRowWiseAdam: betas must be": lambda p: optim.PartialRowWiseAdam(p, betas=(-0.1, 0.5)),
    "Ftrl: lr must be above 0, got 0": lambda p: optim.Ftrl(p, lr=0.0),
    "Ftrl: lr_power must be at most 0, got 0.5": lambda p: optim.Ftrl(p, lr_power=0.5),
    "Ftrl: l1 must be at least 0, got -1": lambda p: optim.Ftrl(p, l1=-1),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors(text):
    with pytest.raises(ValueError, match=re.escape(text)):
        ERRORS[text]([torch.nn.Parameter(initial())])


def test_a_group_of_lamb_is_lazy_too():
    optimizer = optim.LAMB([torch.nn.Parameter(initial())])
    with pytest.raises(ValueError, match="LAMB: lazy must be True, got False"):
        optimizer.add_param_group({"params": torch.nn.Parameter(initial()), "lazy": False})
