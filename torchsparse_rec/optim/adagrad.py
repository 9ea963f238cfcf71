"""Adagrad, with a sum for every element or one for every row."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..tables.layouts import accumulator_dtype
from ._dense import check_not_negative, dense_parameters, per_row, row_means
from .row_optimizer import RowOptimizer, Rule

__all__ = ["Adagrad", "RowWiseAdagrad"]


class Adagrad(RowOptimizer, torch.optim.Adagrad):
    """
    :class:`torch.optim.Adagrad` for tables too, in one pass over the rows of the batch.

    Args:
        params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, foreach, maximize, differentiable, fused:
            torch's arguments. ``foreach`` and ``differentiable`` concern parameters that are no tables; ``fused`` also
            tables as long as all their gradients are strided. ``weight_decay`` moves every row of a table at every
            step, at that cost; a warning says so. ``decay="seen"`` costs only the rows of the batch.
        lazy: whether to leave rows without gradient alone, decay included. Default False: they move as torch's do.
        decay: the rows of a table that ``weight_decay`` moves: ``"all"``, as torch does, or ``"seen"``, those whose
            gradient is not zero in this step, as a penalty on the rows of the batch does. Parameters that are no tables
            decay whole. Default ``"all"``.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.

    Example:
        >>> table = torch.nn.Embedding(4, 1, sparse=True, _weight=torch.zeros(4, 1))
        >>> optimizer = Adagrad(table.parameters(), lr=0.5)
        >>> table(torch.tensor([1, 1, 2])).sum().backward()
        >>> optimizer.step()
        >>> table.weight.flatten().tolist()
        [0.0, -0.5, -0.5, 0.0]
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        lazy: bool = False,
        decay: Literal["all", "seen"] = "all",
        stochastic_rounding: bool = False,
        in_backward: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            lr_decay,
            weight_decay,
            initial_accumulator_value,
            eps,
            foreach,
            maximize=maximize,
            differentiable=differentiable,
            fused=fused,
            lazy=lazy,
            decay=decay,
            stochastic_rounding=stochastic_rounding,
            in_backward=in_backward,
        )

    def rule(self, group: dict[str, Any]) -> Rule:
        return Rule("adagrad", group)

    def _skips_zeros(self, group: dict[str, Any]) -> bool:
        # Where neither the sum nor eps keeps it above 0, the formula divides 0 by 0.
        return super()._skips_zeros(group) or group["eps"] == group["initial_accumulator_value"] == 0

    def initial_value(self, name: str) -> float:
        return self.defaults["initial_accumulator_value"]

    def state_of(self, parameter: Tensor, name: str, state: dict[str, Any]) -> Tensor:
        # Before the first step torch makes the sums in the parameter's dtype: in half precision, rounded ones.
        if state.get("step") == 0 and name in state and state[name].dtype != accumulator_dtype(parameter.dtype):
            del state[name]
        return super().state_of(parameter, name, state)


class RowWiseAdagrad(RowOptimizer):
    """
    Adagrad with one sum per row: every step adds the mean of the row's squared gradient to it.

    ``s += mean(g * g)`` over the row, ``w -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)``. A row is a slice
    of a parameter along its first dimension; of a vector every element is one.

    Args:
        params: parameters, named parameters, or groups of them.
        lr: the learning rate. Default 1e-2.
        lr_decay: the rate at which the learning rate falls, as in the formula. Default 0.
        weight_decay: the part of the weight that is added to the gradient. Default 0. Any other value moves every row
            of a table at every step, at that cost, but for ``decay="seen"``; a warning says so.
        initial_accumulator_value: the initial value of the sums. Default 0.
        eps: the number added to the root. Default 1e-10.
        maximize: whether to climb instead of descending. Default False.
        lazy: whether to leave rows without gradient alone, decay included. Default False.
        decay: the rows of a table that ``weight_decay`` moves: ``"all"``, as torch does, or ``"seen"``, those whose
            gradient is not zero in this step, as a penalty on the rows of the batch does. Parameters that are no tables
            decay whole. Default ``"all"``.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.

    Raises:
        ValueError: a negative argument.

    Source: FBGEMM's and TorchRec's ``RowWiseAdagrad``.

    Example:
        >>> table = torch.nn.Embedding(4, 2, sparse=True, _weight=torch.zeros(4, 2))
        >>> optimizer = RowWiseAdagrad(table.parameters(), lr=0.5)
        >>> (table(torch.tensor([1])) * torch.tensor([1.0, 7.0])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["sum"]
        tensor([ 0., 25.,  0.,  0.])
        >>> table.weight.detach()[1]
        tensor([-0.1000, -0.7000])
    """

    per_row = frozenset({"sum"})
    _steps_whole_rows = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        lazy: bool = False,
        decay: Literal["all", "seen"] = "all",
        stochastic_rounding: bool = False,
        in_backward: bool = False,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "lr_decay": lr_decay,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
        }
        check_not_negative("RowWiseAdagrad", **defaults)
        defaults["maximize"] = maximize
        super().__init__(
            params,
            defaults,
            lazy=lazy,
            decay=decay,
            stochastic_rounding=stochastic_rounding,
            in_backward=in_backward,
        )

    def rule(self, group: dict[str, Any]) -> Rule:
        return Rule("rowwise_adagrad", group)

    def initial_value(self, name: str) -> float:
        return self.defaults["initial_accumulator_value"]

    @torch.no_grad()
    def _dense_step(self) -> None:
        for group, weight, grad, state, step in dense_parameters(self):
            if group["weight_decay"] != 0:
                grad = grad + group["weight_decay"] * weight
            sums = state["sum"].add_(row_means(grad * grad))
            lr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])
            weight.addcdiv_(grad, per_row(sums.sqrt() + group["eps"], grad), value=-lr)
