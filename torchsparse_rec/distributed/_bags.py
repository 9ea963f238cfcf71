"""Lookups in tables, or columns of tables, that one rank has: bags travel there, and results travel home."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from .._reduction import SUM
from ..nn.plan import Ids, LookupPlan, counts_of
from ._columns import Columns
from ._ids import bad_id, reordered
from .exchange import Asked, LookUp, Place, Sizes

__all__ = ["Bags", "Unit"]

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


class Came(NamedTuple):
    """
    What ranks want of this one: whether each one's bags have one id each, and of each own unit its ids and its bags.

    ``even`` is True if all have as many bags of each feature: results are then side by side.
    """

    single: list[bool]
    even: bool
    ids: list[list[int]]
    bags: list[list[int]]


class Bags:
    """
    Tables, or columns of them, that one rank has.

    Args:
        whole: the collection's plan.
        units: the columns that each rank has of each lookup, sorted.
        features: the names of the collection's features.
        dtype: the dtype of results on the way.
        rank: this rank.
        ranks: the number of ranks, W.
        pooled: whether results are pooled.
        grows: whether rows are made as keys come: all are legal.
    """

    def __init__(
        self,
        whole: LookupPlan,
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
        self.units = sorted(units)
        self._keys, self._widths = [unit.key for unit in self.units], [unit.end - unit.begin for unit in self.units]
        owners = [unit.owner for unit in self.units]
        ends = [0, *accumulate([owners.count(owner) for owner in range(ranks)])]
        self._of = list(map(slice, ends, ends[1:]))  # the units of each owner
        self._most = max([owners.count(owner) for owner in range(ranks)])
        # Flags, then of each unit of a rank its ids, then its bags.
        self.width = 1 + 2 * self._most
        # The number of words of four bytes that an id takes on the way.
        self._words = 2 if grows or any(whole.num_embeddings[unit.table] > 2**31 for unit in units) else 1
        own = self.units[self._of[rank]]
        self.tables = sorted({unit.table for unit in own})
        place = {table: k for k, table in enumerate(self.tables)}
        widths = {unit.table: unit.end - unit.begin for unit in own}
        self._own = LookupPlan(
            tuple(place[unit.table] for unit in own),
            tuple(range(len(own))),
            tuple(whole.modes[unit.lookup] for unit in own),
            tuple(whole.num_embeddings[table] for table in self.tables),
            tuple(widths[table] for table in self.tables),
            tuple(whole.padding[table] for table in self.tables),
        )
        self._dims = self._own.columns()
        self._single = self._own._replace(modes=(SUM,) * len(own))
        self._counts_padding = pooled and any(padding >= 0 for padding in self._own.padding)
        # This rank looks up unit after unit, in each rank after rank: the batch of one process.
        self._order = [(rank, unit) for unit in range(len(own)) for rank in range(ranks)]
        self._least = min([whole.num_embeddings[unit.table] for unit in self.units])
        self._lay_out()

    def _lay_out(self) -> None:
        """Note where columns go, and the columns of each lookup and of lookups that follow one another."""
        units, widths = self.units, self._widths
        self._lookups: dict[int, int] = {}
        to = [0] * len(units)
        for k in sorted(range(len(units)), key=lambda k: (units[k].lookup, units[k].begin)):
            to[k] = sum(self._lookups.values())
            self._lookups[units[k].lookup] = self._lookups.get(units[k].lookup, 0) + widths[k]
        self._columns = Columns([list(zip(widths[own], to[own], strict=True)) for own in self._of])
        self._together: dict[int, int] = {}
        first = last = -2
        for lookup, columns in self._lookups.items():
            first = first if lookup == last + 1 else lookup
            self._together[first] = self._together.get(first, 0) + columns
            last = lookup

    def ask(self, ids: Ids, places: Sequence[int]) -> Asked:
        """
        Say which bags this rank wants, in words of four bytes: of each owner lengths, if they differ from 1, and ids.

        Weights, if there are any, are a second vector. The bags belong to units.

        Args:
            ids: the ids of all features.
            places: the place of each of the collection's features among them.

        Raises:
            IndexError: an id that its table does not have.
        """
        counts, keys = counts_of(ids), [places[key] for key in self._keys]
        if not self.grows:
            self._check(ids.indices, counts, keys)
        of_units, bags = [counts[key] for key in keys], [ids.bags[key] for key in keys]
        lengths = None if ids.offsets is None else ids.offsets.diff()
        # As many ids as bags, none with more than one: each has one.
        single = lengths is None or (of_units == bags and (lengths.numel() == 0 or int(lengths.max()) <= 1))
        flags, sent, words, told = _SINGLE * single + _EVEN * ids.side_by_side, [], [], []
        for own in self._of:
            its, theirs = of_units[own], bags[own]
            rest = [0] * (self._most - len(its))
            told.append([flags, *its, *rest, *theirs, *rest])
            sent.append(sum(its))
            words.append(self._words * sent[-1] + (0 if single else sum(theirs)))
        ids_in_words = self._as_words(ids.indices).split([count * self._words for count in counts])
        parts = [ids_in_words[key] for key in keys]
        if lengths is not None and not single:
            lengths_in_words = lengths.int().split(list(ids.bags))
            of_bags = [lengths_in_words[key] for key in keys]
            parts = [part for own in self._of for part in (*of_bags[own], *parts[own])]
        asked, sizes = [torch.cat(parts)], [words]
        if ids.per_sample_weights is not None:
            asked.append(reordered(ids.per_sample_weights, counts, keys))
            sizes.append(sent)
        return Asked(asked, sizes, torch.tensor(told, dtype=torch.int64), ids._replace(bags=bags))

    def _check(self, indices: Tensor, counts: Sequence[int], keys: Sequence[int]) -> None:
        """Raise ``IndexError`` for an id that its table does not have."""
        if indices.numel() == 0:
            return
        least, most = torch.aminmax(indices)
        if 0 <= int(least) and int(most) < self._least:
            return
        its = indices.split(list(counts))
        for unit, key in zip(self.units, keys, strict=True):
            values, count = its[key], self._whole.num_embeddings[unit.table]
            if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < count:
                error = bad_id(self._features[unit.key], values, count)
                assert error is not None
                raise error

    def _as_words(self, ids: Tensor) -> Tensor:
        """Return ids as they travel: as words of four bytes, two for each id if tables grow or are very long."""
        return ids.int() if self._words == 1 else ids.long().view(torch.int32)

    def read(self, counts: Tensor) -> Came:
        """Return the sizes of the ranks' :class:`Asked`, by the counts that each has sent."""
        own, most = len(self._own.keys), self._most
        its = counts.tolist()
        return Came(
            [bool(x[0] & _SINGLE) for x in its],
            all([x[0] & _EVEN for x in its]),
            [x[1 : 1 + own] for x in its],
            [x[1 + most : 1 + most + own] for x in its],
        )

    def payload_sizes(self, asked: Asked, came: Came) -> list[Sizes]:
        """Return the sizes of the parts of ``asked``."""
        total = list(map(sum, came.ids))
        lengths = [0 if one else sum(its) for one, its in zip(came.single, came.bags, strict=True)]
        words = [self._words * n + more for n, more in zip(total, lengths, strict=True)]
        return [Sizes(sent, its) for sent, its in zip(asked.sent, [words, total], strict=False)]

    def answer(self, got: Sequence[Tensor], came: Came, look_up: LookUp) -> Tensor:
        """
        Look up the bags that all ranks want of this one: feature by feature, in the order of one process.

        Args:
            got: the received parts of each rank's :class:`Asked`.
            came: the amount that each rank has sent.
            look_up: the collection's function that looks up tables by a plan.

        Returns:
            The results, rank by rank.
        """
        single, even, ids, bags = came
        own, order = len(self._own.keys), self._order
        if own == 0:
            return torch.empty(0, dtype=self.dtype, device=got[0].device)
        words, *weights = got
        sizes: list[int] = []
        for one, its, theirs in zip(single, bags, ids, strict=True):
            sizes += [*([0] * own if one else its), *[self._words * count for count in theirs]]
        pieces = words.split(sizes)
        # For each rank the lengths of all units, then the ids of all units.
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
        together = list(map(sum, zip(*bags, strict=True)))
        result = look_up(plan, self.tables, Ids(indices, offsets, psw, together, even)).to(self.dtype)
        if even:
            return result.reshape(-1)
        sizes = [bags[rank][unit] * self._dims[unit] for rank, unit in order]
        return reordered(result, sizes, [unit * self.ranks + rank for rank in range(self.ranks) for unit in range(own)])

    def answer_sizes(self, asked: Asked, came: Came) -> Sizes:
        """Return the sizes of the answers: from this rank, and to it."""
        sent = [sum(map(mul, its, self._dims)) for its in came.bags]
        sizes = list(map(mul, asked.ids.bags, self._widths))
        return Sizes(sent, [sum(sizes[its]) for its in self._of])

    def results(self, asked: Asked, values: Tensor, came: Came, side_by_side: bool) -> list[tuple[Place, Tensor]]:
        """Return the results ``[B, columns]``, or flat, of lookups, each with its place among all."""
        bags = asked.ids.bags
        if came.even:
            of = self._together if side_by_side else self._lookups
            whole = self._columns.side_by_side(values, bags[0])
            parts = whole.split(list(of.values()), 1) if len(of) > 1 else [whole]
            return [((k, 0), x if side_by_side else x.reshape(-1)) for k, x in zip(of, parts, strict=True)]
        found: list[tuple[Place, Tensor]] = []
        sizes = list(map(mul, bags, self._widths))
        for unit, count, width, x in zip(self.units, bags, self._widths, values.split(sizes), strict=True):
            found.append(((unit.lookup, unit.begin), x.view(count, width)))
        if side_by_side:
            return found
        by_lookup: dict[int, list[Tensor]] = {}
        for (lookup, _), x in sorted(found, key=lambda pair: pair[0]):
            by_lookup.setdefault(lookup, []).append(x)
        return [((lookup, 0), torch.cat(parts, 1).reshape(-1)) for lookup, parts in by_lookup.items()]
