"""The optimizers of ``tf.compat.v1.train`` with l1 and l2 penalties."""

from __future__ import annotations

from typing import Any

import torch

from ....ops.row_update import RowRule
from ._optimizer import check_positive, checked_ftrl
from ._v1 import RowOptimizer

_PENALTIES = ("l1_regularization_strength", "l2_regularization_strength")


class AdagradDAOptimizer(RowOptimizer):
    """
    Adagrad with dual averaging: the weight follows only from the sums of gradients and of their squares.

    Args:
        params, learning_rate, use_locking, name: the arguments of all optimizers of :mod:`.v1`.
        global_step: the number of steps done: a number or scalar tensor, which is read here and then counted on.
        initial_gradient_squared_accumulator_value: the value with which the sum of squares begins.
        l1_regularization_strength: the factor of the l1 penalty.
        l2_regularization_strength: the factor of the l2 penalty.

    Source: ``tf.compat.v1.train.AdagradDAOptimizer``. Formulas: :func:`.sparse_apply_adagrad_da`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> AdagradDAOptimizer([weight], 0.5, 0, 5.0).apply_gradients([(torch.tensor([2.0]), weight)])
        >>> weight.detach()
        tensor([-0.3333])
    """

    slot_names = ("gradient_accumulator", "gradient_squared_accumulator")
    _initial = {"gradient_squared_accumulator": "initial_gradient_squared_accumulator_value"}
    _rule = RowRule.ADAGRAD_DUAL_AVERAGING
    _keys = ("lr", *_PENALTIES)

    def __init__(
        self,
        params: Any,
        learning_rate: Any,
        global_step: Any,
        initial_gradient_squared_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "AdagradDA",
    ) -> None:
        initial = initial_gradient_squared_accumulator_value
        check_positive("initial_gradient_squared_accumulator_value", initial)
        hyperparameters = {
            "initial_gradient_squared_accumulator_value": initial,
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
        }
        super().__init__(params, learning_rate, name, hyperparameters)
        self.iterations = int(global_step)

    def _numbers(self, group: dict[str, Any], dtype: torch.dtype) -> list[float]:
        return [*super()._numbers(group, dtype), float(group["iterations"] + 1)]


class FtrlOptimizer(RowOptimizer):
    """
    Follow the regularized leader, proximal.

    Args:
        params, learning_rate, use_locking, name: the arguments of all optimizers of :mod:`.v1`. The learning rate must
            be positive.
        learning_rate_power: the power of the accumulator by which the learning rate falls, <= 0.
        initial_accumulator_value: the value with which the sum of squares begins, >= 0.
        l1_regularization_strength: the factor of the l1 penalty, >= 0.
        l2_regularization_strength: the factor of the l2 penalty, >= 0.
        accum_name: a part of the names of the accumulators, instead of ``name``.
        linear_name: a part of the names of the linear slots, instead of ``name``.
        l2_shrinkage_regularization_strength: the factor of an l2 penalty that goes only into the gradient, >= 0.
        beta: a number that adds ``beta / (2 * learning_rate)`` to the l2 penalty; None is 0.

    Source: ``tf.compat.v1.train.FtrlOptimizer``. Formulas: :func:`.sparse_apply_ftrl_v2`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = FtrlOptimizer([weight], 0.5, initial_accumulator_value=0.0, l1_regularization_strength=1.0)
        >>> optimizer.apply_gradients([(torch.tensor([2.0]), weight)])
        >>> weight.detach()
        tensor([-0.2500])
    """

    slot_names = ("accum", "linear")
    _initial = {"accum": "initial_accumulator_value"}
    _rule = RowRule.FTRL
    _keys = ("lr", *_PENALTIES, "l2_shrinkage_regularization_strength", "learning_rate_power")
    _kept = (*RowOptimizer._kept, "accum_name", "linear_name")

    def __init__(
        self,
        params: Any,
        learning_rate: Any,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "Ftrl",
        accum_name: str | None = None,
        linear_name: str | None = None,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float | None = None,
    ) -> None:
        penalties = (l1_regularization_strength, l2_regularization_strength, l2_shrinkage_regularization_strength)
        hyperparameters = checked_ftrl(learning_rate_power, initial_accumulator_value, *penalties)
        super().__init__(params, learning_rate, name, {**hyperparameters, "beta": beta or 0.0})
        self.accum_name, self.linear_name = accum_name or name, linear_name or name

    @property
    def slot_scopes(self) -> tuple[str, ...]:
        """The name of each slot that TensorFlow puts behind the variable's."""
        return self.accum_name, self.linear_name

    def _numbers(self, group: dict[str, Any], dtype: torch.dtype) -> list[float]:
        # As in TensorFlow, the sum is in float32.
        lr, beta = torch.tensor(float(group["lr"])), torch.tensor(float(group["beta"]))
        l2 = group["l2_regularization_strength"] + beta / (2 * lr.clamp_min(1e-36))
        return super()._numbers(group | {"l2_regularization_strength": l2}, dtype)


class ProximalAdagradOptimizer(RowOptimizer):
    """
    Proximal Adagrad.

    ``a += g * g``, ``r = lr / sqrt(a)``, ``w = shrunk(w - r * g, r * l1) / (1 + r * l2)``. Here ``shrunk(x, y)`` is
    ``x`` moved towards zero by ``y``, and zero where it is not further away.

    Source: ``tf.compat.v1.train.ProximalAdagradOptimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = ProximalAdagradOptimizer([weight], 0.5, 5.0, l1_regularization_strength=1.0)
        >>> optimizer.apply_gradients([(torch.tensor([2.0]), weight)])
        >>> weight.detach()
        tensor([0.5000])
    """

    slot_names = ("accumulator",)
    _initial = {"accumulator": "initial_accumulator_value"}
    _rule = RowRule.PROXIMAL_ADAGRAD
    _keys = ("lr", *_PENALTIES)

    def __init__(
        self,
        params: Any,
        learning_rate: Any,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "ProximalAdagrad",
    ) -> None:
        check_positive("initial_accumulator_value", initial_accumulator_value)
        hyperparameters = {
            "initial_accumulator_value": initial_accumulator_value,
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
        }
        super().__init__(params, learning_rate, name, hyperparameters)


class ProximalGradientDescentOptimizer(RowOptimizer):
    """
    Proximal gradient descent: ``w = shrunk(w - lr * g, lr * l1) / (1 + lr * l2)``.

    ``shrunk(x, y)`` is ``x`` moved towards zero by ``y``, and zero where it is not further away.

    Source: ``tf.compat.v1.train.ProximalGradientDescentOptimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = ProximalGradientDescentOptimizer([weight], 0.25, l2_regularization_strength=4.0)
        >>> optimizer.apply_gradients([(torch.tensor([2.0]), weight)])
        >>> weight.detach()
        tensor([0.2500])
    """

    _rule = RowRule.PROXIMAL_GRADIENT_DESCENT
    _keys = ("lr", *_PENALTIES)

    def __init__(
        self,
        params: Any,
        learning_rate: Any,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        use_locking: bool = False,
        name: str = "ProximalGradientDescent",
    ) -> None:
        hyperparameters = {
            "l1_regularization_strength": l1_regularization_strength,
            "l2_regularization_strength": l2_regularization_strength,
        }
        super().__init__(params, learning_rate, name, hyperparameters)
