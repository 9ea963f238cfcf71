"""Helpers for steps of parameters that are no tables, by the optimizers that torch does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .row_optimizer import RowOptimizer

__all__ = ["check_betas", "check_not_negative", "dense_parameters", "per_row", "row_means"]


def dense_parameters(optimizer: RowOptimizer) -> Iterator[tuple[dict[str, Any], Tensor, Tensor, dict[str, Any], int]]:
    """Yield the group, the parameter, the gradient to descend, the state and the step's number of each parameter."""
    for group in optimizer.param_groups:
        names = optimizer.rule(group).states
        for parameter in group["params"]:
            state = optimizer.stored_state[parameter]
            state.setdefault("step", torch.tensor(0.0))
            for name in names:
                if name not in state:
                    state[name] = optimizer.new_state(parameter, name, parameter.dtype, state)
            state["step"] += 1
            grad = -parameter.grad if group["maximize"] else parameter.grad
            yield group, parameter, grad, state, int(state["step"])


def row_means(x: Tensor) -> Tensor:
    """Return the mean over all dimensions but the first: ``[V]``."""
    return x.flatten(1).mean(1) if x.dim() > 1 else x


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Reshape ``[V]`` to ``[V, 1, ...]``, with as many dimensions as ``like``, to broadcast with it."""
    return values.reshape(values.shape + (1,) * (like.dim() - values.dim()))


def check_not_negative(optimizer: str, **arguments: float | Tensor) -> None:
    """Raise ``ValueError`` unless all arguments are at least 0."""
    for name, value in arguments.items():
        if not value >= 0:
            raise ValueError(f"{optimizer}: {name} must be at least 0, got {value}")


def check_betas(optimizer: str, betas: tuple[float, float]) -> None:
    """Raise ``ValueError`` unless there are two betas, both in ``[0, 1)``."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{optimizer}: betas must be two numbers in [0, 1), got {betas}")
