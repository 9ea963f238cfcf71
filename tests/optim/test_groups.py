"""A table's parameter group that changes or goes between backward and step, or before a state is saved, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kinds import WithHead, loss_of, train
from torch.nn import Module

from torchsparse_rec import optim


def move(model: Module, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    parameters, group["params"] = group["params"], []
    optimizer.add_param_group({"params": parameters, "lr": group["lr"] / 8})


def remove(model: Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = []


def pop(model: Module, optimizer: Any) -> None:
    optimizer.param_groups.pop(0)


def made(kind: str) -> tuple[WithHead, optim.Adam]:
    """Make a model whose table and head have a group each, and its optimizer."""
    model = WithHead(kind, "fused")
    groups = [{"params": list(part.parameters())} for part in (model.tables, model.head)]
    return model, optim.Adam(groups, in_backward=True)


@pytest.mark.parametrize("kind", ["table", "collection", "variable"])
@pytest.mark.parametrize("change", [move, remove, pop])
def test_a_change_between_backward_and_step_is_refused(change: Callable[..., None], kind: str) -> None:
    model, optimizer = made(kind)
    loss_of(model, 0).backward()
    change(model, optimizer)
    with pytest.raises(
        RuntimeError, match="Adam: a table's parameter group has changed before step.*grad_mode='sparse'"
    ):
        optimizer.step()


@pytest.mark.parametrize("change", [remove, pop])
def test_a_state_without_a_group_is_not_saved(change: Callable[..., None]) -> None:
    """Refuse a state dict that would lose the state of a table; torch raises a KeyError with a number."""
    model, optimizer = made("table")
    train(model, optimizer, range(3))
    change(model, optimizer)
    with pytest.raises(RuntimeError, match=r"Adam: a parameter of shape \(20, 4\) has a state, but no parameter group"):
        optimizer.state_dict()
    del optimizer.state[next(model.tables.parameters())]
    assert len(optimizer.state_dict()["state"]) == 2
