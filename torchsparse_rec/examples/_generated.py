"""What the generators of examples share: skewed ids, and each id's effect on the label in a hidden model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

B = TypeVar("B")

ZIPF_EXPONENT = 1.05

_MASK = (1 << 31) - 1


class Generator(ABC, Generic[B]):
    """
    A generator of examples: the base of frozen dataclasses, whose ``repr`` tells one from another.

    A batch depends on the arguments and its number alone.
    """

    batch_size: int
    seed: int

    @abstractmethod
    def batch(self, number: int) -> B:
        """Return the batch of a number, at least 0."""

    def batches(self, first: int, last: int) -> Iterator[B]:
        """Yield the batches of the numbers from ``first`` up to, without, ``last``."""
        return (self.batch(number) for number in range(first, last))

    def random(self, number: int) -> torch.Generator:
        """Return the generator of a batch's random numbers."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + number * 2 + 1) % (1 << 63))

    def check_positive(self, *names: str) -> None:
        """Raise ``ValueError`` if one of these arguments is below 1."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def zipf(drawn: Tensor, rows: int | Tensor) -> Tensor:
    """
    Return ids in ``[0, rows)``, id ``i`` about as often as ``(i + 1) ** -1.05``.

    Args:
        drawn: uniform in ``[0, 1)``, float64. It is overwritten.
        rows: a number, or a tensor that goes with ``drawn`` by broadcasting.

    Returns:
        int64, in the shape of ``drawn``.

    Example:
        >>> zipf(torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64), 100)
        tensor([ 0,  7, 99])
    """
    # The inverse of the distribution function of x ** -1.05 on [1, rows + 1).
    power = 1.0 - ZIPF_EXPONENT
    ids = drawn.mul_((rows + 1.0) ** power - 1.0).add_(1.0).pow_(1.0 / power).to(torch.int64).sub_(1)
    return ids.clamp_(torch.zeros_like(rows), rows - 1) if isinstance(rows, Tensor) else ids.clamp_(0, rows - 1)


def effects(ids: Tensor, feature: int | Tensor) -> Tensor:
    """Return each id's effect on the hidden model's logit: a hash of id and feature, float32 uniform in ``[-1, 1)``."""
    mixed = (ids & _MASK) * 0x5BD1E995 + (feature + 1) * 0x27D4EB2F
    mixed = ((mixed >> 15) ^ mixed) & _MASK
    mixed = mixed * 0x2C1B3C6D
    mixed = ((mixed >> 12) ^ mixed) & _MASK
    return mixed.to(torch.float32) * (2.0 / _MASK) - 1.0
