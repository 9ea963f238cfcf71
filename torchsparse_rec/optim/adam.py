"""Adam, AdamW and partial row-wise Adam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from .._torch import as_stored, grad_of
from .._torch_modules import fused_adam, fused_adamw
from ..tables.layouts import flat
from ..tables.stale import can_be_stale
from ..tables.table import are_same
from ._dense import check_betas, check_not_negative, dense_parameters, per_row, row_means
from .row_optimizer import RowOptimizer, Rule

__all__ = ["Adam", "AdamW", "PartialRowWiseAdam"]


class _AtOnce:
    """
    Parameters that one call of torch's kernel steps, and their states, in lists that are kept from step to step.

    Each ``state["step"]`` becomes a view of one tensor: one addition counts for all of them.
    """

    def __init__(self, parameters: list[Tensor], state: Mapping[Tensor, Any], names: tuple[str, ...]) -> None:
        self._parameters, self._names = parameters, ("step", *names)
        all_states = [state[parameter] for parameter in parameters]
        self.count = torch.stack([its["step"] for its in all_states])
        for its, step in zip(all_states, self.count, strict=True):
            its["step"] = step
        self._kept = self._of(state)
        self.steps, *self.states = self._kept

    def _of(self, state: Mapping[Tensor, Any]) -> list[list[Tensor]]:
        all_states = [state[parameter] for parameter in self._parameters]
        return [[its.get(name) for its in all_states] for name in self._names]

    def is_of(self, parameters: list[Tensor], state: Mapping[Tensor, Any], names: tuple[str, ...]) -> bool:
        """Say whether these are the same parameters with the same tensors as their states."""
        return (
            self._names[1:] == names
            and are_same(self._parameters, parameters)
            and all(map(are_same, self._kept, self._of(state)))
        )


class _Adam(RowOptimizer):
    """The base of Adam and AdamW."""

    # The parameters that the last steps took together, by the number of the group.
    _at_once: dict[int, _AtOnce] = {}

    def rule(self, group: dict[str, Any]) -> Rule:
        decoupled, place_of_eps = group["decoupled_weight_decay"], group.get("tensorflow_eps", False)
        # Stale rows are brought up to date by a series, which needs a decay factor 1 - lr * weight_decay above 0.
        decays = decoupled and group.get("decay") != "seen"
        regular = not decays or float(group["lr"]) * float(group["weight_decay"]) < 1
        name = "amsgrad" if group["amsgrad"] else "adam"
        return Rule(name, group, regular, decoupled=decoupled, tensorflow_eps=place_of_eps)

    def _dense_step(self) -> None:
        """Step as torch does, with ``eps / sqrt(1 - beta2^t)`` for ``eps`` where it is added as in TensorFlow."""
        all_groups = self.param_groups
        together = [group for k, group in enumerate(all_groups) if not self._step_at_once(k, group)]
        if not together:
            return
        split: list[dict[str, Any]] = []
        for group in together:
            if not group.get("tensorflow_eps", False):
                split.append(group)
                continue
            by_step: dict[int, list[Tensor]] = {}
            for parameter in group["params"]:
                by_step.setdefault(self._steps_taken(self.stored_state[parameter]), []).append(parameter)
            for step, parameters in by_step.items():
                unbias = (1 - float(group["betas"][1]) ** (step + 1)) ** 0.5
                split.append({**group, "params": parameters, "eps": float(group["eps"]) / unbias})
        self.param_groups = split
        try:
            super()._dense_step()
        finally:
            self.param_groups = all_groups

    @torch.no_grad()
    def _step_at_once(self, number: int, group: dict[str, Any]) -> bool:
        """
        Step a group of parameters by torch's kernel, as torch does, without torch's checks of each parameter each time.

        Returns:
            False if torch must do it: the kernel is not asked for, or the parameters are on a GPU or not all of one
            dtype. Also if this is their first step, or a scale must be divided out.
        """
        kernel = fused_adamw if group["decoupled_weight_decay"] else fused_adam
        if not group["fused"] or group["differentiable"] or group["capturable"] or kernel is None:
            return False
        if getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None:
            return False
        parameters, state = group["params"], self.stored_state
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
        known = self._at_once.get(number)
        if known is None or not known.is_of(parameters, state, names):
            if not _can_be_at_once(parameters, state, names):
                return False
            known = _AtOnce(parameters, state, names)
            self._at_once = {**self._at_once, number: known}
        eps, (beta1, beta2) = float(group["eps"]), map(float, group["betas"])
        if group.get("tensorflow_eps", False):
            steps = set(known.count.tolist())
            if len(steps) > 1:
                return False
            eps /= (1 - beta2 ** (steps.pop() + 1)) ** 0.5
        with as_stored():
            known.count += 1
            kernel(
                parameters,
                [grad_of(parameter) for parameter in parameters],
                *known.states[:2],
                known.states[2] if group["amsgrad"] else [],
                known.steps,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=eps,
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )
        return True

    def new_state(self, parameter: Tensor, name: str, dtype: torch.dtype, state: dict[str, Any]) -> Tensor:
        # amsgrad may be turned on later: the maximum then starts from the average so far.
        if name == "max_exp_avg_sq" and "exp_avg_sq" in state:
            return state["exp_avg_sq"].clone()
        return super().new_state(parameter, name, dtype, state)

    def state_of(self, parameter: Tensor, name: str, state: dict[str, Any]) -> Tensor:
        value, group = super().state_of(parameter, name, state), self._group_of(parameter)
        if name == "max_exp_avg_sq" and not group["lazy"]:
            # Steps without gradient do not change the maximum unless it is below the rest of the average. It may be
            # below after steps that amsgrad was turned off for.
            torch.maximum(value, flat(state["exp_avg_sq"]) * float(group["betas"][1]), out=value)
        return value


def _can_be_at_once(parameters: list[Tensor], state: Mapping[Tensor, Any], names: tuple[str, ...]) -> bool:
    """Say whether one call of torch's kernel can step the parameters: none is of a class that may see each call."""
    first = parameters[0].dtype
    return first.is_floating_point and all(
        can_be_stale(parameter)
        and parameter.dtype == first
        and parameter.is_cpu
        and (its := state.get(parameter))
        and all(its.get(name) is not None and its[name].is_cpu for name in ("step", *names))
        and its["step"].dim() == 0
        and its["step"].dtype == torch.float32
        for parameter in parameters
    )


class Adam(_Adam, torch.optim.Adam):
    """
    :class:`torch.optim.Adam` for tables too: dense Adam's results, at the cost of the touched rows.

    Rows without gradient still move. They are brought up to date when they are next read or stepped.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: torch's arguments. A
            ``weight_decay`` that is not decoupled steps every row of a table at every step, at that cost; a warning
            says so. ``decay="seen"`` costs only the rows of the batch.
        foreach, capturable, differentiable, fused: torch's arguments. The first three concern parameters that are no
            tables; ``fused`` also tables as long as all their gradients are strided.
        lazy: whether to leave rows without gradient alone, as ``torch.optim.SparseAdam`` does, and also rows that were
            looked up but whose gradient is zero, which SparseAdam steps. Default False.
        decay: the rows of a table that ``weight_decay`` moves: ``"all"``, as torch does, or ``"seen"``, those whose
            gradient is not zero in this step, as a penalty on the rows of the batch does. Parameters that are no tables
            decay whole. Default ``"all"``.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.
        tensorflow_eps: whether to add ``eps`` where TensorFlow and Keras do: to ``sqrt(v)``, before its bias is
            corrected. Default False.

    Example:
        >>> from torchsparse_rec import nn
        >>> table = nn.Embedding(1000, 8, grad_mode="sparse")
        >>> optimizer = Adam(table.parameters(), lr=0.1)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[table.weight])
        ['exp_avg', 'exp_avg_sq', 'step']
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        lazy: bool = False,
        decay: Literal["all", "seen"] = "all",
        stochastic_rounding: bool = False,
        in_backward: bool = False,
        tensorflow_eps: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            lazy=lazy,
            decay=decay,
            stochastic_rounding=stochastic_rounding,
            in_backward=in_backward,
            tensorflow_eps=tensorflow_eps,
        )


class AdamW(_Adam, torch.optim.AdamW):
    """
    :class:`torch.optim.AdamW` for tables too: dense AdamW's results, at the cost of the touched rows.

    Rows without gradient still move and decay. They are brought up to date when they are next read or stepped.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: torch's
            arguments. The last four concern parameters that are no tables; ``fused`` also tables as long as all their
            gradients are strided.
        lazy: whether to leave rows without gradient alone, decay included. Default False.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.
        tensorflow_eps: the argument of :class:`Adam`.

    Example:
        >>> from torchsparse_rec import nn
        >>> table = nn.Embedding(1000, 8, grad_mode="sparse")
        >>> optimizer = AdamW(table.parameters(), lr=0.1)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> isinstance(optimizer, torch.optim.AdamW)
        True
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        lazy: bool = False,
        stochastic_rounding: bool = False,
        in_backward: bool = False,
        tensorflow_eps: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            lazy=lazy,
            stochastic_rounding=stochastic_rounding,
            in_backward=in_backward,
            tensorflow_eps=tensorflow_eps,
        )


class PartialRowWiseAdam(RowOptimizer):
    """
    Adam with one second moment per row: the moving average of the mean of the row's squared gradient.

    ``m = beta1 * m + (1 - beta1) * g`` and ``v = beta2 * v + (1 - beta2) * mean(g * g)`` over the row. With both
    corrected for their bias, ``w = (1 - lr * weight_decay) * w - lr * m / (sqrt(v) + eps)``. A row is a slice of a
    parameter along its first dimension; of a vector every element is one.

    Args:
        params: parameters, named parameters, or groups of them.
        lr: the learning rate. Default 1e-3.
        betas: the shares of the two moments that a step keeps. Default (0.9, 0.999).
        eps: the number added to the root. Default 1e-8.
        weight_decay: a step takes ``lr * weight_decay`` of the weight away. Default 0.
        maximize: whether to climb instead of descending. Default False.
        lazy: whether to leave rows without gradient alone, decay included. Default False.
        stochastic_rounding: whether to round half-precision tables' weights at random, so that small steps add up.
            Default False.
        in_backward: whether ``backward()`` may update tables in ``grad_mode="fused"``, and ``"auto"`` may choose that
            mode. It promises that nothing is done to gradients between ``backward()`` and :meth:`step`. Default False.

    Raises:
        ValueError: a negative argument, a beta of 1 or more.

    Source: FBGEMM's ``PARTIAL_ROWWISE_ADAM``.

    Example:
        >>> from torchsparse_rec import nn
        >>> table = nn.Embedding(1000, 8, grad_mode="sparse")
        >>> optimizer = PartialRowWiseAdam(table.parameters(), lr=0.1)
        >>> table(torch.tensor([1, 2])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[table.weight]["exp_avg_sq"].shape
        torch.Size([1000])
    """

    per_row = frozenset({"exp_avg_sq"})
    _steps_whole_rows = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        lazy: bool = False,
        stochastic_rounding: bool = False,
        in_backward: bool = False,
    ) -> None:
        check_not_negative("PartialRowWiseAdam", lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas("PartialRowWiseAdam", betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, lazy=lazy, stochastic_rounding=stochastic_rounding, in_backward=in_backward)

    def rule(self, group: dict[str, Any]) -> Rule:
        return Rule("partial_rowwise_adam", group, float(group["lr"]) * float(group["weight_decay"]) < 1)

    @torch.no_grad()
    def _dense_step(self) -> None:
        for group, weight, grad, state, step in dense_parameters(self):
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            m = state["exp_avg"].lerp_(grad, 1 - beta1)
            v = state["exp_avg_sq"].mul_(beta2).add_(row_means(grad * grad), alpha=1 - beta2)
            root = (v / (1 - beta2**step)).sqrt() + group["eps"]
            weight.mul_(1 - lr * group["weight_decay"])
            weight.addcdiv_(m, per_row(root, grad), value=-lr / (1 - beta1**step))
