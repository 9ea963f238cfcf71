"""Adamax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .row_optimizer import RowOptimizer, Rule

__all__ = ["Adamax"]


class Adamax(RowOptimizer, torch.optim.Adamax):
    """
    :class:`torch.optim.Adamax` for tables too.

    Rows without gradient move in no closed form: the divisor of every element fades until it meets ``eps``, each in
    another step. So every step updates all rows of a table, and a warning says so. With ``lazy=True`` a step costs only
    the touched rows.

    Args:
        params, lr, betas, eps, weight_decay, foreach, maximize, differentiable, capturable: torch's arguments.
            ``foreach``, ``differentiable`` and ``capturable`` concern parameters that are no tables.
        lazy: whether to leave rows without gradient alone, averages included. Default False.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.

    Example:
        >>> from torchsparse_rec import nn
        >>> table = nn.Embedding(1000, 8, grad_mode="sparse")
        >>> optimizer = Adamax(table.parameters(), lr=0.1, lazy=True)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[table.weight])
        ['exp_avg', 'exp_inf', 'step']
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
        lazy: bool = False,
        stochastic_rounding: bool = False,
        in_backward: bool = False,
    ) -> None:
        flags: dict[str, Any] = {"maximize": maximize, "differentiable": differentiable, "capturable": capturable}
        ours = {"lazy": lazy, "stochastic_rounding": stochastic_rounding, "in_backward": in_backward}
        super().__init__(params, lr, betas, eps, weight_decay, foreach, **flags, **ours)

    def rule(self, group: dict[str, Any]) -> Rule:
        return Rule("adamax", group)
