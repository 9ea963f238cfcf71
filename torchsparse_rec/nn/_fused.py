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
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from ..optim._gradients import update
from ..optim._row_optimizer import RowOptimizer, StepGroup
from ..optim._tables import Gradient, Table, are_same, changes, table_of, writing
from ._anchor import WaitingRows, gradient_of_anchor, waiting_rows
from ._plan import Ids, Plan
from ._read import Reading, Tables, check_unchanged, read, versions, weights_gradient

_lock = threading.RLock()
_lookups = itertools.count()


# ---- Lookups ---------------------------------------------------------------------------------------------------------


class FusedLookups:
    """
    The fused lookups of some tables of one module.

    Args:
        plan: what is looked up.
        weights: gives the tables, as they are stored; None once their module is gone.
        anchor: their anchor.
        apply: ``"backward"`` or ``"step"``.
    """

    def __init__(
        self, plan: Plan, weights: Callable[[], list[Parameter] | None], anchor: Parameter, apply: str
    ) -> None:
        self.plan, self.anchor, self.apply = plan, anchor, apply
        self._weights = weights
        anchor.requires_grad_()  # whether tables train is for them to say
        self.gradient = gradient_of_anchor(anchor)
        self._tables: Tables | None = None
        # What _by_optimizer found, and for what.
        self._optimizers: tuple[int, Tables, list[bool], list[tuple[Any, list[Tensor]]]] | None = None

    def __call__(self, anchor: Parameter, ids: Ids) -> Tensor:
        """The result of a lookup."""
        if torch.is_grad_enabled():
            anchor.requires_grad_()
            return _Fused.apply(anchor, *ids[:3], ids.bags, ids.side_by_side, self)  # type: ignore[no-any-return]
        return read(self.plan, self.tables(), ids).output

    def tables(self) -> Tables:
        """The tables, as they are stored now."""
        weights, known = self._weights(), self._tables
        if known is not None and (weights is None or are_same(known.weights, weights)):
            return known
        assert weights is not None
        self._tables = Tables(weights)
        return self._tables

    def start(self, ids: Ids, recorded: bool) -> Reading:
        """Look up; ``recorded``: a backward may come."""
        tables = self.tables()
        if recorded:
            self._see_holder(tables, needed=False)
        return read(self.plan, tables, ids)

    def expect(self, alive: Callable[[], Any]) -> int:
        """A number for a lookup whose backward can come as long as ``alive()`` is true."""
        number = next(_lookups)
        # Rows that wait for the optimizer's step need not wait for other lookups.
        if self.apply == "backward":
            _outstanding.add(number, alive, self.tables())
        return number

    def _see_holder(self, tables: Tables, needed: bool) -> None:
        """
        Have the optimizer that holds the tables that train hold their anchor too.

        Raises:
            RuntimeError: there is none, where one is needed; or with ``apply="step"`` there are several.
        """
        wanted = [weight.requires_grad for weight in tables.weights]
        found = self._by_optimizer(tables, wanted, needed)
        if self.apply == "backward" or not found:
            return
        if len(found) > 1:
            raise RuntimeError(
                f"grad_mode='fused' with apply='step' needs all tables of a module in one optimizer, got {len(found)}"
            )
        optimizer, held = found[0]
        if optimizer not in self.gradient.held_by:
            optimizer.hold_anchor(self.anchor, held[0])
            self.gradient.held_by.add(optimizer)

    def _by_optimizer(
        self, tables: Tables, wanted: list[bool], needed: bool = True
    ) -> list[tuple[RowOptimizer, list[Tensor]]]:
        """The tables that are wanted, by the optimizer that holds them. ``needed``: all must be held by one."""
        known = self._optimizers
        if known is None or known[:3] != (changes(), tables, wanted):
            found: dict[weakref.ref[RowOptimizer] | None, list[Tensor]] = {}
            for table, weight, want in zip(tables.tables, tables.weights, wanted, strict=True):
                if want:
                    found.setdefault(table.optimizer_reference, []).append(weight)
            known = self._optimizers = (changes(), tables, wanted, list(found.items()))
        result = []
        for reference, weights in known[3]:
            optimizer = reference() if reference is not None else None
            if optimizer is not None:
                result.append((optimizer, weights))
            elif needed:
                raise RuntimeError(_NO_OPTIMIZER)
        return result

    def is_wanted(self) -> bool:
        """Within a backward: whether it is to reach parameters, or only the tensors that ``inputs`` names."""
        try:
            return torch._C._will_engine_execute_node(get_gradient_edge(self.anchor).node)
        except RuntimeError:  # it says so of every leaf under torch.autograd.grad()
            return False

    def finish(self, number: int, grad: Tensor, ids: Ids, argmax: Tensor | None) -> None:
        """The backward of a lookup: update the tables, or let their rows wait. Grad mode must be off."""
        tables = self.tables()
        wanted = [weight.requires_grad for weight in tables.weights]
        with _lock:
            if self.apply == "step":
                self._leave(tables, grad, ids, argmax, wanted)
                return
            awaited = _outstanding.remove(number, tables)
            if self.plan.scale_grad_by_freq:
                alone = [False] * len(wanted)
            else:
                both = zip(wanted, tables.tables, strict=True)
                alone = [want and table not in awaited and not _has_rows(table) for want, table in both]
            if any(alone):
                self._update(tables, grad, ids, argmax, alone)
            if alone != wanted:
                others = [want and not is_alone for want, is_alone in zip(wanted, alone, strict=True)]
                self._collect(tables, grad, ids, argmax, others, awaited)

    def _leave(self, tables: Tables, grad: Tensor, ids: Ids, argmax: Tensor | None, wanted: list[bool]) -> None:
        """Let the rows wait for the optimizer."""
        self._see_holder(tables, needed=True)
        values, rows = self._gradient(tables, grad, ids, argmax, wanted)
        chosen = [k for k, want in enumerate(wanted) if want]
        if chosen:
            its = [tables.tables[k] for k in chosen]
            self.gradient.add(its, [_wide(values[k]) for k in chosen], [rows[k] for k in chosen])

    def _gradient(self, tables: Tables, grad: Tensor, ids: Ids, argmax: Tensor | None, wanted: list[bool]) -> Any:
        """Values and rows of the tables that are wanted."""
        return self.plan.of_sizes(tables.weights).gradient("sparse", grad, ids, argmax, wanted)

    def _update(self, tables: Tables, grad: Tensor, ids: Ids, argmax: Tensor | None, wanted: list[bool]) -> None:
        """Update tables in one pass from the gradient of the result."""
        for optimizer, parameters in self._by_optimizer(tables, wanted):
            with writing(parameters):
                for group in optimizer.begin_step(parameters):
                    here = [True] * len(wanted)
                    if len(group.parameters) < len(wanted):
                        its = {id(parameter) for parameter in group.parameters}
                        here = [id(weight) in its for weight in tables.weights]
                    if group.all_rows:
                        self._update_all_rows(tables, group, here, grad, ids, argmax)
                    else:
                        self.plan.update(tables.weights, group, here, grad, ids, argmax)
                    optimizer.end_step([group])

    def _update_all_rows(
        self, tables: Tables, group: StepGroup, wanted: list[bool], grad: Tensor, ids: Ids, argmax: Tensor | None
    ) -> None:
        """Update tables whose rows without gradient move in a way that only a pass over all of them follows."""
        values, rows = self._gradient(tables, grad, ids, argmax, wanted)
        update(group, [Gradient(rows[k], _wide(values[k])) for k, want in enumerate(wanted) if want])

    def _collect(
        self, tables: Tables, grad: Tensor, ids: Ids, argmax: Tensor | None, wanted: list[bool], awaited: set[Table]
    ) -> None:
        """Keep the rows of tables that other lookups will have gradients for; update those that have them all."""
        values, rows = self._gradient(tables, grad, ids, argmax, wanted)
        for table, want, table_values, table_rows in zip(tables.tables, wanted, values, rows, strict=True):
            if want:
                waiting = waiting_rows(table)
                waiting.own.append((table_rows, _wide(table_values)))
                waiting.newest_lookup = _outstanding.newest
        both = zip(wanted, tables.tables, strict=True)
        ready = [want and table not in awaited for want, table in both]
        for optimizer, parameters in self._by_optimizer(tables, ready):
            gradients = [(parameter, table_of(parameter).take_pending()) for parameter in parameters]
            optimizer.step_tables([(parameter, gradient) for parameter, gradient in gradients if gradient is not None])


class _Outstanding:
    """Lookups whose backward can still come, by number, and their tables."""

    def __init__(self) -> None:
        self._lookups: dict[int, tuple[Callable[[], Any], frozenset[Table]]] = {}
        self._most = 64
        self.newest = -1

    def add(self, number: int, alive: Callable[[], Any], tables: Tables) -> None:
        """Expect the backward of a lookup, as long as ``alive()`` is true."""
        with _lock:
            if len(self._lookups) >= self._most:  # of outputs that were dropped, with no backward since
                self._forget_expired()
                self._most = max(64, 2 * len(self._lookups))
            self._lookups[number] = (alive, tables.set)
            self.newest = number

    def remove(self, number: int, tables: Tables) -> set[Table]:
        """A lookup's backward has come: which of its tables, and perhaps others, have more to expect."""
        self._lookups.pop(number, None)
        self._forget_expired()
        awaited: set[Table] = set()
        for other, (_, others) in self._lookups.items():
            if not others.isdisjoint(tables.set):
                awaited.update(table for table in others if not _is_settled(table, other))
        return awaited

    def _forget_expired(self) -> None:
        for number, (alive, _) in list(self._lookups.items()):
            if not alive():
                del self._lookups[number]


_outstanding = _Outstanding()


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _is_settled(table: Table, number: int) -> bool:
    """Whether rows that waited for this lookup are gone: it is of an earlier step, and its backward may never come."""
    waiting = table.pending
    return isinstance(waiting, WaitingRows) and not waiting.own and number <= waiting.newest_lookup


def _has_rows(table: Table) -> bool:
    return isinstance(table.pending, WaitingRows) and bool(table.pending.own)


_NO_OPTIMIZER = (
    "grad_mode='fused' needs an optimizer of torchsparse_rec.optim that holds the table: make it before training, or "
    "choose another grad_mode"
)


# ---- Eager calls -----------------------------------------------------------------------------------------------------


class _Token:
    """Lives as long as the lookup's backward can come."""


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, indices, offsets, per_sample_weights, bags, side_by_side, owner):
        reading = owner.start(Ids(indices, offsets, per_sample_weights, bags, side_by_side), True)
        weighs = per_sample_weights is not None and per_sample_weights.requires_grad
        ctx.bags, ctx.side_by_side, ctx.owner = bags, side_by_side, owner
        ctx.token = _Token()
        ctx.number = owner.expect(weakref.ref(ctx.token))
        ctx.versions = versions(owner.tables().weights) if weighs else None
        output = reading.output if weighs else None
        ctx.save_for_backward(indices, offsets, per_sample_weights, output, reading.argmax)
        return reading.output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        indices, offsets, per_sample_weights, output, argmax = ctx.saved_tensors
        ids = Ids(indices, offsets, per_sample_weights, ctx.bags, ctx.side_by_side)
        owner, weights_grad, anchor_grad = ctx.owner, None, None
        if ctx.needs_input_grad[3]:
            check_unchanged(owner.tables().weights, ctx.versions)
            weights_grad = weights_gradient(owner.plan, owner.tables(), ids, grad, output)
        if owner.is_wanted():
            owner.finish(ctx.number, grad, ids, argmax)
            if owner.apply == "step":
                anchor_grad = torch.zeros_like(owner.anchor)
        return anchor_grad, None, None, weights_grad, None, None, None
