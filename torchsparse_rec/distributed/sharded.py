"""Modules whose tables are split over ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module

from .._torch import untraced
from ..checkpoint.parts import Over, SavedRows, SavedTable
from ..nn import Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection, EmbeddingVariable
from ..nn.plan import Ids
from .ahead import Ahead
from .boxes import kept_by_plan, kept_keys
from .plan import ColumnWise, Replicated
from .shards import NO_GRAPH, Shards

__all__ = [
    "SHARDED",
    "Sharded",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardedEmbeddingVariable",
]


class Sharded(Module):
    """The common part of all sharded modules."""

    shards: Shards

    def refuse_export(self) -> None:
        """Raise ``RuntimeError`` if the module is being exported."""
        self.shards.refuse_export()

    def saved_tables(self) -> list[SavedTable | SavedRows]:
        """Return this rank's parts of the tables, for checkpoints."""
        shards = self.shards
        rank, ranks = shards.ranks.rank, shards.ranks.count
        return [
            SavedRows(table.key, table.child, kept_keys(plan, rank, ranks))
            if table.rows is None
            else SavedTable(
                table.key,
                table.child,
                kept_by_plan(table.rows, table.dim, plan, rank, ranks),
                isinstance(plan, Replicated),
                isinstance(plan, ColumnWise),
            )
            for table, plan in zip(shards.tables, shards.plans, strict=True)
        ]

    def saved_over(self) -> Over:
        """Return the ranks over which the tables are split."""
        name, ranks = self.shards.name, self.shards.ranks
        return Over(name, ranks.group, partial(ranks.announce, name))

    @untraced(reason=NO_GRAPH)
    def _looked_up(self, *given: Any, **how: bool) -> tuple[Any, Ids, Tensor]:
        """Do a call's lookup, as all ranks do; return its input, its ids and the results."""
        if isinstance(given[0], Ahead):
            self.shards.refuse_export()
            return given[0].look_up(self.shards, self, *given[1:], **how)
        return self.shards.look_up(self, *given, **how)


class ShardedEmbeddingBagCollection(Sharded, EmbeddingBagCollection):
    """An :class:`EmbeddingBagCollection` whose tables are split over ranks, made by :func:`shard`."""


class ShardedEmbeddingCollection(Sharded, EmbeddingCollection):
    """An :class:`EmbeddingCollection` whose tables are split over ranks, made by :func:`shard`."""


class _ShardedTable(Sharded):
    num_embeddings: int

    def _num_rows(self) -> int:
        return self.num_embeddings


class ShardedEmbedding(_ShardedTable, Embedding):
    """An :class:`Embedding` whose table is split over ranks, made by :func:`shard`."""

    @untraced(reason=NO_GRAPH)
    def forward(self, input: Tensor) -> Tensor:
        """Look up ``input``, as all ranks do in the same call."""
        x, _, rows = self._looked_up(input)
        return self.output_of(x, rows.view(-1, self.embedding_dim))


class ShardedEmbeddingBag(_ShardedTable, EmbeddingBag):
    """An :class:`EmbeddingBag` whose table is split over ranks, made by :func:`shard`."""

    @untraced(reason=NO_GRAPH)
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool the bags of ``input``, as all ranks do in the same call."""
        return self._looked_up(input, offsets, per_sample_weights)[2]


class ShardedEmbeddingVariable(Sharded, EmbeddingVariable):
    """
    An :class:`EmbeddingVariable` whose keys are split over ranks, made by :func:`shard`.

    ``export``, ``total_count``, ``stats``, ``insert``, ``erase``, ``evict`` and ``global_step`` are of this rank's
    keys. The ``global_step`` of a ``TableWise`` variable stays 0 on ranks that do not have it.

    Where a rank has no room for the keys of a step, all ranks raise. Others may then have inserted and counted keys of
    that call: end the run or load a checkpoint.
    """

    @untraced(reason=NO_GRAPH)
    def forward(self, input: Tensor) -> Tensor:
        """Look up ``input``, as all ranks do in the same call."""
        x, _, rows = self._looked_up(input)
        return self.output_of(x, rows.view(-1, self.embedding_dim))


SHARDED: dict[type, Any] = {
    Embedding: ShardedEmbedding,
    EmbeddingBag: ShardedEmbeddingBag,
    EmbeddingBagCollection: ShardedEmbeddingBagCollection,
    EmbeddingCollection: ShardedEmbeddingCollection,
    EmbeddingVariable: ShardedEmbeddingVariable,
}
