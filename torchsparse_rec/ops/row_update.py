"""
Family ``row_update``: an optimizer's step on the rows of a table that a batch names, in place, as TensorFlow takes it.

Contract and formulas: csrc/row_update.h. Kernels: csrc/cpu/row_update.cpp, csrc/cuda/row_update.cu. Its functions under
TensorFlow's names are in compat/tensorflow/_row_update.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from .._torch import tell_autograd
from ._in_place import refuse_gradients, without_result


class RowRule(IntEnum):
    """``RowRule`` of csrc/row_update.h, which names the states and hyperparameters of each."""

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


def row_update_(
    rule: RowRule, tables: Sequence[Tensor], grad: Tensor, indices: Tensor, hyperparameters: Sequence[float]
) -> None:
    """
    Step the rows of a table that ``indices`` names, one item after another, in place.

    As torch's optimizers, it refuses to be part of a graph.

    Args:
        rule: the formula.
        tables: the weight ``[V, ...]`` and the states of the rule, in its order.
        grad: ``[N, ...]``, a row of the weight for each index.
        indices: ``[N]``, int32 or int64; they may repeat.
        hyperparameters: the rule's hyperparameters, in its order.

    Example:
        >>> weight = torch.ones(3, 1)
        >>> row_update_(RowRule.GRADIENT_DESCENT, [weight], torch.ones(2, 1), torch.tensor([0, 2]), [0.25])
        >>> weight.T
        tensor([[0.7500, 1.0000, 0.7500]])
    """
    refuse_gradients((*tables, grad))
    missing = [None] * (4 - len(tables))
    torch.ops.torchsparse_rec.row_update.default(*tables, *missing, grad, indices, int(rule), list(hyperparameters))
    tell_autograd(tables)


without_result("row_update")
