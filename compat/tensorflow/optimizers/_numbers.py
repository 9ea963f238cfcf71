"""
Hyperparameters in the dtype of a parameter, with TensorFlow's roundings.

TensorFlow turns a Python number into a float32 tensor and casts that, also where the parameter is float64: 0.9 becomes
0.8999999761581421. A training that continues unchanged must have the same numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def rounded(value: float, dtype: torch.dtype) -> float:
    """Return the nearest number of ``dtype``."""
    return torch.tensor(value, dtype=dtype).item()


def cast(value: Any, dtype: torch.dtype) -> float:
    """Compute ``tf.cast`` of a number: Python's become float32 first; tensors and numpy's keep their precision."""
    if not isinstance(value, (Tensor, np.generic, np.ndarray)):
        value = rounded(value, torch.float32)
    return rounded(float(value), dtype)


def power(base: float, exponent: int, dtype: torch.dtype) -> float:
    """Compute ``tf.pow`` of two scalars of ``dtype``; ``base`` is rounded to it already."""
    return rounded(base ** rounded(exponent, dtype), dtype)


def adam_rate(lr: float, beta1_power: float, beta2_power: float, dtype: torch.dtype) -> float:
    """Return ``lr * sqrt(1 - beta2_power) / (1 - beta1_power)``, each operation rounded to ``dtype``."""
    rate, power1, power2 = (torch.tensor(x, dtype=dtype) for x in (lr, beta1_power, beta2_power))
    return (rate * (1 - power2).sqrt() / (1 - power1)).item()
