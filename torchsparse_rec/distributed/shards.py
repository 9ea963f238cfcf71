"""Lookups in the tables of one module, which are split over ranks: each is an exchange in which all ranks take part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import as_stored
from ..nn.plan import Ids
from ._bags import Bags, Unit
from ._ids import check_ids, check_keys
from ._keys import Keys
from ._rows import Rows
from .agreed import agreed
from .ddp import check_not_in_ddp
from .exchange import Asked, LookUp, Place, Sizes, exchange, scale_gradient
from .plan import ColumnWise, Replicated, RowWise, TablePlan, TableWise
from .ranks import Call, Ranks
from .tables import Table, check_columns, digest, lookups_of

__all__ = ["NO_GRAPH", "Request", "Shards", "columns"]

NO_GRAPH = (
    "a lookup in tables of several ranks cannot be part of a graph: compile without fullgraph, which leaves it out"
)
# Lookups with gradients, after each of which copies of replicated tables are compared.
_OFTEN = 1000


class Request(NamedTuple):
    """What a rank wants of the others in a call: the call's input, its ids, and what is asked in each way of tables."""

    x: Any
    ids: Ids
    asked: list[Asked]

    @property
    def parts(self) -> list[Tensor]:
        """All that travels."""
        return [part for each in self.asked for part in each.parts]

    @property
    def counts(self) -> Tensor:
        """``[W, K]`` int64 on the host: how much goes to each rank."""
        return torch.cat([each.counts for each in self.asked], 1)


class Shards:
    """
    Where a module's tables are, and how they are looked up there.

    Args:
        name: of the module, for errors.
        tables: that it looks up.
        plans: of each table.
        merge: whether an id of a table travels once, however often it occurs.
        wire_dtype: of wider rows, results and gradients on the way; None: their own.
        ranks: that share the tables.
    """

    def __init__(
        self,
        name: str,
        tables: Sequence[Table],
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
        self._ways: list[Rows | Bags] = [
            (Keys if grows else Rows)(whole, chosen, features, dtype, *where, merge, copied)
            for (grows, copied, _, dtype), chosen in groups.items()
        ]
        for grows, of_way in units.items():
            sent_as = reduce(torch.promote_types, [dtypes[unit.table] for unit in of_way])
            self._ways.append(Bags(whole, sorted(of_way), features, sent_as, *where, grows))
        self._has_bags, self._grows = bool(units), any(way.grows for way in self._ways)
        # Gradients are divided by W. By a power of two that is exact, wherever it is done: where they are shortest. By
        # another number it is done at once, to the gradients of results, as one process would.
        exact = ranks.count & (ranks.count - 1) == 0
        self._at_once, self._on_the_way = (1.0, 1 / ranks.count) if exact else (1 / ranks.count, 1.0)
        ranks.reserve(sum(way.width for way in self._ways))

    @contextmanager
    def told(self, training: bool) -> Iterator[None]:
        """
        Tell the other ranks of an error that comes before this rank has told them of its lookup: all raise it.

        Args:
            training: whether the module trains.

        Raises:
            RuntimeError: the module is being exported.
        """
        self.refuse_export()
        ranks, before = self.ranks, self.ranks.sequence
        try:
            yield
        except Exception as error:
            if ranks.sequence == before:
                call = Call(self.name, "lookup", "train" if training else "eval")
                ranks.headers(call, torch.zeros(ranks.count, 0, dtype=torch.int64), error)
            raise

    def refuse_export(self) -> None:
        """Raise ``RuntimeError`` if the module is being exported."""
        if torch.compiler.is_exporting():
            raise RuntimeError(
                f"{self.name} cannot be exported: its tables are split over ranks, and a program would have the parts "
                "of this one: load full_state_dict() into a model of whole tables, and export that"
            )

    def request(self, module: Any, *given: Any, **how: bool) -> Request:
        """
        Say what this rank will want of the others in a call of the module.

        Args:
            module: whose tables they are. Its ``_inputs`` says what a call looks up.
            given: the arguments of the call.
            how: for ``_inputs``.

        Raises:
            Errors of the arguments, ids, offsets and weights.
        """
        x, places, ids = module._inputs(*given, **how)
        if ids.per_sample_weights is not None:
            ids = ids._replace(per_sample_weights=scale_gradient(ids.per_sample_weights, 1 / self._at_once))
        names = dict(zip(places, self._features, strict=True))
        check_ids(ids, [names.get(key, "") for key in range(len(ids.bags))])
        check_keys(ids, {places[key]: self._features[key] for key in self._short})
        try:
            return Request(x, ids, [way.ask(ids, places) for way in self._ways])
        except IndexError as error:
            named = getattr(module, "_bad_id", None)  # of a single table it says where in the call's input it is
            raise (named and named(x)) or error from None

    def call_of(self, module: Any, ids: Ids) -> tuple[Call, bool]:
        """Return what all ranks must do as this one does, and whether the lookup has gradients."""
        given, training = ids.per_sample_weights, module.training
        # In eval() a table that grows has no gradient, unless it is looked up by itself.
        its = [table for table in self.tables if not table.grows or table.child.training or table.child is module]
        with as_stored():
            trained = torch.is_grad_enabled() and any(table.weight.requires_grad for table in its)
        details = ["with gradients" if trained else "without gradients"]
        if given is not None:
            details.append(f"weights of {given.dtype}" + (" with gradients" if given.requires_grad else ""))
        others = [table.name for table in self.tables if table.grows and table.child.training is not training]
        if others:
            details.append(f"{', '.join(others)} in {'eval' if training else 'train'}()")
        return Call(self.name, "lookup", "train" if training else "eval", ", ".join(details)), trained

    def check(self, module: Any, trained: bool) -> None:
        """
        Check that the module's tables can be looked up.

        Args:
            module: whose tables they are.
            trained: whether the lookup has gradients.

        Raises:
            RuntimeError: a table is in a DistributedDataParallel, or is not as ``shard`` made it, or no backward could
                update it; ValueError: its columns can no longer be split.
        """
        with as_stored():
            weights = [table.weight for table in self.tables]
            check_not_in_ddp(weights)
            for table, plan, weight, split in zip(self.tables, self.plans, weights, self._split, strict=True):
                form = _form(table)
                if form != split:
                    raise RuntimeError(
                        f"table {table.name!r}: this rank's part must stay as shard() made it, {list(split[0])} of "
                        f"{split[1]} on {split[2]}, got {list(form[0])} of {form[1]} on {form[2]}: convert and move a "
                        "model before shard()"
                    )
                check_columns(table.name, plan, weight, table.child.max_norm)  # it may have been set since
            if module.training and trained:
                module._check_fused()

    def look_up(self, module: Any, *given: Any, **how: bool) -> tuple[Any, Ids, Tensor]:
        """
        Look up what a call of the module asks for, as all ranks do in the same call.

        Args:
            module: see :meth:`request`.
            given: see :meth:`request`.
            how: see :meth:`request`.

        Returns:
            The call's input and its ids, as ``_inputs`` gives them, and the results, as on one process.

        Raises:
            Errors of the arguments, ids, offsets and weights, of whichever rank; RuntimeError: see :class:`Ranks`.
        """
        with self.told(module.training):
            request = self.request(module, *given, **how)
            call, trained = self.call_of(module, request.ids)
            self.check(module, trained)
        told = self.ranks.headers(call, request.counts)
        return request.x, request.ids, self.answered(module, call, request, told, trained)

    def answered(
        self, module: Any, call: Call, request: Request, told: Tensor, trained: bool, got: list[Tensor] | None = None
    ) -> Tensor:
        """
        Return the results of what all ranks ask for.

        Args:
            module: whose tables they are.
            call: what this rank does.
            request: of this rank.
            told: the counts of other ranks' requests.
            trained: whether the lookup has gradients.
            got: what the others have sent before the call. None: it travels now.

        Raises:
            RuntimeError: see :class:`Ranks`; errors of tables that grow, of whichever rank.
        """
        ranks, result, failed, open_before = self.ranks, None, None, self.ranks.open
        with ranks.exchange(call):
            try:
                result = self._exchanged(call, request, told, trained, module._look_up_tables, got)
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
        return scale_gradient(result, self._at_once)

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
            "call torchsparse_rec.distributed.save(folder, module, optimizer)"
            if self._grows
            else "save its state_dict() by torch.distributed.checkpoint, or take whole tables by full_state_dict()"
        )
        raise TypeError(
            f"{self.name}: a module whose tables are split over ranks cannot be copied or pickled: {way_out}"
        )

    def payload_sizes(self, request: Request, told: Tensor) -> list[Sizes]:
        """Return the sizes of what is asked of others, in the order of ``request.parts``."""
        came = told.split([way.width for way in self._ways], 1)
        return [
            size for way, a, c in zip(self._ways, request.asked, came, strict=True) for size in way.payload_sizes(a, c)
        ]

    def _exchanged(
        self, call: Call, request: Request, told: Tensor, trained: bool, look_up: LookUp, got: list[Tensor] | None
    ) -> Tensor:
        ranks, ways, (_, ids, asked) = self.ranks, self._ways, request
        came = told.split([way.width for way in ways], 1)
        group = ranks.group if got is None else ranks.ahead_results
        travels = False
        if got is None:
            # Weights travel with bags alone, and their gradients back.
            weights = ids.per_sample_weights if self._has_bags and torch.is_grad_enabled() else None
            travels = weights is not None and weights.requires_grad
            anchor = self._leaf() if travels else None
            sizes = self.payload_sizes(request, told)
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
                # No room for new rows, in memory or on a disk: the others are told beside the results.
                failed = error
                answers.append(torch.zeros(sum(sizes_of_answer.sent), dtype=way.dtype, device=ranks.device))
            at += len(a.parts)
        if self._grows:
            # And what this rank does, as the header of a batch that was prefetched tells the mode of that time.
            word = call.signature if failed is None else 0
            answers.append(torch.full((ranks.count,), word, dtype=torch.int64, device=ranks.device))
            answer_sizes.append(Sizes([1] * ranks.count, [1] * ranks.count))
        values = exchange(ranks, group, call, answer_sizes, answers, anchor, self._on_the_way, self.wire_dtype)
        if self._grows and bool((values.pop() != call.signature).any()):
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
        error: of this rank; None: it is another's, or ranks differ.
    """

    def __init__(self, error: Exception | None) -> None:
        super().__init__(error)
        self.error = error


def _form(table: Table) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Return what must stay of a part: its shape, but for the rows of a table that grows, dtype and device."""
    weight = table.weight
    return weight.shape[table.grows :], weight.dtype, weight.device


def columns(plan: TableWise | ColumnWise, dim: int) -> list[tuple[int, tuple[int, int]]]:
    """Return the ranks that have a table, each with the columns it has."""
    if isinstance(plan, TableWise):
        assert plan.rank is not None
        return [(plan.rank, (0, dim))]
    assert plan.ranks is not None
    return list(zip(plan.ranks, ColumnWise.columns(dim, len(plan.ranks)), strict=True))
