"""Training loops that step or clear gradients at unusual moments: they train as torch does with dense gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from kinds import WithHead, loss_of, train
from torch import Tensor

from torchsparse_rec import optim

OPTIMIZERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "SGD": (optim.SGD, torch.optim.SGD, {}),
    "momentum": (optim.SGD, torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (optim.Adagrad, torch.optim.Adagrad, {}),
    "Adam": (optim.Adam, torch.optim.Adam, {}),
}


def by_hooks(model: torch.nn.Module, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    for parameter in model.parameters():
        own = optimizer([parameter])

        def step(parameter: Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


def by_torch(model: torch.nn.Module, optimizer: partial[torch.optim.Optimizer]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it imports scripted functions, of which torch warns
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(optimizer.func, model.parameters(), optimizer.keywords)  # type: ignore[arg-type]


@pytest.mark.parametrize("arrange", [by_hooks, by_torch])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["dense", "sparse", "auto"])
@pytest.mark.parametrize("kind", ["table", "collection"])
def test_one_optimizer_per_parameter_stepped_by_backward(
    kind: str, mode: str, name: str, arrange: Callable[..., None]
) -> None:
    ours, theirs, keywords = OPTIMIZERS[name]
    model, want = WithHead(kind, mode), WithHead(kind, "dense")
    arrange(model, partial(ours, lr=0.1, **keywords))
    for step in range(6):
        loss_of(model, step).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    train(want, theirs(want.parameters(), lr=0.1, **keywords), range(6))
    torch.testing.assert_close(model.state_dict(), want.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("arrange", "refusal"),
    [(by_hooks, "has a hook on its gradient"), (by_torch, "a second backward.. reached a table")],
)
@pytest.mark.parametrize("kind", ["table", "collection"])
def test_fused_tables_refuse_it(kind: str, arrange: Callable[..., None], refusal: str) -> None:
    model = WithHead(kind, "fused")
    arrange(model, partial(optim.Adam, lr=0.1, in_backward=True))
    with pytest.raises(RuntimeError, match=f"{refusal}.*choose grad_mode='sparse'"):
        for step in range(2):
            loss_of(model, step).backward()
