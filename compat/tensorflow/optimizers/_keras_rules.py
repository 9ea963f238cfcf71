"""Keras's rules that do not count steps: SGD, Adagrad, RMSprop, Adadelta, Ftrl and Lion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._gradients import Gradient, changed, dense
from ._keras import KerasOptimizer, rows_of, subtract
from ._numbers import cast, rounded
from ._optimizer import checked_ftrl


class SGD(KerasOptimizer):
    """
    Gradient descent, with or without momentum: ``m = momentum * m - lr * g``, ``w += m``.

    With ``nesterov``: ``w += momentum * m - lr * g``. With momentum every row moves, also rows without a gradient.

    Args:
        params, learning_rate, weight_decay, options: the arguments of :class:`.KerasOptimizer`; so for all of Keras's
            rules.
        momentum: the share of ``m`` that stays, in [0, 1].
        nesterov: whether to look ahead.

    Source: ``keras.optimizers.SGD``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = SGD([weight], 0.25, momentum=0.5)
        >>> for gradient in ([1.0, 0.0], [0.0, 2.0]):
        ...     steps = optimizer.apply_gradients([(torch.tensor(gradient), weight)])
        >>> steps, weight.tolist()
        (2, [0.625, 0.5])
    """

    slot_names = ("momentum",)

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be in [0, 1], got {momentum}")
        hyperparameters = {"momentum": momentum, "nesterov": nesterov}
        super().__init__(params, learning_rate, hyperparameters, weight_decay=weight_decay, **options)

    def _slots(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum": 0.0} if group["momentum"] else {}

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        lr, momentum = cast(group["lr"], parameter.dtype), cast(group["momentum"], parameter.dtype)
        if not momentum:
            subtract(parameter, changed(gradient, lambda g: g * lr))
            return
        (m,) = self.slots_of(parameter, group)
        change = dense(changed(gradient, lambda g: g * lr))
        m.mul_(momentum).sub_(change)
        parameter.add_(m * momentum - change if group["nesterov"] else m)


class Adagrad(KerasOptimizer):
    """
    Adagrad: ``a += g * g``, ``w -= lr * g / sqrt(a + epsilon)``. Rows without a gradient do not change.

    The squares of all slices of a row are added to its ``a``; then the row moves by all of the slices.

    Args:
        initial_accumulator_value: the value with which ``a`` begins.
        epsilon: the number added to ``a``, under the root.

    Source: ``keras.optimizers.Adagrad``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 1))
        >>> from torchsparse_rec.compat.tensorflow import IndexedSlices
        >>> gradient = IndexedSlices([[3.0], [4.0]], [2, 2])  # 3 * 3 + 4 * 4, not 7 * 7
        >>> optimizer = Adagrad([weight], 0.5, initial_accumulator_value=0.0)
        >>> steps = optimizer.apply_gradients([(gradient, weight)])
        >>> weight.detach().T
        tensor([[1.0000, 1.0000, 0.3000]])
    """

    slot_names = ("accumulator",)
    _initial = {"accumulator": "initial_accumulator_value"}

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        hyperparameters = {"initial_accumulator_value": initial_accumulator_value, "epsilon": epsilon}
        super().__init__(params, learning_rate, hyperparameters, weight_decay=weight_decay, **options)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        lr, epsilon = cast(group["lr"], parameter.dtype), rounded(group["epsilon"], parameter.dtype)
        (accumulator,) = self.slots_of(parameter, group)
        subtract(accumulator, changed(gradient, torch.square), -1.0)
        roots = rows_of(accumulator, gradient).add(epsilon).sqrt_()
        subtract(parameter, changed(gradient, lambda g: g * lr / roots))


class RMSprop(KerasOptimizer):
    """
    RMSprop: ``v = rho * v + (1 - rho) * g * g``, ``w -= lr * g / sqrt(v + epsilon)``.

    The averages of all rows decay. With ``momentum`` ``m = momentum * m + lr * g / sqrt(v + epsilon)``, ``w -= m``, and
    every row moves. With ``centered`` the square of the average gradient is subtracted from ``v`` under the root.

    Source: ``keras.optimizers.RMSprop``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> steps = RMSprop([weight], 0.25, rho=0.75).apply_gradients([(torch.tensor([2.0]), weight)])
        >>> weight.detach()
        tensor([0.5000])
    """

    slot_names = ("velocity", "momentum", "average_gradient")
    slot_groups = (("velocity",), ("momentum",), ("average_gradient",))

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        hyperparameters = {"rho": rho, "momentum": momentum, "epsilon": epsilon, "centered": centered}
        super().__init__(params, learning_rate, hyperparameters, weight_decay=weight_decay, **options)

    def _slots(self, group: dict[str, Any]) -> dict[str, float]:
        names = ["velocity"]
        names += ["momentum"] if group["momentum"] > 0 else []
        names += ["average_gradient"] if group["centered"] else []
        return dict.fromkeys(names, 0.0)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        dtype = parameter.dtype
        lr = cast(group["lr"], dtype)
        numbers = (group["rho"], 1 - group["rho"], group["momentum"], group["epsilon"])
        rho, rest, momentum, epsilon = (rounded(number, dtype) for number in numbers)
        slots = dict(zip(self._slots(group), self.slots_of(parameter, group), strict=True))
        velocity = slots["velocity"]
        velocity.mul_(rho).add_(dense(changed(gradient, lambda g: g * g * rest)))
        denominator = velocity
        if group["centered"]:
            average = slots["average_gradient"]
            average.mul_(rho).add_(dense(changed(gradient, lambda g: g * rest)))
            denominator = velocity - average.square()
        roots = rows_of(denominator, gradient).add(epsilon).sqrt_()
        change = changed(gradient, lambda g: g * lr / roots)
        if "momentum" in slots:
            change = slots["momentum"].mul_(momentum).add_(dense(change))
        subtract(parameter, change)


class Adadelta(KerasOptimizer):
    """
    Adadelta. The averages of all rows decay; rows without a gradient do not move.

    ``a = rho * a + (1 - rho) * g * g`` and ``d = sqrt(u + epsilon) / sqrt(a + epsilon) * g``. Then ``w -= lr * d`` and
    ``u = rho * u + (1 - rho) * d * d``.

    Source: ``keras.optimizers.Adadelta``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = Adadelta([weight], 1.0, rho=0.0, epsilon=1.0)
        >>> steps = optimizer.apply_gradients([(torch.tensor([3.0]), weight)])
        >>> weight.detach()
        tensor([0.0513])
    """

    slot_names = ("accumulated_grad", "accumulated_delta_var")

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        hyperparameters = {"rho": rho, "epsilon": epsilon}
        super().__init__(params, learning_rate, hyperparameters, weight_decay=weight_decay, **options)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        dtype = parameter.dtype
        lr = cast(group["lr"], dtype)
        rho, rest, epsilon = (rounded(x, dtype) for x in (group["rho"], 1 - group["rho"], group["epsilon"]))
        squares, changes = self.slots_of(parameter, group)
        squares.mul_(rho).add_(dense(changed(gradient, lambda g: g * g * rest)))
        numerators = rows_of(changes, gradient).add(epsilon).sqrt_()
        denominators = rows_of(squares, gradient).add(epsilon).sqrt_()
        change = changed(gradient, lambda g: numerators * g / denominators)
        changes.mul_(rho).add_(dense(changed(change, lambda d: d * d * rest)))
        subtract(parameter, changed(change, lambda d: d * lr))


class Ftrl(KerasOptimizer):
    """
    Follow the regularized leader, proximal. Every row is written: rows that never had a gradient become 0 at once.

    With ``p = -learning_rate_power``: ``b = a + g * g``, ``z += g + 2 * l2_shrinkage * w - (b**p - a**p) / lr * w``.
    Then ``w = (clamp(z, -l1, l1) - z) / (b**p / lr + 2 * l2 + beta / lr)`` and ``a = b``.

    Source: ``keras.optimizers.Ftrl``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = Ftrl([weight], 0.5, initial_accumulator_value=1.0)
        >>> steps = optimizer.apply_gradients([(torch.tensor([1.0, 0.0]), weight)])
        >>> weight.detach()
        tensor([-0.0607,  0.0000])
    """

    slot_names = ("accumulator", "linear")
    _initial = {"accumulator": "initial_accumulator_value"}

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        penalties = (l1_regularization_strength, l2_regularization_strength, l2_shrinkage_regularization_strength)
        hyperparameters = checked_ftrl(learning_rate_power, initial_accumulator_value, *penalties)
        hyperparameters["beta"] = beta
        super().__init__(params, learning_rate, hyperparameters, weight_decay=weight_decay, **options)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        dtype = parameter.dtype
        lr = cast(group["lr"], dtype)
        rate = torch.tensor(lr, dtype=dtype)
        l2 = (group["l2_regularization_strength"] + group["beta"] / (2 * rate)).item()
        shrinkage = rounded(2 * group["l2_shrinkage_regularization_strength"], dtype)
        l1, power = (rounded(group[x], dtype) for x in ("l1_regularization_strength", "learning_rate_power"))
        accumulator, linear = self.slots_of(parameter, group)
        total = accumulator + dense(changed(gradient, torch.square))
        powers = total.pow(-power)
        with_shrinkage = dense(gradient) + parameter * shrinkage
        linear.add_(with_shrinkage - (powers - accumulator.pow(-power)) / lr * parameter)
        quadratic = powers.div_(lr).add_(rounded(2 * l2, dtype))
        parameter.copy_((linear.clamp(-l1, l1) - linear) / quadratic)
        accumulator.copy_(total)


class Lion(KerasOptimizer):
    """
    Lion, for every row: ``w -= lr * sign(beta_1 * m + (1 - beta_1) * g)``, ``m = beta_2 * m + (1 - beta_2) * g``.

    Source: ``keras.optimizers.Lion``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> steps = Lion([weight], 0.25).apply_gradients([(torch.tensor([7.0, 0.0]), weight)])
        >>> weight.tolist()
        [0.75, 1.0]
    """

    slot_names = ("momentum",)

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        if not 0 < beta_1 <= 1:
            raise ValueError(f"beta_1 must be in (0, 1], got {beta_1}")
        hyperparameters = {"beta_1": beta_1, "beta_2": beta_2}
        super().__init__(params, learning_rate, hyperparameters, weight_decay=weight_decay, **options)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        dtype = parameter.dtype
        lr, beta_1, beta_2 = (cast(group[name], dtype) for name in ("lr", "beta_1", "beta_2"))
        rest_1, rest_2 = rounded(1 - beta_1, dtype), rounded(1 - beta_2, dtype)
        (m,) = self.slots_of(parameter, group)
        parameter.sub_((m * beta_1 + dense(changed(gradient, lambda g: g * rest_1))).sign_().mul_(lr))
        m.mul_(beta_2).add_(dense(changed(gradient, lambda g: g * rest_2)))
