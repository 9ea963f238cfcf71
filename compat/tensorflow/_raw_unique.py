"""The operators of ``tf.raw_ops`` that find the distinct slices along an axis."""

from __future__ import annotations

from typing import Any

import torch

from ._unique import Unique, UniqueWithCounts, unique_along


def UniqueV2(*, x: Any, axis: Any, out_idx: torch.dtype = torch.int32, name: str | None = None) -> Unique:
    """
    Return the distinct slices of ``x`` along an axis, in order of first appearance.

    Args:
        x: of any rank, or of rank 1 without an axis; dtypes as of :func:`torchsparse_rec.compat.tensorflow.unique`. A
            slice with a NaN equals no other.
        axis: a vector of int32 or int64: ``[]`` for no axis, or ``[axis]``, which may be negative.
        out_idx: dtype of ``idx``: torch.int32 or torch.int64.
        name: ignored.

    Raises:
        ValueError: for another ``axis``, an ``axis`` that ``x`` does not have, and other dtypes.

    Example:
        >>> UniqueV2(x=torch.tensor([[1, 2], [3, 4], [1, 2]]), axis=[0])
        Unique(y=tensor([[1, 2],
                [3, 4]]), idx=tensor([0, 1, 0], dtype=torch.int32))
    """
    return Unique(*unique_along(x, axis, out_idx)[:2])


def UniqueWithCountsV2(
    *, x: Any, axis: Any, out_idx: torch.dtype = torch.int32, name: str | None = None
) -> UniqueWithCounts:
    """
    Compute :func:`UniqueV2`, and count how often each slice occurs.

    Example:
        >>> UniqueWithCountsV2(x=torch.tensor([[1, 1], [3, 3]]), axis=[-1]).count
        tensor([2], dtype=torch.int32)
    """
    return UniqueWithCounts(*unique_along(x, axis, out_idx))
