"""The rules of the family ``row_update``, and the one call of its operator."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from .. import _library as _library  # loads the schemas


class Rule(IntEnum):
    """``RowRule`` of csrc/row_update.h."""

    GRADIENT_DESCENT = 0
    MOMENTUM = 1
    NESTEROV_MOMENTUM = 2
    KERAS_MOMENTUM = 3
    KERAS_NESTEROV_MOMENTUM = 4
    ADAGRAD = 5
    ADAGRAD_FROZEN = 6
    ADAGRAD_DUAL_AVERAGING = 7
    ADADELTA = 8
    FTRL = 9
    FTRL_SCALED_LINEAR = 10
    PROXIMAL_ADAGRAD = 11
    PROXIMAL_GRADIENT_DESCENT = 12
    RMSPROP = 13
    CENTERED_RMSPROP = 14


def update(
    rule: Rule, weight: Tensor, states: tuple[Tensor, ...], grad: Tensor, indices: Tensor, hyperparameters: list[float]
) -> Tensor:
    """Step rows by ``row_update`` and return ``weight``. As torch's optimizers, it refuses to be part of a graph."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (weight, *states, grad)):
        raise RuntimeError(
            "an update in place is not differentiable: call it under torch.no_grad(), or give it tensors that do not"
            " require grad"
        )
    state0, state1, state2 = (*states, None, None, None)[:3]
    torch.ops.torchsparse_rec.row_update.default(
        weight, state0, state1, state2, grad, indices, int(rule), hyperparameters
    )
    if not torch.compiler.is_compiling():
        # A graph that has saved a written tensor must notice, as it does with torch's own operators.
        torch.autograd.graph.increment_version([x for x in (weight, *states) if not x.is_inference()])
    return weight


@torch.library.register_fake("torchsparse_rec::row_update")
def _row_update_fake(
    weight: Tensor,
    state0: Tensor | None,
    state1: Tensor | None,
    state2: Tensor | None,
    grad: Tensor,
    indices: Tensor,
    rule: int,
    hyperparameters: list[float],
) -> None:
    """Return nothing: the operator writes in place."""
