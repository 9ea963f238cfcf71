"""Behind :class:`RaggedTensor`: adding padding to rows, and finding where it begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._arguments import as_tensor
from ._sparse_tensor import as_int64, as_scalar_like, check_kind, device_of, take


def kept_lengths(dense: Tensor | np.ndarray, lengths: Any, padding: Any) -> Tensor:
    """Return how much of each row of a dense tensor to keep: what ``lengths`` say, what is not padding, or all."""
    rows, columns = dense.shape[:2]
    if padding is not None:
        return _lengths_without_padding(dense, padding)
    if lengths is None:
        return torch.full((rows,), columns, device=device_of(dense))
    kept = as_int64("lengths", lengths, device_of(dense)).clamp(0, columns)
    if kept.shape != (rows,):
        raise ValueError(f"lengths must have shape [{rows}], one for each row, got {list(kept.shape)}")
    return kept


def _lengths_without_padding(dense: Tensor | np.ndarray, padding: Any) -> Tensor:
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


def _with_last(values: Any, last: Any) -> Any:
    """Return ``values`` and one more row: ``last``, spread over the row's innermost dimensions."""
    if isinstance(values, Tensor):
        return torch.cat([values, last.expand(1, *values.shape[1:])])
    row = np.empty((1, *values.shape[1:]), dtype=object)
    row[...] = last
    return np.concatenate([values, row])


def padded_rows(values: Any, splits: Tensor, rows: int, columns: int, default: Any) -> Any:
    """Return so many rows and columns of the values that ``splits`` part, with ``default`` where there is none."""
    splits = torch.cat([splits[: rows + 1], splits[-1:].expand(max(rows + 1 - splits.shape[0], 0))])
    places = splits[:-1].unsqueeze(1) + torch.arange(columns, device=splits.device)
    places = torch.where(places < splits[1:].unsqueeze(1), places, values.shape[0])
    return take(_with_last(values, default), places)
