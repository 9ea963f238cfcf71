"""The base class of Keras's optimizers. The rules are in _keras_rules.py and _keras_adam.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....ops.row_update import RowRule, row_update_
from ._gradients import Gradient, Slices, changed, dense
from ._numbers import cast, rounded
from ._optimizer import Optimizer, Update, full


class KerasOptimizer(Optimizer):
    """
    Keras's base class: clipping, weight decay, averages of the parameters, accumulation of gradients.

    Every rule is Keras's as it runs on TensorFlow: slices are never merged; squares and other functions are taken of
    each slice by itself and then added up. Most rules are dense: every row's slots decay, and every row may move.

    Args:
        params: parameters or groups. A group with ``weight_decay`` None has no weight decay.
        learning_rate: a number, or a function of the number of steps done or of nothing.
        weight_decay: the decay before each step: ``w -= w * weight_decay * lr`` for every parameter with a gradient;
            None: none.
        clipnorm: the largest norm of a gradient. Slices count one by one, also slices of one row.
        clipvalue: the largest element of a gradient, or of each slice by itself.
        global_clipnorm: the largest norm of all gradients, slices apart; they are added up after that.
        use_ema: whether to keep a moving average of every parameter.
        ema_momentum: the share of that average that stays in a step.
        ema_overwrite_frequency: the number of steps after which parameters become their averages; None: never.
        loss_scale_factor: the number by which gradients are divided; see :meth:`scale_loss`.
        gradient_accumulation_steps: the number of calls whose mean gradient makes a step, >= 2; None: one.
        name: a part of the names of slots (:func:`.export_slots`).
    """

    #: The slots in the order in which Keras makes them: a group for all parameters, then the next; default: one group.
    slot_groups: ClassVar[tuple[tuple[str, ...], ...]] = ()
    _any_float = True
    _kept = (
        *Optimizer._kept,
        "clipnorm",
        "clipvalue",
        "global_clipnorm",
        "use_ema",
        "ema_momentum",
        "ema_overwrite_frequency",
        "loss_scale_factor",
        "gradient_accumulation_steps",
    )

    def __init__(
        self,
        params: Any,
        learning_rate: Any,
        hyperparameters: dict[str, Any],
        *,
        weight_decay: float | None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
    ) -> None:
        if sum(limit is not None for limit in (clipnorm, clipvalue, global_clipnorm)) > 1:
            raise ValueError(
                f"only one of clipnorm, clipvalue and global_clipnorm may be given, got {clipnorm}, {clipvalue} and "
                f"{global_clipnorm}"
            )
        if gradient_accumulation_steps is not None and not gradient_accumulation_steps >= 2:
            raise ValueError(f"gradient_accumulation_steps must be at least 2, got {gradient_accumulation_steps}")
        if use_ema and not 0 <= ema_momentum <= 1:
            raise ValueError(f"ema_momentum must be in [0, 1], got {ema_momentum}")
        if use_ema and ema_overwrite_frequency is not None and not ema_overwrite_frequency >= 1:
            raise ValueError(f"ema_overwrite_frequency must be at least 1, got {ema_overwrite_frequency}")
        self.clipnorm, self.clipvalue, self.global_clipnorm = clipnorm, clipvalue, global_clipnorm
        self.use_ema, self.ema_momentum = use_ema, ema_momentum
        self.ema_overwrite_frequency = ema_overwrite_frequency
        self.loss_scale_factor = loss_scale_factor
        self.gradient_accumulation_steps = gradient_accumulation_steps
        super().__init__(
            params,
            learning_rate,
            name or type(self).__name__.lower(),
            {**hyperparameters, "weight_decay": weight_decay},
        )

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Tensor]]) -> int:
        """
        Take a step with these gradients.

        Args:
            grads_and_vars: pairs of a gradient and a parameter of this optimizer. A gradient is strided, sparse COO
                (its indices may repeat), :class:`.IndexedSlices`, or None: then its parameter does not change. It may
                have another floating dtype than the parameter: after clipping it is cast to the parameter's.

        Returns:
            The number of steps done.

        Raises:
            ValueError, IndexError: for a gradient that does not fit its parameter; then nothing has been written.
        """
        self._apply_gradients(grads_and_vars)
        return self.iterations

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first group; setting it sets all groups'."""
        return self.param_groups[0]["lr"]

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self._schedule:
            raise TypeError("learning_rate is a function, and cannot be set")
        for group in self.param_groups:
            group["lr"] = value

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times ``loss_scale_factor``; the optimizer expects the gradients of this product."""
        return loss if self.loss_scale_factor is None else loss * self.loss_scale_factor

    @torch.no_grad()
    def finalize_variable_values(self) -> None:
        """Set every parameter to its moving average, with ``use_ema``."""
        for parameter in self._parameters() if self.use_ema else ():
            parameter.copy_(self.state[parameter]["average"])

    def _slots(self, group: dict[str, Any]) -> dict[str, float]:
        return {slot: cast(value, torch.float32) for slot, value in super()._slots(group).items()}

    # ---- The step ----------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _steps_done(self) -> int:
        """Return the number of steps that rules and averages use: with accumulation, steps and not calls."""
        return self.iterations // (self.gradient_accumulation_steps or 1)

    def _update_all(self, updates: list[Update]) -> None:
        if self.loss_scale_factor is not None:
            scale = self.loss_scale_factor
            updates = [(p, changed(g, lambda x: x / rounded(scale, x.dtype)), group) for p, g, group in updates]
        if self.gradient_accumulation_steps:
            updates = self._accumulated(updates)
        gradients = self._clipped([gradient for _, gradient, _ in updates])
        for parameter, _, group in updates:
            if group["weight_decay"] is not None:
                decay, lr = cast(group["weight_decay"], parameter.dtype), cast(group["lr"], parameter.dtype)
                parameter.sub_((parameter * decay).mul_(lr))
        for (parameter, _, group), gradient in zip(updates, gradients, strict=True):
            self._update(parameter, _in_dtype_of(parameter, gradient), group)
        if self.use_ema:
            self._average()

    def _accumulated(self, updates: list[Update]) -> list[Update]:
        """Add gradients to their sums; return a step's mean gradients when it is due, else nothing."""
        steps = self.gradient_accumulation_steps
        assert steps is not None
        is_step = (self.iterations + 1) % steps == 0
        means: list[Update] = []
        for parameter, gradient, group in updates:
            state = self.state[parameter]
            total = state.setdefault("gradient_accumulator", full(parameter, 0.0)) + dense(gradient)
            if is_step:
                means.append((parameter, total / steps, group))
            else:
                state["gradient_accumulator"].copy_(total)
        for parameter in self._parameters() if is_step else ():
            if "gradient_accumulator" in self.state[parameter]:
                self.state[parameter]["gradient_accumulator"].zero_()
        return means

    def _clipped(self, gradients: list[Gradient]) -> list[Gradient]:
        if self.clipnorm is not None and self.clipnorm > 0:
            limit = self.clipnorm
            return [changed(gradient, lambda x: _clip_by_norm(x, limit)) for gradient in gradients]
        if self.global_clipnorm is not None and self.global_clipnorm > 0 and gradients:
            limit = self.global_clipnorm
            norm = torch.stack([dense(changed(gradient, torch.square)).sum() for gradient in gradients]).sum().sqrt()
            scale = torch.minimum(1 / norm, torch.full_like(norm, 1 / limit)) * limit + (norm - norm)
            return [dense(gradient) * scale for gradient in gradients]
        if self.clipvalue is not None and self.clipvalue > 0:
            limit = self.clipvalue
            return [changed(gradient, lambda x: x.clamp(-limit, limit)) for gradient in gradients]
        return gradients

    def _average(self) -> None:
        """Update the moving average of every parameter, with or without a gradient; it begins with the parameter."""
        done = self._steps_done()
        for parameter in self._parameters():
            momentum = rounded(self.ema_momentum if done else 0.0, parameter.dtype)
            state = self.state[parameter]
            average = state.setdefault("average", full(parameter, 0.0))
            average.copy_(average * momentum + parameter * rounded(1 - momentum, parameter.dtype))
            if self.ema_overwrite_frequency and (done + 1) % self.ema_overwrite_frequency == 0:
                parameter.copy_(average)


def _in_dtype_of(parameter: Tensor, gradient: Gradient) -> Gradient:
    return changed(gradient, lambda x: x.to(parameter.dtype))


def _clip_by_norm(values: Tensor, limit: float) -> Tensor:
    norm = values.square().sum().sqrt()
    return values * rounded(limit, values.dtype) / norm.clamp_min(rounded(limit, values.dtype))


def rows_of(table: Tensor, gradient: Gradient) -> Tensor:
    """Return the rows of a table that the slices of a gradient belong to, or the table for a strided gradient."""
    return table.index_select(0, gradient.indices) if isinstance(gradient, Slices) else table


def subtract(table: Tensor, change: Gradient, factor: float = 1.0) -> None:
    """Subtract a change from a table in place; slices are subtracted one by one, and only from their rows."""
    if isinstance(change, Slices):
        row_update_(RowRule.GRADIENT_DESCENT, [table], change.values.contiguous(), change.indices, [factor])
    else:
        table.sub_(change, alpha=factor)
