"""Dense optimizers, which step every row at every step: the family ``row_optimizer`` must be equal to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchsparse_rec.compat._parity.reference.row_optimizer import RULES


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
        make = _TORCH.get(self.rule)
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


_TORCH: dict[int, Callable[[list], torch.optim.Optimizer]] = {
    0: lambda parameters: torch.optim.SGD(parameters, lr=0.0, foreach=False),
    1: lambda parameters: torch.optim.Adagrad(parameters, foreach=False),
    3: _adam(amsgrad=False),
    4: _adam(amsgrad=True),
    6: lambda parameters: torch.optim.RMSprop(parameters, foreach=False, centered=True, momentum=0.5),
    8: lambda parameters: torch.optim.Adadelta(parameters, foreach=False),
}


def _groups(rule: int, h: Sequence[float], step: int) -> dict:
    """Return the hyperparameters by their names in torch.optim."""
    if rule == 0:
        names = ("lr", "momentum", "dampening", "nesterov", "weight_decay")
        return dict(zip(names, (*h[:3], bool(h[3]), h[4]), strict=True))
    if rule == 1:
        return dict(zip(("lr", "lr_decay", "eps", "weight_decay"), h, strict=True))
    if rule in (3, 4):
        eps = h[3] / (1 - h[2] ** step) ** 0.5 if h[6] else h[3]
        adam = {"lr": h[0], "betas": (h[1], h[2]), "eps": eps, "weight_decay": h[4]}
        return adam | {"decoupled_weight_decay": bool(h[5])}
    if rule == 6:
        names = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")
        return dict(zip(names, (*h[:5], bool(h[5])), strict=True))
    return dict(zip(("lr", "rho", "eps", "weight_decay"), h, strict=True))
