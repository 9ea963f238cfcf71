"""The base class of the optimizers of ``tf.compat.v1.train``, and those without penalties."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....ops.row_update import RowRule, row_update_
from ._gradients import Gradient, Slices
from ._numbers import adam_rate, cast, rounded
from ._optimizer import Optimizer, check_positive


class RowOptimizer(Optimizer):
    """An optimizer with a rule on rows; a strided gradient is a gradient of all rows."""

    #: Whether slices of one row are added up first.
    _merges = True
    _rule: ClassVar[RowRule]
    #: The keys in a group of the rule's hyperparameters, in its order.
    _keys: ClassVar[tuple[str, ...]] = ("lr",)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Tensor]], global_step: Tensor | None = None, name: str | None = None
    ) -> None:
        """
        Take a step with these gradients.

        Args:
            grads_and_vars: pairs of a gradient and a parameter of this optimizer. A gradient is strided, sparse COO,
                :class:`.IndexedSlices`, or None: then its parameter does not change.
            global_step: a tensor that grows by one.
            name: the name, ignored.

        Raises:
            ValueError, IndexError: for a gradient that does not fit its parameter; then nothing has been written.
        """
        self._apply_gradients(grads_and_vars)
        if global_step is not None:
            global_step.add_(1)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        slots = self.slots_of(parameter, group)
        weight = parameter if parameter.is_contiguous() else parameter.contiguous()
        if isinstance(gradient, Slices):
            rows = gradient.merge() if self._merges else gradient
            values, indices, tables = rows.values, rows.indices, [weight, *slots]
        else:
            tables = [table.view(-1) if table.dim() == 0 else table for table in (weight, *slots)]
            values = gradient.reshape(tables[0].shape)
            indices = torch.arange(values.shape[0], device=values.device)
        numbers = self._numbers(group, weight.dtype)
        row_update_(self._rule_of(group), tables, values.contiguous(), indices, numbers)
        if weight is not parameter:
            parameter.copy_(weight)

    def _numbers(self, group: dict[str, Any], dtype: torch.dtype) -> list[float]:
        """Return the rule's hyperparameters, in its order."""
        return [cast(group[key], dtype) for key in self._keys]

    def _rule_of(self, group: dict[str, Any]) -> RowRule:
        return self._rule


class GradientDescentOptimizer(RowOptimizer):
    """
    Gradient descent: ``w -= lr * g``.

    Source: ``tf.compat.v1.train.GradientDescentOptimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> GradientDescentOptimizer([weight], 0.25).apply_gradients([(torch.tensor([1.0, 2.0]), weight)])
        >>> weight.tolist()
        [0.75, 0.5]
    """

    _merges = False
    _rule = RowRule.GRADIENT_DESCENT

    def __init__(
        self, params: Any, learning_rate: Any, use_locking: bool = False, name: str = "GradientDescent"
    ) -> None:
        super().__init__(params, learning_rate, name, {})


class MomentumOptimizer(RowOptimizer):
    """
    Momentum: ``m = momentum * m + g``, ``w -= lr * m``, or with ``use_nesterov`` ``w -= lr * (g + momentum * m)``.

    The momentum of rows that are not in a sparse gradient does not decay, and does not move them.

    Source: ``tf.compat.v1.train.MomentumOptimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = MomentumOptimizer([weight], 0.25, momentum=0.5)
        >>> for _ in range(2):
        ...     optimizer.apply_gradients([(torch.ones(1), weight)])
        >>> weight.tolist()
        [0.375]
    """

    slot_names = ("momentum",)
    _keys = ("lr", "momentum")

    def __init__(
        self,
        params: Any,
        learning_rate: Any,
        momentum: float,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        super().__init__(params, learning_rate, name, {"momentum": momentum, "use_nesterov": use_nesterov})

    def _rule_of(self, group: dict[str, Any]) -> RowRule:
        return RowRule.NESTEROV_MOMENTUM if group["use_nesterov"] else RowRule.MOMENTUM


class AdagradOptimizer(RowOptimizer):
    """
    Adagrad: ``a += g * g``, ``w -= lr * g / sqrt(a)``.

    Source: ``tf.compat.v1.train.AdagradOptimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 1))
        >>> from torchsparse_rec.compat.tensorflow import IndexedSlices
        >>> gradient = IndexedSlices([[1.0], [2.0]], [2, 2])  # 3 * 3, not 1 * 1 + 2 * 2
        >>> AdagradOptimizer([weight], 0.5, 7.0).apply_gradients([(gradient, weight)])
        >>> weight.detach().T
        tensor([[1.0000, 1.0000, 0.6250]])
    """

    slot_names = ("accumulator",)
    _initial = {"accumulator": "initial_accumulator_value"}
    _rule = RowRule.ADAGRAD

    def __init__(
        self,
        params: Any,
        learning_rate: Any,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        check_positive("initial_accumulator_value", initial_accumulator_value)
        super().__init__(params, learning_rate, name, {"initial_accumulator_value": initial_accumulator_value})

    def _numbers(self, group: dict[str, Any], dtype: torch.dtype) -> list[float]:
        return [*super()._numbers(group, dtype), 0.0]  # its epsilon


class AdamOptimizer(RowOptimizer):
    """
    Adam, dense for sparse gradients too: every row's averages decay, and every row moves.

    ``m = beta1 * m + (1 - beta1) * g``, ``v = beta2 * v + (1 - beta2) * g * g``. Then ``w -= lr * sqrt(1 - beta2**t) /
    (1 - beta1**t) * m / (sqrt(v) + epsilon)``. The powers of the betas are TensorFlow's: products in float32, kept in
    the groups as ``beta1_power`` and ``beta2_power``. :class:`.LazyAdam` takes a step only of the rows in a gradient.

    Source: ``tf.compat.v1.train.AdamOptimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(3, 1))
        >>> from torchsparse_rec.compat.tensorflow import IndexedSlices
        >>> AdamOptimizer([weight], 0.25).apply_gradients([(IndexedSlices([[1.0], [2.0]], [0, 2]), weight)])
        >>> weight.detach().T
        tensor([[0.7500, 1.0000, 0.7500]])
    """

    slot_names = ("m", "v")

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
        use_own_namescope_for_non_slot_vars: bool = False,
    ) -> None:
        super().__init__(params, learning_rate, name, {"beta1": beta1, "beta2": beta2, "epsilon": epsilon})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch's optimizers do; the powers of its betas begin with the betas."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("beta1", "beta2"):
            group.setdefault(f"{name}_power", cast(group[name], torch.float32))

    def _update_all(self, updates: list[Any]) -> None:
        super()._update_all(updates)
        for group in self.param_groups:
            for name in ("beta1", "beta2"):
                product = group[f"{name}_power"] * cast(group[name], torch.float32)
                group[f"{name}_power"] = cast(product, torch.float32)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        m, v = self.slots_of(parameter, group)
        dtype = parameter.dtype
        names = ("lr", "beta1", "beta2", "epsilon", "beta1_power", "beta2_power")
        lr, beta1, beta2, epsilon, power1, power2 = (cast(group[name], dtype) for name in names)
        share1, share2 = rounded(1 - beta1, dtype), rounded(1 - beta2, dtype)
        rate = adam_rate(lr, power1, power2, dtype)
        if isinstance(gradient, Slices):
            rows = gradient.merge()
            m.mul_(beta1).index_add_(0, rows.indices, rows.values * share1)
            v.mul_(beta2).index_add_(0, rows.indices, rows.values * rows.values * share2)
        else:
            m.add_((gradient - m).mul_(share1))
            v.add_((gradient * gradient).sub_(v).mul_(share2))
        parameter.sub_((m * rate).div_(v.sqrt().add_(epsilon)))


class RMSPropOptimizer(RowOptimizer):
    """
    RMSProp, whose average of squares begins with 1 and has ``epsilon`` under the root.

    ``v = decay * v + (1 - decay) * g * g``, ``m = momentum * m + lr * g / sqrt(v + epsilon)``, ``w -= m``. With
    ``centered`` the square of the average gradient is subtracted from ``v`` under the root.

    Source: ``tf.compat.v1.train.RMSPropOptimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> RMSPropOptimizer([weight], 0.25, decay=0.75, epsilon=0.0).apply_gradients([(torch.tensor([3.0]), weight)])
        >>> weight.detach()
        tensor([0.5670])
    """

    slot_names = ("rms", "mg", "momentum")
    _keys = ("lr", "decay", "momentum", "epsilon")

    def __init__(
        self,
        params: Any,
        learning_rate: Any,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        hyperparameters = {"decay": decay, "momentum": momentum, "epsilon": epsilon, "centered": centered}
        super().__init__(params, learning_rate, name, hyperparameters)

    def _slots(self, group: dict[str, Any]) -> dict[str, float]:
        return {"rms": 1.0, **({"mg": 0.0} if group["centered"] else {}), "momentum": 0.0}

    def slots_of(self, parameter: Tensor, group: dict[str, Any]) -> list[Tensor]:
        """Return the slots of a parameter in the order of the rule, which has ``mg`` before ``rms``."""
        rms, *mg, momentum = super().slots_of(parameter, group)
        return [*mg, rms, momentum]

    def _rule_of(self, group: dict[str, Any]) -> RowRule:
        return RowRule.CENTERED_RMSPROP if group["centered"] else RowRule.RMSPROP


class AdadeltaOptimizer(RowOptimizer):
    """
    Adadelta, which scales each step by the average size of the steps before.

    ``a = rho * a + (1 - rho) * g * g`` and ``d = sqrt(u + epsilon) / sqrt(a + epsilon) * g``. Then ``w -= lr * d`` and
    ``u = rho * u + (1 - rho) * d * d``.

    Source: ``tf.compat.v1.train.AdadeltaOptimizer``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> AdadeltaOptimizer([weight], 1.0, rho=0.0, epsilon=1.0).apply_gradients([(torch.tensor([3.0]), weight)])
        >>> weight.detach()
        tensor([0.0513])
    """

    slot_names = ("accum", "accum_update")
    _rule = RowRule.ADADELTA
    _keys = ("lr", "rho", "epsilon")

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adadelta",
    ) -> None:
        super().__init__(params, learning_rate, name, {"rho": rho, "epsilon": epsilon})
