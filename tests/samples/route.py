"""Sample inputs of the family ``route``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from samples.large_sizes import Build
from samples.sample import INDICES, Family, Random, ReadBack, Sample
from torch import Tensor

# Rows, blocks and ids of each table: tables of one block, of all blocks, without ids, without rows; a row number that
# fills 31 bits; more rows than four for each id of the call, to which the CPU gives no slots by row.
TABLES = [(100, 4, 50), (3000, 128, 60), (1, 1, 3), (16, 1, 5), (70000, 4096, 90), (0, 1, 0), (9, 8, 0)]
TABLES += [(5 * 10**6, 2, 60), (2**31 - 1, 4096, 40), (2, 4096, 2)]
RANKS = (1, 2, 3, 5, 64, 5000)


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Return where each of so many ids begins, and the end."""
    return [sum(lengths[:t]) for t in range(len(lengths) + 1)]


def ids_of(rows: Sequence[int], lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Draw ids of tables: most are popular, that is small, and each table's last row is among them."""
    parts = []
    for t, (size, count) in enumerate(zip(rows, lengths, strict=True)):
        drawn = torch.rand(count, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        part = (drawn**8 * size).long()
        part[count // 3 : count // 3 + 1] = size - 1
        parts.append(part)
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).to(dtype)


def _arguments(dtype: torch.dtype) -> tuple[Tensor, list[int], list[int], list[int]]:
    sizes, blocks, lengths = (list(column) for column in zip(*TABLES, strict=True))
    return ids_of(sizes, lengths, dtype), starts_of(lengths), sizes, blocks


def route_samples(operator: str) -> Iterator[Sample]:
    by_hand = torch.tensor([7, 0, 7, 1, 2])
    for distinct in (True, False):
        arguments = (by_hand, [0, 3, 5], [32, 3], [2, 1], 2, distinct)
        yield Sample(operator, f"by_hand_{distinct}", arguments, representative=True)
        for dtype in INDICES:
            nothing = torch.empty(0, dtype=dtype)
            name = f"{distinct}_{dtype}".replace("torch.", "")
            yield Sample(operator, f"no_ids_{name}", (nothing, [0, 0, 0], [5, 0], [4, 1], 3, distinct))
            yield Sample(operator, f"no_tables_{name}", (nothing, [0], [], [], 3, distinct))
            for ranks in RANKS:
                yield Sample(operator, f"tables_{ranks}_{name}", (*_arguments(dtype), ranks, distinct))


def route_keys_samples(operator: str) -> Iterator[Sample]:
    by_hand = torch.tensor([7, 3, 7, 5, 8])
    for distinct in (True, False):
        yield Sample(operator, f"by_hand_{distinct}", (by_hand, [0, 3, 5], 2, distinct), representative=True)
        for dtype in INDICES:
            info = torch.iinfo(dtype)
            nothing = torch.empty(0, dtype=dtype)
            name = f"{distinct}_{dtype}".replace("torch.", "")
            yield Sample(operator, f"no_keys_{name}", (nothing, [0, 0, 0], 3, distinct))
            yield Sample(operator, f"no_tables_{name}", (nothing, [0], 3, distinct))
            keys = torch.tensor([info.max, info.min, 0, -1, info.min, 1, info.max, 0] * 20, dtype=dtype)
            keys[40:140] = Random(1).integers(-(2**31), 2**31, 60, dtype=dtype).repeat(2)[:100]
            for ranks in RANKS:
                yield Sample(operator, f"tables_{ranks}_{name}", (keys, [0, 0, 30, 31, 100, 160], ranks, distinct))


def _large(operator: str, ranks: int, distinct: bool) -> Sample:
    rows, lengths = [100_000] * 6 + [10**7], [20_000] * 6 + [1000]
    ids = ids_of(rows, lengths, torch.int64)
    tables = () if operator == "route_keys" else (rows, [4096] * 7)
    return Sample(operator, f"{ranks}_{distinct}", (ids, starts_of(lengths), *tables, ranks, distinct))


_COUNTS = ReadBack("the number of rows of each rank")
FAMILY = Family(
    samples={"route": route_samples, "route_keys": route_keys_samples},
    read_backs={"route": _COUNTS, "route_keys": _COUNTS},
    on_host={"route": 1, "route_keys": 2},
    large=[
        Build(f"{operator}-{ranks}_{distinct}", partial(_large, operator, ranks, distinct))
        for operator in ("route", "route_keys")
        for ranks in (2, 7)
        for distinct in (True, False)
    ],
)
