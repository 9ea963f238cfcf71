"""
The fused gradient mode: backward updates the tables, whose gradient never becomes a ``.grad``.

In autograd's graph a lookup depends on a hidden leaf instead of its tables. Its backward is given the gradient of the
result, and updates the tables with the optimizer that holds them. A table that several lookups of one backward have
read is updated once, when that backward has ended.

Everything here happens when a lookup or its backward runs: eager calls come by an autograd Function, compiled graphs by
operators (``_fused_graph.py``). Neither is given the tables: a graph that holds a parameter must not see it change.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .._torch import (
    as_stored,
    at_end_of_backward,
    bare_apply,
    current_backward,
    grad_of,
    is_reached,
    is_seen,
    is_wrapped,
    node_of,
    set_grad_enabled,
)
from .._torch_modules import gradient_hooks, is_in_ddp
from ..ops.autograd import final
from ..ops.scores_passes import Passes, Samples
from ..optim.row_optimizer import RowOptimizer
from ..tables.gradients import StepGroup, merged, update
from ..tables.optimizer import TableOptimizer
from ..tables.table import (
    SECOND_BACKWARD,
    Gradient,
    Table,
    table_of,
    writing,
)
from ._graph_owners import Owner
from ._prepared import Prepared
from ._read import TableSet, check_unchanged, read, versions, weights_gradient
from .gradients import have_hooks
from .plan import Ids, LookupPlan
from .streamed import Deferred, blocks, lock_of, rows_of

_lock = threading.RLock()
_lookups = itertools.count()
# The number of lookups of one table that await their backward at which expired ones are removed.
_MANY = 64
_OF_LOSS = "the gradient of a loss over a table"


def _after_fork() -> None:
    """Make a new lock in a forked process, which lacks the thread that may have held the old one."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# ---- Lookups ---------------------------------------------------------------------------------------------------------


class FusedLookups:
    """
    The fused lookups of some tables of one module.

    Args:
        plan: the lookups.
        module: the module that owns the tables. It may be gone when a backward comes.
        numbers: the numbers of these tables among the module's.
        leaf: the tensor on which the lookups depend instead of the tables.
    """

    def __init__(self, plan: LookupPlan, module: Owner, numbers: tuple[int, ...], leaf: Tensor) -> None:
        self.plan, self.leaf = plan, leaf
        self._module, self._numbers = weakref.ref(module), numbers
        self._node: Any = None
        self.prepared: Prepared | None = None
        self._tables: TableSet | None = None
        # The arguments of the last by_optimizer() and its result.
        self._optimizers: tuple[int, TableSet, list[bool], list[tuple[Any, list[Tensor]]]] | None = None

    def __call__(self, ids: Ids, training: bool) -> Tensor:
        """Return the result of a lookup."""
        if torch.is_grad_enabled():
            apply = _Fused.apply if is_seen() or is_wrapped(ids.indices) else fused_bare
            return apply(self.leaf, *ids, self, self.tables(), training)  # type: ignore[no-any-return]
        return read(self.plan, self.tables(), ids)[0]

    def tables(self) -> TableSet:
        """Return the tables in their stored form."""
        module, known = self._module(), self._tables
        weights = None if module is None else module.stored_weights()
        if weights is not None and len(weights) != len(self._numbers):
            weights = [weights[k] for k in self._numbers]
        if known is not None and (weights is None or all(map(is_, known.weights, weights))):
            return known if known.changes == Table.changes else known.refresh()
        assert weights is not None
        self._tables, self.prepared = TableSet(weights), None
        return self._tables

    def expect(self, tables: TableSet, alive: Callable[[], Any]) -> int:
        """Return a new number for a lookup, whose backward can come as long as ``alive()`` is true."""
        number = next(_lookups)
        with _lock:
            for table in tables.tables:
                awaited = table.awaited
                awaited[number] = alive
                # Many may be of outputs that were dropped, with no backward since.
                if len(awaited) >= _MANY and not len(awaited) & (len(awaited) - 1):
                    _forget_expired(awaited)
        return number

    def check(self, tables: TableSet) -> None:
        """
        Check that a backward can update the tables and that nothing else uses their gradients.

        Raises:
            RuntimeError: no optimizer made with ``in_backward=True`` holds a table; a table has a ``.grad`` or a hook,
                or is in a DistributedDataParallel. All of these need a gradient, and fused lookups give none.
        """
        wanted, hooked, wrong = [], [], None
        for weight in tables.weights:  # one loop: each lookup asks it of each table
            wanted.append(weight.requires_grad)
            if weight.requires_grad:
                if grad_of(weight) is not None:
                    wrong = _HAS_GRAD
                elif any(gradient_hooks(weight)):
                    hooked.append(weight)
        if hooked and have_hooks(hooked):  # those that grow have one of ours
            wrong = wrong or _HAS_HOOKS
        self.by_optimizer(tables, wanted)
        if wrong is not None:
            raise RuntimeError(wrong)
        # That a part of a table is left out of it, its module has checked.
        if is_in_ddp() and any(table.part is None for table in tables.tables):
            raise RuntimeError(_IN_DDP)

    def by_optimizer(self, tables: TableSet, wanted: list[bool]) -> list[tuple[RowOptimizer, list[Tensor]]]:
        """Return the optimizers that hold the wanted tables, each with its tables."""
        known = self._optimizers
        if known is None or known[:3] != (Table.changes, tables, wanted):
            found: dict[int, tuple[weakref.ref[TableOptimizer] | None, list[Tensor]]] = {}
            for table, weight, want in zip(tables.tables, tables.weights, wanted, strict=True):
                if want:
                    reference = table.optimizer_reference
                    found.setdefault(id(reference), (reference, []))[1].append(weight)
            known = self._optimizers = (Table.changes, tables, wanted, list(found.values()))
        result = []
        for reference, weights in known[3]:
            optimizer = reference() if reference is not None else None
            if not isinstance(optimizer, RowOptimizer) or not optimizer.in_backward:
                got = "none" if optimizer is None else f"{type(optimizer).__name__} without it"
                raise RuntimeError(_NO_OPTIMIZER.format(got))
            result.append((optimizer, weights))
        return result

    def is_wanted(self) -> bool:
        """Say whether the running backward is to update the tables, or only to reach the tensors ``inputs`` names."""
        if self._node is None:  # first in a backward, as no node is found within an operator's kernel
            self._node = node_of(self.leaf)
        return is_reached(self._node)

    def finish(self, number: int, tables: TableSet, grad: Tensor, ids: Ids, argmax: Tensor | None) -> None:
        """Update the tables in the backward of a lookup. Grad mode must be off."""
        with _lock, as_stored():
            wanted, alone = self._turn(number, tables)
            if self.plan.scale_grad_by_freq:
                alone = [False] * len(wanted)
            if all(alone) and self.prepared is not None and self.prepared.tables is tables:
                if self.prepared.step(self.plan, grad, ids, argmax):
                    return
            if any(alone):
                self._update(tables, grad, ids, argmax, alone)
            if alone != wanted:
                others = [want and not is_alone for want, is_alone in zip(wanted, alone, strict=True)]
                self._collect(tables, grad, ids, argmax, others)

    def _turn(self, number: int, tables: TableSet) -> tuple[list[bool], list[bool]]:
        """Return which tables a reader is to update in its backward, and which of them no other reader can reach."""
        wanted, alone = [], []
        for weight, table in zip(tables.weights, tables.tables, strict=True):
            want, awaited = weight.requires_grad, table.awaited
            awaited.pop(number, None)
            if awaited:
                _forget_expired(awaited)
            wanted.append(want)
            alone.append(want and not awaited and table.collected is None)
        return wanted, alone

    def _gradient(self, tables: TableSet, grad: Tensor, ids: Ids, argmax: Tensor | None, wanted: list[bool]) -> Any:
        """Return the values and the rows of the wanted tables' gradients."""
        return self.plan.of_sizes(tables.weights).gradient("sparse", grad, ids, argmax, wanted)

    def _update(self, tables: TableSet, grad: Tensor, ids: Ids, argmax: Tensor | None, wanted: list[bool]) -> None:
        """Update tables in one pass from the gradient of the result."""
        for optimizer, parameters in self.by_optimizer(tables, wanted):
            with writing(parameters):
                groups = optimizer.begin_step(parameters, in_backward=True)
                for group in groups:
                    with group.clock:
                        self._update_group(tables, group, grad, ids, argmax)
                        optimizer.end_step(group)
            self.prepared = Prepared.after(tables, optimizer, groups)

    def _update_group(self, tables: TableSet, group: StepGroup, grad: Tensor, ids: Ids, argmax: Tensor | None) -> None:
        wanted = [True] * len(tables.weights)
        if len(group.parameters) < len(wanted):
            its = {id(parameter) for parameter in group.parameters}
            wanted = [id(weight) in its for weight in tables.weights]
        if not group.all_rows:
            self.plan.update(tables.weights, group, wanted, grad, ids, argmax)
            return
        # Rows without gradient move too, in no closed form: the optimizer must step all rows.
        values, rows = self._gradient(tables, grad, ids, argmax, wanted)
        update(group, [Gradient(rows[k], _wide(values[k])) for k, want in enumerate(wanted) if want])

    def _collect(self, tables: TableSet, grad: Tensor, ids: Ids, argmax: Tensor | None, wanted: list[bool]) -> None:
        """Keep gradients of tables for which other lookups may bring more, until this backward ends."""
        values, rows = self._gradient(tables, grad, ids, argmax, wanted)
        chosen = [k for k, want in enumerate(wanted) if want]
        gradients = [Gradient(rows[k], _wide(values[k])) for k in chosen]
        self._await_end([tables.weights[k] for k in chosen], gradients)

    def _await_end(self, weights: list[Tensor], parts: Sequence[Gradient | Deferred]) -> None:
        """Keep a part of each table's gradient until the running backward ends, which then updates the tables."""
        backward = current_backward()
        for weight, part in zip(weights, parts, strict=True):
            if not table_of(weight).collect(backward, part):
                raise RuntimeError(SECOND_BACKWARD)
        at_end_of_backward(partial(self._end, backward, weights))

    @torch.no_grad()
    def _end(self, backward: int, weights: list[Tensor]) -> None:
        """Update tables with the gradients that a backward, which now ends, has collected for them."""
        with _lock, as_stored():
            # The call registered by another lookup may have updated some of them already.
            here = [weight for weight in weights if table_of(weight).is_collecting(backward)]
            if here:
                tables = TableSet(here)
                for optimizer, parameters in self.by_optimizer(tables, [True] * len(here)):
                    gradients, streamed = [], []
                    for p in parameters:
                        parts = table_of(p).take_collected()
                        losses = [part for part in parts if isinstance(part, Deferred)]
                        if losses:
                            streamed.append((p, losses, [part for part in parts if not isinstance(part, Deferred)]))
                        else:
                            gradients.append((p, merged(parts, p.shape[0])))
                    optimizer.step_tables(gradients, in_backward=True)
                    for p, losses, parts in streamed:
                        with torch.autocast(p.device.type, enabled=False):
                            passes = [loss.backward(p.shape[0]) for loss in losses]
                            added = merged(parts, p.shape[0]) if parts else None
                            optimizer.step_blocks(p, blocks(passes, table_of(p), added))

    # ---- Losses over all rows of the only table ----------------------------------------------------------------------

    def losses(
        self, of: Samples, training: bool, passes: Callable[[Samples, int], Passes] = Passes
    ) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Return what ``Passes.forward`` does, and the table's version, with which :meth:`finish_loss` begins."""
        with as_stored():
            tables = self.tables()
            if training:
                self.check(tables)
            (table,) = tables.tables
            with lock_of(table), torch.autocast(of.input.device.type, enabled=False):
                made = passes(of, table.num_embeddings).forward(rows_of(table))
            return *made, versions(tables.weights, _OF_LOSS)

    def finish_loss(
        self, number: int | None, before: Sequence[int], loss: Deferred, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """
        Update the table in the backward of a loss, and return the gradients of input and bias. Grad mode must be off.

        Where other readers of the table may bring gradients, the table is updated when this backward ends. The blocks
        are then made a second time.

        Args:
            number: the number that :meth:`expect` has returned. None: this backward does not update the table.
            before: the table's version in the forward.
            loss: the loss.
            wanted: whether input and bias have gradients.
        """
        with _lock, as_stored(), torch.autocast(loss.of.input.device.type, enabled=False):
            tables = self.tables()
            (weight,), (table,) = tables.weights, tables.tables
            steps = alone = False
            if number is not None:
                (steps,), (alone,) = self._turn(number, tables)
            if steps:
                ((optimizer, _),) = self.by_optimizer(tables, [True])
                if optimizer.has_stepped([weight]):
                    raise RuntimeError(SECOND_BACKWARD)
            check_unchanged([weight], before, _OF_LOSS)
            passes = loss.backward(table.num_embeddings, *wanted)
            if alone and optimizer.holds(weight):
                optimizer.step_blocks(weight, blocks([passes], table))
                return passes.gradients()
            with lock_of(table):
                read = rows_of(table)
                for begin, end in passes.blocks():
                    passes.block(read(begin, end), begin, end, None)
            gradients = passes.gradients()
            if steps:  # the end needs the biases as they are, which may be stepped before
                bias = loss.of.bias
                of = loss.of._replace(bias=None if bias is None else bias.detach().clone())
                self._await_end([weight], [loss._replace(of=of)])
        return gradients


def _forget_expired(awaited: dict[int, Callable[[], Any]]) -> None:
    """Forget the lookups whose backward can no longer come."""
    for number, alive in list(awaited.items()):
        if not alive():
            del awaited[number]


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


# Error messages; each names the way out.
_OTHER_MODES = "choose grad_mode='sparse' or 'dense' for the table"
_NO_OPTIMIZER = (
    "grad_mode='fused': the table must be held by an optimizer of torchsparse_rec.optim that was made with "
    "in_backward=True, by which backward() updates it, got {}: make one before training, or " + _OTHER_MODES
)
_HAS_GRAD = (
    "grad_mode='fused': the table has a .grad, which backward() ignores when it updates the table. It comes from "
    "something other than lookups and nn.table_cross_entropy (tied weights, a penalty on weight), or from another "
    "grad_mode before: set .grad to None, or " + _OTHER_MODES
)
_HAS_HOOKS = (
    "grad_mode='fused': the table has a hook on its gradient, which would never run: backward() updates the table and "
    "gives it no gradient. Remove the hook, or " + _OTHER_MODES
)
_IN_DDP = (
    "grad_mode='fused': the table is in a DistributedDataParallel, which adds up gradients over processes, but "
    "backward() updates the table by the gradient of this process alone: " + _OTHER_MODES
)


# ---- Eager calls -----------------------------------------------------------------------------------------------------


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, leaf, indices, offsets, per_sample_weights, bags, side_by_side, owner, tables, training):
        known = owner.prepared
        if training and (known is None or known.tables is not tables or not known.holds() or is_in_ddp()):
            owner.check(tables)
        output, argmax = read(owner.plan, tables, Ids(indices, offsets, per_sample_weights, bags, side_by_side))
        weighs = per_sample_weights is not None and per_sample_weights.requires_grad
        # The context lives as long as the backward can come.
        ctx.call = owner, bags, side_by_side, owner.expect(tables, weakref.ref(ctx))
        ctx.versions = versions(tables.weights) if weighs else None
        ctx.save_for_backward(indices, offsets, per_sample_weights, output if weighs else None, argmax)
        return output

    @staticmethod
    def backward(ctx, grad):
        """Update the tables, and return the gradient of ``per_sample_weights``, which has no derivative."""
        indices, offsets, per_sample_weights, output, argmax = ctx.saved_tensors
        owner, bags, side_by_side, number = ctx.call
        ids, weights_grad = Ids(indices, offsets, per_sample_weights, bags, side_by_side), None
        records = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            tables = owner.tables()
            if ctx.needs_input_grad[3]:
                check_unchanged(tables.weights, ctx.versions)
                weights_grad = weights_gradient(owner.plan, tables, ids, grad, output)
            if owner.is_wanted():
                owner.finish(number, tables, grad, ids, argmax)
        finally:
            set_grad_enabled(records)
        if weights_grad is not None:
            weights_grad = final("the gradient of per_sample_weights", weights_grad, grad, owner.leaf)
        return None, None, None, weights_grad, None, None, None, None, None


fused_bare = bare_apply(_Fused)
