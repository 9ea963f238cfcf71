"""Sizes that use several threads and cross those at which kernels change their algorithms, and numbers for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Build:
    """A function that makes a sample, with a name."""

    name: str
    function: Callable

    def __call__(self):
        return self.function()


@dataclass(frozen=True)
class Size:
    """The numbers of rows, ids, segments (or bags) and columns of a sample, and how its ids are distributed."""

    rows: int
    items: int
    segments: int
    dim: int
    spread: str = "uniform"
    dtype: torch.dtype = torch.float32
    index: torch.dtype = torch.int64

    def __str__(self) -> str:
        kind = f"{self.dtype}_{self.index}".replace("torch.", "")
        return f"{self.rows}x{self.dim}_{self.items}_ids_{self.segments}_segments_{self.spread}_{kind}"


SIZES = (
    Size(1, 0, 1, 3),
    Size(1, 1, 1, 1),
    Size(1, 300_000, 1, 1),
    Size(1, 50_000, 7, 17, index=torch.int32),
    Size(2_000_000, 300_000, 300_000, 1, spread="zipf", index=torch.int32),
    Size(2_000_000, 1_000, 100, 3, spread="ends"),
    Size(100_000, 300_000, 30_000, 8, spread="zipf"),
    Size(100_000, 65_537, 5_000, 9, spread="zipf", dtype=torch.bfloat16),
    Size(50_000, 100_000, 3, 8, index=torch.int32),
    Size(5_000, 20_000, 20_000, 17, dtype=torch.float16),
    Size(5_000, 30_000, 6_000, 64, spread="one"),
    Size(1_000, 5_000, 1_000, 512, spread="zipf"),
    Size(1_000, 5_000, 10, 130, dtype=torch.float64),
    Size(1_025, 4_097, 4_097, 65, index=torch.int32),
)
# Sizes with long segments, one row for all ids, popular rows, half types, or wide rows; their tables are not large.
CHOSEN = [size for size in SIZES if size.items >= 5_000 and size.rows < 2_000_000]


def generator_of(size: Size) -> torch.Generator:
    return torch.Generator().manual_seed(size.rows * 7 + size.items + size.dim)


def ids_of(size: Size) -> Tensor:
    """Return ids: uniform, Zipf (a few rows take most ids), all one row, or only the first and the last row."""
    generator = generator_of(size)
    uniform = torch.rand(size.items, generator=generator, dtype=torch.float64)
    if size.spread == "zipf":
        # The density of 1 / rank over [1, rows + 1), spread over the table by a multiplication.
        ranks = ((size.rows + 1.0) ** uniform).long() - 1
        picked = ranks * 7919 % size.rows
    elif size.spread == "one":
        picked = torch.full((size.items,), size.rows // 2)
    elif size.spread == "ends":
        picked = (uniform < 0.5).long() * (size.rows - 1)
    else:
        picked = (uniform * size.rows).long()
    return picked.clamp_max(size.rows - 1).to(size.index)


def segment_ids_of(size: Size) -> Tensor:
    """Return sorted, uneven segment ids: a third of the entries fall in the first segments."""
    uniform = torch.rand(size.items, generator=generator_of(size), dtype=torch.float64)
    return ((uniform**1.5) * size.segments).long().sort().values.to(size.index)


def offsets_of(size: Size) -> Tensor:
    counts = torch.bincount(segment_ids_of(size).long(), minlength=size.segments)
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def floats_of(size: Size, rows: int) -> Tensor:
    return torch.randn(rows, size.dim, generator=generator_of(size)).to(size.dtype)


def whole_of(size: Size, rows: int) -> Tensor:
    """Return a tensor of -1, 0 and 1: sums of up to 2^24 of them are exact in float32."""
    return torch.randint(-1, 2, (rows, size.dim), generator=generator_of(size)).to(size.dtype)
