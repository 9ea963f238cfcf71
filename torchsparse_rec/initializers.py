"""
Initializers of tables: distributions with the arguments of ``torch.nn.init``.

Each fills a tensor in place, with numbers from torch's generator. An :class:`~torchsparse_rec.nn.EmbeddingVariable`
takes the same distribution as a function of its seed and the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["Constant", "Normal", "TruncatedNormal", "Uniform"]


class _Initializer:
    """The base class: plain numbers as fields, and a JSON form."""

    #: TensorFlow's names of the class and of its fields.
    _tensorflow: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        vars(self).update({name: x.item() for name, x in vars(self).items() if isinstance(x, np.generic)})

    def to_config(self) -> dict[str, Any]:
        """Return plain data for JSON: the configuration of TensorFlow's initializer."""
        name, *fields = self._tensorflow
        return {"class_name": name, "config": dict(zip(fields, vars(self).values(), strict=True))}


@dataclass(frozen=True)
class Constant(_Initializer):
    """
    An initializer that gives all elements one value.

    Args:
        value: the number. Default 0.

    Example:
        >>> Constant(0.5)(torch.empty(2))
        tensor([0.5000, 0.5000])
    """

    _tensorflow = ("Constant", "value")
    value: float = 0.0

    def __call__(self, weight: Tensor) -> Tensor:
        """Fill a tensor in place, and return it."""
        return torch.nn.init.constant_(weight, self.value)


@dataclass(frozen=True)
class Uniform(_Initializer):
    """
    An initializer that draws each element from a uniform distribution.

    Args:
        low: the distribution's lower end. Default -0.05.
        high: the distribution's upper end. Default 0.05.

    Example:
        >>> Uniform(-0.1, 0.1)
        Uniform(low=-0.1, high=0.1)
    """

    _tensorflow = ("RandomUniform", "minval", "maxval")
    low: float = -0.05
    high: float = 0.05

    def __call__(self, weight: Tensor) -> Tensor:
        """Fill a tensor in place, and return it."""
        return torch.nn.init.uniform_(weight, self.low, self.high)


@dataclass(frozen=True)
class Normal(_Initializer):
    """
    An initializer that draws each element from a normal distribution.

    Args:
        mean: the mean. Default 0.
        std: the standard deviation. Default 1.

    Example:
        >>> Normal(std=0.01)
        Normal(mean=0.0, std=0.01)
    """

    _tensorflow = ("RandomNormal", "mean", "stddev")
    mean: float = 0.0
    std: float = 1.0

    def __call__(self, weight: Tensor) -> Tensor:
        """Fill a tensor in place, and return it."""
        return torch.nn.init.normal_(weight, self.mean, self.std)


@dataclass(frozen=True)
class TruncatedNormal(_Initializer):
    """
    An initializer that draws from a normal distribution, within two standard deviations of the mean.

    Args:
        mean: the mean. Default 0.
        std: the standard deviation before the truncation. Default 1.

    Source: ``tf.compat.v1.truncated_normal_initializer``.

    Example:
        >>> TruncatedNormal(std=0.01)
        TruncatedNormal(mean=0.0, std=0.01)
        >>> bool(TruncatedNormal(std=0.1)(torch.empty(1000)).abs().max() <= 0.2)
        True
    """

    _tensorflow = ("TruncatedNormal", "mean", "stddev")
    mean: float = 0.0
    std: float = 1.0

    def __call__(self, weight: Tensor) -> Tensor:
        """Fill a tensor in place, and return it."""
        low, high = self.mean - 2 * self.std, self.mean + 2 * self.std
        return torch.nn.init.trunc_normal_(weight, self.mean, self.std, low, high)
