"""
Family ``row_optimizer``: optimizer steps on tables where a step sees few rows, with the results of dense steps.

Contract and formulas: csrc/row_optimizer*.h. Kernels: csrc/cpu/row_optimizer.cpp, csrc/cuda/row_optimizer.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import tell_autograd
from ._in_place import refuse_gradients, without_result
from .autograd import not_differentiable

__all__ = [
    "HISTORY_COLUMNS",
    "new_history",
    "row_optimizer_advance_",
    "row_optimizer_current",
    "row_optimizer_make_current_",
    "row_optimizer_update_",
]

#: The columns of a history, which has a row for each block of steps.
HISTORY_COLUMNS = 8

_ops = torch.ops.torchsparse_rec


def new_history(steps: int, device: torch.device | str | None = None) -> Tensor:
    """
    Make an empty history of optimizer steps: room for the effect of each on rows without gradient.

    :func:`row_optimizer_advance_` fills it, step by step.

    Args:
        steps: the number of steps, from the base on.
        device: the tables' device; default: torch's.

    Returns:
        ``[2 * steps, 8]``, float64. To make room for more steps later, copy it to the first rows of a larger one.

    Example:
        >>> new_history(4).shape
        torch.Size([8, 8])
    """
    return torch.zeros(2 * steps, HISTORY_COLUMNS, dtype=torch.float64, device=device)


def row_optimizer_update_(
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    last_steps: Sequence[Tensor],
    history: Tensor | None,
    rows: Sequence[Tensor] | None,
    values: Sequence[Tensor],
    *,
    rule: int,
    hyperparameters: Sequence[float],
    step: int,
    base: int = 0,
    grad_scale: Tensor | None = None,
    maximize: bool = False,
    rounding_seeds: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> None:
    """
    Do an optimizer's step on the rows of some tables that have gradients, in place, after flushing these rows.

    A dense optimizer also moves a row in steps that do not name it where the rule says so (momentum, Adam, weight
    decay). Here the row is stale after such steps, until a later step names it: that flushes the row first, by a closed
    form, whatever the number of steps between. :func:`row_optimizer_current` returns up-to-date values meanwhile. The
    results are the dense optimizer's. Not differentiable.

    Args:
        weights: K tables ``[V, D]``, float16, bfloat16, float32 or float64, all alike; written. Their rows may be any
            distance apart.
        states: table after table the states of the rule, in its order, ``[V, D]``, those per row ``[V]``; float32,
            for float64 weights float64; written.
        last_steps: K times int32 ``[V]``: the step through which each row is up to date, counted from ``base``;
            written. Or none: then no row is flushed.
        history: the steps from ``base`` to ``step - 1``, as :func:`row_optimizer_advance_` left it. None without
            ``last_steps``.
        rows: K times int64 ``[U]``, strictly increasing; None: all rows. Without ``last_steps``, a named row whose
            gradient is zero is left alone, states and all.
        values: K gradients, ``[U, D]``, in the dtype of the states or the weights.
        rule: the rule's number in ``OPTIMIZER_RULES``.
        hyperparameters: the rule's, in the order of csrc/row_optimizer.h.
        step: the number of this step, from 1.
        base: the step at which all rows were up to date and the history began.
        grad_scale: one element, a factor of all gradients.
        maximize: whether to ascend.
        rounding_seeds: a seed per table, for float16 and bfloat16 weights: they are rounded to a neighbour at random,
            so that the mean is right. Default: to the nearest.
        whole: a number per table, for calls with ``last_steps``. Table k is stepped whole if it has at most
            ``whole[k]`` times as many rows as ``rows[k]`` names. Its other rows have gradient zero; they come to the
            same, to rounding, and are not stale. Default: none is stepped whole. On CUDA none ever is.

    Raises:
        IndexError: a row outside ``[0, V)``; then nothing has been written.
        ValueError: wrong shapes, dtypes, devices, layouts or hyperparameters, rows that do not increase, and
            ``last_steps`` with ``rows`` where idle rows have no closed form (:func:`idle_motion`).
        RuntimeError: a tensor requires grad and grad mode is enabled.

    On CUDA nothing waits for the device; a bad row is skipped and recorded. A CUDA graph can capture it, but ``step``
    and the hyperparameters are numbers of the captured call: every replay does that same step again.

    Source: ``torch.optim``; ``tf.compat.v1.train.FtrlOptimizer``; FBGEMM's row-wise optimizers.

    Example:
        >>> weight, buffer = torch.ones(3, 1), torch.zeros(3, 1)
        >>> sgd = [0.5, 0.5, 0.0, 0.0, 0.0]  # lr, momentum, dampening, nesterov, weight_decay
        >>> last, history = torch.zeros(3, dtype=torch.int32), new_history(8)
        >>> for step, row in enumerate([0, 1, 1], start=1):
        ...     row_optimizer_update_([weight], [buffer], [last], history, [torch.tensor([row])], [torch.ones(1, 1)],
        ...         rule=0, hyperparameters=sgd, step=step)
        ...     row_optimizer_advance_(history, rule=0, hyperparameters=sgd, step=step)
        >>> weight.T  # row 0 has moved once
        tensor([[ 0.5000, -0.2500,  1.0000]])
        >>> row_optimizer_current(weight, [buffer], last, history, torch.arange(3),
        ...     rule=0, hyperparameters=sgd, step=3).T
        tensor([[ 0.1250, -0.2500,  1.0000]])
    """
    if not weights:
        return
    refuse_gradients((*weights, *states, *values))
    _ops.row_optimizer_update_.default(
        weights,
        states,
        last_steps,
        history,
        [] if rows is None else rows,
        values,
        grad_scale,
        rule,
        hyperparameters,
        step,
        base,
        maximize,
        rounding_seeds,
        whole,
    )
    tell_autograd((*weights, *states, *last_steps))


def row_optimizer_advance_(
    history: Tensor, *, rule: int, hyperparameters: Sequence[float], step: int, base: int = 0
) -> None:
    """
    Append to a history what step ``step`` does to rows without gradient; call it after that step's updates.

    Args:
        history: the history, made by :func:`new_history`, with room for ``step - base`` steps; written.
        rule: the rule's number in ``OPTIMIZER_RULES``, the same in all steps.
        hyperparameters: the rule's, at this step.
        step: the number of the step, from 1: one more than at the last call.
        base: the step at which the history began.

    Raises:
        ValueError: a history that is too small, and rules and hyperparameters whose idle rows have no closed form.

    On CUDA nothing waits for the device.

    Example:
        >>> history = new_history(2)
        >>> row_optimizer_advance_(history, rule=0, hyperparameters=[0.5, 0.0, 0.0, 0.0, 0.5], step=1)
        >>> history[0, 0]  # what is left of the weight
        tensor(0.7500, dtype=torch.float64)
    """
    _ops.row_optimizer_advance_.default(history, rule, hyperparameters, step, base)
    tell_autograd((history,))


def row_optimizer_current(
    weight: Tensor,
    states: Sequence[Tensor],
    last_step: Tensor,
    history: Tensor,
    rows: Tensor,
    *,
    rule: int,
    hyperparameters: Sequence[float],
    step: int,
    base: int = 0,
) -> Tensor:
    """
    Return rows of a table in their state after step ``step``, stale ones brought up to date; nothing is written.

    The result has no gradient.

    Args:
        weight: ``[V, D]``, read only, as are all others; see :func:`row_optimizer_update_`.
        states: this table's states.
        last_step: int32 ``[V]``.
        history: the steps from ``base`` to ``step``.
        rows: int64 ``[U]``, in any order; they may repeat.
        rule: the rule's number in ``OPTIMIZER_RULES``.
        hyperparameters: the rule's; of them only ``eps`` matters.
        step: the number of steps done.
        base: the step at which the history began.

    Returns:
        ``[U, D]``, the weight's dtype: what :func:`row_optimizer_make_current_` would store, bit for bit.

    Raises:
        IndexError: a row outside ``[0, V)``.
        ValueError: wrong shapes, dtypes, devices, layouts or hyperparameters.

    On CUDA nothing waits for the device; a bad row is recorded, and gives zeros.

    Example:
        >>> history = new_history(2)
        >>> decay = [0.5, 0.0, 0.0, 0.0, 0.5]
        >>> for step in (1, 2):
        ...     row_optimizer_advance_(history, rule=0, hyperparameters=decay, step=step)
        >>> last = torch.tensor([2, 1, 0], dtype=torch.int32)
        >>> row_optimizer_current(torch.ones(3, 1), [], last, history, torch.arange(3),
        ...     rule=0, hyperparameters=decay, step=2).T
        tensor([[1.0000, 0.7500, 0.5625]])
    """
    return _ops.row_optimizer_current.default(
        weight, states, last_step, history, rows, rule, hyperparameters, step, base
    )


def row_optimizer_make_current_(
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    last_steps: Sequence[Tensor],
    history: Tensor | None,
    *,
    rule: int,
    hyperparameters: Sequence[float],
    step: int,
    base: int = 0,
    rounding_seeds: Sequence[int] = (),
) -> None:
    """
    Flush every row of some tables through step ``step``, in place.

    Args:
        weights, states, last_steps, history, rule, base, rounding_seeds: the arguments of
            :func:`row_optimizer_update_`.
        hyperparameters: the rule's; of them only ``eps`` matters.
        step: the number of steps done.

    Raises:
        ValueError: wrong shapes, dtypes, devices, layouts or hyperparameters.
        RuntimeError: a tensor requires grad and grad mode is enabled.

    On CUDA nothing waits for the device.

    Example:
        >>> weight, history = torch.ones(2, 1), new_history(1)
        >>> decay = [0.5, 0.0, 0.0, 0.0, 0.5]
        >>> row_optimizer_advance_(history, rule=0, hyperparameters=decay, step=1)
        >>> last = torch.tensor([1, 0], dtype=torch.int32)
        >>> row_optimizer_make_current_([weight], [], [last], history, rule=0, hyperparameters=decay, step=1)
        >>> weight.T, last
        (tensor([[1.0000, 0.7500]]), tensor([1, 1], dtype=torch.int32))
    """
    if not weights:
        return
    refuse_gradients((*weights, *states))
    _ops.row_optimizer_make_current_.default(
        weights, states, last_steps, history, rule, hyperparameters, step, base, rounding_seeds
    )
    tell_autograd((*weights, *states, *last_steps))


@torch.library.register_fake("torchsparse_rec::row_optimizer_current")
def _(weight: Tensor, states: list[Tensor], last_step: Tensor, history: Tensor, rows: Tensor, *rest: Any) -> Tensor:
    return weight.new_empty(rows.shape[0], weight.shape[1])


without_result("row_optimizer_update_", "row_optimizer_advance_", "row_optimizer_make_current_")
# Lookups, which read up-to-date values, have gradients of their own.
not_differentiable("row_optimizer_current")
