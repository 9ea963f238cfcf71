"""Behind :class:`RaggedTensor`: where rows begin, from other forms, and the indices of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ._arguments import as_size
from ._sparse_tensor import SparseTensor


def splits_of_rowids(ids: Tensor, count: int, nrows: Any) -> Tensor:
    """Return where each row of ``count`` values begins, from their rows; raise ``ValueError`` for wrong ones."""
    if ids.dim() != 1 or ids.shape[0] != count:
        raise ValueError(
            f"value_rowids must have one element for each of the {count} values, got shape {list(ids.shape)}"
        )
    least = int(ids[-1]) + 1 if ids.shape[0] else 0
    rows = least if nrows is None else as_size("nrows", nrows)
    if rows < max(least, 0):
        raise ValueError(f"nrows must be at least {least}, the last of value_rowids + 1, got {rows}")
    if bool((ids.diff() < 0).any()) or (ids.shape[0] and int(ids[0]) < 0):
        raise ValueError(f"value_rowids must be sorted and not negative, got {ids.tolist()}")
    return ops.row_ids_to_offsets(ids, rows)


def lengths_without_holes(st_input: SparseTensor) -> Tensor:
    """Return the length of each row of a sparse tensor of rank 2; raise ``ValueError`` for holes and wrong rows."""
    if len(st_input.shape) != 2:
        raise ValueError(f"st_input must have rank 2, got shape {list(st_input.shape)}")
    rows, columns, nrows = st_input.indices[:, 0], st_input.indices[:, 1], st_input.shape[0]
    wanted = torch.where(rows[1:] == rows[:-1], columns[:-1] + 1, 0)
    if bool((columns[:1] != 0).any()) or bool((columns[1:] != wanted).any()):
        raise ValueError("st_input must have rows that begin at column 0 and have no holes")
    if bool(((rows < 0) | (rows >= nrows)).any()):
        raise ValueError(f"st_input must have rows in [0, {nrows}), got {rows.tolist()}")
    return torch.bincount(rows, minlength=nrows)


def indices_of_rows(nested_row_splits: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the index of each value of nested rows, whose innermost values have ``sizes``."""
    outer = nested_row_splits[0]
    columns = [torch.arange(outer.shape[0] - 1, device=outer.device)]
    for splits in nested_row_splits:
        row = ops.offsets_to_row_ids(splits)
        place = torch.arange(row.shape[0], device=row.device) - splits[row]
        columns = [*(column[row] for column in columns), place]
    for size in sizes:
        place = torch.arange(size, device=columns[0].device).repeat(columns[0].shape[0])
        columns = [*(column.repeat_interleave(size) for column in columns), place]
    return torch.stack(columns, 1)
