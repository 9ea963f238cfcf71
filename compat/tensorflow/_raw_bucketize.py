"""``tf.raw_ops.Bucketize``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import ops
from ._arguments import as_tensor

_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float64)


def Bucketize(*, input: Any, boundaries: Any, name: str | None = None) -> Tensor:
    """
    Return for each number how many boundaries are not above it; NaN falls into the last bucket.

    Args:
        input: any shape; int32, int64, float32 or float64. As in TensorFlow, integers are compared as float32.
        boundaries: a list of numbers, ascending, kept as float32.
        name: ignored.

    Returns:
        The shape of ``input``, int32.

    Raises:
        TypeError: for boundaries that are not a list of numbers.
        ValueError: for boundaries that are not ascending or not numbers, and other dtypes.

    Example:
        >>> Bucketize(input=[-5, 3, 10, 1000], boundaries=[0, 10, 100])
        tensor([0, 1, 2, 3], dtype=torch.int32)
    """
    x = as_tensor("input", input)
    if x.dtype not in _DTYPES:
        raise ValueError(f"input must be int32, int64, float32 or float64, got {x.dtype}")
    if not isinstance(boundaries, (list, tuple)):
        raise TypeError(f"boundaries must be a list of numbers, got {type(boundaries).__name__}")
    limits = torch.tensor([float(boundary) for boundary in boundaries], dtype=torch.float32)
    if limits.isnan().any():
        raise ValueError(f"boundaries must be numbers, got {list(boundaries)}")
    descents = (limits.diff() < 0).nonzero()
    if descents.numel() > 0:
        position = int(descents[0]) + 1
        raise ValueError(
            f"boundaries must be ascending, got {boundaries[position - 1]} followed by {boundaries[position]} at "
            f"position {position}"
        )
    return ops.bucketize(x, limits.to(x.device)).to(torch.int32)
