"""Lookups in tables, or columns of tables, that one rank has: bags travel there, and results travel home."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .._reduction import POOLING
from ..nn.plan import Ids, Plan, counts_of
from ._ids import bad_id, reordered, taken
from .exchange import LookUp, Place, Sizes

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


class Asked(NamedTuple):
    """What a rank asks others for: lengths of bags if they differ from 1, ids, and weights if there are any."""

    parts: list[Tensor]
    counts: Tensor
    ids: Ids
    sizes: list[list[int]]


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
        self._wide = grows or any(whole.num_embeddings[unit.table] > 2**31 for unit in units)
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
        Say which bags this rank wants.

        Args:
            ids: of all features.
            places: the place of each of the collection's features among them.

        Raises:
            IndexError: an id that its table does not have.
        """
        ids = taken(ids, [places[unit.key] for unit in self.units])
        counts = counts_of(ids)
        for unit, values in zip(self.units, ids.indices.split(counts), strict=True):
            if self.grows:
                break
            rows = self._whole.num_embeddings[unit.table]
            if values.numel() and unit.begin == 0 and not 0 <= int(values.min()) <= int(values.max()) < rows:
                error = bad_id(self._features[unit.key], values, rows)
                assert error is not None
                raise error
        lengths = None if ids.offsets is None else ids.offsets.diff()
        single = lengths is None or (counts == list(ids.bags) and bool((lengths == 1).all()))
        flags = _SINGLE * single + _EVEN * ids.side_by_side
        told = torch.zeros(self.ranks, self.width, dtype=torch.int64)
        told[:, 0] = flags
        each, bags = self._by_owner(counts), self._by_owner(ids.bags)
        for owner in range(self.ranks):
            told[owner, 1 : 1 + len(each[owner])] = torch.tensor(each[owner], dtype=torch.int64)
            told[owner, 1 + self._most : 1 + self._most + len(each[owner])] = torch.tensor(
                bags[owner], dtype=torch.int64
            )
        parts, sizes = [], []
        if self._pooled:
            parts.append(ids.indices.new_empty(0, dtype=torch.int32) if lengths is None or single else lengths.int())
            sizes.append([0 if single else sum(its) for its in bags])
        parts.append(ids.indices.long() if self._wide else ids.indices.int())
        sizes.append([sum(its) for its in each])
        if ids.per_sample_weights is not None:
            parts.append(ids.per_sample_weights)
            sizes.append(sizes[-1])
        return Asked(parts, told, ids, sizes)

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
        of_parts = [total] * len(asked.parts)
        if self._pooled:
            of_parts[0] = [0 if one else sum(its) for one, its in zip(single, bags, strict=True)]
        return [Sizes(sent, came) for sent, came in zip(asked.sizes, of_parts, strict=True)]

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
        lengths, (indices, *weights) = (got[0], got[1:]) if self._pooled else (None, got)
        order = [rank * own + unit for unit in range(own) for rank in range(self.ranks)]
        flat_ids, flat_bags = sum(ids, []), sum(bags, [])
        psw = reordered(weights[0], flat_ids, order) if weights else None
        offsets, plan = None, self._single
        if lengths is not None and (psw is not None or self._counts_padding or not all(single)):
            plan = self._own
            ones = [lengths.new_ones(sum(its)) if one else None for one, its in zip(single, bags, strict=True)]
            sent = iter(lengths.split([sum(its) for one, its in zip(single, bags, strict=True) if not one]))
            every = torch.cat([next(sent) if one is None else one for one in ones])
            every = reordered(every, flat_bags, order)
            offsets = torch.cat([every.new_zeros(1, dtype=torch.int64), every.cumsum(0)])
        together = [sum(bags[rank][unit] for rank in range(self.ranks)) for unit in range(own)]
        even = self._even(came)
        result = look_up(plan, self.tables, Ids(reordered(indices, flat_ids, order), offsets, psw, together, even)).to(
            self.dtype
        )
        if even:
            return result.reshape(-1)
        dims = self._own.columns()
        sizes = [bags[rank][unit] * dims[unit] for unit in range(own) for rank in range(self.ranks)]
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
        if self._even(came):
            for its, x in zip(self._of, values.split([sum(each) for each in self._by_owner(sizes)]), strict=True):
                columns = [unit.end - unit.begin for unit in its]
                parts = x.view(bags[0], sum(columns)).split(columns, 1) if its else []
                found += [((unit.lookup, unit.begin), part) for unit, part in zip(its, parts, strict=True)]
        else:
            for unit, count, width, x in zip(self.units, bags, widths, values.split(sizes), strict=True):
                found.append(((unit.lookup, unit.begin), x.view(count, width)))
        if side_by_side:
            return found
        by_lookup: dict[int, list[Tensor]] = {}
        for (lookup, _), x in sorted(found, key=lambda pair: pair[0]):
            by_lookup.setdefault(lookup, []).append(x)
        return [((lookup, 0), torch.cat(parts, 1).reshape(-1)) for lookup, parts in by_lookup.items()]
