"""Dense optimizers, which step every row at every step: the family ``row_optimizer`` must be equal to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchsparse_rec.compat._parity.reference.row_optimizer import RULES
from torchsparse_rec.ops.row_optimizer_rules import HYPERPARAMETERS, OPTIMIZER_RULES


@dataclass
class Dense:
    """
    A table under a dense optimizer, in one dtype.

    The optimizer is torch.optim's where torch has the rule, with every hyperparameter of the step set before it; else
    the reference's.
    """

    rule: int
    weight: Tensor
    states: list[Tensor]

    def __post_init__(self) -> None:
        self.steps = 0
        make = _TORCH.get(_NAMES[self.rule])
        self.parameter = torch.nn.Parameter(self.weight.clone())
        self.optimizer = make and make([self.parameter])

    def step(self, grad: Tensor, h: Sequence[float]) -> None:
        """Step all rows once."""
        self.steps += 1
        if self.optimizer is None:
            rows = RULES[self.rule]([self.weight, *self.states], grad.to(self.weight.dtype), self.steps, *h)
            self.weight, *self.states = rows
            return
        self.optimizer.param_groups[0].update(_groups(self.rule, h, self.steps))
        self.parameter.grad = grad.to(self.parameter.dtype)
        self.optimizer.step()
        self.weight = self.parameter.detach()


def _adam(amsgrad: bool) -> Callable[[list], torch.optim.Optimizer]:
    # AdamW is Adam with a flag, which the parameter group has.
    return lambda parameters: torch.optim.Adam(parameters, amsgrad=amsgrad, foreach=False)


_TORCH: dict[str, Callable[[list], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.0, foreach=False),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, foreach=False),
    "adam": _adam(amsgrad=False),
    "amsgrad": _adam(amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, foreach=False, centered=True, momentum=0.5),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, foreach=False),
}
_NAMES = [*OPTIMIZER_RULES]


def _groups(rule: int, h: Sequence[float], step: int) -> dict:
    """Return the hyperparameters by their names in torch.optim."""
    group: dict = dict(zip(HYPERPARAMETERS[_NAMES[rule]], h, strict=True))
    for flag in ("nesterov", "centered"):
        if flag in group:
            group[flag] = bool(group[flag])
    if "beta1" in group:
        group["betas"] = group.pop("beta1"), group.pop("beta2")
    if group.pop("tensorflow_eps", False):
        group["eps"] /= (1 - group["betas"][1] ** step) ** 0.5
    if "decoupled" in group:
        group["decoupled_weight_decay"] = bool(group.pop("decoupled"))
    return group
