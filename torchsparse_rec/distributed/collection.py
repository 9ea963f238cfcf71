"""Collections whose tables are split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..jagged import JaggedTensor, KeyedTensor
from ..nn import EmbeddingBagCollection, EmbeddingCollection
from ..nn.collection import Collection
from ..nn.plan import Ids
from .shards import Shards

__all__ = ["Sharded", "ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection"]


class Sharded(Collection):
    """What both sharded collections do."""

    _shards: Shards

    @torch.compiler.disable(reason="a lookup in tables of several ranks cannot be part of a graph")
    def _look_up(self, places: list[int], ids: Ids, lengths: Sequence[int] | None = None) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self._check_fused()
        return self._shards.look_up(places, ids, self._stored_weights(), self.training, self._look_up_tables)


class ShardedEmbeddingBagCollection(Sharded, EmbeddingBagCollection):
    """An :class:`EmbeddingBagCollection` whose tables are split over ranks, made by :func:`shard`."""

    def forward(self, features: Any) -> KeyedTensor:
        """Look up and pool ``features``, as all ranks do in the same call."""
        with self._shards.told(self.training):
            return super().forward(features)

    def lookup(self, features: Any) -> dict[str, Tensor]:
        """Look up and pool features, which may have different batch sizes, as all ranks do in the same call."""
        with self._shards.told(self.training):
            return super().lookup(features)


class ShardedEmbeddingCollection(Sharded, EmbeddingCollection):
    """An :class:`EmbeddingCollection` whose tables are split over ranks, made by :func:`shard`."""

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Look up ``features``, as all ranks do in the same call."""
        with self._shards.told(self.training):
            return super().forward(features)
