"""Slow, obvious references of the operators of the family ``route``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

_WORD = 2**64 - 1


def _homes(blocks: int, ranks: int) -> list[tuple[int, int, int]]:
    """Return of each block its rank, how many that has, and which of them it is: as torch.chunk deals them."""
    chunks = torch.arange(blocks).chunk(ranks)
    return [(rank, len(own), place) for rank, own in enumerate(chunks) for place in range(len(own))]


def _dealt(
    ids: Tensor, starts: Sequence[int], ranks: int, distinct: bool, home: Callable[[int, int], tuple[int, int]]
) -> tuple[list[int], list[int], Tensor, Tensor]:
    """Return the results of ``home(table, id) -> (rank, what is sent)`` for ids, their occurrences, counts, places."""
    asked: list[list[list]] = [[[] for _ in starts[1:]] for _ in range(ranks)]
    given = ids.tolist()
    for table, (begin, end) in enumerate(pairwise(starts)):
        for i in range(begin, end):
            rank, sent = home(table, given[i])
            mine = asked[rank][table]
            same = [positions for known, positions in mine if known == sent] if distinct else []
            if same:
                same[0].append(i)
            else:
                mine.append((sent, [i]))
    flat = [entry for of_rank in asked for of_table in of_rank for entry in of_table]
    places = torch.zeros(len(given), dtype=torch.int64)
    for place, (_, positions) in enumerate(flat):
        places[positions] = place
    counts = [[len(of_table) for of_table in of_rank] for of_rank in asked]
    return (
        [sent for sent, _ in flat],
        [len(positions) for _, positions in flat],
        torch.tensor(counts, dtype=torch.int64).view(ranks, len(starts) - 1),
        places,
    )


def route(
    ids: Tensor, starts: Sequence[int], sizes: Sequence[int], blocks: Sequence[int], ranks: int, distinct: bool
) -> tuple[Tensor, Tensor, Tensor]:
    homes = {count: _homes(count, ranks) for count in blocks}

    def home(table: int, v: int) -> tuple[int, int]:
        count = blocks[table]
        bits = count.bit_length() - 1
        rank, own, place = homes[count][int(f"{v % count:0{bits}b}"[::-1], 2) if bits else 0]
        return rank, v // count * own + place

    sent, _, counts, places = _dealt(ids, starts, ranks, distinct, home)
    return torch.tensor(sent, dtype=torch.int32), counts, places


def route_keys(
    keys: Tensor, starts: Sequence[int], ranks: int, distinct: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    homes = _homes(4096, ranks)

    def home(table: int, key: int) -> tuple[int, int]:
        x = key & _WORD
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
        return homes[(x ^ x >> 31) & 4095][0], key

    sent, occurrences, counts, places = _dealt(keys, starts, ranks, distinct, home)
    return torch.tensor(sent, dtype=keys.dtype), torch.tensor(occurrences, dtype=torch.int32), counts, places


FUNCTIONS = (route, route_keys)
