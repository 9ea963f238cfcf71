"""Behind :class:`RaggedTensor`: adding padding to rows, and finding where it begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._arguments import as_tensor
from ._sparse_tensor import as_scalar_like, check_kind


def lengths_without_padding(dense: Tensor | np.ndarray, padding: Any) -> Tensor:
    """Return the length of each row up to its last element that is not padding."""
    if isinstance(dense, Tensor):
        differs = dense != default_like(dense.flatten(0, 1), padding, "padding")
    else:
        differs = torch.from_numpy((dense != as_scalar_like("padding", padding, dense)).astype(bool))
    if differs.dim() > 2:
        differs = differs.flatten(2).any(2)
    places = torch.arange(1, differs.shape[1] + 1, device=differs.device)
    if differs.shape[1] == 0:
        return places.new_zeros(differs.shape[0])
    return torch.where(differs, places, 0).amax(1)


def wanted_sizes(shape: Any, rank: int) -> list[int | None]:
    given = [None] * rank if shape is None else list(shape)
    sizes: list[int | None] = [None if size is None else int(size) for size in given]
    if len(sizes) != rank or any(size is not None and size < 0 for size in sizes):
        raise ValueError(f"shape must have {rank} sizes, each None or >= 0, got {shape}")
    return sizes


def default_like(values: Any, default: Any, argument: str = "default_value") -> Any:
    """Convert a padding value to the values' dtype: a scalar, or of the shape of one of ``values``."""
    if not isinstance(values, Tensor):
        return b"" if default is None else as_scalar_like(argument, default, values)
    if default is None:
        return values.new_zeros(())
    if isinstance(default, (list, tuple)) or (isinstance(default, np.ndarray) and default.ndim > 0):
        numbers = np.array(default).tolist()
        check_kind(argument, numbers, values.dtype)
        given = as_tensor(argument, numbers, device=values.device).to(values.dtype)
    elif isinstance(default, Tensor) and default.dim() > 0:
        given = default
    else:
        return as_scalar_like(argument, default, values)
    if given.dtype != values.dtype or given.shape != values.shape[1:]:
        raise ValueError(
            f"{argument} must be a scalar or have shape {list(values.shape[1:])}, and dtype {values.dtype}, got "
            f"{given.dtype} of shape {list(given.shape)}"
        )
    return given


def with_last(values: Any, last: Any) -> Any:
    """Return ``values`` and one more row: ``last``, spread over the row's innermost dimensions."""
    if isinstance(values, Tensor):
        return torch.cat([values, last.expand(1, *values.shape[1:])])
    row = np.empty((1, *values.shape[1:]), dtype=object)
    row[...] = last
    return np.concatenate([values, row])
