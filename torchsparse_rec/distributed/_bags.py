"""Lookups in tables, or columns of tables, that one rank has: bags travel there, and results travel home."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._reduction import POOLING
from ..nn.plan import Ids, Plan, counts_of
from ._ids import bad_id, reordered
from .exchange import Asked, LookUp, Place, Sizes

__all__ = ["Bags", "Unit"]

_SUM = POOLING["sum"]
# The flags of a rank's bags: each has one id; all features have as many.
_SINGLE, _EVEN = 1, 2


class Unit(NamedTuple):
    """The columns ``[begin, end)`` of a lookup's table, which one rank has."""

    owner: int
    lookup: int
    table: int
    key: int
    begin: int
    end: int


class Bags:
    """
    Tables, or columns of them, that one rank has.

    Args:
        whole: the collection's plan.
        units: what each rank has of which lookup, sorted.
        features: the names of the collection's features.
        dtype: of results, on the way.
        rank: this rank.
        ranks: W.
        pooled: whether results are pooled.
        grows: whether rows are made as keys come: all are legal.
    """

    def __init__(
        self,
        whole: Plan,
        units: Sequence[Unit],
        features: Sequence[str],
        dtype: torch.dtype,
        rank: int,
        ranks: int,
        pooled: bool,
        grows: bool,
    ) -> None:
        self.grows = grows
        self._whole, self._features, self.dtype, self._pooled = whole, features, dtype, pooled
        self.rank, self.ranks = rank, ranks
        self._of = [[unit for unit in units if unit.owner == owner] for owner in range(ranks)]
        self.units = [unit for its in self._of for unit in its]
        self._most = max(map(len, self._of))
        # Flags, then of each unit of a rank its ids, then its bags.
        self.width = 1 + 2 * self._most
        # Of four bytes that an id takes on the way.
        self._words = 2 if grows or any(whole.num_embeddings[unit.table] > 2**31 for unit in units) else 1
        own = self._of[rank]
        self.tables = sorted({unit.table for unit in own})
        place = {table: k for k, table in enumerate(self.tables)}
        widths = {unit.table: unit.end - unit.begin for unit in own}
        self._own = Plan(
            tuple(place[unit.table] for unit in own),
            tuple(range(len(own))),
            tuple(whole.modes[unit.lookup] for unit in own),
            tuple(whole.num_embeddings[table] for table in self.tables),
            tuple(widths[table] for table in self.tables),
            tuple(whole.padding[table] for table in self.tables),
        )
        self._single = self._own._replace(modes=(_SUM,) * len(own))
        self._counts_padding = pooled and any(padding >= 0 for padding in self._own.padding)

    def ask(self, ids: Ids, places: Sequence[int]) -> Asked:
        """
        Say which bags this rank wants, in words of four bytes: of each owner lengths, if they differ from 1, and ids.

        Weights, if there are any, are a second vector. The bags are those of units.

        Args:
            ids: of all features.
            places: the place of each of the collection's features among them.

        Raises:
            IndexError: an id that its table does not have.
        """
        counts, keys = counts_of(ids), [places[unit.key] for unit in self.units]
        if not self.grows:
            its = ids.indices.split(counts)
            self._check(ids.indices, [its[key] for key in keys])
        of_units, bags = [counts[key] for key in keys], [ids.bags[key] for key in keys]
        lengths = None if ids.offsets is None else ids.offsets.diff()
        single = lengths is None or (of_units == bags and bool((lengths == 1).all()))
        told = torch.zeros(self.ranks, self.width, dtype=torch.int64)
        told[:, 0] = _SINGLE * single + _EVEN * ids.side_by_side
        for begin, numbers in ((1, of_units), (1 + self._most, bags)):
            for owner, own in enumerate(self._by_owner(numbers)):
                told[owner, begin : begin + len(own)] = torch.tensor(own, dtype=torch.int64)
        ids_in_words = self._as_words(ids.indices).split([count * self._words for count in counts])
        parts = [ids_in_words[key] for key in keys]
        if lengths is not None and not single:
            lengths_in_words = lengths.int().split(list(ids.bags))
            of_owners = zip(self._by_owner([lengths_in_words[key] for key in keys]), self._by_owner(parts), strict=True)
            parts = [part for both in of_owners for its in both for part in its]
        sent = [sum(its) for its in self._by_owner(of_units)]
        words = [
            self._words * n + (0 if single else sum(its)) for n, its in zip(sent, self._by_owner(bags), strict=True)
        ]
        asked, sizes = [torch.cat(parts)], [words]
        if ids.per_sample_weights is not None:
            asked.append(reordered(ids.per_sample_weights, counts, keys))
            sizes.append(sent)
        return Asked(asked, sizes, told, ids._replace(bags=bags))

    def _check(self, indices: Tensor, of_units: Sequence[Tensor]) -> None:
        """Raise ``IndexError`` for an id that its table does not have."""
        rows = [self._whole.num_embeddings[unit.table] for unit in self.units]
        if indices.numel() == 0:
            return
        least, most = torch.aminmax(indices)
        if 0 <= int(least) and int(most) < min(rows):
            return
        for unit, values, count in zip(self.units, of_units, rows, strict=True):
            if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < count:
                error = bad_id(self._features[unit.key], values, count)
                assert error is not None
                raise error

    def _as_words(self, ids: Tensor) -> Tensor:
        """Return ids as they travel: as words of four bytes, two for each id if tables grow or are very long."""
        return ids.int() if self._words == 1 else ids.long().view(torch.int32)

    def _by_owner(self, counts: Sequence[int]) -> list[list[int]]:
        """Cut a list with an entry for each unit into those of each owner."""
        ends = [0, *accumulate(len(its) for its in self._of)]
        return [list(counts[begin:end]) for begin, end in zip(ends, ends[1:], strict=False)]

    def _told(self, came: Tensor) -> tuple[list[bool], list[list[int]], list[list[int]]]:
        """Return for each rank whether its bags have one id each, and of each own unit its ids and its bags."""
        own = len(self._own.keys)
        single = [bool(flags & _SINGLE) for flags in came[:, 0].tolist()]
        ids, bags = came[:, 1 : 1 + own].tolist(), came[:, 1 + self._most : 1 + self._most + own].tolist()
        return single, ids, bags

    def payload_sizes(self, asked: Asked, came: Tensor) -> list[Sizes]:
        """Return the sizes of the parts of ``asked``."""
        single, ids, bags = self._told(came)
        total = [sum(its) for its in ids]
        lengths = [0 if one else sum(its) for one, its in zip(single, bags, strict=True)]
        words = [self._words * n + more for n, more in zip(total, lengths, strict=True)]
        return [Sizes(sent, its) for sent, its in zip(asked.sent, [words, total], strict=False)]

    def answer(self, got: Sequence[Tensor], came: Tensor, look_up: LookUp) -> Tensor:
        """
        Look up the bags that all ranks want of this one: feature after feature, as one process has them.

        Args:
            got: what came: the parts of each rank's :class:`Asked`.
            came: each rank's counts.
            look_up: of the collection: looks up tables by a plan.

        Returns:
            The results, for one rank after the other.
        """
        single, ids, bags = self._told(came)
        own = len(self._own.keys)
        if own == 0:
            return torch.empty(0, dtype=self.dtype, device=got[0].device)
        order = [(rank, unit) for unit in range(own) for rank in range(self.ranks)]
        words, *weights = got
        sizes: list[int] = []
        for one, its, theirs in zip(single, bags, ids, strict=True):
            sizes += [*([0] * own if one else its), *(self._words * count for count in theirs)]
        pieces = words.split(sizes)
        # Of each rank the lengths of all units, then the ids of all units.
        indices = torch.cat([pieces[(2 * rank + 1) * own + unit] for rank, unit in order])
        indices = indices if self._words == 1 else indices.view(torch.int64)
        psw = reordered(weights[0], sum(ids, []), [rank * own + unit for rank, unit in order]) if weights else None
        offsets, plan = None, self._single
        if self._pooled and (psw is not None or self._counts_padding or not all(single)):
            plan = self._own
            every = [
                words.new_ones(bags[rank][unit]) if single[rank] else pieces[2 * rank * own + unit]
                for rank, unit in order
            ]
            offsets = words.new_zeros(1 + sum(map(sum, bags)), dtype=torch.int64)
            torch.cumsum(torch.cat(every), 0, out=offsets[1:])
        together = [sum(bags[rank][unit] for rank in range(self.ranks)) for unit in range(own)]
        even = self._even(came)
        result = look_up(plan, self.tables, Ids(indices, offsets, psw, together, even)).to(self.dtype)
        if even:
            return result.reshape(-1)
        dims = self._own.columns()
        sizes = [bags[rank][unit] * dims[unit] for rank, unit in order]
        return reordered(result, sizes, [unit * self.ranks + rank for rank in range(self.ranks) for unit in range(own)])

    def _even(self, came: Tensor) -> bool:
        """Say whether all ranks have as many bags of each feature: results are then side by side."""
        return bool((came[:, 0] & _EVEN != 0).all())

    def answer_sizes(self, asked: Asked, came: Tensor) -> Sizes:
        """Return the sizes of the answers: from this rank, and to it."""
        _, _, bags = self._told(came)
        dims = self._own.columns()
        sent = [sum(n * dim for n, dim in zip(its, dims, strict=True)) for its in bags]
        sizes = [bags * (unit.end - unit.begin) for unit, bags in zip(self.units, asked.ids.bags, strict=True)]
        return Sizes(sent, [sum(its) for its in self._by_owner(sizes)])

    def results(self, asked: Asked, values: Tensor, came: Tensor, side_by_side: bool) -> list[tuple[Place, Tensor]]:
        """Return the results ``[B, columns]``, or flat, of lookups, each with its place among all."""
        bags, widths = asked.ids.bags, [unit.end - unit.begin for unit in self.units]
        sizes = [count * width for count, width in zip(bags, widths, strict=True)]
        found: list[tuple[Place, Tensor]] = []
        if len(self.units) == 1:  # not a view of several, which nobody might write to
            found = [((self.units[0].lookup, self.units[0].begin), values.view(bags[0], widths[0]))]
        elif self._even(came):
            parts = _Columns.apply(values, bags[0], self._by_owner(widths))
            found = [((unit.lookup, unit.begin), part) for unit, part in zip(self.units, parts, strict=True)]
        else:
            for unit, count, width, x in zip(self.units, bags, widths, values.split(sizes), strict=True):
                found.append(((unit.lookup, unit.begin), x.view(count, width)))
        if side_by_side:
            return found
        by_lookup: dict[int, list[Tensor]] = {}
        for (lookup, _), x in sorted(found, key=lambda pair: pair[0]):
            by_lookup.setdefault(lookup, []).append(x)
        return [((lookup, 0), torch.cat(parts, 1).reshape(-1)) for lookup, parts in by_lookup.items()]


class _Columns(torch.autograd.Function):
    """The columns of each owner's results ``[B, ...]``, whose gradients are put together in one pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, rows: int, of_owners: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
        ctx.rows, ctx.of_owners = rows, of_owners
        ctx.set_materialize_grads(True)
        owners = values.split([rows * sum(columns) for columns in of_owners])
        parts = zip(owners, of_owners, strict=True)
        return tuple(
            x for its, columns in parts if columns for x in its.view(rows, sum(columns)).split(list(columns), 1)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Put gradients together as results came."""
        result = grads[0].new_empty(ctx.rows * sum(map(sum, ctx.of_owners)))
        its = iter(grads)
        for columns, part in zip(ctx.of_owners, result.split([ctx.rows * sum(c) for c in ctx.of_owners]), strict=True):
            if columns:
                torch.cat([next(its) for _ in columns], 1, out=part.view(ctx.rows, sum(columns)))
        return result, None, None
