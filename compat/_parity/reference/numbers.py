"""What references share: the numbers of reductions, and the floats that they compute in."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Of segments and of bags.
SUM, MEAN, SQRTN, MAX, MIN, PROD = range(6)


def accumulator(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def wide(x: Tensor) -> np.ndarray:
    """More precise than float64 where the machine has such a type."""
    if x.is_complex():
        return x.numpy().astype(np.clongdouble)
    return (x.to(torch.float64) if x.is_floating_point() else x).numpy().astype(np.longdouble)


def narrow(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Rounded to ``dtype``, half types by way of float32."""
    if dtype.is_complex:
        return torch.from_numpy(x.astype(str(dtype).removeprefix("torch.")))
    double = torch.from_numpy(np.asarray(x.astype(np.float64)))
    return (double.to(torch.float32) if dtype.itemsize == 2 else double).to(dtype)
