"""The part of optimizers that deals with tables which backward() steps, before step()."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._torch import as_stored, grad_of, set_grad
from ..tables.table import (
    SECOND_BACKWARD,
    Gradient,
    any_grad,
    collecting,
    forget_collected,
    no_gradient,
    reached,
    zeroed,
)
from ._checkpoints import Checkpoints

if TYPE_CHECKING:
    from ..tables.clock import Clock
    from ..tables.gradients import StepGroup
    from ._rule import Rule

__all__ = ["InBackward", "already_written"]

_ALREADY_WRITTEN = (
    "{}, but backward() has already updated a table in grad_mode='fused' for this step: choose grad_mode='sparse' for "
    "the table or, if its mode is 'auto', an optimizer without in_backward=True"
)


def already_written(what: str) -> RuntimeError:
    """Return the error of somebody who was about to do ``what``, too late: a backward has stepped a table."""
    return RuntimeError(_ALREADY_WRITTEN.format(what))


class InBackward(Checkpoints):
    """The part of an optimizer that, with ``in_backward=True``, keeps track of the step that backwards have begun."""

    _rule_of: Callable[[dict[str, Any]], Rule]
    _see_groups: Callable[[], None]
    _stepped: list[StepGroup]

    def _check_first_backward(self, clocks: Iterable[Clock]) -> None:
        """Raise ``RuntimeError`` if a backward has stepped tables of one of the clocks since the last step."""
        stepped = {id(done.clock) for done in self._stepped}
        if stepped and any(id(clock) in stepped for clock in clocks):
            raise RuntimeError(SECOND_BACKWARD)

    def _end_backwards(self, zeros: list[tuple[Tensor, Gradient]]) -> None:
        """
        End the step of tables that backwards have stepped. Add the other tables whose gradients are zeros to ``zeros``.

        Raises:
            RuntimeError: the step would have been different at this point. A hyperparameter or a table's group has
                changed since the backward, or a table has a gradient that the backward left out.
        """
        if collecting:
            forget_collected(self._all_parameters())
        self._see_groups()
        stepped, self._stepped = self._stepped, []
        for done in stepped:
            group = done.options
            rule = self._rule_of(group)
            if rule is not done.source:
                now = rule.number, rule.hyperparameters, group.get("maximize", False)
                if now != (done.rule, done.hyperparameters, done.maximize):
                    raise already_written(f"{type(self).__name__}: a hyperparameter has changed before step()")
            if any_grad(done.parameters):
                raise already_written(
                    f"{type(self).__name__}: a table has a .grad from something other than its lookups and "
                    "nn.table_cross_entropy (tied weights, a penalty on weight)"
                )
            stepped_now = [*map(id, done.parameters)]
            reached.update(stepped_now)
            zeroed.difference_update(stepped_now)
        if zeroed:
            for parameter in self._all_parameters():
                if id(parameter) in zeroed and grad_of(parameter) is None:
                    zeros.append((parameter, no_gradient(parameter)))

    def refuse_stepped(self, what: str, parameters: Iterable[Tensor]) -> None:
        """
        Raise ``RuntimeError`` if a backward has stepped one of the parameters since the last step.

        ``what``, the beginning of the message, names the caller's next action: it would come too late.
        """
        if self.has_stepped(parameters):
            raise already_written(what)

    def has_stepped(self, parameters: Iterable[Tensor]) -> bool:
        """Say whether a backward has stepped one of the parameters since the last step."""
        stepped = {id(parameter) for done in self._stepped for parameter in done.parameters}
        return any(id(parameter) in stepped for parameter in parameters)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the optimizer divides by a GradScaler's scale itself, as torch's fused steps do: False."""
        self.refuse_stepped("GradScaler.step() divides gradients by its scale", self._all_parameters())
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignore the value, which torch's constructors set."""

    def _all_parameters(self) -> Iterator[Tensor]:
        return (parameter for group in self.param_groups for parameter in group["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters; see :meth:`torch.optim.Optimizer.zero_grad`."""
        with as_stored():
            if not set_to_none:
                super().zero_grad(set_to_none)
                if reached:
                    zeroed.update(reached.intersection(map(id, self._all_parameters())))
            else:
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if grad_of(parameter) is not None:
                            set_grad(parameter, None)
                        if reached:
                            reached.discard(id(parameter))
                            zeroed.discard(id(parameter))
        if collecting and self.in_backward:
            forget_collected(self._all_parameters())
