"""Lookups in tables where a rank has some rows, or all: rows travel to who asks, each once, and are pooled there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from .._reduction import SUM
from ..nn.plan import Ids, LookupPlan, counts_of
from ..ops.embedding_collection import lookup
from ..ops.route import route
from ..tables.blocks import Blocks
from ._ids import bad_id, reordered, taken, without
from .exchange import Asked, LookUp, Place, Sizes

__all__ = ["RowShards"]


class RowShards:
    """
    Tables of one dim and dtype that are split by rows, or replicated.

    Args:
        whole: the collection's plan.
        tables: the numbers of its tables, ascending.
        features: the names of the collection's features.
        dtype: the dtype of the tables.
        rank: this rank.
        ranks: the number of ranks, W.
        pooled: whether results are pooled.
        merge: whether an id of a table travels once, however often it occurs.
        copied: whether every rank has all rows.
    """

    #: Whether rows are made as keys come.
    grows = False

    def __init__(
        self,
        whole: LookupPlan,
        tables: Sequence[int],
        features: Sequence[str],
        dtype: torch.dtype,
        rank: int,
        ranks: int,
        pooled: bool,
        merge: bool,
        copied: bool,
    ) -> None:
        self.part = part = whole.part(tables)
        self.tables, self.lookups, self.keys = list(tables), whole.lookups_of(tables), part.keys
        self.dtype, self.dim, self.rank, self.ranks = dtype, part.dims[0], rank, ranks
        self._features = [features[key] for key in part.keys]
        self._merge, self._copied = merge, copied
        self._padding = [part.padding[table] for table in part.tables]
        self._pads = pooled and max(self._padding) >= 0
        # Ids travel segment by segment: a segment is a table or, if each occurrence travels, a lookup.
        self._segments = list(range(len(tables))) if merge else list(part.tables)
        self._sizes = [part.num_embeddings[table] for table in self._segments]
        self._blocks = [1 if copied else Blocks(rows).count for rows in self._sizes]
        self.width = len(self._segments)
        # The lookups with which segments begin.
        self._firsts = [part.tables.index(table) for table in self._segments] if merge else list(range(self.width))
        self._own = self._plan_of_own()

    def _plan_of_own(self) -> LookupPlan:
        """Return the plan by which this rank looks up the requests of all ranks."""
        segments, ranks = range(self.width), range(self.ranks)
        if self._merge:
            order = [(rank, segment) for rank in ranks for segment in segments]
        else:  # the order in which one process adds
            order = [(rank, segment) for segment in segments for rank in ranks]
        rows, padding = [], []
        for size, row in zip(self.part.num_embeddings, self.part.padding, strict=True):
            blocks = Blocks(size)
            rows.append(size if self._copied else blocks.rows_of(self.rank, self.ranks))
            padding.append(row if self._copied or row < 0 else blocks.row_of(row, self.rank, self.ranks))
        return LookupPlan(
            tuple(self._segments[segment] for _, segment in order),
            tuple(rank * self.width + segment for rank, segment in order),
            (SUM,) * len(order),
            tuple(rows),
            self.part.dims,
            tuple(padding),
        )

    def ask(self, ids: Ids, places: Sequence[int]) -> Asked:
        """
        Say which rows this rank wants.

        Args:
            ids: the ids of all features.
            places: the place of each of the collection's features among them.

        Raises:
            IndexError: an id that its table does not have.
        """
        ids, counts, starts = self._own_ids(ids, places)
        ranks = 1 if self._copied else self.ranks
        try:
            rows, counted, where = route(ids.indices, starts, self._sizes, self._blocks, ranks, self._merge)
        except IndexError:
            for name, values, table in zip(self._features, ids.indices.split(counts), self.part.tables, strict=True):
                error = bad_id(name, values, self.part.num_embeddings[table])
                if error is not None:
                    raise error from None
            raise
        if self._copied:
            rows, counted = rows.repeat(self.ranks), counted.expand(self.ranks, -1)
        return self._asked([rows], counted, ids, where)

    def _asked(self, parts: list[Tensor], counts: Tensor, ids: Ids, places: Tensor) -> Asked:
        return Asked(parts, [counts.sum(1).tolist()] * len(parts), counts, ids._replace(indices=places))

    def _own_ids(self, ids: Ids, places: Sequence[int]) -> tuple[Ids, list[int], list[int]]:
        """Return the ids of these tables, how many each lookup has, and where each segment begins and the last ends."""
        ids = taken(ids, [places[key] for key in self.keys])
        if self._pads:
            ids = without(ids, self._padding)
        counts = counts_of(ids)
        ends = [0, *accumulate(counts)]
        return ids, counts, [*[ends[first] for first in self._firsts], ends[-1]]

    def read(self, counts: Tensor) -> list[list[int]]:
        """Return the size of each rank's request for each segment, by the received counts."""
        return counts.tolist()  # type: ignore[no-any-return]

    def payload_sizes(self, asked: Asked, came: list[list[int]]) -> list[Sizes]:
        """Return the sizes of the parts of ``asked``."""
        of_ranks = list(map(sum, came))
        return [Sizes(sent, of_ranks) for sent in asked.sent]

    def answer(self, got: Sequence[Tensor], came: list[list[int]], look_up: LookUp) -> Tensor:
        """
        Look up the rows that all ranks want of this one.

        Args:
            got: the received parts: rows; keys, and how often each occurs.
            came: the received number from each rank and segment.
            look_up: the collection's function that looks up tables by a plan.

        Returns:
            ``[R * D]``: the rows in the order of the requests.
        """
        counts = list(chain(*came))
        rows = look_up(self._own, self.tables, Ids(got[0], None, None, counts, False), *got[1:])
        if self._merge:
            return rows
        ranks, width = self.ranks, self.width
        sizes = [counts[key] * self.dim for key in self._own.keys]
        return reordered(rows, sizes, [segment * ranks + rank for rank in range(ranks) for segment in range(width)])

    def answer_sizes(self, asked: Asked, came: list[list[int]]) -> Sizes:
        """Return the sizes of the answers: from this rank, and to it."""
        sent, coming = [[self.dim * count for count in of_ranks] for of_ranks in (map(sum, came), asked.sent[0])]
        return Sizes(sent, coming, self._copied)

    def results(self, asked: Asked, rows: Tensor, came: Any, side_by_side: bool) -> list[tuple[Place, Tensor]]:
        """Pool rows; return the results ``[B, D]``, or flat, of lookups, each with its place among all."""
        ids, lookups = asked.ids, len(self.lookups)
        weights = None if ids.per_sample_weights is None else ids.per_sample_weights.to(self.dtype)
        result = lookup(
            [rows.view(-1, self.dim)],
            ids.indices,
            ids.offsets,
            weights,
            [0] * lookups,
            list(range(lookups)),
            [SUM] * lookups if ids.offsets is None else list(self.part.modes),
            list(ids.bags),
            [-1],
            side_by_side,
            False,
        )[0]
        if self.lookups[-1] - self.lookups[0] == lookups - 1:  # no other lookup is between them
            return [((self.lookups[0], 0), result)]
        sizes = [self.dim if side_by_side else bags * self.dim for bags in ids.bags]
        return [((number, 0), x) for number, x in zip(self.lookups, result.split(sizes, -1), strict=True)]
