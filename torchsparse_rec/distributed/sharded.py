"""Modules whose tables are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from .._torch import untraced
from ..jagged import JaggedTensor, KeyedTensor
from ..nn import Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingCollection, EmbeddingVariable
from ..nn.collection import Collection
from ..nn.plan import Ids
from ..ops.embedding import with_last_offset
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
    """What all sharded modules have."""

    _shards: Shards


class _ShardedCollection(Sharded, Collection):
    @untraced(reason=NO_GRAPH)
    def _look_up(self, places: list[int], ids: Ids, lengths: Sequence[int] | None = None) -> Tensor:
        return self._shards.look_up(self, places, ids)


class ShardedEmbeddingBagCollection(_ShardedCollection, EmbeddingBagCollection):
    """An :class:`EmbeddingBagCollection` whose tables are split over ranks, made by :func:`shard`."""

    def forward(self, features: Any) -> KeyedTensor:
        """Look up and pool ``features``, as all ranks do in the same call."""
        with self._shards.told(self.training, features) as given:
            return super().forward(*given)

    def lookup(self, features: Any) -> dict[str, Tensor]:
        """Look up and pool features, which may have different batch sizes, as all ranks do in the same call."""
        with self._shards.told(self.training, features) as given:
            return super().lookup(*given)


class ShardedEmbeddingCollection(_ShardedCollection, EmbeddingCollection):
    """An :class:`EmbeddingCollection` whose tables are split over ranks, made by :func:`shard`."""

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Look up ``features``, as all ranks do in the same call."""
        with self._shards.told(self.training, features) as given:
            return super().forward(*given)


class _ShardedTable(Sharded):
    num_embeddings: int

    def _bare_table(self) -> None:
        """Return None: all ranks take part in each lookup."""

    def _num_rows(self) -> int:
        return self.num_embeddings


class ShardedEmbedding(_ShardedTable, Embedding):
    """An :class:`Embedding` whose table is split over ranks, made by :func:`shard`."""

    @untraced(reason=NO_GRAPH)
    def forward(self, input: Tensor) -> Tensor:
        """Look up ``input``, as all ranks do in the same call."""
        with self._shards.told(self.training, input) as given:
            return super().forward(*given)

    def _look_up(self, weight: Parameter, input: Tensor) -> Tensor:
        ids = Ids(input.reshape(-1), None, None, (input.numel(),), False)
        return self._shards.look_up(self, [0], ids).view(*input.shape, self.embedding_dim)


class ShardedEmbeddingBag(_ShardedTable, EmbeddingBag):
    """An :class:`EmbeddingBag` whose table is split over ranks, made by :func:`shard`."""

    @untraced(reason=NO_GRAPH)
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool the bags of ``input``, as all ranks do in the same call."""
        with self._shards.told(self.training, input, offsets, per_sample_weights) as given:
            return super().forward(*given)

    def _look_up(
        self, weight: Parameter, ids: Tensor, offsets: Tensor, weights: Tensor | None, include_last: bool
    ) -> Tensor:
        ends = with_last_offset(offsets, ids.shape[0], include_last)
        return self._shards.look_up(self, [0], Ids(ids, ends, weights, (ends.shape[0] - 1,), True))


class ShardedEmbeddingVariable(Sharded, EmbeddingVariable):
    """
    An :class:`EmbeddingVariable` whose keys are split over ranks, made by :func:`shard`.

    ``export``, ``total_count``, ``stats``, ``insert``, ``erase`` and ``evict`` are of this rank's keys, and so is
    ``global_step``: of a ``TableWise`` variable it stays 0 on ranks that do not have it.

    Where a rank has no room for the keys of a step, all ranks raise, when others may have inserted and counted keys of
    that call: end the run or load a checkpoint.
    """

    @untraced(reason=NO_GRAPH)
    def forward(self, input: Tensor) -> Tensor:
        """Look up ``input``, as all ranks do in the same call."""
        with self._shards.told(self.training, input) as given:
            return super().forward(*given)

    def _look_up(self, ids: Tensor) -> Tensor:
        return self._shards.look_up(self, [0], Ids(ids, None, None, (len(ids),), False)).view(-1, self.embedding_dim)


SHARDED: dict[type, Any] = {
    Embedding: ShardedEmbedding,
    EmbeddingBag: ShardedEmbeddingBag,
    EmbeddingBagCollection: ShardedEmbeddingBagCollection,
    EmbeddingCollection: ShardedEmbeddingCollection,
    EmbeddingVariable: ShardedEmbeddingVariable,
}
