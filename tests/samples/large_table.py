"""Large sample inputs of the family ``table``."""

from __future__ import annotations

from functools import partial

import torch
from samples import table
from samples.large_sizes import Build
from samples.sample import Family, Random, Sample
from torch import Tensor

from torchsparse_rec import ops

_KEYS, _IDS, _DIM = 30_000, 70_000, 6


def _state(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    entries, counters = torch.full((4 * _KEYS, 2), -1), torch.zeros(8, dtype=torch.int64)
    state = ops.table_rehash(entries, counters, _KEYS // 3), entries, counters, torch.empty(0, dtype=torch.int32)
    ops.table_find_or_insert_(*state, _ids(seed)[:_KEYS], version=3, count=True)
    return state


def _ids(seed: int) -> Tensor:
    return Random(seed).integers(-_KEYS, _KEYS, _IDS, dtype=torch.int64) * (2**40 + 1)


def _sample(operator: str) -> Sample:
    return Sample(operator, "large", _arguments(operator))


def _arguments(operator: str) -> tuple:
    state, ids = _state(1), _ids(2)
    weight = Random(3).floats(4 * _KEYS, _DIM, dtype=torch.float32)
    values = Random(4).floats(100, _DIM, dtype=torch.float32)
    rows = Random(5).integers(-5, 4 * _KEYS, _IDS, dtype=torch.int64)
    return {
        "table_find": (*state[:2], ids),
        "table_find_or_insert_": (*state, ids, None, None, 7, True),
        "table_erase_": (*state[:2], ids, None),
        "table_rehash": (*state[1:3], _KEYS // 2, 0),
        "table_initialize_": (weight, rows.unique(), ids[: len(rows.unique())], values, 0, [0.0], 1),
        "table_lookup": (*state[:2], weight, ids, None, values, 0, [0.0], 1),
        "table_assign_": (weight, rows, Random(6).floats(_IDS, _DIM, dtype=torch.float32)),
        "tables_find_or_insert_": (
            *([mine, other] for mine, other in zip(state, _state(8), strict=True)),
            ids,
            [0, _IDS // 2],
            [_IDS // 3, _IDS],
            [7, 8],
            True,
        ),
        "count_min_sketch_": (torch.zeros(50_000, dtype=torch.int32), ids, None, 4, True),
    }[operator]


# One call of each operator: half of the ids are in the table, and most come several times.
FAMILY = Family(
    large=[Build(f"{name}-of_{_IDS}_keys", partial(_sample, name)) for name in table.FAMILY.samples],
)
