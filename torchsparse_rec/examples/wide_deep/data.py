"""Generated examples: a label, 10 numbers, 37 features of one id and 3 of ten, by a model that can be learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _generated
from .._generated import effects, zipf

NUMBERS = tuple(f"number_{n}" for n in range(10))
TEN_HOT = tuple(f"ten_hot_{n}" for n in range(3))
ONE_HOT = tuple(f"one_hot_{n}" for n in range(37))
LABEL = "label"
#: Ids of each categorical feature in an example.
HOTS = {**dict.fromkeys(TEN_HOT, 10), **dict.fromkeys(ONE_HOT, 1)}
DISTRIBUTIONS = ("uniform", "zipf")

# Standard deviations of what numbers and ids add to the hidden model's logit.
_OF_NUMBERS, _OF_IDS = 1.0, 1.5


class Batch(NamedTuple):
    """Labels, float32 ``[B]``, and the raw columns as :class:`torchsparse_rec.features.FeatureTransform` takes them."""

    labels: Tensor
    columns: Mapping[str, Any] | Any

    @property
    def size(self) -> int:
        """The number of examples."""
        return self.labels.shape[0]

    def rows(self, begin: int, end: int) -> Batch:
        """Return the batch of the examples from ``begin`` up to, without, ``end``."""
        columns = self.columns
        if isinstance(columns, Mapping):
            return Batch(self.labels[begin:end], {name: column[begin:end] for name, column in columns.items()})
        return Batch(self.labels[begin:end], columns.slice(begin, end - begin))


@dataclass(frozen=True)
class Generator(_generated.Generator[Batch]):
    """
    A generator of examples.

    Args:
        rows: raw ids are in ``[0, rows)``.
        batch_size: examples in a batch.
        distribution: of ids: ``"uniform"``, or ``"zipf"``: id ``i`` about as often as ``(i + 1) ** -1.05``.
        seed: of the generator.

    Example:
        >>> batch = Generator(rows=100, batch_size=4).batch(0)
        >>> batch.size, len(batch.columns), batch.columns["ten_hot_0"].shape
        (4, 50, torch.Size([4, 10]))
    """

    rows: int
    batch_size: int
    distribution: str = "uniform"
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_positive("rows", "batch_size")
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {self.distribution!r}")

    def batch(self, number: int) -> Batch:
        """Return the batch of a number, at least 0."""
        random = self.random(number)
        numbers = torch.randn(len(NUMBERS), self.batch_size, generator=random)
        ids = self._ids(self.batch_size * sum(HOTS.values()), random)
        parts = ids.split([self.batch_size * hot for hot in HOTS.values()])
        columns: dict[str, Tensor] = dict(zip(NUMBERS, numbers.unbind(0), strict=True))
        for (name, hot), part in zip(HOTS.items(), parts, strict=True):
            columns[name] = part if hot == 1 else part.view(self.batch_size, hot)
        chance = torch.sigmoid(self._logits(numbers, columns))
        labels = (torch.rand(self.batch_size, generator=random) < chance).to(torch.float32)
        return Batch(labels, columns)

    def _ids(self, count: int, random: torch.Generator) -> Tensor:
        if self.distribution == "uniform":
            return torch.randint(self.rows, (count,), generator=random)
        return zipf(torch.rand(count, generator=random, dtype=torch.float64), self.rows)

    def _logits(self, numbers: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        weights = effects(torch.arange(len(NUMBERS)), -1)
        logits = (weights * (_OF_NUMBERS / weights.norm())) @ numbers
        # A number uniform in [-1, 1) has the variance 1/3, and the sum of a feature's k ids is divided by sqrt(k).
        scale = _OF_IDS * (3.0 / len(HOTS)) ** 0.5
        for feature, (name, hot) in enumerate(HOTS.items()):
            found = effects(columns[name], feature)
            logits += scale * (found if hot == 1 else found.sum(1) / hot**0.5)
        return logits
