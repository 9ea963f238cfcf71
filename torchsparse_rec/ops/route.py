"""
Family ``route``: which rank has the row of each id, where a table's rows are split over ranks.

Contract: csrc/route.h. Kernels: csrc/cpu/route.cpp, csrc/cuda/route.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .autograd import not_differentiable

__all__ = ["route", "route_keys"]


class Route(NamedTuple):
    """The result of :func:`route`."""

    #: Rows, ``[U]`` int32, as their ranks keep them: rank by rank, in each table by table.
    rows: Tensor
    #: How many rows of each table are of each rank, ``[ranks, T]`` int64, on the CPU.
    counts: Tensor
    #: For each id the position of its row in ``rows``, ``[N]`` int64.
    places: Tensor


class RouteKeys(NamedTuple):
    """The result of :func:`route_keys`."""

    #: Keys, ``[U]``, dtype of the input: rank by rank, in each table by table.
    keys: Tensor
    #: How often each of them occurs, ``[U]`` int32.
    occurrences: Tensor
    #: How many keys of each table are of each rank, ``[ranks, T]`` int64, on the CPU.
    counts: Tensor
    #: For each key of the input its position in ``keys``, ``[N]`` int64.
    places: Tensor


def route(
    ids: Tensor, starts: Sequence[int], sizes: Sequence[int], blocks: Sequence[int], ranks: int, distinct: bool = True
) -> Route:
    """
    Find the ranks and the rows there of ids, in tables whose rows are split over ranks in blocks.

    A table of ``S`` blocks has row ``v`` in block ``reverse(v % S)``, which turns the ``log2(S)`` bits of a number
    round, at place ``v // S``. Each of ``W`` ranks has ``ceil(S / W)`` consecutive blocks, the last ones fewer or none.
    A rank with ``b`` blocks from block ``s`` on keeps row ``v`` as its row ``(v // S) * b + block - s``. With one block
    rank 0 has the unchanged table. Not differentiable.

    Args:
        ids: row numbers, ``[N]``, int32 or int64, fewer than 2^31: first for table 0, then for table 1, and so on.
        starts: the start of the ids of each of ``T`` tables, and the end of all: ``T + 1`` numbers from 0 to ``N``.
        sizes: rows of each table, ``T`` numbers below 2^31.
        blocks: blocks of each table, ``T`` powers of two in ``[1, 4096]``.
        ranks: the number of ranks over which the tables are split.
        distinct: whether to name a row of a table once, in the order of first appearance; False: once for each of its
            ids.

    Returns:
        A tuple ``(rows, counts, places)``. ``rows``, ``[U]`` int32, are the rows of rank 0 (of table 0, of table 1,
        ...), of rank 1, and so on. ``counts``, ``[ranks, T]`` int64 and always on the CPU, are their numbers by table.
        ``places``, ``[N]`` int64, are the positions of the ids' rows in ``rows``.

    Raises:
        IndexError: if an id is outside its table; the first such id is named.
        ValueError: if ``ids`` is not a vector of int32 or int64, or starts, sizes, blocks or ranks are not as above.

    On CUDA it waits for the device, so CUDA graphs cannot capture it.

    Source: this library's tables over several ranks.

    Example:
        >>> rows, counts, places = route(torch.tensor([7, 0, 7, 1, 2]), [0, 3, 5], [32, 3], [2, 1], ranks=2)
        >>> rows, counts
        (tensor([0, 1, 2, 3], dtype=torch.int32), tensor([[1, 2],
                [1, 0]]))
        >>> places
        tensor([3, 0, 3, 1, 2])
    """
    return Route(*torch.ops.torchsparse_rec.route.default(ids, starts, sizes, blocks, ranks, distinct))


def route_keys(keys: Tensor, starts: Sequence[int], ranks: int, distinct: bool = True) -> RouteKeys:
    """
    Find the ranks of keys, in tables that grow and are split over ranks by a hash of the key.

    Each table has 4,096 blocks, split over ranks as in :func:`route`. A key's block is the low 12 bits of SplitMix64's
    finalizer of it, so keys that share low bits fall evenly. Not differentiable.

    Args:
        keys: any numbers, ``[N]``, int32 or int64, fewer than 2^31: first for table 0, then for table 1, and so on.
        starts: the start of the keys of each of ``T`` tables, and the end of all: ``T + 1`` numbers from 0 to ``N``.
        ranks: the number of ranks over which the tables are split.
        distinct: whether to name a key of a table once, in the order of first appearance; False: as often as it occurs.

    Returns:
        A tuple ``(keys, occurrences, counts, places)``. The first has the keys ``[U]`` of rank 0 (of table 0, of table
        1, ...), of rank 1, and so on, with the dtype of ``keys``. ``occurrences``, ``[U]`` int32, is how often each
        occurs, ones without ``distinct``. ``counts`` and ``places`` are as in :func:`route`.

    Raises:
        ValueError: if ``keys`` is not a vector of int32 or int64, or starts or ranks are not as above.

    On CUDA it waits for the device, so CUDA graphs cannot capture it.

    Source: this library's tables over several ranks; Steele, Lea, Flood, "Fast splittable pseudorandom number
    generators" (2014).

    Example:
        >>> keys, occurrences, counts, places = route_keys(torch.tensor([7, 3, 7, 5, 8]), [0, 3, 5], ranks=2)
        >>> keys, occurrences
        (tensor([5, 7, 3, 8]), tensor([1, 2, 1, 1], dtype=torch.int32))
        >>> counts, places
        (tensor([[0, 1],
                [2, 1]]), tensor([1, 2, 1, 0, 3]))
    """
    return RouteKeys(*torch.ops.torchsparse_rec.route_keys.default(keys, starts, ranks, distinct))


@torch.library.register_fake("torchsparse_rec::route")
def _route_fake(
    ids: Tensor, starts: Sequence[int], sizes: Sequence[int], blocks: Sequence[int], ranks: int, distinct: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, counts, places = _fake(ids, starts, ranks, distinct)
    return rows.new_empty(rows.shape, dtype=torch.int32), counts, places


@torch.library.register_fake("torchsparse_rec::route_keys")
def _route_keys_fake(
    keys: Tensor, starts: Sequence[int], ranks: int, distinct: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sent, counts, places = _fake(keys, starts, ranks, distinct)
    return sent, sent.new_empty(sent.shape, dtype=torch.int32), counts, places


def _fake(ids: Tensor, starts: Sequence[int], ranks: int, distinct: bool) -> tuple[Tensor, Tensor, Tensor]:
    sent = torch.library.get_ctx().new_dynamic_size() if distinct else ids.shape[0]
    counts = torch.empty(ranks, len(starts) - 1, dtype=torch.int64, device="cpu")
    return ids.new_empty(sent), counts, ids.new_empty(ids.shape, dtype=torch.int64)


not_differentiable("route", "route_keys")
