"""Keras's rules that correct their averages by the number of steps: Adam, AdamW, Adamax and Nadam."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._gradients import Gradient, changed, dense
from ._keras import KerasOptimizer
from ._numbers import adam_rate, cast, power, rounded


class Adam(KerasOptimizer):
    """
    Adam, for every row; squares are taken of each slice by itself.

    ``m += (1 - beta_1) * (g - m)``, ``v += (1 - beta_2) * (g * g - v)``. Then ``w -= lr * sqrt(1 - beta_2**t) / (1 -
    beta_1**t) * m / (sqrt(v) + epsilon)``; with ``amsgrad`` by the largest ``v`` so far. :class:`.LazyAdam` takes a
    step only of the rows in a gradient.

    Source: ``keras.optimizers.Adam``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 1))
        >>> from torchsparse_rec.compat.tensorflow import IndexedSlices
        >>> gradient = IndexedSlices([[1.0], [2.0]], [0, 2])
        >>> steps = Adam([weight], 0.25).apply_gradients([(gradient, weight)])
        >>> weight.detach().T
        tensor([[0.7500, 1.0000, 0.7500]])
    """

    slot_names = ("momentum", "velocity", "velocity_hat")
    slot_groups = (("momentum", "velocity"), ("velocity_hat",))

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        hyperparameters = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon, "amsgrad": amsgrad}
        super().__init__(params, learning_rate, hyperparameters, weight_decay=weight_decay, **options)

    def _slots(self, group: dict[str, Any]) -> dict[str, float]:
        return dict.fromkeys(self.slot_names if group["amsgrad"] else self.slot_names[:2], 0.0)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        dtype, step = parameter.dtype, self._steps_done() + 1
        power_1, power_2 = (power(cast(group[name], dtype), step, dtype) for name in ("beta_1", "beta_2"))
        rate = adam_rate(cast(group["lr"], dtype), power_1, power_2, dtype)
        m, v, *largest = self.slots_of(parameter, group)
        m.add_((dense(gradient) - m).mul_(rounded(1 - group["beta_1"], dtype)))
        v.add_((dense(changed(gradient, torch.square)) - v).mul_(rounded(1 - group["beta_2"], dtype)))
        if largest:
            v = torch.maximum(largest[0], v, out=largest[0])
        parameter.sub_((m * rate).div_(v.sqrt().add_(rounded(group["epsilon"], dtype))))


class AdamW(Adam):
    """
    :class:`Adam` that does ``w -= lr * weight_decay * w`` before a step; ``weight_decay`` is the third argument.

    Source: ``keras.optimizers.AdamW``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> steps = AdamW([weight], 0.25, 0.5).apply_gradients([(torch.tensor([1.0, 0.0]), weight)])
        >>> weight.detach()
        tensor([0.6250, 0.8750])
    """

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        if weight_decay is None:
            raise ValueError("weight_decay must be a number, got None")
        super().__init__(params, learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay, **options)


class Adamax(KerasOptimizer):
    """
    Adamax, for every row; absolute values are taken of each slice by itself.

    ``m += (1 - beta_1) * (g - m)``, ``u = max(beta_2 * u, |g|)``, ``w -= lr * m / ((1 - beta_1**t) * (u + epsilon))``.

    Source: ``keras.optimizers.Adamax``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> steps = Adamax([weight], 0.25).apply_gradients([(torch.tensor([7.0]), weight)])
        >>> weight.detach()
        tensor([0.7500])
    """

    slot_names = ("momentum", "norm")

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        hyperparameters = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon}
        super().__init__(params, learning_rate, hyperparameters, weight_decay=weight_decay, **options)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        dtype, step = parameter.dtype, self._steps_done() + 1
        correction = rounded(1 - power(cast(group["beta_1"], dtype), step, dtype), dtype)
        m, u = self.slots_of(parameter, group)
        m.add_((dense(gradient) - m).mul_(rounded(1 - group["beta_1"], dtype)))
        u.mul_(rounded(group["beta_2"], dtype))
        torch.maximum(u, dense(changed(gradient, torch.abs)), out=u)
        change = m * cast(group["lr"], dtype)
        parameter.sub_(change.div_((u + rounded(group["epsilon"], dtype)).mul_(correction)))


class Nadam(KerasOptimizer):
    """
    Adam with Nesterov's momentum, for every row.

    Let ``c(t) = beta_1 * (1 - 0.5 * 0.96**t)`` and ``p(t)`` be the product of ``c(1)`` to ``c(t)``. Then ``w -= lr *
    (c(t + 1) * m / (1 - p(t + 1)) + (1 - c(t)) * g / (1 - p(t))) / (sqrt(v / (1 - beta_2**t)) + epsilon)``, ``m`` and
    ``v`` as in :class:`Adam`. The product is kept in the groups as ``u_product``.

    Source: ``keras.optimizers.Nadam``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> steps = Nadam([weight], 0.25).apply_gradients([(torch.tensor([7.0]), weight)])
        >>> weight.detach()
        tensor([0.7343])
    """

    slot_names = ("momentum", "velocity")

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        hyperparameters = {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon, "u_product": 1.0}
        super().__init__(params, learning_rate, hyperparameters, weight_decay=weight_decay, **options)

    def _update_all(self, updates: list[Any]) -> None:
        """Take the step; if one is due, first update ``u_product``: Keras has one, in the first parameter's dtype."""
        dtype, step = self._parameters()[0].dtype, self._steps_done() + 1
        calls = self.gradient_accumulation_steps or 1
        for group in self.param_groups if (self.iterations + 1) % calls == 0 else ():
            product = torch.tensor(group["u_product"], dtype=dtype) * rounded(group["beta_1"], dtype)
            group["u_product"] = (product * _schedule(1.0, rounded(0.96, dtype), step, dtype)).item()
        super()._update_all(updates)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        dtype, step = parameter.dtype, self._steps_done() + 1
        lr, beta_1 = cast(group["lr"], dtype), cast(group["beta_1"], dtype)
        now, later = (_schedule(beta_1, cast(0.96, dtype), t, dtype) for t in (step, step + 1))
        product = torch.tensor(group["u_product"], dtype=dtype)
        correction_m, correction_g = (1 - product * later).item(), (1 - product).item()
        rest_1 = rounded(1 - beta_1, dtype)
        rest_2 = rounded(1 - cast(group["beta_2"], dtype), dtype)
        correction_v = rounded(1 - power(cast(group["beta_2"], dtype), step, dtype), dtype)
        m, v = self.slots_of(parameter, group)
        m.add_((dense(gradient) - m).mul_(rest_1))
        v.add_((dense(changed(gradient, torch.square)) - v).mul_(rest_2))
        share = rounded(1 - now, dtype)
        ahead = m * later / correction_m + dense(changed(gradient, lambda g: g * share / correction_g))
        parameter.sub_(ahead.mul_(lr).div_((v / correction_v).sqrt_().add_(rounded(group["epsilon"], dtype))))


def _schedule(beta: float, decay: float, step: int, dtype: torch.dtype) -> float:
    """Return ``beta * (1 - 0.5 * decay**step)``, each operation rounded."""
    share = torch.tensor(power(decay, step, dtype), dtype=dtype)
    return (torch.tensor(beta, dtype=dtype) * (1 - 0.5 * share)).item()
