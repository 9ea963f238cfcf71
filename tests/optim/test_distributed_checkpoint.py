"""torch.distributed.checkpoint saves and loads models and optimizers in every mode bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kinds import WithHead, train
from optim.cases import other_kinds
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from torchsparse_rec import optim

# torch warns in a process that is alone, and Adamax of its cost.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:Adamax.*every step updates all rows"),
]

MODES = ("dense", "sparse", "fused", "auto")
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": optim.Adam,
    "AdamW": optim.AdamW,
    "amsgrad": lambda *a, **k: optim.Adam(*a, amsgrad=True, **k),
    "momentum": lambda *a, **k: optim.SGD(*a, momentum=0.9, weight_decay=0.01, **k),
    "SGD": optim.SGD,
    "Adagrad": optim.Adagrad,
    "RowWiseAdagrad": optim.RowWiseAdagrad,
    "Adadelta": optim.Adadelta,
    "RMSprop": optim.RMSprop,
    "Ftrl": optim.Ftrl,
    "LAMB": optim.LAMB,
}
OPTIMIZERS |= {case.kind: case.ours for case in other_kinds({*OPTIMIZERS, "PartialRowWiseAdam"})}


def made(kind: str, mode: str | None, optimizer: str = "Adam", **of_variable: Any) -> tuple[WithHead, Any]:
    model = WithHead(kind, mode, **of_variable)
    return model, OPTIMIZERS[optimizer](model.parameters(), lr=0.1, in_backward=mode == "fused")


def check_same(one: WithHead, other: WithHead) -> None:
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def through_files(one: tuple[WithHead, Any], other: tuple[WithHead, Any], folder: Path) -> dict[str, Any]:
    """Save a model and its optimizer, load the files into others, and return the saved state of the optimizer."""
    model, optimizer = get_state_dict(*one)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)
    states = dict(zip(("model", "optimizer"), get_state_dict(*other), strict=True))
    dcp.load(states, checkpoint_id=folder, no_dist=True)
    set_state_dict(*other, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return optimizer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["table", "collection"])
def test_files(kind: str, mode: str, tmp_path: Path) -> None:
    one, other = made(kind, mode), made(kind, mode)
    train(*one, range(3))
    saved = through_files(one, other, tmp_path)
    assert sorted(saved["state"]) == sorted(name for name, _ in one[0].named_parameters())
    check_same(one[0], other[0])
    for each in (one, other):
        train(*each, range(3, 6))
    check_same(one[0], other[0])


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer_states(optimizer: str, mode: str, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    one, other = made("table", mode, optimizer), made("table", mode, optimizer)
    train(*one, range(3))
    state = copy.deepcopy(get_optimizer_state_dict(*one, options=options))
    other[0].load_state_dict(one[0].state_dict())
    set_optimizer_state_dict(*other, copy.deepcopy(state), options=options)
    check_same(one[0], other[0])  # torch makes states by a step with zeros as gradients
    for each in (one, other):
        train(*each, range(3, 6))
    check_same(one[0], other[0])


def test_modes_take_up_each_others_files() -> None:
    one = made("table", "fused")
    train(*one, range(3))
    model, optimizer = copy.deepcopy(get_state_dict(*one))
    train(*one, range(3, 6))
    for mode in ("dense", "sparse"):
        other = made("table", mode)
        set_state_dict(*other, model_state_dict=copy.deepcopy(model), optim_state_dict=copy.deepcopy(optimizer))
        train(*other, range(3, 6))
        torch.testing.assert_close(one[0].state_dict(), other[0].state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("makes_states", [False, True])
def test_an_lr_of_zero_makes_states_of_ftrl_and_nothing_else(makes_states: bool) -> None:
    model, optimizer = made("table", "sparse", "Ftrl")
    model.head.requires_grad_(False)  # its step would raise first
    optimizer.param_groups[0]["lr"] = 0.0
    if makes_states:  # once more with gradients is an error all the same
        before = copy.deepcopy(model.state_dict())
        (0 * model(torch.tensor([1]))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="row_optimizer_update_: lr must be"):
        optimizer.step()
    for parameter in model.parameters():
        parameter.requires_grad_(True).grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="Ftrl: lr must be above 0, got 0"):
        optimizer.step()


# ---- Tables that grow ------------------------------------------------------------------------------------------------


def test_a_table_that_grows_within_its_capacity(tmp_path: Path) -> None:
    one, other = made("variable", "sparse", capacity=64), made("variable", "sparse", capacity=64)
    train(*one, range(3))
    train(*other, range(20, 22))  # other keys, which loading must remove
    through_files(one, other, tmp_path)
    for each in (one, other):
        train(*each, range(3, 6))
    assert_same_rows(one[0], other[0])


def test_a_table_that_has_grown_is_refused_and_restores_its_own_files(tmp_path: Path) -> None:
    one, other = made("variable", "sparse", capacity=8), made("variable", "sparse", capacity=8)
    train(*one, range(3))
    state = {"model": one[0].state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch between saved.*tables.weight"):
        dcp.load({"model": other[0].state_dict()}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    one[0].tables.save(tmp_path / "ours")  # type: ignore[operator, union-attr]
    other[0].tables.restore(tmp_path / "ours")  # type: ignore[operator, union-attr]
    assert_same_rows(one[0], other[0])


def assert_same_rows(one: WithHead, other: WithHead) -> None:
    keys = torch.arange(20)
    torch.testing.assert_close(one.eval().tables(keys), other.eval().tables(keys), rtol=0, atol=0)
