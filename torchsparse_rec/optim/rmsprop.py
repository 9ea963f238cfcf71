"""RMSprop."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from .row_optimizer import RowOptimizer, Rule

__all__ = ["RMSprop"]


class RMSprop(RowOptimizer, torch.optim.RMSprop):
    """
    :class:`torch.optim.RMSprop` for tables too: dense RMSprop's results, at the cost of the touched rows.

    Args:
        params, lr, alpha, eps, weight_decay, momentum, centered, capturable, foreach, maximize, differentiable: torch's
            arguments. ``foreach``, ``capturable`` and ``differentiable`` concern parameters that are no tables.
            ``weight_decay`` steps every row of a table at every step, at that cost; a warning says so. ``decay="seen"``
            costs only the rows of the batch.
        lazy: whether to leave rows without gradient alone, momentum and averages included. Default False.
        decay: the rows of a table that ``weight_decay`` moves: ``"all"``, as torch does, or ``"seen"``, those whose
            gradient is not zero in this step, as a penalty on the rows of the batch does. Parameters that are no tables
            decay whole. Default ``"all"``.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.

    Example:
        >>> from torchsparse_rec import nn
        >>> table = nn.Embedding(1000, 8, grad_mode="sparse")
        >>> optimizer = RMSprop(table.parameters(), lr=0.1, momentum=0.9)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[table.weight])
        ['momentum_buffer', 'square_avg', 'step']
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        lazy: bool = False,
        decay: Literal["all", "seen"] = "all",
        stochastic_rounding: bool = False,
        in_backward: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            alpha,
            eps,
            weight_decay,
            momentum,
            centered,
            capturable,
            foreach,
            maximize,
            differentiable,
            lazy=lazy,
            decay=decay,
            stochastic_rounding=stochastic_rounding,
            in_backward=in_backward,
        )

    def rule(self, group: dict[str, Any]) -> Rule:
        return Rule("rmsprop", group)
