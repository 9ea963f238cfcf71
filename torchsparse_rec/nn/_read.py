"""Reading tables whose rows may be behind: their values now, whatever the storage says. Nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..optim._tables import LookupState, Table, table_of
from ._plan import CURRENT, Behind, Ids, Plan, joined, part_of


class Reading(NamedTuple):
    """What a lookup found."""

    output: Tensor
    argmax: Tensor


def owned_table(weight: Tensor) -> Table:
    """The table of a module's parameter, whose lookups we see to. Copies of modules have new parameters."""
    table = table_of(weight)
    if not table.owned:
        table.mark_owned()
    return table


class _Part(NamedTuple):
    """Tables that one call reads: those that are brought up to date by the same steps."""

    tables: list[int]
    behind: Behind


def _parts(weights: Sequence[Tensor]) -> list[_Part]:
    found: dict[tuple[int, ...], _Part] = {}
    for k, weight in enumerate(weights):
        state: LookupState | None = owned_table(weight).lookup_state()
        key = (0,) if state is None else (id(state.history), state.rule, state.step)
        part = found.get(key)
        if part is None:
            behind = CURRENT
            if state is not None:
                rest = (state.history, state.rule, state.hyperparameters, state.step, state.base)
                behind = Behind([], [], *rest)
            part = found[key] = _Part([], behind)
        part.tables.append(k)
        if state is not None:
            part.behind.states.extend(state.states)
            part.behind.last_steps.append(state.last_step)
    return list(found.values())


def read(plan: Plan, weights: Sequence[Tensor], ids: Ids) -> Reading:
    """Look up the present values of rows, without a gradient."""
    parts = _parts(weights)
    with torch.no_grad():
        if len(parts) == 1:
            output, argmax = plan.forward([weight.detach() for weight in weights], ids, parts[0].behind)
            return Reading(output, argmax)
        outputs, winners = [], []
        for tables, behind in parts:
            part, lookups = plan.part(tables), plan.lookups_of(tables)
            output, argmax = part.forward([weights[k].detach() for k in tables], ids, behind)
            outputs.append((lookups, output, part.sizes(ids)))
            winners.append((lookups, argmax, part.argmax_sizes(ids)))
        return Reading(joined(outputs), joined(winners))


def versions(weights: Sequence[Tensor]) -> list[int]:
    """A record of the tables' state: it differs after any update."""
    return [weight._version for weight in weights]


def weights_gradient(plan: Plan, weights: Sequence[Tensor], ids: Ids, grad: Tensor, output: Tensor) -> Tensor:
    """The gradient of ``per_sample_weights``, from the tables' present values."""
    total = None
    with torch.no_grad():
        for tables, behind in _parts(weights):
            part, lookups = plan.part(tables), plan.lookups_of(tables)
            sizes = plan.sizes(ids)
            here = [weights[k].detach() for k in tables]
            its_grad, its_output = part_of(lookups, grad, sizes), part_of(lookups, output, sizes)
            gradient = part.weights_gradient(its_grad, here, ids, its_output, behind)
            total = gradient if total is None else total + gradient
    assert total is not None
    return total


def check_unchanged(weights: Sequence[Tensor], before: list[int]) -> None:
    """
    Raise unless the tables are as a lookup found them.

    Raises:
        RuntimeError: a table has been updated since.
    """
    if versions(weights) != before:
        raise RuntimeError(
            "the gradient of per_sample_weights needs the tables as they were looked up, but they have been updated "
            "since: call backward() before the optimizer's step"
        )


# ---- Lookups with gradients of a layout of torch's -------------------------------------------------------------------


class _Behind(torch.autograd.Function):
    """A lookup of tables of which rows may be behind, and its gradients."""

    @staticmethod
    def forward(ctx, plan, kind, bags, side_by_side, indices, offsets, per_sample_weights, *weights):
        ids = Ids(indices, offsets, per_sample_weights, bags, side_by_side)
        output, argmax = read(plan, weights, ids)
        ctx.plan, ctx.kind, ctx.bags, ctx.side_by_side, ctx.weights = plan, kind, bags, side_by_side, weights
        weighs = per_sample_weights is not None and per_sample_weights.requires_grad
        ctx.versions = versions(weights) if weighs else None
        ctx.save_for_backward(indices, offsets, per_sample_weights, output if weighs else None, argmax)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        indices, offsets, per_sample_weights, output, argmax = ctx.saved_tensors
        plan, ids = ctx.plan, Ids(indices, offsets, per_sample_weights, ctx.bags, ctx.side_by_side)
        weights_grad = None
        if ctx.needs_input_grad[6]:
            check_unchanged(ctx.weights, ctx.versions)
            weights_grad = weights_gradient(plan, ctx.weights, ids, grad, output)
        wanted = list(ctx.needs_input_grad[7:])
        grads = [None] * len(wanted)
        if any(wanted):
            made = plan.gradient(ctx.kind, grad, ids, argmax, wanted)
            if ctx.kind == "sparse":
                made = [
                    torch.sparse_coo_tensor(
                        rows.unsqueeze(0), values, weight.shape, is_coalesced=True, check_invariants=False
                    )
                    for values, rows, weight in zip(*made, ctx.weights, strict=True)
                ]
            grads = [x if want else None for x, want in zip(made, wanted, strict=True)]
        return None, None, None, None, None, None, weights_grad, *grads


def any_behind(weights: Sequence[Tensor]) -> bool:
    """Whether a row of any table may be behind its storage."""
    return any(owned_table(weight).lookup_state() is not None for weight in weights)


def look_up_behind(plan: Plan, kind: str, weights: Sequence[Tensor], ids: Ids) -> Tensor:
    """The result of a lookup whose tables get gradients of ``kind`` ``"dense"`` or ``"sparse"``."""
    return _Behind.apply(plan, kind, ids.bags, ids.side_by_side, *ids[:3], *weights)  # type: ignore[no-any-return]
