"""TensorFlow Addons' Adam for sparse gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch  # noqa: F401  (the examples use it)
from torch import Tensor

from ._gradients import Gradient, Slices
from ._numbers import adam_rate, cast, power, rounded
from ._optimizer import Optimizer


class LazyAdam(Optimizer):
    """
    Adam that changes only the rows in a sparse gradient and their averages; slices of one row are added up first.

    ``m = beta_1 * m + (1 - beta_1) * g``, ``v = beta_2 * v + (1 - beta_2) * g * g``. Then ``w -= lr * sqrt(1 -
    beta_2**t) / (1 - beta_1**t) * m / (sqrt(v) + epsilon)``, where ``t`` counts all steps. A strided gradient moves
    every row.

    Args:
        params: parameters or groups.
        learning_rate: a number, or a function of the number of steps done or of nothing.
        beta_1: the share of ``m`` that stays.
        beta_2: the share of ``v`` that stays.
        epsilon: the number added to the root.
        amsgrad: False, which it must be: there is no such rule for sparse gradients.
        name: a part of the names of slots (:func:`.export_slots`).

    Source: ``tfa.optimizers.LazyAdam``.

    Example:
        >>> from torchsparse_rec.compat.tensorflow import IndexedSlices
        >>> weight = torch.nn.Parameter(torch.ones(3, 1))
        >>> optimizer = LazyAdam([weight], 0.25)
        >>> for row in (0, 2):
        ...     optimizer.apply_gradients([(IndexedSlices([[1.0]], [row]), weight)])
        >>> weight.detach().T
        tensor([[0.7500, 1.0000, 0.8140]])
    """

    slot_names = ("m", "v")

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str = "LazyAdam",
    ) -> None:
        if amsgrad:
            raise ValueError("amsgrad must be False: there is no such rule for sparse gradients")
        super().__init__(params, learning_rate, name, {"beta_1": beta_1, "beta_2": beta_2, "epsilon": epsilon})

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Tensor]], name: str | None = None) -> None:
        """
        Take a step with these gradients.

        Args:
            grads_and_vars: pairs of a gradient and a parameter of this optimizer. A gradient is strided, sparse COO,
                :class:`.IndexedSlices`, or None: then its parameter does not change.
            name: the name, ignored.

        Raises:
            ValueError, IndexError: for a gradient that does not fit its parameter; then nothing has been written.
        """
        self._apply_gradients(grads_and_vars)

    def _update(self, parameter: Tensor, gradient: Gradient, group: dict[str, Any]) -> None:
        dtype, step = parameter.dtype, group["iterations"] + 1
        lr, beta_1, beta_2, epsilon = (cast(group[name], dtype) for name in ("lr", "beta_1", "beta_2", "epsilon"))
        rate = adam_rate(lr, power(beta_1, step, dtype), power(beta_2, step, dtype), dtype)
        rest_1, rest_2 = rounded(1 - beta_1, dtype), rounded(1 - beta_2, dtype)
        tables = [parameter, *self.slots_of(parameter, group)]
        if isinstance(gradient, Slices):
            rows = gradient.merge()
            g, indices = rows.values, rows.indices.long()
            weight, m, v = (table.index_select(0, indices) for table in tables)
        else:
            g, indices = gradient, None
            weight, m, v = tables
        m.mul_(beta_1).add_(g * rest_1)
        v.mul_(beta_2).add_(g * g * rest_2)
        weight.sub_(m * rate / (v.sqrt() + epsilon))
        if indices is not None:
            for table, values in zip(tables, (weight, m, v), strict=True):
                table.index_copy_(0, indices, values)
