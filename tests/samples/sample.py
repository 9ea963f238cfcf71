"""
One sample call of an operator, what a family's file has of them, and the seeded numbers that samples are made of.

Every file of this folder that says ``FAMILY = Family(...)`` is found by itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from samples.large_sizes import Build
from torch import Tensor

from torchsparse_rec.compat._parity.reference import MEAN, SQRTN, SUM

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INDICES = (torch.int64, torch.int32)
DIMENSIONS = (1, 3, 8, 17, 64, 130)
REDUCTIONS = {SUM: "sum", MEAN: "mean", SQRTN: "sqrtn"}


def tensors_of(argument: object) -> list[Tensor]:
    """Return the tensors of an argument or result: itself, those that a COO tensor consists of, or those of a list."""
    if isinstance(argument, Tensor):
        return [argument._indices(), argument._values()] if argument.layout is torch.sparse_coo else [argument]
    return [part for x in argument for part in tensors_of(x)] if isinstance(argument, list) else []


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


# ---- What a family's file has ---------------------------------------------------------------------------------------

# A function that makes an operator's samples, given its name.
Make = Callable[[str], Iterable[Sample]]


class ReadBack(NamedTuple):
    """What an operator copies from a CUDA device to the host and waits for."""

    what: str  # in the words of the error that such a call raises while a CUDA graph is captured
    unless: str = ""  # with which arguments it reads back nothing all the same, for docs/operators.md


LAST_SEGMENT = ReadBack(
    "the last segment id, which num_segments=None asks for,", unless="with `num_segments` or `offsets`"
)
PRESENT_ROWS = ReadBack("the number of rows that have entries")


@dataclass(frozen=True)
class Family:
    """The samples of a family's operators, by operator, and what else tests must know of these."""

    samples: Mapping[str, Make] = field(default_factory=dict)
    # Of the operators that are differentiable: small float64 inputs at which they are smooth, in all of their floats.
    gradients: Mapping[str, Make] = field(default_factory=dict)
    # Of all operators that wait for the device.
    read_backs: Mapping[str, ReadBack] = field(default_factory=dict)
    # Of operators with a result that is on the CPU whatever the device: which.
    on_host: Mapping[str, int] = field(default_factory=dict)
    # Of operators with results that are less precise than their dtype: the dtype that they are as precise as.
    precision: Mapping[str, torch.dtype] = field(default_factory=dict)
    # Samples that use several threads and many blocks: built only by the test that needs one.
    large: Sequence[Build] = ()


def families() -> list[Family]:
    """Return what the files of this folder have."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    modules = [importlib.import_module(f"samples.{file.stem}") for file in files]
    return [module.FAMILY for module in modules if hasattr(module, "FAMILY")]


# ---- Numbers --------------------------------------------------------------------------------------------------------


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
