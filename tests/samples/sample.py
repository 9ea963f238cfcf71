"""One sample call of an operator, and the seeded numbers that samples are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchsparse_rec.compat._parity.reference import MEAN, SQRTN, SUM

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INDICES = (torch.int64, torch.int32)
DIMENSIONS = (1, 3, 8, 17, 64, 130)
REDUCTIONS = {SUM: "sum", MEAN: "mean", SQRTN: "sqrtn"}


def tensors_of(argument: object) -> list[Tensor]:
    """Return the tensors of an argument: itself, or those of a list."""
    if isinstance(argument, Tensor):
        return [argument]
    return [x for x in argument if isinstance(x, Tensor)] if isinstance(argument, list) else []


def map_tensors(change: Callable[[Tensor], Tensor], argument: object) -> object:
    """Return an argument with its tensors changed, also those in a list."""
    if isinstance(argument, Tensor):
        return change(argument)
    return [map_tensors(change, x) for x in argument] if isinstance(argument, list) else argument


@dataclass(frozen=True)
class Sample:
    """One call of an operator: its arguments in the schema's order."""

    operator: str
    name: str
    arguments: tuple
    # Small, and different enough from its neighbours to be worth the slow checks too (opcheck).
    representative: bool = False

    def __str__(self) -> str:
        return f"{self.operator}-{self.name}"

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Sample:
        """Return the same call with its tensors changed, also those in lists."""
        return replace(self, arguments=tuple(map_tensors(change, x) for x in self.arguments))

    def to(self, device: str) -> Sample:
        """Return the same call on another device, in tensors of its own."""
        return self.map_tensors(lambda x: x.to(device, copy=True))


class Random:
    """A generator of seeded numbers."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def floats(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype)

    def weights(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return quarters from -1 to 2, also zeros: their sums are exact in every dtype, so that zero sums are zero."""
        return self.integers(-4, 9, size, dtype=torch.int64).to(dtype) / 4
