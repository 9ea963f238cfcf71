"""Plans of lookups for the operators: which tables, by which features, and how rows are pooled."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._reduction import is_extreme
from .._torch import below_autograd, call_kernel, count_writes, entry_of
from ..tables.layouts import writable

if TYPE_CHECKING:
    from ..tables.gradients import StepGroup

_ops = torch.ops.torchsparse_rec
_look_up = entry_of(_ops.planned_collection.default)
_look_up_current = entry_of(_ops.planned_collection_current.default)
_update = entry_of(_ops.planned_collection_update_.default)


class Ids(NamedTuple):
    """
    The ids of a lookup, feature after feature.

    Feature k has ``bags[k]`` consecutive bags; bag b of all is ``indices[offsets[b]:offsets[b + 1]]``, or a single id
    without offsets. With ``side_by_side`` the result is ``[B, sum of dims]``, else all results lie end to end.
    """

    indices: Tensor
    offsets: Tensor | None
    per_sample_weights: Tensor | None
    bags: Sequence[int]
    side_by_side: bool


def counts_of(ids: Ids) -> list[int]:
    """Return how many ids each feature has. On CUDA it waits for the device if ids come in bags."""
    if ids.offsets is None:
        return list(ids.bags)
    bounds = ids.offsets[torch.tensor([0, *accumulate(ids.bags)], device=ids.offsets.device)].tolist()
    return [end - begin for begin, end in zip(bounds, bounds[1:], strict=False)]


class Missed(NamedTuple):
    """All that brings stale rows up to date: the last arguments of the operators that read such rows."""

    states: list[Tensor]
    last_steps: list[Tensor]
    history: Tensor | None
    rule: int
    hyperparameters: list[float]
    step: int
    base: int


# No row is stale.
NOTHING_MISSED = Missed([], [], None, 0, [], 0, 0)


class LookupPlan(NamedTuple):
    """
    A plan of lookups: lookup l reads table ``tables[l]`` by the ids of feature ``keys[l]``, reduced by ``modes[l]``.

    Table k has ``num_embeddings[k]`` rows of ``dims[k]`` elements; row ``padding[k]`` does not count (-1: none).
    ``scale_grad_by_freq`` is for plans of one lookup.
    """

    tables: tuple[int, ...]
    keys: tuple[int, ...]
    modes: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    dims: tuple[int, ...]
    padding: tuple[int, ...]
    scale_grad_by_freq: bool = False

    def lookups_of(self, tables: Sequence[int]) -> list[int]:
        """Return the numbers of the lookups of some of the tables."""
        wanted = set(tables)
        return [number for number, table in enumerate(self.tables) if table in wanted]

    def part(self, tables: Sequence[int]) -> LookupPlan:
        """Return the plan of some of the tables, which become its tables 0, 1, ..."""
        if len(tables) == len(self.dims):
            return self
        place = {table: k for k, table in enumerate(tables)}
        lookups = self.lookups_of(tables)
        return LookupPlan(
            tuple(place[self.tables[number]] for number in lookups),
            tuple(self.keys[number] for number in lookups),
            tuple(self.modes[number] for number in lookups),
            tuple(self.num_embeddings[table] for table in tables),
            tuple(self.dims[table] for table in tables),
            tuple(self.padding[table] for table in tables),
            self.scale_grad_by_freq,
        )

    def of_sizes(self, weights: Sequence[Tensor]) -> LookupPlan:
        """Return the plan for the sizes of these tables, which may have replaced others since the plan was made."""
        for weight, rows in zip(weights, self.num_embeddings, strict=True):  # a loop: it asks at each lookup
            if weight.shape[0] != rows:
                return self._replace(num_embeddings=tuple(weight.shape[0] for weight in weights))
        return self

    def numbers(self) -> list[int]:
        """Return the plan as one list, for the operators of compiled graphs; :meth:`of_numbers` is the reverse."""
        lookups, tables = len(self.tables), len(self.dims)
        parts = (self.tables, self.keys, self.modes, self.num_embeddings, self.dims, self.padding)
        return [lookups, tables, int(self.scale_grad_by_freq), *(number for part in parts for number in part)]

    @staticmethod
    def of_numbers(numbers: Sequence[int]) -> LookupPlan:
        """Return the plan from a list made by :meth:`numbers`."""
        lookups, tables, scaled, *rest = numbers
        parts = []
        for size in (lookups, lookups, lookups, tables, tables, tables):
            parts.append(tuple(rest[:size]))
            rest = rest[size:]
        return LookupPlan(*parts, scale_grad_by_freq=bool(scaled))  # type: ignore[misc, arg-type]

    def columns(self) -> list[int]:
        """Return the width of each lookup's result."""
        return [self.dims[table] for table in self.tables]

    def sizes(self, ids: Ids) -> list[int]:
        """Return the extent of each lookup's result in the dimension in which results follow one another."""
        if ids.side_by_side:
            return self.columns()
        return [ids.bags[key] * width for key, width in zip(self.keys, self.columns(), strict=True)]

    def argmax_sizes(self, ids: Ids) -> list[int]:
        """Return the extent of each lookup's part of the argmax."""
        return [
            ids.bags[key] * width if is_extreme(mode) else 0
            for key, width, mode in zip(self.keys, self.columns(), self.modes, strict=True)
        ]

    def output_shape(self, ids: Ids) -> list[int]:
        """Return the shape of the result."""
        total = sum(self.sizes(ids))
        return [ids.bags[self.keys[0]], total] if ids.side_by_side else [total]

    def lists(self, ids: Ids) -> tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int], bool]:
        """Return the arguments that all operators have: tables, keys, modes, bags, padding_idx, side_by_side."""
        return self.tables, self.keys, self.modes, ids.bags, self.padding, ids.side_by_side

    # ---- Operators --------------------------------------------------------------------------------------------------

    def forward(self, weights: list[Tensor], ids: Ids, missed: Missed = NOTHING_MISSED) -> tuple[Tensor, Tensor]:
        """Return results and argmax, from the tables as stored or, given ``missed``, from rows brought up to date."""
        tables, keys, modes, _, _, padding, _ = self
        indices, offsets, per_sample_weights, bags, side_by_side = ids
        inputs = indices, offsets, per_sample_weights, tables, keys, modes, bags, padding, side_by_side
        with below_autograd():
            if not missed.last_steps:
                return _ops.embedding_collection.default(weights, *inputs, False)
            states, last_steps, history, *rule = missed
            return _ops.embedding_collection_current.default(weights, states, last_steps, history, *inputs, *rule)

    def gradient(self, kind: str, grad: Tensor, ids: Ids, argmax: Tensor | None, wanted: list[bool]) -> Any:
        """
        Return the gradient of the wanted tables.

        With ``kind`` ``"dense"`` or ``"coo"`` it is a list of tensors, with ``"sparse"`` one of values and one of rows.
        """
        if self.scale_grad_by_freq:
            return self._scaled_gradient(kind, grad, ids, argmax)
        operator = getattr(_ops, f"embedding_collection_{kind}_backward").default
        return operator(
            grad.contiguous(),
            *ids[:3],
            argmax,
            self.num_embeddings,
            self.dims,
            *self[:3],
            ids.bags,
            self.padding,
            ids.side_by_side,
            wanted,
        )

    def _scaled_gradient(self, kind: str, grad: Tensor, ids: Ids, argmax: Tensor | None) -> Any:
        """Return the only table's gradient by the operators of single tables, which divide by occurrences."""
        shape = (-1, self.dims[0])
        won = None if not is_extreme(self.modes[0]) or argmax is None else argmax.reshape(shape)
        operator = getattr(_ops, f"embedding_{kind}_backward").default
        made = operator(
            grad.reshape(shape), *ids[:3], won, self.num_embeddings[0], self.modes[0], self.padding[0], True
        )
        return [made] if isinstance(made, Tensor) else tuple([x] for x in made)

    def update(
        self,
        weights: list[Tensor],
        group: StepGroup,
        wanted: list[bool],
        grad: Tensor,
        ids: Ids,
        argmax: Tensor | None,
    ) -> None:
        """Step the wanted tables, which are the group's."""
        if not group.writable:
            with writable(weights, wanted) as copies:
                self.update(copies, replace(group, writable=True), wanted, grad, ids, argmax)
            return
        with below_autograd():
            _ops.embedding_collection_update_.default(
                weights,
                group.states,
                group.last_steps,
                group.history,
                grad.contiguous(),
                *ids[:3],
                argmax,
                *self[:3],
                ids.bags,
                self.padding,
                ids.side_by_side,
                wanted,
                None,
                group.rule,
                group.hyperparameters,
                group.step,
                group.base,
                group.maximize,
                group.rounding_seeds,
                group.whole,
            )
        # Below autograd an operator does not count a version.
        count_writes(group.parameters)

    def weights_gradient(
        self, grad: Tensor, weights: list[Tensor], ids: Ids, output: Tensor, missed: Missed = NOTHING_MISSED
    ) -> Tensor:
        """Return the gradient of ``per_sample_weights``."""
        states, last_steps, history, *rule = missed
        return _ops.embedding_collection_weights_backward.default(
            grad.contiguous(),
            weights,
            states,
            last_steps,
            history,
            *ids[:3],
            output,
            *self.lists(ids),
            *rule,
        )


class Held:
    """
    A plan, and what else of its calls does not change, held by the kernels: a call passes a number in its place. It is
    for calls that :func:`is_plain` says are so: nobody who sees operators can see what a number stands for. The kernels
    drop the tensors when the object is deleted.

    Args:
        plan: the lookups.
        weights: the tables, which each call passes again.
        states: the states of the optimizer.
        last_steps: the last steps of the tables' rows.
        group: the step that the plan is for, if it is for one.
    """

    __slots__ = ("_number", "__weakref__")

    def __init__(
        self,
        plan: LookupPlan,
        weights: list[Tensor],
        states: list[Tensor],
        last_steps: list[Tensor],
        group: StepGroup | None = None,
    ) -> None:
        tables, keys, modes, _, _, padding, _ = plan
        rest = (False, [], []) if group is None else (group.maximize, group.rounding_seeds, group.whole)
        with below_autograd():
            self._number = _ops.collection_plan.default(
                weights, states, last_steps, tables, keys, modes, padding, *rest
            )
            free = weakref.finalize(self, _free, weights[0].new_empty(0), self._number)
        free.atexit = False  # other code that runs as the process ends may still look up

    def forward(self, weights: list[Tensor], ids: Ids, missed: Missed = NOTHING_MISSED) -> tuple[Tensor, Tensor]:
        """Do as :meth:`LookupPlan.forward`."""
        if not missed.last_steps:
            with below_autograd():
                return _look_up(weights, *ids, self._number)  # type: ignore[no-any-return]
        _, _, history, *rule = missed
        with below_autograd():
            return _look_up_current(weights, history, *ids, *rule, self._number)  # type: ignore[no-any-return]

    def update(self, weights: list[Tensor], group: StepGroup, grad: Tensor, ids: Ids, argmax: Tensor | None) -> None:
        """Do as :meth:`LookupPlan.update`, of all tables."""
        indices, offsets, per_sample_weights, bags, side_by_side = ids
        with below_autograd():
            _update(
                weights,
                group.history,
                grad.contiguous(),
                indices,
                offsets,
                per_sample_weights,
                argmax,
                bags,
                side_by_side,
                group.rule,
                group.hyperparameters,
                group.step,
                group.base,
                self._number,
            )
        count_writes(group.parameters)


def _free(probe: Tensor, number: int) -> None:
    call_kernel(_ops.collection_plan_free.default, probe, number)  # some mode may be at work when an object dies


NO_LOOKUPS = LookupPlan((), (), (), (), (), ())


def joined(parts: Sequence[tuple[Sequence[int], Tensor, Sequence[int]]]) -> Tensor:
    """
    Join the results of several parts in the order of the lookups.

    Args:
        parts: the numbers of each part's lookups, its result, and the extents of its lookups in the result's last
            dimension.
    """
    if len(parts) == 1:
        return parts[0][1]
    pieces: dict[int, Tensor] = {}
    for lookups, result, sizes in parts:
        pieces.update(zip(lookups, result.split(list(sizes), -1), strict=True))
    return torch.cat([pieces[number] for number in sorted(pieces)], -1)


def part_of(lookups: Sequence[int], whole: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the results of some lookups, cut out of ``whole``, the results of all."""
    if len(lookups) == len(sizes):
        return whole
    ends = [0, *accumulate(sizes)]
    return torch.cat([whole[..., ends[number] : ends[number + 1]] for number in lookups], -1)
