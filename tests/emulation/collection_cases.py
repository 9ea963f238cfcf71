"""Collections of lookups for test_embedding_collection.py, and the share of inputs and results of each lookup."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from samples.sample import Random
from torch import Tensor

from torchsparse_rec.compat._parity.reference import MAX, MEAN, SQRTN, SUM


@dataclass
class Case:
    """The arguments that the operators of the family ``embedding_collection`` share."""

    weights: list[Tensor]
    indices: Tensor
    offsets: Tensor | None
    item_weights: Tensor | None
    tables: list[int]
    keys: list[int]
    modes: list[int]
    bags: list[int]
    padding: list[int]
    side_by_side: bool

    @property
    def lists(self) -> tuple[Any, ...]:
        """The last arguments of every schema, up to side_by_side."""
        return self.tables, self.keys, self.modes, self.bags, self.padding, self.side_by_side

    def key_of_items(self, key: int) -> tuple[Tensor, int]:
        """Return the offsets of a key's bags, counted from its first item, and the position of that item."""
        first = sum(self.bags[:key])
        assert self.offsets is not None
        ends = self.offsets[first : first + self.bags[key] + 1]
        return ends - ends[0], int(ends[0])

    def lookup(self, lookup: int) -> tuple[Tensor, Tensor, Tensor | None, int]:
        """Return the ids, offsets and weights of one lookup, and the position of its first item."""
        ends, first = self.key_of_items(self.keys[lookup])
        items = slice(first, first + int(ends[-1]))
        return self.indices[items], ends, None if self.item_weights is None else self.item_weights[items], first

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Split a tensor of the output's shape into the part of each lookup."""
        dims = [self.weights[table].shape[1] for table in self.tables]
        if self.side_by_side:
            return list(flat.split(dims, dim=1))
        sizes = [self.bags[key] * dim for key, dim in zip(self.keys, dims, strict=True)]
        return [x.view(-1, dim) for x, dim in zip(flat.split(sizes), dims, strict=True)]


def make_case(
    tables: list[tuple[int, int]],
    lookups: list[tuple[int, int, int]],
    lengths: list[list[int]],
    *,
    weighted: bool = False,
    side_by_side: bool = True,
    padding: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    seed: int = 0,
) -> Case:
    """Return tables given by (rows, columns), lookups by (table, key, mode), keys by the lengths of their bags."""
    random = Random(seed)
    rows = [min((max(tables[t][0], 1) for t, k, _ in lookups if k == key), default=1) for key in range(len(lengths))]
    ids = [random.integers(0, rows[key], sum(of_key), dtype=index) for key, of_key in enumerate(lengths)]
    ends = torch.tensor([0, *accumulate(n for of_key in lengths for n in of_key)], dtype=index)
    return Case(
        [random.floats(*shape, dtype=dtype) for shape in tables],
        torch.cat(ids),
        ends,
        random.weights(int(ends[-1]), dtype) if weighted else None,
        [table for table, _, _ in lookups],
        [key for _, key, _ in lookups],
        [mode for _, _, mode in lookups],
        [len(of_key) for of_key in lengths],
        padding or [-1] * len(tables),
        side_by_side,
    )


LONG = [[3, 300, 0, 1, 129, 17], [0, 1, 2, 700, 16, 128], [1, 1, 1, 1, 1, 1], [20, 2, 140, 1, 0, 5]]
SHORT = [[n % 4 for n in range(70)], [1] * 70, [n % 3 for n in range(70)], [2, 150] + [1] * 68]
TABLES = [(50, 8), (20, 3), (9, 132), (31, 16), (6, 1)]
PLAIN = [(0, 0, SUM), (1, 1, MEAN), (2, 3, SQRTN), (3, 2, SUM), (1, 0, MEAN), (0, 3, SQRTN), (4, 1, SUM)]
WITH_MAX = [(0, 0, MAX), (1, 1, MEAN), (2, 3, MAX), (3, 2, SUM), (0, 3, SUM), (1, 1, MAX), (4, 2, MAX)]
CASES = [
    make_case(TABLES, lookups, lengths, weighted=weighted, side_by_side=side, dtype=dtype, index=index, **more)
    for lookups, lengths, weighted, side, dtype, index, more in [
        (PLAIN, LONG, False, True, torch.float32, torch.int64, {}),
        (PLAIN, LONG, True, False, torch.float32, torch.int32, {"padding": [7, -1, 9, 0, 2]}),
        (PLAIN, SHORT, True, True, torch.float64, torch.int64, {"padding": [7, -1, 9, 0, -1]}),
        (PLAIN, SHORT, False, False, torch.float16, torch.int32, {}),
        (WITH_MAX, LONG, False, False, torch.float32, torch.int64, {"padding": [7, -1, 9, 0, 2]}),
        (WITH_MAX, SHORT, False, True, torch.bfloat16, torch.int64, {}),
        (WITH_MAX, LONG, False, True, torch.float64, torch.int32, {}),
    ]
]
