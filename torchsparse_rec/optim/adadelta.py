"""Adadelta."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .row_optimizer import RowOptimizer, Rule

__all__ = ["Adadelta"]


class Adadelta(RowOptimizer, torch.optim.Adadelta):
    """
    :class:`torch.optim.Adadelta` for tables too: dense Adadelta's results, at the cost of the touched rows.

    Args:
        params, lr, rho, eps, weight_decay, foreach, capturable, maximize, differentiable: torch's arguments.
            ``foreach``, ``capturable`` and ``differentiable`` concern parameters that are no tables. ``weight_decay``
            steps every row of a table at every step, at that cost; a warning says so.
        lazy: whether to leave rows without gradient alone, averages included. Default False.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.

    Example:
        >>> table = torch.nn.Embedding(4, 1, sparse=True)
        >>> optimizer = Adadelta(table.parameters())
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[table.weight])
        ['acc_delta', 'square_avg', 'step']
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
        lazy: bool = False,
        stochastic_rounding: bool = False,
        in_backward: bool = False,
    ) -> None:
        flags: dict[str, Any] = {"capturable": capturable, "maximize": maximize, "differentiable": differentiable}
        ours = {"lazy": lazy, "stochastic_rounding": stochastic_rounding, "in_backward": in_backward}
        super().__init__(params, lr, rho, eps, weight_decay, foreach, **flags, **ours)

    def rule(self, group: dict[str, Any]) -> Rule:
        return Rule("adadelta", group)
