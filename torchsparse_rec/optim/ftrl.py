"""Follow the regularized leader."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._dense import check_not_negative, dense_parameters
from .row_optimizer import RowOptimizer, Rule

__all__ = ["Ftrl"]


class Ftrl(RowOptimizer):
    """
    Follow the regularized leader, proximal: linear models with exact zeros.

    With ``p = -lr_power``: ``b = a + g * g``, ``z += g + 2 * l2_shrinkage * w - (b**p - a**p) / lr * w``. Then ``w =
    (clamp(z, -l1, l1) - z) / ((b**p + beta) / lr + 2 * l2)`` and ``a = b``.

    Rows of a table without gradient keep their value, as in TensorFlow; in a strided gradient these are the rows of
    zeros. In other parameters every element is stepped.

    Args:
        params: parameters, named parameters, or groups of them.
        lr: the learning rate, above 0. Default 1e-3.
        lr_power: the power of the accumulator by which the learning rate falls, at most 0. Default -0.5.
        initial_accumulator_value: the initial value of ``a``. Default 0.1.
        l1: strength of the l1 penalty. Default 0.
        l2: strength of the l2 penalty. Default 0.
        l2_shrinkage: strength of the l2 penalty that goes into the gradient alone, not into ``a``. Default 0.
        beta: the number added to the root. Default 0.
        maximize: whether to climb instead of descending. Default False.
        lazy: True or False, which changes nothing. Default False.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.

    Raises:
        ValueError: an argument outside its range.

    Source: ``tf.compat.v1.train.FtrlOptimizer``.

    Example:
        >>> table = torch.nn.Embedding(4, 1, sparse=True, _weight=torch.zeros(4, 1))
        >>> optimizer = Ftrl(table.parameters(), lr=0.5, initial_accumulator_value=0.0, l1=1.0)
        >>> (2 * table(torch.tensor([1]))).sum().backward()
        >>> optimizer.step()
        >>> table.weight[1].item()
        -0.25
    """

    _zero_rows_are_idle = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        lr_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1: float = 0,
        l2: float = 0,
        l2_shrinkage: float = 0,
        beta: float = 0,
        *,
        maximize: bool = False,
        lazy: bool = False,
        stochastic_rounding: bool = False,
        in_backward: bool = False,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "lr_power": lr_power,
            "initial_accumulator_value": initial_accumulator_value,
            "l1": l1,
            "l2": l2,
            "l2_shrinkage": l2_shrinkage,
            "beta": beta,
        }
        check_not_negative("Ftrl", **{name: value for name, value in defaults.items() if name != "lr_power"})
        if not lr > 0:
            raise ValueError(f"Ftrl: lr must be above 0, got {lr}")
        if not lr_power <= 0:
            raise ValueError(f"Ftrl: lr_power must be at most 0, got {lr_power}")
        defaults["maximize"] = maximize
        super().__init__(params, defaults, lazy=lazy, stochastic_rounding=stochastic_rounding, in_backward=in_backward)

    def rule(self, group: dict[str, Any]) -> Rule:
        return Rule("ftrl", group, lr=1.0 if self._only_makes_states(group) else group["lr"])

    def _rule_of(self, group: dict[str, Any]) -> Rule:
        # At lr 0 the rule depends on the gradients too.
        return super()._rule_of(group) if group["lr"] != 0 else self.rule(group)

    def _only_makes_states(self, group: dict[str, Any]) -> bool:
        """
        Say whether this is the step by which torch.distributed.checkpoint makes states: lr 0 and gradients of 0.

        Such a step moves nothing. Any other step with an lr of 0 is an error: the formula divides by it.
        """
        wanted = (parameter for parameter in group["params"] if parameter.requires_grad)
        return float(group["lr"]) == 0 and all(p.grad is not None and not p.grad.any() for p in wanted)

    def initial_value(self, name: str) -> float:
        return self.defaults["initial_accumulator_value"] if name == "accumulator" else 0.0

    @torch.no_grad()
    def _dense_step(self) -> None:
        for group, weight, grad, state, _ in dense_parameters(self):
            if self._only_makes_states(group):
                continue
            lr, power = float(group["lr"]), -group["lr_power"]
            if lr == 0:
                raise ValueError("Ftrl: lr must be above 0, got 0")
            before = state["accumulator"].pow(power)
            after = state["accumulator"].addcmul_(grad, grad).pow(power)
            z = state["linear"].add_(grad).add_(weight, alpha=2 * group["l2_shrinkage"])
            z.addcmul_(after - before, weight, value=-1 / lr)
            denominator = (after + group["beta"]) / lr + 2 * group["l2"]
            weight.copy_((z.clamp(-group["l1"], group["l1"]) - z) / denominator)
