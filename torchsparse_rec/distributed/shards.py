"""Lookups in the tables of one module, which are split over ranks: each is an exchange in which all ranks take part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .._agreed import agreed
from .._torch import as_stored
from .._torch_modules import parameters_of_active_ddp
from ..nn.plan import Ids
from ._bags import Bags, Unit
from ._ids import check_ids, check_keys
from ._keys import Keys
from ._rows import RowShards
from .ddp import check_not_in_ddp
from .exchange import Asked, LookUp, Place, Sizes, exchange, scale_gradient
from .plan import ColumnWise, Replicated, RowWise, TablePlan, TableWise
from .ranks import Call, Ranks, known_call
from .tables import ModuleTable, check_columns, digest, lookups_of

__all__ = ["COUNTS_OF_LOSS", "NO_GRAPH", "Request", "Shards", "columns"]

NO_GRAPH = (
    "a lookup in tables of several ranks cannot be part of a graph: compile without fullgraph, which leaves it out"
)
# The counts of a header of a loss over a table's rows.
COUNTS_OF_LOSS = 3
# The number of lookups with gradients between two comparisons of replicated tables' copies.
_OFTEN = 1000


class Request(NamedTuple):
    """
    A rank's request to the others in a call: the call's input, its ids, and the request in each way of tables.

    Only ``parts`` travel, and ``counts``, ``[W, K]`` int64 on the host, are the amounts for each rank.
    """

    x: Any
    ids: Ids
    asked: list[Asked]
    parts: list[Tensor]
    counts: Tensor


class Shards:
    """
    The places of a module's tables, and the lookups there.

    Args:
        name: the name of the module, for errors.
        tables: the tables that it looks up.
        plans: the plans of each table.
        merge: whether an id of a table travels once, however often it occurs.
        wire_dtype: the dtype of wider rows, results and gradients on the way; None: their own.
        ranks: the ranks that share the tables.
    """

    def __init__(
        self,
        name: str,
        tables: Sequence[ModuleTable],
        plans: Sequence[TablePlan],
        merge: bool,
        wire_dtype: torch.dtype | None,
        ranks: Ranks,
    ) -> None:
        self.name, self.tables, self.plans, self.ranks = name, list(tables), list(plans), ranks
        self.merge, self.wire_dtype = merge, wire_dtype
        self._copied = [k for k, plan in enumerate(plans) if isinstance(plan, Replicated)]
        self._trained = 0
        self.prefetched = 0  # how many iterators there have been
        self.together: dict[Any, Any] = {}  # what nn.lookup_sparse keeps of calls whose first table is the module's
        whole, features = lookups_of(tables[0].module, tables)
        self._split = [_form(table) for table in tables]
        self._growing = [k for k, table in enumerate(tables) if table.grows]
        self._sliced = [k for k, plan in enumerate(plans) if isinstance(plan, ColumnWise)]
        dtypes, pooled = [table.weight.dtype for table in tables], tables[0].pooling is not None
        self._features = features
        short = [k for k, table in enumerate(tables) if table.grows and table.child.key_dtype == torch.int32]
        self._short = sorted({whole.keys[lookup] for lookup in whole.lookups_of(short)})  # features of int32 keys
        groups: dict[tuple[bool, bool, int, torch.dtype], list[int]] = {}
        units: dict[bool, list[Unit]] = {}
        for k, (table, plan) in enumerate(zip(tables, plans, strict=True)):
            if isinstance(plan, (RowWise, Replicated)):
                way = table.grows, isinstance(plan, Replicated), whole.dims[k], dtypes[k]
                groups.setdefault(way, []).append(k)
                continue
            for lookup in whole.lookups_of([k]):
                its = columns(plan, whole.dims[k])
                units.setdefault(table.grows, []).extend(
                    Unit(owner, lookup, k, whole.keys[lookup], begin, end) for owner, (begin, end) in its
                )
        where = ranks.rank, ranks.count, pooled
        self._ways: list[RowShards | Bags] = [
            (Keys if grows else RowShards)(whole, chosen, features, dtype, *where, merge, copied)
            for (grows, copied, _, dtype), chosen in groups.items()
        ]
        for grows, of_way in units.items():
            sent_as = reduce(torch.promote_types, [dtypes[unit.table] for unit in of_way])
            self._ways.append(Bags(whole, sorted(of_way), features, sent_as, *where, grows))
        self._widths = [way.width for way in self._ways]
        self._has_bags = bool(units)
        # Gradients are divided by W. By a power of two that is exact, wherever it is done: where they are shortest. By
        # another number it is done at once, to the gradients of results, as one process would.
        exact = ranks.count & (ranks.count - 1) == 0
        self._at_once, self._on_the_way = (1.0, 1 / ranks.count) if exact else (1 / ranks.count, 1.0)
        ranks.reserve(max(sum(self._widths), COUNTS_OF_LOSS))

    @contextmanager
    def told(self, training: bool) -> Iterator[None]:
        """
        Announce to the other ranks an error that comes before this rank has announced its lookup: all raise it.

        Args:
            training: whether the module trains.
        """
        before = self.ranks.sequence
        try:
            yield
        except Exception as error:
            if self.ranks.sequence == before:
                self._tell(error, training)
            raise

    def _tell(self, error: Exception, training: bool) -> None:
        self.ranks.announce(self.name, "lookup", training, error)

    def refuse_export(self) -> None:
        """Raise ``RuntimeError`` if the module is being exported."""
        if torch.compiler.is_exporting():
            raise RuntimeError(
                f"{self.name} cannot be exported: its tables are split over ranks, and a program would have the parts "
                "of this one: load full_state_dict() into a model of whole tables, and export that"
            )

    def request(self, module: Any, *given: Any, **how: bool) -> Request:
        """
        Return this rank's request to the others in a call of the module.

        Args:
            module: the module that owns the tables. Its ``inputs_of`` returns what a call looks up.
            given: the arguments of the call.
            how: the options of ``inputs_of``.

        Raises:
            Errors of the arguments, ids, offsets and weights.
        """
        x, places, ids = module.inputs_of(*given, **how)
        if ids.per_sample_weights is not None:
            ids = ids._replace(per_sample_weights=scale_gradient(ids.per_sample_weights, 1 / self._at_once))
        check_ids(ids, places, self._features)
        if self._short:
            check_keys(ids, {places[key]: self._features[key] for key in self._short})
        asked, parts = [], []
        for way in self._ways:
            try:
                asked.append(way.ask(ids, places))
            except IndexError as error:
                named = getattr(module, "_bad_id", None)  # of a single table it says where in the call's input it is
                raise (named and named(x)) or error from None
            parts += asked[-1].parts
        counts = asked[0].counts if len(asked) == 1 else torch.cat([each.counts for each in asked], 1)
        return Request(x, ids, asked, parts, counts)

    def call_of(self, module: Any, weights: Sequence[Parameter], ids: Ids) -> tuple[Call, bool]:
        """
        Return the action that all ranks must take, and whether the lookup has gradients.

        Args:
            module: the module that owns the tables.
            weights: the tables' parameters.
            ids: the ids of the call.
        """
        given, training, its = ids.per_sample_weights, module.training, list(weights)
        others = ""
        if self._growing:
            grows = {k: self.tables[k].child for k in self._growing}
            # In eval() a table that grows has no gradient, unless it is looked up by itself.
            its = [x for k, x in enumerate(weights) if k not in grows or grows[k].training or grows[k] is module]
            others = ", ".join([self.tables[k].name for k in grows if grows[k].training is not training])
        with as_stored():
            trained = torch.is_grad_enabled() and True in [x.requires_grad for x in its]
        details = "with gradients" if trained else "without gradients"
        if given is not None:
            details += f", weights of {given.dtype}" + (" with gradients" if given.requires_grad else "")
        if others:
            details += f", {others} in {'eval' if training else 'train'}()"
        return known_call(self.name, "lookup", "train" if training else "eval", details), trained

    def check(self, module: Any, weights: Sequence[Parameter], trained: bool) -> None:
        """
        Check that the module's tables can be looked up.

        Args:
            module: the module that owns the tables.
            weights: the tables' parameters.
            trained: whether the lookup has gradients.

        Raises:
            RuntimeError: a table is in a DistributedDataParallel, or is not as ``shard`` made it, or no backward could
                update it; ValueError: its columns can no longer be split.
        """
        with as_stored():
            if parameters_of_active_ddp():
                check_not_in_ddp(weights)
            for table, weight, (grows, shape, dtype, device) in zip(self.tables, weights, self._split, strict=True):
                its = weight.shape[grows:], weight.dtype, weight.device
                if its != (shape, dtype, device):
                    raise RuntimeError(
                        f"table {table.name!r}: this rank's part must stay as shard() made it, {list(shape)} of "
                        f"{dtype} on {device}, got {list(its[0])} of {its[1]} on {its[2]}: convert and move a model "
                        "before shard()"
                    )
            for k in self._sliced:  # a norm, or the optimizer, may have been set since
                table = self.tables[k]
                check_columns(table.name, self.plans[k], weights[k], table.child.max_norm)
            if module.training and trained:
                module.check_fused()

    def look_up(self, module: Any, *given: Any, **how: bool) -> tuple[Any, Ids, Tensor]:
        """
        Do the lookup of a call of the module; all ranks make the same call.

        Args:
            module: the argument of :meth:`request`.
            given: the argument of :meth:`request`.
            how: the argument of :meth:`request`.

        Returns:
            The call's input and its ids, as ``inputs_of`` gives them, and the results, as on one process.

        Raises:
            Errors of the arguments, ids, offsets and weights, of whichever rank; RuntimeError: see :class:`Ranks`.
        """
        self.refuse_export()
        try:
            request, weights = self.request(module, *given, **how), module.stored_weights()
            call, trained = self.call_of(module, weights, request.ids)
            self.check(module, weights, trained)
        except Exception as error:
            self._tell(error, module.training)
            raise
        came = self.read(self.ranks.headers(call, request.counts))
        return request.x, request.ids, self.answered(module, call, request, came, trained)

    def answered(
        self,
        module: Any,
        call: Call,
        request: Request,
        came: list[Any],
        trained: bool,
        got: list[Tensor] | None = None,
    ) -> Tensor:
        """
        Return the results of a lookup by all ranks.

        Args:
            module: the module that owns the tables.
            call: the description of this rank's action.
            request: the request of this rank.
            came: the others' requests in each way of tables.
            trained: whether the lookup has gradients.
            got: the parts that the others have sent before the call. None: they travel now.

        Raises:
            RuntimeError: see :class:`Ranks`; errors of tables that grow, of whichever rank.
        """
        ranks, result, failed, open_before = self.ranks, None, None, self.ranks.open
        with ranks:
            try:
                result = self._exchanged(call, request, came, trained, module.look_up_tables, got)
            except _Failed as error:  # all ranks know of it, and none waits for another
                failed = error
        if failed is not None:
            ranks.open = open_before
            agreed(ranks.group, None, failed.error)
            ranks.raise_different(call, ranks.sequence)
        assert result is not None
        if trained:  # and in whichever mode: of batches that were prefetched ranks may not know each other's
            self._trained += 1
            if self._copied and self._trained % _OFTEN == 0:
                self._check_copies()
        return result if self._at_once == 1 else scale_gradient(result, self._at_once)

    def _check_copies(self) -> None:
        """Raise ``RuntimeError``, on all ranks, if the copies of a replicated table differ."""
        said = agreed(self.ranks.group, [digest(self.tables[k].weight) for k in self._copied])
        for rank, its in enumerate(said):
            for k, mine, other in zip(self._copied, said[0], its, strict=True):
                if mine != other:
                    raise RuntimeError(
                        f"table {self.tables[k].name!r} is Replicated, but rank {rank} has other values than rank 0: "
                        "one of them was written otherwise than by training; load a checkpoint on all ranks"
                    )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ``TypeError``: a copy would speak to the other ranks in the place of this one."""
        way_out = (
            "call torchsparse_rec.checkpoint.save(folder, module, optimizer)"
            if self._growing
            else "save its state_dict() by torch.distributed.checkpoint, or take whole tables by full_state_dict()"
        )
        raise TypeError(
            f"{self.name}: a module whose tables are split over ranks cannot be copied or pickled: {way_out}"
        )

    def read(self, told: Tensor) -> list[Any]:
        """Return the others' requests in each way of tables, by their headers."""
        return [way.read(counts) for way, counts in zip(self._ways, told.split(self._widths, 1), strict=True)]

    def payload_sizes(self, request: Request, came: Sequence[Any]) -> list[Sizes]:
        """Return the sizes of the request to others, in the order of ``request.parts``."""
        sizes: list[Sizes] = []
        for way, a, c in zip(self._ways, request.asked, came, strict=True):
            sizes += way.payload_sizes(a, c)
        return sizes

    def _exchanged(
        self, call: Call, request: Request, came: list[Any], trained: bool, look_up: LookUp, got: list[Tensor] | None
    ) -> Tensor:
        ranks, ways, ids, asked = self.ranks, self._ways, request.ids, request.asked
        group = ranks.group if got is None else ranks.ahead_results
        travels = False
        if got is None:
            # Weights travel with bags alone, and their gradients back.
            weights = ids.per_sample_weights if self._has_bags and torch.is_grad_enabled() else None
            travels = weights is not None and weights.requires_grad
            anchor = self._leaf() if travels else None
            sizes = self.payload_sizes(request, came)
            got = exchange(ranks, group, call, sizes, request.parts, anchor, 1 / self._on_the_way)
        # All ranks go back through both exchanges, or none through any.
        anchor = got[-1] if travels else self._leaf() if trained else None
        answer_sizes = [way.answer_sizes(a, c) for way, a, c in zip(ways, asked, came, strict=True)]
        answers, at, failed = [], 0, None
        for way, a, c, sizes_of_answer in zip(ways, asked, came, answer_sizes, strict=True):
            try:
                answers.append(way.answer(got[at : at + len(a.parts)], c, look_up))
            except Exception as error:
                if not way.grows:
                    raise
                # No room for new rows, in memory or on a disk: the others learn it beside the results.
                failed = error
                answers.append(torch.zeros(sum(sizes_of_answer.sent), dtype=way.dtype, device=ranks.device))
            at += len(a.parts)
        if self._growing:
            # And this rank's action: the header of a batch that was prefetched has the mode of that time.
            word = call.signature if failed is None else 0
            answers.append(torch.full((ranks.count,), word, dtype=torch.int64, device=ranks.device))
            answer_sizes.append(Sizes([1] * ranks.count, [1] * ranks.count))
        values = exchange(ranks, group, call, answer_sizes, answers, anchor, self._on_the_way, self.wire_dtype)
        if self._growing and bool((values.pop() != call.signature).any()):
            raise _Failed(failed)
        found: list[tuple[Place, Tensor]] = []
        for way, a, c, value in zip(ways, asked, came, values, strict=True):
            found += way.results(a, value, c, ids.side_by_side)
        if len(found) == 1:
            return found[0][1]
        return torch.cat([x for _, x in sorted(found, key=lambda pair: pair[0])], -1)

    def _leaf(self) -> Tensor:
        return torch.zeros((), device=self.ranks.device, requires_grad=True)


class _Failed(Exception):
    """
    A rank could not make the rows that others asked for, or ranks do different things.

    Args:
        error: the error of this rank; None: it is another's, or ranks differ.
    """

    def __init__(self, error: Exception | None) -> None:
        super().__init__(error)
        self.error = error


def _form(table: ModuleTable) -> tuple[bool, torch.Size, torch.dtype, torch.device]:
    """Return the fixed facts of a part: whether it grows, its shape without rows that come and go, dtype and device."""
    weight = table.weight
    return table.grows, weight.shape[table.grows :], weight.dtype, weight.device


def columns(plan: TableWise | ColumnWise, dim: int) -> list[tuple[int, tuple[int, int]]]:
    """Return the ranks that have a table, each with the columns it has."""
    if isinstance(plan, TableWise):
        assert plan.rank is not None
        return [(plan.rank, (0, dim))]
    assert plan.ranks is not None
    return list(zip(plan.ranks, ColumnWise.columns(dim, len(plan.ranks)), strict=True))
