"""Conversion of tables' gradients, strided or sparse, to the form that the operators take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._torch import count_writes
from ..ops import row_optimizer as row_optimizer  # registers the operator
from ..ops.row_optimizer_rules import counts_steps
from .clock import Clock
from .layouts import accumulator_dtype, writable
from .table import Gradient, table_of

__all__ = ["StepGroup", "coalesced", "gradient_of", "merged", "update", "update_blocks"]


@dataclass(slots=True, eq=False)
class StepGroup:
    """Tables that one call of an operator can step, and how it does."""

    parameters: list[Tensor]
    weights: list[Tensor]
    states: list[Tensor]
    last_steps: list[Tensor]
    history: Tensor | None
    grows: bool
    """Whether some of the tables grow."""
    options: dict[str, Any]
    """The parameter group."""
    source: object
    """The rule of the parameter group, from which ``rule`` and ``hyperparameters`` are."""
    rule: int
    hyperparameters: list[float]
    step: int
    base: int
    maximize: bool
    rounding_seeds: list[int]
    whole: list[int]
    """A number for each table: it is stepped whole if it has at most so many times the rows that have a gradient."""
    all_rows: bool
    """Whether rows without gradient must be stepped too: the operator then needs a gradient for all rows."""
    clock: Clock
    writable: bool
    """Whether operators can write all tables where they are; see :func:`tables.layouts.writable`."""

    def renew(self) -> None:
        """Become the group of the next step, where nothing else has changed."""
        clock = self.clock
        if clock.on_cuda:
            counts = clock.history is not None or bool(self.rounding_seeds)
            clock.check_capture(clock.kind, counts or counts_steps(self.rule, self.hyperparameters))
        if clock.history is not None and clock.step - clock.base >= clock.history.shape[0] // 2:
            clock.make_room()
        self.history, self.step, self.base = clock.history, clock.step + 1, clock.base

    def part(self, members: Sequence[int]) -> StepGroup:
        """Return the group of some of the tables."""
        each = len(self.states) // len(self.parameters)

        def chosen(values: list) -> list:
            return [values[k] for k in members] if values else []

        return replace(
            self,
            parameters=chosen(self.parameters),
            weights=chosen(self.weights),
            states=[state for k in members for state in self.states[k * each : (k + 1) * each]],
            last_steps=chosen(self.last_steps),
            rounding_seeds=chosen(self.rounding_seeds),
            whole=chosen(self.whole),
        )


def coalesced(grad: Tensor) -> Tensor:
    """Return a COO gradient with unique, sorted rows. Values of half types are added in float32."""
    if grad.is_coalesced():
        return grad
    dtype = accumulator_dtype(grad.dtype)
    return grad.to(dtype).coalesce() if grad.dtype != dtype else grad.coalesce()


def gradient_of(optimizer: str, grad: Tensor, zero_rows_are_idle: bool) -> Gradient:
    """
    Return a table's gradient as operators take it.

    Args:
        optimizer: the optimizer's name, for error messages.
        grad: the ``.grad`` of the table's parameter.
        zero_rows_are_idle: whether to leave out the rows of a strided gradient that are zero. On CUDA their count is
            read back.
    """
    if grad.layout is torch.sparse_coo:
        if not grad.is_coalesced():
            grad = coalesced(grad)
        rows, values = grad._indices(), grad._values()
        if rows.shape[0] != 1:
            raise ValueError(
                f"{optimizer}: a sparse gradient must have one sparse dimension, its rows, got {rows.shape[0]}"
            )
        return Gradient(rows[0], values if values.dim() == 2 else _as_matrix(values))
    values = _as_matrix(grad).contiguous()
    if not zero_rows_are_idle:
        return Gradient(None, values)
    some = (values != 0).any(1).nonzero()[:, 0]
    return Gradient(some, values[some])


def _as_matrix(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))


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
    parts: dict[tuple[bool, torch.dtype], list[int]] = {}
    for k, gradient in enumerate(gradients):
        parts.setdefault((gradient.rows is None, gradient.values.dtype), []).append(k)
    for members in parts.values():
        if len(parts) == 1:  # the usual case
            _update(group, gradients)
        else:
            _update(group.part(members), [gradients[k] for k in members])


def update_blocks(group: StepGroup, blocks: Iterable[tuple[int, Tensor]]) -> None:
    """Step a group's only table with a gradient of all rows, in blocks: the number of its first row, and its values."""
    if not group.writable:
        with writable(group.weights, [True]) as copies:
            update_blocks(replace(group, weights=copies, writable=True), blocks)
        return
    group = replace(group, whole=[])
    for begin, values in blocks:
        end = begin + values.shape[0]
        if not group.all_rows:  # by their numbers: rows whose gradient is zero count as in a sparse gradient
            _update(group, [Gradient(torch.arange(begin, end, device=values.device), values)])
            continue
        block = replace(
            group,
            weights=[group.weights[0][begin:end]],
            states=[state[begin:end] for state in group.states],
            # Rounding by chance draws by seed and row, and the rows of each block begin at 0.
            rounding_seeds=[seed + (begin << 32) for seed in group.rounding_seeds],
        )
        _update(block, [Gradient(None, values)])
    _mark_fresh(group.parameters[0], group.step)


def _update(group: StepGroup, gradients: list[Gradient]) -> None:
    if not group.writable:
        with writable(group.weights, [True] * len(group.weights)) as copies:
            _update(replace(group, weights=copies, writable=True), gradients)
        return
    rows, values = [], []
    for gradient in gradients:
        values.append(gradient.values)
        if gradient.rows is not None:
            rows.append(gradient.rows)
    all_rows = not rows
    torch.ops.torchsparse_rec.row_optimizer_update_.default(
        group.weights,
        group.states,
        group.last_steps,
        group.history,
        rows,
        values,
        None,
        group.rule,
        group.hyperparameters,
        group.step,
        group.base,
        group.maximize,
        group.rounding_seeds,
        group.whole,
    )
    count_writes((*group.weights, *group.states, *group.last_steps))
    if all_rows:
        for parameter in group.parameters:
            _mark_fresh(parameter, group.step)


def _mark_fresh(parameter: Tensor, step: int) -> None:
    rows = table_of(parameter).rows
    assert rows is not None
    rows.current = step
