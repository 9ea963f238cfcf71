"""Lion: steps of one length, in the direction of an average's sign."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._dense import check_betas, check_not_negative, dense_parameters
from .row_optimizer import RowOptimizer, Rule

__all__ = ["Lion"]


class Lion(RowOptimizer):
    """
    Lion for tables too: dense Lion's results, at the cost of the touched rows.

    ``w = (1 - lr * weight_decay) * w - lr * sign(beta1 * m + (1 - beta1) * g)``, then
    ``m = beta2 * m + (1 - beta2) * g``.

    Rows without gradient still move, each by ``lr`` in every step: ``m`` fades, but keeps its sign, however small it
    has become. They are brought up to date when they are next read or stepped.

    Args:
        params: parameters, named parameters, or groups of them.
        lr: the learning rate. Default 1e-4.
        betas: the shares of the average that the direction and the average keep. Default (0.9, 0.99).
        weight_decay: the decay: a step takes ``lr * weight_decay`` of the weight away. Default 0.
        maximize: whether to climb instead of descending. Default False.
        lazy: whether to leave rows without gradient alone, decay included. Default False.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.

    Raises:
        ValueError: a negative argument, a beta of 1 or more.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms"; ``keras.optimizers.Lion``.

    Example:
        >>> from torchsparse_rec import nn
        >>> table = nn.Embedding(4, 1, grad_mode="sparse", _weight=torch.zeros(4, 1))
        >>> optimizer = Lion(table.parameters(), lr=0.5)
        >>> table(torch.tensor([1, 1, 2])).sum().backward()
        >>> optimizer.step()
        >>> table.weight.flatten().tolist()
        [0.0, -0.5, -0.5, 0.0]
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        lazy: bool = False,
        stochastic_rounding: bool = False,
        in_backward: bool = False,
    ) -> None:
        check_not_negative("Lion", lr=lr, weight_decay=weight_decay)
        check_betas("Lion", betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, lazy=lazy, stochastic_rounding=stochastic_rounding, in_backward=in_backward)

    def rule(self, group: dict[str, Any]) -> Rule:
        return Rule("lion", group)

    @torch.no_grad()
    def _dense_step(self) -> None:
        for group, weight, grad, state, _ in dense_parameters(self):
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            m = state["exp_avg"]
            direction = torch.sign(m * beta1 + grad * (1 - beta1))
            weight.mul_(1 - lr * group["weight_decay"]).sub_(direction, alpha=lr)
            m.mul_(beta2).add_(grad, alpha=1 - beta2)
