"""Reading tables with stale rows: rows are brought up to date in reading, and nothing is written."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._torch import (
    as_stored,
    bare_apply,
    below_autograd,
    is_plain,
    is_seen,
    is_wrapped,
    see_operators,
    set_grad_enabled,
)
from .._torch_modules import version_of
from ..ops.autograd import final
from ..ops.embedding import coo_tensor
from ..ops.embedding_collection import tell
from ..tables.table import RowStates, Table, table_of
from .gradients import CoalescedMark, coalesced_mark
from .plan import NOTHING_MISSED, Held, Ids, LookupPlan, Missed, joined, part_of

if TYPE_CHECKING:
    from ..tables.steps import Steps

# The gradient that needs the tables as a lookup found them.
_OF_WEIGHTS = "the gradient of per_sample_weights"


def owned_table(weight: Tensor) -> Table:
    """Return the table of a module's parameter, marked as owned: copies of modules have parameters not marked yet."""
    table = table_of(weight)
    if not table.owned:
        table.mark_owned()
    return table


class ReadGroup:
    """Tables that one call reads, all on one clock or without any, and their tensors."""

    __slots__ = ("clock", "places", "all_rows", "states", "last_steps", "held")

    def __init__(self, clock: Steps[Table] | None, places: Sequence[int] = ()) -> None:
        self.clock, self.places = clock, list(places)
        self.all_rows: list[RowStates] = []
        self.states: list[Tensor] = []
        self.last_steps: list[Tensor] = []
        # The plan of the last call and, from its second call on, the kernels' copy of it.
        self.held: tuple[LookupPlan | None, Held | None] = None, None

    def hold(self, plan: LookupPlan, weights: list[Tensor]) -> Held | None:
        """Have the kernels hold a plan, if the last call was by it too: to hold many in turn costs more than lists."""
        its_second = self.held[0] is plan and not see_operators(weights)
        held = Held(plan, weights, self.states, self.last_steps) if its_second else None
        self.held = plan, held
        return held

    def lock(self) -> AbstractContextManager:
        """Return the lock to hold from :meth:`missed` until the tables are read: other threads may flush them."""
        return nullcontext() if self.clock is None else self.clock.lock

    def missed(self) -> Missed:
        """Return the arguments that bring the rows up to date, or ``NOTHING_MISSED`` if none is stale."""
        clock = self.clock
        for rows in self.all_rows:
            if rows.current != clock.step:  # type: ignore[union-attr]
                if clock.on_cuda:  # type: ignore[union-attr]
                    clock.refuse_capture()  # type: ignore[union-attr]
                rest = clock.history, clock.rule, clock.hyperparameters, clock.step, clock.base  # type: ignore[union-attr]
                return Missed(self.states, self.last_steps, *rest)
        return NOTHING_MISSED


class TableSet:
    """
    Tables that are looked up together, grouped by the calls that read them.

    Args:
        weights: the tables' stored parameters. The keeper of the object checks that they still are.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = list(weights)
        self.changes = -1
        # Which tables have a gradient, and their marks.
        self._marks: tuple[list[bool], list[CoalescedMark | None]] | None = None
        self.refresh()

    def is_stale(self) -> bool:
        """Say whether a row of one of the tables may be stale."""
        if self.changes != Table.changes:
            self.refresh()
        for group in self.kept:
            for rows in group.all_rows:
                if rows.current != rows.clock.step:
                    return True
        return False

    def refresh(self) -> TableSet:
        """Regroup the tables if their optimizers, clocks or states have changed; return the object."""
        changes = Table.changes
        if self.changes == changes:
            return self
        self.tables = [owned_table(weight) for weight in self.weights]
        # Tables without a clock and tables whose weights their clock does not move form one group.
        found: dict[Steps[Table] | None, ReadGroup] = {}
        for k, table in enumerate(self.tables):
            rows = table.rows
            clock = rows.clock if rows is not None and rows.clock.moves_weights else None
            group = found.setdefault(clock, ReadGroup(clock))
            group.places.append(k)
            if clock is not None and rows is not None and rows.last_step is not None:
                group.all_rows.append(rows)
                group.states.extend(rows.states)
                group.last_steps.append(rows.last_step)
        # In this order: other threads see by `changes` whether the groups are up to date.
        self.kept, self._marks = list(found.values()), None
        self.changes = changes
        return self

    def marks(self) -> list[CoalescedMark | None]:
        """Return each table's :func:`coalesced_mark`, looked for once until a table changes."""
        if self.changes != Table.changes:
            self.refresh()
        trained = []
        for weight in self.weights:
            trained.append(weight.requires_grad)
        known = self._marks
        if known is None or known[0] != trained:
            known = self._marks = trained, [coalesced_mark(weight) for weight in self.weights]
        return known[1]

    def groups(self) -> list[ReadGroup]:
        """Return the tables in groups; one call reads a group."""
        if self.changes != Table.changes:
            self.refresh()
        if len(self.kept) == 1 or self.is_stale():
            return self.kept
        return [ReadGroup(None, range(len(self.tables)))]


def read(plan: LookupPlan, tables: TableSet, ids: Ids) -> tuple[Tensor, Tensor]:
    """Look up rows, brought up to date, without a gradient; return results and argmax."""
    weights = tables.weights
    groups = tables.kept
    if tables.changes != Table.changes or len(groups) > 1:
        groups = tables.groups()
    if len(groups) == 1:
        clock, held = groups[0].clock, None
        if is_plain(ids.indices, weights[0]):
            last, held = groups[0].held
            if held is None or last is not plan:
                held = groups[0].hold(plan, weights)
        forward = plan.forward if held is None else held.forward
        if clock is None:
            return forward(weights, ids)
        with clock.lock:
            return forward(weights, ids, groups[0].missed())
    outputs, winners = [], []
    for group in groups:
        its, lookups = plan.part(group.places), plan.lookups_of(group.places)
        with group.lock():
            output, argmax = its.forward([weights[k] for k in group.places], ids, group.missed())
        outputs.append((lookups, output, its.sizes(ids)))
        winners.append((lookups, argmax, its.argmax_sizes(ids)))
    return joined(outputs), joined(winners)


def versions(weights: Sequence[Tensor], of: str = _OF_WEIGHTS) -> list[int]:
    """
    Return two numbers for each table, of which every update changes the second, and a flush neither.

    The first is the parameter's id, as another parameter may take the table's place.

    Args:
        weights: the tables.
        of: the name of the gradient that needs the tables as they are.

    Raises:
        RuntimeError: a table has none, because it was made in inference mode.
    """
    with as_stored():
        if not any(weight.is_inference() for weight in weights):
            with suppress(RuntimeError):  # the weight is one no longer, but torch counts no versions of it either
                found = ((id(x), version_of(x) + _is_to_be_written(table_of(x))) for x in weights)
                return [number for numbers in found for number in numbers]
    raise RuntimeError(
        f"{of} needs a weight that was made outside torch.inference_mode(): replace it by "
        "torch.nn.Parameter(weight.clone()), or make or load the module under torch.no_grad()"
    )


def _is_to_be_written(table: Table) -> bool:
    """Say whether a flush would write the weight: it writes once until the next step."""
    rows = table.rows
    return rows is not None and rows.clock.history is not None and rows.current != rows.clock.step


def weights_gradient(plan: LookupPlan, tables: TableSet, ids: Ids, grad: Tensor, output: Tensor) -> Tensor:
    """Return the gradient of ``per_sample_weights``, from rows brought up to date."""
    total = None
    with torch.no_grad(), as_stored():
        for group in tables.groups():
            its, lookups = plan.part(group.places), plan.lookups_of(group.places)
            sizes = plan.sizes(ids)
            here = [tables.weights[k].detach() for k in group.places]
            its_grad, its_output = part_of(lookups, grad, sizes), part_of(lookups, output, sizes)
            with group.lock():
                gradient = its.weights_gradient(its_grad, here, ids, its_output, group.missed())
            total = gradient if total is None else total + gradient
    assert total is not None
    return total


def check_unchanged(weights: Sequence[Tensor], before: Sequence[int], of: str = _OF_WEIGHTS) -> None:
    """
    Check that the tables have the values that a forward found.

    Args:
        weights: the tables.
        before: the result of :func:`versions` in the forward.
        of: the name of the gradient that needs these values.

    Raises:
        RuntimeError: a table has been updated since the forward.
    """
    if versions(weights, of) != list(before):
        raise RuntimeError(
            f"{of} needs the tables as they were looked up, but they have been updated since, or replaced: call "
            "backward() before the optimizer's step"
        )


# ---- Lookups with strided and COO gradients --------------------------------------------------------------------------


class _StaleLookup(torch.autograd.Function):
    """A lookup of tables with stale rows, and its gradients."""

    @staticmethod
    def forward(ctx, plan, kind, bags, side_by_side, tables, indices, offsets, per_sample_weights, *weights):
        """Look up the tables; autograd needs their ``weights`` as arguments of their own."""
        ids = Ids(indices, offsets, per_sample_weights, bags, side_by_side)
        output, argmax = read(plan, tables, ids)
        ctx.plan = plan.of_sizes(weights)  # as they are: a table may grow before the backward
        ctx.kind, ctx.bags, ctx.side_by_side, ctx.tables = kind, bags, side_by_side, tables
        ctx.marks = tables.marks() if kind == "sparse" else None
        weighs = per_sample_weights is not None and per_sample_weights.requires_grad
        ctx.versions = versions(weights) if weighs else None
        ctx.save_for_backward(indices, offsets, per_sample_weights, output if weighs else None, argmax)
        return output

    @staticmethod
    def backward(ctx, grad):
        """Return the gradients, which have no derivatives."""
        indices, offsets, per_sample_weights, output, argmax = ctx.saved_tensors
        plan, ids = ctx.plan, Ids(indices, offsets, per_sample_weights, ctx.bags, ctx.side_by_side)
        weights_grad = None
        if ctx.needs_input_grad[7]:
            check_unchanged(ctx.tables.weights, ctx.versions)
            weights_grad = weights_gradient(plan, ctx.tables, ids, grad, output)
            weights_grad = final("the gradient of per_sample_weights", weights_grad, grad, *ctx.tables.weights)
        wanted = list(ctx.needs_input_grad[8:])
        grads: list[Tensor | None] = [None] * len(wanted)
        if any(wanted):
            records = torch.is_grad_enabled()
            set_grad_enabled(False)
            try:
                if ctx.kind != "sparse":
                    made = plan.gradient(ctx.kind, grad, ids, argmax, wanted)
                elif is_seen():
                    values, rows = plan.gradient("sparse", grad, ids, argmax, wanted)
                    made = [coo_tensor(*each) for each in zip(values, rows, plan.num_embeddings, strict=True)]
                else:
                    with below_autograd():
                        made = plan.gradient("coo", grad, ids, argmax, wanted)
                    tell(ctx.marks, made)
            finally:
                set_grad_enabled(records)
            of = [grad] if per_sample_weights is None else [grad, per_sample_weights]
            for k, want in enumerate(wanted):
                if want:
                    grads[k] = final("the gradient of a table", made[k], *of) if records else made[k]
        return None, None, None, None, None, None, None, weights_grad, *grads


stale_bare = bare_apply(_StaleLookup)


def look_up_stale(plan: LookupPlan, kind: str, tables: TableSet, ids: Ids) -> Tensor:
    """Return the result of a lookup that gives its tables gradients of ``kind`` ``"dense"`` or ``"sparse"``."""
    apply = _StaleLookup.apply if is_seen() or is_wrapped(ids.indices) else stale_bare
    return apply(plan, kind, ids.bags, ids.side_by_side, tables, *ids[:3], *tables.weights)  # type: ignore[no-any-return]
