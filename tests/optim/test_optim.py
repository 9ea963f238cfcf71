"""Tables step as under dense optimizers, with every rule and every layout of the gradient, and after any idle time."""

import contextlib

import pytest
import torch
from optim.cases import (
    BY_NAME,
    CASES,
    ROWS,
    batches,
    current_rows,
    dense_results,
    error_of,
    initial,
    owned_table,
    train,
)

from torchsparse_rec.tables.table import table_of

STEPS = 60


def expecting(case):
    """Expect the one warning of a rule that steps all rows."""
    return pytest.warns(UserWarning, match="weight_decay=.* goes through") if case.warns else contextlib.nullcontext()


def check_against_dense(case, run):
    """Compare lookups with the dense optimizer's table, to 1.5 times float32's error, and with the flushed rows."""
    expected, error = dense_results(case, run)
    parameter = owned_table(initial())
    optimizer = case.ours([parameter], lr=case.lr)
    with expecting(case):
        train(optimizer, parameter, run, case.lr)
    seen = current_rows(parameter, torch.arange(ROWS))
    table_of(parameter).flush()
    assert torch.equal(parameter, seen)
    assert error_of(seen, expected) <= 1.5 * error


@pytest.mark.parametrize("layout", ["sparse", "dense", "mixed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_dense_optimizer(case, layout):
    check_against_dense(case, batches(STEPS, layout))


ON_CUDA = ["sgd", "sgd-nesterov-decay", "adagrad", "rowwise-adagrad", "adam", "adamw-amsgrad", "adam-decay"]
ON_CUDA += ["partial-rowwise-adam-decay", "rmsprop-centered-momentum", "ftrl-penalties", "adadelta", "lamb"]


@pytest.mark.parametrize("name", ON_CUDA)
def test_equals_the_dense_optimizer_on_emulated_cuda(name, emulated):
    before = emulated()
    check_against_dense(BY_NAME[name], batches(20, "mixed"))
    assert emulated() > before


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_dense_optimizer_after_300_steps(case, seed):
    check_against_dense(case, batches(300, "mixed", seed))


@pytest.mark.parametrize("case", [case for case in CASES if not case.warns], ids=str)
def test_float64_tables(case):
    run = batches(30)
    expected, _ = dense_results(case, run)
    parameter = owned_table(initial().double())
    train(case.ours([parameter], lr=case.lr), parameter, run, case.lr)
    table_of(parameter).flush()
    assert (parameter.detach() - expected).abs().max() <= 1e-10
