"""Behind :class:`RaggedTensor`: adding padding to rows, and finding where it begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._sparse_tensor import as_int64, as_scalar_like, check_kind, device_of, take, with_last
from .arguments import as_tensor


def kept_lengths(dense: Tensor | np.ndarray, lengths: Any, padding: Any) -> Tensor:
    """Return the length of each row to keep: the given length, the part before padding, or all if both are None."""
    rows, columns = dense.shape[:2]
    if lengths is not None:
        kept = as_int64("lengths", lengths, device_of(dense)).clamp(0, columns)
        if kept.shape != (rows,):
            raise ValueError(f"lengths must have shape [{rows}], one for each row, got {list(kept.shape)}")
        return kept
    if padding is None:
        return torch.full((rows,), columns, device=device_of(dense))
    if isinstance(dense, Tensor):
        differs = dense != default_like(dense.flatten(0, 1), padding, "padding")
    else:
        differs = torch.from_numpy((dense != as_scalar_like("padding", padding, dense)).astype(bool))
    if differs.dim() > 2:
        differs = differs.flatten(2).any(2)
    if columns == 0:
        return torch.zeros(rows, dtype=torch.int64, device=differs.device)
    return torch.where(differs, torch.arange(1, columns + 1, device=differs.device), 0).amax(1)


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


def padded(ragged: Any, sizes: list[int | None], default: Any) -> Any:
    """Return the dense form of a RaggedTensor: pad its outer rows, then the inner dimensions."""
    inner, splits = ragged.values, ragged.row_splits
    if hasattr(inner, "row_splits"):
        bounds = inner.bounding_shape().tolist()
        wanted = [b if s is None else s for s, b in zip(sizes[2:], bounds[1:], strict=True)]
        inner = padded(inner, [None, *wanted], default)
    elif any(size not in (None, have) for size, have in zip(sizes[2:], inner.shape[1:], strict=True)):
        raise ValueError(f"shape must have the values' inner sizes {list(inner.shape[1:])}, got {sizes[2:]}")
    rows = splits.shape[0] - 1 if sizes[0] is None else sizes[0]
    columns = int(ragged.bounding_shape()[1]) if sizes[1] is None else sizes[1]
    splits = torch.cat([splits[: rows + 1], splits[-1:].expand(max(rows + 1 - splits.shape[0], 0))])
    places = splits[:-1].unsqueeze(1) + torch.arange(columns, device=splits.device)
    places = torch.where(places < splits[1:].unsqueeze(1), places, inner.shape[0])
    return take(with_last(inner, default), places)
