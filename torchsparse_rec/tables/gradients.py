"""Conversion of tables' gradients, strided or sparse, to the form that the operators take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._torch import grad_of
from ..ops.row_optimizer import row_optimizer_update_
from .clock import Clock
from .table import Gradient, accumulator_dtype, table_of

__all__ = ["StepGroup", "coalesced", "gradient_of", "merged", "update"]


class StepGroup(NamedTuple):
    """Tables that one call of an operator can step."""

    parameters: list[Tensor]
    weights: list[Tensor]
    states: list[Tensor]
    last_steps: list[Tensor]
    history: Tensor | None
    rule: int
    hyperparameters: list[float]
    step: int
    base: int
    maximize: bool
    rounding_seeds: list[int]
    whole: list[int]
    """Of each table: it is stepped whole if it has at most so many times the rows that have a gradient."""
    all_rows: bool
    """Whether rows without gradient must be stepped too: the operator then needs a gradient for all rows."""
    clock: Clock


def coalesced(grad: Tensor) -> Tensor:
    """Return a COO gradient with unique, sorted rows. Values of half types are added in float32."""
    if grad.is_coalesced():
        return grad
    dtype = accumulator_dtype(grad.dtype)
    return grad.to(dtype).coalesce() if grad.dtype != dtype else grad.coalesce()


def gradient_of(optimizer: str, parameter: Tensor, zero_rows_are_idle: bool) -> Gradient:
    """
    Return a table's gradient, from its parameter's ``.grad``.

    Args:
        optimizer: the optimizer's name, for error messages.
        parameter: the table's parameter.
        zero_rows_are_idle: leave out the rows of a strided gradient that are zero. On CUDA their count is read back.
    """
    grad = grad_of(parameter)
    assert grad is not None
    width = math.prod(parameter.shape[1:])
    if grad.layout is torch.sparse_coo:
        if grad.sparse_dim() != 1:
            raise ValueError(
                f"{optimizer}: a sparse gradient must have one sparse dimension, its rows, got {grad.sparse_dim()}"
            )
        grad = coalesced(grad)
        values = grad._values()
        return Gradient(grad._indices()[0], values.reshape(values.shape[0], width))
    values = grad.reshape(parameter.shape[0], width).contiguous()
    if not zero_rows_are_idle:
        return Gradient(None, values)
    some = (values != 0).any(1).nonzero()[:, 0]
    return Gradient(some, values[some])


def merged(gradients: Sequence[Gradient], num_embeddings: int) -> Gradient:
    """Return the sum of one table's gradients, with rows merged."""
    if len(gradients) == 1:
        return gradients[0]
    rows = torch.cat([gradient.rows for gradient in gradients if gradient.rows is not None])
    values = torch.cat([gradient.values for gradient in gradients])
    with torch.no_grad():
        values, rows = torch.ops.torchsparse_rec.embedding_sparse_backward.default(
            values, rows, None, None, None, num_embeddings, 0, -1, False
        )
    return Gradient(rows, values)


def _on_all_rows(gradient: Gradient, num_embeddings: int) -> Gradient:
    if gradient.rows is None:
        return gradient
    values = gradient.values.to(accumulator_dtype(gradient.values.dtype))
    everything = values.new_zeros(num_embeddings, values.shape[1])
    return Gradient(None, everything.index_copy_(0, gradient.rows, values))


def update(group: StepGroup, gradients: list[Gradient]) -> None:
    """Step a group's tables, each with its gradient; tables with gradients of one layout and dtype share one call."""
    if group.all_rows:
        gradients = [_on_all_rows(g, p.shape[0]) for g, p in zip(gradients, group.parameters, strict=True)]
    calls: dict[tuple, list[int]] = {}
    for k, gradient in enumerate(gradients):
        alike = gradient.rows is None, gradient.values.dtype
        calls.setdefault(alike, []).append(k)
    tables = len(group.parameters)
    each = len(group.states) // tables
    for (all_rows, _), members in calls.items():
        row_optimizer_update_(
            [group.weights[k] for k in members],
            [state for k in members for state in group.states[k * each : (k + 1) * each]],
            [group.last_steps[k] for k in members] if group.last_steps else [],
            group.history,
            None if all_rows else [rows for k in members if (rows := gradients[k].rows) is not None],
            [gradients[k].values for k in members],
            rule=group.rule,
            hyperparameters=group.hyperparameters,
            step=group.step,
            base=group.base,
            maximize=group.maximize,
            rounding_seeds=[group.rounding_seeds[k] for k in members] if group.rounding_seeds else [],
            whole=[group.whole[k] for k in members] if group.whole else [],
        )
        if all_rows:
            for k in members:
                _mark_fresh(group.parameters[k], group.step)


def _mark_fresh(parameter: Tensor, step: int) -> None:
    rows = table_of(parameter).rows
    assert rows is not None
    rows.current = step
