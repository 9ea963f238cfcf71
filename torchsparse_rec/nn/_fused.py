"""
The fused gradient mode: tables whose gradient never becomes a ``.grad``.

A lookup hangs on an anchor (``_anchor.py``) in place of its tables; its backward has the gradient of the result and
either updates the tables at once (``apply="backward"``) or leaves the rows that occur, summed, for the optimizer's step
(``apply="step"``).

Everything here happens when a lookup or its backward runs: eager calls come by an autograd Function, compiled graphs by
operators (``_fused_graph.py``). Neither is given the tables: a graph that holds a parameter must not see it change.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from ..optim._gradients import update
from ..optim._row_optimizer import StepGroup
from ..optim._tables import Gradient, Table, table_of
from ._anchor import AnchorGradient, WaitingRows, waiting_rows
from ._plan import Ids, Plan
from ._read import Reading, check_unchanged, read, versions, weights_gradient

_lock = threading.RLock()
_lookups = itertools.count()


# ---- Lookups ---------------------------------------------------------------------------------------------------------


class FusedLookups:
    """
    The fused lookups of some tables of one module.

    Args:
        plan: what is looked up.
        weights: gives the tables, as they are stored.
        anchor: their anchor.
        apply: ``"backward"`` or ``"step"``.
    """

    def __init__(self, plan: Plan, weights: Callable[[], list[Parameter]], anchor: Parameter, apply: str) -> None:
        self.plan, self.weights, self.apply = plan, weights, apply
        self.anchor = weakref.ref(anchor)
        gradient = getattr(anchor, "_torchsparse_rec_gradient", None)
        if gradient is None:
            gradient = AnchorGradient(anchor)
            anchor._torchsparse_rec_gradient = gradient  # type: ignore[attr-defined]
        self.gradient: AnchorGradient = gradient

    def __call__(self, anchor: Parameter, ids: Ids) -> Tensor:
        """The result of a lookup."""
        if torch.is_grad_enabled() and anchor.requires_grad:
            return _Fused.apply(anchor, *ids[:3], ids.bags, ids.side_by_side, self)  # type: ignore[no-any-return]
        return read(self.plan, self.weights(), ids).output

    def start(self, ids: Ids, recorded: bool) -> tuple[Reading, Tensor]:
        """Look up, and note that a backward will come. The token lives as long as it still can."""
        weights = self.weights()
        if recorded:
            self._check_held(weights)
        reading = read(self.plan, weights, ids)
        number = next(_lookups) if recorded else -1
        token = torch.tensor([number])
        # Rows that wait for the optimizer's step need not wait for other lookups.
        if recorded and self.apply == "backward":
            alive = StorageWeakRef(token.untyped_storage())
            with _lock:
                for weight in weights:
                    table_of(weight).outstanding[number] = alive
        return reading, token

    def _check_held(self, weights: list[Parameter]) -> None:
        """Raise unless an optimizer of ours holds every table that trains; have it hold the anchor too."""
        found = _by_optimizer([weight for weight in weights if weight.requires_grad])
        if self.apply == "backward" or not found:
            return
        if len(found) > 1:
            raise RuntimeError(
                f"grad_mode='fused' with apply='step' needs all tables of a module in one optimizer, got {len(found)}"
            )
        optimizer, held = found[0]
        if optimizer not in self.gradient.held_by:
            anchor = self.anchor()
            assert anchor is not None
            optimizer.hold_anchor(anchor, held[0])
            self.gradient.held_by.add(optimizer)

    def finish(self, token: Tensor, grad: Tensor, ids: Ids, argmax: Tensor | None) -> None:
        """The backward of a lookup: update the tables, or let their rows wait."""
        number = int(token)
        weights = self.weights()
        tables = [table_of(weight) for weight in weights]
        wanted = [weight.requires_grad for weight in weights]
        with _lock, torch.no_grad():
            if self.apply == "step":
                self._leave(tables, grad, ids, argmax, wanted)
                return
            for table in tables:
                table.outstanding.pop(number, None)
            alone = [want and not _has_rows(table) for want, table in zip(wanted, tables, strict=True)]
            alone = [is_alone and not _awaits(table) for is_alone, table in zip(alone, tables, strict=True)]
            alone = [is_alone and not self.plan.scale_grad_by_freq for is_alone in alone]
            if any(alone):
                self._update(weights, grad, ids, argmax, alone)
            others = [want and not is_alone for want, is_alone in zip(wanted, alone, strict=True)]
            if any(others):
                self._collect(weights, grad, ids, argmax, others)

    def _leave(self, tables: list[Table], grad: Tensor, ids: Ids, argmax: Tensor | None, wanted: list[bool]) -> None:
        """Let the rows wait for the optimizer."""
        values, rows = self.plan.gradient("sparse", grad, ids, argmax, wanted)
        chosen = [k for k, want in enumerate(wanted) if want]
        self.gradient.add([tables[k] for k in chosen], [_wide(values[k]) for k in chosen], [rows[k] for k in chosen])

    def _update(
        self, weights: list[Parameter], grad: Tensor, ids: Ids, argmax: Tensor | None, wanted: list[bool]
    ) -> None:
        """Update tables in one pass from the gradient of the result."""
        plan, places = self.plan, {id(weight): k for k, weight in enumerate(weights)}
        detached = [weight.detach() for weight in weights]
        for optimizer, parameters in _by_optimizer([w for w, want in zip(weights, wanted, strict=True) if want]):
            groups = optimizer.begin_step(parameters)
            for group in groups:
                if group.all_rows:
                    self._update_all_rows(group, places, grad, ids, argmax)
                    continue
                here = [False] * len(weights)
                for parameter in group.parameters:
                    here[places[id(parameter)]] = True
                torch.ops.torchsparse_rec.embedding_collection_update_.default(
                    detached,
                    group.states,
                    group.last_steps,
                    group.history,
                    grad.contiguous(),
                    *ids[:3],
                    argmax,
                    *plan.lists(ids),
                    here,
                    None,
                    group.rule,
                    group.hyperparameters,
                    group.step,
                    group.base,
                    group.maximize,
                    group.rounding_seeds,
                )
            optimizer.end_step(groups)

    def _update_all_rows(
        self, group: StepGroup, places: dict[int, int], grad: Tensor, ids: Ids, argmax: Tensor | None
    ) -> None:
        """Update tables whose rows without gradient move in a way that only a pass over all of them follows."""
        chosen = [places[id(parameter)] for parameter in group.parameters]
        wanted = [k in chosen for k in range(len(places))]
        values, rows = self.plan.gradient("sparse", grad, ids, argmax, wanted)
        update(group, [Gradient(rows[k], _wide(values[k])) for k in chosen])

    def _collect(
        self, weights: list[Parameter], grad: Tensor, ids: Ids, argmax: Tensor | None, wanted: list[bool]
    ) -> None:
        """Keep the rows of tables that other lookups will have gradients for; update those that have them all."""
        values, rows = self.plan.gradient("sparse", grad, ids, argmax, wanted)
        ready = []
        for weight, want, table_values, table_rows in zip(weights, wanted, values, rows, strict=True):
            if not want:
                continue
            table = table_of(weight)
            waiting_rows(table).own.append((table_rows, _wide(table_values)))
            if not _awaits(table):
                ready.append(weight)
        for optimizer, parameters in _by_optimizer(ready):
            optimizer.step_tables([(parameter, table_of(parameter).take_pending()) for parameter in parameters])


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _has_rows(table: Table) -> bool:
    return isinstance(table.pending, WaitingRows) and bool(table.pending.own)


def _awaits(table: Table) -> bool:
    """Whether some other lookup's backward can still come."""
    for number, alive in list(table.outstanding.items()):
        if alive.expired():
            table.outstanding.pop(number)
    return bool(table.outstanding)


def _by_optimizer(weights: list[Parameter]) -> list[tuple[Any, list[Parameter]]]:
    found: dict[int, tuple[Any, list[Parameter]]] = {}
    for weight in weights:
        optimizer = table_of(weight).optimizer
        if optimizer is None:
            raise RuntimeError(_NO_OPTIMIZER)
        found.setdefault(id(optimizer), (optimizer, []))[1].append(weight)
    return list(found.values())


_NO_OPTIMIZER = (
    "grad_mode='fused' needs an optimizer of torchsparse_rec.optim that holds the table: make it before training, or "
    "choose another grad_mode"
)


# ---- Eager calls -----------------------------------------------------------------------------------------------------


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, indices, offsets, per_sample_weights, bags, side_by_side, owner):
        reading, token = owner.start(Ids(indices, offsets, per_sample_weights, bags, side_by_side), True)
        weighs = per_sample_weights is not None and per_sample_weights.requires_grad
        ctx.bags, ctx.side_by_side, ctx.owner = bags, side_by_side, owner
        ctx.versions = versions(owner.weights()) if weighs else None
        output = reading.output if weighs else None
        ctx.save_for_backward(indices, offsets, per_sample_weights, output, reading.argmax, token)
        return reading.output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        indices, offsets, per_sample_weights, output, argmax, token = ctx.saved_tensors
        ids = Ids(indices, offsets, per_sample_weights, ctx.bags, ctx.side_by_side)
        owner, weights_grad, anchor_grad = ctx.owner, None, None
        if ctx.needs_input_grad[3]:
            check_unchanged(owner.weights(), ctx.versions)
            weights_grad = weights_gradient(owner.plan, owner.weights(), ids, grad, output)
        if ctx.needs_input_grad[0]:
            owner.finish(token, grad, ids, argmax)
            anchor_grad = torch.zeros_like(owner.anchor())
        return anchor_grad, None, None, weights_grad, None, None, None
