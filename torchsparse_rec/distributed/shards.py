"""Lookups in the tables of one module, which are split over ranks: each is an exchange in which all ranks take part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._torch import as_stored
from ..nn.plan import Ids
from ._bags import Bags, Unit
from ._ids import check_ids, check_keys
from ._keys import Keys
from ._rows import Rows
from .agreed import agreed
from .ahead import Ahead, Asked
from .ddp import check_not_in_ddp
from .exchange import LookUp, Place, Sizes, exchange, scale_gradient
from .plan import ColumnWise, Replicated, RowWise, TablePlan, TableWise
from .ranks import Call, Ranks
from .tables import Table, check_columns, digest, lookups_of

__all__ = ["NO_GRAPH", "Shards", "columns"]

NO_GRAPH = (
    "a lookup in tables of several ranks cannot be part of a graph: compile without fullgraph, which leaves it out"
)
# Lookups with gradients, after each of which copies of replicated tables are compared.
_OFTEN = 1000


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
        # While a module's forward only says what it will ask for; the exchange that was begun before a call.
        self._asks = False
        self._ahead: Ahead | None = None
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
    def told(self, training: bool, *given: Any) -> Iterator[tuple[Any, ...]]:
        """
        Tell the other ranks of an error that comes before this rank has told them of its lookup: all raise it.

        Args:
            training: whether the module trains.
            given: the arguments of its call, or an :class:`Ahead` in their place.

        Yields:
            The arguments.

        Raises:
            RuntimeError: the module is being exported.
        """
        self.refuse_export()
        if self._asks:
            yield given
            return
        ranks, before = self.ranks, self.ranks.sequence
        try:
            if isinstance(given[0], Ahead):
                self._ahead = given[0]
                given = self._ahead.arguments(self, *given[1:])
            yield given
        except Exception as error:
            # Of an exchange that was begun before the call only the results are left: no header tells of an error.
            if self._ahead is None and ranks.sequence == before:
                call = Call(self.name, "lookup", "train" if training else "eval")
                ranks.headers(call, torch.zeros(ranks.count, 0, dtype=torch.int64), error)
            raise
        finally:
            self._ahead = None

    def refuse_export(self) -> None:
        """Raise ``RuntimeError`` if the module is being exported."""
        if torch.compiler.is_exporting():
            raise RuntimeError(
                f"{self.name} cannot be exported: its tables are split over ranks, and a program would have the parts "
                "of this one: load full_state_dict() into a model of whole tables, and export that"
            )

    def ask(self, module: Any, given: tuple[Any, ...]) -> Asked:
        """
        Say what this rank will want of the others in a call of the module.

        Args:
            module: whose tables they are.
            given: the arguments of the call.

        Raises:
            Errors of the arguments.
        """
        self._asks = True
        try:
            module.forward(*given)
        except Asked as asked:
            return asked
        finally:
            self._asks = False
        raise AssertionError

    def look_up(self, module: Any, places: Sequence[int], ids: Ids) -> Tensor:
        """
        Return the results of the module's lookups, as on one process. It is called within :meth:`told`.

        Args:
            module: whose tables they are.
            places: the place of each feature among the keys of ``ids``.
            ids: of this rank's batch.

        Raises:
            Errors of ids, offsets and weights, of whichever rank; RuntimeError: see :class:`Ranks`.
        """
        ranks, given, training = self.ranks, ids.per_sample_weights, module.training
        weights = [table.weight for table in self.tables]
        # In eval() a table that grows has no gradient, unless it is looked up by itself.
        trained = [table for table in self.tables if not table.grows or table.child.training or table.child is module]
        with as_stored():
            wanted = torch.is_grad_enabled() and any(table.weight.requires_grad for table in trained)
        details = ["with gradients" if wanted else "without gradients"]
        if given is not None:
            details.append(f"weights of {given.dtype}" + (" with gradients" if given.requires_grad else ""))
            ids = ids._replace(per_sample_weights=scale_gradient(given, 1 / self._at_once))
        others = [table.name for table in self.tables if table.grows and table.child.training is not training]
        if others:
            details.append(f"{', '.join(others)} in {'eval' if training else 'train'}()")
        call, ahead = Call(self.name, "lookup", "train" if training else "eval", ", ".join(details)), self._ahead
        if not self._asks:
            with as_stored():
                self._check(weights)
                if training and wanted:
                    module._check_fused()
        if ahead is None:
            names = dict(zip(places, self._features, strict=True))
            check_ids(ids, [names.get(key, "") for key in range(len(ids.bags))])
            check_keys(ids, {places[key]: self._features[key] for key in self._short})
            asked = Asked(call, ids, [way.ask(ids, places) for way in self._ways])
            if self._asks:
                raise asked
            told = ranks.headers(call, asked.counts)
        else:
            asked, told = ahead.asked, ahead.told
        result, failed, open_before = None, None, ranks.open
        with ranks.exchange(call):
            try:
                result = self._exchanged(call, ids, asked, told, wanted, module._look_up_tables)
            except _Failed as error:  # all ranks know of it, and none waits for another
                failed = error
        if failed is not None:
            ranks.open = open_before
            agreed(ranks.group, None, failed.error)
            ranks.raise_different(call, ranks.sequence)
        assert result is not None
        if wanted:  # and in whichever mode: of batches that were prefetched ranks may not know each other's
            self._trained += 1
            if self._copied and self._trained % _OFTEN == 0:
                self._check_copies(weights)
        return scale_gradient(result, self._at_once)

    def _check_copies(self, weights: Sequence[Parameter]) -> None:
        """Raise ``RuntimeError``, on all ranks, if the copies of a replicated table differ."""
        said = agreed(self.ranks.group, [digest(weights[k]) for k in self._copied])
        for rank, its in enumerate(said):
            for k, mine, other in zip(self._copied, said[0], its, strict=True):
                if mine != other:
                    raise RuntimeError(
                        f"table {self.tables[k].name!r} is Replicated, but rank {rank} has other values than rank 0: "
                        "one of them was written otherwise than by training; load a checkpoint on all ranks"
                    )

    def _check(self, weights: Sequence[Parameter]) -> None:
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

    def payload_sizes(self, asked: Asked, told: Tensor) -> list[Sizes]:
        """Return the sizes of what is asked of others, in the order of ``asked.parts``."""
        came = told.split([way.width for way in self._ways], 1)
        return [
            size for way, a, c in zip(self._ways, asked.ways, came, strict=True) for size in way.payload_sizes(a, c)
        ]

    def _exchanged(self, call: Call, ids: Ids, all_asked: Asked, told: Tensor, wanted: bool, look_up: LookUp) -> Tensor:
        ranks, ways, asked, ahead = self.ranks, self._ways, all_asked.ways, self._ahead
        came = told.split([way.width for way in ways], 1)
        travels = False
        if ahead is None:
            # Weights travel with bags alone, and their gradients back.
            weights = ids.per_sample_weights if self._has_bags and torch.is_grad_enabled() else None
            travels = weights is not None and weights.requires_grad
            anchor = self._leaf() if travels else None
            sizes = self.payload_sizes(all_asked, told)
            got = exchange(ranks, ranks.group, call, sizes, all_asked.parts, anchor, 1 / self._on_the_way)
        else:
            got = ahead.got
        # All ranks go back through both exchanges, or none through any.
        anchor = got[-1] if travels else self._leaf() if wanted else None
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
        group = ranks.group if ahead is None else ranks.ahead_results
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
