"""
The fused gradient mode: tables whose gradient never becomes a ``.grad``.

A lookup hangs on an *anchor*, a parameter of one element, in place of its tables; its backward has the gradient of the
result and either updates the tables at once (``apply="backward"``) or leaves the rows that occur, summed, for the
optimizer's step (``apply="step"``). The anchor's gradient is the norm of the rows that wait: so those who look at
gradients before a step (``clip_grad_norm_``, ``GradScaler``) see it, and what they multiply it by is applied to the
rows.

Everything here happens when a lookup or its backward runs: eager calls come by an autograd Function, compiled graphs by
two operators that name the lookups' owner by a number. Neither is given the tables, since a graph that holds a
parameter must not see it change.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from ..optim._gradients import update
from ..optim._row_optimizer import StepGroup
from ..optim._tables import Gradient, Pending, Table, table_of
from ._plan import Ids, Plan
from ._read import Reading, check_unchanged, read, versions, weights_gradient

if TYPE_CHECKING:
    from ._owner import AnchorOwner

_lock = threading.RLock()
_lookups = itertools.count()


def new_anchor(weights: Sequence[Tensor]) -> Parameter:
    """The anchor of these tables."""
    wide = all(weight.dtype == torch.float64 for weight in weights)
    anchor = Parameter(torch.zeros(1, dtype=torch.float64 if wide else torch.float32, device=weights[0].device))
    anchor._torchsparse_rec_anchor = True  # type: ignore[attr-defined]
    return anchor


# ---- Rows that wait for the optimizer's step -------------------------------------------------------------------------


class AnchorGradient:
    """What the gradient of one anchor stands for: the rows that wait, by table."""

    def __init__(self, anchor: Parameter) -> None:
        self.anchor = weakref.ref(anchor)
        self.rows: dict[int, tuple[weakref.ref[Table], Tensor, Tensor]] = {}
        self._norm: Tensor | None = None  # what the anchor's gradient will be, once autograd has stored it
        self.held_by: set[int] = set()  # ids of the optimizers that are known to hold the anchor
        self._stored: Tensor | None = None  # the same, once it is stored
        self._factor: Tensor | None = None
        anchor.register_post_accumulate_grad_hook(self._after_backward)

    @torch._dynamo.disable
    def _after_backward(self, anchor: Tensor) -> None:
        grad, norm = anchor.grad, self._norm
        if grad is None:
            return
        if norm is None:  # updated already: nothing waits
            anchor.grad = None
            return
        with torch.no_grad():
            grad.copy_(norm)
        self._stored, self._norm = norm, None

    def is_valid(self) -> bool:
        """Whether the rows still wait. Who clears the anchor's gradient (``zero_grad()``) lets go of them."""
        anchor = self.anchor()
        return anchor is not None and (anchor.grad is not None or self._norm is not None)

    def factor(self) -> Tensor | None:
        """What the anchor's gradient has been multiplied by since it was stored; None, on the CPU, for nothing."""
        anchor = self.anchor()
        if self._stored is None or anchor is None or anchor.grad is None:
            return None
        now, before = anchor.grad, self._stored
        if now.device.type == "cpu" and torch.equal(now, before):
            return None
        # No rows but zeros: any factor is right. Rows with an infinity, made finite by a clip to nothing: none is left.
        factor = torch.where(now == before, torch.ones_like(now), now / before)
        factor = torch.where(before == 0, torch.ones_like(now), factor)
        factor = torch.where(torch.isinf(before) & ~torch.isfinite(now), torch.zeros_like(now), factor)
        # One tensor for all tables, so that one call can update them.
        if self._factor is None or self._factor.device != factor.device:
            self._factor = torch.empty_like(factor)
        return self._factor.copy_(factor)

    def apply_factor(self) -> None:
        """Multiply the rows by the factor, which is 1 then."""
        factor = self.factor()
        if factor is None:
            return
        for key, (table, rows, values) in self.rows.items():
            self.rows[key] = (table, rows, torch.where(factor == 0, torch.zeros_like(values), values * factor))
        self.store()

    def store(self) -> None:
        """Set the anchor's gradient to the norm of the rows that wait."""
        anchor = self.anchor()
        if anchor is not None and anchor.grad is not None and self.rows:
            self._stored = self._total_norm()
            anchor.grad.copy_(self._stored)

    def add(self, tables: Sequence[Table], values: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Let rows wait, after those that wait already."""
        if self._norm is None:  # the first lookup of this backward
            if self.is_valid():
                self.apply_factor()
            else:
                self.clear()
            self._stored = None
        for table, more_values, more_rows in zip(tables, values, rows, strict=True):
            waiting = self.rows.get(id(table))
            if waiting is not None and waiting[0]() is table:
                both = [(waiting[1], waiting[2]), (more_rows, more_values)]
                more_rows, more_values = merged(both, table.num_embeddings)
            self.rows[id(table)] = (weakref.ref(table), more_rows, more_values)
            _waiting(table).sources[self] = None
        self._norm = self._total_norm()

    def _total_norm(self) -> Tensor:
        """Of all rows that wait, as stored, ``[1]``; infinite if any element is not finite."""
        norms = torch._foreach_norm([values for _, _, values in self.rows.values()])
        total = torch.linalg.vector_norm(torch.stack([x.to(norms[0].dtype) for x in norms]))
        anchor = self.anchor()
        assert anchor is not None
        return torch.where(torch.isfinite(total), total, torch.full_like(total, torch.inf)).to(anchor.dtype).reshape(1)

    def __reduce__(self) -> tuple:
        """Copies of an anchor stand for nothing yet."""
        return _nothing, ()

    def clear(self) -> None:
        """Let go of the rows."""
        self.rows.clear()
        self._stored = self._norm = None


def _nothing() -> None:
    """What the gradient of a copied anchor becomes."""


def merged(parts: Sequence[tuple[Tensor, Tensor]], num_embeddings: int) -> tuple[Tensor, Tensor]:
    """(rows, values) of several, rows unique and sorted, values of equal rows added."""
    rows, values = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    with torch.no_grad():
        values, rows = torch.ops.torchsparse_rec.embedding_sparse_backward.default(
            values, rows, None, None, None, num_embeddings, 0, -1, False
        )
    return rows, values


class WaitingRows(Pending):
    """The rows of one table that wait, of all anchors."""

    def __init__(self, table: Table) -> None:
        self._table = weakref.ref(table)
        # Rows of apply="backward" that wait for another lookup's backward. They need no anchor.
        self.own: list[tuple[Tensor, Tensor]] = []
        self.sources: weakref.WeakKeyDictionary[AnchorGradient, None] = weakref.WeakKeyDictionary()

    def _gradients(self) -> list[Gradient]:
        """What waits, part by part."""
        key = id(self._table())
        found = [Gradient(rows, values) for rows, values in self.own]
        for source in list(self.sources):
            waiting = source.rows.get(key)
            if waiting is not None and waiting[0]() is self._table() and source.is_valid():
                found.append(Gradient(waiting[1], waiting[2], source.factor()))
        return found

    def take(self) -> Gradient | None:
        """See the class above. What an anchor stands for goes on waiting as long as the anchor has its gradient."""
        found = self._gradients()
        self.own.clear()
        if len(found) > 1:
            table = self._table()
            assert table is not None
            parts = [(part.rows, _scaled(part)) for part in found]
            return Gradient(*merged(parts, table.num_embeddings))  # type: ignore[arg-type]
        return found[0] if found else None

    def discard(self) -> None:
        """Forget all that waits."""
        self.own.clear()
        for source in list(self.sources):
            source.rows.pop(id(self._table()), None)

    def norm(self, norm_type: float) -> Tensor | None:
        """See the class above."""
        found = self._gradients()
        if not found:
            return None
        return torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(_scaled(part), norm_type) for part in found]), norm_type
        )

    def scale(self, factor: Tensor) -> None:
        """See the class above."""
        self._replace(lambda values: values * factor)

    def clamp(self, limit: float) -> None:
        """See the class above."""
        self._replace(lambda values: values.clamp(-limit, limit))

    def _replace(self, function: Callable[[Tensor], Tensor]) -> None:
        """Change the values that wait; whoever multiplies the anchor's gradient afterwards multiplies these."""
        key = id(self._table())
        self.own = [(rows, function(values)) for rows, values in self.own]
        for source in list(self.sources):
            if key in source.rows and source.is_valid():
                source.apply_factor()
                table, rows, values = source.rows[key]
                source.rows[key] = (table, rows, function(values))
                source.store()


def _waiting(table: Table) -> WaitingRows:
    if table.pending is None:
        table.pending = WaitingRows(table)
    assert isinstance(table.pending, WaitingRows)
    return table.pending


def _scaled(part: Gradient) -> Tensor:
    return part.values if part.grad_scale is None else part.values * part.grad_scale


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
        if recorded:
            alive = StorageWeakRef(token.untyped_storage())
            with _lock:
                for weight in weights:
                    table_of(weight).outstanding[number] = alive
        return reading, token

    def _check_held(self, weights: list[Parameter]) -> None:
        """Raise unless an optimizer of ours holds every table that trains; have it hold the anchor too."""
        optimizers = {}
        for weight in weights:
            if weight.requires_grad:
                optimizer = table_of(weight).optimizer
                if optimizer is None:
                    raise RuntimeError(_NO_OPTIMIZER)
                optimizers[id(optimizer)] = (optimizer, weight)
        if self.apply == "step" and self.gradient.held_by != optimizers.keys():
            if len(optimizers) > 1:
                raise RuntimeError(
                    "grad_mode='fused' with apply='step' needs all tables of a module in one optimizer, got "
                    f"{len(optimizers)}"
                )
            for optimizer, weight in optimizers.values():
                anchor = self.anchor()
                assert anchor is not None
                optimizer.hold_anchor(anchor, weight)
            self.gradient.held_by = set(optimizers)

    def finish(self, token: Tensor, grad: Tensor, ids: Ids, argmax: Tensor | None) -> None:
        """The backward of a lookup: update the tables, or let their rows wait."""
        number = int(token)
        weights = self.weights()
        tables = [table_of(weight) for weight in weights]
        with _lock, torch.no_grad():
            for table in tables:
                table.outstanding.pop(number, None)
            wanted = [weight.requires_grad for weight in weights]
            if self.apply == "step":
                self._leave(tables, grad, ids, argmax, wanted)
                return
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
            _waiting(table).own.append((table_rows, _wide(table_values)))
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


# ---- Compiled graphs -------------------------------------------------------------------------------------------------

_numbers = itertools.count()
_owners: weakref.WeakValueDictionary[int, AnchorOwner] = weakref.WeakValueDictionary()


def register_owner(module: AnchorOwner) -> int:
    """A number by which operators find the module."""
    number = next(_numbers)
    _owners[number] = module
    return number


def _lookups_of(number: int, tables: Sequence[int], plan: Sequence[int]) -> FusedLookups:
    return _owners[number]._fused_lookups(Plan.of_numbers(plan), tuple(tables))


# Not among the library's operators: they are Python, and mean nothing without the module that they name.
_library = torch.library.Library("torchsparse_rec_nn", "DEF")
_library.define(
    "fused_lookup(Tensor anchor, Tensor indices, Tensor? offsets, Tensor? per_sample_weights, SymInt[] bags,"
    " bool side_by_side, int owner, int[] tables, int[] plan, bool recorded)"
    " -> (Tensor output, Tensor argmax, Tensor token)"
)
_library.define(
    "fused_lookup_backward(Tensor grad, Tensor anchor, Tensor indices, Tensor? offsets, Tensor? per_sample_weights,"
    " Tensor? output, Tensor argmax, Tensor token, SymInt[] bags, bool side_by_side, int owner, int[] tables,"
    " int[] plan) -> (Tensor anchor_grad, Tensor weights_grad)"
)


def _look_up(anchor, indices, offsets, per_sample_weights, bags, side_by_side, number, tables, plan, recorded):
    ids = Ids(indices, offsets, per_sample_weights, bags, side_by_side)
    reading, token = _lookups_of(number, tables, plan).start(ids, recorded)
    return *reading, token


def _look_up_fake(anchor, indices, offsets, per_sample_weights, bags, side_by_side, number, tables, plan, recorded):
    made = Plan.of_numbers(plan)
    ids = Ids(indices, offsets, per_sample_weights, bags, side_by_side)
    dtype = _owners[number]._stored_weights()[tables[0]].dtype
    return (
        anchor.new_empty(made.output_shape(ids), dtype=dtype),
        anchor.new_empty(sum(made.argmax_sizes(ids)), dtype=torch.int64),
        torch.empty(1, dtype=torch.int64),
    )


def _backward(grad, anchor, indices, offsets, per_sample_weights, output, argmax, token, bags, side_by_side, *where):
    lookups, ids = _lookups_of(*where), Ids(indices, offsets, per_sample_weights, bags, side_by_side)
    weights_grad = grad.new_empty(0)
    if output is not None:
        weights_grad = weights_gradient(lookups.plan, lookups.weights(), ids, grad, output)
    lookups.finish(token, grad, ids, argmax)
    return torch.zeros_like(anchor), weights_grad


def _backward_fake(grad, anchor, indices, offsets, per_sample_weights, output, *_):
    return torch.empty_like(anchor), grad.new_empty(0) if output is None else torch.empty_like(per_sample_weights)


def _setup_context(ctx, inputs, output):
    anchor, indices, offsets, per_sample_weights, *ctx.where, _ = inputs
    result, argmax, token = output
    ctx.mark_non_differentiable(argmax, token)
    ctx.weighs = per_sample_weights is not None and per_sample_weights.requires_grad
    ctx.save_for_backward(anchor, indices, offsets, per_sample_weights, result if ctx.weighs else None, argmax, token)


def _registered_backward(ctx, grad, _argmax, _token):
    anchor_grad, weights_grad = torch.ops.torchsparse_rec_nn.fused_lookup_backward.default(
        grad, *ctx.saved_tensors, *ctx.where
    )
    return anchor_grad, None, None, weights_grad if ctx.weighs else None, *(None,) * 6


_library.impl("fused_lookup", _look_up, "CompositeExplicitAutograd")
_library.impl("fused_lookup_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("torchsparse_rec_nn::fused_lookup", _look_up_fake, lib=_library)
torch.library.register_fake("torchsparse_rec_nn::fused_lookup_backward", _backward_fake, lib=_library)
torch.library.register_autograd(
    "torchsparse_rec_nn::fused_lookup", _registered_backward, setup_context=_setup_context, lib=_library
)
fused_lookup = torch.ops.torchsparse_rec_nn.fused_lookup.default
