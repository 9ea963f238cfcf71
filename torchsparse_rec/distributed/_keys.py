"""Lookups in tables that grow and are split by a hash of the key: the rank of a key, and the requests to it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..nn.plan import Ids
from ..ops.route import route_keys
from ._rows import RowShards
from .exchange import Asked

__all__ = ["Keys", "is_of_rank"]


def is_of_rank(keys: Tensor, rank: int, ranks: int) -> Tensor:
    """Say which of some keys, ``[N]``, a rank has, ``[N]`` bool."""
    _, _, counts, places = route_keys(keys, [0, len(keys)], ranks, distinct=False)
    end = int(counts[: rank + 1].sum())
    return (places >= end - int(counts[rank].sum())) & (places < end)


class Keys(RowShards):
    """
    Tables that grow, of one dim and dtype, whose keys are split over ranks.

    A key travels once, with how often it occurs: the rank that has it counts all of them, as one process does, before
    it finds or makes rows.
    """

    grows = True

    def ask(self, ids: Ids, places: Sequence[int]) -> Asked:
        """Return this rank's request of keys; see :class:`RowShards`. All keys are legal."""
        ids, _, starts = self._own_ids(ids, places)
        keys, occurrences, counts, where = route_keys(ids.indices.long(), starts, self.ranks, self._merge)
        return self._asked([keys, occurrences] if self._merge else [keys], counts, ids, where)
