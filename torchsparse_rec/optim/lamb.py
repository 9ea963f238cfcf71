"""LAMB: Adam whose step is as long as the weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._dense import check_betas, check_not_negative, dense_parameters
from .row_optimizer import RowOptimizer, Rule

__all__ = ["LAMB"]


class LAMB(RowOptimizer):
    """
    Adam with steps as long as the weight: as each row of a table, or as the whole tensor of another parameter.

    ``m`` and ``v`` are Adam's, corrected for their bias, ``u = m / (sqrt(v) + eps) + weight_decay * w``,
    ``w -= lr * |w| / |u| * u``. Where one of the norms is zero, their ratio counts as 1.

    Rows without gradient are always left alone: how they would move depends on their norm at every single step.

    Args:
        params: parameters, named parameters, or groups of them.
        lr: the learning rate. Default 1e-3.
        betas: the shares of the two moments that a step keeps. Default (0.9, 0.999).
        eps: the number added to the root. Default 1e-6.
        weight_decay: the part of the weight that is added to the direction. Default 0.
        maximize: whether to climb instead of descending. Default False.
        lazy: True, which it must be.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.

    Raises:
        ValueError: ``lazy=False``, a negative argument, a beta of 1 or more.

    Source: You et al., "Large Batch Optimization for Deep Learning"; by rows FBGEMM's ``LAMB``.

    Example:
        >>> from torchsparse_rec import nn
        >>> table = nn.Embedding(1000, 8, grad_mode="sparse")
        >>> optimizer = LAMB(table.parameters(), lr=0.1)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[table.weight])
        ['exp_avg', 'exp_avg_sq', 'step']
    """

    _steps_whole_rows = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        lazy: bool = True,
        stochastic_rounding: bool = False,
        in_backward: bool = False,
    ) -> None:
        check_not_negative("LAMB", lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("LAMB", betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, lazy=lazy, stochastic_rounding=stochastic_rounding, in_backward=in_backward)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see :meth:`torch.optim.Optimizer.add_param_group`."""
        if not param_group.get("lazy", self._row_defaults["lazy"]):
            raise ValueError(
                "LAMB: lazy must be True, got False: the step of a row without gradient depends on the row's norm at "
                "that step, so it cannot be caught up later"
            )
        super().add_param_group(param_group)

    def rule(self, group: dict[str, Any]) -> Rule:
        return Rule("lamb", group)

    @torch.no_grad()
    def _dense_step(self) -> None:
        for group, weight, grad, state, step in dense_parameters(self):
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            m = state["exp_avg"].lerp_(grad, 1 - beta1)
            v = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            direction = m / (1 - beta1**step) / ((v / (1 - beta2**step)).sqrt() + group["eps"])
            direction.add_(weight, alpha=group["weight_decay"])
            lengths = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(direction)
            ratio = torch.where((lengths[0] > 0) & (lengths[1] > 0), lengths[0] / lengths[1], 1.0)
            weight.sub_(direction.mul_(ratio), alpha=lr)
