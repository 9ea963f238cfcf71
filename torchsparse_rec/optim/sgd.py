"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .row_optimizer import RowOptimizer, Rule

__all__ = ["SGD"]


class SGD(RowOptimizer, torch.optim.SGD):
    """
    :class:`torch.optim.SGD` for tables too: also with momentum and decay, a step costs only the touched rows.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, differentiable, fused: torch's
            arguments. The last three concern parameters that are no tables; ``fused`` also tables as long as all their
            gradients are strided.
        lazy: whether to leave rows without gradient alone, momentum and decay included. Default False: they move as
            torch's do.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.

    Example:
        >>> table = torch.nn.Embedding(4, 1, sparse=True, _weight=torch.zeros(4, 1))
        >>> optimizer = SGD(table.parameters(), lr=0.5)
        >>> table(torch.tensor([1, 1, 2])).sum().backward()
        >>> optimizer.step()
        >>> table.weight.flatten().tolist()
        [0.0, -1.0, -0.5, 0.0]
    """

    counts_steps = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        lazy: bool = False,
        stochastic_rounding: bool = False,
        in_backward: bool = False,
    ) -> None:
        flags: dict[str, Any] = {"maximize": maximize, "foreach": foreach, "differentiable": differentiable}
        ours = {"lazy": lazy, "stochastic_rounding": stochastic_rounding, "in_backward": in_backward}
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, fused=fused, **flags, **ours)

    def rule(self, group: dict[str, Any]) -> Rule:
        # As torch reads it, should momentum become 0.
        return Rule("sgd", group, nesterov=bool(group["nesterov"] and group["momentum"] != 0))

    def _steps_taken(self, state: dict[str, Any]) -> int:
        # Only whether a step is the first matters: it fills the buffer.
        return int(state.get("momentum_buffer") is not None)
