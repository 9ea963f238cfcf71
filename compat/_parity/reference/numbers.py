"""The operators' numbers of reductions, and the wide floats that references compute in."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The numbers of the reductions of segments and of bags.
SUM, MEAN, SQRTN, MAX, MIN, PROD = range(6)


def accumulator(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def wide(x: Tensor) -> np.ndarray:
    """Return a tensor as an array, floats in more precision than float64 if the machine has such a type."""
    if x.is_complex():
        return x.numpy().astype(np.clongdouble)
    return (x.to(torch.float64) if x.is_floating_point() else x).numpy().astype(np.longdouble)


def narrow(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return an array as a tensor rounded to ``dtype``, half types by way of float32."""
    if dtype.is_complex:
        return torch.from_numpy(np.asarray(x).astype(str(dtype).removeprefix("torch.")))
    with np.errstate(over="ignore"):
        double = torch.from_numpy(np.asarray(x.astype(np.float64)))
    return (double.to(torch.float32) if dtype.itemsize == 2 else double).to(dtype)


def _is_wide(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def on_tensors(function: Callable) -> Callable:
    """
    Make a function of arrays take tensors too: floats are widened, and floats of the results rounded once.

    Results are rounded to the dtype of the first floats among the arguments.
    """

    def array(x: Any) -> Any:
        if isinstance(x, list):
            return [array(item) for item in x]
        return (wide(x.detach()) if _is_wide(x) else x.numpy()) if isinstance(x, Tensor) else x

    @wraps(function)
    def wrapper(*arguments: Any) -> Any:
        flat = [x for given in arguments for x in (given if isinstance(given, list) else [given])]
        with np.errstate(all="ignore"):
            if not any(isinstance(x, Tensor) for x in flat):
                return function(*arguments)
            result = function(*map(array, arguments))
        dtype = next((x.dtype for x in flat if _is_wide(x)), torch.float32)

        def tensor(x: np.ndarray) -> Tensor:
            return narrow(x, dtype) if x.dtype.kind in "fc" else torch.from_numpy(x)

        return tuple(map(tensor, result)) if isinstance(result, tuple) else tensor(result)

    return wrapper
