"""Tables that change their parameter group, leave it, or stand still in mid-training: each mode does as torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kinds import WithHead, loss_of, train
from pairs import in_pairs
from torch import Tensor
from torch.nn import Module

from torchsparse_rec import initializers, optim

MODES = ["dense", "sparse", "fused"]
OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adam": {}, "RMSprop": {"momentum": 0.5}}


def move(model: Module, optimizer: Any) -> None:
    group = optimizer.param_groups[0]
    parameters, group["params"] = group["params"], []
    optimizer.add_param_group({"params": parameters, "lr": group["lr"] / 8})


def remove(model: Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = []


def pop(model: Module, optimizer: Any) -> None:
    optimizer.param_groups.pop(0)


def freeze(model: Module, optimizer: Any) -> None:
    model.tables.requires_grad_(False)


def leave_out(model: Module, optimizer: Any) -> None:
    model.is_left_out = True


CHANGES: dict[str, Callable[..., None]] = {x.__name__: x for x in (move, remove, pop, freeze, leave_out)}


class Model(WithHead):
    """A table whose rows begin at 0.5, and a head."""

    is_left_out = False

    def __init__(self, kind: str, grad_mode: str | None) -> None:
        super().__init__(kind, grad_mode, **({"initializer": initializers.Constant(0.5)} if kind == "variable" else {}))
        if kind != "variable":
            torch.nn.init.constant_(next(self.tables.parameters()), 0.5)
        torch.nn.init.constant_(self.head.weight, 0.25)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Apply the head to the rows of ids, or to ones alone."""
        return self.head(torch.ones(4)) if self.is_left_out else super().forward(ids)

    def groups(self) -> list[dict[str, Any]]:
        """Return a group for the table, and one for the head."""
        return [{"params": list(self.tables.parameters())}, {"params": list(self.head.parameters())}]


def losses(kind: str, mode: str | None, name: str, change: str, set_to_none: bool) -> list[float]:
    """Train by torch's optimizer, or in a mode by ours, with a change after four steps; return losses and results."""
    model = Model("table", "dense") if mode is None else Model(kind, mode)
    of = torch.optim if mode is None else optim
    options = {"in_backward": True} if mode in ("fused", "auto") else {}
    optimizer = getattr(of, name)(model.groups(), lr=0.05, **OPTIMIZERS[name], **options)
    found = []
    for step in range(9):
        if step == 4:
            CHANGES[change](model, optimizer)
        if step == 7:  # the table comes back
            model.tables.requires_grad_(True)
            model.is_left_out = False
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    with torch.no_grad():
        return found + model(torch.arange(20)).flatten().tolist()


# A table that grows has no dense gradients.
TABLES = [(kind, mode) for kind in ("table", "collection", "variable") for mode in MODES]
TABLES.remove(("variable", "dense"))


@in_pairs(table=TABLES, change=[(x, none) for x in CHANGES for none in (True, False)], name=OPTIMIZERS)
def test_a_change_in_mid_training_is_torchs(table: tuple[str, str], change: tuple[str, bool], name: str) -> None:
    got, want = (losses(table[0], mode, name, *change) for mode in (table[1], None))
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["table", "collection", "variable"])
@pytest.mark.parametrize("change", [move, remove, pop])
def test_a_change_between_backward_and_step_is_refused(change: Callable[..., None], kind: str) -> None:
    model = Model(kind, "fused")
    optimizer = optim.Adam(model.groups(), in_backward=True)
    loss_of(model, 0).backward()
    change(model, optimizer)
    with pytest.raises(
        RuntimeError, match="Adam: a table's parameter group has changed before step.*grad_mode='sparse'"
    ):
        optimizer.step()


@pytest.mark.parametrize("change", [remove, pop])
def test_a_state_without_a_group_is_not_saved(change: Callable[..., None]) -> None:
    """Refuse a state dict that would lose the state of a table; torch raises a KeyError with a number."""
    model = Model("table", "fused")
    optimizer = optim.Adam(model.groups(), in_backward=True)
    train(model, optimizer, range(3))
    change(model, optimizer)
    with pytest.raises(RuntimeError, match=r"Adam: a parameter of shape \(20, 4\) has a state, but no parameter group"):
        optimizer.state_dict()
    del optimizer.state[next(model.tables.parameters())]
    assert len(optimizer.state_dict()["state"]) == 2
